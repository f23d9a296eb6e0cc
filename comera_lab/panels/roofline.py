"""Lesson 13: what limits a layer on a device, memory or arithmetic, and the least time that follows."""

from __future__ import annotations

from collections.abc import Iterator

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.experiments.roofline import (
    COPY_SAMPLES,
    DTYPES,
    PRINTED,
    PRODUCT_SAMPLES,
    PRODUCT_SETTLE,
    Ceilings,
    Problem,
    Work,
    measured_ceilings,
    works,
)
from comera_lab.panels.figures import with_slider
from comera_lab.panels.gpu_figures import fill_roofline, roofline_figure
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget, tiles

MAX_FEATURES, MAX_RANK, MAX_ROWS_POWER = 16_384, 1024, 18
STATIC_WIDTHS = (256, 768, 2048, 4096, 8192)
PIECES = 1 + COPY_SAMPLES + len(DTYPES) * (PRODUCT_SETTLE + PRODUCT_SAMPLES) + 1


class RooflinePanel(RunPanel):
    """A layer under the roof of a device: dense, half-chains product by product, half-chains fused.

    Controls: `device`, `dtype`, `rows_power` (2 to this power is the number of rows), `in_features`, `out_features`,
    `rank`; `bar.start` measures this machine's CPU and adds it to the devices. Figure: `roof`. `ceilings` and `problem`
    are what is drawn, `works` the three ways to compute it.
    """

    kind = "roofline"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self._devices = {ceilings.device: ceilings for ceilings in PRINTED}
        self._make_controls()
        self.roof = self._live(
            roofline_figure(self.ceilings, self.dtype.value, self.works), "t-roofline", self._words()
        )  # fmt: skip
        self.tiles, self.line, self.source = (text_widget(" ", f"t-{name}") for name in ("floors", "line", "source"))
        self._draw_soon = self._throttled(self._draw)
        left = [self.device, self.dtype, self.rows_power]
        right = [self.in_features, self.out_features, self.rank]
        for control in (*left, *right):
            control.on_change(self._guarded(lambda value: self._show()))
        bar = self._run_bar("This CPU", "Copies memory, multiplies matrices, and draws what it saw.", resume=False)
        self._show()
        columns = widgets.HBox([widgets.VBox([control.widget for control in side]) for side in (left, right)])
        columns.add_class("comera-columns")
        self._compose(
            heading(
                "Under the roof",
                "A device moves so many bytes and computes so many FLOPs a second; the slower of the two is the limit. "
                "Drag the sizes of a layer, forward and backward, and see which it is.",
            ),
            columns, bar.widget, self.tiles, self.roof.widget, self.line, self.source,
        )  # fmt: skip

    def _make_controls(self) -> None:
        self.device = ChoiceControl(
            "device", "device", PRINTED[0].device, tuple(self._devices), "Whose ceilings the roof is made of."
        )
        self.dtype = ChoiceControl("dtype", "numbers", "bf16", tuple(DTYPES), "Bytes of a number, and the rate for it.")
        self.rows_power = NumberControl(
            "rows_power", "rows, 2 to the", 14, 0, MAX_ROWS_POWER, "Rows of x: batch times tokens, a power of two."
        )
        self.in_features = NumberControl(
            "in_features", "inputs", 4096, 64, MAX_FEATURES, "Inputs of the layer.", step=64
        )
        self.out_features = NumberControl(
            "out_features", "outputs", 4096, 64, MAX_FEATURES, "Outputs of the layer.", step=64
        )
        self.rank = NumberControl("rank", "rank", 64, 1, MAX_RANK, "Rank between the two halves of the tensor train.")

    @property
    def ceilings(self) -> Ceilings:
        """Those of the chosen device."""
        return self._devices[self.device.value]

    @property
    def problem(self) -> Problem:
        """What the controls say now."""
        return self._problem(int(self.in_features.value), int(self.out_features.value))

    @property
    def works(self) -> tuple[Work, Work, Work]:
        return works(self.problem)

    def table(self) -> str:
        lines = [
            self._title(),
            f"{'version':<13}{'GFLOP':>12}{'MB moved':>12}{'FLOP/byte':>11}{'floor ms':>11}  limited by",
        ]
        for work in self.works:
            lines.append(
                f"{work.name:<13}{work.flops / 1e9:>12,.2f}{work.bytes / 1e6:>12,.1f}{work.intensity:>11,.1f}"
                f"{self._floor_ms(work):>11.4g}  {work.bound(self.ceilings, self.dtype.value)}"
            )
        return "\n".join([*lines, self._words(), self._source()])

    def static(self) -> go.Figure:
        """The roof with a slider over square layers of five widths, all else as it is."""
        figures = [
            (f"{width}", roofline_figure(self.ceilings, self.dtype.value, works(self._problem(width, width))))
            for width in STATIC_WIDTHS
        ]
        return with_slider(figures, "width ", active=STATIC_WIDTHS.index(4096))

    def _problem(self, in_features: int, out_features: int) -> Problem:
        return Problem(
            rows=1 << int(self.rows_power.value),
            in_features=in_features,
            out_features=out_features,
            rank=int(self.rank.value),
            dtype=self.dtype.value,
        )

    def _job(self) -> Iterator[Progress]:
        for number, (words, ceilings) in enumerate(measured_ceilings(), start=1):
            yield Progress(number, number / PIECES, (words, ceilings))

    def _item(self, progress: Progress) -> None:
        words, ceilings = progress.payload
        if ceilings is None:
            self.bar.show(self.runner, words)
            return
        self._devices[ceilings.device] = ceilings
        self.device.offer_options(tuple(self._devices), ceilings.device)
        self.state.record("roofline", {"bytes_per_s": ceilings.bytes_per_s, **ceilings.flops_per_s})
        self._show()

    def _show(self) -> None:
        dense, halves, fused = self.works
        say(self.tiles, tiles([
            (f"{_short(self._floor_ms(dense))} ms", "floor, dense"),
            (f"{_short(self._floor_ms(halves))} ms", "floor, half-chains"),
            (f"{_short(self._floor_ms(fused))} ms", "floor, fused"),
            (f"{self._floor_ms(dense) / self._floor_ms(fused):.1f}×", "dense over fused, floors"),
            (f"{dense.flops / fused.flops:.1f}×", "dense over fused, FLOPs"),
        ]))  # fmt: skip
        say(self.line, sentence(self._words()))
        say(self.source, sentence(self._source()))
        self._draw_soon()

    def _draw(self) -> None:
        with self.roof.edit(self._words()) as figure:
            fill_roofline(figure, self.ceilings, self.dtype.value, self.works)

    def _floor_ms(self, work: Work) -> float:
        return work.floor_ms(self.ceilings, self.dtype.value)

    def _title(self) -> str:
        problem = self.problem
        return (
            f"{problem.rows:,} rows, {problem.in_features} → {problem.out_features}, rank {problem.rank}, "
            f"{problem.dtype}, forward and backward, on {self.ceilings.device}"
        )

    def _words(self) -> str:
        dense, halves, fused = self.works
        limits = {work.name: work.bound(self.ceilings, self.dtype.value) for work in self.works}
        saved = 100 * (1 - fused.bytes / halves.bytes)
        return (
            f"{self._title()}: {limits['dense']} limits the dense layer, {limits['fused']} the fused one. "
            f"It needs {dense.flops / fused.flops:.3g} times fewer FLOPs, and can be "
            f"{self._floor_ms(dense) / self._floor_ms(fused):.3g} times as fast at most; fusing spares {saved:.2g} % "
            "of the bytes (computed)."
        )

    def _source(self) -> str:
        ceilings, dtype = self.ceilings, self.dtype.value
        printed = "Printed by its maker; programs stay below." if ceilings in PRINTED else "Reached by a program."
        return (
            f"Ceilings of {ceilings.device}: {_short(ceilings.bytes_per_s / 1e9)} GB/s, "
            f"{_short(ceilings.flops_per_s[dtype] / 1e9)} GFLOP/s in {dtype}; arithmetic is the limit from "
            f"{ceilings.ridge(dtype):.3g} FLOPs a byte on. Source: {ceilings.source}. {printed}"
        )


def _short(value: float) -> str:
    """Three digits at least, and never a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
