"""Losses of a language model on code between the marks that counting reaches. Numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go

from comera_lab.experiments.ngrams import Marks
from comera_lab.panels.figures import BLUE, GREEN, INK, STATIC_WIDTH, TEMPLATE, VERMILLION, Array

STYLES = (
    (INK, "solid", "circle"),
    (VERMILLION, "dash", "diamond"),
    (BLUE, "dot", "square"),
    (GREEN, "dashdot", "star"),
)


@dataclass(frozen=True)
class LossLine:
    """One training: its batch losses, averaged over a few steps each, and its validation losses."""

    name: str
    steps: Array = field(default_factory=lambda: np.empty(0))
    loss_nats: Array = field(default_factory=lambda: np.empty(0))
    test_steps: Array = field(default_factory=lambda: np.empty(0))
    test_loss_nats: Array = field(default_factory=lambda: np.empty(0))


def loss_figure(lines: Sequence[LossLine], length: int, found: Marks | None) -> go.Figure:
    """A thin line of batch losses and a marked line of validation losses for each training."""
    figure = go.Figure(layout={"template": TEMPLATE, "height": 380, "width": STATIC_WIDTH})
    figure.update_layout(margin={"l": 64, "r": 16, "t": 56, "b": 50}, legend={"y": 1.01})
    for line, (colour, dash, symbol) in zip(lines, STYLES, strict=True):
        same = {"legendgroup": line.name, "name": line.name}
        figure.add_trace(go.Scatter(**same, mode="lines", line={"color": colour, "width": 1}, opacity=0.45,
                                    showlegend=False, hoverinfo="skip"))  # fmt: skip
        figure.add_trace(go.Scatter(**same, mode="lines+markers", line={"color": colour, "width": 2.5, "dash": dash},
                                    marker={"symbol": symbol, "size": 9}, showlegend=False))  # fmt: skip
    figure.update_xaxes(title_text="step", fixedrange=True)
    figure.update_yaxes(title_text="loss (nats per token)", fixedrange=True, range=[3.5, 7.1])
    fill_losses(figure, lines, length, found)
    return figure


def fill_losses(figure: go.Figure, lines: Sequence[LossLine], length: int, found: Marks | None) -> None:
    """Change a `loss_figure` into the one of these lines; `found` None draws no marks."""
    for number, line in enumerate(lines):
        thin, marked = figure.data[2 * number : 2 * number + 2]
        thin.x, thin.y = line.steps, line.loss_nats
        marked.x, marked.y = line.test_steps, line.test_loss_nats
        marked.showlegend = len(line.steps) > 0
    figure.layout.xaxis.range = [0, 1.02 * length]
    shapes, notes = [], []
    for text, height in _marks(found):
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height,
                       "line": {"color": INK, "width": 1.5, "dash": "dot"}})  # fmt: skip
        notes.append({"xref": "paper", "x": 1, "xanchor": "right", "y": height, "yanchor": "bottom", "text": text,
                      "showarrow": False, "font": {"size": 14}})  # fmt: skip
    figure.layout.shapes, figure.layout.annotations = shapes, notes


def _marks(found: Marks | None) -> list[tuple[str, float]]:
    if found is None:
        return []
    return [
        ("all tokens alike", found.uniform),
        ("how often each token comes", found.unigram),
        ("what follows each token", found.bigram),
    ]
