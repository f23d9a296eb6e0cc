"""The small pieces that panels are made of: controls that explain themselves, a run bar, tiles and cards.

Every control has a label, a tooltip in a full sentence and a typed entry; a value that is not allowed gets a
sentence under the control and changes nothing. Text is at least 14 px and takes its colours from the page.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as widgets

from comera_lab.panels.runner import Failure, Runner
from comera_lab.panels.style import STYLE


def text_widget(value: str = "", css_class: str = "") -> widgets.HTML:
    """An HTML widget with a stable class; empty text takes no room."""
    box = widgets.HTML(value)
    if css_class:
        box.add_class(css_class)
    box.layout.display = None if value else "none"
    return box


def say(box: widgets.HTML, value: str) -> None:
    """Set the text of a `text_widget`; an empty text hides it."""
    box.value = value
    box.layout.display = None if value else "none"


def heading(title: str, lead: str) -> widgets.HTML:
    return widgets.HTML(f'{STYLE}<h4>{html.escape(title)}</h4><p class="comera-lead">{html.escape(lead)}</p>')


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """HTML of (value, caption) tiles."""
    cells = "".join(
        f'<div class="comera-tile"><b>{html.escape(value)}</b><span>{html.escape(caption)}</span></div>'
        for value, caption in pairs
    )
    return f'<div class="comera-tiles">{cells}</div>'


def sentence(text: str) -> str:
    return f'<div class="comera-line">{html.escape(text)}</div>'


# Callbacks run in the main thread, in JupyterLab's subshell threads and in timers: one at a time may move a control.
_moving = threading.RLock()


class Control:
    """A label, an editor and a place for a sentence; `value` is always a legal one.

    Assigning an illegal `value` raises ValueError and shows the same sentence that typing it shows. `on_change`
    callbacks get the new value; they run once per change, whoever made it.
    """

    def __init__(self, name: str, label: str, value: Any, css_class: str) -> None:
        self.name = name
        self._value = value
        self._listeners: list[Callable[[Any], None]] = []
        self._busy = False
        self._locked = False
        self.label = widgets.Label(label)
        self.label.add_class("comera-label")
        self.message = text_widget(css_class=f"{css_class}-message")
        self.message.add_class("comera-bad")
        self.note = text_widget(css_class="comera-note")

    def _assemble(self, *parts: widgets.Widget) -> None:
        row = widgets.HBox([self.label, *parts, self.note])
        row.add_class("comera-row")
        self.widget = widgets.VBox([row, self.message])

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, new: Any) -> None:
        with _moving:
            try:
                self._accept(self.check(new))
            except ValueError as error:
                self.complain(str(error))
                raise

    def offer(self, new: Any) -> None:
        """Take `new` on if it is legal, else show why not: what typing does."""
        with _moving:
            try:
                self._accept(self.check(new))
            except ValueError as error:
                self.complain(str(error))

    @property
    def enabled(self) -> bool:
        return not self._editors()[0].disabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        for editor in self._editors():
            editor.disabled = self._locked or not on

    def lock(self, reason: str) -> None:
        """Take the editors away for good, and say why beside them; code may still set `value`."""
        self._locked = True
        self.enabled = False
        say(self.note, html.escape(reason))

    def on_change(self, listener: Callable[[Any], None]) -> None:
        self._listeners.append(listener)

    def check(self, new: Any) -> Any:
        """`new` as a legal value, or ValueError."""
        raise NotImplementedError

    def complain(self, text: str) -> None:
        """Show a sentence under the control, "" for none; the editors go back to the value that holds."""
        say(self.message, html.escape(text))
        if text:
            self._refresh()

    def _editors(self) -> Sequence[Any]:
        raise NotImplementedError

    def _show(self) -> None:
        raise NotImplementedError

    def _refresh(self) -> None:
        self._busy = True
        try:
            self._show()
        finally:
            self._busy = False

    def _accept(self, new: Any) -> None:
        changed = new != self._value
        self._value = new
        self.complain("")
        self._refresh()
        if changed:
            for listener in self._listeners:
                listener(new)

    def _edited(self, change: Any) -> None:
        """Observer of the editors; their changes by `_refresh` are not news."""
        if not self._busy:
            self.offer(change["new"])


class NumberControl(Control):
    """A slider with a typed entry beside it. Whole numbers when `low`, `high` and `step` are int."""

    def __init__(
        self,
        name: str,
        label: str,
        value: float,
        low: float,
        high: float,
        help: str,
        *,
        step: float = 1,
        unit: str = "",
        slider: bool = True,
        css_class: str | None = None,
    ) -> None:
        css_class = css_class or f"t-{name}"
        super().__init__(name, label, value, css_class)
        self.low, self.high = low, high
        self.whole = all(isinstance(number, int) for number in (low, high, step))
        self._reason = ""
        make = widgets.IntSlider if self.whole else widgets.FloatSlider
        self.slider = make(value=value, min=low, max=high, step=step, readout=False, tooltip=help)
        self.slider.add_class(css_class)
        self.slider.add_class("comera-slider")
        hint = f"{help} Type a number from {low:,} to {high:,} and press Enter."
        self.entry = widgets.Text(value=self.as_text(value), continuous_update=False, tooltip=hint)
        self.entry.add_class(f"{css_class}-entry")
        self.entry.add_class("comera-entry")
        self.label.tooltip = help
        self._has_slider = slider
        self._assemble(*((self.slider, self.entry) if slider else (self.entry,)))
        say(self.note, html.escape(unit))
        self.slider.observe(self._edited, names="value")
        self.entry.observe(self._edited, names="value")

    def as_text(self, value: float) -> str:
        return str(value) if self.whole else f"{value:g}"

    def check(self, new: Any) -> float:
        rule = f"{self.label.value} must be a {'whole ' if self.whole else ''}number from {self.low:,} to {self.high:,}"
        remedy = self._reason or "Choose a value in that range."
        try:
            if isinstance(new, bool):
                raise ValueError
            number = float(str(new).replace(",", "").replace("_", "").strip())
        except ValueError:
            raise ValueError(f"{rule}, got {str(new)!r}. {remedy}") from None
        if not self.low <= number <= self.high or (self.whole and number != int(number)):
            raise ValueError(f"{rule}, got {new}. {remedy}")
        return int(number) if self.whole else number

    def fit(self, value: float) -> None:
        """Take on a value without telling the listeners."""
        with _moving:
            self._value = value
            self.complain("")
            self._refresh()

    def limit(self, high: int, reason: str, value: int) -> None:
        """Set the largest legal value, say why in the note and in refusals, and take `value` on silently."""
        with _moving:
            self.high, self._reason, self._value = high, reason, value
            self._busy = True
            try:
                self.slider.value = min(self.slider.value, high)
                self.slider.max = high
                self._show()
            finally:
                self._busy = False
            self.enabled = high > self.low
            self.complain("")
            say(self.note, html.escape(reason))

    def _editors(self) -> Sequence[Any]:
        return (self.slider, self.entry)

    def _show(self) -> None:
        self.slider.value = self._value
        self.entry.value = self.as_text(self._value)


class ChoiceControl(Control):
    """A drop-down list."""

    def __init__(
        self, name: str, label: str, value: str, options: Sequence[str], help: str, css_class: str | None = None
    ) -> None:
        css_class = css_class or f"t-{name}"
        super().__init__(name, label, value, css_class)
        self.options = tuple(options)
        self.dropdown = widgets.Dropdown(options=list(options), value=value, tooltip=help)
        self.dropdown.add_class(css_class)
        self.dropdown.add_class("comera-choice")
        self.label.tooltip = help
        self._assemble(self.dropdown)
        self.dropdown.observe(self._edited, names="value")

    def check(self, new: Any) -> str:
        if new not in self.options:
            raise ValueError(f"{self.label.value} must be one of {', '.join(self.options)}, got {new!r}. Choose one.")
        return str(new)

    def offer_options(self, options: Sequence[str], value: str) -> None:
        """Other options from now on, `value` among them, without telling the listeners."""
        with _moving:
            self._busy = True
            try:
                self.options = tuple(options)
                self.dropdown.options, self.dropdown.value = list(options), value
                self._value = value
            finally:
                self._busy = False
            self.complain("")

    def _editors(self) -> Sequence[Any]:
        return (self.dropdown,)

    def _show(self) -> None:
        self.dropdown.value = self._value


class ErrorCard:
    """A red-bordered card for what went wrong, with the traceback folded away. Hidden while `text` is empty.

    A card of a run stays until the next run; the others go when a callback has worked again.
    """

    def __init__(self) -> None:
        self.text = ""
        self.shown = 0  # how many cards there have been
        self._of_run = False
        self.widget = text_widget(css_class="t-error")

    def show(self, failure: Failure, title: str = "That did not work", *, of_run: bool = False) -> None:
        self.text, self._of_run = f"{title}: {failure.summary}", of_run
        self.shown += 1
        folded = html.escape(failure.trace)
        trace = f"<details><summary>Traceback, for a bug report</summary><pre>{folded}</pre></details>"
        say(
            self.widget,
            f'<div class="comera-card" role="alert"><b>{html.escape(title)}</b><br>{html.escape(failure.summary)}'
            f"{trace if failure.trace else ''}</div>",
        )

    def clear(self, *, of_run: bool = False) -> None:
        if self.text and (of_run or not self._of_run):
            self.text = ""
            say(self.widget, "")


class RunBar:
    """Start, Stop and Resume buttons with the state in words, a progress bar and the newest numbers.

    Work that ends by itself in a second or two needs no `stop` and no `resume` button.
    """

    def __init__(self, start_text: str, help: str, *, stop: bool = True, resume: bool = True) -> None:
        def button(text: str, icon: str, tip: str, style: str, css_class: str) -> widgets.Button:
            made = widgets.Button(description=text, icon=icon, tooltip=tip, button_style=style)
            made.add_class(css_class)
            return made

        self.start = button(start_text, "play", help, "success", "t-start")
        stop_help = "Stops after the current step and keeps the results so far."
        self.stop = button("Stop", "stop", stop_help, "danger", "t-stop")
        self.resume = button("Resume", "forward", "Goes on from where Stop was pressed.", "", "t-resume")
        self.status = widgets.HTML("")
        self.status.add_class("t-status")
        row = widgets.HBox([self.start, *[self.stop][: int(stop)], *[self.resume][: int(resume)]])
        row.add_class("comera-buttons")
        self.widget = widgets.VBox([row, self.status])
        self.stop.disabled = self.resume.disabled = True

    def show(self, runner: Runner, numbers: str = "") -> None:
        """One message: words, bar and numbers together."""
        done = f"{100 * runner.progress.fraction:.0f}%"
        bar = f'<span class="comera-progress"><i style="width:{done}"></i></span>' if runner.state != "idle" else ""
        text = runner.words + (f" · {numbers}" if numbers else "")
        self.status.value = f'<div class="comera-line">{bar}{html.escape(text)}</div>'

    def enable(self, runner: Runner) -> None:
        self.start.disabled = runner.active
        self.stop.disabled = runner.state != "running"
        self.resume.disabled = not runner.can_resume
