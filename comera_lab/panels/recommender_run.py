"""Three recommenders in training on flights, told apart by their large tables alone, as a panel shows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import cast

import torch

from comera_lab.experiments.flights import FIELDS, Split, load_flights
from comera_lab.experiments.metrics import CalibrationBin, Scores, calibration, logits_of, scores
from comera_lab.experiments.recommendation import RecommendationData, Rows
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.memory import mib
from comera_lab.models.dlrm import DLRM, DLRMConfig, Kind

LANES: dict[str, Kind] = {"dense": "dense", "hashed": "hash", "tensor train": "tt"}
# Dev AUC after one epoch at rates 1e-3, 3e-3, 1e-2, 3e-2 (seed 0, split by date): dense 0.809, 0.813, 0.815, 0.808;
# hashed 0.738, 0.784, 0.790, 0.779; tensor train of rank 16 0.779, 0.797, 0.803, 0.798. So 1e-2 is best for each, and
# a tenth of it costs the dense lane 0.006 and the others 0.024 and 0.052.
RATES = {
    "tuned on dev": dict.fromkeys(LANES, 1e-2),
    "1e-3 for all": dict.fromkeys(LANES, 1e-3),
    "3e-2 for all": dict.fromkeys(LANES, 3e-2),
}
SPLITS = ("date", "day")
ID_ORDERS = ("by date", "shuffled")
# "date x tailnum", the largest crossed field, adds nothing to these AUCs and three quarters of the memory.
LIVE_FIELDS = FIELDS[:-1]
DIM, BATCH, THRESHOLD, ELEMENT_BYTES = 64, 2048, 3000, 4
CURVE_ROWS, CURVE_EVERY = 8192, 16  # of dev, for a point of the curve


@dataclass(frozen=True, kw_only=True)
class RecommenderSettings:
    """What the learner chose."""

    split: str = "date"
    ids: str = "by date"
    rates: str = "tuned on dev"
    rank: int = 16
    steps: int = 128
    seed: int = 0

    def words(self) -> str:
        return (
            f"split by {self.split}, ids {self.ids}, rates {self.rates}, rank {self.rank}, {self.steps} steps of "
            f"{BATCH:,} flights"
        )


@lru_cache(maxsize=1)
def flights(split: str, ids: str) -> RecommendationData:
    """The flights with one way to split and to number them, read once until another is asked for."""
    data = load_flights(cast(Split, split), LIVE_FIELDS)
    return data.with_shuffled_ids() if ids == "shuffled" else data


class RecommenderLane:
    """A DLRM whose large tables are of one kind. `advance` makes a step; at its end `scores` are those of all of dev.

    `curve` holds (steps, AUC) on the first CURVE_ROWS of dev.
    """

    def __init__(self, name: str, data: RecommendationData, settings: RecommenderSettings) -> None:
        self.name, self.data, self.steps = name, data, settings.steps
        self.rate = RATES[settings.rates][name]
        config = DLRMConfig(
            table_rows=data.table_rows, numbers=len(data.numbers), dim=DIM, kind=LANES[name], rank=settings.rank,
            threshold=THRESHOLD,
        )  # fmt: skip
        self.model = DLRM(config, generator=torch.Generator().manual_seed(settings.seed))
        run = TrainConfig(
            steps=settings.steps, batch_size=BATCH, learning_rate=self.rate, seed=settings.seed, evaluate_every=0
        )
        self.trainer = Trainer(self.model, data.dataset(), run)
        self.times_ms: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.scores: Scores | None = None
        self.bins: list[CalibrationBin] = []

    @property
    def finished(self) -> bool:
        return self.trainer.done

    def advance(self) -> None:
        """One step; a point of the curve where one is due."""
        self.times_ms.append(self.trainer.step().step_time_ms)
        if self.finished:
            self._evaluate(self.data.splits["dev"])
        elif self.trainer.steps_done % CURVE_EVERY == 0:
            dev = self.data.splits["dev"]
            self._evaluate(Rows(dev.x[:CURVE_ROWS], dev.y[:CURVE_ROWS]))

    def _evaluate(self, rows: Rows) -> None:
        logits = logits_of(self.model, rows)
        self.scores, self.bins = scores(logits, rows.y), calibration(logits, rows.y)
        self.curve.append((self.trainer.steps_done, self.scores.auc))

    @property
    def table_mib(self) -> float:
        return mib(ELEMENT_BYTES * self.model.table_parameters())

    @property
    def times_smaller(self) -> float:
        """All dense tables over these."""
        return sum(self.data.table_rows) * DIM / self.model.table_parameters()

    @property
    def step_time_ms(self) -> float | None:
        """Median; the first few, which warm up, are left out once there are others."""
        return median(self.times_ms[3:] if len(self.times_ms) > 6 else self.times_ms) if self.times_ms else None
