"""What an optimizer keeps for each parameter, as rows that print as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerRow:
    """One parameter. `rank` is None where it is not projected, `side` what the basis projects; bytes of its state."""

    name: str
    shape: tuple[int, ...]
    rank: tuple[int, ...] | None
    side: str | None
    bytes: int

    @property
    def elements(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OptimizerReport:
    """State of an optimizer: `rows`, `.bytes` in all, `.share` of the elements that are projected; str() is a table."""

    rows: tuple[OptimizerRow, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole state: moments, scales, bases and step counters."""
        return sum(row.bytes for row in self.rows)

    @property
    def share(self) -> float:
        """Share of all elements that lie in projected parameters, 0 to 1."""
        total = sum(row.elements for row in self.rows)
        return sum(row.elements for row in self.rows if row.rank is not None) / total if total else 0.0

    @property
    def summary(self) -> str:
        """One line: how many parameters are projected, which share of the elements, how many bytes of state."""
        projected = sum(row.rank is not None for row in self.rows)
        return (
            f"{projected} of {len(self.rows)} parameters, {self.share:.1%} of the elements projected; "
            f"optimizer state {self.bytes / 2**20:.2f} MiB"
        )

    def __str__(self) -> str:
        width = max([len("parameter"), *(len(row.name) for row in self.rows)])
        lines = [f"{'parameter':<{width}}  {'shape':<20} {'rank':<10} {'side':<9} {'state KiB':>10}"]
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            rank = "-" if row.rank is None else " x ".join(map(str, row.rank))
            lines.append(f"{row.name:<{width}}  {shape:<20} {rank:<10} {row.side or '-':<9} {row.bytes / 1024:>10,.1f}")
        return "\n".join([*lines, self.summary])
