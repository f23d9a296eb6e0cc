# %% [markdown]
# # 01 Where training memory goes
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about forty minutes. Afterwards you will be able to
#
# 1. split the memory of a training step into four pools;
# 2. compute the bytes an optimizer needs before you run it;
# 3. say why "the memory of my program" is three different numbers.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.MemoryPanel()

# %% [markdown]
# ## Four pools
#
# Think of a workshop with four shelves.
#
# | pool | what lies there | who brings it |
# |---|---|---|
# | **weights** | the numbers the model *is* | you, when you build it |
# | **grads** | one correction for every weight | the backward pass |
# | **optimizer** | what the optimizer remembers from earlier steps | the first `step()` |
# | **activations** | what the layers keep until they have been corrected | the forward pass |
#
# The bar *predicted* is pure arithmetic on shapes. The bar *measured here* looks at the real tensors of
# a real step. They should agree; where they do not, the panel says why.

# %%
from comera_lab.teaching import check, guess, progress

guess("01")

# %% [markdown]
# ## One tiny layer, opened up
#
# Three inputs, two outputs. Let us train it for one step with AdamW and list what exists afterwards.

# %%
import torch
from torch import nn

tiny = nn.Linear(3, 2, bias=False)
adamw = torch.optim.AdamW(tiny.parameters())
tiny(torch.ones(1, 3)).sum().backward()
adamw.step()

print("weight       ", tuple(tiny.weight.shape))
print("its gradient ", tuple(tiny.weight.grad.shape))
for name, value in adamw.state[tiny.weight].items():
    print(f"AdamW keeps  {tuple(value.shape)!s:7} {name}")

# %% [markdown]
# `exp_avg` is a running mean of the gradient, `exp_avg_sq` a running mean of its square. Both have the
# shape of the weight. (`step` only counts; it is one number for the whole tensor.)
#
# A float32 number takes 4 bytes. So: **how many bytes does AdamW training need for each parameter**, with
# weight, gradient and optimizer state together?

# %% tags=["exercise:01.1"]
bytes_per_parameter = 4 + 4 + 8  # solution

check("01.1", bytes_per_parameter)

# %% [markdown] tags=["solution"]
# **Why.** Weight, gradient, first moment, second moment: four float32 numbers of 4 bytes each. A common slip is
# to forget the gradient, which lives only for a moment, but at the worst moment.

# %% [markdown]
# ## The optimizer's shelf
#
# `sgd` follows the gradient and forgets it. `momentum` keeps one running mean. `adamw` keeps two.
# Write that as a function. It should count *only* what the optimizer remembers.

# %% tags=["exercise:01.2"]
def optimizer_bytes(params, optimizer):
    """Bytes of optimizer state in float32; optimizer is "sgd", "momentum" or "adamw"."""
    # solution
    bytes_per_param = {"sgd": 0, "momentum": 4, "adamw": 8}
    return params * bytes_per_param[optimizer]
    # end


check("01.2", optimizer_bytes)

# %% [markdown]
# ## A smaller number format
#
# bf16 is a number format of 2 bytes. Many models train with bf16 weights and gradients. But an update is
# often so small that bf16 rounds it away:

# %%
weight = torch.tensor(1.0, dtype=torch.bfloat16)
print("1 + 0.001 in bf16 gives", (weight + 0.001).item())

# %% [markdown]
# The update is lost. So a second, exact copy of the weights is kept in float32, the **master copy**, and
# AdamW's two moments stay in float32 too.
#
# Count again: bf16 weight, bf16 gradient, float32 master copy, two float32 moments. **How many bytes for
# each parameter?** Guess before you add up.

# %% tags=["exercise:01.3"]
bytes_with_master_copy = 2 + 2 + 4 + 8  # solution

check("01.3", bytes_with_master_copy)

# %% [markdown] tags=["solution"]
# **Why.** The number format shrinks two of the five numbers by half and adds one that was not there before. The
# gain of bf16 lies elsewhere: in activations, and in faster products on hardware made for it.

# %% [markdown]
# ## Activations: what the layers must remember
#
# To correct its weights, a layer must know what came in. So each layer puts its input on the shelf during
# the forward pass. PyTorch lets us watch it happen:

# %%
from comera_lab.models.mlp import MLP

model = MLP((784, 512, 512, 10))
own = {parameter.data_ptr() for parameter in model.parameters()}


def watch(tensor):
    if tensor.data_ptr() not in own:  # the weights have a shelf of their own
        print("kept for backward:", tuple(tensor.shape))
    return tensor


with torch.autograd.graph.saved_tensors_hooks(watch, lambda tensor: tensor):
    model(torch.rand(64, 784))

# %% [markdown]
# Read the list from the top. The first Linear keeps the images. GELU keeps what it got, the next Linear
# keeps what GELU made of it, and so on. The last Linear has no GELU behind it.
#
# Every row has the batch as its first number. That is the answer to the guess above.
#
# Write the rule down: **how many numbers are kept**, for a batch and a list of widths such as
# `(784, 512, 512, 10)`?

# %% tags=["exercise:01.4"]
def kept_numbers(batch, features):
    """Numbers that an MLP with GELU keeps for backward: inputs of Linears and inputs of GELUs."""
    # solution
    linear_inputs = sum(features[:-1])
    gelu_inputs = sum(features[1:-1])
    return batch * (linear_inputs + gelu_inputs)
    # end


check("01.4", kept_numbers)

# %% [markdown] tags=["solution"]
# **Why.** A Linear needs its input to compute the gradient of its weight; a GELU needs its input because its
# slope depends on it. So every hidden width counts twice, the first and none of the last.

# %% [markdown]
# The meter of this kit counts the same thing. Its number and yours:

# %%
from comera_lab.memory import MemoryReport, measure, predict

by_meter = predict(model, (64, 784)).activations // 4  # bytes of float32 -> numbers
print("meter:", by_meter, "   yours:", kept_numbers(64, (784, 512, 512, 10)))

# %% [markdown]
# ## Predicted, then measured
#
# Now one real training step, watched from inside.

# %%
optimizer = torch.optim.AdamW(model.parameters())
images = torch.rand(64, 784)


def step():
    optimizer.zero_grad()
    model(images).sum().backward()
    optimizer.step()


report = MemoryReport.compare(predict(model, (64, 784), "adamw"), measure(step, model, optimizer))
print(report.table())

# %% [markdown]
# ## Three numbers with one name
#
# "How much memory does it take?" has three honest answers:
#
# - **the pools**: the bytes of the tensors, as above;
# - **the peak**: the most that was in use at one moment, in the middle of a step. Whoever looks *between*
#   two steps finds the activations gone and reports too little;
# - **the process (RSS)**: everything the operating system has handed to Python, with the libraries, and
#   with freed blocks that the allocator keeps for later.

# %%
from comera_lab.memory import format_bytes

print("tensors of one step  ", format_bytes(report.measured.total), "(measured here)")
print("the whole process    ", format_bytes(report.rss_bytes), "(measured here, PyTorch included)")

# %%
progress("01")

# %% [markdown]
# ## What to remember
#
# - Weights, grads and optimizer state follow the number of parameters; activations follow the batch.
# - AdamW's state is twice the weights. That is the shelf that COAP empties (a later lesson).
# - A tensor train shrinks three shelves at once: fewer weights, fewer grads, less state.
# - Always ask *which* memory a number means, and *when* it was read.
#
# ## Where next
#
# [02 Low rank: the SVD as a knife](02_low_rank.ipynb): the idea behind every way to store less.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
