"""A lesson as an otter-grader assignment, from the same source as its notebooks.

The master notebook is written and `otter assign` makes of it what teachers hand out and what graders run:

    <lesson>/dist/student/<lesson>.ipynb        three dots, and the card under each exercise
    <lesson>/dist/autograder/<lesson>-autograder_*.zip

Each exercise is a question of one point with two tests: the announced one (seed 0, the terms of `check`) and a hidden
one on inputs drawn from `course_seed`, with a tolerance `LOOSER` times as wide. Both end after `seconds`; a cell that
never ends is ended after `CELL_SECONDS` while grading. A student needs no otter: a submission is the notebook.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comera_lab.runtime import require
from comera_lab.teaching.build import Cell, build_lesson, pieces, read_cells
from comera_lab.teaching.checks import SECONDS
from comera_lab.teaching.grading import LOOSER, answer_of
from comera_lab.teaching.lessons import Lesson

SEED_VARIABLE = "course_seed"
CELL_SECONDS = 60

_CONFIG = """\
# ASSIGNMENT CONFIG
name: "{name}"
init_cell: false
export_cell: false
check_all_cell: false
run_tests: false
solutions_pdf: false
template_pdf: false
python_version: "3.11"
requirements: ["comera_lab[lab]"]
tests: {{files: true}}
seed: {{variable: {variable}, autograder_value: {seed}, student_value: 0}}
"""
_SEED = f"{SEED_VARIABLE} = 0  # a grader sets another one"
_LIMIT = f"""\
from comera_lab.teaching.grading import limit_cells

if {SEED_VARIABLE}:
    limit_cells({CELL_SECONDS})"""
_TEST = """\
from comera_lab.teaching.grading import require_right
require_right("{id}", {answer}, seconds={seconds:g})"""
_HIDDEN = """\
# HIDDEN
from comera_lab.teaching.grading import require_right
require_right("{id}", {answer}, seed={variable}, looser={looser:g}, seconds={seconds:g})"""


def write_otter(lesson: Lesson, folder: Path, seed: int, seconds: float = SECONDS) -> Path:
    """Write the assignment of one lesson below `folder`; returns its folder. `seed` draws the hidden inputs."""
    require("otter", "assignments for otter")
    from otter.assign import main as assign

    target = folder / lesson.stem
    target.mkdir(parents=True)
    master = target / f"{lesson.stem}.ipynb"
    # format 4.4 has no cell ids; otter makes its own cells
    notebook = {
        **build_lesson(lesson.source).solution,
        "nbformat_minor": 4,
        "cells": list(_cells(lesson, seed, seconds)),
    }
    master.write_text(json.dumps(notebook, indent=1, ensure_ascii=False), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        assign(str(master), str(target / "dist"), no_pdfs=True, no_run_tests=True)
    return target


def _cells(lesson: Lesson, seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    yield _raw(_CONFIG.format(name=lesson.stem, variable=SEED_VARIABLE, seed=seed))
    yield _code(_SEED)
    yield _code(_LIMIT)
    for cell in read_cells(lesson.source):
        if "solution" in cell.tags:
            continue
        if cell.markdown:
            yield {"cell_type": "markdown", "metadata": {}, "source": "\n".join(cell.lines)}
        elif cell.exercise_id is None:
            yield _code("\n".join(cell.lines))
        else:
            yield from _question(lesson, cell, cell.exercise_id, seconds)


def _question(lesson: Lesson, cell: Cell, exercise_id: str, seconds: float) -> Iterator[dict[str, Any]]:
    lines: list[str] = []
    for piece in pieces(lesson.source, cell):
        lines += _marked(piece.filled, piece.stubbed) if piece.is_answer else piece.filled
    names = {"id": exercise_id, "answer": answer_of(lines, exercise_id), "seconds": seconds}
    yield _raw(f"# BEGIN QUESTION\nname: q{exercise_id.replace('.', '_')}\npoints: 1\ncheck_cell: false")
    yield _raw("# BEGIN SOLUTION")
    yield _code("\n".join(lines))
    yield _raw("# END SOLUTION")
    yield _raw("# BEGIN TESTS")
    yield _code(_TEST.format(**names))
    yield _code(_HIDDEN.format(**names, variable=SEED_VARIABLE, looser=LOOSER))
    yield _raw("# END TESTS")
    yield _raw("# END QUESTION")


def _marked(filled: tuple[str, ...], stubbed: tuple[str, ...]) -> list[str]:
    """A solution between otter's marks; the student reads the stub that the kit's own edition has."""
    indent = stubbed[0][: len(stubbed[0]) - len(stubbed[0].lstrip())]
    prompt = [f'{indent}""" # BEGIN PROMPT', *stubbed, f'{indent}"""; # END PROMPT']
    return [f"{indent}# BEGIN SOLUTION NO PROMPT", *filled, f"{indent}# END SOLUTION", *prompt]


def _raw(text: str) -> dict[str, Any]:
    return {"cell_type": "raw", "metadata": {}, "source": text.strip()}


def _code(text: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": text}
