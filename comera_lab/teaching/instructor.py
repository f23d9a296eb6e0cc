"""The instructor edition of a lesson: the solution edition, with a note after each exercise."""

from __future__ import annotations

import copy
from typing import Any

from comera_lab.teaching.build import build_lesson
from comera_lab.teaching.exercise import Exercise
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.lessons import Lesson
from comera_lab.teaching.notes import NOTES

TEACHER_TAG = "teacher"


def instructor_edition(lesson: Lesson) -> dict[str, Any]:
    """The notebook, as an nbformat 4.5 dictionary."""
    notebook = copy.deepcopy(build_lesson(lesson.source).solution)
    cells = []
    for cell in notebook["cells"]:
        cells.append(cell)
        for exercise_id in _exercises_of(cell):
            cells.append(_text_cell(f"note-{exercise_id.replace('.', '-')}", exercise_note(EXERCISES[exercise_id])))
    cells.insert(1, _text_cell(f"note-{lesson.number}-plan", lesson_note(lesson)))
    notebook["cells"] = cells
    return notebook


def lesson_note(lesson: Lesson) -> str:
    """Minutes of a lesson, exercise by exercise, and its aims."""
    rows = [
        (f"{exercise_id} {EXERCISES[exercise_id].title}", minutes_of(exercise_id)) for exercise_id in lesson.exercises
    ]
    rest = lesson.minutes - sum(minutes for _, minutes in rows)
    table = [f"| {what} | {minutes} min |" for what, minutes in [*rows, ("panel, bet, text and recap", rest)]]
    aims = "\n".join(f"- {goal}" for goal in lesson.goals)
    return "\n".join([
        f"**For the teacher: {lesson.minutes} minutes**", "", aims, "", "| part | time |", "|---|---|", *table,
    ])  # fmt: skip


def minutes_of(exercise_id: str) -> int:
    """Minutes for one exercise; five where nobody has written a note yet."""
    return NOTES[exercise_id].minutes if exercise_id in NOTES else 5


def exercise_note(exercise: Exercise) -> str:
    """Aim, minutes, common wrong answers with what the checker says, and a sketch for the board."""
    note = NOTES.get(exercise.id)
    lines = [
        f"**For the teacher: {exercise.id} {exercise.title}, {minutes_of(exercise.id)} minutes**",
        "",
        f"*Aim.* {note.aim if note else exercise.right}",
        "",
        "*Common wrong answers, and what the card says:*",
        "",
        *(f"- {mistake.name}: {mistake.message}" for mistake in exercise.mistakes),
    ]
    return "\n".join([*lines, "", f"*On the board.* {note.board}"] if note else lines)


def _exercises_of(cell: dict[str, Any]) -> list[str]:
    tags = cell["metadata"].get("tags", [])
    return [tag.removeprefix("exercise:") for tag in tags if tag.startswith("exercise:")]


def _text_cell(cell_id: str, text: str) -> dict[str, Any]:
    lines = text.split("\n")
    source = [line + "\n" for line in lines[:-1]] + lines[-1:]
    return {"cell_type": "markdown", "id": cell_id, "metadata": {"tags": [TEACHER_TAG]}, "source": source}
