"""Lesson 13: recorded runs replayed with their provenance, floors where none is recorded, or a run on one's own GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ipywidgets as widgets
import plotly.graph_objects as go
import torch

from comera_lab.experiments.bench import record_gpu
from comera_lab.experiments.bench_gpu import SECONDS
from comera_lab.experiments.recorder import Recorder, as_dict
from comera_lab.experiments.recordings import Case, Recording, computed_floors, find_recordings, recording_of
from comera_lab.experiments.roofline import PRINTED, Problem
from comera_lab.experiments.rows import BenchRow
from comera_lab.panels.figures import with_slider
from comera_lab.panels.gpu_figures import AROUND_PX, BAR_PX, trace_figure
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, heading, say, sentence, text_widget

COMMAND = "comera-lab bench --suite gpu"
NO_GPU_RUN = f"No run on a GPU is recorded yet. To record one, on a machine that has it: {COMMAND}"
MINE = "my GPU, measured here"
WIDTHS = (4096, 768, 2048, 8192)
STATIC_CASES = 8


class TracePanel(RunPanel):
    """Times of one recording at a time, always with device, date and commit; rows that lack them are named, not shown.

    Controls: `recording`, `operation`, `case`; `bar.start` runs the GPU suite here, where there is a CUDA device, and
    writes its file into the working directory. Figure: `bars`. `recordings` maps a name to a Recording, `refusals`
    says what was left out and why. `folders` are searched for recordings instead of the kit's own.
    """

    kind = "trace"

    def __init__(self, state: LabState | None = None, folders: Sequence[Path] | None = None) -> None:
        super().__init__(state)
        self._load(folders)
        first = next(iter(self.recordings))
        self.recording = ChoiceControl(
            "recording", "recording", first, tuple(self.recordings), "Whose numbers are shown: a run, or floors."
        )
        self.operation = ChoiceControl("operation", "operation", "-", ("-",), "What was timed.")
        self.case = ChoiceControl("case", "case", "-", ("-",), "Mode and sizes.")
        self._offer_operations()
        self.bars = self._live(trace_figure(self.shown, self.source.kind), "t-bars", self._words())
        self.label, self.line, self.notes = (text_widget(" ", f"t-{name}") for name in ("label", "line", "notes"))
        self.case.dropdown.layout.flex = "0 1 620px"
        self.recording.on_change(self._guarded(lambda name: self._offer_operations()))
        self.operation.on_change(self._guarded(lambda name: self._offer_cases()))
        for control in (self.recording, self.operation, self.case):
            control.on_change(self._guarded(lambda value: self._redraw()))
        bar = self._run_bar("Run on my GPU", f"Runs {COMMAND}: some {SECONDS / 60:.0f} minutes.", resume=False)
        self._changed(self.runner)
        self._say()
        self._compose(
            heading(
                "Real runs, replayed",
                "Bars are medians, whiskers go from p20 to p80. Every number belongs to the device, day and commit "
                "under the chart; nothing is shown that cannot name them.",
            ),
            widgets.VBox([control.widget for control in (self.recording, self.operation, self.case)]),
            bar.widget, self.bars.widget, self.label, self.line, self.notes,
        )  # fmt: skip

    @property
    def source(self) -> Recording:
        """The chosen recording."""
        return self.recordings[self.recording.value]

    @property
    def shown(self) -> Case:
        """The chosen case."""
        return next(case for case in self.source.of(self.operation.value) if case.words == self.case.value)

    def table(self) -> str:
        case, lines = self.shown, [f"{self.operation.value}: {self.case.value}", self.source.label]
        lines.append(f"{'provider':<24}{'ms':>11}{'p20':>11}{'p80':>11}{'floor ms':>11}{'calls':>7}")
        for lane in case.lanes:
            numbers = "".join(f"{'-' if x is None else f'{x:.4g}':>11}" for x in (lane.p20, lane.p80, lane.floor_ms))
            lines.append(f"{lane.provider:<24}{lane.time_ms:>11.4g}{numbers}{lane.repeats or '-':>7}")
        return "\n".join([*lines, *case.ratios, *self._notes()])

    def static(self) -> go.Figure:
        """The chosen recording's cases of the operation with a slider; the label of the source is the title."""
        cases = self.source.of(self.operation.value)[:STATIC_CASES]
        height = AROUND_PX + BAR_PX * max(len(case.lanes) for case in cases)
        figures = []
        for case in cases:
            figure = trace_figure(case, self.source.kind, height)
            figure.data[0].error_x = None  # a slider cannot move whiskers
            figure.update_xaxes(title_text=f"milliseconds, {self.source.label}")
            figures.append((case.words, figure))
        return with_slider(figures, "")

    def _load(self, folders: Sequence[Path] | None) -> None:
        found, self.refusals = find_recordings(folders)
        if not any(recording.name.startswith("gpu_") for recording in found):
            found = [*(computed_floors(ceilings, _problems()) for ceilings in PRINTED), *found]
        self.recordings: dict[str, Recording] = {}
        for recording in found:
            name, count = recording.name, 2
            while name in self.recordings:
                name, count = f"{recording.name}, run {count}", count + 1
            self.recordings[name] = recording

    def _offer_operations(self) -> None:
        names = self.source.operations
        kept = self.operation.value if self.operation.value in names else names[0]
        self.operation.offer_options(names, kept)
        self._offer_cases()

    def _offer_cases(self) -> None:
        words = tuple(case.words for case in self.source.of(self.operation.value))
        self.case.offer_options(words, self.case.value if self.case.value in words else words[0])

    def _redraw(self) -> None:
        self.bars.replace(trace_figure(self.shown, self.source.kind), self._words())
        self._say()

    def _say(self) -> None:
        label = self.source.label
        say(self.label, sentence(f"{label[0].upper()}{label[1:]}."))
        say(self.line, sentence(self._words()))
        say(self.notes, "".join(sentence(note) for note in self._notes()))

    def _words(self) -> str:
        lanes, kind = self.shown.lanes, self.source.kind
        times = "; ".join(f"{lane.provider} {lane.time_ms:.4g} ms" for lane in lanes)
        slowest, fastest = (pick(lanes, key=lambda lane: lane.time_ms) for pick in (max, min))
        text = f"{self.shown.words}: {times} ({kind})."
        if slowest is not fastest:
            text += f" {fastest.provider} takes {slowest.time_ms / fastest.time_ms:.3g} times less than "
            text += f"{slowest.provider}."
        near = [f"{lane.provider} {100 * lane.floor_ms / lane.time_ms:.0f} %" for lane in lanes if lane.floor_ms]
        return f"{text} Share of the floor: {', '.join(near)}." if near else text

    def _notes(self) -> list[str]:
        """What is missing: a GPU run, a GPU, rows that were refused."""
        missing = [] if any(r.name.startswith("gpu_") for r in self.recordings.values()) else [NO_GPU_RUN]
        here = [] if torch.cuda.is_available() else ["There is no CUDA device here, so nothing can be run on it."]
        return [*missing, *here, *self.refusals]

    def _job(self) -> Iterator[Progress]:
        began, number = time.monotonic(), 0
        for number, recorder in enumerate(record_gpu(), start=1):
            yield Progress(number, min(0.99, (time.monotonic() - began) / SECONDS), recorder)
        yield Progress(number, 1.0)

    def _item(self, progress: Progress) -> None:
        recorder: Recorder | None = progress.payload
        if recorder is None:
            return
        last = recorder.rows[-1]
        assert isinstance(last, BenchRow)
        self.bar.show(self.runner, f"{last.op}, {last.provider}, {last.mode}")
        rows = [as_dict(row) for row in recorder.rows]
        made = recording_of(str(recorder.path), rows[0], rows[1:], "measured here")
        if made.cases and made != self.recordings.get(MINE):
            self.recordings = {**self.recordings, MINE: made}
            self.recording.offer_options(tuple(self.recordings), MINE)
            self._offer_operations()
            self._redraw()

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        self.bar.start.disabled = runner.active or not torch.cuda.is_available()


def _problems() -> list[Problem]:
    return [Problem(rows=16_384, in_features=width, out_features=width, rank=64) for width in WIDTHS]
