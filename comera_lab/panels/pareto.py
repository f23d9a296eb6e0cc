"""Lessons 06 and 08: every finished rank training as a dot, size against accuracy, beside recorded ones."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from comera_lab.experiments.results import Recorded, Study
from comera_lab.memory import mib
from comera_lab.panels.figures import with_slider
from comera_lab.panels.panel import Panel
from comera_lab.panels.rank_figures import Dot, Upright, fill_pareto, pareto_figure
from comera_lab.panels.rank_run import ELEMENT_BYTES, RankSettings
from comera_lab.panels.rank_tasks import TASKS, RankTask
from comera_lab.panels.ranks import SETTINGS
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, heading, say, sentence, text_widget

AXES = ("MiB", "whole model, times smaller", "tensorised part, times smaller")
NOTHING = "choose a run"
# CoMERA (arXiv 2405.14377) claims "43x to 361x" and 256 MB to 3.2 MB for an encoder on MNLI. The first
# is a ratio of whole models and so is 256 / 3.2 = 80; 361 fits only the tensorised layers (253.67 MiB / 0.70 MiB).
PUBLISHED = {
    AXES[0]: (),
    AXES[1]: (("published: 43×", 43.0), ("published: 80×", 80.0)),
    AXES[2]: (("published: 361×", 361.0),),
}


class ParetoPanel(Panel):
    """Dots of `state.rank_runs`; a click on one, or the `chosen` list, loads its settings into RankTrainingPanel.

    Beside them stand the recorded studies of `task`, else of `state.rank_task`. Controls: `axis` (MiB, or times
    smaller with the whole model or the tensorised part as denominator), `study` and `chosen`.
    """

    kind = "pareto"

    def __init__(self, state: LabState | None = None, task: RankTask | None = None) -> None:
        super().__init__(state)
        self.task = task or TASKS[self.state.rank_task]
        self.studies = {study.label: study for study in self.task.recorded() if not study.note}
        self.axis = ChoiceControl(
            "pareto_axis", "x axis", AXES[0], AXES,
            "Size in MiB, or how many times smaller than the dense twin, with either denominator.",
        )  # fmt: skip
        self.study = ChoiceControl(
            "pareto_study", "recorded", next(iter(self.studies)), tuple(self.studies),
            "Which recorded study stands beside your own runs: they differ in their training steps.",
        )  # fmt: skip
        self.chosen = ChoiceControl(
            "pareto_run", "settings of", NOTHING, (NOTHING, *self._names()),
            "Loads the settings of a finished run into the controls of the rank training panel.",
        )  # fmt: skip
        self.dots = self._live(self._figure(self.axis.value), "t-pareto", "Accuracy against size of the finished runs.")
        self.dots.on_click(self._guarded(self._clicked))
        self.line, self.source = text_widget(" ", "t-pareto-line"), text_widget(css_class="t-pareto-source")
        self.axis.on_change(self._guarded(lambda axis: self._draw()))
        self.study.on_change(self._guarded(lambda study: self._draw()))
        self.chosen.on_change(self._guarded(self._load))
        self._watch("rank_runs", lambda change: self._runs_changed())
        self._say_default()
        choices = (self.axis, self.study, self.chosen) if len(self.studies) > 1 else (self.axis, self.chosen)
        self._compose(
            heading(
                "Size against accuracy",
                "Every finished run of the rank training panel is a dot. Up is better, and so is small. Click a dot, "
                "or choose a run, to load its settings.",
            ),
            *(choice.widget for choice in choices), self.dots.widget, self.line, self.source,
        )  # fmt: skip

    def table(self) -> str:
        study, dense = self._recorded, self._recorded.dense
        lines = [f"{'':<10}{'MiB':>8}{'whole ×':>9}{'tensor ×':>10}{'accuracy':>10}  what"]
        for name, run in zip(self._names(), self._runs, strict=True):
            what = f"measured here on {run['data']}: {_settings(run).words()}"
            lines.append(_row(name, run["parameters"], run["cores"], run["accuracy_percent"], what, dense))
        for model in study.models:
            what = f"recorded, {study.label}, {model.span}"
            lines.append(_row(model.name, model.parameters, model.cores, model.accuracy_percent, what, dense))
        lines.append(f"Accuracy is that on the {self.task.held_out} side. Recorded rows: {study.source}")
        for axis, marks in PUBLISHED.items():
            lines += [f"{label} ({axis}; another model, on MNLI)" for label, _ in marks]
        return "\n".join(lines)

    def static(self) -> go.Figure:
        """The dots with each of the three axes, as a figure with a slider."""
        return with_slider([(axis, self._figure(axis)) for axis in AXES], "x axis: ")

    @property
    def _recorded(self) -> Study:
        return self.studies[self.study.value]

    @property
    def _runs(self) -> list[dict[str, Any]]:
        """The finished runs of this task."""
        return [run for run in self.state.rank_runs if run["task"] == self.task.name]

    def _names(self) -> tuple[str, ...]:
        return tuple(f"run {number}" for number in range(1, len(self._runs) + 1))

    def _parts(self, axis: str) -> tuple[list[Dot], list[Dot], list[Upright], str, bool]:
        study, dense = self._recorded, self._recorded.dense
        runs = [
            Dot(str(k), _size(axis, run["parameters"], run["cores"], dense), run["accuracy_percent"], _hover(k, run))
            for k, run in enumerate(self._runs, start=1)
        ]
        references = [
            Dot(
                model.name, _size(axis, model.parameters, model.cores, dense), model.accuracy_percent,
                f"{model.name}: {model.accuracy_percent:.1f} % in {study.label}, {model.parameters:,} parameters"
                f"<br>recorded, {model.span}",
                (100 * min(model.accuracies), 100 * max(model.accuracies)),
            )
            for model in study.models
        ]  # fmt: skip
        uprights = [Upright(label, x) for label, x in PUBLISHED[axis]]
        title = "MiB of weights, fp32 (counted)" if axis == AXES[0] else f"{axis} than the dense twin (counted)"
        return runs, references, uprights, title, axis == AXES[0]

    def _figure(self, axis: str) -> go.Figure:
        return pareto_figure(*self._parts(axis), f"{self.task.held_out} accuracy (%)")

    def _draw(self) -> None:
        with self.dots.edit() as figure:
            fill_pareto(figure, *self._parts(self.axis.value))
        if self.chosen.value == NOTHING:
            self._say_default()

    def _runs_changed(self) -> None:
        names = self._names()
        self.chosen.offer_options((NOTHING, *names), NOTHING)
        self._draw()

    def _clicked(self, trace: int, point: int) -> None:
        if trace == 1:
            self.chosen.value = self._names()[point]
            self._load(self.chosen.value)

    def _load(self, name: str) -> None:
        """Write the settings of a run into the state, where the rank training panel finds them."""
        if name == NOTHING:
            self._say_default()
            return
        run = self._runs[self._names().index(name)]
        for setting in SETTINGS:
            setattr(self.state, setting, run[setting])
        words = f"{name} loaded: {_settings(run).words()}. Change one thing and press Start in the other panel."
        say(self.line, sentence(words))

    def _say_default(self) -> None:
        count = len(self._runs)
        runs = "No run is finished yet" if not count else f"{count} finished run{'s' if count > 1 else ''}"
        text = f"{runs}. Diamonds are recorded, {self._recorded.label}; a bar spans the seeds where there are several."
        if PUBLISHED[self.axis.value]:
            text += " The upright lines are published sizes of another model on other data: compare sizes only."
        say(self.line, sentence(text))
        say(self.source, f'<p class="comera-lead">{html.escape(self._source_words())}</p>')

    def _source_words(self) -> str:
        recorded = self._recorded
        others = {run["data"] for run in self._runs} - {recorded.data}
        warning = f" Your runs read other data ({', '.join(sorted(others))}): compare sizes only." if others else ""
        return f"Diamonds: {recorded.source}, accuracy on {recorded.data}.{warning}"


def _size(axis: str, parameters: int, cores: int, dense: Recorded) -> float:
    if axis == AXES[0]:
        return mib(ELEMENT_BYTES * parameters)
    return dense.parameters / parameters if axis == AXES[1] else dense.cores / max(cores, 1)


def _settings(run: dict[str, Any]) -> RankSettings:
    return RankSettings(**{name: run[name] for name in SETTINGS})


def _hover(number: int, run: dict[str, Any]) -> str:
    return f"run {number}: {run['accuracy_percent']:.1f} %, {run['parameters']:,} parameters, measured here<br>" + (
        _settings(run).words().replace(", ", "<br>")
    )


def _row(name: str, parameters: int, cores: int, accuracy: float, what: str, dense: Recorded) -> str:
    sizes = [_size(axis, parameters, cores, dense) for axis in AXES]
    return f"{name:<10}{sizes[0]:>8.3f}{sizes[1]:>9.1f}{sizes[2]:>10.1f}{accuracy:>9.1f}%  {what}"
