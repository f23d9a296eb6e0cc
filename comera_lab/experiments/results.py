"""Recorded rows as lessons show them: found wherever the kit is installed, summed up over seeds, with their source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.models.mlp import MLP
from comera_lab.objectives import model_size

_ELEMENT_BYTES = 4  # fp32


def data_file(name: str) -> Path:
    """A file of `data/`, such as "results/bench_cpu.jsonl": inside an installed package, or beside it in a checkout.

    Raises FileNotFoundError that says where it looked.
    """
    package = Path(__file__).resolve().parents[1]
    places = [folder / "data" / name for folder in (package, package.parent)]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(f"{name} must be among the data files, but there is no {looked}. Install the kit again.")


@dataclass(frozen=True)
class Recorded:
    """One model of a study, an entry for each seed: accuracies in [0, 1] on the side that curves are drawn of.

    `parameters` are those of the whole model, `cores` those of its cores; of a dense model the weights that its twin
    tensorises. `test` accuracies were read once at the end, `steps_ms` are times of a training step of the model as
    it ended, `peaks_mib` its pools together; None where a study has none.
    """

    name: str
    parameters: int
    cores: int
    accuracies: tuple[float, ...]
    test: tuple[float | None, ...] = ()
    steps_ms: tuple[float, ...] = ()
    peaks_mib: tuple[float, ...] = ()

    @property
    def accuracy_percent(self) -> float:
        """Mean over the seeds."""
        return 100 * mean(self.accuracies)

    @property
    def span(self) -> str:
        """The seeds in words: how many, and between which accuracies they lie."""
        return _seed_words([100 * accuracy for accuracy in self.accuracies])

    def with_seed(self, other: Recorded) -> Recorded:
        """The same model with the seeds of `other` too; sizes that differ by a few parameters are averaged."""
        count = len(self.accuracies)
        parameters, cores = (
            round((count * mine + theirs) / (count + 1))
            for mine, theirs in ((self.parameters, other.parameters), (self.cores, other.cores))
        )
        return Recorded(
            self.name,
            parameters,
            cores,
            (*self.accuracies, *other.accuracies),
            (*self.test, *other.test),
            (*self.steps_ms, *other.steps_ms),
            (*self.peaks_mib, *other.peaks_mib),
        )


@dataclass(frozen=True)
class Study:
    """Models that were trained alike on `data`. `source` says where: device, threads, torch, dates and file.

    `note` says what its numbers cannot mean.
    """

    label: str
    data: str
    models: tuple[Recorded, ...]
    source: str
    note: str = ""

    @property
    def dense(self) -> Recorded:
        """The model that the others are compared with."""
        return next(model for model in self.models if model.name == "dense")

    def __str__(self) -> str:
        dense = self.dense
        lines = [f"{'':<9}{'parameters':>12}{'whole':>7}{'cores':>7}{'ms/step':>9}{'peak MiB':>10}  accuracy (%)"]
        for model in self.models:
            whole, cores = dense.parameters / model.parameters, dense.cores / max(model.cores, 1)
            cells = [f"{model.name:<9}{model.parameters:>12,}{whole:>6.1f}×{cores:>6.1f}×"]
            cells += [
                f"{mean(ms):>{w}.1f}" if ms else f"{'–':>{w}}" for ms, w in ((model.steps_ms, 9), (model.peaks_mib, 10))
            ]
            lines.append("".join(cells) + f"  {_accuracy_words(model, self.note)}")
        return "\n".join([*lines, *([f"note: {self.note}"] if self.note else []), self.label, self.source])


def _accuracy_words(model: Recorded, note: str) -> str:
    if note:
        return "not trained to the end"
    test = [100 * accuracy for accuracy in model.test if accuracy is not None]
    if not test:
        return f"{model.accuracy_percent:.1f} ({model.span})"
    return f"test {mean(test):.1f} ({_seed_words(test)})"


def _seed_words(percent: Sequence[float]) -> str:
    count = len(percent)
    return f"mean of {count} seeds, {min(percent):.1f} to {max(percent):.1f} %" if count > 1 else "one seed"


@cache
def recorded_digits() -> tuple[Study, ...]:
    """The MLP on the digits, dense and with fixed ranks."""
    with torch.device("meta"):
        rest = model_size(MLP(kind="tt")).dense
    name = "digits_mlp_cpu.jsonl"
    runs = split_runs(read_rows(data_file(f"results/{name}")))
    found: dict[str, Recorded] = {}
    for run in runs:
        row = run[-1]
        model = "dense" if row["rank"] is None else f"rank {row['rank']}"
        cores = row["parameters"] - rest
        _add(found, Recorded(model, row["parameters"], cores, (row["accuracy"],), steps_ms=(row["step_time_ms"],)))
    label, data = f"{runs[0][-1]['steps']:,} steps", runs[0][0]["config"]["data"]
    return (Study(label, data, tuple(found.values()), _source(name, runs)),)


@cache
def recorded_pairs() -> tuple[Study, ...]:
    """The encoder on WordNet pairs: dense, fixed ranks, learned ranks. One study for each setting, longest first."""
    name = "pairs_rank_cpu.jsonl"
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for run in split_runs(read_rows(data_file(f"results/{name}"))):
        if run[-1]["kind"] == "rank_result":  # a run that was broken off has none
            groups.setdefault(_setting(run[0]["config"], run[-1]["steps"]), []).append(run)
    studies = []
    for label, runs in groups.items():
        found: dict[str, Recorded] = {}
        for run in runs:
            _add(found, _pair_result(run[-1]))
        if "dense" in found:
            data, note = runs[0][0]["config"]["data"], runs[0][-1]["note"]
            studies.append((runs[0][-1]["steps"], Study(label, data, tuple(found.values()), _source(name, runs), note)))
    return tuple(study for _, study in sorted(studies, key=lambda one: -one[0]))


def _pair_result(row: dict[str, Any]) -> Recorded:
    return Recorded(
        row["model"] if row["target_ratio"] is None else f"{row['model']} {row['target_ratio']:g}",
        round(row["total_mib"] * 2**20 / _ELEMENT_BYTES),
        round(row["tensorised_mib"] * 2**20 / _ELEMENT_BYTES),
        (row["accuracy"],),
        (row["test_accuracy"],),
        (row["step_time_after_ms"],),
        (row["peak_after_mib"],),
    )


def _setting(config: dict[str, Any], steps: int) -> str:
    encoder = config["encoder"]
    return f"width {encoder['width']}, {steps:,} steps of {config['batch_size']} pairs"


def _add(found: dict[str, Recorded], one: Recorded) -> None:
    known = found.get(one.name)
    found[one.name] = one if known is None else known.with_seed(one)


def _source(name: str, runs: Iterable[list[dict[str, Any]]]) -> str:
    infos = [run[0] for run in runs]
    days = sorted({info["date"][:10] for info in infos})
    made = sorted({f"{info['device']}, {info['threads']} thread, torch {info['torch']}" for info in infos})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"recorded on {' and '.join(made)}, {when}: data/results/{name}"


def recorded_flights() -> str:
    """The recommendation study on flights as a table: means over its seeds, on the test split, with its source.

    Where no such study is among the data files, a sentence that says how to make one.
    """
    name = "dlrm_flights_cpu.jsonl"
    try:
        path = data_file(f"results/{name}")
    except FileNotFoundError:
        return f"No recorded rows: there is no {name}. comera_lab.experiments.studies_dlrm.dlrm_study(PATH) makes them."
    runs = [run for run in split_runs(read_rows(path)) if run[-1]["kind"] == "recommender"]
    groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run[-1]["model"], run[-1]["rank"]), []).append(run[-1])
    lines = [f"{'tables':<24}{'rank':>5}{'rate':>8}{'MiB':>8}{'smaller':>9}{'entropy':>9}  test AUC"]
    for (model, rank), rows in groups.items():
        first, aucs = rows[0], [row["auc"] for row in rows]
        spread = f"{len(aucs)} seeds, {min(aucs):.4f} to {max(aucs):.4f}" if len(aucs) > 1 else "one seed"
        lines.append(
            f"{model:<24}{rank or '–':>5}{first['learning_rate']:>8g}{first['table_mib']:>8.2f}"
            f"{first['tables_ratio']:>8.0f}×{mean(row['normalised_entropy'] for row in rows):>9.4f}"
            f"  {mean(aucs):.4f} ({spread})"
        )
    return "\n".join([*lines, _source(name, runs)])
