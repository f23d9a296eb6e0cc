"""A grid of generated digits beside the noise error over the steps. Numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from comera_lab.panels.figures import BLUE, GREEN, INK, STATIC_WIDTH, TEMPLATE, VERMILLION, Array
from comera_lab.panels.pictures import INK_SCALE

GRID_SHARE, CURVES_FROM = 0.40, 0.49  # where the grid ends and the curves begin, as shares of the width
STYLES = ((INK, "dot"), (VERMILLION, "dash"), (BLUE, "solid"), (GREEN, "longdash"))


@dataclass(frozen=True)
class ErrorLine:
    """Noise error of one training, averaged over a few steps each."""

    name: str
    steps: Array = field(default_factory=lambda: np.empty(0))
    error: Array = field(default_factory=lambda: np.empty(0))


def diffusion_figure(grid: Array, caption: str, lines: Sequence[ErrorLine], length: int) -> go.Figure:
    """Left `grid`, brightness in [0, 1], under its caption; right a line for each training, on a log scale."""
    figure = make_subplots(
        1, 2, column_widths=[GRID_SHARE, 1 - CURVES_FROM], horizontal_spacing=CURVES_FROM - GRID_SHARE
    )
    figure.update_layout(template=TEMPLATE, height=400, width=STATIC_WIDTH)
    figure.update_layout(margin={"l": 8, "r": 14, "t": 66, "b": 48}, legend={"x": CURVES_FROM, "y": 1.005})
    figure.add_trace(
        go.Heatmap(zmin=0, zmax=1, colorscale=INK_SCALE, showscale=False, hoverinfo="skip", name="digits"),
        row=1, col=1,
    )  # fmt: skip
    for line, (colour, dash) in zip(lines, STYLES, strict=True):
        figure.add_trace(
            go.Scatter(name=line.name, mode="lines", line={"color": colour, "width": 2.5, "dash": dash}), row=1, col=2
        )
    figure.update_xaxes(visible=False, fixedrange=True, constrain="domain", row=1, col=1)
    figure.update_yaxes(
        visible=False, fixedrange=True, autorange="reversed", scaleanchor="x", constrain="domain", row=1, col=1
    )
    figure.update_xaxes(title_text="step", fixedrange=True, row=1, col=2)
    figure.update_yaxes(
        type="log", range=[np.log10(0.12), np.log10(1.2)], tickvals=[0.15, 0.2, 0.3, 0.5, 1], fixedrange=True,
        row=1, col=2,
    )  # fmt: skip
    fill_diffusion(figure, grid, caption, lines, length)
    return figure


def fill_diffusion(figure: go.Figure, grid: Array, caption: str, lines: Sequence[ErrorLine], length: int) -> None:
    """Change a `diffusion_figure` into the one of these numbers; a line without steps is not in the legend."""
    figure.data[0].z = np.round(grid, 2)
    for trace, line in zip(figure.data[1:], lines, strict=True):
        trace.x, trace.y, trace.showlegend = line.steps, line.error, len(line.steps) > 0
    figure.layout.xaxis2.range = [0, 1.02 * length]
    note = {"xref": "paper", "yref": "paper", "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    figure.layout.annotations = [
        {**note, "x": 0, "y": 1.005, "text": caption},
        {**note, "x": CURVES_FROM, "y": 1.09, "text": "error of the told noise (log; 1 is knowing nothing)"},
    ]
