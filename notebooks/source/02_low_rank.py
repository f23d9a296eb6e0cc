# %% [markdown]
# # 02 Low rank: the SVD as a knife
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about forty minutes. Afterwards you will be able to
#
# 1. cut a matrix down to a rank and know the error *before* you cut;
# 2. choose the rank that keeps a given share of the energy;
# 3. say when low rank does not pay.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.SpectrumPanel()

# %%
from comera_lab.teaching import check, guess, progress

guess("02")

# %% [markdown]
# ## A matrix that hardly holds anything
#
# Multiply a column by a row: every entry is one number of the column times one of the row. The result
# looks like a full table, but all its rows point in one direction. Its **rank** is 1.

# %%
import torch

column = torch.tensor([[1.0], [2.0], [3.0]])
row = torch.tensor([[10.0, 20.0, 30.0, 40.0]])
print(column @ row)

# %% [markdown]
# Twelve numbers, made from seven. The larger the table, the better the bargain.
#
# Real tables are not of rank 1. But many are *nearly* a sum of a few such layers, the strongest first.
# The **singular value decomposition** (SVD) finds these layers, and the singular values say how strong
# each one is. It is a knife: it tells you where to cut.

# %% [markdown]
# ## Real data: all the digits in one table
#
# Every row is one handwritten digit, 64 pixels long.

# %%
from comera_lab.experiments.datasets import digits

images = digits(8).train_x  # (digits, pixels)
singular_values = torch.linalg.svdvals(images)
print("table", tuple(images.shape), "  singular values", singular_values.numel())
print("largest ", [round(value, 1) for value in singular_values[:5].tolist()])
print("smallest", [round(value, 1) for value in singular_values[-5:].tolist()])

# %% [markdown]
# ## Exercise: make the cut
#
# `torch.linalg.svd` gives `U`, `S`, `Vh` with `W = U @ diag(S) @ Vh`. Keep the strongest `rank` layers.

# %% tags=["exercise:02.1"]
def truncate(W, rank):
    """W (rows, columns) -> the nearest matrix of that rank, same shape."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    # solution
    return U[:, :rank] * S[:rank] @ Vh[:rank]
    # end


check("02.1", truncate)

# %% [markdown] tags=["solution"]
# **Why.** `U[:, :rank] * S[:rank]` scales the columns of U, which equals a product with a diagonal matrix without
# building one. Eckart and Young proved in 1936 that no matrix of that rank is nearer.

# %% [markdown]
# ## See the cut
#
# One digit, rebuilt from more and more layers of the *whole* table (by the kit's own knife, so the
# picture is there even if your exercise is not finished).

# %%
from comera_lab.teaching.exercises_02 import truncate as knife

pictures = {f"rank {rank}": knife(images, rank)[5] for rank in (1, 4, 8, 16, 32)}
lab.image_row({**pictures, "original": images[5]}, side=8)

# %% [markdown]
# ## The error is known beforehand
#
# Cutting leaves the tail of the spectrum behind. Its size *is* the error: the root of the sum of the
# squares of what was cut away. (Size means the Frobenius norm: square every entry, add, take the root.)
#
# Write it as a function of the singular values alone. No matrix needed!

# %% tags=["exercise:02.2"]
def truncation_error(S, rank):
    """Frobenius norm of W - truncate(W, rank), from the singular values S of W."""
    # solution
    tail = S[rank:]
    return tail.square().sum().sqrt()
    # end


check("02.2", truncation_error)

# %% [markdown]
# Does it hold on the digits? Left, the difference of two tables; right, the spectrum alone.

# %%
rank = 16
print("measured on the tables:", (images - knife(images, rank)).norm().item())
print("from the spectrum     :", singular_values[rank:].norm().item())

# %% [markdown]
# ## How much is enough? The energy rule
#
# The squares of the singular values add up to the **energy** of the table. Keep as many layers as you
# need for, say, nine tenths of it.

# %% tags=["exercise:02.3"]
def rank_for_energy(S, energy):
    """The smallest rank whose squared singular values hold the share `energy` (0 to 1)."""
    # solution
    share = S.square().cumsum(0) / S.square().sum()
    return int((share < energy).sum()) + 1
    # end


check("02.3", rank_for_energy)

# %% [markdown]
# ## When low rank fails
#
# The digits against white noise of the same shape. How many layers does each need?

# %%
noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
for name, table in (("digits", images), ("noise", noise)):
    energy = torch.linalg.svdvals(table).square().cumsum(0)
    needed = [int((energy < share * energy[-1]).sum()) + 1 for share in (0.5, 0.9, 0.99)]
    print(f"{name:7} rank for 50, 90 and 99 % of the energy: {needed}")

# %% [markdown]
# The very first layer of the digits holds a large share alone: it is close to the *average* digit, bright
# in the middle and dark at the rim. Noise has no favourite direction, so there is little to cut away, and
# no method of this kit will change that. A trained weight matrix lies somewhere between the two.

# %% [markdown]
# ## When low rank costs more than it saves
#
# Instead of `W` you store two thin matrices, `(rows, rank)` and `(rank, columns)`. At some rank the two
# together are no longer smaller than `W`. Which is the **largest rank that still saves something**?

# %% tags=["exercise:02.4"]
def break_even_rank(rows, columns):
    """The largest rank whose two factors hold fewer numbers than the matrix."""
    # solution
    return (rows * columns - 1) // (rows + columns)
    # end


check("02.4", break_even_rank)

# %% [markdown] tags=["solution"]
# **Why.** `rank * (rows + columns) < rows * columns`. For whole numbers "strictly smaller" means: divide one less.
# For a square matrix the limit is just below half the full rank.

# %%
progress("02")

# %% [markdown]
# ## What to remember
#
# - The SVD sorts a table into layers, strongest first. Cutting the tail is the best you can do.
# - The tail of the spectrum is the error. Look at the spectrum before you cut.
# - Nine tenths of the energy is not nine tenths of the rank.
# - Two factors save only below the break-even rank.
#
# ## Where next
#
# [03 Tensor trains by hand](03_tensor_trains_by_hand.ipynb): cut not once but many times, and save far
# more.
#
# *Source: C. Eckart and G. Young, "The approximation of one matrix by another of lower rank",
# Psychometrika 1, 1936.*
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
