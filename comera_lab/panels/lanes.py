"""A model in training together with the history that its curves are drawn from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import torch

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.recorder import EvalRow, StepRow
from comera_lab.experiments.studies import tuned_rate
from comera_lab.experiments.train import TrainConfig, Trainer
from comera_lab.memory import Measured, measure
from comera_lab.models.mlp import MLP
from comera_lab.panels.figures import Curve
from comera_lab.panels.live import History

Axis = Literal["steps", "seconds"]


@cache
def digits_28() -> Dataset:
    """The digits as 784 features, read once per process."""
    return digits(28)


class Lane:
    """One MLP on the digits, at the learning rate that did best for its rank in the recorded study.

    `advance` makes one step or one evaluation; histories grow, nothing is drawn. Two lanes with the same seed
    get the same batches in the same order. Seconds are training seconds: the time inside `Trainer.step`,
    without evaluation, drawing or the other lane's turn.
    """

    def __init__(
        self,
        name: str,
        features: tuple[int, ...],
        kind: Literal["dense", "tt"],
        rank: int,
        config: TrainConfig,
    ) -> None:
        self.name = name
        # At one rate for all, a comparison would measure whom that rate suits.
        config = replace(config, learning_rate=tuned_rate(rank if kind == "tt" else None))
        self.model = MLP(features, kind, rank, generator=torch.Generator().manual_seed(config.seed))
        self.trainer = Trainer(self.model, digits_28(), config)
        self.measured: Measured | None = None
        self.steps = History("steps", "seconds", "loss_nats", "step_time_ms")
        self.evaluations = History("steps", "seconds", "accuracy_percent")

    def advance(self) -> StepRow | EvalRow:
        row: StepRow | EvalRow
        if self.trainer.evaluation_due:
            row = self.trainer.evaluate()
            self.evaluations.add(row.step, row.elapsed_s, 100 * row.accuracy)
        else:
            row = self._step()
            self.steps.add(row.step, row.elapsed_s, row.loss_nats, row.step_time_ms)
        return row

    @property
    def finished(self) -> bool:
        """Whether steps or seconds are used up and the last evaluation has been made."""
        return self.trainer.done and not self.trainer.evaluation_due

    @property
    def learning_rate(self) -> float:
        return self.trainer.config.learning_rate

    @property
    def parameters(self) -> int:
        return self.model.parameter_count()

    @property
    def accuracy_percent(self) -> float | None:
        """Test accuracy of the last evaluation."""
        return float(self.evaluations["accuracy_percent"][-1]) if len(self.evaluations) else None

    @property
    def loss_nats(self) -> float | None:
        """Mean training loss of the last ten steps."""
        return float(self.steps["loss_nats"][-10:].mean()) if len(self.steps) else None

    @property
    def step_time_ms(self) -> float | None:
        """Median training time of a step; the first few, which warm up, are left out once there are others."""
        times = self.steps["step_time_ms"]
        return float(np.median(times[3:] if len(times) > 6 else times)) if len(times) else None

    def at_step(self, step: int) -> tuple[int, float] | None:
        """(step, accuracy in percent) of the last evaluation not later than `step`."""
        before = np.flatnonzero(self.evaluations["steps"] <= step)
        if not len(before):
            return None
        k = int(before[-1])
        return int(self.evaluations["steps"][k]), float(self.evaluations["accuracy_percent"][k])

    def _step(self) -> StepRow:
        """One training step; the bytes of the first are measured on the way."""
        if self.measured is not None:
            return self.trainer.step()
        rows: list[StepRow] = []
        self.measured = measure(lambda: rows.append(self.trainer.step()), self.model, self.trainer.optimizer)
        return rows[0]

    def curve(self, axis: Axis) -> Curve:
        return Curve(
            self.name,
            self.steps.sample(axis),
            self.steps.sample("loss_nats"),
            self.evaluations.sample(axis),
            self.evaluations.sample("accuracy_percent"),
        )


def empty_curve(name: str) -> Curve:
    nothing = np.empty(0)
    return Curve(name, nothing, nothing, nothing, nothing)
