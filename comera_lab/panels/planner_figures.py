"""Stacked bars of a plan, and the memory of GPUs as upright lines. A Plan in, go.Figure out."""

from __future__ import annotations

import plotly.graph_objects as go

from comera_lab.memory import GPUS, Plan, capacity
from comera_lab.panels.figures import INK, fill_memory, memory_bars

GIB = 2**30
_ROW_PX, _AROUND_PX = 42, 150


def plan_bars(plan: Plan) -> go.Figure:
    """A bar for each method, in GiB, and a line for each size of card that is not far beyond the longest bar."""
    figure = memory_bars(_rows(plan), unit="GiB, predicted")
    figure.update_layout(margin={"t": 74}, legend={"y": 1.0, "yref": "container", "yanchor": "top"})
    fill_plan(figure, plan)
    return figure


def fill_plan(figure: go.Figure, plan: Plan) -> None:
    """Change a `plan_bars` figure into the one of this plan."""
    widest = _widest(plan)
    figure.layout.xaxis.range = [0, widest]
    fill_memory(figure, _rows(plan))
    figure.layout.height = _AROUND_PX + _ROW_PX * len(plan.rows)
    lines = [(size, at) for size, at in _sizes() if at <= widest]
    figure.layout.shapes = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": INK, "dash": "dot"}}
        for _, at in lines
    ]
    figure.layout.annotations = [
        {"x": at, "y": 1, "yref": "paper", "yanchor": "bottom", "text": text, "showarrow": False, "font": {"size": 13}}
        for text, at in _apart(lines, widest)
    ]


def _rows(plan: Plan) -> dict[str, dict[str, float]]:
    return {row.label: {pool: n / GIB for pool, n in row.pools.as_dict().items()} for row in plan.rows}


def _sizes() -> list[tuple[int, float]]:
    """(GB as printed, GiB that a plan may use), ascending."""
    return sorted({size: capacity(name) / GIB for name, size in GPUS.items()}.items())


def _widest(plan: Plan) -> float:
    """The end of the axis: beyond the longest bar, and beyond the smallest card that holds it, if any does."""
    longest = max(row.pools.total for row in plan.rows) / GIB
    larger = [at for _, at in _sizes() if at >= longest]
    return 1.06 * (min(larger[0], 2 * longest) if larger and larger[0] <= 4 * longest else longest)


def _apart(lines: list[tuple[int, float]], widest: float) -> list[tuple[str, float]]:
    """Labels that do not lie on one another: of two that are too near, the smaller card keeps its own."""
    kept: list[tuple[str, float]] = []
    for size, at in lines:
        if not kept or at - kept[-1][1] > 0.065 * widest:
            kept.append((f"{size} GB", at))
    return kept
