"""The reference page `notebooks/REFERENCE.md`: every public name with its arguments and its docstring."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PAGE = NOTEBOOKS / "REFERENCE.md"
# Rooms in the order in which they build on each other, each with the question that it answers
ROOMS = {
    "comera_lab.runtime": "What is this machine?",
    "comera_lab.contraction": "y from x and cores, and what it costs",
    "comera_lab.layers": "Layers made of cores",
    "comera_lab.objectives": "Task loss and size in one number",
    "comera_lab.optimizers": "Updates in small subspaces",
    "comera_lab.memory": "Bytes: predicted and measured",
    "comera_lab.experiments.train": "Training with a record, a checkpoint and a stop",
    "comera_lab.panels": "What moves in the lessons",
}


def reference() -> str:
    """The page as Markdown, from the docstrings of the installed package."""
    parts = [
        "# Reference\n",
        "Made from the docstrings by `comera-lab notebooks build`. Shapes are (rows, columns), bytes are bytes.\n",
    ]
    for room, question in ROOMS.items():
        module = importlib.import_module(room)
        parts.append(f"## {room}\n\n{question}.\n" if not question.endswith("?") else f"## {room}\n\n{question}\n")
        for name in sorted(module.__all__, key=str.lower):
            parts += _entry(name, getattr(module, name))
    return "\n".join(parts)


def write_reference() -> list[Path]:
    """Write the page where it is out of date; the files that changed."""
    page = reference()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return []
    PAGE.write_text(page, encoding="utf-8")
    return [PAGE]


def reference_drift() -> list[str]:
    """One line where the page is not what the docstrings say."""
    same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == reference()
    return [] if same else [f"{PAGE.name} differs from the docstrings. Run: comera-lab notebooks build"]


def _entry(name: str, thing: Any) -> list[str]:
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return []
    lines = [f"### `{name}{_arguments(thing)}`\n", f"```text\n{inspect.getdoc(thing) or ''}\n```\n"]
    methods = [
        f"- `{key}{_arguments(method)}`: {(inspect.getdoc(method) or '').splitlines()[0]}"
        for key, method in vars(thing).items()
        if inspect.isfunction(method) and not key.startswith("_") and method.__doc__
    ] if inspect.isclass(thing) else []  # fmt: skip
    return [*lines, *(["\n".join(methods) + "\n"] if methods else [])]


def _arguments(thing: Any) -> str:
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):  # a class whose constructor is written in C
        return ""
    return f"({', '.join(_argument(one) for one in found.parameters.values() if one.name != 'self')})"


def _argument(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return str(parameter).partition(":")[0]  # with its stars
    shown = repr(parameter.default)
    return f"{parameter.name}={'..' if ' at 0x' in shown or len(shown) > 40 else shown}"
