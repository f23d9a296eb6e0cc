# %% [markdown]
# # 15 Beyond one machine
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel. One laptop is enough.
#
# You need about an hour. Afterwards you will be able to
#
# 1. plan, pool by pool, which training fits on which GPU;
# 2. say what DDP copies and what FSDP splits, and predict the bytes of one process;
# 3. launch the same training on a cluster, stop it, and go on with another number of processes.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.PlannerPanel()

# %% [markdown]
# ## Plan first
#
# Each bar is a way to train the model, each upright line a size of GPU. Before you touch anything:
# which is the smallest card that takes this model under AdamW? And under **CoMERA + COAP**? Say which
# pool decides, then set **checkpointing** to on. Then choose **llama-7b**.
#
# Where every bar is too long, one card is not enough. Then there are two ways to use several.

# %%
import torch

from comera_lab.teaching import check, guess, progress

# %% [markdown]
# ## Copy or split
#
# **DDP** (distributed data parallel) gives every process a copy of the model and a part of each batch.
# After backward the gradients are averaged, so that all copies take the same step.
#
# **FSDP** (fully sharded data parallel) also splits weights, gradients and optimizer state. A layer is
# put together while it computes, and its parts go back to their owners.

# %% [markdown]
# ## Exercise: bytes in one process
#
# In fp32, with AdamW: weights, gradients, two moments. `split` says whether it is FSDP.

# %% tags=["exercise:15.1"]
def bytes_in_process(weights, processes, split):
    """Bytes that one of the processes holds; activations are not counted."""
    # solution
    return 16 * weights / (processes if split else 1)
    # end


check("15.1", bytes_in_process)

# %% [markdown]
# Now for real. The panel starts processes on this machine: programs of their own, each with its own
# memory. Press **Start**. Then choose **ddp** and press it again.

# %%
lab.ProcessesPanel()

# %%
guess("15")

# %% [markdown]
# ## The same step
#
# Several processes must take the step that one would take. Each has the *mean* gradient of its own
# rows, and the parts need not be equal: 50 rows on four processes are 13, 13, 12 and 12.

# %% [markdown]
# ## Exercise: the gradient of the whole batch

# %% tags=["exercise:15.2"]
def batch_gradient(means, rows):
    """Mean gradient of each process, and its number of rows -> mean gradient of the whole batch."""
    # solution
    return sum(mean * count for mean, count in zip(means, rows, strict=True)) / sum(rows)
    # end


check("15.2", batch_gradient)

# %% [markdown]
# ## Where does the basis live?
#
# COAP keeps its moments in a basis of the gradient. Under FSDP each process has some rows of G, and
# keeps the moments of these rows. But all need the *same* basis, and nobody has all of G. Putting G
# together would cost what the split has spared.

# %% [markdown]
# ## Exercise: one basis for all
#
# `parts` are the rows of each process, `P` the old basis, whole everywhere. Make the basis that a
# refresh of lesson 10 gives for all of G. What would have to travel?

# %% tags=["exercise:15.3"]
def shared_refresh(parts, P):
    """parts [(own rows, cols), ...], P (cols, rank) -> new basis (cols, rank), orthonormal columns."""
    # solution
    return torch.linalg.qr(sum(part.T @ (part @ P) for part in parts)).Q
    # end


check("15.3", shared_refresh)

# %%
rows, cols, rank = 5461, 2048, 512  # a feed-forward matrix of LLaMA-1B
print(f"the whole gradient {rows * cols:>12,} numbers")
print(f"the sum of G'(G P) {cols * rank:>12,} numbers, once in a few hundred steps (counted here)")

# %% [markdown]
# Two details decide whether this works.
#
# - **The first basis** has no old one to start from. Up to 128 columns it comes from G'G, else from a
#   random start whose seed all processes know, and three refreshes. No SVD of G is needed anywhere.
# - **The side that is split.** A basis lies on the shorter side, moments on the longer one. FSDP splits
#   along the first dimension unless told otherwise. The kit splits each matrix along its longer side;
#   where that is uneven, the gradient is split anew in every step, which costs two messages of its size.

# %% [markdown]
# ## On a cluster
#
# `torchrun` starts the processes and tells each its number. The same command line trains alone and in
# parallel:
#
# ```bash
# comera-lab train code-small --out run.jsonl
# torchrun --nproc-per-node=2 -m comera_lab train code-small --parallel fsdp --out run.jsonl
# ```
#
# The first process alone prints, records and writes the checkpoint, one file beside `--out`. Any number
# of processes goes on from it with `--resume`. A *batch size* is that of all processes together;
# `--accumulate 4` cuts each share into four parts, for activations a quarter as large.

# %% [markdown]
# **Slurm**: two machines of four GPUs, one `torchrun` on each.
#
# ```bash
# #!/bin/bash
# #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=04:00:00
# #SBATCH --signal=TERM@120
# export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d \
#   --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HEAD:29500" \
#   -m comera_lab train code-small-coap --parallel fsdp --out /shared/run.jsonl
# ```

# %% [markdown]
# **Kubernetes**: an indexed Job of two pods behind a headless service named `train`.
#
# ```yaml
# apiVersion: batch/v1
# kind: Job
# metadata: {name: train}
# spec:
#   completions: 2
#   parallelism: 2
#   completionMode: Indexed
#   template:
#     spec:
#       subdomain: train
#       restartPolicy: Never
#       terminationGracePeriodSeconds: 120
#       containers:
#       - name: train
#         image: YOUR_IMAGE
#         command: [torchrun, --nnodes=2, --nproc-per-node=4, --rdzv-backend=c10d, --rdzv-id=train,
#                   "--rdzv-endpoint=train-0.train:29500", -m, comera_lab, train, code-small-coap,
#                   --parallel, fsdp, --out, /shared/run.jsonl]
#         resources: {limits: {nvidia.com/gpu: 4}}
#         volumeMounts: [{name: shared, mountPath: /shared}]
#       volumes:
#       - {name: shared, persistentVolumeClaim: {claimName: shared}}
# ```

# %% [markdown]
# Both send **SIGTERM** before they take a machine away. All processes then finish the same step, a
# checkpoint is written, and the run says so. `/shared` must be a folder that all machines see. A
# process that dies or is silent for `--timeout` seconds ends the run with one line: no run hangs.
# The two launches are examples that nobody ran for this lesson; `torchrun` on one machine is tested.

# %%
progress("15")

# %% [markdown]
# ## What to remember
#
# - DDP copies everything and buys time. FSDP splits weights, gradients and moments, and buys memory.
# - COAP's moments go with the rows; its basis is whole everywhere, from sums of (cols x rank).
# - Plan with shapes first, and know how a run ends before you start it.
#
# ## Where next
#
# Lesson 16 gives you a budget of memory and time, and every method of this kit.
#
# DDP: S. Li and others, VLDB 2020, arXiv 2006.15704. FSDP: Y. Zhao and others, VLDB 2023, arXiv
# 2304.11277. The first basis: N. Halko and others, SIAM Review 2011, arXiv 0909.4061.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
