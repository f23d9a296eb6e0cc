"""The lower part of the capstone's panel: three answers, the point they defend, and the report."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from comera_lab.panels.budget_points import QUESTIONS
from comera_lab.panels.budget_report import Report, budget_report
from comera_lab.panels.state import LabState
from comera_lab.panels.texts import TextControl
from comera_lab.panels.widgets import ChoiceControl, say, sentence, text_widget
from comera_lab.runtime import progress

BEST = "the best claim"
Guard = Callable[[Callable[..., object]], Callable[..., None]]


def small_button(text: str, icon: str, tip: str, css_class: str) -> widgets.Button:
    button = widgets.Button(description=text, icon=icon, tooltip=tip, layout={"width": "max-content"})
    button.add_class(css_class)
    return button


class Defence:
    """`texts` (question -> TextControl), `defended`, `export_button`, and `note`, a line on what was saved where."""

    def __init__(self, state: LabState, guarded: Guard) -> None:
        self.state = state
        names = self._names()
        chosen = state.defended if state.defended in names else BEST
        self.defended = ChoiceControl(
            "defended", "defend", chosen, (BEST, *names), "Which registered point the report defends."
        )
        self.defended.on_change(guarded(self._defend))
        self.texts = {
            key: TextControl(key, question, state.answers.get(key, ""), f"{question} Your answer goes into the report.")
            for key, question in QUESTIONS.items()
        }
        for key, control in self.texts.items():
            control.on_change(guarded(lambda text, key=key: self._answered(key, text)))
        self.export_button = small_button(
            "Export report", "save", "Writes the report into this folder, as Markdown and JSON.", "t-export"
        )
        self.export_button.on_click(guarded(lambda button: self.export()))
        self.note = text_widget(css_class="t-note")
        texts = [control.widget for control in self.texts.values()]
        self.widget = widgets.VBox([*texts, self.defended.widget, self.export_button, self.note])

    def export(self) -> Report:
        """Write the report into the working folder, and offer it for download. OSError where it cannot be written."""
        report = budget_report(state=self.state)
        say(self.note, f'<div class="comera-line">{report.links()}</div>')
        paths = report.save()
        words = html.escape(f"Written: {paths[0].name} and {paths[1].name}, beside this notebook. Or: ")
        say(self.note, f'<div class="comera-line">{words}{report.links()}</div>')
        return report

    def show_names(self) -> None:
        """Offer the points that are registered now."""
        names = self._names()
        if self.defended.options != (BEST, *names):
            kept = self.defended.value if self.defended.value in names else BEST
            self.defended.offer_options((BEST, *names), kept)

    def show_answers(self) -> None:
        for key, control in self.texts.items():
            control.offer(self.state.answers.get(key, ""))

    def say_saved(self, problem: str) -> None:
        """One line: where the work is kept, or why it is not."""
        path = progress.progress_path()
        text = problem or (f"Saved in {path}, on this machine alone." if path else "")
        say(self.note, sentence(text) if text else "")

    def _names(self) -> tuple[str, ...]:
        return tuple(str(entry["name"]) for entry in self.state.registered)

    def _answered(self, key: str, text: str) -> None:
        answers: dict[str, Any] = self.state.answers
        if answers.get(key, "") != text:
            self.state.answers = {**answers, key: text}
            self.say_saved(progress.remember(progress.ANSWERS, {key: text}))

    def _defend(self, name: str) -> None:
        self.state.defended = "" if name == BEST else name
