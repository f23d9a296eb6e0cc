# %% [markdown]
# # 05 Letting training choose the ranks
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. put a gate on every bond, and a price on size, so that training itself lowers the ranks;
# 2. say why a gate needs a threshold, and why a hard one is a one-way door;
# 3. tell the size that memory will hold from the size that a gradient can feel.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

state = lab.lab_state()
state.early_steps, state.late_steps, state.gamma = 600, 0, 100
lab.RankTrainingPanel()

# %% [markdown]
# ## Watch ranks fall
#
# So far *you* chose the ranks. Here every bond starts at **max rank**, and each of its entries has a
# gate. Size has a price: **gamma**. Press **Start** and watch the strip.
#
# Every row is one bond, time runs to the right, full colour means that all entries are open. A row
# that fades is a bond that the network gives up. On the right: size, and what it costs in accuracy.
#
# Then run it again with gamma 0, with 30 and with 200. Do the same bonds go first each time?

# %%
from comera_lab.teaching import check, guess, progress

guess("05")

# %% [markdown]
# ## A gate on every bond
#
# Two cores meet at a bond of rank r: their product is a sum of r parts. Put a number in front of each
# part, its **gate**. At first all gates are 1 and nothing has changed. A gate of 0 switches its part
# off, and then the bond has one rank less.

# %%
import torch

from comera_lab import TTLinear

layer = TTLinear(784, 512, rank=8, generator=torch.Generator().manual_seed(0))
before = layer.to_dense()
layer.add_gates()
print("gates of ones change nothing:", torch.equal(before, layer.to_dense()))
with torch.no_grad():
    layer.gates[2][:3] = 0.0
print("live ranks with three entries closed:", layer.live_ranks)

# %% [markdown]
# ## Exercise: multiply through a gate
#
# Two cores, already folded to matrices: `left` has the bond as its last axis, `right` as its first.

# %% tags=["exercise:05.1"]
def gated_product(left, gate, right):
    """left (a, r), gate (r,), right (r, b) -> (a, b)."""
    # solution
    return (left * gate) @ right
    # end


check("05.1", gated_product)

# %% [markdown] tags=["solution"]
# **Why.** A gate is a diagonal matrix between two cores, and a diagonal matrix from the right scales columns. Once
# training is over it can be multiplied into one of the two cores, so it costs nothing at use.

# %% [markdown]
# ## Two sizes of one model
#
# How large is the model now? Count the live entries of every bond, R, and add up the cores:
#
# > exact size = sum over cores of  R left x mode x R right
#
# This is what memory will hold. But it is a *count*: move a gate a little and it stays the same, so
# its gradient is zero, and training cannot feel it. CoMERA puts a stand-in in its place, the
# **surrogate**: the same sum with the sum of |g| of a bond where the count R stood.

# %% [markdown]
# ## Exercise: exact size and surrogate
#
# An entry is alive if |g| lies above the threshold. The surrogate takes all entries as they are.

# %% tags=["exercise:05.2"]
def sizes(gates, modes, threshold):
    """One gate (r,) per inner bond, one mode per core -> (exact count, surrogate)."""
    # solution
    live = [1, *(int((gate.abs() > threshold).sum()) for gate in gates), 1]
    norms = [1.0, *(float(gate.abs().sum()) for gate in gates), 1.0]
    exact = sum(live[k] * mode * live[k + 1] for k, mode in enumerate(modes))
    surrogate = sum(norms[k] * mode * norms[k + 1] for k, mode in enumerate(modes))
    return exact, surrogate
    # end


check("05.2", sizes)

# %% [markdown]
# While all gates are 1 the two agree. Later they part: the surrogate falls smoothly, the count in
# jumps.
#
# Look at one entry of the surrogate: its slope does not depend on its own size, only on its
# neighbours. A small gate is pushed as hard as a large one. With squares the push would fade with the
# gate, all gates would become small, and none would become nothing.

# %% [markdown]
# ## Why a gate needs a threshold
#
# Nothing in training lands on 0 exactly. Watch one gate that is pushed down by a constant price:

# %%
gate = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.Adam([gate], lr=0.02)
path = []
for _ in range(120):
    optimizer.zero_grad()
    gate.abs().sum().backward()
    optimizer.step()
    path.append(gate.item())
print("the last ten values:", [round(value, 3) for value in path[-10:]], "(computed here)")
print("exactly zero at any step:", 0.0 in path)

# %% [markdown]
# It runs down to zero, steps across, turns round, steps across again. So "closed" has to be a *zone*:
# an entry with |g| below a threshold counts as 0, in the forward pass too. The width of the zone
# belongs to the size of a step: where a step of the **gate rate** jumps across it, gates fall in and
# out.

# %% [markdown]
# ## The one-way door
#
# And the way back? The published code cuts hard: at or below the threshold the gate is replaced by 0.
# What is replaced does not depend on the gate any more, so its gradient is 0. Nothing pushes it, ever
# again.
#
# The kit's default is **straight-through**: forward cuts all the same, backward pretends that nothing
# was cut. An entry that the loss misses is called back.

# %% [markdown]
# ## Exercise: who hears the gradient?
#
# `upstream` is the gradient of the loss with respect to the *cut* gate. What arrives at the gate
# itself? With kind "threshold" an entry is alive where `gate > threshold` (g, not |g|: that is how it
# was published).

# %% tags=["exercise:05.3"]
def gate_gradient(gate, upstream, threshold, kind):
    """gate (r,), upstream (r,), kind "threshold" or "straight-through" -> gradient of the gate (r,)."""
    # solution
    if kind == "threshold":
        return torch.where(gate > threshold, upstream, torch.zeros_like(upstream))
    return upstream
    # end


check("05.3", gate_gradient)

# %% [markdown] tags=["solution"]
# **Why.** `torch.where` picks a constant 0 for dead entries, and a constant has no gradient. Straight-through writes
# `gate + (cut - gate).detach()`: the same value, but the gradient goes through the first term.

# %% [markdown]
# Try it above: choose **threshold** gates and start again. Rows only fade. With **straight-through**
# some of them recover, for a while or for good. Which kind ends smaller? Which is more accurate?

# %% [markdown]
# ## Exercise: the objective of the early stage
#
# Loss plus price. The loss is in nats; so that gamma has the same unit for every model, the surrogate
# is taken as a share of what the layers would hold if they were dense.

# %% tags=["exercise:05.4"]
def early_objective(loss, gamma, surrogate, dense_elements):
    """What early-stage training minimises: one number, in nats."""
    # solution
    return loss + gamma * surrogate / dense_elements
    # end


check("05.4", early_objective)

# %% [markdown]
# The kit's `EarlyStage` computes the same from a real model. Its price is felt by the gates alone:
# cores get their gradient from the loss.

# %%
from comera_lab.objectives import EarlyStage, model_size

loss = layer(torch.ones(1, 784)).square().mean()
total = EarlyStage(gamma=100.0)(loss, layer)
(slope,) = torch.autograd.grad(total - loss, layer.gates[1], retain_graph=True)
print("price of the size:", (total - loss).item(), "nats (computed here)")
print("push on the first entries of bond 2:", slope[:3].tolist())
print(model_size(layer))

# %%
progress("05")

# %% [markdown]
# ## What to remember
#
# - A gate on every bond and a price on size: training lowers the ranks where they are least missed.
# - The price is paid on a surrogate that a gradient can feel; size is reported as an exact count.
# - Closed is a zone, not a point. A hard threshold closes for good; straight-through lets entries return.
#
# ## Where next
#
# A price gives no promise: you get the size that it happens to lead to. Lesson
# [06](06_hitting_a_compression_target.ipynb) names a size and meets it, and cuts what was only masked
# here.
#
# The method is CoMERA (Z. Yang and others, NeurIPS 2024, arXiv 2405.14377), written anew.
# Straight-through gradients are from Y. Bengio and others, arXiv 1308.3432.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
