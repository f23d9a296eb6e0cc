"""The compression study of CoMERA's MNLI table on data that everyone can run: dense, fixed ranks, learned ranks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.pairs import PairData
from comera_lab.experiments.rank_costs import TIMED_STEPS, cost_fields, step_costs
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import EvalRow, RankResultRow, RankRow, Recorder
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.layers import tt_layers
from comera_lab.memory import mib
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.objectives import model_size

Variant = tuple[str, float | None]
# Name and target, a share of the cores at the start; "early" leaves the size to its price.
VARIANTS: tuple[Variant, ...] = (
    ("dense", None),
    ("fixed", None),
    ("early", None),
    ("late", 0.8),
    ("late", 0.5),
    ("late", 0.2),
)
_COMMAND = (
    'python -c "from comera_lab.experiments.pairs import load_wordnet_pairs as load; '
    'from comera_lab.experiments.studies_ranks import {call}"'
)
_WARM_SHARE = 0.05
_RELEASED_NOTE = "a run of {steps} steps for sizes, step times and peaks: its accuracy means nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankStudy:
    """The settings that all models of a study share; dense and tensorised models have a rate each.

    The rate rises over the first twentieth of the steps and falls linearly to 0 over the second half. With a target,
    half of the steps are early, half late. `joined` arranges the pairs for a cross head.

    Rates are those with the lowest dev loss of `rate_grid` over 800 steps: 1e-3, 2e-3, 4e-3 for dense, 2e-3, 4e-3,
    8e-3 for fixed ranks (data/results/pairs_rates_cpu.jsonl). Models with gates take over the rate of fixed ranks;
    their prices were set before, in runs of 1,000 steps: at gamma 20 an early stage alone ends at chance.
    """

    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig.small)
    steps: int = 3000
    batch_size: int = 128
    tokens: int = 16
    dev_pairs: int = 4000
    dense_rate: float = 2e-3
    rate: float = 4e-3
    gate_rate: float = 1e-2
    gamma: float = 0.5
    gamma_alone: float = 2.0
    evaluate_every: int = 500
    timed_steps: int = TIMED_STEPS
    joined: bool = False
    note: str = ""

    @classmethod
    def released(cls, steps: int = 60) -> RankStudy:
        """The published 768 configuration for a few steps: what it weighs and costs, not what it learns."""
        encoder = dataclasses.replace(EncoderConfig.released(), separator_id=EncoderConfig.small().separator_id)
        return cls(
            encoder=encoder,
            steps=steps,
            batch_size=8,
            tokens=63,
            dev_pairs=64,
            gate_rate=2e-2,
            evaluate_every=0,
            joined=True,
            note=_RELEASED_NOTE.format(steps=steps),
        )

    def dataset(self, pairs: PairData, held_out: str = "dev") -> Dataset:
        """`pairs` as this study reads them: `dev_pairs` of the dev side, all of the test side."""
        count = self.dev_pairs if held_out == "dev" else None
        return pairs.dataset(held_out, test_pairs=count, tokens=self.tokens, joined=self.joined)


def rank_study(
    out_path: str | Path,
    pairs: PairData,
    *,
    study: RankStudy | None = None,
    variants: Iterable[Variant] = VARIANTS,
    seeds: Iterable[int] = (0, 1, 2),
) -> list[RankResultRow]:
    """Train every variant on `pairs` with one thread; append run, evaluation, rank and result rows to `out_path`.

    An interrupted study leaves the variants that are done. Curves and `accuracy` are those of the first `dev_pairs`
    of "dev"; the whole of "test" is read once, after the last step.
    """
    study = RankStudy() if study is None else study
    with _one_thread():
        return [_recorded(out_path, pairs, study, variant, seed) for seed in seeds for variant in variants]


def rate_grid(
    out_path: str | Path,
    pairs: PairData,
    rates: Mapping[str, Iterable[float]],
    *,
    study: RankStudy | None = None,
    steps: int = 800,
    seed: int = 100,
) -> dict[tuple[str, float], EvalRow]:
    """The choice before a study: a shorter run of "dense" and "fixed" at each of its `rates`, judged on dev alone.

    The seed is none of the study's. Appends a run row and an evaluation for each to `out_path`.
    """
    study = dataclasses.replace(RankStudy() if study is None else study, steps=steps, evaluate_every=0)
    data = study.dataset(pairs)
    found: dict[tuple[str, float], EvalRow] = {}
    with _one_thread():
        for name, some in rates.items():
            for rate in some:
                one = dataclasses.replace(study, dense_rate=rate, rate=rate)
                model = _encoder(one, name, seed)
                config = _fixed_config(one, name, seed)
                about = _about(one, pairs, data, name, model.config, config)
                command = _COMMAND.format(call="rate_grid; rate_grid(PATH, load(), RATES)")
                with Recorder(out_path, about, command=command) as recorder:
                    trainer = Trainer(model, data, config)
                    train_with_schedule(trainer, one, recorder.add)
                    found[name, rate] = trainer.evaluations[-1]
    return found


def _recorded(out_path: str | Path, pairs: PairData, study: RankStudy, variant: Variant, seed: int) -> RankResultRow:
    name, target = variant
    data = study.dataset(pairs)
    model = _encoder(study, name, seed)
    config = _config(study, name, target, seed)
    before = copy.deepcopy(model)
    about = _about(study, pairs, data, name, model.config, config)
    with Recorder(out_path, about, command=_COMMAND.format(call="rank_study; rank_study(PATH, load())")) as recorder:
        # Not handed to the trainer: a row for every step would make the file ten times as long.
        trainer = RankTrainer(model, data, config) if isinstance(config, RankConfig) else Trainer(model, data, config)
        train_with_schedule(trainer, study, recorder.add)
        if isinstance(trainer, RankTrainer):
            trainer.finish()
            for row in thinned(
                trainer.history, trainer.config.rank_rows_every if seed == 0 else max(1, study.steps // 6)
            ):
                recorder.add(row)
            for layer in tt_layers(before).values():
                layer.add_gates()
        costs = cost_fields(*step_costs([before, model], data, study.batch_size, study.timed_steps))
        last = trainer.evaluate()
        test = None if study.note else Trainer(model, study.dataset(pairs, "test"), TrainConfig()).evaluate()
        result = RankResultRow(
            model=name,
            target_ratio=target,
            seed=seed,
            steps=trainer.steps_done,
            accuracy=last.accuracy,
            loss_nats=last.loss_nats,
            test_accuracy=None if test is None else test.accuracy,
            test_loss_nats=None if test is None else test.loss_nats,
            **_sizes(model),
            **costs,
            elapsed_s=trainer.elapsed_s,
            note=study.note,
        )
        recorder.add(result)
    return result


def train_with_schedule(trainer: Trainer | RankTrainer, study: RankStudy, keep: Callable[[EvalRow], object]) -> None:
    """All steps of `trainer` at the rates of `rate_share`; `keep` gets its evaluations."""
    inner = trainer.trainer if isinstance(trainer, RankTrainer) else trainer
    schedule = torch.optim.lr_scheduler.LambdaLR(inner.optimizer, lambda made: rate_share(made, study.steps))
    while not trainer.done:
        trainer.step()
        schedule.step()
        if trainer.evaluation_due:
            keep(trainer.evaluate())


def thinned(history: Sequence[RankRow], every: int) -> list[RankRow]:
    """The first row, the last, and one for each multiple of `every` steps: a cut adds a row every few steps."""
    kept = {row.step: row for row in history[:-1] if row.step % every == 0}
    return [history[0], *(row for step, row in kept.items() if step), history[-1]]


def rate_share(made: int, steps: int) -> float:
    """Share of the full rate after `made` of `steps` steps: up over the first twentieth, down over the second half."""
    return min(1.0, (made + 1) / (_WARM_SHARE * steps), 2 * (1 - made / steps))


def _encoder(study: RankStudy, name: str, seed: int) -> PairEncoder:
    config = dataclasses.replace(study.encoder, kind="dense" if name == "dense" else "tt")
    return PairEncoder(config, generator=torch.Generator().manual_seed(seed))


def _fixed_config(study: RankStudy, name: str, seed: int) -> TrainConfig:
    return TrainConfig(
        steps=study.steps,
        batch_size=study.batch_size,
        learning_rate=study.dense_rate if name == "dense" else study.rate,
        seed=seed,
        evaluate_every=study.evaluate_every,
    )


def _config(study: RankStudy, name: str, target: float | None, seed: int) -> TrainConfig | RankConfig:
    if name in ("dense", "fixed"):
        return _fixed_config(study, name, seed)
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
        rank_rows_every=max(1, study.steps // 40),
    )


def _about(
    study: RankStudy, pairs: PairData, data: Dataset, name: str, encoder: EncoderConfig, config: object
) -> dict[str, Any]:
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return {
        "variant": name,
        "encoder": dataclasses.asdict(encoder),
        "data": data.name,
        "data_digest": pairs.digest,
        "tokens": study.tokens,
        "dev_pairs": study.dev_pairs,
        "schedule": "rises over the first twentieth, falls to 0 over the second half",
        **dataclasses.asdict(config),
    }


def _sizes(model: PairEncoder) -> dict[str, Any]:
    size = model_size(model)
    with torch.device("meta"):
        twin = model_size(PairEncoder(dataclasses.replace(model.config, kind="tt")))
    tensorised_bytes = size.core_bytes or 4 * twin.tensorised_dense
    return {
        "total_mib": mib(size.total_bytes),
        "tensorised_mib": mib(tensorised_bytes),
        "total_ratio": twin.dense_twin / size.total,
        "tensorised_ratio": 4 * twin.tensorised_dense / tensorised_bytes,
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
