"""What a model costs in a training step whatever the optimizer: weights, gradients, activations, from a meta copy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comera_lab.layers import TTModule
from comera_lab.memory.states import Shape
from comera_lab.memory.tracing import (
    ActivationMeter,
    FusedAttention,
    Inputs,
    meta_copy,
    meta_inputs,
    nested_tensors,
    state_tensors,
    summed,
    tensor_bytes,
    trained_parameters,
)

Part = Literal["core", "table", "body"]


@dataclass(frozen=True)
class Trained:
    """A parameter that gets a gradient: a core or gate, a table (or a head of its shape), or any other."""

    shape: Shape
    part: Part
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes of weights and activations, and the parameters that are trained."""

    weights: int
    activations: int
    trained: tuple[Trained, ...]

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return sum(math.prod(one.shape) for one in self.trained)

    def stretched(self, longer: Footprint, times: int) -> Footprint:
        """This footprint plus `times` what `longer`, of a model with one more of its repeated blocks, has more.

        Blocks of one kind cost the same, checkpointed or not, from the second on: two small models tell all.
        """
        more = list((Counter(longer.trained) - Counter(self.trained)).elements())
        return Footprint(
            self.weights + times * (longer.weights - self.weights),
            self.activations + times * (longer.activations - self.activations),
            (*self.trained, *more * times),
        )


def footprint(
    model: nn.Module,
    inputs: Inputs,
    *,
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], Tensor] = summed,
    checkpointing: bool = False,
) -> Footprint:
    """Arguments as in `predict`, nothing is allocated; attention is taken as fused, which all GPUs do.

    With `checkpointing` each of the repeated blocks keeps its input alone. The peak then is what all blocks keep and
    what the head keeps, or what all blocks keep and one block makes again, whichever is more. Raises ValueError where
    there are no repeated blocks.
    """
    twin = meta_copy(model, dtype)
    blocks = _Recomputed(twin) if checkpointing else None
    with FusedAttention(dropout=True):
        with ActivationMeter(state_tensors(twin)) as meter:
            total = loss(twin(*meta_inputs(inputs, twin, dtype)))
        trained = tuple(_trained(twin, {id(leaf) for leaf in trained_parameters(total)}))
        activations = meter.peak_bytes if blocks is None else max(meter.peak_bytes, blocks.peak())
    return Footprint(tensor_bytes(state_tensors(twin)), activations, trained)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class, each with layers inside: what checkpointing recomputes."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    alike = [
        blocks
        for blocks in lists
        if len({type(block) for block in blocks}) == 1
        and any(isinstance(inner, nn.ModuleList | nn.Linear) or "Attention" in type(inner).__name__
                for inner in blocks[0].children())
    ]  # fmt: skip
    return max(alike, key=len, default=[])


class _Recomputed:
    """The repeated blocks of a meta model, from now on checkpointed."""

    def __init__(self, twin: nn.Module) -> None:
        self._blocks = repeated_blocks(twin)
        self._call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        if not self._blocks:
            raise ValueError("checkpointing needs repeated blocks, this model has none. Leave it out.")
        for block in self._blocks:
            block.forward = partial(self._forward, block.forward)

    def _forward(self, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._call is None:
            self._call = (forward, arguments, options)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    def peak(self) -> int:
        """Bytes of all inputs, and of what one block keeps while it is recomputed."""
        assert self._call is not None
        forward, arguments, options = self._call
        given = nested_tensors([arguments, options])
        inputs = [tensor for tensor in given if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]
        with ActivationMeter([*state_tensors(self._blocks[0]), *given]) as meter:
            made = forward(*arguments, **options)
        del made  # the graph, and what it kept, until here
        return len(self._blocks) * tensor_bytes(inputs) + meter.peak_bytes


def _trained(twin: nn.Module, reached: set[int]) -> list[Trained]:
    cores = {id(p) for module in twin.modules() if isinstance(module, TTModule) for p in module.parameters()}
    tables = {module.weight.shape for module in twin.modules() if isinstance(module, nn.Embedding)}
    made = []
    for parameter in twin.parameters():
        if id(parameter) not in reached:
            continue
        part: Part = "core" if id(parameter) in cores else "table" if parameter.shape in tables else "body"
        made.append(Trained(tuple(parameter.shape), part, parameter.numel() * parameter.element_size()))
    return made
