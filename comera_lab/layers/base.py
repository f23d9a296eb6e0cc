"""What linear layers and tables share: cores, and a gate on every bond that training may close."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from comera_lab.cores import apply_gates, effective_gate
from comera_lab.shapes import TTMShape, TTShape, chain_params

GateKind = Literal["straight-through", "threshold"]
# An entry at or below this is dead: tau of the published code.
GATE_THRESHOLD = 1e-2


class TTModule(nn.Module):
    """Cores (Parameters) of `shape` and, after `add_gates`, one gate (r_k,) per inner bond.

    Gates multiply the bonds functionally: a forward call or a query never writes a parameter.
    """

    shape: TTShape | TTMShape
    cores: nn.ParameterList
    gates: nn.ParameterList
    gate_kind: GateKind
    gate_threshold: float

    def _fill_cores(self, shape: TTShape | TTMShape, cores: Iterable[Tensor]) -> None:
        self.shape = shape
        self.cores = nn.ParameterList([nn.Parameter(core.detach().clone()) for core in cores])
        self.gates = nn.ParameterList()
        self.gate_kind = "straight-through"
        self.gate_threshold = GATE_THRESHOLD

    def add_gates(self, kind: GateKind = "straight-through", threshold: float = GATE_THRESHOLD) -> None:
        """Put a gate of ones on every inner bond; the function of the layer stays the same.

        Raises ValueError for another kind, or a threshold outside (0, 1) at which ones would be dead.
        """
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must lie in (0, 1), got {threshold}. The published one is 0.01.")
        like = self.cores[0]
        effective_gate(like.new_ones(1), kind, threshold)
        self.gate_kind, self.gate_threshold = kind, threshold
        self.gates = nn.ParameterList(
            [nn.Parameter(torch.ones(rank, dtype=like.dtype, device=like.device)) for rank in self.shape.ranks[1:-1]]
        )

    def effective_gates(self) -> list[Tensor]:
        """One (r_k,) tensor per inner bond, dead entries exactly 0; differentiable. Empty without gates."""
        if not len(self.gates):
            return []
        # One vector for all bonds: a handful of calls instead of a handful for each bond.
        flat = effective_gate(torch.cat(list(self.gates)), self.gate_kind, self.gate_threshold)
        return list(torch.split(flat, [len(gate) for gate in self.gates]))

    def gated_cores(self) -> list[Tensor]:
        """The cores that forward multiplies with."""
        return apply_gates(list(self.cores), self.effective_gates()) if len(self.gates) else list(self.cores)

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """Live entries of every bond, closing 1s included; a 0 means that the whole product is 0."""
        if not len(self.gates):
            return self.shape.ranks
        with torch.no_grad():
            return (1, *(int((gate != 0).sum()) for gate in self.effective_gates()), 1)

    @property
    def live_params(self) -> int:
        """Core elements that survive `compact`; 0 when a bond is dead, for the product then is 0."""
        ranks = self.live_ranks
        return chain_params(self.shape.modes, ranks) if all(ranks) else 0
