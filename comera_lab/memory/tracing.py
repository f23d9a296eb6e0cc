"""What a training step keeps, seen without running it: storages, saved tensors, and copies that hold nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Inputs = Sequence[int] | Tensor | Sequence[Tensor]


def storage_key(tensor: Tensor) -> int:
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
        spans[storage_key(tensor)] = _hull(spans.get(storage_key(tensor), span), span)
    return sum(end - start for start, end in spans.values())


def state_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def nested_tensors(value: Any) -> list[Tensor]:
    """Tensors anywhere inside dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in nested_tensors(item)]


class _Saved:
    """What the pack hook returns: alive exactly as long as the autograd graph keeps the saved tensor."""

    __slots__ = ("_released", "tensor")

    def __init__(self, tensor: Tensor, released: Callable[[Tensor], None]) -> None:
        self.tensor = tensor
        self._released = released

    def __del__(self) -> None:
        self._released(self.tensor)


class ActivationMeter:
    """Current and peak bytes of the tensors autograd saves, without those in the storages of `excluded`.

    What the graph lets go leaves the count. Under `torch.utils.checkpoint(use_reentrant=False)` the block
    inputs are counted; what a block recomputes during the backward pass passes by these hooks unseen.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {storage_key(tensor) for tensor in excluded}
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
        key, span = storage_key(tensor), _span(tensor)
        if key not in self._excluded:
            holders, old = self._live.get(key, (0, (span[0], span[0])))
            new = _hull(old, span)
            self._live[key] = (holders + 1, new)
            self._bytes += (new[1] - new[0]) - (old[1] - old[0])
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return _Saved(tensor, self._release)

    def _release(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        holders, (start, end) = self._live.pop(key, (0, (0, 0)))
        if holders > 1:
            self._live[key] = (holders - 1, (start, end))
        else:
            self._bytes -= end - start


class FusedAttention(TorchFunctionMode):
    """On the meta device, keep for backward what fused attention keeps: queries, keys, values, result, log sums.

    torch has no fused kernel for meta tensors and would take the plain one, which keeps all attention weights, where
    the CPU and a GPU do not. With dropout the CPU has none either; `dropout` says whether the planned device has.
    """

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self._dropout = dropout

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        learned = attn_mask is not None and attn_mask.requires_grad
        if query.device.type != "meta" or query.ndim != 4 or learned or (dropout_p and not self._dropout):
            plain = nn.functional.scaled_dot_product_attention
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **others)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask)[0]
        return mixed


def trained_parameters(total: Tensor) -> list[Tensor]:
    """The leaves that a backward pass from `total` would give a gradient, each once, found without running it."""
    waiting, seen, leaves = [total.grad_fn], set(), {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions]
    return list(leaves.values())


def backward(total: Tensor) -> None:
    """`total.backward()` that a `FusedAttention` around it stays in force for, where blocks are recomputed."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((total,), (torch.ones_like(total),), False, False, (), True, True)


def meta_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with every tensor on the meta device, floats in `dtype`; tied parameters stay tied.

    Nothing is allocated: deepcopy finds the meta tensors in its memo and never touches the real ones.
    """
    memo: dict[int, Any] = {}
    for tensor in nested_tensors([vars(module) for module in model.modules()]):
        empty = _meta_like(tensor, dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _meta_like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return torch.empty_like(tensor, device="meta", dtype=kept, requires_grad=False)


def meta_inputs(inputs: Inputs, model: nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
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


def summed(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"without loss= the model must return one tensor, got {type(output).__name__}. "
            "Pass loss=, a function from the output to a scalar."
        )
    return output.sum()
