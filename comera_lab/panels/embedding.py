"""Lesson 07: what a table of ids costs, dense and as a TT-matrix: sizes in closed form, steps timed on real tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from statistics import median

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor, nn

from comera_lab.layers import TTEmbedding
from comera_lab.memory import mib
from comera_lab.panels.figures import INK, LANE_STYLES, STATIC_WIDTH, TEMPLATE, with_slider
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget, tiles
from comera_lab.shapes import TTMShape, split_features

ELEMENT_BYTES = 4  # fp32
COPIES = 4  # AdamW keeps weights, gradients and two moments; the gradient of nn.Embedding is as large as its table
IDS = 4096
REPEATS, WARM_UPS = 10, 2
REAL_MIB = 64  # the largest dense table that is built: four times that in training, beside a notebook in 2 GiB
BINDER_MIB = 2048
EXPONENTS = tuple(np.arange(3, 9.01, 0.25).tolist())
WIDTHS = ("16", "32", "64", "128", "256")
STATIC_RANKS = (4, 8, 16, 32, 64)
LANES = ("dense", "tensor train")


def rows_at(exponent: float) -> int:
    """10 to that power, to two digits."""
    digits: int = 10 ** max(int(exponent) - 1, 0)
    return digits * round(float(10.0**exponent) / digits)


@cache
def _row_modes(rows: int) -> tuple[int, ...]:
    return split_features(rows)


@cache
def table_shape(rows: int, columns: int, rank: int) -> TTMShape:
    """The TT-matrix of a table, three cores; nothing is built."""
    return TTMShape.for_table(rows, columns, rank, row_modes=_row_modes(rows))


def frequent_few(rows: int, generator: torch.Generator) -> Tensor:
    """(IDS,) synthetic ids in [0, rows), log-uniform: a few are frequent, as in click logs. Needs no table of rows."""
    draws = torch.rand(IDS, generator=generator, dtype=torch.float64)
    return (float(rows) ** draws).long().sub(1).clamp(0, rows - 1)


class _Table:
    """A real table with its AdamW step on one batch of ids."""

    def __init__(self, layer: nn.Module, ids: Tensor) -> None:
        self.layer, self.ids = layer, ids
        self.optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)
        self.times_ms: list[tuple[float, float]] = []

    def step(self) -> tuple[float, float]:
        """Milliseconds of the look-up alone, and of look-up, backward and update."""
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        rows = self.layer(self.ids)
        looked_up = time.perf_counter()
        rows.sum().backward()
        self.optimizer.step()
        ended = time.perf_counter()
        return 1e3 * (looked_up - began), 1e3 * (ended - began)


class EmbeddingPanel(RunPanel):
    """A table of 10^3 to 10^9 rows, dense against a TT-matrix: MiB computed, milliseconds measured on real tables.

    Controls: `exponent` (rows are 10 to that power), `columns`, `rank`, `bar.start` ("Time both"). `timings` maps
    (rank, columns, rows) to {lane: (look-up ms, whole step ms)}; the dense lane is missing where its table would be
    larger than REAL_MIB.
    """

    kind = "embedding"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.timings: dict[tuple[int, int, int], dict[str, tuple[float, float]]] = {}
        self._tables: dict[str, _Table] = {}
        self._key = (16, 64, 10**5)
        self.exponent = NumberControl(
            "exponent", "rows = 10^", 5.0, 3.0, 9.0, "How many rows the table has, as a power of ten.", step=0.25
        )
        self.columns = ChoiceControl("columns", "columns", "64", WIDTHS, "How many numbers each row of the table has.")
        self.rank = NumberControl(
            "rank", "rank", 16, 2, 64, "One rank for both bonds of the TT-matrix.", css_class="t-table-rank"
        )
        self.numbers, self.line = text_widget(" ", "t-table-tiles"), text_widget(" ", "t-table-line")
        self.figure = self._live(self._picture(self.rank.value), "t-table", "Size and time against rows, both kinds.")
        bar = self._run_bar(
            "Time both", f"Looks up {IDS:,} ids in real tables, {REPEATS} training steps.", resume=False
        )
        draw = self._throttled(self._draw)
        for control in (self.exponent, self.columns, self.rank):
            control.on_change(self._guarded(lambda value: self._changed_setting(draw)))
        self._show()
        self._compose(
            heading(
                "A table of ids",
                "One row of numbers for each user, item, word or flight. Drag the rows up to a thousand million: sizes "
                "are computed, and no table is built before you press Time both.",
            ),
            self.exponent.widget, self.columns.widget, self.rank.widget, bar.widget, self.numbers,
            self.figure.widget, self.line,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """The chosen number of rows."""
        return rows_at(self.exponent.value)

    @property
    def shape(self) -> TTMShape:
        """The TT-matrix of the chosen table."""
        return table_shape(self.rows, int(self.columns.value), int(self.rank.value))

    @property
    def break_even(self) -> int:
        """The smallest number of rows (a quarter of a power of ten apart) from which the TT-matrix is smaller."""
        columns, rank = int(self.columns.value), int(self.rank.value)
        larger = [e for e in EXPONENTS if table_shape(rows_at(e), columns, rank).compression <= 1]
        return rows_at(larger[-1] + 0.25 if larger else EXPONENTS[0])

    @property
    def dense_is_real(self) -> bool:
        """Whether the dense table is small enough to be built here."""
        return mib(ELEMENT_BYTES * self.shape.dense_params) <= REAL_MIB

    def table(self) -> str:
        columns, rank = int(self.columns.value), int(self.rank.value)
        lines = [f"{columns} columns, rank {rank}; MiB of fp32 weights are computed, not built"]
        lines.append(f"{'rows':>14}{'dense MiB':>13}{'TT MiB':>9}{'smaller':>11}{'dense ms':>10}{'TT ms':>8}")
        for exponent in range(3, 10):
            shape = table_shape(10**exponent, columns, rank)
            dense, train = (mib(ELEMENT_BYTES * count) for count in (shape.dense_params, shape.params))
            took = self.timings.get((rank, columns, 10**exponent), {})
            times = [f"{took[lane][1]:.2f}" if lane in took else "–" for lane in LANES]
            lines.append(
                f"{shape.rows:>14,}{dense:>13,.2f}{train:>9.2f}{shape.compression:>10,.1f}×{times[0]:>10}{times[1]:>8}"
            )
        return "\n".join([*lines, *self._words()])

    def static(self) -> go.Figure:
        """Both sizes by rows with a slider over the rank; computed, nothing timed."""
        figures = [(str(rank), self._picture(rank)) for rank in STATIC_RANKS]
        return with_slider(figures, "rank ", active=STATIC_RANKS.index(16))

    def _job(self) -> Iterator[Progress]:
        rank, columns, rows = self._key = (int(self.rank.value), int(self.columns.value), self.rows)
        generator = torch.Generator().manual_seed(self.state.seed)
        ids = frequent_few(rows, generator)
        tables = {LANES[1]: _Table(TTEmbedding(rows, columns, rank, generator=generator), ids)}
        if self.dense_is_real:
            tables[LANES[0]] = _Table(nn.Embedding(rows, columns), ids)
        total = WARM_UPS + REPEATS
        for repeat in range(total):
            for table in tables.values():
                took = table.step()
                if repeat >= WARM_UPS:
                    table.times_ms.append(took)
            if repeat + 1 == total:
                self.timings[self._key] = {
                    lane: (median(look for look, _ in table.times_ms), median(step for _, step in table.times_ms))
                    for lane, table in tables.items()
                }
            yield Progress(repeat + 1, (repeat + 1) / total)

    def _item(self, progress: Progress) -> None:
        """Nothing to draw before the last step."""

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state == "finished":
            self._draw()
            self._show()
            self.state.record("embedding", {"timings": {key: dict(lanes) for key, lanes in self.timings.items()}})

    def _changed_setting(self, draw: object) -> None:
        self._show()
        if callable(draw):
            draw()

    def _show(self) -> None:
        shape = self.shape
        dense, train = (ELEMENT_BYTES * count for count in (shape.dense_params, shape.params))
        built = "computed" if self.dense_is_real else "computed, not built"
        say(
            self.numbers,
            tiles([
                (f"{mib(dense):,.2f} MiB", f"dense table ({built})"),
                (f"{mib(train):,.2f} MiB", "cores of the TT-matrix (computed)"),
                (f"{shape.compression:,.1f}×", "smaller"),
                (f"{mib(COPIES * dense):,.1f} MiB", "dense in training with AdamW (predicted)"),
            ]),
        )  # fmt: skip
        say(self.line, "".join(sentence(line) for line in self._words()))

    def _words(self) -> list[str]:
        shape = self.shape
        modes = " · ".join(f"{v}×{h}" for v, h in zip(shape.row_modes, shape.column_modes, strict=True))
        lines = [f"{shape.rows:,} rows × {shape.columns}: three cores with modes {modes}, ranks {shape.ranks[1:-1]}."]
        lines.append(f"At this rank and width the TT-matrix is the smaller one from {self.break_even:,} rows on.")
        took = self.timings.get((int(self.rank.value), shape.columns, shape.rows))
        if took is None:
            lines.append("Not timed yet at this size: press Time both.")
        elif LANES[0] in took:
            (dense_look, dense_step), (train_look, train_step) = (took[lane] for lane in LANES)
            lines.append(
                f"Measured here for {IDS:,} ids: look-up alone, dense {dense_look:.2f} ms, TT {train_look:.2f} ms; "
                f"with backward and AdamW, dense {dense_step:.2f} ms, TT {train_step:.2f} ms."
            )
        else:
            look, step = took[LANES[1]]
            lines.append(
                f"Measured here for {IDS:,} ids: TT look-up {look:.2f} ms, with backward and AdamW {step:.2f} ms. "
                f"The dense table would be larger than {REAL_MIB} MiB and is not built."
            )
        return lines

    def _draw(self) -> None:
        with self.figure.edit(" ".join(self._words())) as figure:
            fresh = self._picture(int(self.rank.value))
            for trace, new in zip(figure.data, fresh.data, strict=True):
                trace.x, trace.y = new.x, new.y
            figure.layout.shapes, figure.layout.annotations = fresh.layout.shapes, fresh.layout.annotations
            figure.layout.yaxis2 = fresh.layout.yaxis2

    def _picture(self, rank: int) -> go.Figure:
        columns = int(self.columns.value)
        shapes = [table_shape(rows_at(e), columns, rank) for e in EXPONENTS]
        sizes = [[mib(ELEMENT_BYTES * (s.dense_params, s.params)[lane]) for s in shapes] for lane in (0, 1)]
        timed = {r: took for (k, c, r), took in sorted(self.timings.items()) if (k, c) == (rank, columns)}
        times = [[(r, took[lane][1]) for r, took in timed.items() if lane in took] for lane in LANES]
        return _table_figure([shape.rows for shape in shapes], sizes, times, self.rows)


def _table_figure(
    rows: list[int], sizes: list[list[float]], times: list[list[tuple[int, float]]], chosen: int
) -> go.Figure:
    figure = make_subplots(1, 2, column_widths=[0.55, 0.45], horizontal_spacing=0.11)
    figure.update_layout(
        template=TEMPLATE, height=340, width=STATIC_WIDTH, margin={"l": 70, "r": 16, "t": 66, "b": 50},
        legend={"yref": "container", "y": 0.99, "yanchor": "top"},
    )  # fmt: skip
    figure.update_xaxes(
        type="log", title_text="rows", range=[2.9, 9.1], dtick=1, exponentformat="power", fixedrange=True
    )
    figure.update_xaxes(tickfont_size=12)
    figure.update_yaxes(type="log", dtick=1, exponentformat="power", tickfont_size=12, fixedrange=True)
    figure.update_yaxes(range=[-2.6, 6.2], dtick=2, row=1, col=1)
    seen = [ms for lane in times for _, ms in lane]
    low, high = (np.log10(min(seen)) - 0.3, np.log10(max(seen)) + 0.3) if seen else (-1.0, 3.0)
    figure.update_yaxes(range=[min(low, 0.0), max(high, 1.5)], row=1, col=2)
    for k, (name, (colour, dash, marker)) in enumerate(zip(LANES, LANE_STYLES, strict=False)):
        line = {"color": colour, "dash": dash, "width": 2}
        figure.add_trace(go.Scatter(name=name, x=rows, y=sizes[k], mode="lines", line=line), row=1, col=1)
        figure.add_trace(
            go.Scatter(name=name, showlegend=False, x=[r for r, _ in times[k]], y=[ms for _, ms in times[k]],
                       mode="lines+markers", line=line, marker={"symbol": marker, "size": 10, "color": colour}),
            row=1, col=2,
        )  # fmt: skip
    upright = {"color": INK, "width": 1.5, "dash": "dot"}
    figure.layout.shapes = [
        {"type": "line", "x0": chosen, "x1": chosen, "xref": "x", "y0": 0, "y1": 1, "yref": "y domain",
         "line": upright},
        {"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": BINDER_MIB / COPIES, "y1": BINDER_MIB / COPIES,
         "yref": "y", "line": {**upright, "dash": "dash"}},
    ]  # fmt: skip
    figure.layout.annotations = [
        _title(0.0, "MiB of weights (computed, not built)"),
        _title(1.0, f"ms of a training step, {IDS:,} ids (measured)", "right"),
        {"x": 3.0, "y": np.log10(BINDER_MIB / COPIES), "xref": "x", "yref": "y", "xanchor": "left", "yanchor": "bottom",
         "showarrow": False, "text": "more does not train in 2 GiB"},
    ]  # fmt: skip
    return figure


def _title(x: float, text: str, side: str = "left") -> dict[str, object]:
    return {"x": x, "y": 1.02, "xref": "paper", "yref": "paper", "xanchor": side, "yanchor": "bottom", "text": text,
            "showarrow": False}  # fmt: skip
