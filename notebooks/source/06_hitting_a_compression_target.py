# %% [markdown]
# # 06 Hitting a compression target
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. steer training to a size that you name, and meet it exactly;
# 2. cut closed ranks for good, and measure what that saves in bytes and in time;
# 3. read a compression ratio: ask which denominator it has.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.RankTrainingPanel()

# %% [markdown]
# ## Name a size
#
# Press **Start**. Up to the dotted line it is the early stage of lesson 05: a price, and no promise.
# Then the late stage begins: it has a **target**, the dashed line in the size chart, and steers to it.
#
# Watch three things. Size comes down along a line, and jumps back between the cuts: closed gates are
# called back. Accuracy dips when the target is reached. And then there is time left to recover, at the
# target.

# %%
from comera_lab.teaching import check, guess, progress

guess("06")

# %% [markdown]
# ## Every run is a dot
#
# Each finished run appears below. Train three or four: other targets, another gamma, no early steps.
# Up is good, and so is small. The line joins the runs that no other run beats in both.
#
# Click a dot to get its settings back, change *one* of them, and press Start again.

# %%
lab.ParetoPanel()

# %% [markdown]
# ## A target of what?
#
# Cores can be cut; biases and the classifier stay dense. A target for the **tensorised** part says
# what the cores may keep. A target for the **model** counts everything, so the cores have to pay for
# the rest as well.

# %% [markdown]
# ## Exercise: what a target leaves for the cores
#
# `cores` and `dense` are the parameters at the start. How many core parameters may be left at the end?

# %% tags=["exercise:06.1"]
def core_limit(target_ratio, part, cores, dense):
    """part "tensorised" or "model" -> whole number of core parameters allowed, rounded down."""
    # solution
    if part == "tensorised":
        return int(target_ratio * cores)
    return int(target_ratio * (cores + dense)) - dense
    # end


check("06.1", core_limit)

# %% [markdown]
# There is a floor: below the share of the dense part no target can be met. Choose **model** and a
# target of 0.05 in the panel above, and press Start: it says so, and changes nothing.

# %% [markdown]
# ## Early and late
#
# The early stage asks: *what is size worth?* The late stage asks: *how do we get there?* It compares
# two gaps, each as a share of its goal: how far the loss is from its best, and how far the size is
# from the target. Whichever gap is wider is worked on; a little of the other always goes along.
#
# Gradients seldom end on a number. So the late stage also draws a straight line from its first size to
# the target, and closes what still stands above it. What should it close? Every entry has a worth, the
# loss that a few batches would gain without it, and frees so many numbers.

# %% [markdown]
# ## Exercise: close the cheapest
#
# `losses[e]` is what closing entry e costs, `freed[e]` what it frees. Close the cheapest bargain
# first, until at least `needed` numbers are free. (In the kit `freed` changes as neighbours close;
# here it stays.)

# %% tags=["exercise:06.2"]
def close_cheapest(losses, freed, needed):
    """-> list of entries in the order in which they are closed."""
    # solution
    closed, gained = [], 0
    for entry in sorted(range(len(losses)), key=lambda e: losses[e] / freed[e]):
        if gained >= needed:
            break
        closed.append(entry)
        gained += freed[entry]
    return closed
    # end


check("06.2", close_cheapest)

# %% [markdown] tags=["solution"]
# **Why.** An entry near the middle of a train frees more than one at its end. Loss alone would close
# many entries that free little, and lose more on the way to the same size; the ratio is what a budget
# compares.

# %% [markdown]
# ## A mask saves nothing
#
# A closed gate multiplies by 0, and a multiplication by 0 takes as long as any other. Until now the
# cores have kept their full shape: the small size was a *count*. Now cut: slice the dead entries out
# of both cores and put the gate of the others into one of them.

# %% [markdown]
# ## Exercise: really cut
#
# The product must stay the same. An entry is dead where |gate| is not above the threshold.

# %% tags=["exercise:06.3"]
def compact_pair(left, gate, right, threshold):
    """left (a, r), gate (r,), right (r, b) -> (smaller left, smaller right), the gate multiplied in."""
    # solution
    keep = gate.abs() > threshold
    return left[:, keep] * gate[keep], right[keep]
    # end


check("06.3", compact_pair)

# %% [markdown]
# The kit's `compact(model, optimizer)` does this at every bond, and slices the optimizer's moments
# alike, so that training goes on. What does it save? A wider network than the one above, with three of
# four gates closed:

# %%
import copy

import torch

from comera_lab.layers import compact, tt_layers
from comera_lab.memory import mib
from comera_lab.models.mlp import MLP
from comera_lab.panels.rank_run import costs_of_a_step

masked = MLP((784, 1024, 1024, 10), kind="tt", rank=96, generator=torch.Generator().manual_seed(0))
for layer in tt_layers(masked).values():
    layer.add_gates()
    with torch.no_grad():
        for gate in layer.gates:
            gate[len(gate) // 4 :] = 0.0
cut = copy.deepcopy(masked)
compact(cut)
for name, cost in zip(("masked", "cut"), costs_of_a_step(masked, cut), strict=True):
    print(f"{name:<8}{cost.core_parameters:>9,} core parameters; a training step, measured here: "
          f"{mib(cost.step_bytes):.2f} MiB, {cost.step_time_ms:.2f} ms")

# %% [markdown]
# The mask stores and multiplies everything as before. The cut frees memory at once. Time falls less
# than the count does: many thin products cost more to start than to do, as in lesson 04. The network
# of the panel is so small that its step hardly gets faster; its table says what was measured.
#
# In the panel: press **Stop** in the middle of a run, then **Compact now**, look at the table, and
# press
# **Resume**. What is cut is gone, also for straight-through gates: cut late, or be sure.

# %% [markdown]
# ## Two denominators
#
# Two numbers describe the same model: the whole dense model over the whole compressed one, and the
# tensorised weights alone, dense over cores.

# %% [markdown]
# ## Exercise: both ratios
#
# `tensorised_dense`: weights of the tensorised layers if they were dense; `cores`: what replaced them;
# `rest`: everything else, the same in both models.

# %% tags=["exercise:06.4"]
def ratios(tensorised_dense, cores, rest):
    """-> (whole model, tensorised part): how many times smaller."""
    # solution
    return (tensorised_dense + rest) / (cores + rest), tensorised_dense / cores
    # end


check("06.4", ratios)

# %% [markdown]
# Choose the second and third **x axis** in the chart of your runs: the same dots, other numbers. The
# upright lines are the headline of CoMERA, "43x to 361x". The first end fits the whole model, the
# second only the tensorised layers: one range from two denominators. Their accuracy belongs to other
# data, so it is not drawn. Beside your dots stand recorded runs with fixed ranks: does adaptation beat
# them?

# %%
progress("06")

# %% [markdown]
# ## What to remember
#
# - A price leads somewhere, a target is met: steer, then close the least loss for each number freed.
# - A mask is a count. Only a cut frees memory, and time follows as far as arithmetic was what took it.
# - A ratio without its denominator says nothing. Name it: whole model, or tensorised part.
#
# ## Where next
#
# Next come [embedding tables](07_embedding_tables.ipynb), where a tensor train saves most, and a
# [transformer](08_a_compressed_transformer.ipynb) compressed with the two stages of this lesson. The
# method is CoMERA (Z. Yang and others, NeurIPS 2024, arXiv 2405.14377), written anew; the worth of an
# entry follows P. Molchanov and others, arXiv 1611.06440.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
