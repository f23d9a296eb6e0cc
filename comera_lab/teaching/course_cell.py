"""The cell that a course puts before the first panel of a lesson: what the teacher set, and the student's seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def start_course(
    title: str, *, seed: int, presets: Mapping[str, Any] | None = None, locked: Sequence[str] = ()
) -> None:
    """Set sliders and seed of this notebook, lock those in `locked`, and say so in a line. For panels made after it."""
    from comera_lab.panels.state import lab_state

    state = lab_state()
    for name, value in {**(presets or {}), "seed": seed}.items():
        setattr(state, name, value)
    state.locked = tuple(locked)
    settings = [f"{name} = {getattr(state, name)}" + (" (locked)" if name in locked else "") for name in presets or {}]
    settings += [f"{name} (locked)" for name in locked if name not in (presets or {})]
    print(f"{title}. {'Set by your teacher: ' + ', '.join(settings) + '. ' if settings else ''}Your seed is {seed}.")


def cell_text(title: str, seed: int, presets: Mapping[str, Any], locked: Sequence[str]) -> str:
    """The source of that cell."""
    arguments = [f"    {title!r}, seed={seed},"]
    if presets:
        arguments.append(f"    presets={dict(presets)!r},")
    if locked:
        arguments.append(f"    locked={list(locked)!r},")
    return "\n".join(["from comera_lab.teaching.course_cell import start_course", "", "start_course(", *arguments, ")"])
