"""Bytes of a training step, predicted and measured, in four pools: weights, grads, optimizer, activations.

weights      parameters and buffers, each storage once (tied parameters count once)
grads        `.grad` of every parameter that receives one
optimizer    what the optimizer keeps between steps, AdamW's small step counters and a master copy included
activations  peak of what autograd saves for the backward pass and that is no parameter or buffer; the input
             batch and the targets count when the backward pass needs them

Short-lived workspace inside an operation belongs to no pool; on a GPU it shows in the allocated peak. One
storage counts as the span of bytes that its saved tensors cover, so a batch sliced out of a data set counts
as the batch, not as the data set.
"""

from comera_lab.memory.footprint import Footprint, footprint, repeated_blocks
from comera_lab.memory.gpus import GPUS, capacity, fits_on
from comera_lab.memory.meter import measure, predict, process_rss_bytes
from comera_lab.memory.plan import METHODS, MethodPlan, Plan, PlanSettings, plan
from comera_lab.memory.pools import (
    GAP_LIMIT,
    POOLS,
    PRECISIONS,
    Measured,
    MemoryReport,
    Pools,
    Precision,
    format_bytes,
    mib,
)
from comera_lab.memory.published import LLAMA, PUBLISHED, UNETS, PublishedSize, llama_shapes, unet_shapes
from comera_lab.memory.states import (
    OPTIMIZERS,
    PROJECTED,
    STATE_RULES,
    LowRank,
    StateBytes,
    StateSettings,
    low_rank,
    optimizer_bytes,
    state_bytes,
)
from comera_lab.memory.tracing import Inputs, tensor_bytes

__all__ = [
    "GAP_LIMIT",
    "GPUS",
    "LLAMA",
    "METHODS",
    "OPTIMIZERS",
    "POOLS",
    "PRECISIONS",
    "PROJECTED",
    "PUBLISHED",
    "STATE_RULES",
    "UNETS",
    "Footprint",
    "Inputs",
    "LowRank",
    "Measured",
    "MemoryReport",
    "MethodPlan",
    "Plan",
    "PlanSettings",
    "Pools",
    "Precision",
    "PublishedSize",
    "StateBytes",
    "StateSettings",
    "capacity",
    "fits_on",
    "footprint",
    "format_bytes",
    "llama_shapes",
    "low_rank",
    "measure",
    "mib",
    "optimizer_bytes",
    "plan",
    "predict",
    "process_rss_bytes",
    "repeated_blocks",
    "state_bytes",
    "tensor_bytes",
    "unet_shapes",
]
