"""Lesson 04: how wide must a layer be before its tensor train is faster? Time both and see the lines cross."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from torch import nn

from comera_lab.contraction import plan
from comera_lab.layers import TTLinear
from comera_lab.panels.figures import LANE_STYLES, TEMPLATE, with_slider
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import NumberControl, heading, say, sentence, text_widget
from comera_lab.shapes import TTShape

ROWS = 256
REPEATS = 20  # medians of 20 are steady to some 5 % on a busy two-core machine
WARM_UPS = 3
MAX_WIDTH = 2048
STATIC_WIDTHS = (64, 128, 256, 512, 1024, 2048)
STATIC_RANKS = (4, 8, 16, 32)
LANES = ("dense", "tensor train")


def one_pass_ms(layer: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> float:
    """Milliseconds of one forward and backward pass; gradients are dropped afterwards, outside the clock."""
    began = time.perf_counter()
    layer(x).backward(upstream)
    elapsed_ms = 1e3 * (time.perf_counter() - began)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    return elapsed_ms


class CrossingPanel(RunPanel):
    """Dense against tensor train, one layer width -> width, forward and backward, timed on this machine.

    Every press of Time both adds the chosen `width` to the picture; a change of `rank` starts a new one.
    `timings` maps (rank, width) to (dense ms, tensor-train ms), medians of REPEATS.
    """

    kind = "crossing"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.timings: dict[tuple[int, int], tuple[float, float]] = {}
        self._job_key = (8, 256)
        self._samples: list[tuple[float, float]] = []
        self.width = NumberControl(
            "width", "width", 256, 64, MAX_WIDTH,
            "Inputs and outputs of the layer: a dense layer has width times width weights.", step=64,
            css_class="t-crossing-width",
        )  # fmt: skip
        self.rank = NumberControl(
            "rank", "rank", 8, 2, 64, "One rank for all bonds of the tensor train.", css_class="t-crossing-rank"
        )
        self.line = text_widget(" ", "t-crossing-line")
        self.figure = self._live(self._picture(), "t-crossing", self._words())
        bar = self._run_bar("Time both", f"Times {REPEATS} passes of each layer, in turns.", resume=False)
        self.rank.on_change(self._guarded(lambda rank: self._draw()))
        self.width.on_change(self._guarded(lambda width: say(self.line, sentence(self._words()))))
        say(self.line, sentence(self._words()))
        self._compose(
            heading(
                f"One layer, width → width, {ROWS} rows: who is faster?",
                "Choose a width, press Time both, choose another. Where do the two lines cross?",
            ),
            self.width.widget, self.rank.widget, bar.widget, self.figure.widget, self.line,
        )  # fmt: skip

    def widths(self) -> list[int]:
        """The widths timed at the present rank, in order."""
        return sorted(width for rank, width in self.timings if rank == self.rank.value)

    def table(self) -> str:
        lines = [f"{ROWS} rows, rank {self.rank.value}, forward + backward, measured here"]
        lines.append(f"{'width':>6}{'dense ms':>12}{'TT ms':>12}{'dense / TT':>12}")
        for width in self.widths():
            dense, train = self.timings[self.rank.value, width]
            lines.append(f"{width:>6}{dense:>12.2f}{train:>12.2f}{dense / train:>12.2f}")
        return "\n".join(lines if self.widths() else [*lines, "  nothing timed yet: press Time both"])

    def static(self) -> go.Figure:
        """FLOPs by width, predicted: arithmetic alone says the tensor train always wins."""
        figures = []
        for rank in STATIC_RANKS:
            shapes = [TTShape.for_features(width, width, rank=rank) for width in STATIC_WIDTHS]
            dense = [6 * ROWS * shape.dense_params / 1e6 for shape in shapes]
            train = [3 * plan(shape, ROWS).flops / 1e6 for shape in shapes]
            figures.append((str(rank), _lines(STATIC_WIDTHS, (dense, train), "million FLOPs, predicted")))
        return with_slider(figures, "rank ", active=STATIC_RANKS.index(8))

    def _job(self) -> Iterator[Progress]:
        rank, width = self._job_key = (int(self.rank.value), int(self.width.value))
        self._samples = []
        generator = torch.Generator().manual_seed(self.state.seed)
        x = torch.randn(ROWS, width, generator=generator).requires_grad_()
        upstream = torch.randn(ROWS, width, generator=generator)
        layers = nn.Linear(width, width), TTLinear(width, width, rank=rank, generator=generator)
        for repeat in range(WARM_UPS + REPEATS):
            dense, train = (one_pass_ms(layer, x, upstream) for layer in layers)
            if repeat >= WARM_UPS:
                self._samples.append((dense, train))
            yield Progress(repeat + 1, (repeat + 1) / (WARM_UPS + REPEATS))

    def _item(self, progress: Progress) -> None:
        if progress.fraction == 1.0:
            dense, train = zip(*self._samples, strict=True)
            self.timings[self._job_key] = (median(dense), median(train))

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state == "finished":
            self._draw()
            self.state.record("crossing", {"timings": dict(self.timings)})

    def _draw(self) -> None:
        with self.figure.edit(self._words()) as figure:
            fresh = self._picture()
            for trace, new in zip(figure.data, fresh.data, strict=True):
                trace.update(x=new.x, y=new.y)
            figure.layout.yaxis.range = fresh.layout.yaxis.range
        say(self.line, sentence(self._words()))

    def _picture(self) -> go.Figure:
        pairs = [self.timings[self.rank.value, width] for width in self.widths()]
        dense, train = ([pair[lane] for pair in pairs] for lane in (0, 1))
        return _lines(self.widths(), (dense, train), "ms a pass, measured here")

    def _words(self) -> str:
        here = self.timings.get((self.rank.value, self.width.value))
        if here is None:
            return f"Width {self.width.value}, rank {self.rank.value}: not timed yet. Press Time both."
        dense, train = here
        faster = f"{dense / train:.1f}× faster" if train < dense else f"{train / dense:.1f}× slower"
        threads = torch.get_num_threads()
        text = (
            f"Width {self.width.value}, rank {self.rank.value}: dense {dense:.2f} ms, tensor train {train:.2f} ms: "
            f"the tensor train is {faster}. Measured here, CPU, {threads} thread{'s' if threads > 1 else ''}, "
            f"median of {REPEATS}."
        )
        return f"{text} {self._crossing()}".strip()

    def _crossing(self) -> str:
        """Between which timed widths the faster one changes, as a sentence; empty if it does not."""
        wins = [(width, self.timings[self.rank.value, width]) for width in self.widths()]
        for (narrow, before), (wide, after) in pairwise(wins):
            if before[1] >= before[0] and after[1] < after[0]:
                return f"The lines cross between width {narrow} and {wide}."
        return ""


def _lines(widths: Any, lanes: tuple[list[float], list[float]], y_title: str) -> go.Figure:
    figure = go.Figure(
        layout={"template": TEMPLATE, "height": 320, "width": 960, "margin": {"l": 64, "r": 16, "t": 36, "b": 50}}
    )
    figure.update_xaxes(
        type="log",
        title_text="width",
        range=[np.log10(50), np.log10(2600)],
        tickvals=list(STATIC_WIDTHS),
        fixedrange=True,
    )
    figure.update_yaxes(type="log", title_text=y_title, dtick=1, exponentformat="none", fixedrange=True)
    if not lanes[0]:
        figure.update_yaxes(range=[-1.2, 2.2])
    for name, values, (colour, dash, marker) in zip(LANES, lanes, LANE_STYLES, strict=False):
        figure.add_trace(go.Scatter(
            name=name, x=list(widths), y=values, mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2}, marker={"symbol": marker, "size": 10},
        ))  # fmt: skip
    return figure
