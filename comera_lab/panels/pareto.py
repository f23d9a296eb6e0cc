"""Lesson 06: every finished rank training as a dot, size against accuracy, beside recorded and published sizes."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from comera_lab.memory import mib
from comera_lab.panels.figures import with_slider
from comera_lab.panels.panel import Panel
from comera_lab.panels.rank_figures import Dot, Upright, fill_pareto, pareto_figure
from comera_lab.panels.rank_run import ELEMENT_BYTES, RankSettings
from comera_lab.panels.ranks import SETTINGS
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, heading, say, sentence, text_widget

AXES = ("MiB", "whole model, times smaller", "tensorised part, times smaller")
NOTHING = "choose a run"
# (name, parameters, cores, mean accuracy of three seeds): data/results/digits_mlp_cpu.jsonl, 600 steps, fixed ranks.
RECORDED = (
    ("dense", 669_706, 663_552, 0.9851),
    ("rank 2", 6_482, 328, 0.6696),
    ("rank 4", 7_314, 1_160, 0.8879),
    ("rank 8", 10_490, 4_336, 0.9444),
    ("rank 16", 19_342, 13_188, 0.9762),
)
DENSE_PARAMETERS, DENSE_TENSORISED = RECORDED[0][1:3]
# The abstract of CoMERA (arXiv 2405.14377) says "43x to 361x" and 256 MB to 3.2 MB for an encoder on MNLI. The first
# is a ratio of whole models and so is 256 / 3.2 = 80; 361 fits only the tensorised layers (253.67 MiB / 0.70 MiB).
PUBLISHED = {
    AXES[0]: (),
    AXES[1]: (("published: 43×", 43.0), ("published: 80×", 80.0)),
    AXES[2]: (("published: 361×", 361.0),),
}


class ParetoPanel(Panel):
    """Dots of `state.rank_runs`; a click on one, or the `chosen` list, loads its settings into RankTrainingPanel.

    Controls: `axis` (MiB, or times smaller with the whole model or the tensorised part as denominator), `chosen`.
    """

    kind = "pareto"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.axis = ChoiceControl(
            "pareto_axis", "x axis", AXES[0], AXES,
            "Size in MiB, or how many times smaller than the dense twin, with either denominator.",
        )  # fmt: skip
        self.chosen = ChoiceControl(
            "pareto_run", "settings of", NOTHING, (NOTHING, *self._names()),
            "Loads the settings of a finished run into the controls of the rank training panel.",
        )  # fmt: skip
        self.dots = self._live(self._figure(self.axis.value), "t-pareto", "Accuracy against size of the finished runs.")
        self.dots.on_click(self._guarded(self._clicked))
        self.line = text_widget(" ", "t-pareto-line")
        self.axis.on_change(self._guarded(lambda axis: self._draw()))
        self.chosen.on_change(self._guarded(self._load))
        self._watch("rank_runs", lambda change: self._runs_changed())
        self._say_default()
        self._compose(
            heading(
                "Size against accuracy",
                "Every finished run of the rank training panel is a dot. Up is better, and so is small. Click a dot, "
                "or choose a run, to load its settings.",
            ),
            self.axis.widget, self.chosen.widget, self.dots.widget, self.line,
        )  # fmt: skip

    def table(self) -> str:
        lines = [f"{'':<8}{'MiB':>8}{'whole ×':>9}{'tensor ×':>10}{'accuracy':>10}  what"]
        for name, run in zip(self._names(), self.state.rank_runs, strict=True):
            lines.append(_row(name, run["parameters"], run["cores"], run["accuracy_percent"], _settings(run).words()))
        for name, parameters, cores, accuracy in RECORDED:
            lines.append(_row(name, parameters, cores, 100 * accuracy, "recorded, 600 steps, mean of 3 seeds"))
        for axis, marks in PUBLISHED.items():
            lines += [f"{label} ({axis}; another model, on MNLI)" for label, _ in marks]
        return "\n".join(lines)

    def static(self) -> go.Figure:
        """The dots with each of the three axes, as a figure with a slider."""
        return with_slider([(axis, self._figure(axis)) for axis in AXES], "x axis: ")

    def _names(self) -> tuple[str, ...]:
        return tuple(f"run {number}" for number in range(1, len(self.state.rank_runs) + 1))

    def _parts(self, axis: str) -> tuple[list[Dot], list[Dot], list[Upright], str, bool]:
        runs = [
            Dot(str(k), _size(axis, run["parameters"], run["cores"]), run["accuracy_percent"], _hover(k, run))
            for k, run in enumerate(self.state.rank_runs, start=1)
        ]
        references = [
            Dot(name, _size(axis, parameters, cores), 100 * accuracy,
                f"{name}: {100 * accuracy:.1f} % in 600 steps, {parameters:,} parameters<br>recorded, mean of 3 seeds")
            for name, parameters, cores, accuracy in RECORDED
        ]  # fmt: skip
        uprights = [Upright(label, x) for label, x in PUBLISHED[axis]]
        title = "MiB of weights, fp32 (counted)" if axis == AXES[0] else f"{axis} than the dense twin (counted)"
        return runs, references, uprights, title, axis == AXES[0]

    def _figure(self, axis: str) -> go.Figure:
        return pareto_figure(*self._parts(axis))

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
        run = self.state.rank_runs[self._names().index(name)]
        for setting in SETTINGS:
            setattr(self.state, setting, run[setting])
        words = f"{name} loaded: {_settings(run).words()}. Change one thing and press Start in the other panel."
        say(self.line, sentence(words))

    def _say_default(self) -> None:
        count = len(self.state.rank_runs)
        runs = "No run is finished yet" if not count else f"{count} finished run{'s' if count > 1 else ''}"
        text = f"{runs}. Diamonds were recorded on these digits with ranks that stay fixed."
        if PUBLISHED[self.axis.value]:
            text += " The upright lines are published sizes of another model on other data: compare sizes only."
        say(self.line, sentence(text))


def _size(axis: str, parameters: int, cores: int) -> float:
    if axis == AXES[0]:
        return mib(ELEMENT_BYTES * parameters)
    return DENSE_PARAMETERS / parameters if axis == AXES[1] else DENSE_TENSORISED / max(cores, 1)


def _settings(run: dict[str, Any]) -> RankSettings:
    return RankSettings(**{name: run[name] for name in SETTINGS})


def _hover(number: int, run: dict[str, Any]) -> str:
    return f"run {number}: {run['accuracy_percent']:.1f} %, {run['parameters']:,} parameters, measured here<br>" + (
        _settings(run).words().replace(", ", "<br>")
    )


def _row(name: str, parameters: int, cores: int, accuracy: float, what: str) -> str:
    sizes = [_size(axis, parameters, cores) for axis in AXES]
    return f"{name:<8}{sizes[0]:>8.3f}{sizes[1]:>9.1f}{sizes[2]:>10.1f}{accuracy:>9.1f}%  {what}"
