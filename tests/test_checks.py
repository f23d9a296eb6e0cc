"""The checker: the reference passes, every listed mistake gets its own words, and nothing a learner does escapes."""

import signal
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_lab.teaching import checks
from comera_lab.teaching.checks import check, hint, progress
from comera_lab.teaching.compare import difference, number_clue
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.guard import TimeLimit, run_limited

MISTAKES = [(exercise.id, mistake) for exercise in EXERCISES.values() for mistake in exercise.mistakes]


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_reference_answer_is_right(exercise_id: str) -> None:
    verdict = check(exercise_id, EXERCISES[exercise_id].reference)
    assert verdict.passed, verdict.message
    assert verdict.word == "Right"


@pytest.mark.parametrize(("exercise_id", "mistake"), MISTAKES, ids=[f"{i} {m.name}" for i, m in MISTAKES])
def test_each_known_mistake_is_named(exercise_id: str, mistake: Any) -> None:
    verdict = check(exercise_id, mistake.answer)
    assert not verdict.passed
    assert verdict.mistake == mistake.name
    assert verdict.message == mistake.message


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_each_exercise_has_words_for_everything(exercise_id: str) -> None:
    exercise = EXERCISES[exercise_id]
    assert len(exercise.hints) == 3 and all(exercise.hints)
    assert exercise.title and exercise.wants and exercise.right
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes) >= 3


@pytest.mark.parametrize("exercise_id", EXERCISES)
@pytest.mark.parametrize("stub", [None, ...])
def test_an_empty_answer_gets_a_calm_not_yet(exercise_id: str, stub: Any) -> None:
    verdict = check(exercise_id, stub)
    assert (verdict.passed, verdict.stage) == (False, "stub")
    assert "three dots" in verdict.message


def _with_text(*args: Any) -> Any:
    """A docstring and three dots compile to the same as a docstring alone."""


def _half_done(*args: Any) -> Any:
    core = args[0]
    rest = ...
    return core, rest


def _returns_dots(*args: Any) -> Any:
    return ...


@pytest.mark.parametrize("stub", [_with_text, _half_done, _returns_dots, lambda *args: None])
def test_a_function_with_its_dots_left_is_a_stub(stub: Any) -> None:
    verdict = check("03.1", stub)
    assert (verdict.passed, verdict.stage) == (False, "stub")


def test_dots_used_as_an_index_are_no_stub() -> None:
    def truncate(W: torch.Tensor, rank: int) -> torch.Tensor:
        U, S, Vh = torch.linalg.svd(W, full_matrices=False)
        return U[..., :rank] * S[..., :rank] @ Vh[:rank]

    assert check("02.1", truncate).passed


class _Hostile:
    """Raises wherever it is touched."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __call__(self, *args: Any) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]


def _raise(error: BaseException) -> Any:
    raise error


ODD_ANSWERS = [
    "text", 7, -1.5, float("nan"), float("inf"), True, [], {}, object(), int, print, b"", _Hostile(), _Hostile,
    torch.ones(2, 2), torch.ones(()), torch.zeros(0), torch.ones(2, dtype=torch.complex64),
    lambda: 1, lambda *a: "text", lambda *a: a, lambda *a: [], lambda *a: [torch.ones(2)], lambda *a: {1: 2},
    lambda *a: _raise(ValueError("boom")), lambda *a: _raise(SystemExit(3)), lambda *a: _raise(KeyboardInterrupt()),
    lambda *a: _raise(RecursionError()), lambda *a: _Hostile(), lambda *a: torch.ones(2, 3), lambda *a: float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_nothing_a_learner_hands_in_escapes(exercise_id: str) -> None:
    for answer in ODD_ANSWERS:
        verdict = check(exercise_id, answer)
        assert not verdict.passed
        assert verdict.message
        assert "Not yet" in str(verdict) and "Not yet" in verdict._repr_html_()


@pytest.mark.parametrize("exercise_id", ["99.1", "", None, 3, [], ...])
def test_an_unknown_exercise_gets_the_list(exercise_id: Any) -> None:
    verdict = check(exercise_id, 1)
    assert verdict.stage == "unknown"
    assert "03.1" in verdict.message


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
        max_leaves=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_drawn_answers_never_raise(answer: Any) -> None:
    for exercise_id in ("01.1", "02.2", "03.5", "04.3"):
        check(exercise_id, answer)
        check(exercise_id, lambda *args: answer)


def _loop(*args: Any) -> Any:
    while True:
        pass


def _loop_that_catches_everything(*args: Any) -> Any:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        try:
            while True:
                pass
        except BaseException:
            continue


@pytest.mark.parametrize("answer", [_loop, _loop_that_catches_everything])
def test_an_endless_loop_gets_a_verdict(answer: Any) -> None:
    began = time.monotonic()
    verdict = check("03.1", answer, seconds=0.3)
    assert time.monotonic() - began < 5
    assert not verdict.passed
    if answer is _loop:
        assert verdict.stage == "time"
        assert "0.3 seconds" in verdict.message


def test_an_endless_loop_ends_outside_the_main_thread_too() -> None:
    verdicts: list[checks.Verdict] = []
    before = threading.active_count()
    worker = threading.Thread(target=lambda: verdicts.append(check("03.1", _loop, seconds=0.3)))
    worker.start()
    worker.join(10)
    assert verdicts[0].stage == "time"
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_the_time_limit_leaves_no_timer_behind() -> None:
    with pytest.raises(TimeLimit):
        run_limited(_loop, 0.1)
    time.sleep(0.5)  # a timer left running would ring now
    assert run_limited(lambda: 3, 1.0) == 3


def test_an_answer_that_changes_its_inputs_spoils_only_its_own() -> None:
    def truncate(W: torch.Tensor, rank: int) -> torch.Tensor:
        right = EXERCISES["02.1"].reference(W, rank)
        W.zero_()
        return right

    assert check("02.1", truncate).passed


def test_a_check_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check("02.1", lambda W, rank: torch.rand_like(W))
    assert torch.equal(torch.rand(3), expected)


def test_the_same_answer_gets_the_same_verdict() -> None:
    def answer(W: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.rand_like(W)

    assert check("02.1", answer) == check("02.1", answer)


def test_shapes_come_before_values_and_values_before_cost() -> None:
    assert check("04.2", lambda x, A, B, bias: torch.zeros(3)).stage == "shape"
    assert check("04.2", lambda x, A, B, bias: torch.zeros(len(x), B.shape[1])).stage == "value"
    verdict = check("04.2", lambda x, A, B, bias: x @ (A @ B) + bias)
    assert verdict.stage == "cost"
    assert "11,520" in verdict.message


def test_an_error_is_quoted_with_the_input_that_caused_it() -> None:
    verdict = check("03.1", lambda modes, ranks: modes[99])
    assert verdict.stage == "error"
    assert "IndexError" in verdict.message and "(4, 7, 7, 4)" in verdict.message


def test_a_call_instead_of_the_function_is_named() -> None:
    assert "without brackets" in check("03.1", 504).message
    assert "with brackets" in check("01.1", lambda: 16).message


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (1 / 42, "upside down"), (4200, "percentage"), (0.42, "percentage is wanted"), (42 * 2**20, "MiB"),
        (-42, "sign"), (84, "twice"), (21, "half"), (43, "Off by one"), (60, "too large"), (30, "too small"),
        (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_numbers_are_compared_with_the_usual_slips(got: float, words: str) -> None:
    assert words in number_clue(got, 42)


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (torch.ones(3, 2), torch.ones(2, 3), "transposed"),
        (torch.ones(1, 2, 3, 1), torch.ones(2, 3), "r0 = rd = 1"),
        (torch.ones(4, 3, 2), torch.ones(2, 3, 4), "reverse"),
        (torch.ones(2, 4, 3), torch.ones(2, 3, 4), "another order"),
        (torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1.0, 3], [2, 4]]), "transposed"),
        (torch.full((2,), float("nan")), torch.ones(2), "finite"),
        ([1, 2], (1, 2, 3), "Expected 3 values, got 2"),
        ((1, 5), (1, 2), "Value 2 of 2"),
        (3, "activations", "in quotes"),
        ("weights", "activations", "Not that one"),
    ],
)
def test_differences_are_said_in_words(got: Any, want: Any, words: str) -> None:
    found = difference(got, want)
    assert found is not None and words in found.message


def test_numpy_lists_and_torch_numbers_are_welcome() -> None:
    import numpy as np

    assert difference(np.float64(2.0), 2) is None
    assert difference(torch.tensor(2), 2) is None
    assert difference(np.ones((2, 2)), torch.ones(2, 2)) is None
    assert difference([1, 2], (1, 2)) is None
    assert difference(" Activations ", "activations") is None


def test_hints_come_in_three_levels() -> None:
    texts = [str(hint("03.2", level)) for level in (1, 2, 3)]
    assert len(set(texts)) == 3
    assert "Hint 2 of 3" in texts[1]
    assert "1 (a nudge)" in str(hint("03.2", 4))
    assert "03.2" in str(hint("77.7"))
    assert "<code>" in hint("03.2", 2)._repr_html_()


def test_the_card_says_it_in_words_and_escapes_what_it_quotes() -> None:
    page = check("03.1", lambda modes, ranks: _raise(ValueError("<script>alert(1)</script>")))._repr_html_()
    assert "Not yet" in page and "&lt;script&gt;" in page and "<script>" not in page
    assert page.count("<details>") == 3
    assert "background" not in page and "color:" not in page.replace("border", "")  # the page's own colours
    assert "Right" in check("03.1", EXERCISES["03.1"].reference)._repr_html_()


def test_progress_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_VERDICTS", {})
    check("03.1", EXERCISES["03.1"].reference)
    check("03.2", ...)
    report = progress("03")
    assert report.right == 1
    assert "1 of 5 right" in str(report)
    assert {word for _, _, word in report.rows} == {"Right", "Not yet", "Not tried"}
    assert "Not tried" in report._repr_html_()


def test_an_alarm_that_comes_while_the_guard_tidies_up_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = signal.getsignal(signal.SIGALRM), signal.setitimer

    def setitimer(which: int, seconds: float, interval: float = 0.0) -> Any:
        if seconds == 0.0:
            signal.raise_signal(signal.SIGALRM)
        return real(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", setitimer)
    assert run_limited(lambda: 7, 5.0) == 7
    assert signal.getsignal(signal.SIGALRM) == before
