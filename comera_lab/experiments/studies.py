"""Recorded studies: small enough to run again on a laptop, and what lessons and README quote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import quantiles

import torch

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.recorder import EvalRow, Recorder, ResultRow, StepRow, write_rows
from comera_lab.experiments.train import RunResult, TrainConfig, fit
from comera_lab.models.mlp import MLP

RANKS: tuple[int | None, ...] = (None, 2, 4, 8, 16)  # None is the dense twin
SEEDS = (0, 1, 2)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
_COMMAND = 'python -c "from comera_lab.experiments.studies import digits_study; digits_study(PATH)"'
_EVALUATE_EVERY = 50
_STEP_ROWS_EVERY = 10  # of the first seed: enough for a curve, and the file stays small


# What the recorded study chose (data/results/digits_mlp_cpu.jsonl); None is the dense twin
_TUNED = {None: 1e-3, 2: 1e-2, 4: 1e-2, 8: 3e-3, 16: 1e-3}


def tuned_rate(rank: int | None) -> float:
    """AdamW's learning rate of the recorded study for this rank, or for the nearest smaller one; None is dense."""
    if rank is None:
        return _TUNED[None]
    known = [tuned for tuned in _TUNED if tuned is not None and tuned <= rank]
    return _TUNED[max(known)] if known else _TUNED[2]


def digits_study(
    out_path: str | Path,
    *,
    ranks: tuple[int | None, ...] = RANKS,
    seeds: tuple[int, ...] = SEEDS,
    rates: tuple[float, ...] = RATES,
    steps: int = 600,
) -> list[ResultRow]:
    """Train the 784-512-512-10 MLP on digits(28), dense and as tensor trains of each rank, and record it.

    One run per model and seed: run row, evaluations every 50 steps, every tenth step of the first seed, and a
    result row with the median step time. Each model gets the learning rate that does best on an inner split
    of its training side, so that neither twin is compared at the other's rate and the test side chooses
    nothing. One thread. Seeds are the outer loop, so that a busy minute of the machine meets every model.
    `out_path` must not exist yet. About two minutes on one core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = digits(28)
        inner = Dataset.from_tensors("digits inner split", data.train_x, data.train_y, classes=data.classes)
        chosen = {rank: best_rate(inner, rank, rates, steps) for rank in ranks}
        recorders = [
            _recorded_run(data, rank, steps, chosen[rank], seed, rates, keep_steps=seed == seeds[0])
            for seed in seeds
            for rank in ranks
        ]
    finally:
        torch.set_num_threads(threads)
    write_rows(out_path, [row for recorder in recorders for row in recorder.rows])
    return [row for recorder in recorders for row in recorder.rows if isinstance(row, ResultRow)]


def best_rate(inner: Dataset, rank: int | None, rates: tuple[float, ...], steps: int) -> float:
    """The learning rate with the lowest held-out loss after `steps`, mean over two seeds used nowhere else."""

    def held_out_loss(rate: float) -> float:
        losses = []
        for seed in (100, 101):
            config = TrainConfig(steps=steps, learning_rate=rate, seed=seed, evaluate_every=0)
            losses.append(_evaluations(fit(_model(rank, seed), inner, config))[-1].loss_nats)
        return sum(losses) / len(losses)

    return min(rates, key=held_out_loss)


def _recorded_run(
    data: Dataset,
    rank: int | None,
    steps: int,
    rate: float,
    seed: int,
    rates: tuple[float, ...],
    *,
    keep_steps: bool,
) -> Recorder:
    model = _model(rank, seed)
    config = TrainConfig(steps=steps, learning_rate=rate, seed=seed, evaluate_every=_EVALUATE_EVERY)
    about = {
        **dataclasses.asdict(config),
        "data": data.name,
        "data_digest": data.digest,
        "model": model.kind,
        "rank": rank,
        "order": None if rank is None else 3,
        "features": list(model.features),
        "dtype": "float32",
        "rates_tried": list(rates),
        "step_rows_every": _STEP_ROWS_EVERY if keep_steps else None,
    }
    recorder = Recorder(None, about, command=_COMMAND)
    result = fit(model, data, config)
    for row in result.rows:
        if isinstance(row, EvalRow) or (keep_steps and row.step % _STEP_ROWS_EVERY == 1):
            recorder.add(row)
    times = [row.step_time_ms for row in result.rows if isinstance(row, StepRow)]
    tenths = quantiles(times, n=10)
    last = _evaluations(result)[-1]
    recorder.add(
        ResultRow(
            model=model.kind,
            rank=rank,
            parameters=model.parameter_count(),
            seed=seed,
            steps=result.steps,
            stopped=result.stopped,
            accuracy=last.accuracy,
            loss_nats=last.loss_nats,
            step_time_ms=tenths[4],
            step_time_p20_ms=tenths[1],
            step_time_p80_ms=tenths[7],
            elapsed_s=result.elapsed_s,
        )
    )
    return recorder


def _model(rank: int | None, seed: int) -> MLP:
    generator = torch.Generator().manual_seed(seed)
    return MLP(generator=generator) if rank is None else MLP(kind="tt", rank=rank, generator=generator)


def _evaluations(result: RunResult) -> list[EvalRow]:
    return [row for row in result.rows if isinstance(row, EvalRow)]
