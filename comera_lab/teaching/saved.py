"""Checked answers, kept in the file of saved work: a right one stays right, and comes back after a lost kernel."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from comera_lab.runtime import progress
from comera_lab.teaching.compare import is_number, kind_of
from comera_lab.teaching.exercise import Exercise
from comera_lab.teaching.exercises import EXERCISES

if TYPE_CHECKING:
    from comera_lab.panels.saved import SavedWork

LONGEST = 4000  # characters of an answer that are kept


def keep(exercise: Exercise, passed: bool, stage: str, answer: Any) -> str:
    """Save a verdict with the answer it is about; "" or one line on why not. Never raises.

    Empty answers are not saved, and a right one is not replaced by a wrong one: running an old notebook again loses
    nothing.
    """
    if stage == "stub":
        return ""
    old = progress.saved(progress.VERDICTS).get(exercise.id)
    if isinstance(old, dict) and old.get("passed") and not passed:
        return ""
    entry = {
        "title": exercise.title,
        "passed": passed,
        "stage": stage,
        "answer": _as_text(answer)[:LONGEST],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return progress.remember(progress.VERDICTS, {exercise.id: entry})


def kept_words() -> dict[str, str]:
    """The saved verdicts in words, by exercise."""
    return {
        key: "Right" if kept.get("passed") else "Not yet"
        for key, kept in progress.saved(progress.VERDICTS).items()
        if isinstance(kept, dict)
    }


def saved_work() -> SavedWork:
    """A card on what is saved, with a download button; for a notebook."""
    from comera_lab.panels.saved import SavedWork

    return SavedWork(_lessons)


def _lessons() -> list[str]:
    words = kept_words()
    lines = []
    for lesson in sorted({exercise.lesson for exercise in EXERCISES.values()}):
        ids = [exercise.id for exercise in EXERCISES.values() if exercise.lesson == lesson]
        if any(key in words for key in ids):
            lines.append(f"Lesson {lesson}: {sum(words.get(key) == 'Right' for key in ids)} of {len(ids)} right")
    return lines


def _as_text(answer: Any) -> str:
    """Source of a function, digits of a number; for anything else its kind, for its own text may do anything."""
    found = answer if inspect.isfunction(answer) else inspect.getattr_static(answer, "fn", None)
    if inspect.isfunction(found):
        try:
            return inspect.getsource(found)
        except (OSError, TypeError):
            return "a function whose text is gone"
    if type(answer) in (int, float, str, bool):
        return repr(answer)
    return repr(float(answer)) if is_number(answer) else kind_of(answer)
