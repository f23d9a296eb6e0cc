"""A roofline with points under it, and recorded times as bars with quantiles. Numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from comera_lab.experiments.recordings import Case
from comera_lab.experiments.roofline import Ceilings, Work
from comera_lab.panels.figures import BLUE, GREEN, INK, ORANGE, STATIC_WIDTH, TEMPLATE, VERMILLION

# colour, marker, size: two points may lie on one another, so the markers are of different sizes
WORK_STYLES = {
    "dense": (BLUE, "circle", 15),
    "half-chains": (VERMILLION, "diamond-open", 19),
    "fused": (GREEN, "square", 9),
}
INTENSITIES = (0.25, 8192.0)  # the x axis, FLOPs a byte
BAR_PX, AROUND_PX = 44, 128
# colour and pattern of bars by where their numbers come from
BAR_STYLES = {"recorded": (BLUE, ""), "measured here": (GREEN, ""), "computed": (ORANGE, "/")}


def roofline_figure(ceilings: Ceilings, dtype: str, works: Sequence[Work]) -> go.Figure:
    """The roof of one device over FLOPs a byte, and each way to compute the layer where it meets the roof."""
    figure = go.Figure(layout={"template": TEMPLATE, "height": 380, "width": STATIC_WIDTH})
    figure.update_layout(margin={"l": 84, "r": 16, "t": 44, "b": 50}, legend={"y": 1.03})
    figure.update_xaxes(
        type="log", title_text="FLOPs for each byte moved", range=list(np.log10(INTENSITIES)), fixedrange=True,
        tickvals=[0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
    )  # fmt: skip
    figure.update_yaxes(type="log", title_text="GFLOP/s", fixedrange=True, exponentformat="none", dtick=1)
    figure.add_trace(go.Scatter(name="roof", mode="lines", line={"color": INK, "width": 3}, hoverinfo="skip"))
    for name, (colour, symbol, size) in WORK_STYLES.items():
        figure.add_trace(go.Scatter(
            name=name, mode="markers", hovertemplate=f"{name}: %{{x:.3g}} FLOP/byte, at most %{{y:,.3g}} GFLOP/s",
            marker={"color": colour, "symbol": symbol, "size": size, "line": {"width": 3, "color": colour}},
        ))  # fmt: skip
    fill_roofline(figure, ceilings, dtype, works)
    return figure


def fill_roofline(figure: go.Figure, ceilings: Ceilings, dtype: str, works: Sequence[Work]) -> None:
    """Change a `roofline_figure` into the one of this device, dtype and layer."""
    ridge = ceilings.ridge(dtype)
    corners = np.array([INTENSITIES[0], ridge, max(INTENSITIES[1], 2 * ridge)])
    figure.data[0].x, figure.data[0].y = corners, _roof(ceilings, dtype, corners)
    for trace, work in zip(figure.data[1:], works, strict=True):
        at = np.array([work.intensity])
        trace.x, trace.y = at, _roof(ceilings, dtype, at)
    lowest, highest = (np.log10(value) for value in _roof(ceilings, dtype, np.array(INTENSITIES)))
    figure.layout.yaxis.range = [float(lowest) - 0.15, float(highest) + 0.35]
    figure.layout.annotations = [
        _note(np.log10(ridge) / 2 - 0.3, lowest + 0.25, "memory is the limit"),
        _note(np.log10(ridge) / 2 + np.log10(INTENSITIES[1]) / 2, highest + 0.2, "arithmetic is the limit"),
    ]
    figure.layout.shapes = [
        {"type": "line", "x0": ridge, "x1": ridge, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": INK, "width": 1, "dash": "dot"}}
    ]  # fmt: skip


def _roof(ceilings: Ceilings, dtype: str, intensity: Any) -> Any:
    """GFLOP/s at these FLOPs a byte."""
    return np.minimum(ceilings.bytes_per_s * intensity, ceilings.flops_per_s[dtype]) / 1e9


def _note(x: float, y: float, text: str) -> dict[str, Any]:
    return {"x": float(x), "y": float(y), "text": text, "showarrow": False, "font": {"size": 14, "color": INK}}


def trace_figure(case: Case, kind: str, height: int | None = None) -> go.Figure:
    """A bar for each provider, its median, whiskers from p20 to p80, and a diamond at the floor where one is known."""
    colour, pattern = BAR_STYLES[kind]
    names = [lane.provider for lane in case.lanes]
    times = [lane.time_ms for lane in case.lanes]
    figure = go.Figure(layout={"template": TEMPLATE, "width": STATIC_WIDTH})
    figure.update_layout(
        height=height or AROUND_PX + BAR_PX * len(names), bargap=0.35, legend={"y": 1.02},
        margin={"l": 150, "r": 70, "t": 44, "b": 50},
    )  # fmt: skip
    figure.update_xaxes(title_text=f"milliseconds, {kind}", rangemode="tozero", fixedrange=True)
    figure.update_yaxes(autorange="reversed", type="category", fixedrange=True, ticks="", showgrid=False)
    spread: dict[str, Any] = {}
    if all(lane.p20 is not None and lane.p80 is not None for lane in case.lanes):
        above = [(lane.p80 or 0.0) - lane.time_ms for lane in case.lanes]
        below = [lane.time_ms - (lane.p20 or 0.0) for lane in case.lanes]
        spread = {"error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below,
                              "color": INK, "thickness": 2, "width": 7}}  # fmt: skip
    figure.add_trace(go.Bar(
        name="floor" if kind == "computed" else "median, p20 to p80", showlegend=True,
        orientation="h", x=times, y=names,
        marker={"color": colour, "pattern": {"shape": pattern}},
        hovertemplate="%{y}: %{x:.4g} ms", **spread,
    ))  # fmt: skip
    floors = [(lane.floor_ms, lane.provider) for lane in case.lanes if lane.floor_ms is not None]
    figure.add_trace(go.Scatter(
        name="floor of that run", mode="markers", x=[x for x, _ in floors], y=[y for _, y in floors],
        marker={"color": VERMILLION, "symbol": "diamond", "size": 12}, showlegend=bool(floors),
        hovertemplate="floor %{x:.4g} ms",
    ))  # fmt: skip
    return figure
