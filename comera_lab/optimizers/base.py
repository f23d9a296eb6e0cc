"""The loop that all projecting optimizers share: settings, when a basis is renewed, checkpoints, report.

A step has two halves. The first changes nothing: bases that are due are renewed beside the old ones, every gradient
is projected, and what came out is checked in one reduction (a row of G with a NaN or Inf has no finite projection).
A gradient that is not finite is named there, with parameters and state as they were. The second half updates.

State of a projected parameter: "step", "basis" (or "basis_out" and "basis_in") and moments in the small coordinates,
all tensors. A basis is made from the first gradient that is not zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from comera_lab.optimizers import checks
from comera_lab.optimizers.cutting import cut_state
from comera_lab.optimizers.eager import EagerOptimizer
from comera_lab.optimizers.report import OptimizerReport, OptimizerRow
from comera_lab.optimizers.sharding import ShardedMatrix, agreement, as_parts, local, subspace_on
from comera_lab.optimizers.stacks import Slot, lift_all, project_all
from comera_lab.optimizers.subspaces import Bases, Subspace, bases_of, subspace_for, subspace_of

# Multiples of the golden ratio fall evenly into an interval, however many parameters there are.
_GOLDEN = 0.618033988749895

Work = Literal["first", "refresh", "align"]


class ProjectedOptimizer(EagerOptimizer):
    """The base of updates in subspaces. A subclass gives the moments and the two updates."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.refuse_idle_projection()

    # what a subclass gives

    def new_moments(
        self, shape: tuple[int, ...], parameter: Tensor, group: Mapping[str, Any], *, low: bool
    ) -> dict[str, Tensor]:
        """Moments of zeros, on the parameter's device, for a tensor of `shape`; `low` says that it is a projection."""
        raise NotImplementedError

    def momentum(self, slot: Slot) -> Tensor | None:
        """The first moment in the small coordinates, for the alignment step; None without one."""
        raise NotImplementedError

    def transfer(self, slot: Slot, old: Bases) -> None:
        """Carry the moments over from the bases `old` to `slot.bases`."""
        raise NotImplementedError

    def directions(self, group: dict[str, Any], slots: Sequence[Slot]) -> list[Tensor]:
        """Update moments and step counters from `slot.low`; what to lift, to be subtracted times the rate."""
        raise NotImplementedError

    def update_plain(self, group: dict[str, Any], slots: Sequence[Slot]) -> None:
        """One whole step of the unprojected rule, step counters included."""
        raise NotImplementedError

    def whole_steps(self, slots: Sequence[Slot]) -> set[int]:
        """id of the slots that `update_whole` will step, from the gradient to the weight; ValueError if it cannot."""
        return set()

    def update_whole(self, group: dict[str, Any], slots: Sequence[Slot]) -> None:
        """One whole step of slots that `whole_steps` named, step counters included."""

    # torch.optim's own interface

    @torch.no_grad()
    def update(self, only: Collection[Tensor] | None = None) -> None:
        """`step` without closure and hooks, for all parameters or for `only` some: what a layer-wise update calls."""
        chosen = None if only is None else {id(parameter) for parameter in only}
        slots = [slot for slot in self._slots() if chosen is None or id(slot.parameter) in chosen]
        renewed = self._renewed_bases(slots)
        for slot in slots:
            slot.bases = renewed.get(id(slot), slot.bases)
        moved = {id(slot) for slot in slots if id(slot) in renewed and slot.group["transfer_moments"]}
        whole = self.whole_steps([slot for slot in slots if id(slot) not in moved])
        project_all([slot for slot in slots if slot.bases and id(slot) not in whole])
        checked = [slot.gradient if slot.low is None else slot.low for slot in slots]
        checks.refuse_nonfinite(checked, lambda number: slots[number].name, agreement(slot.parameter for slot in slots))
        for slot in slots:
            self._begin(slot, renewed.get(id(slot)))
        for group in self.param_groups:
            mine = [slot for slot in slots if slot.group is group]
            self.update_whole(group, [slot for slot in mine if id(slot) in whole])
            self._update_group(group, [slot for slot in mine if id(slot) not in whole])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Codes stay codes, moments and bases take this optimizer's dtypes and devices.

        The tensors are copied, so that two optimizers never share state. Raises ShapeError, with nothing changed, for
        state that does not fit the parameters.
        """
        seen: list[dict[str, Any]] = []

        def look(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            self._check_loaded(state)
            seen.append(state)

        handle = self.register_load_state_dict_pre_hook(look)  # the last one: it sees what will be loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved = [number for group in seen[-1]["param_groups"] for number in group["params"]]
        for number, (parameter, group, _) in zip(saved, self._parameters(), strict=True):
            if number in seen[-1]["state"]:
                self.state[parameter] = self._restored(parameter, group, seen[-1]["state"][number])

    def report(self) -> OptimizerReport:
        """Name, shape, rank, side and state bytes of every parameter: as it is, or as its first step will make it."""
        rows = []
        for parameter, group, name in self._parameters():
            state = self.state.get(parameter, {})
            shape = tuple(parameter.shape)
            subspace, ranks = self._plan(parameter, group, state)
            if not self._begun(state):
                with torch.device("meta"):
                    state = self._fresh_state(parameter, group, subspace, ranks)
            used = sum(local(value).nbytes for value in state.values() if isinstance(value, Tensor))
            rows.append(OptimizerRow(name, shape, ranks, subspace.side(shape) if subspace else None, used))
        return OptimizerReport(tuple(rows))

    def cut_state(self, parameter: Tensor, kept: Mapping[int, Tensor]) -> dict[str, Any]:
        """State for a copy of `parameter` that keeps, along each dimension d in `kept`, the entries kept[d] alone.

        Changes nothing: put the state into `optimizer.state` under the cut parameter, and that into its group.
        """
        for known, group, _ in self._parameters():
            if known is parameter:
                return cut_state(self.state.get(parameter, {}), tuple(parameter.shape), kept, bits=group["bits"])
        raise ValueError("the optimizer must hold the parameter, got another one. Cut before it is replaced.")

    # the first half of a step

    def _parameters(self) -> Iterator[tuple[Tensor, dict[str, Any], str]]:
        number = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                yield parameter, group, names[place] if names else f"parameter {number}"
                number += 1

    def _slots(self) -> list[Slot]:
        slots = []
        for number, (parameter, group, name) in enumerate(self._parameters()):
            if parameter.grad is None:
                continue
            checks.check_gradient(parameter.grad, name)
            gradient = -parameter.grad if group["maximize"] else parameter.grad
            state = self.state.get(parameter, {})
            subspace, _ = self._plan(parameter, group, state)
            if isinstance(subspace, ShardedMatrix):
                gradient = subspace.rows_of(gradient)
            slot = Slot(name, parameter, local(gradient), group, state, subspace, _phase(number, group))
            if subspace is not None:
                slot.gradient = subspace.view(slot.gradient)
                slot.bases = bases_of(state, subspace) if self._begun(state) else ()
            slots.append(slot)
        return slots

    def _plan(
        self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[Subspace | None, tuple[int, ...] | None]:
        """Subspace and ranks: those of the state once there is one, those of the settings before."""
        if not self._begun(state):
            shape = tuple(parameter.shape)
            subspace = subspace_on(subspace_for(shape, group), parameter)
            return subspace, subspace.ranks(shape, group) if subspace else None
        subspace = subspace_on(subspace_of(state), parameter)
        return subspace, tuple(basis.shape[1] for basis in bases_of(state, subspace)) if subspace else None

    @staticmethod
    def _begun(state: Mapping[str, Any]) -> bool:
        """Whether there is more than a step counter, which is all that zero gradients leave."""
        return len(state) > ("step" in state)

    def _renewed_bases(self, slots: Sequence[Slot]) -> dict[int, Bases]:
        """id(slot) -> new bases, for those that are due. Nothing is kept yet."""
        due = [(slot, work) for slot in slots if slot.subspace is not None and (work := _work(slot)) is not None]
        agree = agreement(slot.parameter for slot, _ in due)
        checks.refuse_nonfinite([slot.gradient for slot, _ in due], lambda number: due[number][0].name, agree)
        renewed = {}
        for slot, work in due:
            subspace, group = slot.subspace, slot.group
            assert subspace is not None
            if work == "first":
                ranks = subspace.ranks(tuple(slot.parameter.shape), group)
                if ranks is not None and not subspace.is_zero(slot.gradient):
                    renewed[id(slot)] = subspace.first(slot.gradient, ranks, group["refresh"])
            elif work == "refresh":
                renewed[id(slot)] = subspace.refreshed(slot.gradient, slot.bases, group["refresh"])
            else:
                momentum = self.momentum(slot)
                renewed[id(slot)] = subspace.aligned(slot.gradient, slot.bases, momentum, group["alignment"])
        return renewed

    # the second half

    def _begin(self, slot: Slot, bases: Bases | None) -> None:
        """Make state that is missing, and keep renewed bases."""
        state = slot.state = self.state[slot.parameter]
        if "step" not in state:
            state["step"] = _step_counter()
        if slot.subspace is None:
            if not self._begun(state):
                moments = self.new_moments(tuple(slot.weight.shape), slot.weight, slot.group, low=False)
                state.update(as_parts(slot.parameter, moments, None))
        elif bases is not None:
            known = self._begun(state)
            old = bases_of(state, slot.subspace) if known else ()
            state.update(zip(slot.subspace.keys, bases, strict=True))
            if not known:
                moments = self.new_moments(tuple(slot.projected.shape), slot.weight, slot.group, low=True)
                state.update(as_parts(slot.parameter, moments, slot.subspace))
            elif slot.group["transfer_moments"]:
                self.transfer(slot, old)

    def _update_group(self, group: dict[str, Any], slots: Sequence[Slot]) -> None:
        plain = [slot for slot in slots if slot.subspace is None]
        if plain:
            self.update_plain(group, plain)
        rate = float(group["lr"])
        decay = 1 - rate * group["weight_decay"]
        for slot in slots:
            if slot.subspace is not None and not slot.bases:
                slot.parameter.mul_(decay)
                slot.state["step"] += 1
        low = [slot for slot in slots if slot.bases]
        if low:
            lift_all(low, self.directions(group, low), rate * group["scale"], decay)

    # state

    def _fresh_state(
        self, parameter: Tensor, group: Mapping[str, Any], subspace: Subspace | None, ranks: tuple[int, ...] | None
    ) -> dict[str, Tensor]:
        """What this process would hold for `parameter`, on the meta device."""
        shape, here = tuple(parameter.shape), local(parameter).to("meta")
        state = {"step": _step_counter()}
        if subspace is None or ranks is None:
            return {**state, **self.new_moments(tuple(here.shape), here, group, low=False)}
        for key, size in zip(subspace.keys, subspace.basis_shapes(shape, ranks), strict=True):
            state[key] = here.new_empty(size)
        return {**state, **self.new_moments(subspace.low_shape(shape, ranks), here, group, low=True)}

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        mine = list(self._parameters())
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(saved) == len(mine):  # else torch's own message follows
            for number, (parameter, _, name) in zip(saved, mine, strict=True):
                checks.check_state(parameter, state_dict["state"].get(number, {}), name)

    def _restored(self, parameter: Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the saved state of one parameter, in the dtypes and on the device of this one."""
        state: dict[str, Any] = {}
        subspace, ranks = self._plan(parameter, group, saved)
        like = self._fresh_state(parameter, group, subspace, ranks) if self._begun(saved) else {}
        for key, value in saved.items():
            if not isinstance(value, Tensor) or key == "step":
                state[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            keep = value.dtype if key not in like or not value.is_floating_point() else like[key].dtype
            state[key] = value.to(device=parameter.device, dtype=keep, copy=True)
        return state


def _work(slot: Slot) -> Work | None:
    """What is due for the bases of a slot at this step, by its own step counter."""
    if not slot.bases:
        return "first"
    group = slot.group
    shifted = slot.steps_done + slot.phase
    if shifted % group["update_interval"]:
        return None
    if shifted % (group["update_interval"] * group["refresh_factor"]) == 0:
        return "refresh"
    return "align" if group["alignment"] is not None else None


def _phase(number: int, group: Mapping[str, Any]) -> int:
    """By how many steps parameter `number` is ahead of the schedule, so that few are due at the same step."""
    if not group["stagger"]:
        return 0
    interval, factor = int(group["update_interval"]), int(group["refresh_factor"])
    return int(number * _GOLDEN % 1 * interval) + interval * (number % factor)


def _step_counter() -> Tensor:
    """A zero as torch.optim keeps it: float32, or float64 where that is the default dtype."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32)
