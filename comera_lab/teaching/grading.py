"""What a grader runs: the same checks that learners see, on other inputs and on looser terms."""

from __future__ import annotations

import ast
import signal
from collections.abc import Sequence
from typing import Any

from comera_lab.runtime import require
from comera_lab.teaching.checks import SECONDS, Terms, judge
from comera_lab.teaching.compare import RELATIVE_TOLERANCE
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.guard import TimeLimit

LOOSER = 1.2  # hidden inputs may be unlucky: nobody shall fail by rounding who passed the announced threshold


class NotPassed(AssertionError):
    """A graded answer is not right; the text is the verdict that a learner would read."""


def require_right(
    exercise_id: str, answer: Any = ..., *, seed: int = 0, looser: float = 1.0, seconds: float = SECONDS
) -> None:
    """Raise NotPassed unless `answer` is right, within `seconds`.

    Seed 0 and `looser=1` are the terms of `check`. Another seed draws other inputs; `looser` times the announced
    tolerance is the tolerance. ValueError for an unknown exercise.
    """
    if exercise_id not in EXERCISES:
        raise ValueError(f"exercise_id must be one of {', '.join(EXERCISES)}, got {exercise_id!r}.")
    terms = Terms(seed, RELATIVE_TOLERANCE * looser)
    verdict = judge(EXERCISES[exercise_id], answer, seconds, terms)
    if not verdict.passed:
        raise NotPassed(f"{exercise_id} ({verdict.stage}): {verdict.message}")


def limit_cells(seconds: float) -> None:
    """From the next cell on, end any cell of this kernel that runs longer than `seconds`.

    For graders that have no limit of their own for a cell, and would wait for a `while True` for ever. Needs a
    POSIX system; elsewhere the grader's own limit has to do.
    """
    if not hasattr(signal, "setitimer"):
        return

    def ring(number: int, frame: Any) -> None:
        raise TimeLimit(f"this cell ran longer than {seconds:g} seconds")

    def start(info: Any = None) -> None:
        signal.signal(signal.SIGALRM, ring)
        # again every second, for code that catches everything
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)

    def stop(result: Any = None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    events = require("IPython", "notebooks").get_ipython().events
    events.register("pre_run_cell", start)
    events.register("post_run_cell", stop)


def answer_of(lines: Sequence[str], exercise_id: str) -> str:
    """The expression that a cell hands to `check`: `truncate` in check("02.1", truncate)."""
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "check" and len(node.args) == 2:
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value == exercise_id:
                return ast.unparse(node.args[1])
    raise ValueError(f'the cell of exercise {exercise_id} must call check("{exercise_id}", answer), and does not.')
