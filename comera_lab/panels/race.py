"""Lesson 04: a dense network and its tensor-train twin train side by side, with the same seed and the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from comera_lab.experiments.train import TrainConfig
from comera_lab.memory import mib
from comera_lab.panels.figures import Curve, fill_training, training_curves, with_slider
from comera_lab.panels.lanes import Axis, Lane, empty_curve
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

MAX_WIDTH, MAX_RANK = 2048, 64
CLASSES, IN_FEATURES = 10, 784
# With three things to redraw at each refresh this stays under ten messages a second.
REFRESHES_PER_SECOND = 3.0
NAMES = ("dense", "tensor train")
STATIC_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


class RacePanel(RunPanel):
    """Lanes "dense" and "tensor train" of a network 784 → width → width → 10, each with the same seconds to train.

    The lane that has trained for less time goes next, so both see the same machine. Controls: `width`, `rank`,
    `seconds` (for each lane), `axis` ("steps" or "seconds"), `bar.start`, `bar.stop`, `bar.resume`. Figure: `curves`.
    `lanes` holds the two Lanes of the last run.
    """

    kind = "race"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        s = self.state
        self.runner.of = " of both lanes"
        self.lanes: list[Lane] = []
        self._trained: tuple[int, int] = (0, 0)
        self._pace = Pace(REFRESHES_PER_SECOND)
        self.width = NumberControl("width", "width", min(s.width, MAX_WIDTH), 16, MAX_WIDTH,
                                   "Neurons in each of the two hidden layers, the same in both lanes.")  # fmt: skip
        self.rank = NumberControl("rank", "rank", min(s.rank, MAX_RANK), 1, MAX_RANK,
                                  "One rank for all bonds of the tensor-train lane.")  # fmt: skip
        self.seconds = NumberControl("seconds", "budget", s.seconds, 1.0, 120.0,
                                     "Training seconds that each lane gets.", unit="seconds a lane")  # fmt: skip
        self.axis = ChoiceControl("axis", "x axis", "seconds", ("seconds", "steps"),
                                  "Compare the lanes after equal training seconds or after equal steps.")  # fmt: skip
        self.curves = self._live(
            training_curves([empty_curve(name) for name in NAMES], "training seconds"), "t-curves",
            "Training loss and test accuracy of both lanes.",
        )  # fmt: skip
        self.numbers, self.verdict = text_widget(" ", "t-numbers"), text_widget(css_class="t-verdict")
        bar = self._run_bar("Start", "Trains both networks in turns, on the same batches of digits.")
        for name in ("width", "rank", "seconds"):
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._show_verdict())
        self.axis.on_change(self._guarded(lambda axis: self._draw_curves()))
        left, right = widgets.VBox([self.width.widget, self.rank.widget]), widgets.VBox(
            [self.seconds.widget, self.axis.widget])  # fmt: skip
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._show_numbers()
        self._compose(
            heading(
                "Dense against tensor train",
                "Two networks 784 → width → width → 10, the same seed and the same batches. Which is ahead after equal "
                "seconds, and which after equal steps?",
            ),
            columns, bar.widget, self.curves.widget, self.numbers, self.verdict,
        )  # fmt: skip

    def summary(self) -> list[dict[str, Any]]:
        """One dict of numbers per lane; empty before the first run."""
        return [
            {
                "lane": lane.name,
                "learning_rate": lane.learning_rate,
                "parameters": lane.parameters,
                "memory_bytes": lane.measured.pools.total if lane.measured else None,
                "steps": lane.trainer.steps_done,
                "seconds": lane.trainer.elapsed_s,
                "step_time_ms": lane.step_time_ms,
                "loss_nats": lane.loss_nats,
                "accuracy_percent": lane.accuracy_percent,
            }
            for lane in self.lanes
        ]

    def table(self) -> str:
        if not self.lanes:
            return "No race has been run yet: press Start, or call run(wait=True)."
        rows = [_COLUMNS, *(_cells(row) for row in self.summary())]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *self._verdict()])

    def static(self) -> go.Figure:
        """The last run, with a slider over its time; before the first run an empty frame that says so."""
        axis = self._axis
        figures = []
        for share in STATIC_SHARES:
            curves = [_until(lane.curve(axis), share * self.seconds.value, lane) for lane in self.lanes]
            figure = training_curves(curves or [empty_curve(name) for name in NAMES], self._axis_title)
            figures.append((f"{share * self.seconds.value:g} s", figure))
        prefix = "after " if self.lanes else "no race has been run yet: "
        return with_slider(figures, prefix, active=len(STATIC_SHARES) - 1)

    @property
    def _axis(self) -> Axis:
        return "seconds" if self.axis.value == "seconds" else "steps"

    @property
    def _axis_title(self) -> str:
        return "training seconds" if self._axis == "seconds" else "steps"

    def _job(self) -> Iterator[Progress]:
        width, rank, seconds = self.width.value, self.rank.value, self.seconds.value
        self._trained = (width, rank)
        config = TrainConfig(steps=10**9, seconds=seconds, evaluate_every=20, seed=self.state.seed)
        features = (IN_FEATURES, width, width, CLASSES)
        dense, train = Lane(NAMES[0], features, "dense", 1, config), Lane(NAMES[1], features, "tt", rank, config)
        lanes = self.lanes = [dense, train]
        while racing := [lane for lane in lanes if not lane.finished]:
            min(racing, key=lambda lane: lane.trainer.elapsed_s).advance()
            spent = sum(min(lane.trainer.elapsed_s, seconds) for lane in lanes)
            yield Progress(sum(lane.trainer.steps_done for lane in lanes), spent / (2 * seconds))

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self._draw_curves()
            self._show_numbers()
            self.bar.show(self.runner, self._clock())

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.lanes:
            self._draw_curves()
            self._show_numbers()
            self.bar.show(runner, self._clock())
            self.state.record("race", {"lanes": self.summary()})
        self._show_verdict()

    def _clock(self) -> str:
        return ", ".join(f"{lane.name} {lane.trainer.elapsed_s:.1f} s" for lane in self.lanes)

    def _draw_curves(self) -> None:
        curves = [lane.curve(self._axis) for lane in self.lanes] or [empty_curve(name) for name in NAMES]
        with self.curves.edit() as figure:
            fill_training(figure, curves, self._axis_title)

    def _show_numbers(self) -> None:
        rows = [_cells(row) for row in self.summary()] or [(name, *["–"] * (len(_COLUMNS) - 1)) for name in NAMES]
        head = "".join(f"<th>{cell}</th>" for cell in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        note = (
            '<p class="comera-lead">MiB and ms are measured here: tensors of a whole training step, median time. '
            "Each lane has the learning rate that did best for it in the recorded study.</p>"
        )
        say(self.numbers, f"<table><tr>{head}</tr>{body}</table>{note}")

    def _show_verdict(self) -> None:
        text = "" if self.runner.active else "".join(sentence(line) for line in self._verdict())
        say(self.verdict, text)

    def _verdict(self) -> list[str]:
        """Equal seconds, equal steps and the honest word about speed; empty until both lanes have been tested."""
        if len(self.lanes) < 2 or any(lane.accuracy_percent is None for lane in self.lanes):
            return []
        dense, train = self.lanes
        steps = min(dense.trainer.steps_done, train.trainer.steps_done)
        seconds = min(dense.trainer.elapsed_s, train.trainer.elapsed_s)
        ends = [f"{one.name} {one.accuracy_percent:.1f} % in {one.trainer.steps_done:,} steps" for one in self.lanes]
        lines = [f"Equal seconds ({seconds:.1f} s each): {'; '.join(ends)}."]
        tested = [lane.at_step(steps) for lane in self.lanes]
        if all(tested):
            pairs = zip(self.lanes, tested, strict=True)
            at = [f"{lane.name} {found[1]:.1f} % (tested at {found[0]:,})" for lane, found in pairs if found]
            lines.append(f"Equal steps ({steps:,}): {'; '.join(at)}.")
        lines.append(speed_words(dense, train))
        width, rank = self._trained
        if (width, rank) != (self.width.value, self.rank.value):
            lines.append(f"This race was run with width {width} and rank {rank}; press Start for the new setting.")
        return lines


_COLUMNS = ("lane", "rate", "parameters", "MiB a step", "ms a step", "steps", "loss, nats", "test accuracy")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None, pattern: str) -> str:
        return "–" if value is None else pattern.format(value)

    return (
        row["lane"],
        f"{row['learning_rate']:g}",
        f"{row['parameters']:,}",
        "–" if row["memory_bytes"] is None else f"{mib(row['memory_bytes']):.2f}",
        shown(row["step_time_ms"], "{:.2f}"),
        f"{row['steps']:,}",
        shown(row["loss_nats"], "{:.2g}"),
        shown(row["accuracy_percent"], "{:.1f} %"),
    )


def speed_words(dense: Lane, train: Lane) -> str:
    """Which lane is faster here, by how much, and what that buys: smaller is not the same as faster."""
    assert dense.step_time_ms is not None and train.step_time_ms is not None
    ratio = train.step_time_ms / dense.step_time_ms
    smaller = dense.parameters / train.parameters
    size = f"{smaller:,.0f}× fewer parameters" if smaller >= 1 else f"{1 / smaller:,.1f}× more parameters"
    if ratio > 1.05:
        return (
            f"Measured here: a tensor-train step takes {ratio:.1f}× as long as a dense one, with {size}. Small is "
            "not fast: many thin products cost more than one product of this width. Try a larger width or a smaller "
            "rank."
        )
    if ratio < 0.95:
        return f"Measured here: a tensor-train step is {1 / ratio:.1f}× faster than a dense one, with {size}."
    return f"Measured here: both steps take the same time within 5 %; the tensor train has {size}."


def _until(curve: Curve, seconds: float, lane: Lane) -> Curve:
    """The part of a curve that `lane` had drawn after so many training seconds."""
    steps, tests = lane.steps.sample("seconds") <= seconds, lane.evaluations.sample("seconds") <= seconds
    return Curve(
        curve.name,
        np.asarray(curve.x[steps]),
        np.asarray(curve.loss_nats[steps]),
        np.asarray(curve.eval_x[tests]),
        np.asarray(curve.accuracy_percent[tests]),
    )
