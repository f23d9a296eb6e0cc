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
from comera_lab.experiments.recorder import DiffusionResultRow, Recorder, read_rows, split_runs
from comera_lab.memory import mib
from comera_lab.models.unet import UNet
from comera_lab.optimizers import make_optimizer

CHANNELS = (40, 80)
METHODS = ("adamw", "galore", "coap")
START_RATE = 8e-3
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
_TUNED = {"adamw": 8e-3, "galore": 3.2e-2, "coap": 8e-3, "coap-8bit": 8e-3}


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
    start_rate: float = START_RATE,
    rank_ratio: float = 4.0,
    config: DiffusionConfig | None = None,
    channels: tuple[int, ...] = CHANNELS,
    times: Mapping[str, StepTime] | None = None,
) -> list[DiffusionResultRow]:
    """Train the U-Net with every method and seed on one thread; append run, evaluation and result rows to `out_path`.

    Each method gets the rate, of those that double from one to the next, with the lowest noise error on an inner split
    of the training digits after half the steps, with a seed used nowhere else: the test digits choose nothing. `times`
    are those of `step_times`, measured now if None: on a busy machine take them in a quiet minute. An interrupted study
    leaves the runs that are done. About ten minutes on one quiet core.
    """
    config = DiffusionConfig(steps=400, evaluate_every=200, samples=500) if config is None else config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = step_times(methods, rank_ratio, config, channels) if times is None else times
        tried = {method: _tuning(method, start_rate, rank_ratio, config, channels) for method in methods}
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


def recorded_table(path: str | Path) -> str:
    """A recorded study as text: per method the mean over its seeds, with their range, and where it was recorded."""
    runs = split_runs(read_rows(path))
    lines = [
        f"{'optimizer':<10} {'rate':<6} {'MiB':>5}  {'noise error (seeds)':<24} {'distance (seeds)':<22} "
        f"{'ms a step':>9}  {'update':>6}  {'slowest':>7}"
    ]
    for method in dict.fromkeys(run[-1]["optimizer"] for run in runs):
        results = [run[-1] for run in runs if run[-1]["optimizer"] == method]
        first = results[0]
        lines.append(
            f"{method:<10} {first['learning_rate']:<6g} {mib(first['optimizer_bytes']):5.2f}  "
            f"{_range([row['test_loss_mse'] for row in results], 4):<24} "
            f"{_range([row['frechet'] for row in results], 1):<22} {first['step_time_ms']:9.1f}  "
            f"{first['update_time_ms']:6.1f}  {first['slowest_update_time_ms']:7.1f}"
        )
    info, last = runs[0][0], runs[0][-1]
    return "\n".join([
        *lines,
        f"Distance of held-out real digits {last['frechet_real']:.1f}, of noise {last['frechet_noise']:.0f}. "
        f"{last['steps']} steps of {info['config']['batch_size']} digits, {last['parameters']:,} weights.",
        f"Recorded on {info['device']}, {info['threads']} thread, torch {info['torch']}.",
    ])  # fmt: skip


def _range(values: Sequence[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _tuning(
    method: str, start_rate: float, rank_ratio: float, config: DiffusionConfig, channels: tuple[int, ...]
) -> dict[float, float]:
    """Rate -> noise error on the held-out part of the training digits, for rates that double or halve.

    From `start_rate` on until the best has a worse neighbour on either side: no method is stopped by an edge.
    """

    def error_at(rate: float) -> float:
        steps = max(1, config.steps // _TUNING_SHARE)
        shorter = dataclasses.replace(
            config, steps=steps, seed=_TUNING_SEED, learning_rate=rate, evaluate_every=0, samples=2
        )
        trainer = _trainer(method, rank_ratio, shorter, channels, _inner_split())
        while not trainer.done:
            trainer.step()
        return trainer.noise_error()

    errors = {start_rate: error_at(start_rate)}
    while True:
        best = min(errors, key=lambda rate: errors[rate])
        missing = [rate for rate in (2 * best, best / 2) if rate not in errors]
        if not missing:
            return errors
        errors[missing[0]] = error_at(missing[0])


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
