"""Lesson 01: where the bytes of a training step go, predicted from shapes and measured on a real step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import ipywidgets as widgets
import plotly.graph_objects as go
import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.experiments.runs import TrainConfig, build_optimizer
from comera_lab.memory import (
    OPTIMIZERS,
    POOLS,
    PRECISIONS,
    Measured,
    MemoryReport,
    Pools,
    format_bytes,
    measure,
    mib,
)
from comera_lab.models.mlp import MLP
from comera_lab.panels.figures import fill_memory, memory_bars, with_slider
from comera_lab.panels.lanes import digits_28
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget, tiles
from comera_lab.runtime import memory_limit_bytes

MAX_WIDTH, MAX_DEPTH, MAX_BATCH = 2048, 8, 1024
STATIC_BATCHES = (1, 16, 64, 256, 1024)
# A step also needs room for temporary tensors, and the process for itself.
MEASURE_SHARE = 0.25


class MemoryPanel(RunPanel):
    """An MLP 784 → width × depth → 10: its four pools, predicted at once and measured by a button.

    Controls: `width`, `depth`, `batch_size`, `precision`, `optimizer`; `run()` is the Measure button. Figure: `bars`.
    `predicted` holds Pools, `report` a MemoryReport once the present setting has been measured.
    """

    kind = "memory"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        s = self.state
        self.report: MemoryReport | None = None
        self._measuring: tuple[object, ...] = ()
        self.width = NumberControl(
            "width", "width", min(s.width, MAX_WIDTH), 16, MAX_WIDTH, "Neurons in every hidden layer of the network."
        )
        self.depth = NumberControl("depth", "hidden layers", min(s.depth, MAX_DEPTH), 1, MAX_DEPTH,
                                   "How many hidden layers the network has.")  # fmt: skip
        self.batch_size = NumberControl("batch", "batch size", min(s.batch_size, MAX_BATCH), 1, MAX_BATCH,
                                        "How many images go through the network in one step.")  # fmt: skip
        self.precision = ChoiceControl(
            "precision", "precision", s.precision, tuple(PRECISIONS), "Bytes of every number: 4 in fp32, 2 in bf16."
        )
        self.optimizer = ChoiceControl(
            "optimizer", "optimizer", s.optimizer, tuple(OPTIMIZERS),
            "Kept for each weight: nothing (sgd), one number (momentum), two (adamw) or two bytes (adamw-8bit).",
        )  # fmt: skip
        self.predicted = self._predict()
        self.tiles, self.line = text_widget(" ", "t-tiles"), text_widget(" ", "t-line")
        self.bars = self._live(memory_bars(self._rows()), "t-bars", self._words())
        bar = self._run_bar(
            "Measure", "Builds this network, makes one real training step on digits and counts the bytes.",
            stop=False, resume=False,
        )  # fmt: skip
        self._draw = self._throttled(self._redraw)
        for name in ("width", "depth", "batch_size", "precision", "optimizer"):
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._setting_changed())
        left = widgets.VBox([self.width.widget, self.depth.widget, self.batch_size.widget])
        right = widgets.VBox([self.precision.widget, self.optimizer.widget])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._show_numbers()
        self._compose(
            heading(
                "Where the memory of a training step goes",
                "A network 784 → hidden layers → 10. The prediction follows the controls; Measure makes one real step.",
            ),
            columns, self.tiles, self.bars.widget, self.line, bar.widget,
        )  # fmt: skip

    def table(self) -> str:
        title = ", ".join(str(part) for part in self._setting())
        report = self.report or MemoryReport(self.predicted)
        return f"width, hidden layers, batch, precision, optimizer: {title}\n{report.table()}"

    def static(self) -> go.Figure:
        pools = {batch: self._predict(batch) for batch in STATIC_BATCHES}
        widest = 1.05 * max(mib(each.total) for each in pools.values())
        figures = [(str(batch), memory_bars({"predicted": _in_mib(each)}, widest)) for batch, each in pools.items()]
        return with_slider(figures, "batch size ", active=STATIC_BATCHES.index(64))

    def _setting(self) -> tuple[object, ...]:
        return tuple(
            control.value for control in (self.width, self.depth, self.batch_size, self.precision, self.optimizer)
        )

    def _features(self) -> tuple[int, ...]:
        return (784, *[self.width.value] * self.depth.value, 10)

    def _predict(self, batch: int | None = None) -> Pools:
        return mlp_pools(
            self._features(), batch or self.batch_size.value, self.optimizer.value, self.precision.value
        )

    def _setting_changed(self) -> None:
        self.report = None
        self.predicted = self._predict()
        self._show_numbers()
        self._draw()

    def _rows(self) -> dict[str, dict[str, float]]:
        rows = {"predicted": _in_mib(self.predicted)}
        measured = self.report.measured if self.report else None
        rows["measured here"] = _in_mib(measured) if measured else dict.fromkeys(POOLS, 0.0)
        return rows

    def _redraw(self) -> None:
        with self.bars.edit(self._words()) as figure:
            fill_memory(figure, self._rows())

    def _show_numbers(self) -> None:
        pools = self.predicted
        parameters = pools.weights // PRECISIONS[self.precision.value].dtype.itemsize
        say(self.tiles, tiles([
            (format_bytes(pools.total), "one step, predicted"),
            (f"{parameters:,}", "parameters"),
            (f"{pools.total / parameters:.1f}", "bytes per parameter"),
            (f"{100 * pools.activations / pools.total:.0f} %", "of it activations"),
        ]))  # fmt: skip
        say(self.line, sentence(self._words()))

    def _words(self) -> str:
        predicted = ", ".join(f"{pool} {format_bytes(count)}" for pool, count in self.predicted.as_dict().items())
        text = f"Predicted: {predicted}."
        if self.report is None or self.report.measured is None:
            return text
        gaps = self.report.gaps()
        agreement = " ".join(gaps) if gaps else "Every pool agrees within 5 %."
        rss = f" The whole process, Python and torch included, holds {format_bytes(self.report.rss_bytes or 0)}."
        return f"{text} Measured here on {self.report.device}: {agreement}{rss}"

    def _job(self) -> Iterator[Progress]:
        limit = memory_limit_bytes()
        if limit is not None and self.predicted.total > MEASURE_SHARE * limit:
            raise ValueError(
                f"this step needs {format_bytes(self.predicted.total)}, more than a quarter of the "
                f"{format_bytes(limit)} allowed here. Choose a smaller width or batch; the prediction stands."
            )
        setting = self._measuring = self._setting()
        predicted = self.predicted
        measured = real_step(self._features(), self.batch_size.value, self.precision.value, self.optimizer.value)
        yield Progress(1, 1.0, (setting, MemoryReport.compare(predicted, measured)))

    def _item(self, progress: Progress) -> None:
        setting, report = progress.payload
        if setting == self._setting():
            self.report = report
            self._redraw()
            self._show_numbers()
            pools = {"predicted": report.predicted.as_dict(), "measured": report.measured.as_dict()}
            self.state.record("memory", pools)

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        words = {"running": "making one real step", "finished": "measured; a changed control makes it stale"}
        self.bar.status.value = sentence(words.get(runner.state, ""))


def _in_mib(pools: Pools) -> dict[str, float]:
    return {pool: mib(count) for pool, count in pools.as_dict().items()}


def mlp_pools(features: Sequence[int], batch_size: int, optimizer: str, precision: str) -> Pools:
    """Predicted bytes of a training step of a dense MLP: the closed form of `memory.predict` for this one network.

    A slider needs it within milliseconds. The backward pass keeps the batch, of every hidden layer what goes into
    GELU and what comes out, the log-probabilities of the classes, the labels and the loss's own divisor.
    """
    dtype, master = PRECISIONS[precision]
    item = dtype.itemsize
    state_bytes = OPTIMIZERS[optimizer]
    sizes = [size for n_in, n_out in pairwise(features) for size in (n_in * n_out, n_out)]
    moments = sum(4 * size + state_bytes(size, 4) if master else state_bytes(size, item) for size in sizes)
    saved = features[0] + 2 * sum(features[1:-1]) + features[-1]
    label_bytes = 8
    return Pools(
        weights=item * sum(sizes),
        grads=item * sum(sizes),
        optimizer=moments,
        activations=batch_size * (item * saved + label_bytes) + item,
    )


def real_step(features: Sequence[int], batch_size: int, precision: str, optimizer: str) -> Measured:
    """One measured training step of a dense MLP on real digits, (batch_size, 784) -> ten classes.

    With a master copy the optimizer steps fp32 copies of the weights, which are then rounded back.
    """
    dtype, master = PRECISIONS[precision]
    data = digits_28()
    rows = torch.arange(batch_size) % len(data.train_y)
    x, y = data.train_x[rows].to(dtype), data.train_y[rows]
    model = MLP(features, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = list(model.parameters())
    stepped = [nn.Parameter(weight.detach().float()) for weight in weights] if master else weights
    updater = build_optimizer(TrainConfig(optimizer=optimizer), stepped)

    def step() -> None:
        loss: Tensor = functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        if master:
            for copy, weight in zip(stepped, weights, strict=True):
                copy.grad = None if weight.grad is None else weight.grad.float()
        updater.step()
        if master:
            with torch.no_grad():
                for copy, weight in zip(stepped, weights, strict=True):
                    weight.copy_(copy)

    return measure(step, model, updater)
