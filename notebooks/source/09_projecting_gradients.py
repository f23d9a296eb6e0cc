# %% [markdown]
# # 09 Projecting gradients
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. look at a gradient through a few directions, and say how much of it you still see;
# 2. write a step of GaLore, and count the bytes that its optimizer keeps;
# 3. say what Flora does without any basis, and why a projection of full rank is not AdamW.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.ProjectionPanel()

# %% [markdown]
# ## Follow a gradient
#
# AdamW keeps two numbers for every weight. Must it? Press **Start**: a network learns to read digits,
# and every gradient of its second layer is kept on a tape. Then a **basis** of a few directions
# follows them. The left chart shows how much of each gradient lies inside that basis.
#
# GaLore makes the basis new by a **full SVD** at every update: the line jumps up, and falls until the
# next. Choose **random** and press Start again. Then give it more **rank**, and a longer **update
# interval**.

# %%
from comera_lab.teaching import check, guess, progress

guess("09")

# %% [markdown]
# ## Why a few directions are enough
#
# The gradient of a layer is a sum over the examples of a batch: error times input, a matrix of rank 1
# for each. With 64 examples its rank is 64 at most. And examples resemble each other, as in lesson
# 02.
#
# Here is one gradient of the tape:

# %%
import torch

from comera_lab.panels.projection_run import digits_tape

gradients = digits_tape().gradients
G = gradients[100]
energy = torch.linalg.svdvals(G).square().cumsum(0) / G.square().sum()
print(f"a gradient of shape {tuple(G.shape)}")
for rank in (1, 2, 4, 8, 16):
    print(f"{rank:>3} directions hold {energy[rank - 1]:7.2%} of its energy (computed here)")

# %% [markdown]
# Ten classes, so the errors have about ten directions. A language model has more, and its gradients
# need more rank: a quarter of the width is usual there.

# %% [markdown]
# ## Exercise: how much a basis keeps
#
# A basis `P` has orthonormal columns, (columns of G) x rank. `G @ P` is the gradient in its
# coordinates.

# %% tags=["exercise:09.1"]
def captured(G, P):
    """G (rows, cols), P (cols, rank) with orthonormal columns -> share of the energy kept, 0 to 1."""
    # solution
    return (G @ P).square().sum() / G.square().sum()
    # end


check("09.1", captured)

# %% [markdown]
# ## A basis ages
#
# The best basis for one gradient is a full SVD away: its leading singular vectors. But the gradient
# moves on. Here is a basis made at step 20 and looked through later:

# %%
from comera_lab.optimizers.projection import captured_energy, random_basis, svd_basis

P = svd_basis(gradients[20], rank=8)
for later in (0, 1, 5, 20, 60, 200):
    share = captured_energy(gradients[20 + later], P).item()
    print(f"{later:>4} steps later: {share:7.2%} (computed here)")

# %% [markdown]
# That is the choice that **update interval** stands for: a fresh basis costs time, an old one misses
# what is new. The right chart of the panel shows how far the basis had to turn.

# %% [markdown]
# ## There and back
#
# The optimizer works on the small matrix. Then the step has to become as large as the weight again:
# it is **lifted** with the same basis. A basis always acts on the *shorter* side, because that makes
# it small.

# %% [markdown]
# ## Exercise: project and lift
#
# `P` has as many rows as the shorter side of G. Return the small matrix, and the lifted one in the
# shape of G.

# %% tags=["exercise:09.2"]
def there_and_back(G, P):
    """G (rows, cols), P (shorter side, rank) -> (projected, lifted back to (rows, cols))."""
    # solution
    if G.shape[0] >= G.shape[1]:
        low = G @ P
        return low, low @ P.T
    low = P.T @ G
    return low, P @ low
    # end


check("09.2", there_and_back)

# %% [markdown] tags=["solution"]
# **Why.** P P^T is a projector: it keeps what lies in the span of P and drops the rest. The kit
# avoids the two cases: it transposes a wide matrix once, at the door, and works on tall ones only.

# %% [markdown]
# ## Where the bytes go
#
# AdamW keeps two moments of the size of the weight. A projected Adam keeps two moments of the *small*
# matrix, and the basis. The weight and its gradient stay as large as they were.

# %% [markdown]
# ## Exercise: count the optimizer
#
# How many numbers does a projected Adam keep for one matrix? Do not forget the basis.

# %% tags=["exercise:09.3"]
def state_elements(rows, cols, rank):
    """Two moments and the basis, as a count of numbers."""
    # solution
    return 2 * max(rows, cols) * rank + min(rows, cols) * rank
    # end


check("09.3", state_elements)

# %% [markdown]
# Is it true of real tensors? `GaLoreAdamW` of the kit reports what it keeps, and the meter of lesson
# 01 counts its tensors after one step:

# %%
from torch.nn.functional import cross_entropy

from comera_lab.experiments.datasets import digits
from comera_lab.memory import measure, mib
from comera_lab.models.mlp import MLP
from comera_lab.optimizers import Flora, GaLoreAdamW

data = digits(28)


def one_step(model, optimizer):
    def step():
        cross_entropy(model(data.train_x[:64]), data.train_y[:64]).backward()
        optimizer.step()

    return measure(step, model, optimizer).pools.optimizer


for kind in (torch.optim.AdamW, GaLoreAdamW, Flora):
    model = MLP((784, 256, 256, 10))
    optimizer = kind(model.parameters(), **({} if kind is torch.optim.AdamW else {"rank": 8}))
    print(f"{kind.__name__:<12} {mib(one_step(model, optimizer)):6.3f} MiB of state (measured here)")

# %% [markdown]
# ## Exercise: a step of GaLore
#
# `adam` is given: it takes a gradient and returns the direction that Adam would go, of the same
# shape. Put it in the right place. `scale` makes up for what the projection changes; GaLore uses
# 0.25.

# %% tags=["exercise:09.4"]
def low_rank_step(W, G, P, lr, scale, adam):
    """W, G (rows, cols) with rows >= cols, P (cols, rank) -> the new weight."""
    # solution
    return W - lr * scale * adam(G @ P) @ P.T
    # end


check("09.4", low_rank_step)

# %% [markdown]
# ## Full rank is not AdamW
#
# Give the basis *all* directions. Nothing of the gradient is lost then: there and back gives G again.
# So GaLore of full rank should be AdamW? Adam divides every entry by its own size; its first step is
# the sign of each entry, whatever the gradient. Look at that step in other coordinates:

# %%
turned = random_basis(256, 256, torch.Generator().manual_seed(0))
identity = torch.eye(256)
for name, P in (("any rotation", turned), ("the identity", identity)):
    back = (G @ P) @ P.T
    step = (G @ P).sign() @ P.T
    print(f"{name}: gradient changed by {(back - G).norm() / G.norm():.1e}, "
          f"first step changed by {(step - G.sign()).norm() / G.sign().norm():.2f} (computed here)")

# %% [markdown]
# The gradient survives any rotation, the *step* does not: entries of G P are other numbers than
# entries of G, and each is divided by its own size. Only a basis along the axes gives AdamW back. So
# a projected optimizer is another optimizer at every rank, and wants a learning rate of its own.

# %% [markdown]
# ## Flora: no basis at all
#
# A random basis keeps little of one gradient, as you saw. But it is right *on average*: lifted back
# and scaled up, many random views add up to the gradient itself.

# %%
draws = torch.Generator().manual_seed(0)
total = torch.zeros_like(G)
for count in range(1, 257):
    P = random_basis(256, 8, draws)
    total += (256 / 8) * (G @ P) @ P.T
    if count in (1, 4, 16, 64, 256):
        error = (total / count - G).norm() / G.norm()
        print(f"{count:>4} draws: off by {error:5.2f} times the gradient (computed here)")

# %% [markdown]
# Flora draws a new basis every so often, and stores none: a **seed** brings it back. It keeps the
# mean of the gradients small that way; for their squares it uses a row and a column, as Adafactor
# does. Very few bytes, and noise in every step.
#
# Between the two is a gap: the SVD sees well and is slow, chance is free and nearly blind.

# %%
progress("09")

# %% [markdown]
# ## What to remember
#
# - Gradients have few directions: a basis of low rank sees most of one, for a while.
# - Moments live in the small space. What is saved is optimizer state, not weights and not gradients.
# - Adam does not turn with the coordinates: a projected optimizer is not AdamW, even at full rank.
#
# ## Where next
#
# Lesson [10](10_coap.ipynb) fills the gap: COAP carries the old basis along and only corrects it.
#
# GaLore: J. Zhao and others, ICML 2024, arXiv 2403.03507. Flora: Y. Hao and others, ICML 2024, arXiv
# 2402.03293. Both are written anew here.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
