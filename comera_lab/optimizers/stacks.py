"""Projecting and lifting many parameters at once: alike matrices are stacked and go through one batched product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers.sharding import local
from comera_lab.optimizers.subspaces import MATRIX, Bases, Subspace

# Elements: up to here a product on a CPU costs less than its call and the copy into a stack.
_SMALL = 1 << 15


@dataclass(eq=False)
class Slot:
    """One parameter in one step. `gradient` points downhill and, where projected, is the view of the subspace."""

    name: str
    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    subspace: Subspace | None
    phase: int
    bases: Bases = ()
    low: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The parameter, or the part of it that this process updates."""
        return local(self.parameter)

    @property
    def steps_done(self) -> int:
        return int(self.state["step"]) if "step" in self.state else 0

    @property
    def low_shape(self) -> tuple[int, ...]:
        assert self.subspace is not None
        return self.subspace.low_shape(tuple(self.parameter.shape), tuple(basis.shape[1] for basis in self.bases))

    @property
    def projected(self) -> Tensor:
        """The gradient in the small coordinates."""
        assert self.low is not None
        return self.low


def project_all(slots: Sequence[Slot]) -> None:
    """Set `low` of every slot to its projected gradient."""
    for stack in _stacks(slots):
        if len(stack) == 1:
            slot = stack[0]
            assert slot.subspace is not None
            slot.low = slot.subspace.project(slot.gradient, slot.bases)
            continue
        gradients = torch.stack([slot.gradient for slot in stack])
        bases = torch.stack([slot.bases[0] for slot in stack])
        lows = MATRIX.project(gradients, (bases,))
        for slot, low in zip(stack, lows.unbind(), strict=True):
            slot.low = low


def lift_all(slots: Sequence[Slot], directions: Sequence[Tensor], rate: float, decay: float) -> None:
    """parameter <- decay * parameter - rate * lift(direction), in place, for all slots of one group."""
    by_slot = {id(slot): direction for slot, direction in zip(slots, directions, strict=True)}
    for stack in _stacks(slots):
        lifted: Sequence[Tensor | None] = [None] * len(stack)
        if len(stack) > 1:
            together = torch.stack([by_slot[id(slot)] for slot in stack])
            lifted = MATRIX.lift(together, (torch.stack([slot.bases[0] for slot in stack]),)).unbind()
        for slot, change in zip(stack, lifted, strict=True):
            _lift_one(slot, by_slot[id(slot)], change, rate, decay)


def _lift_one(slot: Slot, direction: Tensor, change: Tensor | None, rate: float, decay: float) -> None:
    subspace = slot.subspace
    assert subspace is not None
    weight = subspace.view(slot.weight)
    if change is None:
        basis = slot.bases[0]
        if subspace is MATRIX and weight.dtype == direction.dtype == basis.dtype:
            weight.addmm_(direction, basis.mT, beta=decay, alpha=-rate)  # no tensor of the parameter's size is made
            return
        change = subspace.lift(direction, slot.bases)
    descend(weight, change, rate, decay, stochastic=slot.group["stochastic_rounding"])


def descend(weight: Tensor, change: Tensor, rate: float, decay: float, *, stochastic: bool) -> None:
    """weight <- decay * weight - rate * change, in place; computed in float32 and rounded once for half precision.

    `stochastic` rounds bfloat16 up or down with the odds of the distance, from torch's own generator: updates below
    half a step of the format then count in the mean, where rounding to nearest loses them.
    """
    if weight.dtype == change.dtype:
        if decay != 1:
            weight.mul_(decay)
        weight.add_(change, alpha=-rate)
        return
    wide = weight.to(change.dtype).mul_(decay).sub_(change, alpha=rate)
    if stochastic and weight.dtype == torch.bfloat16:
        bits = wide.float().view(torch.int32)
        bits = (bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)
        wide = bits.view(torch.float32)
    weight.copy_(wide)


def _stacks(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots that one batched product can serve, and the others alone."""
    alike: dict[object, list[Slot]] = {}
    for slot in slots:
        gradient, together = slot.gradient, slot.group["foreach"]
        if together is None:
            together = gradient.device.type != "cpu" or gradient.numel() <= _SMALL
        if slot.subspace is not MATRIX or not together:
            yield [slot]
            continue
        key = (gradient.shape, slot.bases[0].shape, gradient.dtype, slot.bases[0].dtype, gradient.device)
        alike.setdefault(key, []).append(slot)
    yield from alike.values()
