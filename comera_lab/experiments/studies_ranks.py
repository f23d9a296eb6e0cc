"""The compression study of CoMERA's MNLI table on data that everyone can run: dense, fixed ranks, learned ranks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.pairs import PairData
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import RankResultRow, Recorder
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.layers import tt_layers
from comera_lab.memory import measure, mib
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.objectives import model_size

Variant = tuple[str, float | None]
# Name and target, a share of the cores at the start; "early" leaves the size to its price.
VARIANTS: tuple[Variant, ...] = (
    ("dense", None), ("fixed", None), ("early", None), ("late", 0.8), ("late", 0.5), ("late", 0.2)
)
_COMMAND = (
    'python -c "from comera_lab.experiments.pairs import load_wordnet_pairs as load; '
    "from comera_lab.experiments.studies_ranks import rank_study; rank_study(PATH, load())\""
)
_TIMED_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankStudy:
    """The settings that all models of a study share. Half of the steps are early, half late. At a rate of 3e-3 the
    tensorised encoder is still at chance after 240 steps, at 1e-3 it is not.

    Prices: the tensorised layers of the small encoder start at a fifth of their dense size, and what the task has to
    give in so few steps is about 0.2 nats. gamma 0.5 is 0.1 nats at the start (thins before the late stage), 2 is
    0.4 (for an early stage alone); at 20 an early stage alone ends at ranks of 1 and at chance (0.337).
    """

    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig.small)
    steps: int = 1000
    batch_size: int = 64
    tokens: int = 16
    dev_pairs: int = 4000
    rate: float = 1e-3
    gate_rate: float = 1e-2
    gamma: float = 0.5
    gamma_alone: float = 2.0
    evaluate_every: int = 250


def rank_study(
    out_path: str | Path,
    pairs: PairData,
    *,
    study: RankStudy | None = None,
    variants: Iterable[Variant] = VARIANTS,
    seeds: Iterable[int] = (0,),
) -> list[RankResultRow]:
    """Train every variant on `pairs` with one thread; append run, evaluation, rank and result rows to `out_path`.

    An interrupted study leaves the variants that are done. The accuracy of a result is that of the
    first `dev_pairs` of the "dev" split after the last step. Nothing is chosen on them: all variants share `study`.
    """
    study = RankStudy() if study is None else study
    data = pairs.dataset(test_pairs=study.dev_pairs, tokens=study.tokens)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_recorded(out_path, pairs, data, study, variant, seed) for seed in seeds for variant in variants]
    finally:
        torch.set_num_threads(threads)


def _recorded(
    out_path: str | Path, pairs: PairData, data: Dataset, study: RankStudy, variant: Variant, seed: int
) -> RankResultRow:
    name, target = variant
    encoder = dataclasses.replace(study.encoder, kind="dense" if name == "dense" else "tt")
    model = PairEncoder(encoder, generator=torch.Generator().manual_seed(seed))
    config = _config(study, name, target, seed)
    about = {
        "variant": name, "encoder": dataclasses.asdict(encoder), "data": data.name, "data_digest": pairs.digest,
        "tokens": study.tokens, "dev_pairs": study.dev_pairs, **dataclasses.asdict(config),
    }
    before = copy.deepcopy(model)
    with Recorder(out_path, about, command=_COMMAND) as recorder:
        # Not handed to the trainer: a row for every step would make the file ten times as long.
        trainer = RankTrainer(model, data, config) if isinstance(config, RankConfig) else Trainer(model, data, config)
        while not trainer.done:
            trainer.step()
            if trainer.evaluation_due:
                recorder.add(trainer.evaluate())
        if isinstance(trainer, RankTrainer):
            trainer.finish()
            for row in trainer.history:
                recorder.add(row)
            for layer in tt_layers(before).values():
                layer.add_gates()
        result = _result(name, target, seed, trainer, before, model, data, study)
        recorder.add(result)
    return result


def _config(study: RankStudy, name: str, target: float | None, seed: int) -> TrainConfig | RankConfig:
    if name in ("dense", "fixed"):
        return TrainConfig(
            steps=study.steps,
            batch_size=study.batch_size,
            learning_rate=study.rate,
            seed=seed,
            evaluate_every=study.evaluate_every,
        )
    late = 0 if target is None else study.steps // 2
    return RankConfig(
        early_steps=study.steps - late,
        late_steps=late,
        gamma=study.gamma_alone if target is None else study.gamma,
        target_ratio=target,
        rate=study.rate,
        gate_rate=study.gate_rate,
        batch_size=study.batch_size,
        seed=seed,
        evaluate_every=study.evaluate_every,
        rank_rows_every=25,
    )


def _result(
    name: str,
    target: float | None,
    seed: int,
    trainer: Trainer | RankTrainer,
    before: nn.Module,
    after: PairEncoder,
    data: Dataset,
    study: RankStudy,
) -> RankResultRow:
    last = trainer.evaluate()
    size = model_size(after)
    with torch.device("meta"):
        twin = model_size(PairEncoder(dataclasses.replace(after.config, kind="tt")))
    tensorised_bytes = size.core_bytes or 4 * twin.tensorised_dense
    times, peaks = _steps_of([before, after], data, study)
    return RankResultRow(
        model=name,
        target_ratio=target,
        seed=seed,
        steps=trainer.steps_done,
        accuracy=last.accuracy,
        loss_nats=last.loss_nats,
        total_mib=mib(size.total_bytes),
        tensorised_mib=mib(tensorised_bytes),
        total_ratio=twin.dense_twin / size.total,
        tensorised_ratio=4 * twin.tensorised_dense / tensorised_bytes,
        step_time_before_ms=times[0],
        step_time_after_ms=times[1],
        peak_before_mib=peaks[0],
        peak_after_mib=peaks[1],
        elapsed_s=trainer.elapsed_s,
    )


def _steps_of(models: list[nn.Module], data: Dataset, study: RankStudy) -> tuple[list[float], list[float]]:
    """Median step time (ms) and peak (MiB) of each model, in turn, so that a busy minute meets all of them."""
    config = TrainConfig(steps=_TIMED_STEPS + 2, batch_size=study.batch_size, learning_rate=1e-9)
    trainers = [Trainer(model, data, config) for model in models]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(_TIMED_STEPS + 1):
        for taken, trainer in zip(times, trainers, strict=True):
            taken.append(trainer.step().step_time_ms)
    pools = [measure(trainer.step, trainer.model, trainer.optimizer).pools for trainer in trainers]
    return [median(taken[1:]) for taken in times], [mib(pool.total) for pool in pools]
