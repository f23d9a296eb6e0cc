"""A control for a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from comera_lab.panels.widgets import Control

LONGEST = 4000


class TextControl(Control):
    """A question with room for an answer below it; `value` is the text as typed, at most LONGEST characters."""

    def __init__(self, name: str, question: str, value: str, help: str) -> None:
        super().__init__(name, question, value, f"t-{name}")
        self.area = widgets.Textarea(value=value, continuous_update=False, rows=2, tooltip=help)
        self.area.add_class(f"t-{name}")
        self.area.layout.width = "100%"
        self.area.layout.max_width = "860px"
        self.label.tooltip = help
        self.label.layout.width = "max-content"
        self.widget = widgets.VBox([self.label, self.area, self.message])
        self.area.observe(self._edited, names="value")

    def check(self, new: Any) -> str:
        if not isinstance(new, str) or len(new) > LONGEST:
            got = f"{len(new):,} characters" if isinstance(new, str) else repr(new)
            raise ValueError(f"{self.name} must be text of at most {LONGEST:,} characters, got {got}. Shorten it.")
        return new

    def _editors(self) -> Sequence[Any]:
        return (self.area,)

    def _show(self) -> None:
        self.area.value = self._value
