"""Commit a guess, then drag, then see the answer: the learner's own prediction makes the picture worth looking at."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from comera_lab.panels.page import nobody_here, page_bundle
from comera_lab.panels.runner import Failure
from comera_lab.panels.style import STYLE
from comera_lab.panels.widgets import ErrorCard, say, sentence, text_widget


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with choices. `answer()` computes (index of the right choice, one sentence why) when asked for."""

    text: str
    choices: tuple[str, ...]
    then: str
    answer: Callable[[], tuple[int, str]]


class Predict:
    """A question card: choose, commit, do what `question.then` says, press Show the answer.

    `guess` is the committed choice or None; `solved` is None until the answer was shown, then True or False.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.guess: str | None = None
        self.solved: bool | None = None
        self.choices = widgets.RadioButtons(
            options=question.choices, value=None, tooltip=question.text, layout={"width": "max-content"}
        )
        self.choices.add_class("t-guess")
        self.commit_button = self._button("Commit my guess", "lock", "Keeps your guess, so that you can compare later.")
        self.answer_button = self._button("Show the answer", "eye", "Computes the answer. Commit a guess first.")
        self.line = text_widget(css_class="t-guess-line")
        self.card = ErrorCard()
        title = widgets.HTML(f'{STYLE}<h4>Guess first</h4><p class="comera-lead">{html.escape(question.text)}</p>')
        buttons = widgets.HBox([self.commit_button, self.answer_button])
        buttons.add_class("comera-buttons")
        self.widget = widgets.VBox([title, self.choices, buttons, self.line, self.card.widget])
        self.widget.add_class("comera")
        self.widget.add_class("t-predict")
        self.choices.observe(lambda change: self._enable(), names="value")
        self.commit_button.on_click(lambda button: self._guarded(self.commit))
        self.answer_button.on_click(lambda button: self._guarded(self.show_answer))
        self._enable()

    def commit(self) -> None:
        """Fix the chosen guess. ValueError while nothing is chosen."""
        if self.choices.value is None:
            raise ValueError("Choose one of the answers first.")
        self.guess = self.choices.value
        say(self.line, sentence(f"Your guess: {self.guess}. {self.question.then} Then press Show the answer."))
        self._enable()

    def show_answer(self) -> None:
        """Compute the answer and set it beside the guess. ValueError before a guess is committed."""
        if self.guess is None:
            raise ValueError("Commit a guess first: it is what makes the answer stick.")
        index, why = self.question.answer()
        right = self.question.choices[index]
        self.solved = self.guess == right
        verdict = "✓ As you guessed" if self.solved else f"○ You guessed: {self.guess}. It is"
        say(self.line, sentence(f"{verdict}: {right}. {why}"))
        self._enable()

    def _enable(self) -> None:
        self.choices.disabled = self.guess is not None
        self.commit_button.disabled = self.guess is not None or self.choices.value is None
        self.answer_button.disabled = self.guess is None or self.solved is not None

    def _guarded(self, action: Callable[[], None]) -> None:
        """JupyterLab hides what a callback raises, so it goes on a card."""
        try:
            action()
        except Exception as error:
            self.card.show(Failure.of(error))
        else:
            self.card.clear()

    @staticmethod
    def _button(text: str, icon: str, tip: str) -> widgets.Button:
        button = widgets.Button(description=text, icon=icon, tooltip=tip, layout={"width": "max-content"})
        button.add_class("t-" + text.lower().split()[0])
        return button

    def table(self) -> str:
        """Question, choices and what was guessed, as text."""
        lines = [
            self.question.text,
            *(f"  {'*' if choice == self.guess else '-'} {choice}" for choice in self.question.choices),
        ]
        return "\n".join([*lines, f"Then: {self.question.then}"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        text = self.table()
        if nobody_here():
            return page_bundle(None, text)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": f"<p>Guess first (the buttons need a running kernel: Run, then Run All Cells).</p>"
            f"<pre>{html.escape(text)}</pre>",
            "text/plain": text,
        }
