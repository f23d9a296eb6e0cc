"""The control that chooses how a number of features is written as a product of modes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from comera_lab.panels.widgets import Control
from comera_lab.shapes import ShapeError, split_features

MAX_MODES = 5  # on each side
_TYPED = "as typed"


def suggestions(features: int, rising: bool) -> dict[str, tuple[int, ...]]:
    """Label -> modes for 1 to 4 modes, evenest first; `rising` as output modes stand."""
    found: dict[str, tuple[int, ...]] = {}
    for order in (3, 2, 4, 1):
        modes = split_features(features, order)
        found.setdefault(as_text(modes[::-1] if rising else modes), modes[::-1] if rising else modes)
    return found


def as_text(modes: Sequence[int]) -> str:
    return " × ".join(map(str, modes))


class ModesControl(Control):
    """A list of good factorisations and an entry for any other, such as "4 7 7 4". `value` is a tuple of ints."""

    def __init__(self, name: str, label: str, features: int, value: Sequence[int], help: str, *, rising: bool) -> None:
        css_class = f"t-{name.replace('_', '-')}"
        super().__init__(name, label, tuple(value), css_class)
        self.features, self.rising = features, rising
        self.dropdown = widgets.Dropdown(options=[_TYPED], tooltip=help)
        self.dropdown.add_class(css_class)
        self.dropdown.layout.width = "170px"
        self.entry = widgets.Text(
            continuous_update=False, tooltip=f"{help} Type modes with spaces between, such as 4 7 7 4, and press Enter."
        )
        self.entry.add_class(f"{css_class}-entry")
        self.entry.layout.width = "124px"
        self.label.tooltip = help
        self._assemble(self.dropdown, self.entry)
        self.dropdown.observe(self._picked, names="value")
        self.entry.observe(self._edited, names="value")
        self._refresh()

    def fit(self, features: int, modes: Sequence[int]) -> None:
        """Take on another number of features and its modes, without telling the listeners."""
        self.complain("")
        if (features, tuple(modes)) != (self.features, self._value):
            self.features, self._value = features, tuple(modes)
            self._refresh()

    def check(self, new: Any) -> tuple[int, ...]:
        numbers = re.findall(r"[^\s,;×x*·()\[\]]+", new) if isinstance(new, str) else list(new)
        example = as_text(split_features(self.features, 3))
        if not 1 <= len(numbers) <= MAX_MODES or not all(str(number).isdecimal() for number in numbers):
            raise ShapeError(
                f"{self.label.value} must be 1 to {MAX_MODES} whole numbers above 0, got {new!r}. Try {example}."
            )
        modes = tuple(int(number) for number in numbers)
        product = math.prod(modes)
        if not self.features <= product <= 1.5 * self.features:
            raise ShapeError(
                f"{self.label.value} must multiply out to {self.features:,} (or up to half more, as padding), got "
                f"{as_text(modes)} = {product:,}. Try {example}."
            )
        return modes

    def _picked(self, change: Any) -> None:
        if not self._busy and change["new"] != _TYPED:
            self.offer(suggestions(self.features, self.rising)[change["new"]])

    def _editors(self) -> Sequence[Any]:
        return (self.dropdown, self.entry)

    def _show(self) -> None:
        offered = suggestions(self.features, self.rising)
        text = as_text(self._value)
        options = [*offered, *([] if text in offered else [_TYPED])]
        if list(self.dropdown.options) != options:
            self.dropdown.options = options
        self.dropdown.value = text if text in offered else _TYPED
        self.entry.value = " ".join(map(str, self._value))
