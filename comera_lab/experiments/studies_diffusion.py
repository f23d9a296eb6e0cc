"""The recorded comparison on convolutions: AdamW, GaLore (Tucker) and COAP train the same DDPM on digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.diffusion import DiffusionConfig, DiffusionStep, DiffusionTrainer
from comera_lab.experiments.frechet import digit_judge
from comera_lab.experiments.recorder import DiffusionResultRow, Recorder
from comera_lab.models.unet import UNet
from comera_lab.optimizers import make_optimizer

CHANNELS = (40, 80)
METHODS = ("adamw", "galore", "coap")
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
# A refresh of all bases every 160 steps in both: GaLore at once by SVD, COAP warm, with alignment steps in between.
_SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"fused": True},
    "galore": {"update_interval": 160},
    "coap": {"update_interval": 32, "refresh_factor": 5},
    "coap-8bit": {"update_interval": 32, "refresh_factor": 5},
}
_COMMAND = 'python -c "from comera_lab.experiments.studies_diffusion import diffusion_study; diffusion_study(PATH)"'
_TUNING_SEED, _TUNING_SHARE = 100, 2  # half the steps choose a rate
_TIMED_STEPS, _WARM_UPS = 200, 5  # at least one refresh of every basis is among them
_LAST = 50  # steps whose losses are averaged
# What the recorded study chose (data/results/ddpm_digits_cpu.jsonl)
_TUNED = {"adamw": 4e-3, "galore": 1.6e-2, "coap": 4e-3, "coap-8bit": 4e-3}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Medians of a training step and of the update alone, and the slowest update, in ms."""

    whole_ms: float
    update_ms: float
    slowest_update_ms: float

    @classmethod
    def of(cls, steps: Sequence[DiffusionStep]) -> StepTime:
        updates = [row.update_time_ms for row in steps]
        return cls(median(row.step_time_ms for row in steps), median(updates), max(updates))


def tuned_rate(method: str) -> float:
    """The learning rate that did best for `method` in the recorded study; coap-8bit takes that of coap."""
    if method not in _TUNED:
        raise ValueError(f"method must be one of {', '.join(_TUNED)}, got {method!r}.")
    return _TUNED[method]


def optimizer_maker(method: str, rank_ratio: float, rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function from a model to its optimizer, with the settings of the study."""
    settings = _SETTINGS[method] if method == "adamw" else {"rank_ratio": rank_ratio, **_SETTINGS[method]}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(method, model.named_parameters(), rate, **settings)

    return make


def state_size_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the state, step counters included."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def diffusion_study(
    out_path: str | Path,
    *,
    methods: Sequence[str] = METHODS,
    seeds: Iterable[int] = (0, 1, 2),
    rates: Sequence[float] = RATES,
    rank_ratio: float = 4.0,
    config: DiffusionConfig | None = None,
    channels: tuple[int, ...] = CHANNELS,
    times: Mapping[str, StepTime] | None = None,
) -> list[DiffusionResultRow]:
    """Train the U-Net with every method and seed on one thread; append run, evaluation and result rows to `out_path`.

    Each method gets the rate with the lowest noise error on an inner split of the training digits, after half the
    steps, with a seed used nowhere else: the test digits choose nothing. `times` are those of `step_times`, measured
    now if None: on a busy machine take them in a quiet minute. An interrupted study leaves the runs that are done.
    About ten minutes on one quiet core.
    """
    config = DiffusionConfig(steps=400, evaluate_every=100, samples=1000) if config is None else config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = step_times(methods, rank_ratio, config, channels) if times is None else times
        tried = {method: _tuning(method, rates, rank_ratio, config, channels) for method in methods}
        return [
            _recorded(
                out_path,
                method,
                tried[method],
                rank_ratio,
                dataclasses.replace(config, seed=seed),
                channels,
                times[method],
            )
            for seed in seeds
            for method in methods
        ]
    finally:
        torch.set_num_threads(threads)


def step_times(
    methods: Sequence[str] = METHODS,
    rank_ratio: float = 4.0,
    config: DiffusionConfig | None = None,
    channels: tuple[int, ...] = CHANNELS,
) -> dict[str, StepTime]:
    """Time of a step of each method, in turns, so that a busy minute of the machine meets all of them."""
    config = dataclasses.replace(config or DiffusionConfig(), steps=_TIMED_STEPS)
    trainers = {method: _trainer(method, rank_ratio, config, channels) for method in methods}
    for _ in range(_TIMED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    return {method: StepTime.of(trainer.steps[_WARM_UPS:]) for method, trainer in trainers.items()}


def _tuning(
    method: str, rates: Sequence[float], rank_ratio: float, config: DiffusionConfig, channels: tuple[int, ...]
) -> dict[float, float]:
    """Rate -> noise error on the held-out part of the training digits."""
    steps = max(1, config.steps // _TUNING_SHARE)
    errors = {}
    for rate in rates:
        shorter = dataclasses.replace(
            config, steps=steps, seed=_TUNING_SEED, learning_rate=rate, evaluate_every=0, samples=2
        )
        trainer = _trainer(method, rank_ratio, shorter, channels, _inner_split())
        while not trainer.done:
            trainer.step()
        errors[rate] = trainer.noise_error()
    return errors


@cache
def _inner_split() -> Dataset:
    data = digits(8)
    return Dataset.from_tensors("digits inner split", data.train_x, data.train_y, classes=data.classes)


def _trainer(
    method: str, rank_ratio: float, config: DiffusionConfig, channels: tuple[int, ...], data: Dataset | None = None
) -> DiffusionTrainer:
    model = UNet(channels, generator=torch.Generator().manual_seed(config.seed))
    return DiffusionTrainer(
        model, config, make_optimizer=optimizer_maker(method, rank_ratio, config.learning_rate), data=data
    )


def _recorded(
    out_path: str | Path,
    method: str,
    tried: dict[float, float],
    rank_ratio: float,
    config: DiffusionConfig,
    channels: tuple[int, ...],
    time: StepTime,
) -> DiffusionResultRow:
    config = dataclasses.replace(config, learning_rate=min(tried, key=lambda rate: tried[rate]))
    about = {
        "method": method, "rank_ratio": None if method == "adamw" else rank_ratio, "channels": list(channels),
        "data": "digits 8x8", "settings": _SETTINGS[method], **dataclasses.asdict(config),
        "tried": {f"{rate:g}": error for rate, error in tried.items()},
    }  # fmt: skip
    with Recorder(out_path, about, command=_COMMAND) as recorder:
        trainer = _trainer(method, rank_ratio, config, channels)
        while not trainer.done:
            trainer.step()
            if trainer.evaluation_due:
                recorder.add(trainer.evaluate())
        result = _result(method, about["rank_ratio"], trainer, time)
        recorder.add(result)
    return result


def _result(method: str, rank_ratio: float | None, trainer: DiffusionTrainer, time: StepTime) -> DiffusionResultRow:
    judge, last, steps = digit_judge(), trainer.evaluations[-1], trainer.steps
    return DiffusionResultRow(
        optimizer=method,
        rank_ratio=rank_ratio,
        learning_rate=trainer.config.learning_rate,
        seed=trainer.config.seed,
        steps=trainer.steps_done,
        parameters=trainer.model.parameter_count(),
        loss_mse=mean(row.loss_mse for row in steps[-_LAST:]),
        test_loss_mse=last.test_loss_mse,
        frechet=last.frechet,
        frechet_real=judge.real,
        frechet_noise=judge.noise,
        optimizer_bytes=state_size_bytes(trainer.optimizer),
        step_time_ms=time.whole_ms,
        update_time_ms=time.update_ms,
        slowest_update_time_ms=time.slowest_update_ms,
        elapsed_s=trainer.elapsed_s,
    )
