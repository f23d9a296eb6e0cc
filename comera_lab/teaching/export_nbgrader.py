"""Lessons as nbgrader assignments, from the same source as their notebooks.

A course folder is written as nbgrader wants it, and its release versions are generated:

    nbgrader_config.py, gradebook.db         with the students and the deadlines of the course
    source/<lesson>/<lesson>.ipynb           answers between nbgrader's marks
    release/<lesson>/<lesson>.ipynb          what students get: three dots

Each exercise is a solution cell and a locked test cell of one point: first the announced test, then a hidden one on
inputs drawn from a seed and with a tolerance `LOOSER` times as wide. Both end after `seconds`, and nbgrader ends a cell
that never ends after `CELL_SECONDS`.
"""

from __future__ import annotations

import json
import logging
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comera_lab.runtime import require
from comera_lab.teaching.build import Cell, build_lesson, pieces, read_cells
from comera_lab.teaching.checks import SECONDS
from comera_lab.teaching.course import Course
from comera_lab.teaching.grading import LOOSER, answer_of
from comera_lab.teaching.lessons import Lesson

CELL_SECONDS = 60

_CONFIG = """\
# Settings of `nbgrader` for this folder; paths are relative to it.
c = get_config()
c.CourseDirectory.course_id = {course!r}
c.ClearSolutions.code_stub = {{"python": "..."}}
c.ClearSolutions.text_stub = "..."
c.Execute.timeout = {seconds}
c.Execute.interrupt_on_timeout = True
"""
_TESTS = """\
from comera_lab.teaching.grading import require_right

require_right("{id}", {answer}, seconds={seconds:g})
### BEGIN HIDDEN TESTS
require_right("{id}", {answer}, seed={seed}, looser={looser:g}, seconds={seconds:g})
### END HIDDEN TESTS"""


def write_nbgrader(course: Course, folder: Path, seconds: float = SECONDS) -> list[Path]:
    """Write the course folder; returns it and its release notebooks."""
    require("nbgrader", "assignments for nbgrader")
    folder.mkdir(parents=True)
    config = folder / "nbgrader_config.py"
    config.write_text(_CONFIG.format(course=course.slug, seconds=CELL_SECONDS), encoding="utf-8")
    lessons = [part.lesson for part in course.parts]
    for lesson in lessons:
        target = folder / "source" / lesson.stem
        target.mkdir(parents=True)
        cells = list(_cells(lesson, course.seed_of("grader"), seconds))
        notebook = {**build_lesson(lesson.source).solution, "cells": cells}
        (target / f"{lesson.stem}.ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False), "utf-8")
    api = open_course(folder)
    with api.gradebook as gradebook:
        for part in course.parts:
            gradebook.update_or_create_assignment(part.lesson.stem, duedate=part.deadline)
        for student in course.students:
            gradebook.update_or_create_student(student)
    return [folder, *(_release(api, folder, lesson) for lesson in lessons)]


def open_course(folder: Path) -> Any:
    """nbgrader's own API on a course folder, with the settings that lie in it."""
    require("nbgrader", "assignments for nbgrader")
    from nbgrader.apps import NbGraderAPI
    from nbgrader.coursedir import CourseDirectory
    from traitlets.config.loader import PyFileConfigLoader

    # nbgrader calls `alembic` by name, which is not found where an environment is used without being activated
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), scripts])
    config = PyFileConfigLoader("nbgrader_config.py", path=str(folder)).load_config()
    config.CourseDirectory.root = str(folder.resolve())
    api = NbGraderAPI(CourseDirectory(config=config), config=config)
    api.log_level = logging.ERROR
    return api


def _release(api: Any, folder: Path, lesson: Lesson) -> Path:
    with warnings.catch_warnings():
        # of nbconvert, about files nbgrader itself writes
        warnings.simplefilter("ignore")
        result = api.generate_assignment(lesson.stem)
    if not result["success"]:
        raise ValueError(f"nbgrader must accept lesson {lesson.number}, and did not: {result.get('error', result)}")
    return folder / "release" / lesson.stem / f"{lesson.stem}.ipynb"


def _cells(lesson: Lesson, seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    solution = [cell for cell in build_lesson(lesson.source).solution["cells"] if not cell["id"].endswith("-picture")]
    for cell, made in zip(read_cells(lesson.source), solution, strict=True):
        if "solution" in cell.tags:
            continue
        if cell.exercise_id is None:
            yield made
        else:
            yield from _graded(lesson, cell, made, cell.exercise_id, seed, seconds)


def _graded(
    lesson: Lesson, cell: Cell, made: dict[str, Any], exercise_id: str, seed: int, seconds: float
) -> Iterator[dict[str, Any]]:
    lines: list[str] = []
    for piece in pieces(lesson.source, cell):
        lines += _marked(piece.filled, piece.stubbed) if piece.is_answer else piece.filled
    name = exercise_id.replace(".", "_")
    answer = answer_of(lines, exercise_id)
    test = _TESTS.format(id=exercise_id, answer=answer, seed=seed, looser=LOOSER, seconds=seconds)
    yield {**made, "source": "\n".join(lines), "metadata": _metadata(f"answer_{name}", solution=True)}
    yield {**made, "id": f"{made['id']}-test", "source": test, "metadata": _metadata(f"test_{name}", solution=False)}


def _marked(filled: tuple[str, ...], stubbed: tuple[str, ...]) -> list[str]:
    """A solution between nbgrader's marks, in whose place students read three dots.

    A name that the solution assigns gets its dots before the marks: without them the next line would not find it.
    """
    indent = stubbed[0][: len(stubbed[0]) - len(stubbed[0].lstrip())]
    before = [] if stubbed[0].strip().startswith("return") else list(stubbed)
    return [*before, f"{indent}### BEGIN SOLUTION", *filled, f"{indent}### END SOLUTION"]


def _metadata(grade_id: str, *, solution: bool) -> dict[str, Any]:
    """nbgrader's metadata, schema 3: an answer to fill in, or a locked cell worth one point."""
    data = {"grade_id": grade_id, "schema_version": 3, "solution": solution, "grade": not solution,
            "locked": not solution, "task": False}  # fmt: skip
    return {"nbgrader": data if solution else {**data, "points": 1}}
