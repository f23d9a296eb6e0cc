"""What a model of a rank study costs in training, as it started and as its ranks were cut: step time and peak by pool.

A study that shares its machine records sizes and accuracies that stand, and times that do not. `remeasure` takes
them again when the machine is quiet, from the recorded ranks: time depends on shapes, not on what was learned.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.pairs import PairData
from comera_lab.experiments.provenance import commit
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.layers import compact, tt_layers
from comera_lab.memory import measure, mib
from comera_lab.models.encoder import EncoderConfig, PairEncoder

TIMED_STEPS = 20


@dataclass(frozen=True)
class StepCost:
    """Median time of a training step (ms) and its pools at their peak (MiB)."""

    step_time_ms: float
    pools_mib: dict[str, float]

    @property
    def peak_mib(self) -> float:
        return sum(self.pools_mib.values())


def step_costs(
    models: Sequence[nn.Module], data: Dataset, batch_size: int, timed_steps: int = TIMED_STEPS
) -> list[StepCost]:
    """Cost of a plain AdamW step of each model, their steps taken in turn so that a busy minute meets all of them.

    The models are trained at a rate of 1e-9: they stay what they were. No size objective is counted.
    """
    config = TrainConfig(steps=timed_steps + 2, batch_size=batch_size, learning_rate=1e-9)
    trainers = [Trainer(model, data, config) for model in models]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(timed_steps + 1):
        for taken, trainer in zip(times, trainers, strict=True):
            taken.append(trainer.step().step_time_ms)
    pools = [measure(trainer.step, trainer.model, trainer.optimizer).pools for trainer in trainers]
    return [
        StepCost(median(taken[1:]), {name: mib(count) for name, count in pool.as_dict().items()})
        for taken, pool in zip(times, pools, strict=True)
    ]


def cost_fields(before: StepCost, after: StepCost) -> dict[str, Any]:
    """The fields of a RankResultRow that `step_costs` decides."""
    return {
        "step_time_before_ms": before.step_time_ms,
        "step_time_after_ms": after.step_time_ms,
        "peak_before_mib": before.peak_mib,
        "peak_after_mib": after.peak_mib,
        "pools_before_mib": before.pools_mib,
        "pools_after_mib": after.pools_mib,
        "cost_commit": commit(),
    }


def with_ranks(model: PairEncoder, ranks: Mapping[str, Sequence[int]]) -> PairEncoder:
    """Cut `model`, in place, to these ranks (closing 1s included) of its layers; it gets gates where it has none."""
    for name, layer in tt_layers(model).items():
        if not len(layer.gates):
            layer.add_gates()
        with torch.no_grad():
            for gate, rank in zip(layer.gates, ranks[name][1:-1], strict=True):
                gate[rank:] = 0.0
    compact(model)
    return model


def remeasure(path: str | Path, pairs: PairData, timed_steps: int = TIMED_STEPS) -> int:
    """Take step times and pools of every finished model in `path` again, one thread, and rewrite the file.

    `pairs` is what they were trained on. Everything else in the file stays as it is; a model that several seeds
    share in shape is measured for each. Returns how many result rows were renewed; the file is replaced at the end
    or not at all.
    """
    path = Path(path)
    rows = read_rows(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = [run for run in split_runs(rows) if run[-1]["kind"] == "rank_result"]
        for run in results:
            run[-1].update(_measured_again(run, pairs, timed_steps))
    finally:
        torch.set_num_threads(threads)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    read_rows(fresh)
    fresh.replace(path)
    return len(results)


def _measured_again(run: list[dict[str, Any]], pairs: PairData, timed_steps: int) -> dict[str, Any]:
    config = run[0]["config"]
    before, after = (_fresh(config["encoder"]) for _ in range(2))
    ranks = [row["ranks"] for row in run if row["kind"] == "rank"]
    if ranks:
        with_ranks(before, ranks[0])
        for layer in tt_layers(with_ranks(after, ranks[-1])).values():
            # as the training left them: held from the moment the target was met
            layer.gates.requires_grad_(config["target_ratio"] is None)
    data = pairs.dataset(
        test_pairs=config["dev_pairs"], tokens=config["tokens"], joined=config["encoder"]["head"] == "cross"
    )
    costs = step_costs([before, after], data, config["batch_size"], timed_steps)
    return cost_fields(*costs)


def _fresh(encoder: Mapping[str, Any]) -> PairEncoder:
    words = encoder["word_modes"]
    modes = None if words is None else (tuple(words[0]), tuple(words[1]))
    config = dataclasses.replace(EncoderConfig(**{**encoder, "word_modes": None}), word_modes=modes)
    return PairEncoder(config, generator=torch.Generator().manual_seed(0))
