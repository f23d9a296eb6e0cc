"""One network of digits for each optimizer and seed: what the race of lesson 10 trains, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from comera_lab.experiments.recorder import EvalRow, StepRow
from comera_lab.experiments.train import TrainConfig, Trainer
from comera_lab.memory import StateSettings, measure, optimizer_bytes
from comera_lab.models.mlp import MLP
from comera_lab.optimizers import make_optimizer
from comera_lab.panels.lanes import digits_28
from comera_lab.panels.live import History

FEATURES = (784, 256, 256, 10)
EVALUATE_EVERY = 20
SEEDS = (0, 1, 2)
Axis = Literal["steps", "seconds", "bytes"]
Array = npt.NDArray[np.floating[Any]]
LANES = {
    "adamw": "AdamW: two moments of every weight, in full.",
    "galore": "GaLore: moments in a basis that a full SVD makes new.",
    "flora": "Flora: a mean in a random basis, squares as a row and a column.",
    "coap": "COAP: moments in a basis that is carried along and corrected.",
    "coap-8bit": "COAP with moments of one byte each.",
}
# Lowest held-out loss after 200 steps on an inner split of the training side, mean of seeds 100 and 101, of six or
# seven rates each, at rank ratio 4, interval 20, factor 5; coap-8bit takes that of coap. Neighbouring rates differ by
# little more than the two seeds do. GaLore scales its steps by 0.25, Flora by the size of the weights.
RATES = {"adamw": 2e-3, "galore": 1.5e-2, "flora": 2e-2, "coap": 5e-3, "coap-8bit": 5e-3}


@dataclass(frozen=True, kw_only=True)
class RaceSettings:
    """What the learner chose for every lane: the traits of LabState that the race reads."""

    rank_ratio: float
    update_interval: int
    refresh_factor: int
    optimizer_steps: int

    def of(self, name: str) -> dict[str, Any]:
        """Settings of one optimizer. All projected ones look anew at the gradient equally often: GaLore by an SVD,
        Flora by chance, at every `update_interval * refresh_factor` steps, as in the published scripts."""
        gap = self.update_interval * self.refresh_factor
        if name == "galore":
            return {"rank_ratio": self.rank_ratio, "update_interval": gap}
        if name == "flora":
            return {"rank_ratio": self.rank_ratio, "resample_interval": gap}
        if name.startswith("coap"):
            steps = {"update_interval": self.update_interval, "refresh_factor": self.refresh_factor}
            return {"rank_ratio": self.rank_ratio, **steps}
        return {}

    def predicted_bytes(self, name: str) -> int:
        """Bytes of the state of optimizer `name` for the network of the race, from shapes alone."""
        with torch.device("meta"):
            parameters = list(MLP(FEATURES).parameters())
        return optimizer_bytes(parameters, name, settings=StateSettings(rank_ratio=self.rank_ratio)).total

    def words(self) -> str:
        return (
            f"rank ratio {self.rank_ratio:g}, update interval {self.update_interval}, "
            f"refresh factor {self.refresh_factor}, {self.optimizer_steps} steps"
        )


class OptimizerLane:
    """One optimizer and one seed in training; `advance` makes one step or one evaluation.

    The bytes of the optimizer's real tensors are measured at the first step. Seconds are training seconds.
    """

    def __init__(self, name: str, seed: int, settings: RaceSettings) -> None:
        self.name, self.seed, self.settings = name, seed, settings
        rate = RATES[name]
        self.model: nn.Module = MLP(FEATURES, generator=torch.Generator().manual_seed(seed))
        config = TrainConfig(
            steps=settings.optimizer_steps, learning_rate=rate, evaluate_every=EVALUATE_EVERY, seed=seed
        )
        optimizer = make_optimizer(name, self.model.parameters(), rate, **settings.of(name))
        self.trainer = Trainer(self.model, digits_28(), config, optimizer=optimizer)
        self.measured_bytes: int | None = None
        self.times = History("step_time_ms")
        self.tests = History("steps", "seconds", "loss_nats", "accuracy_percent")

    @property
    def finished(self) -> bool:
        return self.trainer.done and not self.trainer.evaluation_due

    def advance(self) -> None:
        if self.trainer.evaluation_due:
            row: EvalRow = self.trainer.evaluate()
            self.tests.add(row.step, row.elapsed_s, row.loss_nats, 100 * row.accuracy)
        else:
            self.times.add(self._step().step_time_ms)

    def _step(self) -> StepRow:
        if self.measured_bytes is not None:
            return self.trainer.step()
        rows: list[StepRow] = []
        pools = measure(lambda: rows.append(self.trainer.step()), self.model, self.trainer.optimizer).pools
        self.measured_bytes = pools.optimizer
        return rows[0]


@dataclass(frozen=True)
class Band:
    """An optimizer over its seeds: x, and mean, least and largest test loss and accuracy at each."""

    name: str
    seeds: int
    x: Array
    loss_nats: Array  # (3, points): mean, least, largest
    accuracy_percent: Array  # (3, points)


def band_of(name: str, lanes: Sequence[OptimizerLane], axis: Axis, share: float = 1.0) -> Band:
    """The lanes of one optimizer as a band, as far as all of them have been tested and at most `share` of the race.

    On "seconds" x is the median training time of the seeds, so that one stall of the machine does not bend it; on
    "bytes" there is one point, the last test.
    """
    points = min((len(lane.tests) for lane in lanes), default=0)
    if lanes:
        limit = share * lanes[0].settings.optimizer_steps
        points = min(points, int((lanes[0].tests["steps"] <= limit).sum()))
    if not points:
        nothing = np.empty(0)
        return Band(name, len(lanes), nothing, np.empty((3, 0)), np.empty((3, 0)))
    seen = slice(points - 1, points) if axis == "bytes" else slice(0, points)

    def spread(column: str) -> Array:
        values = np.stack([lane.tests[column][seen] for lane in lanes])
        return np.stack([values.mean(0), values.min(0), values.max(0)])

    if axis == "bytes":
        x = np.array([lanes[0].measured_bytes]) / 2**20
    else:
        x = np.median([lane.tests[axis][seen] for lane in lanes], axis=0)
    return Band(name, len(lanes), x, spread("loss_nats"), spread("accuracy_percent"))
