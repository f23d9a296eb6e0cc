"""One training within a budget of MiB and seconds: what the capstone runs, predicts beforehand and runs again."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import nn

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.provenance import date
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import EvalRow, StepRow
from comera_lab.experiments.studies import tuned_rate
from comera_lab.experiments.train import TrainConfig, Trainer
from comera_lab.layers import tt_layers
from comera_lab.memory import StateSettings, measure, mib, predict
from comera_lab.models.mlp import MLP
from comera_lab.objectives import model_size
from comera_lab.optimizers import make_optimizer
from comera_lab.panels.figures import Curve
from comera_lab.panels.lanes import digits_28
from comera_lab.panels.live import History
from comera_lab.panels.optimizer_lanes import RATES
from comera_lab.panels.state import BUDGET_MODELS, BUDGET_OPTIMIZERS, BUDGET_RATES

FEATURES = (784, 512, 512, 10)
BATCH, EVALUATE_EVERY, LATE_SHARE = 64, 20, 0.5
SEEDS = (0, 1, 2)
SUGGESTED = BUDGET_RATES[0]
# A gate falls from 1 to its threshold in 1 / rate steps, so short runs need a quick one; price as in lesson 05.
GATE_RATE, GAMMA = 0.02, 30.0
DENSE, TRAINS, LEARNED = BUDGET_MODELS
MODEL_WORDS = {DENSE: "dense", TRAINS: "tensor trains of a fixed rank", LEARNED: "ranks that learn (CoMERA)"}
# Which optimizer can train what. Cores are small and have three sides: a basis of them would save nothing.
FITTING = {DENSE: BUDGET_OPTIMIZERS, TRAINS: ("adamw", "adamw-8bit"), LEARNED: ("adamw",)}


@cache
def inner_digits() -> Dataset:
    """The training side of the digits in two: to learn from, and to choose by. The test side is in neither."""
    data = digits_28()
    return Dataset.from_tensors("digits 28x28, inner split", data.train_x, data.train_y, classes=data.classes)


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """What a run is made from, beside its seed: enough to run it again.

    `rank` is that of every bond, at the start where ranks learn; `target_ratio` counts for those alone, `rank_ratio`
    for projected optimizers alone. `rate` is "suggested" or a learning rate in words.
    """

    model: str
    optimizer: str
    rank: int
    target_ratio: float
    rank_ratio: float
    steps: int
    seconds: float
    rate: str = SUGGESTED

    def fault(self) -> str:
        """Why this cannot be trained, with the remedy; "" if it can."""
        known = {"model": BUDGET_MODELS, "optimizer": BUDGET_OPTIMIZERS, "rate": BUDGET_RATES}
        for name, options in known.items():
            if getattr(self, name) not in options:
                return f"{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}. Choose one."
        fitting = FITTING[self.model]
        if self.optimizer not in fitting:
            why = (
                "ranks are cut out of its state as well" if self.model == LEARNED
                else "cores have three sides and are small already: there is nothing to project"
            )  # fmt: skip
            return (
                f"the optimizer of {MODEL_WORDS[self.model]} must be {' or '.join(fitting)}, got {self.optimizer!r}: "
                f"{why}. Choose {fitting[0]}, or a dense model."
            )
        if self.steps < 1 or self.rank < 1:
            return f"steps and rank must be at least 1, got {self.steps} and {self.rank}. Choose larger ones."
        return ""

    @property
    def learning_rate(self) -> float:
        """The suggested rates are those that did best in the studies of lessons 04 and 10."""
        if self.rate != SUGGESTED:
            return float(self.rate)
        if self.model == DENSE:
            return tuned_rate(None) if self.optimizer.startswith("adamw") else RATES[self.optimizer]
        return tuned_rate(self.rank)

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        return {} if self.optimizer.startswith("adamw") else {"rank_ratio": self.rank_ratio}

    def relevant(self) -> dict[str, Any]:
        """The settings that make a difference to this run: two runs are alike if these are."""
        values = asdict(self)
        if self.model != LEARNED:
            del values["target_ratio"]
        if self.model == DENSE:
            del values["rank"]
        if not self.optimizer_settings:
            del values["rank_ratio"]
        return values

    def words(self) -> str:
        rank = {DENSE: "", TRAINS: f" rank {self.rank}", LEARNED: f" from rank {self.rank} to {self.target_ratio:g}"}
        ratio = f" ratio {self.rank_ratio:g}" if self.optimizer_settings else ""
        return (
            f"{self.model}{rank[self.model]}, {self.optimizer}{ratio}, rate {self.learning_rate:g}, "
            f"{self.steps} steps in {self.seconds:g} s"
        )

    def build(self, seed: int | None) -> nn.Module:
        """The model; `seed` None makes one on the meta device, with the gates it will get."""
        kind: Any = "dense" if self.model == DENSE else "tt"
        if seed is not None:
            return MLP(FEATURES, kind, self.rank, generator=torch.Generator().manual_seed(seed))
        with torch.device("meta"):
            model = MLP(FEATURES, kind, self.rank)
            for layer in tt_layers(model).values() if self.model == LEARNED else ():
                layer.add_gates("straight-through")
        return model

    @property
    def predicted_mib(self) -> float:
        """MiB of a training step from shapes alone: weights, grads, optimizer state and activations."""
        settings = StateSettings(rank_ratio=self.rank_ratio)
        return mib(predict(self.build(None), (BATCH, FEATURES[0]), self.optimizer, settings=settings).total)


def settings_of(entry: Mapping[str, Any]) -> BudgetSettings:
    """The settings that an entry of a report carries; ValueError where they are not whole."""
    values = entry.get("settings")
    if not isinstance(values, dict) or set(values) != set(BudgetSettings.__dataclass_fields__):
        raise ValueError(f"settings must have {', '.join(BudgetSettings.__dataclass_fields__)}, got {values!r:.60}.")
    settings = BudgetSettings(**values)
    if settings.fault():
        raise ValueError(settings.fault())
    return settings


class BudgetRun:
    """`advance` makes one step or one evaluation; training ends with the steps, or before the step that would take it
    past its seconds. Ranks that learn are then brought to their target and cut; that time counts.

    `until` ends it after so many steps instead of by the clock: how a run is run again. MiB are measured at the first
    step, the largest: all ranks are open. Dev accuracy is what choices are made by; the test side is looked at once.
    """

    def __init__(self, settings: BudgetSettings, seed: int, *, until: int | None = None) -> None:
        if settings.fault():
            raise ValueError(settings.fault())
        self.settings, self.seed, self.until = settings, seed, until
        self.model = settings.build(seed)
        self._ranks: RankTrainer | None = None
        if settings.model == LEARNED:
            late = max(1, round(LATE_SHARE * settings.steps))
            config = RankConfig(
                early_steps=settings.steps - late, late_steps=late, gamma=GAMMA, rate=settings.learning_rate,
                gate_rate=GATE_RATE, batch_size=BATCH, seed=seed, target_ratio=settings.target_ratio,
                evaluate_every=EVALUATE_EVERY,
            )  # fmt: skip
            self._ranks = RankTrainer(self.model, inner_digits(), config)
            self.trainer = self._ranks.trainer
        else:
            plan = TrainConfig(
                steps=settings.steps, learning_rate=settings.learning_rate, batch_size=BATCH, seed=seed,
                evaluate_every=EVALUATE_EVERY,
            )  # fmt: skip
            rate = settings.learning_rate
            optimizer = make_optimizer(settings.optimizer, self.model.parameters(), rate, **settings.optimizer_settings)
            self.trainer = Trainer(self.model, inner_digits(), plan, optimizer=optimizer)
        self.train_bytes = 0
        self.finish_s = 0.0
        self.finished = False
        self.out_of_time = False
        self.steps = History("steps", "seconds", "loss_nats", "step_time_ms")
        self.evaluations = History("steps", "seconds", "accuracy_percent")

    @property
    def elapsed_s(self) -> float:
        """Training time, the last cut included."""
        return self.trainer.elapsed_s + self.finish_s

    @property
    def fraction(self) -> float:
        if self.until is not None:
            return self.trainer.steps_done / self.until
        return min(1.0, max(self.trainer.steps_done / self.settings.steps, self.elapsed_s / self.settings.seconds))

    def advance(self) -> None:
        if self.trainer.evaluation_due:
            self._evaluate()
        elif self._more():
            row = self._step()
            self.steps.add(row.step, row.elapsed_s, row.loss_nats, row.step_time_ms)
        else:
            self._end()

    def _more(self) -> bool:
        """Whether another step belongs to this run."""
        if self.until is not None:
            return self.trainer.steps_done < min(self.until, self.settings.steps)
        if len(self.steps):
            recent = self.steps["step_time_ms"][-20:]
            if self.elapsed_s + float(recent.max()) / 1e3 > self.settings.seconds:
                self.out_of_time = self.trainer.steps_done < self.settings.steps
                return False
        return self.trainer.steps_done < self.settings.steps

    def _step(self) -> StepRow:
        step = self.trainer.step if self._ranks is None else self._ranks.step
        if self.train_bytes:
            return step()
        rows: list[StepRow] = []
        measured = measure(lambda: rows.append(step()), self.model, self.trainer.optimizer)
        self.train_bytes = measured.pools.total
        return rows[0]

    def _end(self) -> None:
        if self._ranks is not None:
            began = time.perf_counter()
            self._ranks.finish()
            self.finish_s = time.perf_counter() - began
        if self._ranks is not None or not isinstance(self.trainer.rows[-1], EvalRow):
            self._evaluate()
        self.finished = True

    def _evaluate(self) -> None:
        row = self.trainer.evaluate()
        self.evaluations.add(row.step, self.elapsed_s, 100 * row.accuracy)

    @torch.no_grad()
    def _test_accuracy(self) -> float:
        data, model = digits_28(), copy.copy(self.model).eval()
        return float((model(data.test_x).argmax(dim=-1) == data.test_y).float().mean())

    def curve(self, axis: str = "steps") -> Curve:
        return Curve(
            "this run", self.steps.sample(axis), self.steps.sample("loss_nats"),
            self.evaluations.sample(axis), self.evaluations.sample("accuracy_percent"),
        )  # fmt: skip

    def row(self) -> dict[str, Any]:
        """What came of a finished run, as plain numbers."""
        size = model_size(self.model)
        return {
            "seed": self.seed,
            "steps": self.trainer.steps_done,
            "ended": "seconds" if self.out_of_time else "steps",
            "seconds": self.elapsed_s,
            "step_time_ms": median(self.steps["step_time_ms"].tolist()),
            "train_mib": mib(self.train_bytes),
            "weights_mib": mib(size.total_bytes),
            "parameters": size.total,
            "dev_accuracy_percent": float(self.evaluations["accuracy_percent"][-1]),
            "test_accuracy_percent": 100 * self._test_accuracy(),
            "date": date(),
        }


def run_again(settings: BudgetSettings, seed: int, steps: int) -> BudgetRun:
    """The same run once more, by steps and not by the clock, to its end."""
    run = BudgetRun(settings, seed, until=steps)
    while not run.finished:
        run.advance()
    return run
