"""A control with several check boxes: some of a few names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from comera_lab.panels.widgets import Control


class TogglesControl(Control):
    """Check boxes, one per name of `options` (name -> what it is, a sentence); `value` is the tuple of those ticked.

    `required` is always among them, so that there is something to compare with.
    """

    def __init__(
        self, name: str, label: str, value: Sequence[str], options: Mapping[str, str], help: str, required: str
    ) -> None:
        super().__init__(name, label, tuple(value), f"t-{name}")
        self.options, self.required = tuple(options), required
        self.boxes = {}
        for option, sentence in options.items():
            box = widgets.Checkbox(value=option in value, description=option, indent=False, tooltip=sentence)
            box.layout.width = "max-content"
            box.add_class(f"t-{name}-{option}".replace(" ", "-"))
            box.observe(self._ticked, names="value")
            self.boxes[option] = box
        self.label.tooltip = help
        row = widgets.HBox(list(self.boxes.values()))
        row.layout.flex_flow = "row wrap"
        row.layout.grid_gap = "0 22px"
        self._assemble(row)

    def check(self, new: Any) -> tuple[str, ...]:
        wanted = set(new) if isinstance(new, Iterable) and not isinstance(new, str) else {new}
        if not wanted <= set(self.options) or self.required not in wanted or len(wanted) < 2:
            raise ValueError(
                f"{self.label.value} must be {self.required} and at least one of "
                f"{', '.join(option for option in self.options if option != self.required)}, got "
                f"{', '.join(map(str, new)) if isinstance(new, tuple | list) else new}. Tick another."
            )
        return tuple(option for option in self.options if option in wanted)

    def _ticked(self, change: Any) -> None:
        if not self._busy:
            self.offer(tuple(option for option, box in self.boxes.items() if box.value))

    def _editors(self) -> Sequence[Any]:
        return tuple(self.boxes.values())

    def _show(self) -> None:
        for option, box in self.boxes.items():
            box.value = option in self._value
