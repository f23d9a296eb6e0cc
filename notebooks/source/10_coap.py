# %% [markdown]
# # 10 COAP
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. carry a basis along with a refresh, and say what it costs and keeps beside a full SVD;
# 2. find out whether a step on the basis moves it at all, from the units of its loss;
# 3. rebuild a published optimizer size from shapes, and compare optimizers by more than one run.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.OptimizerRacePanel()

# %% [markdown]
# ## A race of optimizers
#
# Press **Start**. One network per optimizer, the same digits in the same order, each at the rate that
# did best for it. Look at three things: the loss, the bytes of optimizer state, the milliseconds of a
# step.
#
# Who wins? Do not say yet. Press **Three seeds**: the same race from other random starts. The line
# becomes a band. Now the panel gives its verdict, and it may be: *cannot tell*.
#
# Tick **flora** and **coap-8bit** as well, and choose **bytes** as x axis.

# %%
import torch

from comera_lab.teaching import check, guess, progress

guess("10")

# %% [markdown]
# ## Between the SVD and chance
#
# GaLore looks anew at every update and forgets what it knew. But the old basis is nearly right. COAP
# starts from it: send the old directions through the gradient, forth and back, and make them
# orthonormal again. This is a **refresh**: one step of an iteration whose end is the SVD.

# %% [markdown]
# ## Exercise: refresh in three lines
#
# Look at G through the old basis, make what you see orthonormal, and take the small SVD of G as seen
# from there.

# %% tags=["exercise:10.1"]
def warm_refresh(G, P):
    """G (rows, cols), old basis P (cols, rank) -> new basis (cols, rank), orthonormal columns."""
    # solution
    Q = torch.linalg.qr(G @ P).Q
    return torch.linalg.svd(Q.T @ G, full_matrices=False).Vh.T
    # end


check("10.1", warm_refresh)

# %% [markdown] tags=["solution"]
# **Why.** The new basis spans G^T G P, a step of the power method on many vectors at once. The kit
# gets the same span without any SVD, and its columns continue the old ones, so that moments keep
# their meaning.

# %% [markdown]
# What does it keep, and what does it cost? Two real gradients of a wider network, from two batches.
# The basis comes from the first one; the second is new to it.

# %%
import time
from statistics import median

from torch.nn.functional import cross_entropy

from comera_lab.experiments.datasets import digits
from comera_lab.models.mlp import MLP
from comera_lab.optimizers.projection import captured_energy, refresh_basis, svd_basis

data, wide = digits(28), MLP((784, 512, 512, 10), generator=torch.Generator().manual_seed(0))


def gradient_of(rows):
    wide.zero_grad()
    cross_entropy(wide(data.train_x[rows]), data.train_y[rows]).backward()
    return wide.hidden[1].weight.grad.clone()


first, second = gradient_of(slice(0, 64)), gradient_of(slice(64, 128))
old = svd_basis(first, rank=6)

# %%
def timed_ms(make):
    times = []
    for _ in range(5):
        began = time.perf_counter()
        basis = make()
        times.append(1e3 * (time.perf_counter() - began))
    return basis, median(times)


ways = {"full SVD": lambda: svd_basis(second, 6), "warm refresh": lambda: refresh_basis(second, old)}
print(f"old basis, not touched: {captured_energy(second, old):.1%} of the energy")
for name, make in ways.items():
    basis, ms = timed_ms(make)
    kept = captured_energy(second, basis)
    print(f"{name:<13} {kept:7.1%} of the energy, {ms:8.2f} ms (measured here)")

# %% [markdown]
# Nearly the same directions for a small part of the time. The gap grows with the size of the matrix:
# a full SVD costs the third power of the width, a refresh two thin products.

# %% [markdown]
# ## A step between two refreshes
#
# Even a refresh is not made at every update. In between, COAP takes one **alignment step**: a
# gradient step on the basis itself. Its loss has two factors. One says how much of the gradient the
# basis misses; the other how far the lifted momentum points away from the gradient:
#
# > loss(P)  =  mean square of (G P P^T - G)   x   (1 - cosine of M P^T and G)
#
# P goes down along its slope by a fixed rate of 0.1. Stop here, and think of units.

# %% [markdown]
# ## Exercise: units
#
# Somebody multiplies the loss of the network by c, so every gradient is c times as large. By what
# factor does the step on the basis change: in the published form, and if G is divided by its own size
# first?

# %% tags=["exercise:10.2"]
def move_factor(c, scale_free):
    """How many times longer a step of fixed rate on P becomes when G turns into c * G."""
    # solution
    return 1.0 if scale_free else c**2
    # end


check("10.2", move_factor)

# %% [markdown]
# Gradients of language models have entries of a ten-thousandth and less: squared, that is nothing.
# And the format has a grain: bf16 keeps about three digits, so a smaller step is rounded away. Does P
# move?

# %%
from comera_lab.optimizers.projection import align_basis, project, subspace_angle_degrees

P = svd_basis(first, rank=6)
for kind in ("paper", "scale-free"):
    for c in (1.0, 1e-2, 1e-4):
        turned = []
        for dtype in (torch.float32, torch.bfloat16):
            G, old = (c * second).to(dtype), P.to(dtype)
            new = align_basis(G, old, project((c * first).to(dtype), old), kind=kind)
            angle = f"{subspace_angle_degrees(old, new):.1g} degrees"
            turned.append("not one bit" if torch.equal(new, old) else angle)
        print(f"{kind:<10} gradients x {c:<6g} fp32 {turned[0]:<14} bf16 {turned[1]} (computed here)")

# %% [markdown]
# In bf16 the published step leaves P as it is, bit for bit. Nothing warns you: training goes on with
# a refresh now and then. The kit's default takes G in units of its own size and turns P at every
# scale; it also makes P orthonormal again, which a plain step does not.
#
# Does that bring anything? Ask the panel of lesson [09](09_projecting_gradients.ipynb): **refresh
# only** against **refresh + alignment**. And here: refresh factor 1 and an interval of 100 refreshes
# as often as now, without any alignment. Compare with three seeds.

# %% [markdown]
# ## Eight bits
#
# The moments of COAP are small; a byte for each number makes them smaller still. A block of numbers
# is divided by its largest, and every number becomes the place of the nearest of 256 values, the
# **map**.

# %% [markdown]
# ## Exercise: quantize a block
#
# Return the places in `code`, and the scale to multiply with when you read them.

# %% tags=["exercise:10.3"]
def quantize(x, code):
    """x (n,), code (256,) of values from -1 to 1 -> (places in code, whole numbers (n,); scale)."""
    # solution
    scale = x.abs().max()
    return (x[:, None] / scale - code).abs().argmin(dim=1), scale
    # end


check("10.3", quantize)

# %% [markdown]
# A mean of gradients has both signs. A mean of *squares* has not: with a signed map half of the
# places are never used. Here are real squares, of this network after one gradient:

# %%
from comera_lab.optimizers.quantized import (
    dequantize_blockwise,
    quantize_blockwise,
    signed_map,
    unsigned_map,
)

squares = second.square()
for name, code in (("signed", signed_map()), ("unsigned", unsigned_map())):
    codes, scales = quantize_blockwise(squares, code)
    back = dequantize_blockwise(codes, scales, code, squares.shape)
    error = ((back - squares).abs() / squares.clamp_min(1e-30)).median()
    used = (code >= 0).sum()
    print(f"{name:<9} {used} of 256 values can be used, typical error {error:.2%}, "
          f"{(back == 0).float().mean():.2%} became 0 (computed here)")

# %% [markdown]
# Adam divides by the root of that number, so a square that becomes 0 is dangerous: its weight takes a
# huge step. The kit uses the signed map for the mean, the unsigned one for the squares, blocks of
# 256, and leaves small tensors alone.

# %% [markdown]
# ## Exercise: a published size
#
# `projected`: shapes of the matrices with a basis. `rest`: how many numbers each other tensor has;
# Adam keeps its two moments in full. How many numbers does the optimizer keep?

# %% tags=["exercise:10.4"]
def optimizer_elements(projected, rest, rank):
    """projected [(rows, cols), ...], rest [numbers, ...] -> numbers kept: moments and bases."""
    # solution
    low = sum((2 * max(shape) + min(shape)) * rank for shape in projected)
    return low + 2 * sum(rest)
    # end


check("10.4", optimizer_elements)

# %% [markdown]
# Now LLaMA with a billion weights, in bf16, at rank 512: attention and feed-forward matrices
# projected, embeddings and norms not. Nothing is allocated; shapes are enough.

# %%
from comera_lab.memory import PUBLISHED, llama_shapes, optimizer_bytes

matrices, rest = llama_shapes("1B")
whole = optimizer_bytes([*matrices, *rest], "adamw", torch.bfloat16).published
(row,) = (row for row in PUBLISHED if row.model == "LLaMA-1B")
print(f"AdamW {whole / 2**30:.2f} GiB (predicted; 4.99 published)")
print(f"COAP  {row.count().published / 2**30:.2f} GiB (predicted; 1.94 published), "
      f"{1 - row.count().published / whole:.0%} less")
for row in PUBLISHED:
    predicted = row.count().published / 2**20
    print(f"{row.model:<16} {row.optimizer:<28} {predicted:8.2f} MiB (predicted), {row.mib} published")

# %% [markdown]
# ## One idea, three optimizers
#
# The basis does not care what works inside it. Adam, Adam with moments of a byte, or Adafactor, which
# keeps a row and a column in the place of the squares. `make_optimizer` of the kit knows them by
# name:

# %%
from comera_lab.memory import mib
from comera_lab.optimizers import make_optimizer

named = list(wide.named_parameters())
for name in ("coap", "coap-8bit", "coap-adafactor"):
    report = make_optimizer(name, named, 1e-3, rank_ratio=4).report()
    print(f"{name:<15} {mib(report.bytes):6.3f} MiB of state (predicted)")
print(report)

# %%
progress("10")

# %% [markdown]
# ## What to remember
#
# - A refresh from the old basis sees nearly what an SVD sees, at a small part of its price.
# - Look at the units of a loss before you fix a rate: a step can be lost without a word.
# - An optimizer size is a sum over shapes. A difference between optimizers needs more than one seed.
#
# ## Where next
#
# Lesson 11 projects convolutions, which have two bases each.
#
# COAP: J. Xiao and others, CVPR 2025, arXiv 2412.00071, written anew from the formulas. The maps of
# 8-bit moments: T. Dettmers and others, ICLR 2022, arXiv 2110.02861. Adafactor: arXiv 1804.04235.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
