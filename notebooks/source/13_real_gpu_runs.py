# %% [markdown]
# # 13 Real GPU runs
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel. No GPU is needed.
#
# You need about an hour. Afterwards you will be able to
#
# 1. say what limits a layer on a device, and the least time that follows;
# 2. explain what fusion, fewer launches and CUDA graphs save, and count it;
# 3. time a call honestly, and read a recorded run with its device, date and commit.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.RooflinePanel()

# %% [markdown]
# ## Two speeds
#
# A device moves bytes at one speed and multiplies at another. A kernel waits for the slower of the
# two. The roof above is made of both: on the slope memory is the limit, on the flat part arithmetic.
#
# Drag **rank**, then **inputs** and **outputs**. Choose the other device. **This CPU** measures your
# own machine and puts it on the list.

# %%
from comera_lab.teaching import check, guess, progress

guess("13")

# %% [markdown]
# ## Exercise: the least time of a kernel
#
# `flops` to compute and `moved` bytes to move, on a device that does `flops_per_s` and `bytes_per_s`.

# %% tags=["exercise:13.1"]
def floor_ms(flops, moved, flops_per_s, bytes_per_s):
    """The milliseconds below which no program can be."""
    # solution
    return 1000 * max(flops / flops_per_s, moved / bytes_per_s)
    # end


check("13.1", floor_ms)

# %% [markdown]
# The panel's ceilings of GPUs are what their maker prints. Its floors are **computed**: they say what is
# impossible, not what you will get.

# %% [markdown]
# ## Fusion
#
# When memory is the limit, only fewer bytes help. `gelu((x A) B + b)` as four kernels: each writes its
# result, and the next one reads it again.

# %% [markdown]
# ## Exercise: what fusion spares
#
# Every operand is read once, every result written once; a number has `size` bytes. Kernel 1 makes x A,
# kernel 2 multiplies that by B, kernel 3 adds b, kernel 4 is gelu. Fused, only y is written.

# %% tags=["exercise:13.2"]
def bytes_moved(rows, inputs, outputs, rank, size):
    """Forward alone: (bytes of the four kernels, bytes of the fused one)."""
    # solution
    first = rows * inputs + inputs * rank + rows * rank
    second = rows * rank + rank * outputs + rows * outputs
    bias = rows * outputs + outputs + rows * outputs
    gelu = rows * outputs + rows * outputs
    fused = rows * inputs + inputs * rank + rank * outputs + outputs + rows * outputs
    return size * (first + second + bias + gelu), size * fused
    # end


check("13.2", bytes_moved)

# %% [markdown]
# Is it so? torch tells of every operation that it hands out, with its tensors. Here they are counted:

# %%
import torch
from torch.nn.functional import gelu

from comera_lab.experiments.tape import count_operations

x, A, B, b = (torch.randn(size) for size in ((4096, 1024), (1024, 32), (32, 1024), (1024,)))
apart = count_operations(lambda: gelu(x @ A @ B + b))
fused = sum(tensor.nbytes for tensor in (x, A, B, b)) + 4096 * 1024 * 4
print(f"{apart.launches} operations, {', '.join(apart.names)}: {apart.bytes:,} bytes (counted here)")
print(f"one kernel: {fused:,} bytes, {apart.bytes / fused:.1f} times fewer (computed)")

# %% [markdown]
# x A is thin, so keeping *it* on the chip spares little: read the last number of the sentence under the
# roof. What pays is not to write and read y again, and not to launch so often.

# %% [markdown]
# ## Launches
#
# The host sends every operation to the device, one after another. How many are there in a training
# step?

# %%
from functools import partial

from torch.nn.functional import cross_entropy

from comera_lab.models.mlp import MLP


def step(model, optimizer):
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()


images, labels = torch.randn(64, 784), torch.randint(0, 10, (64,))
sizes = (784, 512, 512, 10)
models = {"dense": MLP(sizes), "tensor train": MLP(sizes, kind="tt", rank=8)}
for name, model in models.items():
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step(model, optimizer)
    sent = count_operations(partial(step, model, optimizer))
    most = ", ".join(f"{count} {kind}" for kind, count in sent.names.most_common(4))
    print(f"{name:<13}{sent.launches:>4} operations in a step: {most}, ... (counted here)")

# %% [markdown]
# More cores, more operations, and each is tiny. What does *sending* one cost? An addition of one number
# has nothing to compute:

# %%
import time
from statistics import median

one, samples = torch.zeros(1), []
for _ in range(2000):
    began = time.perf_counter()
    one.add_(1)
    samples.append(1e6 * (time.perf_counter() - began))
send_us = median(samples)
print(f"one operation costs the host {send_us:.1f} microseconds (measured here, on the CPU)")
host_ms = 1e-3 * send_us * sent.launches
print(f"{sent.launches} of them: {host_ms:.2f} ms before any arithmetic (computed from that)")

# %% [markdown]
# ## Exercise: launches in a queue
#
# The host needs `launch_us` for each launch and never waits; launch k is out after k times that. The
# device runs kernels in order, one at a time. When is the last one done?

# %% tags=["exercise:13.3"]
def finish_us(device_us, launch_us):
    """device_us: microseconds of each kernel, in order -> microseconds until the last has ended."""
    # solution
    done = 0
    for k, busy in enumerate(device_us, start=1):
        done = max(done, k * launch_us) + busy
    return done
    # end


check("13.3", finish_us)

# %% [markdown]
# ## CUDA graphs
#
# The same step again and again: then the host need not send it again. A **CUDA graph** is a list of
# operations, taken down once and replayed by one call. Here a stand-in for the CPU takes down what
# torch hands out. `GraphedStep` is the kit's own, the one that a GPU uses.

# %%
import copy

from comera_lab.experiments.graphs import GraphedStep
from comera_lab.experiments.tape import TapeCapture

twins = models["tensor train"], copy.deepcopy(models["tensor train"])
plain, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in twins)
tape = TapeCapture()
graph = GraphedStep(twins[1], lambda model, x, y: cross_entropy(model(x), y), other, capture=tape)
for number in range(5):
    plain.zero_grad()
    loss = cross_entropy(twins[0](images), labels)
    loss.backward()
    plain.step()
    replayed = graph.step(images, labels)
    lengths = " and ".join(map(str, tape.lengths))
    how = f"2 replays, {lengths} operations" if graph.captured else "sent one by one"
    print(f"step {number}: loss {loss.item():.6f} and {replayed.item():.6f}, {how} (counted here)")

# %% [markdown]
# Equal losses, and from step 3 on the host makes two calls. Views and allocations are on the tape too,
# so it is longer than the count above. But a graph sees no Python:

# %%
weight, rate = torch.zeros(3), 0.1
replay = TapeCapture().record(lambda: weight.sub_(torch.ones(3), alpha=rate))
replay()
rate = 0.9
replay()
print(f"after rates 0.1 and 0.9 the weight is {weight[0]:.1f}: the graph subtracted 0.1 twice")

# %% [markdown]
# ## Exercise: a step that a graph can replay
#
# The step is captured, then `gradient` and `rate` get new values, and it is replayed. `rate` is a tensor
# with one number. Reading it on the host is refused.

# %% tags=["exercise:13.4"]
def graph_step(weight, gradient, rate):
    """weight becomes weight - rate * gradient; nothing is returned."""
    # solution
    weight.sub_(rate * gradient)
    # end


check("13.4", graph_step)

# %% [markdown]
# ## An honest clock
#
# The same call, timed in four ways. Only one of them is what a training step will see. Run the cell
# again: which lines stay?

# %%
import itertools
from statistics import quantiles


def times_ms(buffers, count):
    turn, found = itertools.cycle(buffers), []
    for _ in range(count):
        rows = next(turn)
        began = time.perf_counter()
        rows @ A
        found.append(1e3 * (time.perf_counter() - began))
    return found


many = [torch.randn(256, 1024) for _ in range(48)]
first, same = times_ms(many[:1], 1)[0], times_ms(many[:1], 60)
turned = times_ms(many, 48 + 96)[48:]
tenths = quantiles(turned, n=10)
print(f"the first call          {first:7.3f} ms: everything is cold (measured here, as all four)")
print(f"fastest, same buffer    {min(same):7.3f} ms: a lucky one, and its buffer lies in the cache")
print(f"mean of 5, same buffer  {sum(same[:5]) / 5:7.3f} ms: moved by every disturbance")
middle = f"{tenths[4]:7.3f} ms, from {tenths[1]:.3f} (p20) to {tenths[7]:.3f} (p80)"
print(f"median of 96 in turn    {middle}")

# %% [markdown]
# On a GPU one thing more: a launch returns before the kernel has run. A clock that does not wait for
# the device times the host alone. The kit records CUDA **events** around the calls, and rotates
# buffers that are larger than the second-level cache.

# %% [markdown]
# ## Exercise: an honest clock
#
# `call(buffer)` runs once, `buffers` is a list, `clock()` gives seconds. The machine of the check
# compiles during the first calls, keeps the last buffer in its cache, and is disturbed now and then.

# %% tags=["exercise:13.5"]
def honest_ms(call, buffers, clock):
    """Milliseconds of one call, such as a long training would see them."""
    # solution
    turn = itertools.cycle(buffers)
    for _ in range(5):
        call(next(turn))
    samples = []
    for _ in range(20):
        buffer = next(turn)
        began = clock()
        call(buffer)
        samples.append(clock() - began)
    return 1000 * median(samples)
    # end


check("13.5", honest_ms)

# %% [markdown]
# ## Runs, replayed
#
# Every bar below names its device, its day and its commit, or it is a floor and says **computed**. A
# row that cannot name them is refused. With an NVIDIA GPU in your machine, **Run on my GPU** makes a
# recording of your own.

# %%
lab.TracePanel()

# %% [markdown]
# Choose the recording of the **CPU**. Where is the tensor train slower than the dense layer? How wide
# are the whiskers there?

# %%
progress("13")

# %% [markdown]
# ## What to remember
#
# - The floor of a kernel is the larger of two times. A thin layer waits for memory.
# - Fusion spares what is written and read again; a graph spares the host.
# - Warm up, rotate buffers, take medians with their spread, and say which machine it was.
#
# ## Where next
#
# Lesson [12](12_kernels_without_a_gpu.ipynb) has the kernels themselves. The roofline: S. Williams and
# others, Communications of the ACM 52, 2009. Ceilings of GPUs: the data sheets of their maker.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
