"""The tensors of a small kernel as cells, and what one load or store does to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from comera_lab.kernels.pointer_model import Access, Trace
from comera_lab.panels.figures import STATIC_WIDTH, TEMPLATE

# untouched, touched before, masked, read now, written now: half transparent, so that the page's own text reads on all
FILLS = ("rgba(128,128,128,.12)", "rgba(128,128,128,.38)", "rgba(213,94,0,.28)", "rgba(0,114,178,.55)",
         "rgba(230,159,0,.6)")  # fmt: skip
UNTOUCHED, TOUCHED, MASKED, READ, WRITTEN = range(len(FILLS))
_STEPS = len(FILLS)
SCALE = [[(k + end) / _STEPS, fill] for k, fill in enumerate(FILLS) for end in (0, 1)]
CELL_PX, GAP = 30, 2


def memory_figure(trace: Trace, position: int) -> go.Figure:
    """All tensors of a launch at access number `position`, a cell for each element."""
    grids = {name: _grid(trace, name) for name in trace.tensors}
    places, height, width = _places(list(grids.values()), _stacked(trace))
    cell = min(CELL_PX, (STATIC_WIDTH - 40) // width)
    figure = go.Figure(layout={"template": TEMPLATE, "width": STATIC_WIDTH, "height": round(cell * height) + 24})
    figure.update_layout(margin={"l": 8, "r": 8, "t": 8, "b": 8}, showlegend=False)
    figure.update_xaxes(
        visible=False, range=[-0.6, width - 0.4], fixedrange=True, constrain="domain", constraintoward="left"
    )
    figure.update_yaxes(visible=False, range=[height - 1.4, -1.6], fixedrange=True, scaleanchor="x", constrain="domain")
    for (name, (rows, columns)), (top, left) in zip(grids.items(), places, strict=True):
        figure.add_trace(go.Heatmap(
            name=name, x0=left, dx=1, y0=top, dy=1, xgap=2, ygap=2, zmin=-0.5, zmax=_STEPS - 0.5, colorscale=SCALE,
            showscale=False, texttemplate="%{text}", textfont={"size": 14}, hovertemplate="%{hovertext}<extra></extra>",
            hovertext=[[f"{name} + {row * columns + k}" for k in range(columns)] for row in range(rows)],
        ))  # fmt: skip
        sizes = " × ".join(map(str, trace.tensors[name].shape))
        figure.add_annotation(
            x=left - 0.5, y=top - 1.05, text=f"<b>{name}</b> {sizes}", showarrow=False, xanchor="left", font_size=14
        )
    fill_memory_cells(figure, trace, position)
    return figure


def fill_memory_cells(figure: go.Figure, trace: Trace, position: int) -> None:
    """Change a `memory_figure` of this trace into the one at another access."""
    for drawn in figure.data:
        shape = _grid(trace, drawn.name)
        codes, marks = cell_states(trace, drawn.name, position)
        if _stacked(trace):  # room behind the end, for lanes that are masked there
            spare = shape[1] - len(codes)
            beyond = _masked_beyond(trace, drawn.name, position, len(codes), spare)
            codes = np.concatenate([codes, np.where(beyond, MASKED, np.nan)])
            marks = np.concatenate([marks, np.where(beyond, "×", "")])
        drawn.z, drawn.text = codes.reshape(shape), marks.reshape(shape).tolist()


def cell_states(trace: Trace, name: str, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat codes (indices into FILLS) and marks of a tensor: R, W, ×, · for touched once, else how often."""
    size = trace.tensors[name].numel()
    count = np.zeros(size, dtype=int)
    for access in trace.accesses[:position]:
        if access.tensor == name:
            np.add.at(count, access.offsets[access.active], 1)
    codes = np.where(count > 0, TOUCHED, UNTOUCHED)
    marks = np.array(["" if n == 0 else "·" if n == 1 else str(n) for n in count], dtype=object)
    now = trace.accesses[position]
    if now.tensor == name:
        inside = now.offsets[~now.active]
        inside = inside[(inside >= 0) & (inside < size)]
        codes[inside], marks[inside] = MASKED, "×"
        active = now.offsets[now.active]
        codes[active], marks[active] = (WRITTEN, "W") if now.writes else (READ, "R")
    return codes, marks


def address_words(access: Access, size: int, most: int = 16) -> str:
    """The addresses of all lanes, masked ones in brackets, and how many of those lie outside the tensor."""
    lanes = [
        str(offset) if on else f"({offset})"
        for offset, on in zip(access.offsets.tolist(), access.active.tolist(), strict=True)
    ]
    shown = ", ".join(lanes[:most]) + (f", … {len(lanes)} lanes in all" if len(lanes) > most else "")
    masked = access.offsets[~access.active]
    outside = int(((masked < 0) | (masked >= size)).sum())
    text = f"{access.tensor} + {shown}"
    if len(masked):
        text += f". In brackets: masked, not touched; {outside} of {len(masked)} lie outside {access.tensor}"
    return text + "."


def _stacked(trace: Trace) -> bool:
    """Vectors alone are drawn one above the other."""
    return all(tensor.ndim == 1 for tensor in trace.tensors.values())


def _grid(trace: Trace, name: str) -> tuple[int, int]:
    shape = tuple(trace.tensors[name].shape)
    if _stacked(trace):
        return 1, max(shape[0], *(int(access.offsets.max()) + 1 for access in trace.accesses))
    return (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])


def _masked_beyond(trace: Trace, name: str, position: int, size: int, spare: int) -> np.ndarray:
    """Which of the `spare` places behind the end of a vector have a masked lane now."""
    now, beyond = trace.accesses[position], np.zeros(spare, dtype=bool)
    if now.tensor == name:
        masked = now.offsets[~now.active]
        beyond[masked[masked >= size] - size] = True
    return beyond


def _places(grids: Sequence[tuple[int, int]], stacked: bool) -> tuple[list[tuple[int, int]], int, int]:
    """Top left cell of every grid, and the height and width of all in cells, titles included."""
    places, edge = [], 0
    for rows, columns in grids:
        places.append((edge, 0) if stacked else (0, edge))
        # a title wants room beside the next one
        edge += rows + GAP if stacked else max(columns, 4) + GAP
    if stacked:
        return places, edge, max(columns for _, columns in grids)
    return places, max(rows for rows, _ in grids) + 2, edge - GAP


def positions(trace: Trace, most: int) -> list[int]:
    """At most `most` evenly spread access numbers, the first and the last among them."""
    last = len(trace.accesses) - 1
    step = max(1, math.ceil(last / (most - 1)))
    return sorted({*range(0, last, step), last})
