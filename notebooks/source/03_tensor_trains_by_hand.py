# %% [markdown]
# # 03 Tensor trains by hand
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. turn a weight matrix into a tensor and back, with every index in its place;
# 2. count the parameters of a train and name the largest useful rank of each bond;
# 3. build a train with one SVD per bond, and check it against `tensorly`.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.ShapePanel()

# %%
from comera_lab.teaching import check, guess, progress

guess("03")

# %% [markdown]
# ## An index has digits
#
# You write the number of a day as hours and minutes: minute 137 of the day is 2:17. One index, two
# digits, in the mixed base (24, 60).
#
# Do the same with the pixel number of an image. Choose **modes** whose product is 784, and pixel number
# 137 becomes a few small digits.

# %%
import torch

modes = (14, 8, 7)
pixel = torch.tensor(137)
print("pixel 137 in base", modes, "is", [int(digit) for digit in torch.unravel_index(pixel, modes)])

# %% [markdown]
# `reshape` does exactly this to a whole table: nothing moves in memory, each index is only *written*
# with more digits. The first mode is the slowest digit, the last one the fastest.
#
# ## A train of cores
#
# Give every digit its own small block of numbers, a **core** of shape
#
# > (rank on the left, mode, rank on the right)
#
# To read one entry of the big tensor, each core picks the slice of its digit. A slice is a small matrix.
# Multiply these small matrices from left to right; one number comes out. That is why the train must open
# and close with rank 1: **r0 = rd = 1**.

# %%
generator = torch.Generator().manual_seed(0)
ranks = (1, 3, 2, 1)
cores = [
    torch.randn(left, mode, right, generator=generator)
    for left, mode, right in zip(ranks, modes, ranks[1:], strict=False)
]
first, second, third = (core[:, digit] for core, digit in zip(cores, (2, 3, 4), strict=True))
print("slices", tuple(first.shape), tuple(second.shape), tuple(third.shape))
print("entry at digits (2, 3, 4):", (first @ second @ third).item())

# %% [markdown]
# ## Exercise: how many numbers is that?

# %% tags=["exercise:03.1"]
def tt_params(modes, ranks):
    """Numbers in all cores. ranks has the closing 1s: tt_params((14, 8, 7), (1, 3, 2, 1))."""
    # solution
    return sum(ranks[k] * modes[k] * ranks[k + 1] for k in range(len(modes)))
    # end


check("03.1", tt_params)

# %% [markdown]
# ## Exercise: put the train back together
#
# Now all entries at once. Two neighbours share a bond: sum over it with `torch.tensordot(a, b, dims=1)`,
# which joins the last axis of `a` to the first of `b`.

# %% tags=["exercise:03.2"]
def tt_full(cores):
    """Cores (rank, mode, rank) -> the full tensor, one axis per core."""
    # solution
    full = cores[0]
    for core in cores[1:]:
        full = torch.tensordot(full, core, dims=1)
    return full.squeeze(0).squeeze(-1)
    # end


check("03.2", tt_full)

# %% [markdown]
# ## How thick can a bond be?
#
# In the panel some sliders stop early. Here is why. Cut the train at one bond: everything to the left
# becomes the rows of a matrix, everything to the right its columns. And a matrix has no more rank than
# its smaller side.

# %% tags=["exercise:03.3"]
from math import prod


def max_ranks(modes):
    """The largest useful rank of every bond, closing 1s included: one more entry than modes."""
    # solution
    return tuple(min(prod(modes[:k]), prod(modes[k:])) for k in range(len(modes) + 1))
    # end


check("03.3", max_ranks)

# %% [markdown] tags=["solution"]
# **Why.** At the ends an empty product is 1, so the closing ranks come out by themselves: no special case needed.

# %% [markdown]
# ## From a layer to a tensor
#
# Now a weight matrix. Its inputs are split into input modes, its outputs into output modes. The order
# in this kit: *all input modes first, then all output modes*.
#
# One trap is so common that it has its own message: which side does `nn.Linear` store first?

# %%
from torch import nn

print("nn.Linear(784, 512).weight has shape", tuple(nn.Linear(784, 512).weight.shape))

# %% tags=["exercise:03.4"]
def weight_to_tensor(weight, in_modes, out_modes):
    """nn.Linear weight (out, in) -> tensor with the input modes first, then the output modes."""
    # solution
    return weight.T.reshape(*in_modes, *out_modes)
    # end


check("03.4", weight_to_tensor)

# %% [markdown] tags=["solution"]
# **Why.** Reshape reads the numbers row by row. The rows of `weight` are outputs; without the transpose the digits
# of an input index would be taken from an output index, and no error would tell you.

# %% [markdown]
# ## TT-SVD: one cut per bond
#
# Lesson 02 cut a matrix once. A tensor is cut once per bond, from left to right:
#
# 1. write what is left as a matrix: rows = (left rank, this mode), columns = everything else;
# 2. SVD, keep the strongest `rank` layers;
# 3. `U` becomes the next core; `S` and `Vh` travel on to the right.
#
# Fill in the two lines of step 3.

# %% tags=["exercise:03.5"]
def tt_svd(tensor, rank):
    """Tensor -> list of cores (left rank, mode, right rank), no bond above `rank`."""
    cores, rest, left = [], tensor, 1
    for mode in tensor.shape[:-1]:
        U, S, Vh = torch.linalg.svd(rest.reshape(left * mode, -1), full_matrices=False)
        keep = min(rank, len(S))
        # solution
        core = U[:, :keep].reshape(left, mode, keep)
        rest = S[:keep, None] * Vh[:keep]
        # end
        cores.append(core)
        left = keep
    return [*cores, rest.reshape(left, tensor.shape[-1], 1)]


check("03.5", tt_svd)

# %% [markdown] tags=["solution"]
# **Why.** `U` has orthonormal columns, so cutting at one bond does not enlarge the error of an earlier cut. That is
# why the squared errors of the bonds simply add up in the bound below.

# %% [markdown]
# ## The same with tensorly
#
# `tensorly` is the library of this field. It and this kit must agree: same core shapes, same error.
# The tensor: sixty handwritten digits, stacked (image, row, column).

# %%
import tensorly
from tensorly.decomposition import tensor_train

from comera_lab import cores as kit
from comera_lab.experiments.datasets import digits

cube = digits(8).train_x[:60].reshape(60, 8, 8)
theirs = tensor_train(tensorly.tensor(cube.numpy()), rank=[1, 6, 6, 1])
ours = kit.tt_svd(cube, 6)
print("tensorly", [tuple(core.shape) for core in theirs])
print("the kit ", [tuple(core.shape) for core in ours])

# %%
error_theirs = (cube - torch.from_numpy(theirs.to_tensor())).norm() / cube.norm()
error_ours = (cube - kit.to_dense(ours)).norm() / cube.norm()
print(f"relative error: tensorly {error_theirs:.4f}, the kit {error_ours:.4f}  (computed here)")

# %% [markdown]
# ## The error has a bound
#
# Each cut leaves a tail behind, exactly as in lesson 02. Together the error is at most the root of the
# sum of the squared tails of all cuts (Oseledets, 2011, theorem 2.2).

# %%
tails = []
for cut in range(1, cube.ndim):
    S = torch.linalg.svdvals(cube.reshape(prod(cube.shape[:cut]), -1))
    tails.append(S[6:].square().sum())
bound = torch.stack(tails).sum().sqrt()
error = (cube - kit.to_dense(ours)).norm()
print(f"error {error:.3f} is at most the bound {bound:.3f}  (computed here)")

# %%
progress("03")

# %% [markdown]
# ## What to remember
#
# - An index can be written with digits; `reshape` only rewrites it.
# - A core has three sides: rank, mode, rank. The train opens and closes with rank 1.
# - A bond can be no thicker than the smaller side of its cut.
# - `nn.Linear` stores (out, in). Transpose before you reshape.
#
# ## Where next
#
# [04 A TT layer that trains](04_a_tt_layer_that_trains.ipynb): multiply with a train without ever
# building the matrix, and find out when that is faster.
#
# *Source: I. V. Oseledets, "Tensor-train decomposition", SIAM Journal on Scientific Computing 33, 2011.
# Library: J. Kossaifi and others, TensorLy, Journal of Machine Learning Research 20, 2019.*
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
