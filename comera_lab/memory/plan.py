"""Four pools for every method of this kit, side by side, for a model that need not fit anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from comera_lab.memory.footprint import Footprint
from comera_lab.memory.gpus import GPUS, OVERHEAD, fits_on
from comera_lab.memory.pools import POOLS, PRECISIONS, Pools
from comera_lab.memory.states import StateSettings, state_bytes


class Method(NamedTuple):
    """A way to train: on the dense model or on cores, and which optimizer has the matrices, which the tables.

    Cores and gates are always under AdamW. Tables are those of nn.Embedding and heads of the same shape: the
    published runs of GaLore and COAP project attention and feed-forward alone. Where cores replace those, COAP has
    the tables.
    """

    label: str
    compressed: bool
    matrices: str
    tables: str


METHODS: dict[str, Method] = {
    "adamw": Method("AdamW", False, "adamw", "adamw"),
    "adamw-8bit": Method("AdamW 8-bit", False, "adamw-8bit", "adamw-8bit"),
    "galore": Method("GaLore", False, "galore", "adamw"),
    "coap": Method("COAP", False, "coap", "adamw"),
    "coap-8bit": Method("COAP 8-bit", False, "coap-8bit", "adamw-8bit"),
    "comera": Method("CoMERA", True, "adamw", "adamw"),
    "comera+coap": Method("CoMERA + COAP", True, "coap", "coap"),
}


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How to train, as far as bytes depend on it.

    precision      one of `PRECISIONS`; moments have the dtype of what the optimizer steps, projected ones too
    checkpointing  repeated blocks keep their input and make the rest again in backward
    layerwise      each parameter is updated as soon as its gradient is there (`step_in_backward`)
    rank_ratio     smaller side of a matrix over the rank of its projection
    """

    precision: str = "bf16"
    checkpointing: bool = False
    layerwise: bool = False
    rank_ratio: float = 4.0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}. Pick one of them."
            )
        StateSettings(rank_ratio=self.rank_ratio)


@dataclass(frozen=True)
class MethodPlan:
    """The pools of one method, and how many numbers it trains."""

    method: str
    parameters: int
    pools: Pools

    @property
    def label(self) -> str:
        """The name of the method for a reader."""
        return METHODS[self.method].label

    @property
    def fits(self) -> tuple[str, ...]:
        """GPUs that hold all four pools, smallest first."""
        return fits_on(self.pools.total)

    @property
    def smallest(self) -> str:
        """The smallest cards that hold all, in words."""
        if not self.fits:
            return "no single card of the list"
        size = GPUS[self.fits[0]]
        return f"{', '.join(name for name in self.fits if GPUS[name] == size)} ({size} GB)"


@dataclass(frozen=True)
class Plan:
    """Predicted pools per method: `.table()` for text, `.as_dict()` for JSON."""

    title: str
    settings: PlanSettings
    rows: tuple[MethodPlan, ...]

    def row(self, method: str) -> MethodPlan:
        """The row of a method of `METHODS`. Raises ValueError for another name."""
        found = {row.method: row for row in self.rows}
        if method not in found:
            raise ValueError(f"method must be one of {', '.join(found)}, got {method!r}. Pick one of them.")
        return found[method]

    def table(self) -> str:
        """Text: GiB (MiB where all is small) per pool, predicted, and the smallest card that holds it."""
        unit, size = ("GiB", 2**30) if max(row.pools.total for row in self.rows) >= 2**30 else ("MiB", 2**20)
        names = ("parameters", *POOLS, "total")
        lines = [
            self.title,
            self._words(),
            f"{unit + ', predicted':<16}" + "".join(f"{n:>15}" for n in names) + "  fits on",
        ]
        for row in self.rows:
            counts = [*row.pools.as_dict().values(), row.pools.total]
            cells = "".join(f"{count / size:>15,.2f}" for count in counts)
            lines.append(f"{row.label:<16}{row.parameters:>15,}{cells}  {row.smallest}")
        lines.append(f"Cards hold what their makers print, less {OVERHEAD / 10**9:g} GB for what is in no pool.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Numbers in bytes, under names that say so."""
        rows = [
            {"method": row.method, "parameters": row.parameters}
            | {f"{pool}_bytes": count for pool, count in row.pools.as_dict().items()}
            | {"total_bytes": row.pools.total, "fits_on": list(row.fits)}
            for row in self.rows
        ]
        return {"title": self.title, "source": "predicted", **asdict(self.settings), "methods": rows}

    def _words(self) -> str:
        s = self.settings
        choices = {"activation checkpointing": s.checkpointing, "layer-wise updates": s.layerwise}
        said = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in choices.items())
        return f"{s.precision}, {said}, projected to 1/{s.rank_ratio:g} of the smaller side"


def plan(
    title: str,
    dense: Footprint,
    compressed: Footprint,
    settings: PlanSettings,
    methods: Sequence[str] = tuple(METHODS),
) -> Plan:
    """Pools of every method, from `footprint` of a model and of its twin on cores.

    Both have to be made with the dtype and the checkpointing of `settings`. Raises ValueError for unknown methods.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {', '.join(unknown)}. Pick from them.")
    rows = [method_plan(name, compressed if METHODS[name].compressed else dense, settings) for name in methods]
    return Plan(title, settings, tuple(rows))


def method_plan(name: str, traced: Footprint, settings: PlanSettings) -> MethodPlan:
    """One method on a model whose footprint is known."""
    method, precision = METHODS[name], PRECISIONS[settings.precision]
    stepped = torch.float32 if precision.master else precision.dtype
    moments = None if stepped == torch.float32 else stepped
    state = StateSettings(rank_ratio=settings.rank_ratio, state_dtype=moments)
    optimizers = {"core": "adamw", "table": method.tables, "body": method.matrices}
    kept = 0
    for one in traced.trained:
        kept += state_bytes(one.shape, optimizers[one.part], stepped, state).total
        kept += stepped.itemsize * math.prod(one.shape) if precision.master else 0
    sizes = [one.bytes for one in traced.trained]
    pools = Pools(
        weights=traced.weights,
        grads=max(sizes, default=0) if settings.layerwise else sum(sizes),
        optimizer=kept,
        activations=traced.activations,
    )
    return MethodPlan(name, traced.parameters, pools)
