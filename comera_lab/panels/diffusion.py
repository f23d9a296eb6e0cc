"""Lesson 11: a DDPM learns to draw digits; the optimizer and its rank ratio are the learner's choice."""

from __future__ import annotations

import html
from collections.abc import Iterator

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.memory import mib
from comera_lab.panels.diffusion_figures import ErrorLine, diffusion_figure, fill_diffusion
from comera_lab.panels.diffusion_run import DiffusionRun, DiffusionSettings, empty_grid, marks, network_bytes
from comera_lab.panels.figures import Array, with_slider
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.projection_figures import byte_bars
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import DIFFUSION_OPTIMIZERS, LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

SETTINGS = ("diffusion_optimizer", "rank_ratio", "diffusion_steps")
MAX_RATIO, MAX_STEPS = 32.0, 2000
REFRESHES_PER_SECOND = 2.0
STATIC_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
STATIC_RATIOS = (1.5, 2, 4, 8, 16)


class DiffusionPanel(RunPanel):
    """A small DDPM on 8x8 digits in training; its samples, always from the same noise, grow out of it.

    Controls: `diffusion_optimizer`, `rank_ratio`, `diffusion_steps`, `bar.start`, `bar.stop`, `bar.resume`. Figure:
    `picture`. `trained` maps an optimizer to its last DiffusionRun; a start with other steps begins a new picture.
    """

    kind = "diffusion"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.trained: dict[str, DiffusionRun] = {}
        self._pace = Pace(REFRESHES_PER_SECOND)
        self._make_controls()
        self.picture = self._live(
            diffusion_figure(*self._frame()), "t-picture",
            "Generated digits after the steps made so far, and the noise error of every training.",
        )  # fmt: skip
        self.predicted = text_widget(" ", "t-predicted")
        self.numbers, self.verdict = text_widget(css_class="t-numbers"), text_widget(css_class="t-verdict")
        bar = self._run_bar("Train", "Trains the network from the start, with the chosen optimizer.")
        for name in SETTINGS:
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._settings_changed())
        left, right = (
            widgets.VBox([self.diffusion_optimizer.widget]),
            widgets.VBox([self.rank_ratio.widget, self.diffusion_steps.widget]),
        )
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._settings_changed()
        self._compose(
            heading(
                "Digits out of noise",
                "A small U-Net learns to tell the noise in 8 × 8 digits. Every picture starts from the same noise, so "
                "you see one model grow. Train with adamw, then with coap.",
            ),
            columns, self.predicted, bar.widget, self.picture.widget, self.numbers, self.verdict,
        )  # fmt: skip

    def _make_controls(self) -> None:
        s = self.state
        self.diffusion_optimizer = ChoiceControl(
            "diffusion_optimizer", "optimizer", s.diffusion_optimizer, DIFFUSION_OPTIMIZERS,
            "Who updates the weights: AdamW in full, or GaLore and COAP in small bases of the channels.",
        )  # fmt: skip
        self.rank_ratio = NumberControl(
            "rank_ratio", "rank ratio", min(s.rank_ratio, MAX_RATIO), 1.0, MAX_RATIO,
            "How many times fewer numbers a moment of a convolution keeps; adamw has no use for it.", step=0.5,
        )  # fmt: skip
        self.diffusion_steps = NumberControl(
            "diffusion_steps", "steps", s.diffusion_steps, 20, MAX_STEPS, "Training steps, each on 64 digits.", step=10
        )  # fmt: skip

    def settings(self) -> DiffusionSettings:
        """What the controls say now."""
        return DiffusionSettings(**{name: getattr(self, name).value for name in SETTINGS}, seed=self.state.seed)

    def table(self) -> str:
        if not self.trained:
            return f"{self._predicted_words()}\nNothing has been trained yet: press Train, or call run(wait=True)."
        rows = [_COLUMNS, *map(_cells, self.trained.values())]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._verdict()])

    def static(self) -> go.Figure:
        """The last training with a slider over its steps; before the first one, predicted MiB over rank ratios."""
        run = self._last()
        if run is None:
            title = "MiB of optimizer state for the U-Net, fp32 (predicted)"
            bars = {
                ratio: {name: mib(network_bytes(name, ratio)) for name in DIFFUSION_OPTIMIZERS}
                for ratio in STATIC_RATIOS
            }
            widest = max(value for mibs in bars.values() for value in mibs.values())
            figures = [(f"{ratio:g}", byte_bars(mibs, widest, title)) for ratio, mibs in bars.items()]
            return with_slider(figures, "rank ratio ", active=STATIC_RATIOS.index(4))
        figures = [(str(run.until(share)[0]), diffusion_figure(*self._frame(share))) for share in STATIC_SHARES]
        return with_slider(figures, "step ", active=len(STATIC_SHARES) - 1)

    def _last(self) -> DiffusionRun | None:
        return list(self.trained.values())[-1] if self.trained else None

    def _frame(self, share: float = 1.0) -> tuple[Array, str, list[ErrorLine], int]:
        """Grid, caption, lines and length of the picture after that share of the last training."""
        last = self._last()
        step, grid = (0, empty_grid()) if last is None else last.until(share)
        lines = []
        for name in DIFFUSION_OPTIMIZERS:
            run = self.trained.get(name)
            lines.append(ErrorLine(name) if run is None else run.line(step if run is last and share < 1 else None))
        length = self.diffusion_steps.value if last is None else last.settings.diffusion_steps
        caption = "the noise it starts from" if last is None else f"{last.settings.diffusion_optimizer}, step {step}"
        return grid, caption, lines, length

    def _job(self) -> Iterator[Progress]:
        settings = self.settings()
        run = DiffusionRun(settings)
        # the newest one stands last; other lengths belong to another picture
        self.trained = {
            name: other for name, other in self.trained.items()
            if name != settings.diffusion_optimizer and other.finished
            and other.settings.diffusion_steps == settings.diffusion_steps
        } | {settings.diffusion_optimizer: run}  # fmt: skip
        while not run.finished:
            run.advance()
            yield Progress(run.trainer.steps_done, run.fraction)

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self._draw()
            self.bar.show(self.runner, self._status())

    def _status(self) -> str:
        run = self._last()
        if run is None or not run.trainer.steps:
            return ""
        words = f"noise error {run.line().error[-1]:.3f} · optimizer {mib(run.state_bytes):.2f} MiB (measured)"
        return f"judging the samples · {words}" if run.judging else words

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.trained:
            self._draw()
            self.bar.show(runner, self._status())
            self.state.record("diffusion", {"runs": [r.summary() for r in self.trained.values() if r.trainer.steps]})
        self._show_verdict()

    def _settings_changed(self) -> None:
        self.rank_ratio.enabled = self.diffusion_optimizer.value != "adamw"
        say(self.predicted, sentence(self._predicted_words()))
        self._show_verdict()

    def _predicted_words(self) -> str:
        settings = self.settings()
        own, whole = settings.optimizer_bytes(), network_bytes("adamw", 4.0)
        if not settings.projected:
            return f"Optimizer state: adamw {mib(whole):.2f} MiB (predicted), two numbers for every weight."
        return (
            f"Optimizer state: {settings.diffusion_optimizer} {mib(own):.2f} MiB, adamw {mib(whole):.2f} MiB "
            f"(predicted): {1 - own / whole:.0%} less."
        )

    def _draw(self) -> None:
        with self.picture.edit() as figure:
            fill_diffusion(figure, *self._frame())

    def _show_verdict(self) -> None:
        runs = [run for run in self.trained.values() if run.trainer.steps]
        if self.runner.active or not runs:
            return
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _COLUMNS)
        cells = (map(html.escape, _cells(run)) for run in runs)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
        say(self.numbers, f"<table><tr>{head}</tr>{body}</table>")
        say(self.verdict, "".join(sentence(line) for line in self._verdict()))

    def _verdict(self) -> list[str]:
        """What the distances are read between; which setting the last run had, where the controls say another."""
        lines = []
        last = self._last()
        if last is not None and last.finished:
            real, noise, accuracy = marks()
            lines.append(
                f"Distance to the real digits, in the features of a classifier trained here (test accuracy "
                f"{accuracy:.1%}): held-out real digits {real:.1f}, pure noise {noise:.0f}."
            )
            if len(self.trained) > 1:
                lines.append("One seed each: a small difference between two trainings may be chance.")
        if last is not None and last.settings != self.settings():
            lines.append(f"The last training was: {last.settings.words()}. Press Train for the new setting.")
        return lines


_COLUMNS = ("optimizer", "ratio", "optimizer MiB", "noise error", "distance", "ms a step", "ms the update")


def _cells(run: DiffusionRun) -> tuple[str, ...]:
    def number(value: float | None, digits: int) -> str:
        return "at the end" if value is None else f"{value:.{digits}f}"

    settings = run.settings
    if not run.trainer.steps:
        return (settings.diffusion_optimizer, *["not begun"] * 6)
    return (
        settings.diffusion_optimizer,
        f"{settings.rank_ratio:g}" if settings.projected else "-",
        f"{mib(run.state_bytes):.2f} (measured)",
        number(run.noise_error, 4),
        number(run.frechet, 1),
        f"{run.step_time_ms:.0f} (measured here)",
        f"{run.update_time_ms:.1f}",
    )
