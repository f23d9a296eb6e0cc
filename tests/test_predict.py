"""Guess first: nothing is revealed before a guess is committed, and answers are computed."""

from typing import Any

import pytest

from comera_lab.panels import SpectrumPanel
from comera_lab.panels.predict import Predict, Question
from comera_lab.teaching import guess

LESSONS = ("00", "01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12")


def _card(answer: Any = lambda: (1, "Because.")) -> Predict:
    return Predict(Question(text="Which?", choices=("one", "two"), then="Drag.", answer=answer))


def test_the_answer_waits_for_a_guess() -> None:
    card = _card()
    assert card.commit_button.disabled and card.answer_button.disabled
    card.answer_button.click()
    assert "Commit a guess first" in card.card.text
    card.commit_button.click()
    assert "Choose one" in card.card.text
    card.choices.value = "one"
    assert not card.commit_button.disabled
    card.commit_button.click()
    assert card.card.text == ""
    assert card.choices.disabled and "Your guess: one" in card.line.value and "Drag." in card.line.value
    card.answer_button.click()
    assert card.solved is False
    assert "You guessed: one" in card.line.value and "two" in card.line.value and "Because." in card.line.value
    assert card.answer_button.disabled


def test_a_right_guess_is_said_in_words() -> None:
    card = _card()
    card.choices.value = "two"
    card.commit()
    card.show_answer()
    assert card.solved is True
    assert "As you guessed: two" in card.line.value


def test_an_error_in_the_answer_is_seen() -> None:
    def broken() -> tuple[int, str]:
        raise RuntimeError("no answer")

    card = _card(broken)
    card.choices.value = "one"
    card.commit()
    card.answer_button.click()
    assert "no answer" in card.card.text
    assert not card.answer_button.disabled


def test_K07_a_reader_without_a_kernel_sees_the_question() -> None:
    bundle = _card()._repr_mimebundle_()
    assert "Which?" in bundle["text/html"] and "two" in bundle["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lesson_has_a_question_with_a_computed_answer(lesson: str) -> None:
    card = guess(lesson)
    card.choices.value = card.question.choices[0]
    card.commit()
    card.show_answer()
    index, why = card.question.answer()
    assert 0 <= index < len(card.question.choices)
    assert any(word in why for word in ("predicted", "measured", "computed", "counted", "allow"))


def test_the_arithmetic_answers_are_the_known_ones() -> None:
    answers = {lesson: guess(lesson).question for lesson in ("00", "01", "02", "03")}
    chosen = {lesson: question.choices[question.answer()[0]] for lesson, question in answers.items()}
    assert chosen == {
        "00": "it grows three to four times",
        "01": "activations",
        "02": "less than a twentieth",
        "03": "the one in the middle",
    }


def test_the_answer_about_the_digits_is_what_the_panel_shows() -> None:
    panel = SpectrumPanel()
    panel.source.value, panel.energy.value = "digits matrix", 90.0
    panel.run(wait=True)
    assert f"Rank {panel.rank} of 256" in guess("02").question.answer()[1]
    panel.close()


def test_an_unknown_lesson_is_refused() -> None:
    with pytest.raises(ValueError, match="lesson must be one of 00, 01, .*06, .*got '77'"):
        guess("77")
