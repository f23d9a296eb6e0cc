"""Predict the bytes of a training step on meta tensors, and measure them on a real one."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from comera_lab.memory.pools import Measured, Pools
from comera_lab.memory.states import STATE_RULES, StateSettings, state_bytes

Inputs = Sequence[int] | Tensor | Sequence[Tensor]


def _storage_key(tensor: Tensor) -> int:
    """Identity of a storage while it lives; works on meta tensors, whose data pointers are all zero."""
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and one past the last byte of its storage that a strided tensor covers."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(reach) + 1) * tensor.element_size() if tensor.numel() else start


def _hull(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the tensors keep, each storage once, as the span that their elements cover."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        span = _span(tensor)
        spans[_storage_key(tensor)] = _hull(spans.get(_storage_key(tensor), span), span)
    return sum(end - start for start, end in spans.values())


def _state_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _nested_tensors(value: Any) -> list[Tensor]:
    """Tensors anywhere inside dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _nested_tensors(item)]


class _Saved:
    """What the pack hook returns: alive exactly as long as the autograd graph keeps the saved tensor."""

    __slots__ = ("_released", "tensor")

    def __init__(self, tensor: Tensor, released: Callable[[Tensor], None]) -> None:
        self.tensor = tensor
        self._released = released

    def __del__(self) -> None:
        self._released(self.tensor)


class _ActivationMeter:
    """Current and peak bytes of the tensors autograd saves, without those in the storages of `excluded`.

    What the graph lets go leaves the count. Under `torch.utils.checkpoint(use_reentrant=False)` the block
    inputs are counted; what a block recomputes during the backward pass passes by these hooks unseen.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {_storage_key(tensor) for tensor in excluded}
        self._live: dict[int, tuple[int, tuple[int, int]]] = {}  # storage -> (holders, span they cover)
        self._bytes = 0
        self.peak_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Saved:
        key, span = _storage_key(tensor), _span(tensor)
        if key not in self._excluded:
            holders, old = self._live.get(key, (0, (span[0], span[0])))
            new = _hull(old, span)
            self._live[key] = (holders + 1, new)
            self._bytes += (new[1] - new[0]) - (old[1] - old[0])
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return _Saved(tensor, self._release)

    def _release(self, tensor: Tensor) -> None:
        key = _storage_key(tensor)
        holders, (start, end) = self._live.pop(key, (0, (0, 0)))
        if holders > 1:
            self._live[key] = (holders - 1, (start, end))
        else:
            self._bytes -= end - start


def _meta_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with every tensor on the meta device, floats in `dtype`; tied parameters stay tied.

    Nothing is allocated: deepcopy finds the meta tensors in its memo and never touches the real ones.
    """
    memo: dict[int, Any] = {}
    for tensor in _nested_tensors([vars(module) for module in model.modules()]):
        empty = _meta_like(tensor, dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _meta_like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return torch.empty_like(tensor, device="meta", dtype=kept, requires_grad=False)


def _meta_inputs(inputs: Inputs, model: nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
    """A shape becomes one tensor in the model's float dtype; an example keeps its shape and kind."""
    items = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    sizes = [item for item in items if isinstance(item, int)]
    examples = [item for item in items if isinstance(item, Tensor)]
    if not items or (len(sizes) != len(items) and len(examples) != len(items)):
        raise ValueError(
            f"inputs must be a shape of ints, a tensor or several tensors, got {items!r}. "
            "Give the shape of one batch, for example (64, 784)."
        )
    if examples:
        return [_meta_like(example, dtype) for example in examples]
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return [torch.empty(sizes, device="meta", dtype=next(floats, torch.get_default_dtype()))]


def _summed(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"without loss= the model must return one tensor, got {type(output).__name__}. "
            "Pass loss=, a function from the output to a scalar."
        )
    return output.sum()


def predict(
    model: nn.Module,
    inputs: Inputs,
    optimizer: str = "adamw",
    *,
    dtype: torch.dtype | None = None,
    master: bool = False,
    settings: StateSettings | None = None,
    loss: Callable[[Any], Tensor] = _summed,
) -> Pools:
    """Predicted bytes of one training step, from shapes alone: the model is never allocated.

    Weights, grads and optimizer state are closed forms and equal a measurement to the byte. Activations come
    from a forward and backward pass of a meta copy under saved-tensor hooks.

    inputs     shape of one batch, or an example tensor (only its shape and dtype are read), or several
    optimizer  one of `STATE_RULES`; "adamw-8bit" is arithmetic only (`PREDICTED_ONLY`)
    settings   of the optimizer, as far as its bytes depend on them: rank, rank ratio, ..
    dtype      of weights, grads and activations; None keeps the model's own
    master     fp32 copy of the weights and fp32 moments, all in the optimizer pool; see `PRECISIONS`
    loss       output -> scalar, as in training; the default sums the output, which saves nothing more
    """
    if optimizer not in STATE_RULES:
        raise ValueError(f"optimizer must be one of {', '.join(STATE_RULES)}, got {optimizer!r}. Pick one of them.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a float type, got {dtype}. Training needs one: use torch.bfloat16.")
    twin = _meta_copy(model, dtype)
    with _ActivationMeter(_state_tensors(twin)) as meter:
        total = loss(twin(*_meta_inputs(inputs, twin, dtype)))
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    trained = [parameter for parameter in twin.parameters() if parameter.grad is not None]
    return Pools(
        weights=tensor_bytes(_state_tensors(twin)),
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
    return next((tensor.device for tensor in _state_tensors(model)), torch.device("cpu"))


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
        with _ActivationMeter(_state_tensors(model)) as meter:
            step()
        if on_cuda:
            torch.cuda.synchronize(device)
    finally:
        handle.remove()
    if not grads_bytes:
        raise ValueError("step must call optimizer.step(), it did not. Pass a whole training step.")
    own = {_storage_key(tensor) for tensor in _state_tensors(model)}
    kept = _nested_tensors(list(optimizer.state.values())) + _nested_tensors(optimizer.param_groups)
    return Measured(
        pools=Pools(
            weights=tensor_bytes(_state_tensors(model)),
            grads=max(grads_bytes),
            optimizer=tensor_bytes(tensor for tensor in kept if _storage_key(tensor) not in own),
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
