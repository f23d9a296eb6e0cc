"""Meet a size exactly: close the gate entries that cost least loss for the elements they free."""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from comera_lab.cores import apply_gates
from comera_lab.layers import TTModule
from comera_lab.objectives.sizes import gated_layers, model_size
from comera_lab.shapes import chain_params

Bounds = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class BudgetReport:
    """What `meet_target` did: core elements before, after and allowed, entries closed, layers left with a bias only."""

    before: int
    after: int
    limit: int
    closed: int
    removed: tuple[str, ...]


def meet_target(
    model: nn.Module,
    limit: int,
    *,
    loss_of: Callable[[], Iterable[Tensor]] | None = None,
    bounds: Bounds | None = None,
) -> BudgetReport:
    """Close gate entries until all cores together hold at most `limit` elements, cheapest loss per element first.

    Without data an entry is worth the squared share of its layer's matrix that it carries, ||W - W'||^2 / ||W||^2.
    With `loss_of`, which yields a few batch losses, it is worth sum (g dL/dg)^2 over the batches (Molchanov et al.,
    arXiv 1611.06440); with several processes these sums are added up, so every process must call it and all close the
    same entries. Yield losses of the inner `model.module` of a DDP model: DDP cannot follow torch.autograd.grad.
    `bounds` maps name patterns to (floor, ceiling) of every rank; a floor of 0 lets a layer go
    altogether, the default floor is 1. Entries that still fit at the end are opened again, so that the result is as
    close below the limit as single entries allow. Raises ValueError, changing nothing, when the floors alone
    exceed the limit, when every entry is dead, or when a score is not finite.
    """
    layers = gated_layers(model)
    before = model_size(model).cores
    ranges = {name: _range(name, bounds or {}) for name in layers}
    floor = sum(
        chain_params(layer.shape.modes, _at_most(layer.live_ranks, ranges[name][0])) if ranges[name][0] else 0
        for name, layer in layers.items()
    )
    fixed = before - sum(layer.live_params for layer in layers.values())
    if floor + fixed > limit:
        raise ValueError(
            f"the floors of the ranks alone need {floor + fixed:,} core elements, got a limit of {limit:,}. "
            "Raise the limit, or allow a floor of 0 for some layers."
        )
    if before == 0:
        raise ValueError(
            "every gate entry is dead, got a model whose cores all multiply to 0. Train with a smaller gamma."
        )
    worth = _taylor_worth(layers, loss_of) if loss_of is not None else None
    plans = {name: _Plan(name, layer, ranges[name], worth) for name, layer in layers.items()}
    closed = _close(plans, limit - fixed)
    for plan in plans.values():
        plan.write()
    size = model_size(model)
    return BudgetReport(before, size.cores, limit, closed, size.removed)


def _range(name: str, bounds: Bounds) -> tuple[int, int]:
    for pattern, (low, high) in bounds.items():
        if fnmatch.fnmatchcase(name, pattern):
            if not 0 <= low <= high or high < 1:
                raise ValueError(f"bounds of {pattern!r} must be 0 <= floor <= ceiling, got ({low}, {high}).")
            return low, high
    return 1, 10**9


def _at_most(ranks: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return (1, *(min(rank, limit) for rank in ranks[1:-1]), 1)


class _Plan:
    """The live entries of one layer while the budget is being met; the layer itself is written once, at the end."""

    def __init__(
        self, name: str, layer: TTModule, limits: tuple[int, int], worth: dict[tuple[str, int], Tensor] | None
    ) -> None:
        self.name, self.layer, (self.low, self.high) = name, layer, limits
        with torch.no_grad():
            self.gates = [gate.double() for gate in layer.effective_gates()]
            self.cores = [core.double().reshape(core.shape[0], -1, core.shape[-1]) for core in layer.cores]
        self.live = [gate != 0 for gate in self.gates]
        self.worth = None if worth is None else [worth[name, k] for k in range(len(self.gates))]
        if not all(mask.any() for mask in self.live):
            self.live = [torch.zeros_like(mask) for mask in self.live]

    def ranks(self) -> tuple[int, ...]:
        return (1, *(int(mask.sum()) for mask in self.live), 1)

    def elements(self) -> int:
        ranks = self.ranks()
        return chain_params(self.layer.shape.modes, ranks) if all(ranks) else 0

    def cheapest(self) -> tuple[float, int, int, int] | None:
        """(loss per element, bond, entry, elements freed) of the entry to close next; None at the floor."""
        ranks, modes = self.ranks(), self.layer.shape.modes
        if not all(ranks):
            return None
        options = []
        for bond, scores in enumerate(self._scores()):
            rank = ranks[bond + 1]
            if rank <= max(self.low, 1) and not (self.low == 0 and rank == 1):
                continue
            freed = ranks[bond] * modes[bond] + modes[bond + 1] * ranks[bond + 2]
            freed = self.elements() if rank == 1 else freed
            masked = torch.where(self.live[bond], scores, torch.inf)
            entry = int(masked.argmin())
            over = rank > self.high
            options.append((-1.0 if over else float(masked[entry]) / freed, bond, entry, freed))
        return min(options) if options else None

    def _scores(self) -> list[Tensor]:
        if self.worth is not None:
            return self.worth
        gates = [torch.where(mask, gate, 0) for gate, mask in zip(self.gates, self.live, strict=True)]
        cores = apply_gates(self.cores, gates)
        lefts = [torch.ones(1, 1, dtype=torch.float64)]
        for core in cores:
            lefts.append(torch.einsum("ab,asc,bsd->cd", lefts[-1], core, core))
        rights = [torch.ones(1, 1, dtype=torch.float64)]
        for core in reversed(self.cores[1:] if len(cores) > 1 else []):
            scaled = core if not rights[1:] else core * gates[len(gates) - len(rights) + 1]
            rights.append(torch.einsum("asc,bsd,cd->ab", scaled, scaled, rights[-1]))
        whole = float(lefts[-1]) or 1.0
        # Entry i of bond k carries the rank-one part left_i right_i, of squared norm ||left_i||^2 ||right_i||^2.
        return [lefts[k + 1].diagonal() * rights[len(gates) - k].diagonal() / whole for k in range(len(gates))]

    def write(self) -> None:
        with torch.no_grad():
            for gate, mask in zip(self.layer.gates, self.live, strict=True):
                gate.masked_fill_(~mask, 0.0)


def _close(plans: dict[str, _Plan], limit: int) -> int:
    total = sum(plan.elements() for plan in plans.values())
    queue = [(step[0], name, step) for name, plan in plans.items() if (step := plan.cheapest())]
    heapq.heapify(queue)
    closed: list[tuple[str, int, int]] = []
    while queue and (total > limit or queue[0][0] < 0):
        _, name, (_, bond, entry, freed) = heapq.heappop(queue)
        plan = plans[name]
        plan.live[bond][entry] = False
        total -= freed
        closed.append((name, bond, entry))
        if step := plan.cheapest():
            heapq.heappush(queue, (step[0], name, step))
    reopened = 0
    for name, bond, entry in reversed(closed):
        plan = plans[name]
        if not all(plan.ranks()) or plan.ranks()[bond + 1] >= plan.high:
            continue
        now = plan.elements()
        plan.live[bond][entry] = True
        if total + plan.elements() - now <= limit:
            total += plan.elements() - now
            reopened += 1
        else:
            plan.live[bond][entry] = False
    return len(closed) - reopened


def _taylor_worth(
    layers: dict[str, TTModule], loss_of: Callable[[], Iterable[Tensor]]
) -> dict[tuple[str, int], Tensor]:
    keys = [(name, k) for name, layer in layers.items() for k in range(len(layer.gates))]
    gates: list[Tensor] = [gate for layer in layers.values() for gate in layer.gates]
    worth = [torch.zeros_like(gate, dtype=torch.float64) for gate in gates]
    for loss in loss_of():
        grads = torch.autograd.grad(loss, gates, allow_unused=True)
        for sum_, gate, grad in zip(worth, gates, grads, strict=True):
            if grad is not None:
                sum_ += (gate.detach() * grad).double().square()
    if distributed.is_available() and distributed.is_initialized():
        for score in worth:
            distributed.all_reduce(score)
    if not all(torch.isfinite(score).all() for score in worth):
        raise ValueError(
            "scores of gate entries must be finite, got NaN or Inf from the losses given. Check the batches."
        )
    return dict(zip(keys, worth, strict=True))
