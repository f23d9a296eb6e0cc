"""A course in files: a plan, one zip for students, one for each of them with a seed of their own, one for the teacher.

plan.md                      minutes, deadlines, seeds
<course>-students.zip        lessons, those solutions that are for everybody, the kit itself: needs no network
students/<name>.zip          the lessons again, with the seed of that student
<course>-teacher.zip         instructor edition, all solutions, the class board, the plan
otter/, nbgrader/            where `grading` asks for them
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera_lab.teaching.build import build_lesson, notebooks_folder
from comera_lab.teaching.course import Course, CourseError, Part
from comera_lab.teaching.course_cell import cell_text
from comera_lab.teaching.instructor import instructor_edition
from comera_lab.teaching.plan import plan_text

Files = Iterable[tuple[str, str | Path]]
_KIT = ("pyproject.toml", "README.md", "LICENSE", "binder/constraints.txt")
_FIXED_TIME = (2000, 1, 1, 0, 0, 0)  # the same course gives the same bytes

STUDENT_README = """\
{title}

1. Unpack this archive.
2. With Python 3.11 or newer and a network:  pip install -c kit/binder/constraints.txt "./kit[lab]"
   Without a network, where torch, jupyterlab, ipywidgets, anywidget, plotly and scikit-learn are installed:
   set PYTHONPATH to the folder kit. That is enough in any case.
3. jupyter lab lessons
4. For the class board, at the end of a lesson, in a new cell:
     from comera_lab.teaching.board import save_result; save_result()
   Hand in the file class_result.json. It holds exercises and runs, and no name.
"""


@dataclass(frozen=True)
class Built:
    """What `build_course` wrote."""

    folder: Path
    files: tuple[Path, ...]

    def __str__(self) -> str:
        each = [path for path in self.files if path.parent.name != "students"]
        lines = [f"{path.relative_to(self.folder).as_posix():<48}{_size(path):>10}" for path in each]
        if len(each) < len(self.files):
            lines.append(f"students/: {len(self.files) - len(each)} zips, one for each seed")
        return "\n".join([f"in {self.folder}:", *("  " + line for line in lines)])


def build_course(course: Course, out: Path, root: Path | None = None) -> Built:
    """Write the course into the new or empty folder `out`. CourseError if it is in use.

    `root` is the checkout; default: the one that `notebooks_folder` finds.
    """
    root = root or notebooks_folder().parent
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CourseError([f"the folder for a course must be new or empty, got {out}. Name another, or empty it."])
    out.mkdir(parents=True, exist_ok=True)
    plan = out / "plan.md"
    plan.write_text(plan_text(course), encoding="utf-8")
    students = out / f"{course.slug}-students.zip"
    _zip(students, [*_lessons(course, course.seed), *_open_solutions(course), *_pictures(course, root), *_kit(root),
                    ("README.txt", STUDENT_README.format(title=course.title))])  # fmt: skip
    teacher = out / f"{course.slug}-teacher.zip"
    _zip(teacher, [*_teachers_files(course), *_pictures(course, root), ("plan.md", plan_text(course))])
    files = [plan, students, teacher]
    for student in course.students:
        (out / "students").mkdir(exist_ok=True)
        files.append(out / "students" / f"{student}.zip")
        _zip(files[-1], [*_lessons(course, course.seed_of(student)), *_pictures(course, root)])
    if "otter" in course.grading:
        from comera_lab.teaching.export_otter import write_otter

        files += [write_otter(part.lesson, out / "otter", course.seed_of("grader")) for part in course.parts]
    if "nbgrader" in course.grading:
        from comera_lab.teaching.export_nbgrader import write_nbgrader

        files += write_nbgrader(course, out / "nbgrader")
    return Built(out, tuple(files))


def with_course_cell(notebook: dict[str, Any], course: Course, part: Part, seed: int) -> dict[str, Any]:
    """The notebook with the course's cell before its first code cell."""
    text = cell_text(course.title, seed, part.presets, part.locked)
    lines = text.split("\n")
    cell: dict[str, Any] = {
        "cell_type": "code", "execution_count": None, "id": f"course-{part.lesson.number}", "metadata": {},
        "outputs": [], "source": [line + "\n" for line in lines[:-1]] + lines[-1:],
    }  # fmt: skip
    first = next(index for index, other in enumerate(notebook["cells"]) if other["cell_type"] == "code")
    return {**notebook, "cells": [*notebook["cells"][:first], cell, *notebook["cells"][first:]]}


def _lessons(course: Course, seed: int) -> Iterator[tuple[str, str]]:
    for part in course.parts:
        student = build_lesson(part.lesson.source).student
        yield f"lessons/{part.lesson.stem}.ipynb", _text(with_course_cell(student, course, part, seed))


def _open_solutions(course: Course) -> Iterator[tuple[str, str]]:
    for part in course.parts:
        if part.solutions == "always":
            yield f"lessons/solutions/{part.lesson.stem}.ipynb", _text(build_lesson(part.lesson.source).solution)


def _teachers_files(course: Course) -> Iterator[tuple[str, str]]:
    for part in course.parts:
        yield f"lessons/instructor/{part.lesson.stem}.ipynb", _text(instructor_edition(part.lesson))
        yield f"lessons/solutions/{part.lesson.stem}.ipynb", _text(build_lesson(part.lesson.source).solution)
    from comera_lab.teaching.board import board_notebook

    yield "class_board.ipynb", _text(board_notebook(course.title))


def _pictures(course: Course, root: Path) -> Iterator[tuple[str, Path]]:
    """The pictures that the lessons of the course show."""
    for part in course.parts:
        for path in sorted((root / "notebooks" / "images").glob(f"{part.lesson.number}_panel.png")):
            yield f"lessons/images/{path.name}", path


def _kit(root: Path) -> Iterator[tuple[str, Path]]:
    """The package and its data, so that nothing of the kit has to be downloaded."""
    package = Path(__file__).resolve().parents[1]
    yield from ((f"kit/{name}", root / name) for name in _KIT if (root / name).is_file())
    # an installed package has its data inside, a checkout beside it
    folders = [package] if (package / "data").is_dir() else [package, package.parent / "data"]
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"kit/{path.relative_to(package.parent).as_posix()}", path


def _zip(path: Path, files: Files) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            data = content.read_bytes() if isinstance(content, Path) else content.encode()
            archive.writestr(zipfile.ZipInfo(name, _FIXED_TIME), data, zipfile.ZIP_DEFLATED)


def _text(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _size(path: Path) -> str:
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size
    return f"{size / 1024:,.0f} KiB"
