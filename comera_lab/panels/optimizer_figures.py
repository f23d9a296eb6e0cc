"""Optimizers over seeds: a line for the mean and a band from the least to the largest. Numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from comera_lab.panels.figures import BLUE, GREEN, INK, PURPLE, STATIC_WIDTH, TEMPLATE, VERMILLION
from comera_lab.panels.optimizer_lanes import Band

STYLES = {
    "adamw": (INK, "solid", "circle"),
    "galore": (VERMILLION, "dash", "diamond"),
    "flora": (PURPLE, "dot", "square"),
    "coap": (BLUE, "solid", "triangle-up"),
    "coap-8bit": (GREEN, "dashdot", "star"),
}
TRACES_A_LANE = 4
TITLES = {"steps": "steps", "seconds": "training seconds, measured here", "bytes": "MiB of optimizer state, measured"}


def race_figure(bands: Sequence[Band], axis: str, length: int) -> go.Figure:
    """Test loss (log) on the left, test accuracy on the right; `bands` has one entry per style, empty or not,
    `length` is how many steps a lane makes."""
    figure = make_subplots(
        1, 2, horizontal_spacing=0.1, subplot_titles=("test loss (nats, log)", "test accuracy (%)")
    )  # fmt: skip
    figure.update_layout(template=TEMPLATE, height=360, width=STATIC_WIDTH)
    figure.update_layout(margin={"l": 60, "r": 16, "t": 66, "b": 50}, legend={"y": 1.12})
    figure.update_annotations(font_size=14)
    ticks = [digit * 10.0**decade for decade in (-3, -2, -1, 0, 1) for digit in (1, 2, 5)]
    labels = [f"{tick:g}" for tick in ticks]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=labels, row=1, col=1, fixedrange=True)
    figure.update_yaxes(row=1, col=2, fixedrange=True)
    figure.update_xaxes(rangemode="tozero", fixedrange=True)
    for band in bands:
        colour, dash, symbol = STYLES[band.name]
        for column in (1, 2):
            same = {"name": band.name, "legendgroup": band.name}
            figure.add_trace(
                go.Scatter(**same, mode="lines", line={"width": 0}, fill="toself", fillcolor=_pale(colour),
                           hoverinfo="skip", showlegend=False),
                row=1, col=column,
            )  # fmt: skip
            figure.add_trace(
                go.Scatter(**same, mode="lines+markers", showlegend=False, line={"color": colour, "dash": dash},
                           marker={"symbol": symbol, "size": 8, "color": colour},
                           error_y={"type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 6}),
                row=1, col=column,
            )  # fmt: skip
    fill_race(figure, bands, axis, length)
    return figure


def fill_race(figure: go.Figure, bands: Sequence[Band], axis: str, length: int) -> None:
    """Change a `race_figure` into the one of these bands."""
    drawn = any(len(band.x) for band in bands)
    for k, band in enumerate(bands):
        traces = figure.data[TRACES_A_LANE * k : TRACES_A_LANE * (k + 1)]
        for (area, line), values in zip((traces[:2], traces[2:]), (band.loss_nats, band.accuracy_percent), strict=True):
            _fill(area, line, band.x, values, as_point=axis == "bytes")
        traces[1].showlegend = len(band.x) > 0
    figure.update_xaxes(title_text=TITLES[axis])
    limits = None if drawn and axis != "steps" else [0, 1.02 * length]
    for name in ("xaxis", "xaxis2"):
        figure.layout[name].range = limits
        figure.layout[name].autorange = True if limits is None else None
    figure.layout.yaxis.range, figure.layout.yaxis.autorange = (None, True) if drawn else ([-1.3, 0.4], None)
    figure.layout.yaxis2.range = _accuracy_range(bands) if drawn else [0, 101]


def _fill(area: Any, line: Any, x: Any, values: Any, *, as_point: bool) -> None:
    middle, least, largest = values
    several = bool((largest > least).any())
    line.x, line.y = x, middle
    line.mode = "markers" if as_point else "lines+markers"
    bars = as_point and several
    line.error_y.array = largest - middle if bars else None
    line.error_y.arrayminus = middle - least if bars else None
    around = several and not as_point
    area.x = np.concatenate([x, x[::-1]]) if around else np.empty(0)
    area.y = np.concatenate([largest, least[::-1]]) if around else np.empty(0)


def _accuracy_range(bands: Sequence[Band]) -> list[float]:
    """From below the lowest accuracy of the second half of the race, so that late differences are seen."""
    late = [band.accuracy_percent[1, len(band.x) // 2 :].min() for band in bands if len(band.x)]
    return [max(0.0, float(min(late)) - 6.0), 100.5]


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},.20)"
