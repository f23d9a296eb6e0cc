"""A small card: what is saved on this machine, where, and a button that downloads it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from comera_lab.panels.budget_report import download_link
from comera_lab.panels.page import nobody_here, page_bundle
from comera_lab.panels.style import STYLE
from comera_lab.panels.widgets import text_widget
from comera_lab.runtime import progress

_open: list[Callable[[], None]] = []


class SavedWork:
    """The card; it follows every save. `lines()` gives a sentence for each lesson that was worked on.

    A notebook has one live card: a second one ends the first.
    """

    def __init__(self, lines: Callable[[], Sequence[str]]) -> None:
        self._lines = lines
        self.widget = text_widget(" ", "t-saved")
        self.widget.add_class("comera")
        for end in _open:
            end()
        _open[:] = [progress.on_saved(self._show)]
        self._show()

    def words(self) -> list[str]:
        """What the card says, line by line."""
        path = progress.progress_path()
        if path is None:
            return ["Nothing is saved: COMERA_LAB_PROGRESS is off."]
        whole, problem = progress.read_progress()
        if problem:
            return [problem]
        lines = list(self._lines())
        points = len(whole.get(progress.POINTS) or {})
        if points:
            lines.append(f"Lesson 16: {points} registered point{'s' * (points > 1)}")
        where = f"Kept in {path}, on this machine alone; nothing is sent anywhere."
        return [*(lines or ["Nothing yet: your first checked answer will be here."]), where]

    def table(self) -> str:
        return "\n".join(["Your saved work", *self.words()])

    def _html(self) -> str:
        body = "".join(f'<div class="comera-line">{html.escape(line)}</div>' for line in self.words())
        answers = "".join(
            f"<details><summary>{html.escape(key)} {html.escape(str(kept.get('title', '')))}: "
            f"{'right' if kept.get('passed') else 'not yet'}</summary>"
            f"<pre>{html.escape(str(kept.get('answer', '')))}</pre></details>"
            for key, kept in sorted(progress.saved(progress.VERDICTS).items())
            if isinstance(kept, dict)
        )
        folded = f"<details><summary>Your answers as they were checked</summary>{answers}</details>" if answers else ""
        path, text = progress.progress_path(), progress.text()
        link = download_link(text, path.name, "application/json", "Download") if path and text else ""
        return f'{STYLE}<div class="comera-saved"><b>Your saved work</b>{body}{folded}{link}</div>'

    def _show(self) -> None:
        self.widget.value = self._html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        text = self.table()
        if nobody_here():
            return page_bundle(None, text)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": f"<p>Your saved work (a card that needs a running kernel).</p><pre>{html.escape(text)}</pre>",
            "text/plain": text,
        }
