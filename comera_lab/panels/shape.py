"""Lesson 03: features, modes and one rank per bond; what they cost, and how well they hold a real matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ipywidgets as widgets
import plotly.graph_objects as go
import torch
from torch import Tensor

from comera_lab.cores import cores_to_matrix, matrix_to_cores
from comera_lab.experiments.datasets import digits
from comera_lab.memory import format_bytes
from comera_lab.panels.figures import core_diagram, draw_cores, with_slider
from comera_lab.panels.lanes import digits_28
from comera_lab.panels.modes import MAX_MODES, ModesControl
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import NumberControl, heading, say, sentence, text_widget, tiles
from comera_lab.shapes import TTShape, clip_ranks

MAX_FEATURES = 4096
MAX_BOND = 512
STATIC_RANKS = (1, 2, 4, 8, 16, 32)


def digits_matrix(shape: TTShape) -> Tensor:
    """Real numbers in the form of a weight W (out, in), float64: a row per image, sorted by digit, pixels along it.

    Raises ValueError where the digits do not have so many images or pixels.
    """
    data = digits(8) if shape.in_features == 64 else digits_28()
    images, pixels = data.train_x.shape
    if shape.out_features > images or shape.in_features > pixels:
        raise ValueError(
            f"the digits hold {images:,} images of {pixels} pixels, but this shape is {shape.out_features:,} × "
            f"{shape.in_features:,}. Choose at most {images:,} outputs and {pixels} inputs to measure an error."
        )
    rows = torch.arange(shape.out_features)
    rows = rows[torch.argsort(data.train_y[rows], stable=True)]
    return data.train_x[rows, : shape.in_features].double()


class Cutter:
    """The exact TT of one matrix; `error(shape)` cuts it to the ranks of `shape` and compares.

    The cut keeps the leading part of every bond, which is how TT-SVD orders them; a cut takes milliseconds.
    """

    def __init__(self, matrix: Tensor, shape: TTShape) -> None:
        self.modes = (shape.in_modes, shape.out_modes)
        self._matrix = matrix
        self._norm = float(torch.linalg.vector_norm(matrix))
        self._cores = matrix_to_cores(matrix, shape.with_ranks(math.prod(shape.modes)))

    def error(self, shape: TTShape) -> float:
        """Relative Frobenius error ||W - W_cut|| / ||W||."""
        sizes = zip(self._cores, shape.core_shapes, strict=True)
        cut = [core[:left, :, :right].contiguous() for core, (left, _, right) in sizes]
        difference = cores_to_matrix(cut, shape) - self._matrix
        return float(torch.linalg.vector_norm(difference)) / self._norm


class ShapePanel(RunPanel):
    """Shape bookkeeping by hand: `state.shape` is what the controls say.

    Controls: `in_features`, `out_features`, `in_modes`, `out_modes`, `every` (all bonds at once), `bonds` (a list, as
    many as the shape has). `run()` (the Measure button) takes a real matrix; after that the error follows the sliders.
    Figure: `cores`.
    """

    kind = "shape"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        shape = self.state.shape
        self.error: float | None = None
        self._cutter: Cutter | None = None
        feature_help = "How many numbers go into the layer and how many come out; each is a product of modes."
        modes_help = "The modes multiply out to the features; each mode gets a core of its own."
        self.in_features = NumberControl(
            "in-features", "inputs", shape.in_features, 2, MAX_FEATURES, feature_help, slider=False
        )
        self.out_features = NumberControl(
            "out-features", "outputs", shape.out_features, 2, MAX_FEATURES, feature_help, slider=False
        )
        self.in_modes = ModesControl(
            "in_modes", "input modes", shape.in_features, shape.in_modes, modes_help, rising=False
        )
        self.out_modes = ModesControl(
            "out_modes", "output modes", shape.out_features, shape.out_modes, modes_help, rising=True
        )
        self.every = NumberControl(
            "every", "every bond", max(shape.ranks), 1, MAX_BOND, "Sets all bonds at once, each up to its own maximum.",
            unit="up to its own maximum",
        )  # fmt: skip
        self._all_bonds = [
            NumberControl(
                f"bond-{k}", f"bond {k}", 1, 1, MAX_BOND, f"The rank between core {k} and core {k + 1} of the train."
            )
            for k in range(1, 2 * MAX_MODES)
        ]
        self.tiles, self.line = text_widget(" ", "t-tiles"), text_widget(" ", "t-line")
        self.cores = self._live(core_diagram(shape, _scale(shape)), "t-cores", "")
        bar = self._run_bar(
            "Measure the error", "Cuts a real matrix, handwritten digits, to these ranks and compares.",
            stop=False, resume=False,
        )  # fmt: skip
        bar.start.layout.width = "180px"
        self._draw_cores = self._throttled(self._redraw_cores)
        self._listen()
        self._shape_changed()
        left = widgets.VBox([c.widget for c in (self.in_features, self.in_modes, self.out_features, self.out_modes)])
        right = widgets.VBox([c.widget for c in (self.every, *self._all_bonds)])
        right.add_class("comera-wide")
        for bond in (self.every, *self._all_bonds):
            bond.note.layout.width = "184px"  # one width, so that the entries stand in one column
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._compose(
            heading(
                "The shape of a tensor train",
                "Write inputs and outputs as products, then choose a rank for every bond. No bond can use more than "
                "the cores on its smaller side can tell apart.",
            ),
            columns, self.tiles, self.cores.widget, self.line, bar.widget,
        )  # fmt: skip

    @property
    def bonds(self) -> list[NumberControl]:
        """The sliders of the bonds that the shape has, left to right."""
        return self._all_bonds[: len(self.state.shape.modes) - 1]

    def table(self) -> str:
        shape = self.state.shape
        lines = [f"{shape.in_features:,} -> {shape.out_features:,}, ranks {shape.ranks}"]
        lines += [
            f"core {k + 1}: {left} x {mode} x {right} = {left * mode * right:,} numbers"
            for k, (left, mode, right) in enumerate(shape.core_shapes)
        ]
        lines += [
            f"bond {k}: rank {shape.ranks[k]}, {reason}" for k, reason in enumerate(bond_reasons(shape), start=1)
        ]
        cores, dense = format_bytes(4 * shape.params), format_bytes(4 * shape.dense_params)
        lines += [
            f"cores: {shape.params:,} numbers, dense: {shape.dense_params:,}, {_ratio_words(shape.compression)}",
            f"bytes in fp32, predicted: {cores} of {dense}",
            self._error_words(),
        ]
        return "\n".join(lines)

    def static(self) -> go.Figure:
        figures = []
        for rank in STATIC_RANKS:
            shape = self.state.shape.with_ranks(rank)
            figure = core_diagram(shape, max(STATIC_RANKS))
            text = f"{shape.params:,} numbers instead of {shape.dense_params:,}: {shape.compression:,.1f}× smaller"
            figure.add_annotation(x=0, y=1.16, xref="paper", yref="paper", text=text, showarrow=False, xanchor="left")
            figure.update_layout(height=270, margin_t=48)
            figures.append((str(rank), figure))
        return with_slider(figures, "every bond ", active=STATIC_RANKS.index(8))

    def _listen(self) -> None:
        self.in_features.on_change(self._guarded(lambda value: self._new_features(value, None)))
        self.out_features.on_change(self._guarded(lambda value: self._new_features(None, value)))
        self.in_modes.on_change(self._guarded(lambda modes: self._new_modes(modes, self.state.shape.out_modes)))
        self.out_modes.on_change(self._guarded(lambda modes: self._new_modes(self.state.shape.in_modes, modes)))
        self.every.on_change(self._guarded(lambda rank: self._set(self.state.shape.with_ranks(rank))))
        for k, bond in enumerate(self._all_bonds, start=1):
            bond.on_change(self._guarded(lambda rank, k=k: self._new_rank(k, rank)))
        self._watch("shape", lambda change: self._shape_changed())

    def _set(self, shape: TTShape) -> None:
        self.state.shape = shape

    def _new_features(self, inputs: int | None, outputs: int | None) -> None:
        old = self.state.shape
        self._set(TTShape.for_features(inputs or old.in_features, outputs or old.out_features, rank=self.every.value))

    def _new_modes(self, in_modes: tuple[int, ...], out_modes: tuple[int, ...]) -> None:
        old = self.state.shape
        ranks = clip_ranks(self.every.value, in_modes + out_modes)
        self._set(TTShape(in_modes, out_modes, ranks, old.in_features, old.out_features))

    def _new_rank(self, bond: int, rank: int) -> None:
        ranks = list(self.state.shape.ranks)
        ranks[bond] = rank
        self._set(self.state.shape.with_ranks(ranks))

    def _shape_changed(self) -> None:
        shape = self.state.shape
        self.in_features.fit(shape.in_features)
        self.out_features.fit(shape.out_features)
        self.in_modes.fit(shape.in_features, shape.in_modes)
        self.out_modes.fit(shape.out_features, shape.out_modes)
        reasons, limits = bond_reasons(shape), shape.max_ranks
        for k, bond in enumerate(self._all_bonds, start=1):
            used = k < len(shape.modes)
            bond.widget.layout.display = None if used else "none"
            if used:
                bond.limit(limits[k], reasons[k - 1], shape.ranks[k])
        self._cut()
        self._show_numbers()
        self._draw_cores()

    def _cut(self) -> None:
        """The error at the present ranks, once a real matrix has been taken; new modes decompose it again."""
        shape = self.state.shape
        if self._cutter is None:
            return
        if self._cutter.modes != (shape.in_modes, shape.out_modes):
            self._cutter = None if not self._fits() else Cutter(digits_matrix(shape), shape)
        self.error = None if self._cutter is None else self._cutter.error(shape)

    def _fits(self) -> bool:
        images, pixels = digits_28().train_x.shape
        return self.state.shape.out_features <= images and self.state.shape.in_features <= pixels

    def _job(self) -> Iterator[Progress]:
        shape = self.state.shape
        self._cutter = Cutter(digits_matrix(shape), shape)
        yield Progress(1, 1.0)

    def _item(self, progress: Progress) -> None:
        self._cut()
        self._show_numbers()

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        words = {"running": "decomposing a real matrix", "finished": "measured; the error now follows the sliders"}
        self.bar.status.value = sentence(words.get(runner.state, ""))

    def _show_numbers(self) -> None:
        shape = self.state.shape
        error = "press Measure" if self.error is None else f"{100 * self.error:.1f} %"
        say(self.tiles, tiles([
            (f"{shape.params:,}", "numbers in the cores"),
            (f"{shape.dense_params:,}", "numbers if dense"),
            (_ratio_words(shape.compression), "dense / cores"),
            (format_bytes(4 * shape.params), "fp32 bytes, predicted"),
            (error, "error on real digits"),
        ]))  # fmt: skip
        say(self.line, sentence(self._line()))

    def _line(self) -> str:
        shape = self.state.shape
        sizes = [left * mode * right for left, mode, right in shape.core_shapes]
        biggest = sizes.index(max(sizes))
        share = f"{sizes[biggest]:,} numbers, {100 * sizes[biggest] / shape.params:.0f} % of all"
        return f"Core {biggest + 1} is the largest: {share}. {self._error_words()}"

    def _error_words(self) -> str:
        shape = self.state.shape
        if self.error is None:
            return "The error is not measured yet."
        return (
            f"Measured here: cutting {shape.out_features:,} digit images of {shape.in_features} pixels to these ranks "
            f"loses {100 * self.error:.1f} % of their norm."
        )

    def _redraw_cores(self) -> None:
        shape = self.state.shape
        with self.cores.edit(f"Cores {shape.core_shapes}, {shape.params:,} numbers in all.") as figure:
            draw_cores(figure, shape, _scale(shape))


def _scale(shape: TTShape) -> int:
    """The rank that is drawn thickest: fixed for ranks up to 64, so that a bond is seen to grow."""
    return max(64, *shape.ranks)


def _ratio_words(ratio: float) -> str:
    return f"{ratio:,.1f}× smaller" if ratio >= 1 else f"{1 / ratio:,.1f}× larger"


def bond_reasons(shape: TTShape) -> list[str]:
    """For every inner bond: its true maximum and which side sets it."""
    modes = shape.modes
    reasons: list[str] = []
    for k in range(1, len(modes)):
        left, right = math.prod(modes[:k]), math.prod(modes[k:])
        side, factors = ("left", modes[:k]) if left <= right else ("right", modes[k:])
        product = f"{'·'.join(map(str, factors))} = " if len(factors) > 1 else ""
        reasons.append(f"max {product}{min(left, right):,} ({side})")
    return reasons


