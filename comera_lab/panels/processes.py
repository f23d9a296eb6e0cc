"""Lesson 15: a training by one, two or four processes of this machine, and the bytes that each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.experiments.distributed import processes
from comera_lab.experiments.scale_out import ScaleOut, predicted_bytes, train_part
from comera_lab.memory import POOLS, mib
from comera_lab.panels.figures import fill_memory, memory_bars, with_slider
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

COUNTS = ("1", "2", "4")
WIDEST = 10.5  # MiB: AdamW copied to every process


class ProcessesPanel(RunPanel):
    """One training, spread over processes of this machine by DDP or FSDP2.

    Controls: `how`, `processes`, `optimizer`, `steps`, `bar.start`, `bar.stop`. Figure: `bars`. `results` are what the
    processes of the last run gave, empty before.
    """

    kind = "processes"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.results: list[dict[str, Any]] = []
        self.settings_run = ScaleOut()
        self._work: Iterator[tuple[int, Any] | None] | None = None
        self._last = ""
        self.how = ChoiceControl(
            "processes_how", "how", "fsdp", ("ddp", "fsdp"),
            "DDP copies the model to every process; FSDP splits it, and puts a layer together while it is used.",
        )  # fmt: skip
        self.processes = ChoiceControl(
            "processes_count", "processes", "2", COUNTS, "How many processes share the batch of 64 digits."
        )
        self.optimizer = ChoiceControl(
            "processes_optimizer", "optimizer", "adamw", ("adamw", "coap"), "Who updates the weights."
        )
        self.steps = NumberControl("processes_steps", "steps", 20, 2, 200, "Training steps.", step=2)
        self.bars = self._live(
            _bars(self._rows(), "MiB"),
            "t-process-bars",
            "Bytes that each process holds, predicted and measured.",
        )
        self.numbers = text_widget(" ", "t-process-numbers")
        bar = self._run_bar("Start", "Starts the processes and trains with all of them.", resume=False)
        for control in (self.how, self.processes, self.optimizer):
            control.on_change(self._guarded(lambda value: self._forget()))
        columns = widgets.HBox(
            [
                widgets.VBox([self.how.widget, self.processes.widget]),
                widgets.VBox([self.optimizer.widget, self.steps.widget]),
            ]
        )
        columns.add_class("comera-columns")
        self._compose(
            heading(
                "One training, several processes",
                "Each process is a program of its own, with its own memory; they talk over the network of this "
                "machine. The top bar is predicted from shapes. Press Start and compare. Activations are left out.",
            ),
            columns, bar.widget, self.bars.widget, self.numbers,
        )  # fmt: skip
        self._say()

    def settings(self) -> ScaleOut:
        """What the controls say now."""
        kind: Any = self.how.value
        count, steps = int(self.processes.value), int(self.steps.value)
        return ScaleOut(processes=count, kind=kind, optimizer=self.optimizer.value, steps=steps)

    def table(self) -> str:
        lines = [
            f"{name}: {sum(row.values()):.3f} MiB: " + ", ".join(f"{pool} {row[pool]:.3f}" for pool in POOLS[:3])
            for name, row in self._rows().items()
        ]
        return "\n".join([*lines, *self._words()])

    def static(self) -> go.Figure:
        """The predicted bars with a slider over the number of processes."""
        figures = []
        for count in COUNTS:
            rows = {
                f"{kind}, {optimizer}": _mib(
                    predicted_bytes(ScaleOut(processes=int(count), kind=kind, optimizer=optimizer))
                )
                for kind in ("ddp", "fsdp")
                for optimizer in ("adamw", "coap")
            }
            figures.append((count, _bars(rows, "MiB in each process (predicted)")))
        return with_slider(figures, "processes ", active=1)

    def close(self) -> None:
        super().close()
        self._end()

    def _rows(self) -> dict[str, dict[str, float]]:
        rows = {"predicted": _mib(predicted_bytes(self.settings()))}
        for rank, result in enumerate(self.results):
            rows[f"measured, process {rank}"] = _mib(result["held"])
        return rows

    def _words(self) -> list[str]:
        if not self.results:
            return ["Nothing has been trained yet: press Start, or call run(wait=True)."]
        losses = {f"{result['loss']:.4f}" for result in self.results}
        words = [f"Loss {' and '.join(sorted(losses))} nats after {self.settings_run.steps} steps (measured here)."]
        bases = {result["bases"] for result in self.results}
        if bases != {None} and len(self.results) > 1:
            same = "bit for bit the same basis" if len(bases) == 1 else "different bases"
            words.append(f"The {len(self.results)} processes ended with {same} (compared here).")
        return words

    def _job(self) -> Iterator[Progress]:
        self._end()
        self.results, self.settings_run = [], self.settings()
        results: dict[int, Any] = {}
        count, length = self.settings_run.processes, self.settings_run.steps
        self._work = processes(count, train_part, self.settings_run, results=results, timeout_s=240.0)
        step = 0
        for said in self._work:
            if said is not None:
                step, loss, ms = said[1]
                self._last = f"loss {loss:.3f} nats · {ms:.0f} ms a step"
            yield Progress(step, step / length)
        self.results = [results[rank] for rank in range(count)]

    def _item(self, progress: Progress) -> None:
        self.bar.show(self.runner, self._last if progress.step else "starting the processes")

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "failed"):
            self._end()
        if runner.state == "finished":
            self._draw()
            self.bar.show(runner, self._last)

    def _end(self) -> None:
        """End processes that are still there."""
        work, self._work = self._work, None
        if work is not None:
            work.close()  # type: ignore[attr-defined]

    def _forget(self) -> None:
        if not self.runner.active:
            self.results = []
        self._draw()

    def _draw(self) -> None:
        with self.bars.edit("; ".join(self._words())) as figure:
            fill_memory(figure, self._rows())
        self._say()

    def _say(self) -> None:
        total = predicted_bytes(self.settings())
        first = f"Predicted {mib(sum(total.values())):.2f} MiB in each process, without activations."
        say(self.numbers, sentence(" ".join([first, *self._words()])))


def _bars(rows: dict[str, dict[str, float]], unit: str) -> go.Figure:
    figure = memory_bars(rows, WIDEST, unit)
    figure.update_traces(showlegend=False, selector={"name": "activations"})
    return figure


def _mib(pools: dict[str, int]) -> dict[str, float]:
    return {pool: mib(pools.get(pool, 0)) for pool in POOLS}
