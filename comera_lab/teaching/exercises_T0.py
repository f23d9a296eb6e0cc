"""Exercises of notebook T0, for teachers: sessions of a course, and what a class got wrong."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from comera_lab.teaching.exercise import Exercise, Mistake


def sessions_needed(minutes: list[int], session: int) -> int:
    """Meetings of `session` minutes for lessons of these minutes, in order; a lesson is not cut in two."""
    count, left = 0, 0
    for lesson in minutes:
        if lesson > left:
            count, left = count + 1, session
        left -= lesson
    return count


def commonest_mistake(answers: list[tuple[str, str | None]]) -> str:
    """The mistake that most answers share; an answer is ("Right", None) or ("Not yet", name of the mistake or None)."""
    return Counter(mistake for _, mistake in answers if mistake is not None).most_common(1)[0][0]


def _courses(generator: torch.Generator) -> list[tuple[Any, ...]]:
    picks = torch.randint(0, 3, (12,), generator=generator).tolist()
    drawn = [(15, 40, 60)[pick] for pick in picks]
    return [([60, 60, 60], 90), ([15, 40, 40, 60], 60), (drawn, 90), ([40, 40, 15], 95)]


def _classes(generator: torch.Generator) -> list[tuple[Any, ...]]:
    right: list[tuple[str, str | None]] = [("Right", None)] * 6
    named = [("Not yet", "upside down")] * 3 + [("Not yet", "bytes")] * 2 + [("Not yet", "percentage")] * 4
    unnamed: list[tuple[str, str | None]] = [("Not yet", None)] * 5
    classes = []
    for answers in ([*right, *named, *unnamed], [*named[:5], *unnamed], [*right, *named[3:5], *named[5:6]]):
        order = torch.randperm(len(answers), generator=generator).tolist()
        classes.append(([answers[place] for place in order],))
    return classes


def _always_last(answers: list[tuple[str, str | None]]) -> str:
    return next((mistake for _, mistake in reversed(answers) if mistake is not None), "")


EXERCISES = (
    Exercise(
        id="T0.1",
        title="How many meetings?",
        wants="a function sessions_needed(minutes, session) that returns a whole number; minutes is a list, in order",
        reference=sessions_needed,
        cases=_courses,
        right="That is how the plan counts: in order, and no lesson is cut in two.",
        hints=(
            "Three lessons of an hour do not fit into two meetings of ninety minutes.",
            "Keep the minutes that are left in this meeting. When is a new one needed?",
            "`if lesson > left: count, left = count + 1, session`, then `left -= lesson`",
        ),
        mistakes=(
            Mistake(
                name="lessons cut in two",
                answer=lambda minutes, session: math.ceil(sum(minutes) / session),
                message="This fills every meeting to the last minute: some lesson would be cut in two.",
            ),
            Mistake(
                name="one each",
                answer=lambda minutes, session: len(minutes),
                message="This gives each lesson a meeting of its own, also where two would fit.",
            ),
            Mistake(
                name="last one forgotten",
                answer=lambda minutes, session: sessions_needed(minutes, session) - 1,
                message="One too few: the meeting that is under way at the end counts as well.",
            ),
        ),
    ),
    Exercise(
        id="T0.2",
        title="What did the class get wrong?",
        wants='a function commonest_mistake(answers) that returns a name; an answer is ("Not yet", "upside down")',
        reference=commonest_mistake,
        cases=_classes,
        right="One sentence to start the next lesson with. The class board counts the same way.",
        hints=(
            "Right answers have no mistake, and some wrong ones have none that the checker knows: leave both out.",
            "`collections.Counter` counts names; `most_common(1)` gives the first with its count.",
            "`Counter(name for word, name in answers if name is not None).most_common(1)[0][0]`",
        ),
        mistakes=(
            Mistake(
                name="None counted",
                answer=lambda answers: Counter(str(name) for _, name in answers).most_common(1)[0][0],
                message="None is no mistake: leave out what has no name, right answers and unknown ones.",
            ),
            Mistake(
                name="with its count",
                answer=lambda answers: Counter(name for _, name in answers if name).most_common(1)[0],
                message="This is the name with its count. Hand back the name alone: one more [0].",
            ),
            Mistake(
                name="the last one",
                answer=_always_last,
                message="This is the last mistake that was made, not the commonest.",
            ),
        ),
    ),
)
