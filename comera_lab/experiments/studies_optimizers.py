"""Optimizers beside each other on real digits, and what COAP's parts bring: rates tuned alike, three seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.recorder import EvalRow, OptimizerResultRow, Recorder, StepRow, write_rows
from comera_lab.experiments.runs import build_optimizer
from comera_lab.experiments.train import RunResult, TrainConfig, fit
from comera_lab.models.mlp import MLP

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
_TUNING_SEED = 100
# At a constant rate the held-out loss jumps by half of itself from step to step: five evaluations are one figure.
_EVALUATE_EVERY, _EVALUATIONS = 20, 5
_COMMAND = 'python -c "from comera_lab.experiments.studies_optimizers import optimizer_study; optimizer_study(PATH)"'

# A basis is renewed every 80 steps by all of them; COAP takes four alignment steps in between.
_COAP = {"update_interval": 16, "refresh_factor": 5}
_EVERY = 80


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train: the optimizer's name and settings."""

    kind: str
    optimizer: str
    settings: Mapping[str, Any]


COMPARISON = (
    Arm("comparison", "adamw", {}),
    Arm("comparison", "galore", {"update_interval": _EVERY}),
    Arm("comparison", "flora", {"resample_interval": _EVERY}),
    Arm("comparison", "coap", _COAP),
    Arm("comparison", "coap-8bit", _COAP),
)
ABLATION = tuple(
    Arm("ablation", "coap", {**_COAP, **basis, "transfer_moments": transfer})
    for basis in (
        {"alignment": None},
        {"alignment": "paper"},
        {"alignment": "scale-free"},
        {"alignment": None, "refresh": "svd"},
    )
    for transfer in (False, True)
)


class _InDtype(nn.Module):
    """A model with weights of another dtype: inputs go in in it, logits come out in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x.to(self.dtype))
        return logits.float()


def optimizer_study(
    out_path: str | Path,
    *,
    arms: tuple[Arm, ...] = COMPARISON + ABLATION,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    seeds: tuple[int, ...] = SEEDS,
    rates: tuple[float, ...] = RATES,
    features: tuple[int, ...] = (784, 256, 256, 10),
    steps: int = 300,
    on_result: Callable[[OptimizerResultRow], None] | None = None,
) -> list[OptimizerResultRow]:
    """Train an MLP on digits(28) with every arm, dtype and seed, and record it.

    Every arm gets the rate of `rates` with the lowest held-out loss on an inner split of the training side, in float32
    and with a seed used nowhere else: the test side chooses nothing. All dtypes take that rate. Weights, and with them
    the bases, are of the dtype; projected moments are float32, those of torch's AdamW of the dtype. Both hidden layers
    are projected at a quarter of their smaller side; biases and the classifier take the plain rule. One thread.
    `out_path` must not exist yet. About three minutes on one core that has nothing else to do.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = digits(28)
        inner = Dataset.from_tensors("digits inner split", data.train_x, data.train_y, classes=data.classes)
        recorders = []
        for arm in arms:
            rate = _best_rate(inner, arm, rates, features, steps)
            for dtype in dtypes:
                for seed in seeds:
                    recorder = _recorded(data, arm, dtype, rate, seed, rates, features, steps)
                    recorders.append(recorder)
                    if on_result is not None:
                        on_result(_result_of(recorder))
    finally:
        torch.set_num_threads(threads)
    write_rows(out_path, [row for recorder in recorders for row in recorder.rows])
    return [_result_of(recorder) for recorder in recorders]


def _best_rate(inner: Dataset, arm: Arm, rates: tuple[float, ...], features: tuple[int, ...], steps: int) -> float:
    def held_out_loss(rate: float) -> float:
        run, _ = _train(inner, arm, torch.float32, rate, _TUNING_SEED, features, steps)
        return mean(row.loss_nats for row in _evaluations(run))

    return min(rates, key=held_out_loss)


def _train(
    data: Dataset, arm: Arm, dtype: torch.dtype, rate: float, seed: int, features: tuple[int, ...], steps: int
) -> tuple[RunResult, float]:
    """The run, and the MiB of optimizer state at its end."""
    model = _InDtype(MLP(features, generator=torch.Generator().manual_seed(seed)), dtype)
    config = _config(arm, rate, seed, steps)
    optimizer = build_optimizer(config, list(model.parameters()))
    result = fit(model, data, config, optimizer=optimizer)
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    return result, state / 2**20


def _config(arm: Arm, rate: float, seed: int, steps: int) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        learning_rate=rate,
        optimizer=arm.optimizer,
        optimizer_settings=dict(arm.settings),
        seed=seed,
        evaluate_every=_EVALUATE_EVERY,
    )


def _recorded(
    data: Dataset,
    arm: Arm,
    dtype: torch.dtype,
    rate: float,
    seed: int,
    rates: tuple[float, ...],
    features: tuple[int, ...],
    steps: int,
) -> Recorder:
    about = {
        **dataclasses.asdict(_config(arm, rate, seed, steps)),
        "data": data.name,
        "data_digest": data.digest,
        "features": list(features),
        "dtype": str(dtype).removeprefix("torch."),
        "rates_tried": list(rates),
    }
    recorder = Recorder(None, about, command=_COMMAND)
    result, state_mib = _train(data, arm, dtype, rate, seed, features, steps)
    made = [row for row in result.rows if isinstance(row, StepRow)]
    ends = _evaluations(result)
    recorder.add(
        OptimizerResultRow(
            arm=arm.kind,
            optimizer=arm.optimizer,
            settings=dict(arm.settings),
            dtype=about["dtype"],
            learning_rate=rate,
            seed=seed,
            steps=result.steps,
            train_loss_nats=mean(row.loss_nats for row in made[-max(1, len(made) // 5) :]),
            loss_nats=mean(row.loss_nats for row in ends),
            accuracy=mean(row.accuracy for row in ends),
            state_mib=state_mib,
            step_time_ms=median(row.step_time_ms for row in made),
            elapsed_s=result.elapsed_s,
        )
    )
    return recorder


def _result_of(recorder: Recorder) -> OptimizerResultRow:
    row = recorder.rows[-1]
    assert isinstance(row, OptimizerResultRow)
    return row


def _evaluations(result: RunResult) -> list[EvalRow]:
    return [row for row in result.rows if isinstance(row, EvalRow)][-_EVALUATIONS:]
