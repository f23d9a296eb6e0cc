"""Pictures of a whole class: numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import plotly.graph_objects as go

from comera_lab.panels.figures import BLUE, GREEN, LANE_STYLES, ORANGE, PURPLE, SKY, STATIC_WIDTH, TEMPLATE

_WORDS = {"Right": (GREEN, "", "white"), "Not yet": (ORANGE, "/", "black"), "Not tried": ("#999999", ".", "black")}
_STYLES = (*((colour, marker) for colour, _, marker in LANE_STYLES), (ORANGE, "triangle-up"), (SKY, "x"),
           (PURPLE, "cross"))  # fmt: skip


def class_bars(counts: Mapping[str, Mapping[str, int]]) -> go.Figure:
    """One bar for each exercise: students who have it right, not yet right, not tried."""
    exercises = list(counts)
    figure = go.Figure(layout={"template": TEMPLATE, "width": STATIC_WIDTH, "height": 120 + 26 * max(len(counts), 2)})
    for word, (colour, pattern, text) in _WORDS.items():
        values = [counts[key][word] for key in exercises]
        figure.add_bar(
            y=exercises, x=values, name=word, orientation="h", text=[value or "" for value in values],
            textfont={"color": text, "size": 14},
            marker={"color": colour, "pattern": {"shape": pattern, "size": 9, "solidity": 0.15, "fillmode": "overlay",
                                                 "fgcolor": "white"}},
        )  # fmt: skip
    figure.update_layout(barmode="stack", xaxis_title="students", legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def class_dots(points: Mapping[str, Sequence[tuple[float, float, str]]], x: str, y: str) -> go.Figure:
    """One dot for each run of the class; `points` is name -> (x, y, who)."""
    figure = go.Figure(layout={"template": TEMPLATE, "width": STATIC_WIDTH, "height": 420})
    for (name, dots), (colour, symbol) in zip(points.items(), cycle(_STYLES)):
        figure.add_scatter(
            x=[dot[0] for dot in dots], y=[dot[1] for dot in dots], text=[dot[2] for dot in dots], name=name,
            mode="markers", marker={"color": colour, "symbol": symbol, "size": 11},
            hovertemplate="%{text}: %{x:,} · %{y:.4g}",
        )  # fmt: skip
    values = [dot[0] for dots in points.values() for dot in dots]
    wide = bool(values) and min(values) > 0 and max(values) > 30 * min(values)
    figure.update_layout(xaxis={"title": {"text": x.replace("_", " ")}, "type": "log" if wide else "linear"},
                         yaxis={"title": {"text": y.replace("_", " ")}}, showlegend=True)  # fmt: skip
    if not values:
        figure.add_annotation(text=f"No run of the class has both {x} and {y}.", showarrow=False, font_size=14)
    return figure


def minutes_bars(rows: Sequence[tuple[str, int, int]], session_minutes: int) -> go.Figure:
    """A schedule: (what, minutes before it in its session, its minutes), in order, against the session's length."""
    figure = go.Figure(layout={"template": TEMPLATE, "width": STATIC_WIDTH, "height": 110 + 28 * max(len(rows), 2)})
    figure.add_bar(
        y=[row[0] for row in rows], x=[row[2] for row in rows], base=[row[1] for row in rows], orientation="h",
        text=[f"{row[2]} min" for row in rows], textfont={"color": "white", "size": 14}, marker={"color": BLUE},
        hovertemplate="%{y}: from minute %{base}<extra></extra>",
    )  # fmt: skip
    figure.add_vline(x=session_minutes, line={"dash": "dash", "color": "#D55E00"},
                     annotation_text="end of session", annotation_font_size=14)  # fmt: skip
    end = max([session_minutes, *(row[1] + row[2] for row in rows)])
    figure.update_layout(xaxis={"title": {"text": "minute of the session"}, "range": [0, 1.12 * end]}, showlegend=False)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure
