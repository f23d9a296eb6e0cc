"""Numbers in, go.Figure out. No widgets, no training, no files: every picture can be tested and printed as it is.

All figures are legible on a light and on a dark page: transparent paper, mid-grey text (4.5:1 on white, 4.2:1 on
JupyterLab's dark), Okabe-Ito colours, and a dash, marker or pattern beside each colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from comera_lab.shapes import TTShape

Array = npt.NDArray[np.floating[Any]]

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
INK, GRID = "#767676", "rgba(128,128,128,.22)"
LANE_STYLES = ((BLUE, "solid", "circle"), (VERMILLION, "dash", "diamond"), (GREEN, "dot", "square"))
# colour, pattern, and the text colour that reads on both
POOL_STYLES = {
    "weights": (BLUE, "", "white"),
    "grads": (ORANGE, "/", "black"),
    "optimizer": (GREEN, "x", "black"),
    "activations": (PURPLE, ".", "black"),
}
# Zero is the page itself, so a matrix is neither a white nor a black slab.
SIGNED_SCALE = [[0.0, "rgb(213,94,0)"], [0.5, "rgba(128,128,128,0.04)"], [1.0, "rgb(0,114,178)"]]

_AXIS = {
    "gridcolor": GRID,
    "zerolinecolor": GRID,
    "linecolor": INK,
    "ticks": "outside",
    "tickcolor": GRID,
    "title": {"standoff": 8, "font": {"size": 14}},
    "tickfont": {"size": 14},
    "automargin": True,
}
TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 14, "family": "system-ui, -apple-system, Segoe UI, Helvetica, sans-serif"},
        "title": {"font": {"size": 15}, "x": 0, "xanchor": "left", "y": 0.98, "yanchor": "top"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "margin": {"l": 64, "r": 16, "t": 36, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "hovermode": "closest",
        "uirevision": "keep",
        "colorway": [BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE],
    }
)
STATIC_WIDTH = 960


def _blank(height: int, **layout: Any) -> dict[str, Any]:
    return {"template": TEMPLATE, "height": height, "width": STATIC_WIDTH, **layout}


# ---- the chain of cores ------------------------------------------------------------------------------------

BOND_PX = 26.0  # drawn width of the thickest bond


def core_diagram(shape: TTShape, scale_rank: int | None = None) -> go.Figure:
    """The train as a chain of boxes, one per core, legs for its modes and bonds as thick as their rank.

    `scale_rank` is the rank drawn `BOND_PX` wide; by default the largest rank of this shape.
    """
    figure = go.Figure(layout=_blank(204, margin={"l": 8, "r": 8, "t": 8, "b": 8}, showlegend=False))
    figure.update_xaxes(visible=False, range=[-0.6, len(shape.modes) - 0.4], fixedrange=True, automargin=False)
    figure.update_yaxes(visible=False, range=[0, 1], fixedrange=True, automargin=False)
    figure.add_trace(go.Scatter(mode="markers", marker={"size": 44, "opacity": 0}, hoverinfo="text", name="cores"))
    draw_cores(figure, shape, scale_rank)
    return figure


def draw_cores(figure: go.Figure, shape: TTShape, scale_rank: int | None = None) -> None:
    """Change a `core_diagram` into the one of `shape`."""
    count = len(shape.modes)
    thickest = max(scale_rank or max(shape.ranks), 1)
    size = 14 if count <= 8 else 12
    shapes, notes, hover = [], [], []
    for k in range(1, count):
        width = max(1.5, BOND_PX * min(shape.ranks[k] / thickest, 1.0))
        shapes.append(_line(k - 0.67, 0.62, k - 0.33, 0.62, "rgba(118,118,118,.75)", width))
        notes.append(_note(k - 0.5, 0.9, f"<b>{shape.ranks[k]}</b>", size))
    notes.append(_note(-0.42, 0.9, "rank", size))
    for k, (left, mode, right) in enumerate(shape.core_shapes):
        colour = BLUE if k < shape.split else ORANGE
        shapes.append(_line(k, 0.24, k, 0.46, colour, 2.5))
        shapes.append(_box(k - 0.33, 0.46, k + 0.33, 0.78, colour))
        notes.append(_note(k, 0.62, f"{left}·{mode}·{right}", size))
        notes.append(_note(k, 0.17, f"<b>{mode}</b>", size))
        side = "input" if k < shape.split else "output"
        hover.append(f"core {k + 1} of {count}: {left} × {mode} × {right} = {left * mode * right:,} numbers<br>"
                     f"carries {side} mode {mode}")
    middle_in, middle_out = (shape.split - 1) / 2, (shape.split + count - 1) / 2
    notes.append(_note(middle_in, 0.03, _product("inputs", shape.in_features, shape.in_modes), size))
    notes.append(_note(middle_out, 0.03, _product("outputs", shape.out_features, shape.out_modes), size))
    # Plain assignment: update_layout takes 100 ms for these lists, this takes 5.
    figure.layout.shapes, figure.layout.annotations = shapes, notes
    figure.layout.xaxis.range = [-0.6, count - 0.4]
    _put(figure.data[0], x=list(range(count)), y=[0.62] * count, text=hover)


def _put(target: Any, **values: Any) -> None:
    """Assign attributes of a trace or axis, without the cost of plotly's recursive `update`."""
    for name, value in values.items():
        target[name] = value


def _product(word: str, features: int, modes: Sequence[int]) -> str:
    whole = math.prod(modes)
    text = f"{features:,} {word}"
    if len(modes) > 1:
        text += f" = {' × '.join(map(str, modes))}"
    return text if whole == features else f"{text} − {whole - features} padded"


def _line(x0: float, y0: float, x1: float, y1: float, colour: str, width: float) -> dict[str, Any]:
    return {"type": "line", "x0": x0, "y0": y0, "x1": x1, "y1": y1, "line": {"color": colour, "width": width}}


def _box(x0: float, y0: float, x1: float, y1: float, colour: str) -> dict[str, Any]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return {
        "type": "rect", "x0": x0, "y0": y0, "x1": x1, "y1": y1,
        "line": {"color": colour, "width": 2}, "fillcolor": f"rgba({red},{green},{blue},.16)",
    }  # fmt: skip


def _note(x: float, y: float, text: str, size: int = 14) -> dict[str, Any]:
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": {"size": size}}


# ---- memory ------------------------------------------------------------------------------------------------


def memory_bars(rows: Mapping[str, Mapping[str, float]], widest: float | None = None, unit: str = "MiB") -> go.Figure:
    """One stacked bar per row. `rows` maps "predicted", "measured here", ... to {pool: how many of `unit`}.

    `widest` is where the axis ends, for bars that are to be compared with those of other figures.
    """
    figure = go.Figure(layout=_blank(96 + 62 * len(rows), barmode="stack", bargap=0.32, legend_traceorder="normal"))
    figure.update_xaxes(title_text=unit, rangemode="tozero", fixedrange=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", ticklabelstandoff=8, fixedrange=True)
    for pool, (colour, pattern, text_colour) in POOL_STYLES.items():
        figure.add_trace(go.Bar(
            name=pool, orientation="h", textposition="inside", insidetextanchor="middle", textangle=0,
            insidetextfont={"color": text_colour, "size": 14},
            marker={"color": colour, "line": {"width": 0},
                    "pattern": {"shape": pattern, "size": 9, "solidity": 0.15, "fillmode": "overlay",
                                "fgcolor": "rgba(255,255,255,.6)"}},
            hovertemplate="%{y}: %{x:.3f} " + f"{unit} {pool}" + "<extra></extra>",
        ))  # fmt: skip
    if widest is not None:
        figure.layout.xaxis.range = [0, widest]
    fill_memory(figure, rows)
    return figure


def fill_memory(figure: go.Figure, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Change a `memory_bars` figure into the one of `rows`."""
    names = list(rows)
    limits = figure.layout.xaxis.range
    widest = limits[1] if limits else max(sum(pools.values()) for pools in rows.values())
    for trace in figure.data:
        x = [rows[name][trace.name] for name in names]
        # A label that is wider than its piece of the bar would only be noise: the legend and the text line have it.
        _put(trace, y=names, x=x, text=[f"{value:.2f}" if value > 0.06 * widest else "" for value in x])
    figure.layout.height = 96 + 62 * len(rows)


# ---- training curves ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """One lane of a training figure: loss against x, and accuracy (percent) against its own, sparser x."""

    name: str
    x: Array
    loss_nats: Array
    eval_x: Array
    accuracy_percent: Array


def training_curves(curves: Sequence[Curve], x_title: str) -> go.Figure:
    """Training loss on the left (log scale), test accuracy on the right; a line per lane in each."""
    figure = make_subplots(
        1, 2, column_widths=[0.5, 0.5], horizontal_spacing=0.1,
        subplot_titles=("training loss (nats)", "test accuracy (%)"),
    )  # fmt: skip
    several = len(curves) > 1
    height, top = (300, 62) if several else (270, 34)
    figure.update_layout(_blank(height, margin={"l": 60, "r": 16, "t": top, "b": 50}))
    figure.update_layout(legend={"y": 1.14}, showlegend=several)
    figure.update_annotations(font_size=14)
    figure.update_yaxes(type="log", row=1, col=1, dtick=1, exponentformat="power", tickfont_size=12)
    figure.update_yaxes(range=[0, 101], row=1, col=2)
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    for curve, (colour, dash, marker) in zip(curves, LANE_STYLES, strict=False):
        line = {"color": colour, "dash": dash, "width": 2}
        figure.add_trace(go.Scatter(name=curve.name, legendgroup=curve.name, mode="lines", line=line), row=1, col=1)
        figure.add_trace(
            go.Scatter(name=curve.name, legendgroup=curve.name, showlegend=False, mode="lines+markers", line=line,
                       marker={"symbol": marker, "size": 6}),
            row=1, col=2,
        )  # fmt: skip
    fill_training(figure, curves)
    return figure


def fill_training(figure: go.Figure, curves: Sequence[Curve], x_title: str | None = None) -> None:
    """Change a `training_curves` figure with as many lanes into the one of `curves`."""
    drawn = any(len(curve.x) for curve in curves)
    empty = {"xaxis": [0, 100], "yaxis": [-2.0, 0.5], "xaxis2": [0, 100]}
    for axis, limits in empty.items():
        _put(figure.layout[axis], autorange=drawn or None, range=None if drawn else limits)
    for k, curve in enumerate(curves):
        _put(figure.data[2 * k], x=curve.x, y=curve.loss_nats, name=curve.name)
        _put(figure.data[2 * k + 1], x=curve.eval_x, y=curve.accuracy_percent, name=curve.name)
    if x_title is not None:
        figure.update_xaxes(title_text=x_title)


# ---- spectrum ----------------------------------------------------------------------------------------------

CORNER = 96  # rows and columns of a matrix that are drawn
FLOOR = 1e-6  # singular values below this share of the largest are rounding noise and drawn on this line


def spectrum_figure(values: Array, rank: int, matrix: Array, cut: Array) -> go.Figure:
    """Singular values on a log axis, and a corner of the matrix, of its truncation `cut` and of what was lost."""
    figure = make_subplots(
        1, 4, column_widths=[0.4, 0.2, 0.2, 0.2], horizontal_spacing=0.025,
        subplot_titles=("singular values", "matrix", "kept", "lost"),
    )  # fmt: skip
    figure.update_layout(_blank(330, margin={"l": 60, "r": 8, "t": 62, "b": 50}))
    figure.update_layout(legend={"y": 1.12})
    figure.update_annotations(font_size=14)
    figure.update_yaxes(type="log", exponentformat="power", tickfont_size=12, row=1, col=1, fixedrange=True)
    figure.update_xaxes(title_text="index", rangemode="tozero", row=1, col=1, fixedrange=True)
    for name, colour, symbol in (("kept", BLUE, "circle"), ("cut away", VERMILLION, "circle-open")):
        figure.add_trace(go.Scatter(name=name, mode="markers", marker={"color": colour, "symbol": symbol, "size": 6}),
                         row=1, col=1)
    for column in (2, 3, 4):
        figure.add_trace(go.Heatmap(colorscale=SIGNED_SCALE, zmid=0, showscale=False, hoverinfo="skip"),
                         row=1, col=column)
        figure.update_xaxes(visible=False, row=1, col=column, fixedrange=True, constrain="domain")
        figure.update_yaxes(visible=False, row=1, col=column, fixedrange=True, autorange="reversed",
                            scaleanchor=f"x{column}", constrain="domain")
    fill_spectrum(figure, values, rank, matrix, cut)
    return figure


def fill_spectrum(figure: go.Figure, values: Array, rank: int, matrix: Array, cut: Array) -> None:
    """Change a `spectrum_figure` into the one of these numbers."""
    index = np.arange(1, len(values) + 1)
    drawn = np.maximum(values, FLOOR * values[0])
    _label_decades(figure.layout.yaxis, float(drawn[-1]), float(drawn[0]))
    shown = np.unique(np.linspace(0, len(values) - 1, 500).round().astype(np.int64))
    kept, lost = shown[shown < rank], shown[shown >= rank]
    _put(figure.data[0], x=index[kept], y=drawn[kept])
    _put(figure.data[1], x=index[lost], y=drawn[lost])
    corner = matrix[:CORNER, :CORNER].astype(np.float32)
    corner_cut = cut[:CORNER, :CORNER].astype(np.float32)
    # One scale for all three, so that the residual is seen at its true size.
    limit = float(np.abs(corner).max()) or 1.0
    for trace, z in zip(figure.data[2:], (corner, corner_cut, corner - corner_cut), strict=True):
        _put(trace, z=z, zmin=-limit, zmax=limit)


def _label_decades(axis: Any, low: float, high: float) -> None:
    """Labels of a log axis: powers of ten, or some digits of each decade where there are fewer than two."""
    if high > 100 * low:
        _put(axis, tickvals=None, ticktext=None, dtick=1)
        axis.tickfont.size = 12  # plotly writes 10 in 10² a quarter larger
        return
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high > 10 * low else (1, 2, 3, 5, 7)
    values = [digit * 10.0**decade for decade in decades for digit in digits]
    _put(axis, dtick=None, tickvals=values, ticktext=[f"{value:g}" for value in values])
    axis.tickfont.size = 14


# ---- without a kernel --------------------------------------------------------------------------------------

_STEP_KEYS = ("x", "y", "z", "text", "name")


def with_slider(figures: Sequence[tuple[str, go.Figure]], prefix: str, active: int = 0) -> go.Figure:
    """Several figures of one structure as a single figure with a slider that works with no kernel.

    `figures` are (label, figure) pairs. Every position carries its own data, shapes and annotations.
    """
    steps = []
    for label, figure in figures:
        traces = [_plain(trace.to_plotly_json()) for trace in figure.data]
        data = {key: [trace.get(key) for trace in traces] for key in _STEP_KEYS if any(key in t for t in traces)}
        layout = {"shapes": [], "annotations": [], **_plain(figure.layout.to_plotly_json())}
        moved = {key: layout[key] for key in ("shapes", "annotations")}
        if "range" in layout.get("xaxis", {}):
            moved["xaxis.range"] = layout["xaxis"]["range"]
        steps.append({"label": label, "method": "update", "args": [data, moved]})
    whole = go.Figure(figures[active][1])
    slider = {
        "active": active, "steps": steps, "currentvalue": {"prefix": prefix, "font": {"size": 14}},
        "pad": {"t": 46, "b": 8}, "len": 0.9, "x": 0.05,
    }  # fmt: skip
    below = 100
    bottom = whole.layout.margin.b
    whole.layout.margin.b = below + (TEMPLATE.layout.margin.b if bottom is None else bottom)
    whole.update_layout(sliders=[slider], height=whole.layout.height + below)
    return whole


def _plain(value: Any) -> Any:
    """Arrays as lists of four digits, at every depth: plotly's slider arguments take nothing else."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
