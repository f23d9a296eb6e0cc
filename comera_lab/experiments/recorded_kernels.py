"""The compiler's report on the shipped kernels, as it was recorded: read off machine code, nothing was run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from comera_lab.experiments.recorder import read_rows
from comera_lab.experiments.results import data_file

MOST_LINES = 16


def recorded_kernels(pattern: str = "", folder: Path | None = None) -> str:
    """A table of the recorded rows whose kernel matches `pattern`, at most MOST_LINES, with their source.

    Rows come from `comera-lab bench --suite kernels-static`, files `kernels*.jsonl` in data/results. A file without
    provenance raises, as `read_rows` does; where none is recorded the text says so.
    """
    folder = folder or data_file("results/bench_cpu.jsonl").parent
    lines = []
    for path in sorted(folder.glob("kernels*.jsonl")):
        rows = read_rows(path)
        found = [row for row in rows if row["kind"] == "kernel" and re.search(pattern, row["kernel"])]
        if not found:
            continue
        run = next(row for row in rows if row["kind"] == "run")
        lines += [_HEADER, *map(_line, found[:MOST_LINES])]
        if len(found) > MOST_LINES:
            lines.append(f"... and {len(found) - MOST_LINES} more")
        lines.append(
            f"Compiled without a GPU on {run['device']}, {run['date'][:10]}, triton {run['triton']} ({path.name})."
        )
    if not lines:
        return "No report is recorded yet. To make one: comera-lab bench --suite kernels-static"
    return "\n".join(lines)


def recorded_summary(folder: Path | None = None) -> str:
    """All recorded kernels in one line for each operation and chip: how many, and the most that any of them needs."""
    folder = folder or data_file("results/bench_cpu.jsonl").parent
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("kernels*.jsonl")):
        for row in read_rows(path):
            if row["kind"] == "kernel":
                found.setdefault((row["kernel"].partition(" ")[0], row["capability"]), []).append(row)
    lines = [
        f"{'operation':<17} {'chip':<6}{'kernels':>8}{'registers':>11}{'spilled':>9}{'shared KiB':>12}  products by"
    ]
    for (operation, capability), rows in sorted(found.items()):
        most = {key: max(row[key] for row in rows) for key in ("registers", "spill_bytes", "shared_bytes")}
        kinds = ", ".join(sorted({row["matrix_kind"] or "none" for row in rows}))
        lines.append(
            f"{operation:<17} sm_{capability:<3}{len(rows):>8}{most['registers']:>11}{most['spill_bytes']:>9}"
            f"{most['shared_bytes'] / 1024:>12.1f}  {kinds}"
        )
    return "\n".join(lines) if found else "No report is recorded yet."


_HEADER = f"{'kernel':<46} {'chip':<6}{'registers':>9}{'spilled':>8}{'shared KiB':>11}  matrix instructions"


def _line(row: dict[str, object]) -> str:
    matrix = f"{row['matrix_instructions']} {row['matrix_kind']}" if row["matrix_kind"] else "none"
    shared = float(str(row["shared_bytes"])) / 1024
    return (
        f"{row['kernel']:<46} sm_{row['capability']:<3}{row['registers']:>9}{row['spill_bytes']:>8}{shared:>11.1f}  "
        f"{matrix}"
    )
