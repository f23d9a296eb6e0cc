"""How long each lesson computes: measured on one core, kept as rows, shown as a page."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comera_lab.experiments.provenance import device_name
from comera_lab.experiments.recorder import Recorder, read_rows
from comera_lab.experiments.rows import BenchRow
from comera_lab.runtime import limit_threads, require
from comera_lab.teaching.build import build_lesson, notebooks_folder
from comera_lab.teaching.lessons import Lesson, lessons

ROWS = "results/lessons_cpu.jsonl"
PAGE = "TIMES.md"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_PEAK = """
import re
from pathlib import Path
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def measure(numbers: Sequence[str] = (), root: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Run the solution edition of every lesson once, and write its rows and the page; returns the page.

    With `numbers`, those lessons alone; their rows are added, and newer rows count. ValueError for an unknown one.

    For each lesson: seconds of processor time, seconds by the clock, and the kernel's peak of resident memory (MiB,
    Linux only). One thread, on one core where the system lets a process choose.
    """
    folder = notebooks_folder(root)
    rows = folder.parent / "data" / ROWS
    found = lessons(folder.parent)
    unknown = [number for number in numbers if number not in found]
    if unknown:
        raise ValueError(f"lessons must be of {', '.join(found)}, got {', '.join(unknown)}. Give their two digits.")
    target = rows if numbers else rows.with_suffix(".new")
    if not numbers:
        target.unlink(missing_ok=True)
    limit_threads(1)  # what the first row says of this process shall hold for the kernels too
    with Recorder(target, {"edition": "solution"}, command="comera-lab notebooks timing") as recorder:
        for lesson in [found[number] for number in numbers or found]:
            cpu, clock, peak = run_once(lesson)
            say(f"{lesson.number} {lesson.title}: {cpu:.1f} s of processor, {clock:.1f} s, peak {peak or 0:.0f} MiB")
            for op, value, unit in (("cpu", cpu, "s"), ("clock", clock, "s"), ("peak", peak, "MiB")):
                if value is not None:
                    recorder.add(BenchRow(op=f"lesson_{op}", provider=lesson.stem, mode="solution", value=value,
                                          unit=unit, repeats=1, device=device_name()))  # fmt: skip
    target.replace(rows)
    write_times(folder.parent)
    return folder / PAGE


def run_once(lesson: Lesson) -> tuple[float, float, float | None]:
    """(processor seconds, clock seconds, peak MiB or None) of one run in a fresh kernel with one thread."""
    nbformat, nbclient = require("nbformat", "times"), require("nbclient", "times")
    notebook = nbformat.from_dict(build_lesson(lesson.source).solution)
    for cell in notebook.cells:
        cell.source = "".join(cell.source)
    linux = Path("/proc/self/status").is_file()
    if linux:
        notebook.cells.append(nbformat.v4.new_code_cell(_PEAK))
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(notebooks_folder())}}
    )
    before, began = _children_seconds(), time.monotonic()
    _on_one_core(lambda: client.execute(env={**os.environ, **ONE_THREAD, "COMERA_LAB_FIGURES": ""}))
    clock = time.monotonic() - began
    peak = int(notebook.cells[-1].outputs[0].text) / 1024 if linux else None
    return _children_seconds() - before, clock, peak


def times_page(rows: list[dict[str, Any]], found: Mapping[str, Lesson]) -> str:
    """The page of run times, from recorded rows; lessons without a row say so."""
    run = rows[0]
    values = {(row["provider"], row["op"]): row["value"] for row in rows if row["kind"] == "bench"}
    lines = [
        "# How long the lessons compute",
        "",
        "A learner needs the minutes that a lesson names; the computer needs far less. Measured: the solution edition "
        f"of each lesson, from top to bottom, once, with one thread on one core of {run['device']}, "
        f"torch {run['torch']}, {run['date'][:10]}. Clock times include waiting where other work was going on; "
        "processor times do not.",
        "",
        "| lesson | learner | processor | clock | peak memory |",
        "|---|---:|---:|---:|---:|",
    ]
    totals = [0.0, 0.0]
    for lesson in found.values():
        cpu, clock, peak = (values.get((lesson.stem, f"lesson_{op}")) for op in ("cpu", "clock", "peak"))
        cells = [f"{lesson.minutes} min", _seconds(cpu), _seconds(clock), f"{peak:.0f} MiB" if peak else "not measured"]
        lines.append(f"| {lesson.number} {lesson.title} | {' | '.join(cells)} |")
        totals = [totals[0] + (cpu or 0.0), totals[1] + (clock or 0.0)]
    minutes = sum(lesson.minutes for lesson in found.values())
    lines.append(f"| all | {minutes} min | {_seconds(totals[0])} | {_seconds(totals[1])} | |")
    lines += ["", f"Rows: `data/{ROWS}`. `make notebooks-timing` measures again and writes this page.", ""]
    return "\n".join(lines)


def write_times(root: Path | None = None) -> list[Path]:
    """Write the page again from the rows, if there are any; returns it if it changed."""
    if not times_drift(root):
        return []
    folder = notebooks_folder(root)
    rows, page = folder.parent / "data" / ROWS, folder / PAGE
    if not rows.is_file():
        return []
    page.write_text(times_page(read_rows(rows), lessons(folder.parent)), encoding="utf-8")
    return [page]


def times_drift(root: Path | None = None) -> list[str]:
    """One sentence if the page is not what the rows and the lessons of today give."""
    folder = notebooks_folder(root)
    rows, page = folder.parent / "data" / ROWS, folder / PAGE
    if not rows.is_file():
        return [f"data/{ROWS} is missing. Run: make notebooks-timing"]
    text = times_page(read_rows(rows), lessons(folder.parent))
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return []
    return [f"{PAGE} differs from its rows. Run: comera-lab notebooks build"]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0f} s"


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _on_one_core(work: Callable[[], Any]) -> None:
    """Children inherit the one core; this process gets its own back."""
    if not hasattr(os, "sched_setaffinity"):
        work()
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        work()
    finally:
        os.sched_setaffinity(0, cores)
