"""The recommendation study: dense tables, hashing to the same bytes, TT-matrices of fixed and of learned ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from comera_lab.experiments.flights import FIELDS, PLAIN_FIELDS, load_flights
from comera_lab.experiments.metrics import auc, calibration, logits_of, scores
from comera_lab.experiments.rank_costs import step_costs
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recommendation import RecommendationData
from comera_lab.experiments.recorder import BenchRow, RecommenderRow, Recorder
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.memory import mib
from comera_lab.models.dlrm import DLRM, DLRMConfig, Kind
from comera_lab.objectives import model_size
from comera_lab.runtime import tune_cpu_allocator

_COMMAND = 'python -c "from comera_lab.experiments.studies_dlrm import {0}; {0}(PATH)"'
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Variant:
    """One line of the study. `learned` starts at `rank` with an early stage, with `target_ratio` also a late one."""

    name: str
    kind: Kind
    rank: int | None = None
    fields: tuple[str, ...] = FIELDS
    shuffled: bool = False
    learned: bool = False
    target_ratio: float | None = None


VARIANTS = (
    Variant("no crossed tables", "dense", fields=PLAIN_FIELDS),
    Variant("date instead of crosses", "dense", fields=(*PLAIN_FIELDS, "date")),
    Variant("dense", "dense"),
    Variant("hash", "hash", 16),
    *(Variant("tt", "tt", rank) for rank in (4, 8, 16, 32)),
    Variant("tt, ids shuffled", "tt", 16, shuffled=True),
    Variant("early", "tt", 32, learned=True),
    Variant("late", "tt", 32, learned=True, target_ratio=0.5),
)


@dataclass(frozen=True, kw_only=True)
class DLRMStudy:
    """What all variants share. Rates and the number of epochs (1 or 2) are chosen for each variant by AUC on dev,
    with seed 0; learned ranks always take both epochs, with `target_ratio` the second one for the late stage.

    The gammas price the dense size of the large tables in nats, of which the cores are 4 % at the start: `gamma`
    before a late stage, `gamma_alone` without one. At 3 an early stage alone leaves 0.86 of the cores (seed 0).
    """

    dim: int = 64
    batch_size: int = 2048
    threshold: int = 3000
    epochs: int = 2
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    gamma: float = 3.0
    gamma_alone: float = 10.0
    gate_rate: float = 1e-2

    def model(self, data: RecommendationData, variant: Variant, seed: int) -> DLRM:
        config = DLRMConfig(
            table_rows=data.table_rows, numbers=len(data.numbers), dim=self.dim, kind=variant.kind,
            rank=variant.rank or 16, threshold=self.threshold,
        )  # fmt: skip
        return DLRM(config, generator=torch.Generator().manual_seed(seed))


def dlrm_study(
    out_path: str | Path,
    *,
    study: DLRMStudy | None = None,
    variants: Iterable[Variant] = VARIANTS,
    seeds: Iterable[int] = (0, 1, 2),
    rows: int | None = None,
) -> list[RecommenderRow]:
    """Choose a rate for every variant on dev, train it with each seed, append a run and a result row to `out_path`.

    One thread. `rows` keeps the first so many of train, for a try. The test split is looked at once for each result.
    """
    study = DLRMStudy() if study is None else study
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = []
        for variant in variants:
            data = _data(variant)
            grid = {rate: _run(study, data, variant, rate, study.epochs, 0, rows).dev_aucs for rate in study.rates}
            rate, epochs = max(((r, e) for r in grid for e in grid[r]), key=lambda pair: grid[pair[0]][pair[1]])
            for seed in seeds:
                results.append(_recorded(out_path, study, data, variant, rate, epochs, seed, rows, grid))
        return results
    finally:
        torch.set_num_threads(threads)


def dlrm_costs(
    out_path: str | Path,
    *,
    study: DLRMStudy | None = None,
    batches: Iterable[int] = (1000, 10_000, 20_000, 40_000),
    timed_steps: int = 15,
) -> None:
    """Append what a step costs at each batch size, models taken in turn: milliseconds, and MiB at the peak by pool.

    AdamW, its state included; ranks as at the start; one thread, freed memory kept for the next tensor. Run it on a
    quiet machine.
    """
    tune_cpu_allocator()
    study = DLRMStudy() if study is None else study
    data = load_flights()
    chosen = [Variant("dense", "dense"), Variant("hash", "hash", 16), *(Variant("tt", "tt", r) for r in (4, 8, 16, 32))]
    names = [one.name if one.rank is None else f"{one.name} {one.rank}" for one in chosen]
    about = {"study": dataclasses.asdict(study), "data": data.name}
    with Recorder(out_path, about, seed=0, command=_COMMAND.format("dlrm_costs")) as recorder:
        for batch in batches:
            models = [study.model(data, variant, 0) for variant in chosen]
            costs = step_costs(models, data.dataset(), batch, timed_steps)
            for name, cost in zip(names, costs, strict=True):
                pools = {**cost.pools_mib, "all pools": cost.peak_mib}
                recorder.add(_cost_row(name, "training step", cost.step_time_ms, "ms", batch))
                for pool, size in pools.items():
                    recorder.add(_cost_row(name, f"peak of {pool}", size, "MiB", batch))


def _cost_row(provider: str, mode: str, value: float, unit: str, batch: int) -> BenchRow:
    return BenchRow(
        op="dlrm_step", provider=provider, mode=mode, value=value, unit=unit, sizes={"batch": batch}, dtype="float32"
    )


def _data(variant: Variant) -> RecommendationData:
    data = load_flights(fields=variant.fields)
    return data.with_shuffled_ids() if variant.shuffled else data


@dataclass
class _Run:
    model: DLRM
    steps: int
    elapsed_s: float
    # after so many epochs
    dev_aucs: dict[int, float]


def _run(
    study: DLRMStudy, data: RecommendationData, variant: Variant, rate: float, epochs: int, seed: int, rows: int | None
) -> _Run:
    model = study.model(data, variant, seed)
    dataset = data.dataset(rows=rows)
    steps_of_one = -(-len(dataset.train_y) // study.batch_size)
    trainer: Trainer | RankTrainer
    if variant.learned:
        late = 0 if variant.target_ratio is None else steps_of_one * epochs // 2
        gamma = study.gamma if late else study.gamma_alone
        trainer = RankTrainer(
            model,
            dataset,
            RankConfig(
                early_steps=steps_of_one * epochs - late, late_steps=late, gamma=gamma, rate=rate,
                gate_rate=study.gate_rate, batch_size=study.batch_size, seed=seed, target_ratio=variant.target_ratio,
                evaluate_every=0,
            ),
        )  # fmt: skip
    else:
        config = TrainConfig(
            steps=steps_of_one * epochs, batch_size=study.batch_size, learning_rate=rate, seed=seed, evaluate_every=0
        )
        trainer = Trainer(model, dataset, config)
    aucs = {}
    while not trainer.done:
        trainer.step()
        if trainer.steps_done % steps_of_one == 0 and not variant.learned:
            aucs[trainer.steps_done // steps_of_one] = _dev_auc(model, data)
    if isinstance(trainer, RankTrainer):
        trainer.finish()
        aucs[epochs] = _dev_auc(model, data)
    return _Run(model, trainer.steps_done, trainer.elapsed_s, aucs)


def _dev_auc(model: DLRM, data: RecommendationData) -> float:
    return auc(logits_of(model, data.splits["dev"]), data.splits["dev"].y)


def _recorded(
    out_path: str | Path,
    study: DLRMStudy,
    data: RecommendationData,
    variant: Variant,
    rate: float,
    epochs: int,
    seed: int,
    rows: int | None,
    grid: dict[float, dict[int, float]],
) -> RecommenderRow:
    dev_by_rate = [[r, e, value] for r, by_epoch in grid.items() for e, value in by_epoch.items()]
    about = {
        "study": dataclasses.asdict(study), "variant": dataclasses.asdict(variant), "data": data.name,
        "train_rows": rows, "dev_auc_by_rate_and_epochs": dev_by_rate, "seed": seed,
    }  # fmt: skip
    with Recorder(out_path, about, command=_COMMAND.format("dlrm_study")) as recorder:
        run = _run(study, data, variant, rate, epochs, seed, rows)
        result = _result(study, data, variant, rate, epochs, seed, run)
        recorder.add(result)
    return result


def _result(
    study: DLRMStudy, data: RecommendationData, variant: Variant, rate: float, epochs: int, seed: int, run: _Run
) -> RecommenderRow:
    test = data.splits["test"]
    logits = logits_of(run.model, test)
    found = scores(logits, test.y)
    total = model_size(run.model).total
    others = sum(p.numel() for name, p in run.model.named_parameters() if not name.startswith("tables."))
    dense_tables = sum(data.table_rows) * study.dim
    return RecommenderRow(
        model=variant.name,
        rank=variant.rank,
        target_ratio=variant.target_ratio,
        seed=seed,
        learning_rate=rate,
        epochs=epochs,
        steps=run.steps,
        dev_auc=run.dev_aucs[epochs],
        auc=found.auc,
        normalised_entropy=found.normalised_entropy,
        accuracy=found.accuracy,
        table_mib=mib(_ELEMENT_BYTES * (total - others)),
        total_mib=mib(_ELEMENT_BYTES * total),
        tables_ratio=dense_tables / (total - others),
        total_ratio=(dense_tables + others) / total,
        calibration=[list(one) for one in calibration(logits, test.y)],
        elapsed_s=run.elapsed_s,
    )


def summary(rows: Iterable[dict[str, object]]) -> Iterator[str]:
    """Lines of text, one per result row of a recorded study."""
    for row in rows:
        if row["kind"] == "recommender":
            yield (
                f"{row['model']!s:<24} rank {row['rank']!s:>4} seed {row['seed']} rate {row['learning_rate']:<6} "
                f"epochs {row['epochs']} AUC {row['auc']:.4f} NCE {row['normalised_entropy']:.4f} "
                f"tables {row['table_mib']:.2f} MiB {row['tables_ratio']:.0f}x, all {row['total_ratio']:.0f}x"
            )
