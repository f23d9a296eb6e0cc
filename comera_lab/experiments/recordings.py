"""Recorded benchmarks for replay: which files there are, what each says about itself, and what is refused, and why.

Files are those of `comera-lab bench --suite gpu` (gpu_<device>_<date>.jsonl) and data/results/bench_cpu.jsonl. A number
without a device, a date and a commit is no evidence, so its rows are refused by name instead of shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.results import data_file
from comera_lab.experiments.roofline import Ceilings, Problem, works

COUNTED = ("bytes", "flops", "floor_ms")  # sizes that belong to one provider, not to the case
PROVENANCE = ("device", "date", "commit", "torch")


@dataclass(frozen=True)
class Lane:
    """One provider of a case: median milliseconds, quantiles where it was measured, its floor where one was counted."""

    provider: str
    time_ms: float
    p20: float | None = None
    p80: float | None = None
    repeats: int | None = None
    floor_ms: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One operation at one size, in one mode: its lanes, and sentences about their ratios as they were recorded."""

    op: str
    words: str
    lanes: tuple[Lane, ...]
    ratios: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """Cases of one run. `label` says whose numbers these are, `kind` is "recorded", "measured here" or "computed"."""

    name: str
    label: str
    kind: str
    cases: tuple[Case, ...]

    @property
    def operations(self) -> tuple[str, ...]:
        """Every operation, in the order of the rows."""
        return tuple(dict.fromkeys(case.op for case in self.cases))

    def of(self, operation: str) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.op == operation)


def find_recordings(folders: Sequence[Path] | None = None) -> tuple[list[Recording], list[str]]:
    """(recordings, refusals): runs on a GPU, the newest first, then the CPU's; and a sentence for whatever is refused.

    `folders` are searched in order, by default the kit's data/results and the working directory.
    """
    if folders is None:
        folders = (data_file("results/bench_cpu.jsonl").parent, Path.cwd())
    gpu = {path.name: path for folder in reversed(folders) for path in sorted(folder.glob("gpu_*.jsonl"))}
    cpu = [folders[0] / "bench_cpu.jsonl"]
    newest = sorted(gpu.values(), key=lambda path: path.stem.rpartition("_")[2], reverse=True)
    found: list[Recording] = []
    refused: list[str] = []
    for path in [*newest, *(path for path in cpu if path.is_file())]:
        try:
            runs = split_runs(read_rows(path))
        except ValueError as error:
            refused.append(f"{path.name} is refused: {error}")
            continue
        for run in reversed(runs):
            recording, reasons = _recording(path.name, run)
            refused += reasons
            found += [recording] if recording is not None else []
    return found, refused


def recording_of(name: str, info: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], kind: str) -> Recording:
    """A recording of these rows (dicts of `read_rows`); the caller vouches for them."""
    commit = info["commit"] or "unknown: installed, not a checkout"
    commit = f"{commit[:7]}{' with changes' if commit.endswith('-dirty') else ''}" if info["commit"] else commit
    label = f"{kind} on {info['device']}, {info['date'][:10]}, commit {commit}"
    return Recording(name, label, kind, _cases(list(rows)))


def computed_floors(ceilings: Ceilings, problems: Iterable[Problem]) -> Recording:
    """Floors of `problems` in the place of times: what no run on that device can be faster than."""
    cases = tuple(
        Case(
            "tt_linear",
            f"forward+backward, {problem.rows:,} rows, {problem.in_features} → {problem.out_features}, "
            f"rank {problem.rank}, {problem.dtype}",
            tuple(Lane(work.name, work.floor_ms(ceilings, problem.dtype)) for work in works(problem)),
        )
        for problem in problems
    )
    label = f"computed from the ceilings of {ceilings.device} ({ceilings.source}); nothing was run"
    return Recording(f"floors of {ceilings.device}", label, "computed", cases)


def _recording(name: str, run: Sequence[Mapping[str, Any]]) -> tuple[Recording | None, list[str]]:
    info, rows = run[0], [row for row in run[1:] if row["kind"] == "bench"]
    missing = [key for key in PROVENANCE if not info[key]]
    if name.startswith("gpu_"):
        missing += ["driver"] if not info["driver"] else []
        missing += ["a GPU as device"] if "(cpu)" in (info["device"] or "") else []
    if missing:
        operations = ", ".join(dict.fromkeys(row["op"] for row in rows)) or "none"
        when = info["date"] or "unknown date"
        return None, [
            f"{name}: {len(rows)} rows ({operations}) of the run of {when} are refused, they lack "
            f"{', '.join(missing)}. Record them again with comera-lab bench, from a checkout."
        ]
    foreign = [row for row in rows if row["device"] not in (None, info["device"])]
    reasons = [
        f"{name}: the row {row['op']}, {row['provider']}, {row['mode']} is refused, it says {row['device']} in a run "
        f"on {info['device']}."
        for row in foreign
    ]
    recording = recording_of(name, info, [row for row in rows if row not in foreign], "recorded")
    if not recording.cases:
        return None, [*reasons, f"{name}: the run of {info['date']} holds no timed row. It was broken off early."]
    return recording, reasons


def _cases(rows: Sequence[Mapping[str, Any]]) -> tuple[Case, ...]:
    lanes: dict[tuple[str, str], list[Lane]] = {}
    ratios: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        key = (row["op"], _words(row))
        if row["unit"] == "ms" and row["p20"] is not None:
            floor = row["sizes"].get("floor_ms")
            spread = row["p20"], row["p80"], row["repeats"]
            lanes.setdefault(key, []).append(Lane(row["provider"], row["value"], *spread, floor, row["note"]))
        elif row["unit"] in ("x faster", "x time"):
            ratios.setdefault(key, []).append(f"{row['provider']}: {row['value']:.3g} {row['unit']}")
    return tuple(
        Case(op, words, tuple(kept), tuple(ratios.get((op, words), ()))) for (op, words), kept in lanes.items()
    )


def _words(row: Mapping[str, Any]) -> str:
    """Mode and sizes: the same for all providers of a case."""
    sizes = [
        f"{name.replace('_features', '')} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in row["sizes"].items()
        if name not in COUNTED
    ]
    return ", ".join([row["mode"], *sizes, *([row["dtype"]] if row["dtype"] else [])])
