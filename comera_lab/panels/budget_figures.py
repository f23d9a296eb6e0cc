"""The learner's own Pareto plot: registered points, what they stand as, and where the budget ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from comera_lab.panels.budget_points import Entry, is_claim, mean, span_words, values, within
from comera_lab.panels.budget_run import settings_of
from comera_lab.panels.figures import BLUE, INK, ORANGE, STATIC_WIDTH, TEMPLATE

AXES = {
    "MiB of a training step": "train_mib",
    "seconds of training": "seconds",
    "MiB of weights at the end": "weights_mib",
}
# What a point stands as: colour, symbol, and the words of the legend
STANDING = {
    "claim": (BLUE, "circle", "a claim: three seeds, within the budget"),
    "anecdote": (ORANGE, "diamond-open", "an anecdote: fewer seeds"),
    "over": (INK, "x-thin-open", "over the budget"),
}
_TICKS = [digit * 10.0**decade for decade in range(-3, 4) for digit in (1, 2, 5)]


def standing(entry: Entry, mib: float, seconds: float) -> str:
    return "over" if not within(entry, mib, seconds) else "claim" if is_claim(entry) else "anecdote"


def budget_figure(registered: Sequence[Entry], axis: str, mib: float, seconds: float) -> go.Figure:
    """Dev accuracy against what it cost, on a log axis; a dashed line where the budget ends."""
    figure = go.Figure(layout={"template": TEMPLATE, "height": 360, "width": STATIC_WIDTH})
    figure.update_layout(
        margin={"l": 64, "r": 16, "t": 58, "b": 50}, legend={"yref": "container", "y": 0.99, "yanchor": "top"},
        showlegend=True,
    )  # fmt: skip
    line = {"color": BLUE, "dash": "dot", "width": 2}
    figure.add_trace(go.Scatter(name="best claims", mode="lines", hoverinfo="skip", line=line))
    for colour, symbol, words in STANDING.values():
        marker = {"color": colour, "symbol": symbol, "size": 12, "line": {"width": 2, "color": colour}}
        figure.add_trace(go.Scatter(name=words, mode="markers+text", textposition="middle right", hoverinfo="text",
                                    marker=marker))  # fmt: skip
    figure.update_yaxes(title_text="dev accuracy (%)", fixedrange=True)
    fill_budget(figure, registered, axis, mib, seconds)
    return figure


def fill_budget(figure: go.Figure, registered: Sequence[Entry], axis: str, mib: float, seconds: float) -> None:
    """Change a `budget_figure` into the one of these points."""
    column = AXES[axis]
    stands = [standing(entry, mib, seconds) for entry in registered]
    claims = [entry for entry, stand in zip(registered, stands, strict=True) if stand == "claim"]
    best = front([(mean(entry, column), mean(entry, "dev_accuracy_percent")) for entry in claims])
    figure.data[0].x, figure.data[0].y = [x for x, _ in best], [y for _, y in best]
    for trace, (stand, (colour, _, _)) in zip(figure.data[1:], STANDING.items(), strict=True):
        entries = [entry for entry, other in zip(registered, stands, strict=True) if other == stand]
        middle = [mean(entry, "dev_accuracy_percent") for entry in entries]
        spread = [values(entry, "dev_accuracy_percent") for entry in entries]
        trace.x, trace.y = [mean(entry, column) for entry in entries], middle
        trace.text = [f" {entry['name'].removeprefix('point ')}" for entry in entries]
        trace.hovertext = [_hover(entry, column, axis) for entry in entries]
        trace.error_y = {
            "type": "data", "symmetric": False, "thickness": 1.5, "width": 4, "color": colour,
            "visible": any(max(s) > min(s) for s in spread),
            "array": [max(s) - m for s, m in zip(spread, middle, strict=True)],
            "arrayminus": [m - min(s) for s, m in zip(spread, middle, strict=True)],
        }  # fmt: skip
    limit = {"train_mib": mib, "seconds": seconds}.get(column)
    everything = [mean(entry, column) for entry in registered] + ([limit] if limit else [])
    low, high = min(everything, default=0.02), max(everything, default=0.2)
    figure.layout.xaxis = {
        "type": "log", "title": {"text": axis}, "range": [np.log10(low / 1.8), np.log10(high * 1.8)],
        "tickvals": _TICKS, "ticktext": [f"{tick:g}" for tick in _TICKS], "fixedrange": True,
    }  # fmt: skip
    ends = [value for entry in registered for value in values(entry, "dev_accuracy_percent")] or [60.0, 100.0]
    room = 0.2 * (max(ends) - min(ends)) + 1.5
    figure.layout.yaxis.range = [max(0.0, min(ends) - room), max(ends) + room]
    figure.layout.shapes, figure.layout.annotations = _limit_line(limit)


def _limit_line(limit: float | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if limit is None:
        return [], []
    line = {"color": INK, "width": 1.5, "dash": "dash"}
    shape = {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    note = {
        "x": np.log10(limit), "y": 0.03, "yref": "paper", "text": "your budget", "showarrow": False,
        "xanchor": "left", "yanchor": "bottom", "xshift": 5,
    }  # fmt: skip
    return [shape], [note]


def _hover(entry: Entry, column: str, axis: str) -> str:
    words = settings_of(entry).words().replace(", ", "<br>")
    return f"{entry['name']}: {span_words(entry)}, measured here<br>{mean(entry, column):.3g} {axis}<br>{words}"


def front(dots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(cost, accuracy) of the dots that no other dot beats in both, by cost."""
    best: list[tuple[float, float]] = []
    for cost, accuracy in sorted(dots, key=lambda dot: (dot[0], -dot[1])):
        if not best or accuracy > best[-1][1]:
            best.append((cost, accuracy))
    return best
