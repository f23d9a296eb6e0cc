"""Ranks over time, size against its target, accuracy; and all finished runs as dots. Numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from comera_lab.panels.figures import BLUE, GREEN, INK, STATIC_WIDTH, TEMPLATE, VERMILLION

Array = npt.NDArray[np.floating[Any]]

LEFT, RIGHT = 0.46, 0.62  # where the strip ends and the curves begin, as shares of the width
COLUMNS = 150  # of the strip: about as many as it has pixels to tell apart
# Nothing left is the page itself; a bond that is fully open is solid.
OPEN_SCALE = [[0.0, "rgba(0,114,178,0.03)"], [1.0, "rgba(0,114,178,1)"]]


@dataclass(frozen=True)
class RankHistory:
    """Live ranks of every bond, or layer, (rows, points) with the sizes they add up to, and accuracy on its own steps.

    `target_mib` is the size allowed for what `target_name` counts, `late_from` the step at which steering begins,
    `length` the steps that the run will have.
    """

    bonds: tuple[str, ...]
    started: tuple[int, ...]
    steps: Array = field(default_factory=lambda: np.empty(0))
    live: Array = field(default_factory=lambda: np.empty((0, 0)))
    cores_mib: Array = field(default_factory=lambda: np.empty(0))
    total_mib: Array = field(default_factory=lambda: np.empty(0))
    eval_steps: Array = field(default_factory=lambda: np.empty(0))
    accuracy_percent: Array = field(default_factory=lambda: np.empty(0))
    target_mib: float | None = None
    target_name: str = "no target"
    late_from: int | None = None
    length: int = 100
    accuracy_name: str = "test accuracy"

    def until(self, share: float) -> RankHistory:
        """The history as it was after that share of its steps."""
        if not len(self.steps) or share >= 1:
            return self
        last = share * float(self.steps[-1])
        seen, tested = self.steps <= last, self.eval_steps <= last
        return replace(
            self, steps=self.steps[seen], live=self.live[:, seen], cores_mib=self.cores_mib[seen],
            total_mib=self.total_mib[seen], eval_steps=self.eval_steps[tested],
            accuracy_percent=self.accuracy_percent[tested],
        )  # fmt: skip


def rank_figure(history: RankHistory) -> go.Figure:
    """Left a strip of live ranks, a row per bond or layer; right size against its target, and accuracy below it."""
    figure = make_subplots(
        2, 2, column_widths=[LEFT, 1 - RIGHT], horizontal_spacing=RIGHT - LEFT, vertical_spacing=0.2,
        specs=[[{"rowspan": 2}, {}], [None, {}]],
    )  # fmt: skip
    figure.update_layout(template=TEMPLATE, height=430, width=STATIC_WIDTH)
    figure.update_layout(margin={"l": 124, "r": 12, "t": 66, "b": 50}, legend={"x": RIGHT - 0.01, "y": 1.005})
    figure.add_trace(
        go.Heatmap(zmin=0, zmax=1, colorscale=OPEN_SCALE, showscale=False, ygap=3, name="live ranks",
                   hovertemplate="%{y}, step %{x}: %{text} live<extra></extra>"),
        row=1, col=1,
    )  # fmt: skip
    lines = (("whole model", GREEN, "solid", 2), ("cores", BLUE, "solid", 3), ("target", VERMILLION, "dash", 2))
    for name, colour, dash, width in lines:
        line = {"color": colour, "dash": dash, "width": width}
        figure.add_trace(go.Scatter(name=name, mode="lines", line=line), row=1, col=2)
    figure.add_trace(
        go.Scatter(name="accuracy", mode="lines+markers", showlegend=False, line={"color": GREEN, "width": 2},
                   marker={"symbol": "circle", "size": 6}),
        row=2, col=2,
    )  # fmt: skip
    figure.update_xaxes(title_text="step", row=1, col=1, showgrid=False, fixedrange=True)
    figure.update_xaxes(title_text="step", row=2, col=2, rangemode="tozero", fixedrange=True)
    figure.update_xaxes(showticklabels=False, row=1, col=2, rangemode="tozero", fixedrange=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", row=1, col=1, fixedrange=True)
    figure.update_yaxes(rangemode="tozero", row=1, col=2, fixedrange=True, nticks=5)
    figure.update_yaxes(range=[0, 101], row=2, col=2, fixedrange=True, nticks=5)
    fill_ranks(figure, history)
    return figure


def fill_ranks(figure: go.Figure, history: RankHistory) -> None:
    """Change a `rank_figure` into the one of `history`."""
    strip, whole, cores, target, accuracy = figure.data
    steps = history.steps if len(history.steps) else np.zeros(1)
    columns = _columns(steps)
    started = np.asarray(history.started, dtype=float)[:, None]
    live = history.live[:, columns] if history.live.size else started
    width = 1.015 * history.length
    # n + 1 edges: a cell lasts until the next row of the history, the newest one a sliver.
    strip.x, strip.y = np.append(steps[columns], steps[-1] + 0.015 * history.length), list(history.bonds)
    strip.z = (live / started).astype(np.float32)
    strip.text = [[f"{int(rank)} of {full}" for rank in row] for row, full in zip(live, history.started, strict=True)]
    whole.x, whole.y = history.steps, history.total_mib
    cores.x, cores.y = history.steps, history.cores_mib
    # A target that steers only later is drawn from there on.
    ends = [history.late_from or 0, width] if history.target_mib is not None else []
    target.x, target.y = ends, [history.target_mib] * len(ends)
    accuracy.x, accuracy.y = history.eval_steps, history.accuracy_percent
    for axis in ("xaxis", "xaxis2", "xaxis3"):
        figure.layout[axis].range = [0, width]
    figure.layout.yaxis2.range = None if len(history.steps) else [0, 0.1]
    figure.layout.annotations = _notes(history)
    figure.layout.shapes = _stage_line(history)


def _columns(steps: Array) -> npt.NDArray[np.int64]:
    """At most COLUMNS rows of a history, the last one of every step: a cut makes two rows at one step."""
    last = np.flatnonzero(np.append(np.diff(steps) > 0, True))
    return np.asarray(last[np.linspace(0, len(last) - 1, min(len(last), COLUMNS)).round().astype(np.int64)])


def _notes(history: RankHistory) -> list[dict[str, Any]]:
    def note(x: float, y: float, text: str, **more: Any) -> dict[str, Any]:
        place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "middle", "showarrow": False}
        return {**place, "x": x, "y": y, "text": text, **more}

    titles = [
        note(0.0, 1.02, "live ranks (full colour: all open)", yanchor="bottom"),
        note(RIGHT, 1.11, f"MiB of weights ({history.target_name})", yanchor="bottom"),
        note(RIGHT, 0.415, f"{history.accuracy_name} (%)", yanchor="bottom"),
    ]
    now = history.live[:, -1] if history.live.size else history.started
    rows = [
        note(LEFT, k, f"<b>{int(rank)}</b> of {full}", yref="y", font={"size": 14})
        for k, (rank, full) in enumerate(zip(now, history.started, strict=True))
    ]
    return [*titles, *rows]


def _stage_line(history: RankHistory) -> list[dict[str, Any]]:
    """A vertical line where the late stage begins, in each part."""
    if not history.late_from:
        return []
    line = {"color": INK, "width": 1.5, "dash": "dot"}
    return [
        {"type": "line", "x0": history.late_from, "x1": history.late_from, "xref": x, "y0": 0, "y1": 1,
         "yref": f"{y} domain", "line": line}
        for x, y in (("x", "y"), ("x2", "y2"), ("x3", "y3"))
    ]  # fmt: skip


# ---- finished runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A run or a reference: x in the unit of the axis, accuracy in percent, `label` beside it, `hover` in full.

    `span` is the lowest and highest accuracy of its seeds.
    """

    label: str
    x: float
    accuracy_percent: float
    hover: str
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class Upright:
    """A size whose accuracy belongs to other data: a vertical line with its label."""

    label: str
    x: float


def pareto_figure(
    runs: Sequence[Dot],
    references: Sequence[Dot],
    uprights: Sequence[Upright],
    x_title: str,
    smaller_is_better: bool,
    y_title: str = "test accuracy (%)",
) -> go.Figure:
    """Accuracy against size on a log axis; the line joins the runs that no other run beats in both."""
    figure = go.Figure(layout={"template": TEMPLATE, "height": 380, "width": STATIC_WIDTH})
    figure.update_layout(margin={"l": 64, "r": 16, "t": 58, "b": 50}, legend={"yref": "container", "y": 0.99,
                         "yanchor": "top"}, showlegend=True)  # fmt: skip
    figure.add_trace(go.Scatter(name="best of your runs", mode="lines", hoverinfo="skip",
                                line={"color": BLUE, "dash": "dot", "width": 2, "shape": "linear"}))
    figure.add_trace(go.Scatter(name="your runs", mode="markers+text", textposition="top center", hoverinfo="text",
                                marker={"color": BLUE, "symbol": "circle", "size": 13}))
    diamond = {"color": VERMILLION, "symbol": "diamond-open", "size": 11, "line": {"width": 2}}
    figure.add_trace(go.Scatter(name="recorded", mode="markers+text", hoverinfo="text", marker=diamond))
    figure.update_yaxes(title_text=y_title, fixedrange=True)
    fill_pareto(figure, runs, references, uprights, x_title, smaller_is_better)
    return figure


def fill_pareto(
    figure: go.Figure,
    runs: Sequence[Dot],
    references: Sequence[Dot],
    uprights: Sequence[Upright],
    x_title: str,
    smaller_is_better: bool,
) -> None:
    """Change a `pareto_figure` into the one of these dots."""
    best = front(runs, smaller_is_better)
    figure.data[0].x, figure.data[0].y = [dot.x for dot in best], [dot.accuracy_percent for dot in best]
    for trace, dots in zip(figure.data[1:], (runs, references), strict=True):
        trace.x, trace.y = [dot.x for dot in dots], [dot.accuracy_percent for dot in dots]
        trace.text, trace.hovertext = [dot.label for dot in dots], [dot.hover for dot in dots]
    # Neighbours by size often stand close: one label above, the next below.
    by_size = sorted(range(len(references)), key=lambda k: references[k].x)
    figure.data[2].textposition = [
        ("bottom right", "top left")[by_size.index(k) % 2] for k in range(len(references))
    ]
    means, spans = [dot.accuracy_percent for dot in references], [dot.span for dot in references]
    figure.data[2].error_y = {
        "type": "data", "symmetric": False, "thickness": 1.5, "width": 4, "color": VERMILLION,
        "array": [span[1] - mean if span else 0.0 for mean, span in zip(means, spans, strict=True)],
        "arrayminus": [mean - span[0] if span else 0.0 for mean, span in zip(means, spans, strict=True)],
    }  # fmt: skip
    everything = [dot.x for dot in (*runs, *references)] + [line.x for line in uprights]
    low, high = min(everything, default=0.01), max(everything, default=1.0)
    ticks = [digit * 10.0**decade for decade in range(-4, 6) for digit in (1, 2, 5)]
    figure.layout.xaxis = {
        "type": "log", "title": {"text": x_title}, "range": [np.log10(low / 1.6), np.log10(high * 1.6)],
        "tickvals": ticks, "ticktext": [f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks],
        "fixedrange": True,
    }  # fmt: skip
    ends = [dot.span or (dot.accuracy_percent, dot.accuracy_percent) for dot in (*runs, *references)]
    lowest, highest = min((low for low, _ in ends), default=60.0), max((top for _, top in ends), default=100.0)
    room = 0.25 * (highest - lowest) + 1  # for the labels above and below
    figure.layout.yaxis.range = [max(0.0, lowest - room), highest + room]
    figure.layout.shapes = [
        {"type": "line", "x0": line.x, "x1": line.x, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": INK, "width": 1.5, "dash": "dash"}}
        for line in uprights
    ]  # fmt: skip
    figure.layout.annotations = [
        {"x": np.log10(line.x), "y": 0.02 + 0.09 * k, "yref": "paper", "text": line.label, "showarrow": False,
         "xanchor": "right", "yanchor": "bottom", "xshift": -4}
        for k, line in enumerate(uprights)
    ]  # fmt: skip


def front(dots: Sequence[Dot], smaller_is_better: bool) -> list[Dot]:
    """The dots that no other dot beats in size and accuracy both, by size."""
    sign = 1 if smaller_is_better else -1
    best: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (sign * dot.x, -dot.accuracy_percent)):
        if not best or dot.accuracy_percent > best[-1].accuracy_percent:
            best.append(dot)
    return best
