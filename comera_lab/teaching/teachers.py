"""What notebook T0 asks of teachers before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comera_lab.teaching.exercises import EXERCISES

if TYPE_CHECKING:
    from comera_lab.panels.predict import Question

_GUESSES = (1, 2, 4, 8)


def _mistakes_known() -> tuple[int, str]:
    known = [len(exercise.mistakes) for exercise in EXERCISES.values()]
    mean = sum(known) / len(known)
    index = min(range(len(_GUESSES)), key=lambda choice: abs(_GUESSES[choice] - mean))
    return index, (
        f"{sum(known)} wrong answers by name in {len(known)} exercises, {mean:.1f} each (counted just now). All "
        "of them are in the instructor edition, with the sentence that the learner reads."
    )


def teachers_question() -> Question:
    """How many wrong answers does an exercise know by name?"""
    from comera_lab.panels.predict import Question

    return Question(
        text="A learner hands in something wrong. How many wrong answers does an exercise know by name, on average?",
        choices=tuple(f"about {number}" for number in _GUESSES),
        then="Now pick lessons in the panel above, press Build and open the instructor edition.",
        answer=_mistakes_known,
    )
