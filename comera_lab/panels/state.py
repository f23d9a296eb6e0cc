"""What the learner has chosen, in one observable object that panels and exercises share.

A panel's controls write here and its pictures read from here; so can any cell: `lab_state().rank = 16` moves the
slider, and `lab_state().runs["start"]` holds the numbers of the last training run.
"""

from __future__ import annotations

from operator import index
from typing import Any

import traitlets

from comera_lab.memory import OPTIMIZERS, PRECISIONS
from comera_lab.shapes import ShapeError, TTShape

GATE_KINDS = ("straight-through", "threshold")
SIZE_PARTS = ("tensorised", "model")
PROJECTION_METHODS = (
    "random (Flora)", "full SVD (GaLore)", "refresh only (COAP)", "refresh + alignment (COAP)",
    "refresh + published alignment",
)  # fmt: skip
GRADIENT_PRECISIONS = ("fp32", "bf16")
RANK_TASKS = ("digits", "pairs")
DIFFUSION_OPTIMIZERS = ("adamw", "galore", "coap", "coap-8bit")
BUDGET_MODELS = ("dense", "tensor trains", "learned ranks")
BUDGET_OPTIMIZERS = ("adamw", "adamw-8bit", "galore", "coap", "coap-8bit")
BUDGET_RATES = ("suggested", "0.0003", "0.001", "0.003", "0.01", "0.03")


class Whole(traitlets.TraitType[int, Any]):
    """An integer in [low, high]. Other values raise ShapeError with the rule, the value and the remedy."""

    def __init__(self, default: int, low: int, high: int) -> None:
        super().__init__(default)
        self.low, self.high = low, high

    def validate(self, obj: Any, value: object) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
        if number is None or not self.low <= number <= self.high:
            raise ShapeError(
                f"{self.name} must be a whole number from {self.low:,} to {self.high:,}, got {value!r}. "
                "Choose a value in that range."
            )
        return number


class Number(traitlets.TraitType[float, Any]):
    """A finite float in [low, high]. Other values raise ValueError with the rule, the value and the remedy."""

    def __init__(self, default: float, low: float, high: float) -> None:
        super().__init__(default)
        self.low, self.high = low, high

    def validate(self, obj: Any, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high:
            return float(value)
        raise ValueError(
            f"{self.name} must be a number from {self.low:g} to {self.high:g}, got {value!r}. "
            "Choose a value in that range."
        )


class Choice(traitlets.TraitType[str, Any]):
    """One of a few names. Other values raise ValueError that lists them."""

    def __init__(self, default: str, options: tuple[str, ...]) -> None:
        super().__init__(default)
        self.options = options

    def validate(self, obj: Any, value: object) -> str:
        if not isinstance(value, str) or value not in self.options:
            raise ValueError(f"{self.name} must be one of {', '.join(self.options)}, got {value!r}. Choose one.")
        return value


class LabState(traitlets.HasTraits):
    """Choices (validated traits) and results of one notebook.

    `rank` is one rank for every bond of a TT layer; `shape` is a full TTShape with a rank per bond.
    `width`, `depth`, `batch_size`, `precision`, `optimizer` describe the MLP of the memory panel and of the race.
    `rank_task` names the model that chooses its ranks: "digits" or "pairs". `target_ratio` (a share of the start
    size of `size_part`), `max_rank`, `gamma` (price of the whole dense size, nats), `gate_rate`, `gate_kind`,
    `early_steps` and `late_steps` are those of its training.
    `projection_method`, `projection_rank` and `gradient_precision` describe a basis of gradients, `rank_ratio` the rank
    of projected optimizers (full rank over rank); `update_interval` (steps) and `refresh_factor` are those of both.
    `optimizer_steps` is the length of a race of optimizers.
    `budget_mib`, `budget_seconds` and the other `budget_` ones are those of the capstone; `registered` holds one dict
    per registered configuration, with a row for each of its seeds, `defended` names one of them ("" is the best claim),
    and `answers` holds the texts of the report.
    `locked` names the choices whose controls a teacher took away; panels made afterwards show them so.
    `runs` maps a panel's name to the summary of its last run, a plain dict of numbers; `rank_runs` holds one dict
    per finished rank training of this notebook, settings and results, oldest first.
    """

    rank = Whole(8, 1, 512)
    shape = traitlets.Instance(TTShape)
    width = Whole(512, 16, 4096)
    depth = Whole(2, 1, 12)
    batch_size = Whole(64, 1, 4096)
    precision = Choice("fp32", tuple(PRECISIONS))
    optimizer = Choice("adamw", tuple(OPTIMIZERS))
    energy_percent = Number(90.0, 50.0, 100.0)
    seconds = Number(8.0, 1.0, 600.0)
    seed = Whole(0, 0, 2**31 - 1)
    rank_task = Choice("digits", RANK_TASKS)
    target_ratio = Number(0.3, 0.05, 1.0)
    size_part = Choice("tensorised", SIZE_PARTS)
    max_rank = Whole(16, 1, 64)
    gamma = Number(30.0, 0.0, 200.0)
    gate_rate = Number(0.02, 0.001, 0.1)
    gate_kind = Choice("straight-through", GATE_KINDS)
    early_steps = Whole(300, 0, 2000)
    late_steps = Whole(300, 0, 2000)
    projection_method = Choice(PROJECTION_METHODS[1], PROJECTION_METHODS)
    projection_rank = Whole(8, 1, 64)
    gradient_precision = Choice("fp32", GRADIENT_PRECISIONS)
    rank_ratio = Number(4.0, 1.0, 32.0)
    update_interval = Whole(20, 1, 500)
    refresh_factor = Whole(5, 1, 50)
    optimizer_steps = Whole(200, 20, 2000)
    diffusion_optimizer = Choice("coap", DIFFUSION_OPTIMIZERS)
    diffusion_steps = Whole(400, 20, 2000)
    budget_mib = Number(8.0, 0.25, 64.0)
    budget_seconds = Number(3.0, 0.5, 120.0)
    budget_model = Choice(BUDGET_MODELS[1], BUDGET_MODELS)
    budget_optimizer = Choice("adamw", BUDGET_OPTIMIZERS)
    budget_rate = Choice(BUDGET_RATES[0], BUDGET_RATES)
    budget_steps = Whole(300, 10, 3000)
    locked = traitlets.Tuple()
    runs = traitlets.Dict()
    rank_runs = traitlets.Tuple()
    registered = traitlets.Tuple()
    defended = traitlets.Unicode("")
    answers = traitlets.Dict()

    @traitlets.default("shape")
    def _default_shape(self) -> TTShape:
        return TTShape.for_features(784, 512, rank=8)

    def record(self, name: str, summary: dict[str, Any]) -> None:
        """Publish the summary of a run under `name`; observers of `runs` are told."""
        self.runs = {**self.runs, name: summary}


_shared: list[LabState] = []


def lab_state() -> LabState:
    """The one LabState of this notebook, made at the first call."""
    if not _shared:
        _shared.append(LabState())
    return _shared[0]
