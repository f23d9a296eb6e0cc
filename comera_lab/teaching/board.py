"""The class board: each student exports a small file, the teacher lays them over each other. No network, no names.

In a lesson, once per notebook:      from comera_lab.teaching.board import save_result; save_result()
In the teacher's notebook:           from comera_lab.teaching.board import ClassBoard; ClassBoard.read("results")
"""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera_lab.teaching import checks
from comera_lab.teaching.exercises import EXERCISES

SCHEMA_VERSION = 1
KIND = "comera_lab class result"
FILE = "class_result.json"
WORDS = ("Right", "Not yet", "Not tried")
_MAX_BYTES = 1_000_000


def save_result(path: Path | str = FILE, who: str = "") -> str:
    """Add the exercises and runs of this notebook to `path`, and say what it holds now.

    `who` may stay empty: then the file gets a random sign of six characters, so that nobody needs to give a name.
    ValueError where `path` holds something else.
    """
    from comera_lab.panels.state import lab_state

    path = Path(path)
    fresh: dict[str, Any] = {"exercises": {}, "runs": [], "who": secrets.token_hex(3)}
    result = read_result(path) if path.is_file() else fresh
    result["who"] = who[:40] or result["who"]
    for verdict in checks._VERDICTS.values():
        result["exercises"][verdict.exercise_id] = {"word": verdict.word, "mistake": verdict.mistake}
    runs = [*result["runs"], *_points(lab_state().runs)]
    result["runs"] = [run for place, run in enumerate(runs) if run not in runs[:place]]
    whole = {"kind": KIND, "schema_version": SCHEMA_VERSION, **result}
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    right = sum(entry["word"] == "Right" for entry in result["exercises"].values())
    return f"{path}: {right} exercises right, {len(result['runs'])} runs, signed {result['who']}. Hand in this file."


def read_result(path: Path) -> dict[str, Any]:
    """One exported file. ValueError with rule, got and remedy where it is none of this version."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path.name} must be smaller than {_MAX_BYTES:,} bytes, got {path.stat().st_size:,}. "
                         "Export it again.")  # fmt: skip
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path.name} must be JSON, got something else. Export it again with save_result().") from None
    version = given.get("schema_version") if isinstance(given, dict) and given.get("kind") == KIND else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path.name} must be a class result of version {SCHEMA_VERSION}, got {version}. "
                         "Export it again with save_result().")  # fmt: skip
    exercises = {
        key: {"word": entry["word"], "mistake": _short(entry.get("mistake"))}
        for key, entry in _dict(given.get("exercises")).items()
        if key in EXERCISES and isinstance(entry, dict) and entry.get("word") in WORDS
    }
    runs = [_plain(run) for run in given.get("runs", ()) if isinstance(run, dict)]
    return {"exercises": exercises, "runs": runs, "who": _short(given.get("who")) or "unsigned"}


@dataclass(frozen=True)
class ClassBoard:
    """All results of a class. `refused` has a line for each file that could not be used."""

    results: tuple[dict[str, Any], ...]
    refused: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path | str) -> ClassBoard:
        """Every .json file below `folder`. FileNotFoundError without the folder."""
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"the folder of results must exist, got {folder}. Collect the files of the class "
                                    "there.")  # fmt: skip
        results, refused = [], []
        for path in sorted(folder.rglob("*.json")):
            try:
                results.append(read_result(path))
            except (ValueError, OSError) as error:
                refused.append(str(error))
        return cls(tuple(results), tuple(refused))

    def table(self) -> str:
        """Exercise by exercise: how many have it right, and the commonest mistake."""
        lines = [f"{len(self.results)} results" + (f", {len(self.refused)} refused" if self.refused else "")]
        for key, counts in self.counts().items():
            line = f"  {key}  {counts['Right']:>3} right {counts['Not yet']:>3} not yet   {EXERCISES[key].title}"
            common = Counter(entry["mistake"] for result in self.results
                             if (entry := result["exercises"].get(key)) and entry["mistake"])  # fmt: skip
            lines.append(line + (f"; often: {common.most_common(1)[0][0]}" if common else ""))
        return "\n".join([*lines, *(f"  refused: {line}" for line in self.refused)])

    __str__ = table
    __repr__ = table

    def counts(self) -> dict[str, dict[str, int]]:
        """Exercise -> how many are right, not yet right, not tried; only exercises that somebody tried."""
        tried = {key for result in self.results for key in result["exercises"]}
        found = {}
        for key in (key for key in EXERCISES if key in tried):
            words = Counter(result["exercises"].get(key, {"word": "Not tried"})["word"] for result in self.results)
            found[key] = {word: words[word] for word in WORDS}
        return found

    def points(self, x: str, y: str) -> dict[str, list[tuple[float, float, str]]]:
        """Name of a run -> (x, y, who) of every run of the class that has both numbers."""
        found: dict[str, list[tuple[float, float, str]]] = {}
        for result in self.results:
            for run in result["runs"]:
                if isinstance(run.get(x), int | float) and isinstance(run.get(y), int | float):
                    found.setdefault(_name(run), []).append((run[x], run[y], result["who"]))
        return found

    def bars(self) -> Any:
        """A go.Figure: each exercise as a bar of the class."""
        from comera_lab.panels.board import class_bars

        return class_bars(self.counts())

    def dots(self, x: str = "parameters", y: str = "accuracy_percent") -> Any:
        """A go.Figure: each run of the class as a dot, one colour and marker for each kind of run."""
        from comera_lab.panels.board import class_dots

        return class_dots(self.points(x, y), x, y)


def board_notebook(title: str) -> dict[str, Any]:
    """The teacher's notebook, for the zip of a course."""
    cells = [
        f"# Class board: {title}\n\nPut the `{FILE}` of every student into a folder `results` beside this notebook "
        "(any file names), then run all cells. Nothing leaves this machine.",
        'import comera_lab.panels\nfrom comera_lab.teaching.board import ClassBoard\n\n'
        'board = ClassBoard.read("results")\nboard',
        "board.bars()",
        'board.dots("parameters", "accuracy_percent")',
    ]  # fmt: skip
    made: list[dict[str, Any]] = [
        {"cell_type": "markdown", "id": "board-0", "metadata": {}, "source": cells[0]},
        *({"cell_type": "code", "execution_count": None, "id": f"board-{place}", "metadata": {}, "outputs": [],
           "source": text} for place, text in enumerate(cells[1:], start=1)),
    ]  # fmt: skip
    spec = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}


def _points(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers of all runs as flat dicts; a run of several lanes gives one for each."""
    found = []
    for panel, summary in runs.items():
        lanes = [
            value for value in summary.values() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        for run in [lane for value in lanes for lane in value] or [summary]:
            plain = _plain(run)
            if any(isinstance(value, int | float) for value in plain.values()):
                found.append({"panel": panel, **plain})
    return found


def _plain(run: Mapping[str, Any]) -> dict[str, Any]:
    """The finite numbers and short words of a run: what may be exported, and all that is read back."""
    return {
        str(key)[:40]: value[:40] if isinstance(value, str) else value
        for key, value in run.items()
        if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    }


def _name(run: Mapping[str, Any]) -> str:
    return str(run.get("lane") or run.get("optimizer") or run.get("model") or run.get("panel") or "run")


def _short(value: Any) -> str | None:
    return value[:60] if isinstance(value, str) and value else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
