"""Verdicts on exercises. `check` never raises: whatever a learner hands in, Run All goes on.

check("03.1", tt_params)      a card: Right, or Not yet with the likely misconception and three hints
hint("03.1", 2)               the second hint alone
progress("03")                how the exercises of one lesson stand in this kernel
"""

import dis
import html
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from comera_lab.teaching.compare import RELATIVE_TOLERANCE, Difference, difference, kind_of
from comera_lab.teaching.exercise import Exercise, WrongAnswer
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.guard import TimeLimit, run_limited
from comera_lab.teaching.saved import keep, kept_words

SECONDS = 10.0  # answers take milliseconds; a first call on a busy Binder core may take a hundred times as long
_FAILED = object()
_VERDICTS: dict[str, "Verdict"] = {}
_told: list[str] = []


@dataclass(frozen=True)
class Verdict:
    """What the checker found. `stage`: right, stub, type, shape, value, cost, error, time or unknown."""

    exercise_id: str
    title: str
    passed: bool
    stage: str
    message: str
    mistake: str | None = None
    hints: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The verdict in words; colour only repeats it."""
        return "Right" if self.passed else "Not yet"

    def __str__(self) -> str:
        text = f"{self.exercise_id} {self.title}: {self.word}. {self.message}"
        if not self.passed and self.hints:
            text += f'\n  Stuck? hint("{self.exercise_id}", 1), then 2, then 3.'
        return text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sign, colour = ("✓", "#009E73") if self.passed else ("○", "#E69F00")
        head = f"<b>{sign} {self.word}</b> &nbsp; {html.escape(self.exercise_id)} {html.escape(self.title)}"
        hints = (
            ""
            if self.passed
            else "".join(
                f"<details><summary>Hint {level} of {len(self.hints)}</summary>"
                f"<div style='margin:4px 0 8px 18px'>{_rich(text)}</div></details>"
                for level, text in enumerate(self.hints, start=1)
            )
        )
        return card(f"{head}<div style='margin:4px 0'>{_rich(self.message)}</div>{hints}", colour)


def card(inner: str, colour: str) -> str:
    """A box that keeps the colours of the page, light or dark; only the bar at its left has its own."""
    return (
        f"<div role='status' style='border:1px solid rgba(128,128,128,.4);border-left:6px solid {colour};"
        f"padding:8px 14px;max-width:860px;font-size:15px;line-height:1.5'>{inner}</div>"
    )


def _rich(text: str) -> str:
    """Escaped text with `code` between backticks and line breaks kept."""
    parts = html.escape(text).split("`")
    marked = (f"<code>{part}</code>" if odd % 2 else part.replace("\n", "<br>") for odd, part in enumerate(parts))
    return "".join(marked)


def check(exercise_id: str, answer: Any = ..., *, seconds: float = SECONDS) -> Verdict:
    """The verdict on `answer`: shapes first, then values, then cost. Never raises.

    `seconds` bounds the time all calls of the learner's function may take together.
    """
    exercise = EXERCISES.get(exercise_id) if isinstance(exercise_id, str) else None
    if exercise is None:
        known = ", ".join(EXERCISES)
        return Verdict(str(exercise_id)[:20], "", False, "unknown", f"There is no such exercise. There are: {known}.")
    verdict = judge(exercise, answer, seconds)
    _VERDICTS[exercise.id] = verdict
    problem = keep(exercise, verdict.passed, verdict.stage, answer)
    if problem and problem not in _told:
        _told.append(problem)
        print(problem)
    return verdict


@dataclass(frozen=True)
class Terms:
    """On which inputs an answer is judged, and how exactly; the default is what learners are told."""

    seed: int = 0
    tolerance: float = RELATIVE_TOLERANCE


def judge(exercise: Exercise, answer: Any, seconds: float = SECONDS, terms: Terms = Terms()) -> Verdict:
    """The verdict on `answer` on these terms, kept nowhere. Never raises."""
    try:
        return run_limited(lambda: _judge(exercise, answer, terms), seconds)
    except TimeLimit:
        return _not_yet(exercise, "time", f"No answer after {seconds:g} seconds. Is there a loop that never ends?")
    except BaseException as error:  # the learner's code may raise anything, SystemExit included
        return _not_yet(exercise, "error", f"The check stopped at {_name(error)}.")


def _judge(exercise: Exercise, answer: Any, terms: Terms) -> Verdict:
    if answer is None or answer is Ellipsis or _is_stub(answer):
        return _not_yet(exercise, "stub", f"Still empty: replace the three dots. Wanted: {exercise.wants}.")
    if exercise.cases is None:
        return _judge_value(exercise, answer, terms)
    if not callable(answer):
        return _not_yet(
            exercise,
            "type",
            f"Got {kind_of(answer)}. Hand in the function itself, its name without brackets. Wanted: {exercise.wants}.",
        )
    return _judge_function(exercise, answer, terms)


def _judge_value(exercise: Exercise, answer: Any, terms: Terms) -> Verdict:
    if callable(answer):
        return _not_yet(exercise, "type", f"Got a function, wanted {exercise.wants}. Call it, with brackets.")
    try:
        seen = exercise.view(answer, ())
    except WrongAnswer as wrong:
        return _not_yet(exercise, wrong.stage, wrong.message)
    gap = difference(seen, exercise.view(exercise.reference, ()), terms.tolerance)
    if gap is None:
        return _right(exercise)
    for mistake in exercise.mistakes:
        if difference(seen, exercise.view(mistake.answer, ())) is None:
            return _not_yet(exercise, gap.stage, mistake.message, mistake.name)
    return _not_yet(exercise, gap.stage, gap.message)


def _judge_function(exercise: Exercise, answer: Callable[..., Any], terms: Terms) -> Verdict:
    """Compare `answer` with the reference, then with every known mistake, on the same inputs."""
    gap: Difference | None = None
    outputs: list[Any] = []
    for mine, right in zip(_cases(exercise, terms.seed), _cases(exercise, terms.seed), strict=True):
        where = f" (Called with {_describe(right)}.)"
        try:
            output = _seeded(exercise, answer, mine)
        except Exception as error:
            outputs.append(_FAILED)
            gap = gap or Difference("error", f"It raised {_name(error)}.{where}")
            continue
        outputs.append(output)
        gap = gap or _gap(exercise, output, right, where, terms.tolerance)
    if gap is None:
        expense = exercise.cost(answer, _cases(exercise, terms.seed)[0]) if exercise.cost else None
        if expense:
            dear = next((mistake.name for mistake in exercise.mistakes if mistake.message == expense), None)
            return _not_yet(exercise, "cost", expense, dear)
        return _right(exercise)
    for mistake in exercise.mistakes:
        if _behaves_like(exercise, mistake.answer, outputs, terms.seed):
            return _not_yet(exercise, gap.stage, mistake.message, mistake.name)
    return _not_yet(exercise, gap.stage, gap.message)


def _gap(exercise: Exercise, output: Any, args: tuple[Any, ...], where: str, tolerance: float) -> Difference | None:
    if output is None or output is Ellipsis:
        return Difference("stub", "It returns nothing yet: fill in the three dots and end with `return`.")
    try:
        seen = exercise.view(output, args)
    except WrongAnswer as wrong:
        return Difference(wrong.stage, wrong.message + where)
    found = difference(seen, exercise.view(exercise.call(exercise.reference, args), args), tolerance)
    return found and Difference(found.stage, found.message + where)


def _behaves_like(exercise: Exercise, mistake: Callable[..., Any], outputs: list[Any], seed: int) -> bool:
    """True if the known mistake gives the same outputs, failing where they failed, and not only failures."""
    alike = 0
    for args, output in zip(_cases(exercise, seed), outputs, strict=True):
        try:
            want = exercise.view(exercise.call(mistake, args), args)
        except Exception:
            if output is not _FAILED and not _view_fails(exercise, output, args):
                return False
            continue
        if output is _FAILED or _view_fails(exercise, output, args):
            return False
        if difference(exercise.view(output, args), want) is not None:
            return False
        alike += 1
    return alike > 0


def _view_fails(exercise: Exercise, output: Any, args: tuple[Any, ...]) -> bool:
    try:
        exercise.view(output, args)
    except Exception:
        return True
    return False


def _cases(exercise: Exercise, seed: int = 0) -> list[tuple[Any, ...]]:
    """Fresh inputs, the same at every call: an answer that changes its arguments changes only its own."""
    assert exercise.cases is not None
    generator = torch.Generator().manual_seed(zlib.crc32(exercise.id.encode()) + seed)
    return exercise.cases(generator)


def _seeded(exercise: Exercise, answer: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call with a fixed global seed, and leave torch's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return exercise.call(answer, args)


def _is_stub(answer: Any) -> bool:
    """True for a function whose body is three dots, or that still says `name = ...` or `return ...`."""
    if not inspect.isfunction(answer):
        # a kernel under @triton.jit keeps its function as .fn
        answer = inspect.getattr_static(answer, "fn", None)
        if not inspect.isfunction(answer):
            return False
    steps = [step for step in dis.get_instructions(answer) if step.opname not in ("RESUME", "NOP")]
    if len(steps) <= 2 and steps[0].argval is None:  # the whole body is `return None`
        return True
    return any(
        step.argval is Ellipsis
        and (step.opname == "RETURN_CONST" or following.opname.startswith(("STORE_FAST", "RETURN_VALUE")))
        for step, following in pairwise([*steps, steps[-1]])
    )


def _describe(args: tuple[Any, ...]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            return f"cores of shapes {[tuple(core.shape) for core in value]}"
        return repr(value) if len(repr(value)) < 60 else kind_of(value)

    return ", ".join(one(value) for value in args)


def _name(error: BaseException) -> str:
    try:
        text = str(error).strip().partition("\n")[0][:160]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _right(exercise: Exercise) -> Verdict:
    return Verdict(exercise.id, exercise.title, True, "right", exercise.right)


def _not_yet(exercise: Exercise, stage: str, message: str, mistake: str | None = None) -> Verdict:
    return Verdict(exercise.id, exercise.title, False, stage, message, mistake, exercise.hints)


@dataclass(frozen=True)
class Hint:
    """One hint, as text and as a card."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return card(_rich(self.text), "#0072B2")


def hint(exercise_id: str, level: int = 1) -> Hint:
    """Hint 1 (a nudge), 2 (the idea) or 3 (nearly the answer). Never raises."""
    exercise = EXERCISES.get(exercise_id) if isinstance(exercise_id, str) else None
    if exercise is None:
        return Hint(f"There is no exercise {str(exercise_id)[:20]!r}. There are: {', '.join(EXERCISES)}.")
    if level not in (1, 2, 3):
        return Hint("Hints go from 1 (a nudge) to 3 (nearly the answer).")
    return Hint(f"Hint {level} of 3 for {exercise.id}: {exercise.hints[level - 1]}")


@dataclass(frozen=True)
class Progress:
    """How the exercises of one lesson stand."""

    lesson: str
    rows: tuple[tuple[str, str, str], ...]

    @property
    def right(self) -> int:
        """How many exercises are right."""
        return sum(word == "Right" for _, _, word in self.rows)

    def __str__(self) -> str:
        lines = [f"Lesson {self.lesson}: {self.right} of {len(self.rows)} right"]
        return "\n".join(lines + [f"  {exercise_id}  {word:<10} {title}" for exercise_id, title, word in self.rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        signs = {"Right": "✓", "Not yet": "○", "Not tried": "·"}
        rows = "".join(
            f"<tr><td style='text-align:left'>{signs[word]} {word}</td><td style='text-align:left'>{exercise_id} "
            f"{html.escape(title)}</td></tr>"
            for exercise_id, title, word in self.rows
        )
        head = f"<b>Lesson {html.escape(self.lesson)}: {self.right} of {len(self.rows)} right</b>"
        return card(f"{head}<table style='margin:6px 0 0 0;font-size:14px'>{rows}</table>", "#0072B2")


def progress(lesson: str) -> Progress:
    """The verdicts on the exercises of `lesson` (two digits, such as "03"): of this kernel, else the saved ones."""
    saved = kept_words()
    rows = tuple(
        (
            exercise.id,
            exercise.title,
            _VERDICTS[exercise.id].word if exercise.id in _VERDICTS else saved.get(exercise.id, "Not tried"),
        )
        for exercise in EXERCISES.values()
        if exercise.lesson == lesson
    )
    return Progress(str(lesson), rows)
