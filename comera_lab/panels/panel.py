"""What all panels have in common: one place on the page, a text twin, a static twin, and errors that are seen."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.panels.live import LiveFigure, Throttle, figure_mode
from comera_lab.panels.page import nobody_here, page_bundle
from comera_lab.panels.runner import Failure, Progress, Runner
from comera_lab.panels.state import LabState, lab_state
from comera_lab.panels.widgets import Control, ErrorCard, RunBar

_open: dict[str, Panel] = {}
_told: list[str] = []


class Panel:
    """Base class. A subclass makes its widgets in `__init__` and hands them to `_compose`.

    A notebook has one live panel of each kind: making a second one closes the first, so that running a cell
    twice leaves one set of callbacks and no old thread. `widget` is the ipywidgets box, `card` the error card.
    """

    kind: ClassVar[str]

    def __init__(self, state: LabState | None = None) -> None:
        older = _open.pop(self.kind, None)
        if older is not None:
            older.close()
        self.state = state or lab_state()
        self.card = ErrorCard()
        self.widget = widgets.VBox()
        self.closed = False
        self._figures: list[LiveFigure] = []
        self._throttles: list[Throttle] = []
        self._observers: list[tuple[Callable[[Any], None], str]] = []

    def table(self) -> str:
        """The numbers of this panel as text."""
        raise NotImplementedError

    def static(self) -> go.Figure:
        """The panel as an ordinary figure with a slider that needs no kernel."""
        raise NotImplementedError

    def close(self) -> None:
        """End this panel: its callbacks, its figures and its place on the page. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for throttle in self._throttles:
            throttle.cancel()
        for observer, name in self._observers:
            self.state.unobserve(observer, names=name)
        old = list(_descendants(self.widget))
        note = widgets.HTML("This panel was opened again in another cell; the newer one is live.")
        self.widget.children = (note,)
        for figure in self._figures:
            figure.close()
        for widget in old:
            for part in (widget, widget.layout, getattr(widget, "style", None)):
                if part is not None:
                    part.close()

    def _compose(self, *children: widgets.Widget) -> None:
        notices = []
        mode, reason = figure_mode()
        if mode == "plain" and not _told:
            _told.append(reason)
            notices.append(widgets.HTML(f"<p>Charts are shown as plain figures: {html.escape(reason)}.</p>"))
        end = () if self.card.widget in children else (self.card.widget,)
        self.widget.children = (*notices, *children, *end)
        self.widget.add_class("comera")
        self.widget.add_class(f"t-panel-{self.kind}")
        _open[self.kind] = self

    def _live(self, figure: go.Figure, css_class: str, description: str) -> LiveFigure:
        live = LiveFigure(figure, css_class, description)
        self._figures.append(live)
        return live

    def _throttled(self, draw: Callable[[], None]) -> Throttle:
        throttle = Throttle(self._guarded(draw))
        self._throttles.append(throttle)
        return throttle

    def _guarded(self, action: Callable[..., object]) -> Callable[..., None]:
        """`action` with its exceptions on the card: JupyterLab shows none that a callback raises."""

        @functools.wraps(action)
        def guarded(*arguments: Any) -> None:
            if self.closed:
                return
            shown = self.card.shown
            try:
                action(*arguments)
            except Exception as error:
                self.card.show(Failure.of(error))
            else:
                # a guarded callback inside this one may just have shown its own
                if self.card.shown == shown:
                    self.card.clear()

        return guarded

    def _bind(self, control: Control, trait: str) -> None:
        """Tie a control to a trait of the state, both ways."""
        control.on_change(self._guarded(lambda value: setattr(self.state, trait, value)))
        self._watch(trait, lambda change: control.offer(change["new"]))
        if trait in self.state.locked:
            control.lock("set by your teacher")

    def _watch(self, trait: str, action: Callable[[Any], None]) -> None:
        observer = self._guarded(action)
        self.state.observe(observer, names=trait)
        self._observers.append((observer, trait))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        text = self.table()
        if nobody_here():
            return page_bundle(self.static(), text)
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.widget.model_id,
            },
            "text/html": f"<p>This panel needs a running kernel: choose Run, then Run All Cells. Its numbers:</p>"
            f"<pre>{html.escape(text)}</pre>",
            "text/plain": text,
        }


class RunPanel(Panel):
    """A panel that trains: it has a `runner` and a `bar` with Start, Stop and Resume."""

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.runner = Runner(self.kind, self._guarded_item, self._guarded(self._changed))

    def run(self, *, wait: bool = False) -> bool:
        """Train from the first step, as the Start button does; `wait=True` returns when it has ended.

        False, with the reason on the card, where another run is going. An interrupt of the kernel stops a run
        that is waited for; press Stop for one in the background. With `wait=True` a failed run raises
        RuntimeError, so that a script cannot miss it.
        """
        started = self.runner.start(self._job, wait=wait)
        self._report_refusal(started)
        if wait and self.runner.failure is not None:
            raise RuntimeError(f"the run failed: {self.runner.failure.summary}\n{self.runner.failure.trace}")
        return started

    def stop(self, *, wait: bool = False) -> None:
        """Stop after the current step, as the Stop button does."""
        self.runner.stop(wait=wait)

    def resume(self, *, wait: bool = False) -> bool:
        """Go on from where Stop was pressed, as the Resume button does."""
        started = self.runner.resume(wait=wait)
        self._report_refusal(started)
        return started

    def close(self) -> None:
        self.runner.close()
        super().close()

    def _compose(self, *children: widgets.Widget) -> None:
        """The error card goes under the buttons, where the eye is; below the charts it may be out of the window."""
        under = children.index(self.bar.widget) + 1
        super()._compose(*children[:under], self.card.widget, *children[under:])

    def _run_bar(self, start_text: str, help: str, *, stop: bool = True, resume: bool = True) -> RunBar:
        self.bar = RunBar(start_text, help, stop=stop, resume=resume)
        self.bar.start.on_click(self._guarded(lambda button: self.run()))
        self.bar.stop.on_click(self._guarded(lambda button: self.stop()))
        self.bar.resume.on_click(self._guarded(lambda button: self.resume()))
        self.bar.show(self.runner)
        return self.bar

    def _report_refusal(self, started: bool) -> None:
        if not started:
            self.card.show(Failure(self.runner.refusal, ""), "Not started", of_run=True)

    def _job(self) -> Iterator[Progress]:
        """Make and do the work, one step for each item."""
        raise NotImplementedError

    def _item(self, progress: Progress) -> None:
        """Take in the result of one step, in the worker."""
        raise NotImplementedError

    def _guarded_item(self, progress: Progress) -> None:
        if not self.closed:
            self._item(progress)

    def _changed(self, runner: Runner) -> None:
        """Show a change of state; may be called in the worker or in a callback."""
        self.bar.enable(runner)
        self.bar.show(runner)
        if runner.state == "running":
            self.card.clear(of_run=True)
        if runner.failure is not None:
            self.card.show(runner.failure, "The run failed", of_run=True)


def _descendants(box: widgets.Widget) -> Iterator[widgets.Widget]:
    for child in getattr(box, "children", ()):
        yield from _descendants(child)
        yield child
