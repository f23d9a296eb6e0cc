"""What a moving basis captures, and how far it moves; bytes of projected optimizers. Numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from comera_lab.panels.figures import BLUE, GREEN, INK, ORANGE, PURPLE, STATIC_WIDTH, TEMPLATE, VERMILLION, Array

FLOOR_DEGREES = 1e-8  # a basis that did not move at all is drawn here, crossed
STILL = "moved not one bit"
STYLES = (
    (PURPLE, "dot", "square"),
    (VERMILLION, "dash", "diamond"),
    (ORANGE, "dashdot", "triangle-up"),
    (BLUE, "solid", "circle"),
    (GREEN, "longdash", "star"),
)
SPLIT = 0.56  # where the left chart ends, as a share of the width


@dataclass(frozen=True)
class BasisLine:
    """One replay: energy (percent) at each step, and at each update its angle in degrees, 0 where nothing moved."""

    name: str
    steps: Array = field(default_factory=lambda: np.empty(0))
    energy_percent: Array = field(default_factory=lambda: np.empty(0))
    update_steps: Array = field(default_factory=lambda: np.empty(0))
    angle_degrees: Array = field(default_factory=lambda: np.empty(0))


def projection_figure(lines: Sequence[BasisLine], best: BasisLine, length: int) -> go.Figure:
    """Left the captured energy over the steps with the best possible above it, right the angle of each update."""
    figure = make_subplots(1, 2, column_widths=[SPLIT, 1 - SPLIT], horizontal_spacing=0.11)
    figure.update_layout(template=TEMPLATE, height=380, width=STATIC_WIDTH)
    figure.update_layout(margin={"l": 56, "r": 14, "t": 88, "b": 48}, legend={"y": 1.1})
    figure.add_trace(
        go.Scatter(name=best.name, mode="lines", line={"color": INK, "width": 1.5, "dash": "dot"}), row=1, col=1
    )
    for line, (colour, dash, _) in zip(lines, STYLES, strict=True):
        figure.add_trace(
            go.Scatter(name=line.name, legendgroup=line.name, mode="lines",
                       line={"color": colour, "width": 2.5, "dash": dash}),
            row=1, col=1,
        )  # fmt: skip
        figure.add_trace(
            go.Scatter(name=line.name, legendgroup=line.name, showlegend=False, mode="markers",
                       marker={"color": colour, "size": 9}, hovertemplate="step %{x}: %{text}<extra></extra>"),
            row=1, col=2,
        )  # fmt: skip
    for column in (1, 2):
        figure.update_xaxes(title_text="step", range=[0, 1.02 * length], fixedrange=True, row=1, col=column)
    figure.update_yaxes(range=[0, 103], fixedrange=True, row=1, col=1)
    decades = range(-6, 1, 2)
    figure.update_yaxes(
        type="log", fixedrange=True, range=[np.log10(FLOOR_DEGREES) - 0.4, 2.25], tickfont_size=12,
        tickvals=[FLOOR_DEGREES, *(10.0**k for k in decades), 90], row=1, col=2,
        ticktext=["0", *(f"{10.0**k:g}" for k in decades), "90"],
    )  # fmt: skip
    note = {"xref": "paper", "yref": "paper", "y": 1.005, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    figure.layout.annotations = [
        {**note, "x": 0, "text": "gradient energy captured (%)"},
        {**note, "x": 0.61, "text": "how far P turned (degrees, log)"},
    ]
    fill_projection(figure, lines, best)
    return figure


def fill_projection(figure: go.Figure, lines: Sequence[BasisLine], best: BasisLine) -> None:
    """Change a `projection_figure` into the one of these lines; a line without steps is not in the legend."""
    figure.data[0].x, figure.data[0].y, figure.data[0].name = best.steps, best.energy_percent, best.name
    figure.data[0].showlegend = len(best.steps) > 0
    for k, (line, (_, _, symbol)) in enumerate(zip(lines, STYLES, strict=True)):
        energy, angle = figure.data[1 + 2 * k], figure.data[2 + 2 * k]
        energy.x, energy.y = line.steps, line.energy_percent
        energy.showlegend = len(line.steps) > 0
        still = line.angle_degrees == 0
        angle.x, angle.y = line.update_steps, np.maximum(line.angle_degrees, FLOOR_DEGREES)
        angle.marker.symbol = [("x-thin-open" if is_still else symbol) for is_still in still]
        angle.marker.line.width = [2.5 if is_still else 0.0 for is_still in still]
        angle.text = [STILL if is_still else f"{a:.2g}°" for is_still, a in zip(still, line.angle_degrees, strict=True)]


def byte_bars(mib_of: Mapping[str, float], widest: float, title: str) -> go.Figure:
    """Predicted MiB of each optimizer as a bar."""
    figure = go.Figure(layout={"template": TEMPLATE, "height": 290, "width": STATIC_WIDTH, "showlegend": False})
    figure.add_trace(
        go.Bar(x=list(mib_of.values()), y=list(mib_of), orientation="h", marker={"color": BLUE}, width=0.6,
               text=[f"{value:.2f}" for value in mib_of.values()], textposition="outside", cliponaxis=False)
    )  # fmt: skip
    figure.update_xaxes(title_text=title, range=[0, 1.1 * widest], fixedrange=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", ticklabelstandoff=8, fixedrange=True)
    return figure
