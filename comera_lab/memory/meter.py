"""Predict the bytes of a training step on meta tensors, and measure them on a real one."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.memory.pools import Measured, Pools
from comera_lab.memory.states import STATE_RULES, StateSettings, state_bytes
from comera_lab.memory.tracing import (
    ActivationMeter,
    FusedAttention,
    Inputs,
    backward,
    meta_copy,
    meta_inputs,
    nested_tensors,
    state_tensors,
    storage_key,
    summed,
    tensor_bytes,
)


def predict(
    model: nn.Module,
    inputs: Inputs,
    optimizer: str = "adamw",
    *,
    dtype: torch.dtype | None = None,
    master: bool = False,
    settings: StateSettings | None = None,
    loss: Callable[[Any], Tensor] = summed,
) -> Pools:
    """Predicted bytes of one training step, from shapes alone: the model is never allocated.

    Weights, grads and optimizer state are closed forms and equal a measurement to the byte. Activations come
    from a forward and backward pass of a meta copy under saved-tensor hooks.

    inputs     shape of one batch, or an example tensor (only its shape and dtype are read), or several
    optimizer  one of `STATE_RULES`
    settings   of the optimizer, as far as its bytes depend on them: rank, rank ratio, ..
    dtype      of weights, grads and activations; None keeps the model's own
    master     fp32 copy of the weights and fp32 moments, all in the optimizer pool; see `PRECISIONS`
    loss       output -> scalar, as in training; the default sums the output, which saves nothing more
    """
    if optimizer not in STATE_RULES:
        raise ValueError(f"optimizer must be one of {', '.join(STATE_RULES)}, got {optimizer!r}. Pick one of them.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a float type, got {dtype}. Training needs one: use torch.bfloat16.")
    twin = meta_copy(model, dtype)
    with ActivationMeter(state_tensors(twin)) as meter, FusedAttention(dropout=_device(model).type != "cpu"):
        total = loss(twin(*meta_inputs(inputs, twin, dtype)))
        if total.requires_grad:
            backward(total)
    trained = [parameter for parameter in twin.parameters() if parameter.grad is not None]
    return Pools(
        weights=tensor_bytes(state_tensors(twin)),
        grads=sum(p.numel() * p.element_size() for p in trained),
        optimizer=sum(
            4 * p.numel() * master
            + state_bytes(p.shape, optimizer, torch.float32 if master else p.dtype, settings).total
            for p in trained
        ),
        activations=meter.peak_bytes,
    )


def process_rss_bytes() -> int | None:
    """Resident bytes of this process, all of Python and torch included; None where the system does not tell."""
    if sys.platform.startswith("linux"):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        psutil = importlib.import_module("psutil")  # ipykernel brings it; torch and numpy do not
    except ImportError:
        return None
    return int(psutil.Process().memory_info().rss)


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in state_tensors(model)), torch.device("cpu"))


def measure(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> Measured:
    """Measure one real call of `step`, which runs forward, backward and `optimizer.step()` in this thread.

    Weights, grads (as the optimizer meets them) and optimizer state (after its step) are the bytes of the
    tensors that can be reached; activations are the peak of the saved tensors. On CUDA the peaks of allocated
    and reserved memory over the step come along. Raises ValueError if `step` never calls `optimizer.step()`.
    """
    device = _device(model)
    on_cuda = device.type == "cuda"
    grads_bytes: list[int] = []

    def before_update(*_: object) -> None:
        grads_bytes.append(tensor_bytes(p.grad for p in model.parameters() if p.grad is not None))

    handle = optimizer.register_step_pre_hook(before_update)
    try:
        if on_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        with ActivationMeter(state_tensors(model)) as meter:
            step()
        if on_cuda:
            torch.cuda.synchronize(device)
    finally:
        handle.remove()
    if not grads_bytes:
        raise ValueError("step must call optimizer.step(), it did not. Pass a whole training step.")
    own = {storage_key(tensor) for tensor in state_tensors(model)}
    kept = nested_tensors(list(optimizer.state.values())) + nested_tensors(optimizer.param_groups)
    return Measured(
        pools=Pools(
            weights=tensor_bytes(state_tensors(model)),
            grads=max(grads_bytes),
            optimizer=tensor_bytes(tensor for tensor in kept if storage_key(tensor) not in own),
            activations=meter.peak_bytes,
        ),
        device=str(device),
        allocated_peak_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        reserved_peak_bytes=torch.cuda.max_memory_reserved(device) if on_cuda else None,
        rss_bytes=process_rss_bytes(),
        notes=("optimizer includes AdamW's step counters, one small float per parameter",)
        if isinstance(optimizer, torch.optim.AdamW)
        else (),
    )
