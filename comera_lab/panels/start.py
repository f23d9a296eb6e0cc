"""Lesson 00: one slider, one layer, and a Train button."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import plotly.graph_objects as go
import torch

from comera_lab.experiments.train import TrainConfig
from comera_lab.memory import format_bytes
from comera_lab.panels.figures import core_diagram, draw_cores, fill_training, training_curves, with_slider
from comera_lab.panels.lanes import Lane, empty_curve
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import NumberControl, heading, say, sentence, text_widget, tiles
from comera_lab.shapes import TTShape

IN_FEATURES, OUT_FEATURES, CLASSES = 784, 512, 10
MAX_RANK = 32
STEPS = 600
STATIC_RANKS = (1, 2, 4, 8, 16, 32)


def shape_at(rank: int) -> TTShape:
    """The layer of this panel at one rank for every bond."""
    return TTShape.for_features(IN_FEATURES, OUT_FEATURES, rank=rank)


def words_at(rank: int) -> str:
    """What a rank means, in one sentence. Counts are exact: they follow from the shape."""
    shape = shape_at(rank)
    return (
        f"Rank {rank}: {len(shape.modes)} cores hold {shape.params:,} weights instead of {shape.dense_params:,}. "
        f"That is {shape.compression:,.0f}× smaller. No dense matrix is stored anywhere."
    )


class StartPanel(RunPanel):
    """One TT layer 784 → 512: its size follows the `rank` slider, and `run()` trains it on real digits for `steps`.

    Controls: `rank` (1 to 32), `bar.start`, `bar.stop`, `bar.resume`. Figures: `cores`, `curves`.
    `state.runs["start"]` holds the last run's numbers.
    """

    kind = "start"

    def __init__(self, state: LabState | None = None, *, steps: int = STEPS) -> None:
        super().__init__(state)
        self.steps = steps
        rank = min(self.state.rank, MAX_RANK)
        self.lane: Lane | None = None
        self.rank_trained: int | None = None
        self._pace = Pace()
        self.rank = NumberControl(
            "rank", "rank", rank, 1, MAX_RANK,
            "The rank sets how many numbers neighbouring cores share: more rank, more parameters.",
        )  # fmt: skip
        self.tiles = text_widget(" ", "t-tiles")
        self.line = text_widget(" ", "t-line")
        self.summary = text_widget(css_class="t-summary")
        self.cores = self._live(core_diagram(shape_at(rank), MAX_RANK), "t-cores", words_at(rank))
        self.curves = self._live(
            training_curves([empty_curve(f"rank {rank}")], "steps"), "t-curves",
            "Training loss and test accuracy against steps.",
        )  # fmt: skip
        bar = self._run_bar("Train", f"Trains this layer and a classifier on 1,461 real digits for {steps:,} steps.")
        self._draw_cores = self._throttled(self._redraw_cores)
        self._bind(self.rank, "rank")
        self._watch("rank", lambda change: self._rank_changed())
        self._show_numbers()
        self._compose(
            heading(
                f"One layer, {IN_FEATURES} → {OUT_FEATURES}, kept as a tensor train",
                "Drag the rank and watch the cores. Then press Train: the layer learns to read digits, right here.",
            ),
            self.rank.widget, self.tiles, self.cores.widget, self.line, bar.widget, self.curves.widget, self.summary,
        )  # fmt: skip

    @property
    def shape(self) -> TTShape:
        return shape_at(self.rank.value)

    def table(self) -> str:
        shape = self.shape
        rows = [
            ("layer", f"{IN_FEATURES} -> {OUT_FEATURES}"),
            ("rank", f"{self.rank.value}"),
            ("cores (left rank, mode, right rank)", "  ".join(map(str, shape.core_shapes))),
            ("weights in the cores", f"{shape.params:,}"),
            ("weights of the dense layer", f"{shape.dense_params:,}"),
            ("bytes in fp32, predicted", f"{format_bytes(4 * shape.params)} of {format_bytes(4 * shape.dense_params)}"),
            ("times smaller", f"{shape.compression:,.1f}"),
            ("training", self.runner.words + self._measured()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def static(self) -> go.Figure:
        figures = []
        for rank in STATIC_RANKS:
            figure = core_diagram(shape_at(rank), MAX_RANK)
            figure.add_annotation(
                x=0, y=1.16, xref="paper", yref="paper", text=words_at(rank), showarrow=False, xanchor="left"
            )
            figure.update_layout(height=270, margin_t=48)
            figures.append((str(rank), figure))
        return with_slider(figures, "rank ", active=STATIC_RANKS.index(8))

    def _rank_changed(self) -> None:
        self._show_numbers()
        self._draw_cores()
        self._show_summary()

    def _show_numbers(self) -> None:
        shape = self.shape
        say(self.tiles, tiles([
            (f"{shape.params:,}", "weights in the cores"),
            (f"{shape.dense_params:,}", "weights if dense"),
            (f"{shape.compression:,.0f}× smaller", "dense / cores"),
            (format_bytes(4 * shape.params), "fp32 bytes, predicted"),
        ]))  # fmt: skip
        say(self.line, sentence(words_at(self.rank.value)))

    def _redraw_cores(self) -> None:
        with self.cores.edit(words_at(self.rank.value)) as figure:
            draw_cores(figure, self.shape, MAX_RANK)

    def _job(self) -> Iterator[Progress]:
        self.rank_trained = self.rank.value
        config = TrainConfig(steps=self.steps, evaluate_every=25, seed=self.state.seed)
        features = (IN_FEATURES, OUT_FEATURES, CLASSES)
        lane = self.lane = Lane(f"rank {self.rank_trained}", features, "tt", self.rank_trained, config)
        while not lane.finished:
            row = lane.advance()
            yield Progress(row.step, row.step / self.steps)

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self._draw_run()

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.lane is not None:
            self._draw_run()
            self.state.record("start", self._numbers(self.lane))
        self._show_summary()

    def _draw_run(self) -> None:
        lane = self.lane
        if lane is None:
            return
        with self.curves.edit() as figure:
            fill_training(figure, [lane.curve("steps")])
        self.bar.show(self.runner, ", ".join(_spoken(self._numbers(lane))))

    def _numbers(self, lane: Lane) -> dict[str, Any]:
        return {
            "rank": self.rank_trained,
            "steps": lane.trainer.steps_done,
            "loss_nats": lane.loss_nats,
            "accuracy_percent": lane.accuracy_percent,
            "step_time_ms": lane.step_time_ms,
            "parameters": lane.parameters,
        }

    def _measured(self) -> str:
        spoken = _spoken(self._numbers(self.lane)) if self.lane is not None else []
        return f" (rank {self.rank_trained}, measured here: {', '.join(spoken)})" if spoken else ""

    def _show_summary(self) -> None:
        if self.lane is None or self.runner.active:
            say(self.summary, "")
            return
        threads = torch.get_num_threads()
        text = (
            f"Measured here, CPU, {threads} thread{'s' if threads > 1 else ''}, with rank {self.rank_trained}: "
            f"{', '.join(_spoken(self._numbers(self.lane)))}."
        )
        if self.rank_trained != self.rank.value:
            text += f" The slider now says {self.rank.value}: press Train to see that rank."
        say(self.summary, sentence(text))


def _spoken(numbers: dict[str, Any]) -> list[str]:
    """The numbers of a run that exist so far, each with its unit."""
    templates = {
        "accuracy_percent": "test accuracy {:.1f} %",
        "loss_nats": "training loss {:.2g} nats",
        "step_time_ms": "{:.1f} ms a step",
    }
    return [text.format(numbers[key]) for key, text in templates.items() if numbers[key] is not None]
