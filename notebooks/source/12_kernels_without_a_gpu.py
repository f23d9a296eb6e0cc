# %% [markdown]
# # 12 Kernels without a GPU
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. write a Triton kernel with blocks, masks and loops, and run it without a GPU;
# 2. count what it reads and writes, and say which of it is too much;
# 3. fuse the two products of a tensor train into one kernel, and say what that saves.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.KernelStepPanel()

# %% [markdown]
# ## One program, one piece
#
# A **kernel** is a function that a GPU runs many times at once. Each run is a **program**, and knows
# its number. The kernel above adds two vectors. Drag **load or store**, then **program**: each program
# takes the next block.
#
# The last block is too long. Its surplus **lanes** are held back by a **mask**. Choose block 8, then
# 16, and go to the last program.

# %%
from comera_lab.teaching import check, guess, progress

guess("12")

# %% [markdown]
# ## How this runs here
#
# Triton compiles such kernels for a GPU. It can also **interpret** them: step
# by step, on the CPU, for small sizes. The variable in the first cell asks for that. It must be set
# before triton is imported: if the line under the panel says *too late*, choose `Kernel > Restart
# Kernel and Run All Cells`.
#
# Your kernels run twice. First in the kit's **pointer model**: numpy, and a note of every address. It
# is stricter than a GPU: a lane outside its tensor is an error, a masked lane reads NaN, and so does
# memory that was never written. Then in Triton's interpreter, where there is one. Neither says
# anything about *time*.

# %%
from comera_lab.teaching.kernels import tl, triton

# %% [markdown]
# ## Exercise: add two vectors
#
# A pointer plus a block of whole numbers is a block of addresses: `tl.load(x_ptr + at, mask=ok)` reads
# them. `tl.arange(0, BLOCK)` is the block 0, 1, 2, ...; BLOCK is a power of two.
#
# Goal: `out[k] = x[k] + y[k]` for every k below `count`. End with a `tl.store`.

# %% tags=["exercise:12.1"]
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """One program for each block; tl.program_id(0) is its number."""
    # solution
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    x = tl.load(x_ptr + at, mask=ok)
    y = tl.load(y_ptr + at, mask=ok)
    tl.store(out_ptr + at, x + y, mask=ok)
    # end


check("12.1", add_kernel)

# %% [markdown]
# Right or wrong, you can watch it: choose **me** beside *written by* in the panel.
#
# The check also counts. Its **score** is reads plus writes of whole elements, the fewer the better: on a
# GPU, moving a number takes far longer than adding it.

# %% [markdown]
# ## Exercise: sum each row
#
# A row is longer than a block, so a program goes along it in a loop. What should a masked lane hold,
# when all lanes are summed? `other=` says it.
#
# Goal: `out[i]` is the sum of row i of x (rows, columns). Element (i, j) is at `i * columns + j`.

# %% tags=["exercise:12.2"]
@triton.jit
def row_sum_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    """One program for each row."""
    # solution
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0))
    # end


check("12.2", row_sum_kernel)

# %% [markdown]
# ## Tiles
#
# Choose **tiled product** in the panel, and look at the sentence under the numbers. An element of x is
# needed for every column of the result. How often it is *read* depends on the tile: that is why
# matrices are multiplied in tiles.
#
# With `[:, None]` and `[None, :]` two blocks of numbers become a tile of addresses, as in numpy.

# %% [markdown]
# ## Exercise: a product in tiles
#
# Goal: `out = x w`, x (rows, inner), w (inner, columns). Program (i, j), that is `tl.program_id(0)` and
# `tl.program_id(1)`, makes one BLOCK x BLOCK tile of out. `tl.dot` multiplies two tiles; here it wants
# `input_precision="ieee"`, full fp32. (Compiled, a tile has 16 rows and columns at least.)

# %% tags=["exercise:12.3"]
@triton.jit
def product_kernel(x_ptr, w_ptr, out_ptr, rows, inner, columns, BLOCK: tl.constexpr):
    """One program for each tile of out."""
    # solution
    lanes = tl.arange(0, BLOCK)
    row = (tl.program_id(0) * BLOCK + lanes)[:, None]
    column = (tl.program_id(1) * BLOCK + lanes)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + lanes
        x_ok = (row < rows) & (k[None, :] < inner)
        w_ok = (k[:, None] < inner) & (column < columns)
        x = tl.load(x_ptr + row * inner + k[None, :], mask=x_ok, other=0.0)
        w = tl.load(w_ptr + k[:, None] * columns + column, mask=w_ok, other=0.0)
        total += tl.dot(x, w, input_precision="ieee")
    tl.store(out_ptr + row * columns + column, total, mask=(row < rows) & (column < columns))
    # end


check("12.3", product_kernel)

# %% [markdown]
# ## Fusion
#
# A layer of two cores computes (x A) B. As two kernels, x A is written to memory and read again. In one
# kernel it never leaves the program: it is narrow, so a few rows of it fit into registers. That is the
# kit's `tt_linear`, and the last puzzle.

# %% [markdown]
# ## Exercise: a TT contraction in one kernel
#
# Goal: `out = (x A) B`, A (inner, rank), B (rank, columns). RANK is the next power of two from rank on.
# A program owns BLOCK rows, and reads each element of x *once*.

# %% tags=["exercise:12.4"]
@triton.jit
def tt_kernel(
    x_ptr, A_ptr, B_ptr, out_ptr, rows, inner, columns, rank, BLOCK: tl.constexpr, RANK: tl.constexpr
):
    """One program for each block of rows."""
    # solution
    lanes, r = tl.arange(0, BLOCK), tl.arange(0, RANK)
    row = (tl.program_id(0) * BLOCK + lanes)[:, None]
    xA = tl.zeros([BLOCK, RANK], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + lanes
        x_ok, A_ok = (row < rows) & (k[None, :] < inner), (k[:, None] < inner) & (r[None, :] < rank)
        x = tl.load(x_ptr + row * inner + k[None, :], mask=x_ok, other=0.0)
        xA += tl.dot(x, tl.load(A_ptr + k[:, None] * rank + r[None, :], mask=A_ok, other=0.0))
    for start in range(0, columns, BLOCK):
        column = (start + lanes)[None, :]
        B_ok, out_ok = (r[:, None] < rank) & (column < columns), (row < rows) & (column < columns)
        B = tl.load(B_ptr + r[:, None] * columns + column, mask=B_ok, other=0.0)
        tl.store(out_ptr + row * columns + column, tl.dot(xA, B), mask=out_ok)
    # end


check("12.4", tt_kernel)

# %% [markdown] tags=["solution"]
# **Why.** The first loop leaves BLOCK x RANK numbers in the program, the second spends them. No other
# program needs them, so no memory has to hold them.

# %% [markdown]
# What does fusion save? Both ways, counted for the size that the panel opens with:

# %%
import torch

from comera_lab.kernels.puzzles import PUZZLES, run_model

puzzle = PUZZLES["TT contraction"]
call = puzzle.call(13, 4, torch.Generator().manual_seed(0))
fused = run_model(puzzle.kernel, call)
between = call.scalars["rows"] * call.scalars["rank"]
print(f"one kernel: {fused.reads} reads + {fused.writes} writes = {fused.score} (counted here)")
print(f"two kernels: {2 * between} more, x A written once and read once (computed)")
tiles = -(-13 // 4)
print(f"a dense layer of these sizes, in tiles of 4: {2 * 13 * 13 * tiles + 13 * 13} (computed)")

# %% [markdown]
# The kit's real kernels follow the same plan. What a compiler makes of them can be read off the machine
# code, without any GPU: **registers** of a thread, what is **spilled** from them into slow memory,
# **shared** memory of a program, and **matrix instructions**. sm_80 is an A100, sm_90 an H100 or H200.
# In a name, 128x64x3 is a block of 128 rows and 64 columns, with three loads in flight.

# %%
from comera_lab.experiments.recorded_kernels import recorded_kernels, recorded_summary

print(recorded_kernels("tt_linear rows bf16"))

# %% [markdown]
# And all that the kit ships, at every tile, the *most* that any of them needs:

# %%
print(recorded_summary())

# %%
progress("12")

# %% [markdown]
# ## What to remember
#
# - A kernel is one program, told its number; blocks are powers of two, and masks make them fit.
# - What is moved counts: tiles and fusion read less, and compute the same.
# - The interpreter proves that a kernel is *right*. How fast it is, only a GPU can say.
#
# ## Where next
#
# Lesson [13](13_real_gpu_runs.ipynb) asks how fast such kernels can be, and how to find out.
#
# Puzzles that begin with an empty kernel come from S. Rush's Triton-Puzzles; counting reads and writes
# from GPU-Puzzles. Triton: P. Tillet and others, MAPL 2019. The interpreter of triton 3.6 and 3.7
# multiplies bf16 wrongly: stay with fp32 in it.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
