# %% [markdown]
# # 04 A TT layer that trains
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. multiply with a tensor train without building its matrix;
# 2. say from which width on it is faster, on *your* machine, and why not before;
# 3. compare two models fairly: in equal seconds, not in equal steps.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.RacePanel()

# %% [markdown]
# ## The race
#
# Two networks, same digits, same seed, same optimizer. One has dense layers, the other tensor trains.
# Press **Start**. They take turns, so that neither disturbs the other's clock.
#
# Look at four things: accuracy, loss, milliseconds a step, and memory. Smaller is plain to see. Is it
# also faster? And as accurate? Try width 64 as well, and higher ranks: a train with few numbers has less
# freedom, and freedom is what you pay memory for.

# %%
from comera_lab.teaching import check, guess, progress

guess("04")

# %% [markdown]
# ## Find the crossing yourself
#
# One layer, as wide as you choose. Press **Time both** at several widths, from 64 up to 2048, and watch
# where the two lines cross.

# %%
lab.CrossingPanel()

# %% [markdown]
# ## Why it is so
#
# Below the crossing the tensor train is *slower*, though it does less arithmetic. Every call into the
# library costs some time before the first number is multiplied, and a train needs several calls where a
# dense layer needs one. A dense layer grows with the square of its width, a train much more slowly, and
# so the lines must cross.
#
# Remember this when somebody shows you a table with sizes only.

# %% [markdown]
# ## One product becomes two thin ones
#
# Cut the train in the middle, between input and output modes. The left half, folded together, is a tall
# thin matrix **A** (inputs x rank). The right half is a flat one, **B** (rank x outputs).
#
# > x meets A first: the result is thin. Then B makes it wide again.
#
# The kit weighs several orders against each other before it multiplies:

# %%
import torch

from comera_lab import TTLinear

generator = torch.Generator().manual_seed(0)
layer = TTLinear(784, 512, rank=8, generator=generator)
print(layer.plan(rows=64))

# %% [markdown]
# ## Exercise: fold the left half
#
# The cores of the input side, folded into A. It is `tt_full` of lesson 03, with the last bond left open.

# %% tags=["exercise:04.1"]
def half_chain(cores):
    """Cores (1, n1, r1), (r1, n2, r2), ... -> matrix A (n1 * n2 * ..., last rank)."""
    # solution
    chain = cores[0]
    for core in cores[1:]:
        chain = torch.tensordot(chain, core, dims=1)
    return chain.reshape(-1, cores[-1].shape[-1])
    # end


check("04.1", half_chain)

# %% [markdown]
# ## Exercise: forward
#
# Use A and B, and mind the brackets: the check also looks at the largest tensor you make on the way.

# %% tags=["exercise:04.2"]
def tt_linear(x, A, B, bias):
    """x (rows, in), A (in, rank), B (rank, out), bias (out) -> y (rows, out)."""
    # solution
    return x @ A @ B + bias
    # end


check("04.2", tt_linear)

# %% [markdown] tags=["solution"]
# **Why.** Python multiplies from left to right, so `x @ A @ B` is `(x @ A) @ B`. Brackets around `A @ B` give the
# same numbers and build the very matrix that the train was meant to avoid.

# %% [markdown]
# Does the layer of the kit give what its matrix would give?

# %%
x = torch.randn(64, 784, generator=generator)
with torch.no_grad():
    by_cores = layer(x)
    by_matrix = x @ layer.to_dense().T + layer.bias
print("largest difference:", (by_cores - by_matrix).abs().max().item(), " (computed here)")

# %% [markdown]
# ## Exercise: the price of the two orders
#
# A product of an (a, b) by a (b, c) matrix costs `2 a b c` FLOPs: so many multiplications, and as many
# additions. Give the price of **(x A) B** and of **x (A B)**.

# %% tags=["exercise:04.3"]
def flops(rows, in_features, rank, out_features):
    """(FLOPs of (x A) B, FLOPs of x (A B))"""
    # solution
    thin_first = 2 * rows * in_features * rank + 2 * rows * rank * out_features
    matrix_first = 2 * in_features * rank * out_features + 2 * rows * in_features * out_features
    return thin_first, matrix_first
    # end


check("04.3", flops)

# %% [markdown] tags=["solution"]
# **Why.** Thin first costs `rank * (in + out)` multiplications a row, matrix first `in * out`. The ratio is what
# low rank buys; the price of making A B comes on top, and does not depend on the rows.

# %% [markdown]
# FLOPs are a *prediction* of time, and you have seen how far off it can be: at small widths the calls
# cost more than the arithmetic. That is why the kit measures.

# %% [markdown]
# ## Exercise: a fair race
#
# After equal *steps* the slower model has had more time. A fair question is: how good is each after equal
# *seconds*? Each row of a run knows its time and its accuracy; here are the first rows of a made-up run.

# %%
made_up_run = [
    {"elapsed_s": 1.0, "accuracy": 0.30},
    {"elapsed_s": 2.0, "accuracy": 0.80},
    {"elapsed_s": 3.0, "accuracy": 0.60},
    {"elapsed_s": 5.0, "accuracy": 0.90},
]

# %% tags=["exercise:04.4"]
def accuracy_within(rows, seconds):
    """The best accuracy among the rows whose elapsed_s is at most `seconds`; 0.0 if there is none."""
    # solution
    inside = [row["accuracy"] for row in rows if row["elapsed_s"] <= seconds]
    return max(inside, default=0.0)
    # end


check("04.4", accuracy_within)

# %% [markdown]
# Back to the race: choose **seconds** as the horizontal axis and look again. Then make the layers wider
# and race once more.

# %%
progress("04")

# %% [markdown]
# ## What to remember
#
# - Let x meet A first, then B. The big matrix is never built, neither forward nor backward.
# - Fewer numbers is not fewer milliseconds: small layers are slower as trains, wide ones faster.
# - Compare in equal seconds, and say on which machine.
#
# ## Where next
#
# Who chooses the ranks? So far you did. In CoMERA the training itself shrinks them (Z. Yang and others,
# "CoMERA: Computing- and Memory-Efficient Training via Rank-Adaptive Tensor Optimization", NeurIPS 2024,
# arXiv 2405.14377). The contraction in this lesson follows that paper's idea of multiplying through the
# middle bond; the code is written anew.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
