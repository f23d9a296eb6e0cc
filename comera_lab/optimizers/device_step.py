"""AdamW and COAP updates whose changing numbers all lie on the device: what a CUDA graph can hold.

An optimizer's own `step` counts and corrects on the host, so a graph of it would replay the first step's numbers for
ever. Here rate, decay and bias corrections are eight numbers in a tensor, written before each replay; state stays in
the optimizer, in place, so that checkpoints, reports and a later eager step see what they always see.
Not checked inside a graph: whether gradients are finite. Look at the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from comera_lab.kernels import takes_triton
from comera_lab.kernels.matrix_group import adam_scalars
from comera_lab.optimizers import fused
from comera_lab.optimizers.coap import COAPAdamW
from comera_lab.optimizers.fused import MOMENTS
from comera_lab.optimizers.quantized import read_moment, write_moment
from comera_lab.optimizers.subspaces import MATRIX, Bases, Subspace, bases_of, subspace_of


@dataclass(eq=False)
class _Line:
    """One parameter, the subspace that it is updated in, and the numbers of its group on the device."""

    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    subspace: Subspace | None
    scalars: Tensor


class DeviceStep:
    """The update of an optimizer that has made a step, for parameters whose gradients stay where they are.

    `optimizer` is a torch.optim.AdamW or a COAPAdamW (or what derives from it); every parameter with a gradient must
    have state. In each step call `renew` and `write_scalars`, then `run` (the part to capture), then `count`. `backend`
    as for the kernels: None takes triton for CUDA matrices, else torch. Raises ValueError for what cannot be honoured.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: str | None = None) -> None:
        if not isinstance(optimizer, torch.optim.AdamW | COAPAdamW):
            raise ValueError(f"a graph takes AdamW or COAPAdamW, got {type(optimizer).__name__}. Step it eagerly.")
        self.optimizer, groups = optimizer, optimizer.param_groups
        self._device = groups[0]["params"][0].device
        self._scalars = torch.zeros(2 * len(groups), 8, dtype=torch.float32, device=self._device)
        self._rates = torch.zeros(len(groups), dtype=torch.float32, device=self._device)
        self._lines = [line for number, group in enumerate(groups) for line in self._lines_of(number, group)]
        if not self._lines:
            raise ValueError("the optimizer must have made a step, got one without state. Step it once before.")
        self._done = [self._steps_done(group) for group in groups]
        self._plain = [
            (
                [line for line in self._lines if line.group is group and line.subspace is None and _fits_fused(line)],
                rate,
            )
            for group, rate in zip(groups, self._rates, strict=True)
        ]
        self._plain_steps = [
            [torch.full((), float(done), device=self._device) for _ in lines]
            for (lines, _), done in zip(self._plain, self._done, strict=True)
        ]
        together = {id(line) for lines, _ in self._plain for line in lines}
        rest = [line for line in self._lines if id(line) not in together]
        alike: dict[object, list[_Line]] = {}
        self._single: list[_Line] = []
        for line in rest:
            if line.subspace is MATRIX and takes_triton(backend, self._device, fused.why_not(_matrix(line))):
                alike.setdefault((id(line.group), fused.likeness(_matrix(line))), []).append(line)
            else:
                self._single.append(line)
        self._stacks = [(fused.grouped([*map(_matrix, lines)]), lines[0].scalars) for lines in alike.values()]
        self._phases = [
            (groups.index(slot.group), slot.phase, slot.group["update_interval"])
            for slot in (optimizer._slots() if isinstance(optimizer, COAPAdamW) else ())
            if slot.subspace is not None
        ]

    def _lines_of(self, number: int, group: dict[str, Any]) -> Iterator[_Line]:
        for setting in ("amsgrad", "maximize", "stochastic_rounding"):
            if group.get(setting):
                raise ValueError(f"a graph cannot honour {setting}=True. Switch it off or step eagerly.")
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            if parameter.grad is None:
                continue
            if not state.keys() - {"step"}:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient but no state: it was zero "
                    "so far, or no step was made. Make more eager steps before capturing."
                )
            subspace = subspace_of(state)
            yield _Line(parameter, group, state, subspace, self._scalars[2 * number + (subspace is not None)])

    def _steps_done(self, group: dict[str, Any]) -> int:
        steps = {int(line.state["step"]) for line in self._lines if line.group is group}
        if len(steps) > 1:
            raise ValueError(f"parameters of a group must have made equally many steps, got {sorted(steps)}.")
        return steps.pop() if steps else 0

    @torch.no_grad()
    def renew(self) -> int:
        """Renew, in place, the bases that are due at this step; how many. Runs eagerly, before `run`."""
        if not any((self._done[group] + phase) % interval == 0 for group, phase, interval in self._phases):
            return 0
        optimizer = self.optimizer
        assert isinstance(optimizer, COAPAdamW)
        slots = optimizer._slots()
        renewed = optimizer._renewed_bases(slots)
        for slot in slots:
            if id(slot) in renewed:
                old = tuple(basis.clone() for basis in slot.bases)
                for basis, new in zip(slot.bases, renewed[id(slot)], strict=True):
                    basis.copy_(new)
                if slot.group["transfer_moments"]:
                    assert slot.subspace is not None
                    slot.low = slot.subspace.project(slot.gradient, slot.bases)
                    optimizer.transfer(slot, old)
        return len(renewed)

    def write_scalars(self) -> None:
        """Put rate, decay and corrections of the coming step on the device, from the groups as they are now."""
        groups = self.optimizer.param_groups
        rows = [
            _scalars(group, done + 1, scale)
            for group, done in zip(groups, self._done, strict=True)
            for scale in (1.0, group.get("scale", 1.0))
        ]
        rates = [float(group["lr"]) for group in groups]
        pinned = self._device.type == "cuda"  # else the copy waits for all work before it
        self._scalars.copy_(torch.tensor(rows, pin_memory=pinned), non_blocking=True)
        self._rates.copy_(torch.tensor(rates, pin_memory=pinned), non_blocking=True)

    @torch.no_grad()
    def run(self) -> None:
        """Update weights and moments. Reads nothing from the host and allocates nothing that outlives it."""
        for (lines, rate), steps in zip(self._plain, self._plain_steps, strict=True):
            if lines:
                _fused_adamw(lines, rate, steps)
        for group, scalars in self._stacks:
            fused.launch(group, scalars)
        for line in self._single:
            _step_one(line)

    def count(self) -> None:
        """Count the step in the optimizer's state."""
        self._done = [done + 1 for done in self._done]
        torch._foreach_add_([line.state["step"] for line in self._lines], 1)


def _scalars(group: Mapping[str, Any], step: int, scale: float) -> list[float]:
    rate, decay = float(group["lr"]), group["weight_decay"]
    return adam_scalars(step, rate, betas=group["betas"], eps=group["eps"], weight_decay=decay, scale=scale)


def _fused_adamw(lines: list[_Line], rate: Tensor, steps: list[Tensor]) -> None:
    group = lines[0].group
    adamw(
        [line.parameter for line in lines],
        [_gradient(line) for line in lines],
        [line.state[MOMENTS[0]] for line in lines],
        [line.state[MOMENTS[1]] for line in lines],
        [],
        steps,
        fused=True,
        amsgrad=False,
        maximize=False,
        lr=rate,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )


def _step_one(line: _Line) -> None:
    """The same update for one tensor in torch's operations, the numbers read on the device."""
    step_size, decay, root, eps, b1, c1, b2, c2 = line.scalars.unbind()
    bases: Bases = ()
    weight, gradient = line.parameter, _gradient(line)
    if line.subspace is not None:
        weight, gradient = line.subspace.view(weight), line.subspace.view(gradient)
        bases = bases_of(line.state, line.subspace)
        gradient = line.subspace.project(gradient, bases)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    low = gradient.to(wide)
    mean, square = (read_moment(line.state, name, low.shape).to(wide) for name in MOMENTS)
    mean = mean * b1 + low * c1
    square = square * b2 + low.square() * c2
    direction = mean / (square.sqrt() * root + eps)
    write_moment(line.state, MOMENTS[0], mean)
    write_moment(line.state, MOMENTS[1], square)
    change = direction if line.subspace is None else line.subspace.lift(direction, bases)
    weight.copy_(weight.to(wide) * decay - step_size * change)


def _gradient(line: _Line) -> Tensor:
    gradient = line.parameter.grad
    assert gradient is not None
    return gradient


def _fits_fused(line: _Line) -> bool:
    return all(name in line.state and line.state[name].dtype == line.parameter.dtype for name in MOMENTS)


def _matrix(line: _Line) -> fused.Matrix:
    return fused.Matrix(MATRIX.view(line.parameter), MATRIX.view(_gradient(line)), line.state)
