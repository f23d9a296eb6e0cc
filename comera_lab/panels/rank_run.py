"""One rank training with everything a panel shows of it: ranks over time, sizes, costs around a cut."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import EvalRow, StepRow
from comera_lab.layers import tt_layers
from comera_lab.layers.base import GateKind
from comera_lab.memory import measure, mib
from comera_lab.objectives import ModelSize, model_size
from comera_lab.panels.rank_figures import RankHistory
from comera_lab.panels.rank_tasks import DIGITS, RankTask

WARM_UPS = 3
MOST_ROWS = 16  # of the strip, for rows that can be read
ELEMENT_BYTES = 4  # fp32


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What the learner chose: the traits of LabState that rank training reads."""

    target_ratio: float
    size_part: str
    max_rank: int
    gamma: float
    gate_rate: float
    gate_kind: str
    early_steps: int
    late_steps: int
    seed: int = 0

    def config(self, task: RankTask) -> RankConfig:
        """Without late steps there is no target: the price alone decides."""
        return RankConfig(
            early_steps=self.early_steps,
            late_steps=self.late_steps,
            gamma=self.gamma,
            rate=task.rate,
            gate_rate=self.gate_rate,
            batch_size=task.batch_size,
            seed=self.seed,
            target_ratio=self.target_ratio if self.late_steps else None,
            part=cast(Literal["tensorised", "model"], self.size_part),
            gate_kind=cast(GateKind, self.gate_kind),
            evaluate_every=task.evaluate_every,
        )

    @property
    def target_name(self) -> str:
        return f"target: {PART_WORDS[self.size_part]}" if self.late_steps else "no target"

    def words(self) -> str:
        target = f"target {self.target_ratio:g} of the {PART_WORDS[self.size_part]}" if self.late_steps else "no target"
        return (
            f"{target}, max rank {self.max_rank}, gamma {self.gamma:g}, gate rate {self.gate_rate:g}, "
            f"{self.gate_kind} gates, {self.early_steps} + {self.late_steps} steps"
        )


PART_WORDS = {"tensorised": "tensorised part", "model": "whole model"}


@dataclass(frozen=True)
class Cost:
    """What one training step of a model takes here: ms, and bytes of weights, grads, optimizer and activations.

    The time is the 20th percentile of the steps: what else the machine does can only add to it, and medians of a
    run in a notebook swing by half.
    """

    core_parameters: int
    weight_bytes: int
    step_bytes: int
    step_time_ms: float


def core_parameters(model: nn.Module) -> int:
    """Numbers in all cores as they lie in memory, dead ranks included."""
    return sum(core.numel() for layer in tt_layers(model).values() for core in layer.cores)


def costs_of_a_step(*models: nn.Module, task: RankTask = DIGITS) -> list[Cost]:
    """The Cost of each model on the first batch of `task`, on copies that do not learn: nothing of `models` moves.

    The steps are taken in turns, forth and back, so that a busy minute of the machine meets every model.
    """
    timed = [_TimedTwin(model, task) for model in models]
    pools = [measure(twin.step, twin.model, twin.optimizer).pools for twin in timed]
    for repeat in range(WARM_UPS + task.timed_steps):
        for twin in timed if repeat % 2 else reversed(timed):
            began = time.perf_counter()
            twin.step()
            if repeat >= WARM_UPS:
                twin.times_ms.append(1e3 * (time.perf_counter() - began))
    return [
        Cost(core_parameters(twin.model), pool.weights, pool.total, quantiles(twin.times_ms, n=5)[0])
        for twin, pool in zip(timed, pools, strict=True)
    ]


class _TimedTwin:
    """A copy of a model with an AdamW step on one batch."""

    def __init__(self, model: nn.Module, task: RankTask) -> None:
        self.model = copy.deepcopy(model)
        data = task.data()
        self._batch = data.train_x[: task.batch_size], data.train_y[: task.batch_size]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.times_ms: list[float] = []

    def step(self) -> None:
        x, y = self._batch
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.model(x), y)
        torch.autograd.backward(loss)
        self.optimizer.step()


class RankRun:
    """`advance` makes one step or one evaluation; at the end it meets the target, cuts, and evaluates once more.

    `before` and `after` are the costs of a step with the cores of the start and with those that are left, measured
    together after every cut; None until there is one.
    """

    def __init__(self, settings: RankSettings, task: RankTask = DIGITS) -> None:
        self.settings, self.task = settings, task
        self.model = task.build(settings.max_rank, torch.Generator().manual_seed(settings.seed))
        self.trainer = RankTrainer(self.model, task.data(), settings.config(task))
        self.start = model_size(self.model)
        self._first = copy.deepcopy(self.model)
        self.before: Cost | None = None
        self.after: Cost | None = None
        self.accuracy_uncut: float | None = None

    @property
    def finished(self) -> bool:
        return self.trainer.finished is not None

    def advance(self) -> StepRow | EvalRow:
        row: StepRow | EvalRow
        if self.trainer.evaluation_due:
            return self.trainer.evaluate()
        if not self.trainer.done:
            row = self.trainer.step()
        else:
            self.accuracy_uncut = self.accuracy_percent
            self.trainer.finish()
            row = self.trainer.evaluate()
        self._measure_cut()
        return row

    def compact(self) -> None:
        """Cut what is closed by now, and measure a step of what is left."""
        self.trainer.compact()
        self._measure_cut()

    def _measure_cut(self) -> None:
        """The late stage cuts by itself as well: a new size in memory is what tells of a cut."""
        known = self.start.cores if self.after is None else self.after.core_parameters
        if core_parameters(self.model) != known:
            self.before, self.after = costs_of_a_step(self._first, self.model, task=self.task)

    @property
    def fraction(self) -> float:
        return self.trainer.steps_done / (self.settings.early_steps + self.settings.late_steps)

    @property
    def size(self) -> ModelSize:
        return self.trainer.size()

    @property
    def accuracy_percent(self) -> float | None:
        """Accuracy of the last evaluation, on the held-out side of the task."""
        tests = self.trainer.trainer.evaluations
        return 100 * tests[-1].accuracy if tests else None

    @property
    def accuracy_lost_percent(self) -> float:
        """Points of accuracy that the last cut took; 0.0 before it."""
        if self.accuracy_uncut is None or self.accuracy_percent is None:
            return 0.0
        return self.accuracy_uncut - self.accuracy_percent

    def history(self) -> RankHistory:
        rows = list(self.trainer.history)
        tests = list(self.trainer.trainer.evaluations)
        chains = [strip_rows(row.ranks) for row in rows]
        live = np.array([list(chain.values()) for chain in chains], dtype=float).T
        limit, whole = self.trainer.limit, self.settings.size_part == "model"
        allowed = None if limit is None else mib(ELEMENT_BYTES * (limit + (self.start.dense if whole else 0)))
        return RankHistory(
            bonds=tuple(chains[0]),
            started=tuple(int(rank) for rank in live[:, 0]),
            steps=np.array([row.step for row in rows], dtype=float),
            live=live,
            cores_mib=np.array([mib(ELEMENT_BYTES * row.cores) for row in rows]),
            total_mib=np.array([mib(ELEMENT_BYTES * row.total) for row in rows]),
            eval_steps=np.array([row.step for row in tests], dtype=float),
            accuracy_percent=np.array([100 * row.accuracy for row in tests]),
            target_mib=allowed,
            target_name=self.settings.target_name,
            late_from=self.settings.early_steps if limit is not None else None,
            length=self.settings.early_steps + self.settings.late_steps,
            accuracy_name=f"{self.task.held_out} accuracy",
        )

    def summary(self) -> dict[str, Any]:
        """Settings and results as plain numbers; costs are None until a cut."""
        size = self.size
        return {
            "task": self.task.name,
            "data": self.trainer.trainer.data.name,
            **self.settings.__dict__,
            "steps": self.trainer.steps_done,
            "stage": self.trainer.stage,
            "accuracy_percent": self.accuracy_percent,
            "accuracy_uncut_percent": self.accuracy_uncut,
            "cores": size.cores,
            "parameters": size.total,
            "start_cores": self.start.cores,
            "start_parameters": self.start.total,
            "limit_cores": self.trainer.limit,
            "total_ratio": size.total_ratio,
            "tensorised_ratio": size.tensorised_ratio,
            "ranks": {name: list(ranks) for name, ranks in self.trainer.ranks().items()},
            "total_bytes": size.total_bytes,
            "step_time_before_ms": self.before and self.before.step_time_ms,
            "step_time_after_ms": self.after and self.after.step_time_ms,
            "step_before_bytes": self.before and self.before.step_bytes,
            "step_after_bytes": self.after and self.after.step_bytes,
        }


def strip_rows(ranks: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Live ranks by name, in the order of the model: of every inner bond; of whole layers where bonds are too many."""
    inner = {name: list(chain[1:-1]) for name, chain in ranks.items()}
    if sum(map(len, inner.values())) > MOST_ROWS:
        return {_layer_name(name): sum(bonds) for name, bonds in inner.items()}
    return {
        f"layer {number} bond {bond}": rank
        for number, bonds in enumerate(inner.values(), start=1)
        for bond, rank in enumerate(bonds, start=1)
    }


def _layer_name(name: str) -> str:
    """'blocks.0.query' as 'block 1 query'; a name of another form as it is."""
    group, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    return f"{group.removesuffix('s')} {int(number) + 1} {part}" if part and number.isdigit() else name


def untrained_history(settings: RankSettings, task: RankTask = DIGITS) -> RankHistory:
    """The rows of the strip before any training."""
    with torch.device("meta"):
        layers = tt_layers(task.build(settings.max_rank, None))
    rows = strip_rows({name: layer.shape.ranks for name, layer in layers.items()})
    late_from = settings.early_steps if settings.late_steps else None
    length = max(settings.early_steps + settings.late_steps, 1)
    return RankHistory(
        tuple(rows), tuple(rows.values()), target_name=settings.target_name, late_from=late_from, length=length,
        accuracy_name=f"{task.held_out} accuracy",
    )  # fmt: skip
