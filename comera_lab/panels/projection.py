"""Lesson 09: what a low-rank basis captures of real gradients, how it moves, what it costs and what it saves."""

from __future__ import annotations

import html
from collections.abc import Iterator

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from comera_lab.memory import mib
from comera_lab.panels.figures import with_slider
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.projection_figures import BasisLine, byte_bars, fill_projection, projection_figure
from comera_lab.panels.projection_run import (
    COLS,
    FEATURES,
    OPTIMIZER_OF,
    TAPE_STEPS,
    ProjectionSettings,
    Replay,
    digits_tape,
    network_bytes,
    tape_in_steps,
)
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import GRADIENT_PRECISIONS, PROJECTION_METHODS, LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

SETTINGS = ("projection_method", "gradient_precision", "projection_rank", "update_interval", "refresh_factor")
MAX_RANK, MAX_INTERVAL = 64, TAPE_STEPS // 2
REFRESHES_PER_SECOND = 3.0
STATIC_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
STATIC_RANKS = (2, 4, 8, 16, 32, 64)
STATIC_OPTIMIZERS = ("adamw", "galore", "coap", "coap-8bit", "flora")


class ProjectionPanel(RunPanel):
    """Gradients of a real training on a tape, and a basis that follows them by the chosen method.

    Controls: `projection_method`, `gradient_precision`, `projection_rank`, `update_interval`, `refresh_factor`,
    `bar.start`, `bar.stop`, `bar.resume`. Figure: `curves`. `replays` maps a method to its last Replay: a start with
    another rank or precision begins a new picture. The tape is recorded at the first start and kept.
    """

    kind = "projection"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self._recording = False
        self.replays: dict[str, Replay] = {}
        self._pace = Pace(REFRESHES_PER_SECOND)
        self._make_controls()
        self.curves = self._live(
            projection_figure(self._lines(), self._best(), TAPE_STEPS), "t-curves",
            "Captured gradient energy over the steps, and the angle between successive bases.",
        )  # fmt: skip
        self.predicted = text_widget(" ", "t-predicted")
        self.numbers, self.verdict = text_widget(css_class="t-numbers"), text_widget(css_class="t-verdict")
        bar = self._run_bar("Start", f"Records {TAPE_STEPS} real gradients once, then follows them with the basis.")
        for name in SETTINGS:
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._settings_changed())
        left = widgets.VBox([getattr(self, name).widget for name in SETTINGS[:2]])
        right = widgets.VBox([getattr(self, name).widget for name in SETTINGS[2:]])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._settings_changed()
        self._compose(
            heading(
                "A basis that follows a gradient",
                f"The {COLS} × {COLS} gradients of a layer that learns to read digits, seen through a few directions. "
                "Press Start, then choose another method and press Start again.",
            ),
            columns, self.predicted, bar.widget, self.curves.widget, self.numbers, self.verdict,
        )  # fmt: skip

    def _make_controls(self) -> None:
        s = self.state
        self.projection_method = ChoiceControl(
            "projection_method", "basis by", s.projection_method, PROJECTION_METHODS,
            "How the basis is made new: by chance, by a full SVD, or from the old one as COAP does.",
        )  # fmt: skip
        self.gradient_precision = ChoiceControl(
            "gradient_precision", "numbers", s.gradient_precision, GRADIENT_PRECISIONS,
            "The format of gradients and basis: bf16 keeps about three digits.",
        )  # fmt: skip
        self.projection_rank = NumberControl(
            "projection_rank", "rank", s.projection_rank, 1, MAX_RANK,
            f"Directions that the basis keeps, of {COLS}.",
        )  # fmt: skip
        self.update_interval = NumberControl(
            "update_interval", "update interval", s.update_interval, 1, MAX_INTERVAL,
            "Steps from one update of the basis to the next.", unit="steps",
        )  # fmt: skip
        self.refresh_factor = NumberControl(
            "refresh_factor", "refresh factor", s.refresh_factor, 1, 10,
            "COAP refreshes at every so many updates, and aligns at the others or leaves the basis alone.",
        )  # fmt: skip

    def settings(self) -> ProjectionSettings:
        """What the controls say now."""
        return ProjectionSettings(**{name: getattr(self, name).value for name in SETTINGS})

    def table(self) -> str:
        rows = [_COLUMNS, *map(_cells, self.replays.values())]
        if len(rows) == 1:
            return f"{self._predicted_words()}\nNothing has been replayed yet: press Start, or call run(wait=True)."
        widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._verdict()])

    def static(self) -> go.Figure:
        """The replays with a slider over the steps; before the first one, predicted MiB with a slider over ranks."""
        if not self.replays:
            title = "MiB of optimizer state for 784 → 256 → 256 → 10, fp32 (predicted)"
            bars = {rank: {name: mib(network_bytes(name, rank)) for name in STATIC_OPTIMIZERS} for rank in STATIC_RANKS}
            widest = max(value for mibs in bars.values() for value in mibs.values())
            figures = [(str(rank), byte_bars(mibs, widest, title)) for rank, mibs in bars.items()]
            return with_slider(figures, "rank ", active=STATIC_RANKS.index(8))
        figures = [
            (f"{share * TAPE_STEPS:.0f}", projection_figure(self._lines(share), self._best(share), TAPE_STEPS))
            for share in STATIC_SHARES
        ]
        return with_slider(figures, "step ", active=len(STATIC_SHARES) - 1)

    def _lines(self, share: float = 1.0) -> list[BasisLine]:
        lines = []
        for method in PROJECTION_METHODS:
            replay = self.replays.get(method)
            if replay is None:
                lines.append(BasisLine(method))
                continue
            steps, energy, updates = replay.until(share)
            moves = np.array([(update.step, update.angle_degrees) for update in updates]).reshape(-1, 2)
            lines.append(BasisLine(method, steps, energy, moves[:, 0], moves[:, 1]))
        return lines

    def _best(self, share: float = 1.0) -> BasisLine:
        """The most that any basis of this rank could keep."""
        if not self.replays:
            return BasisLine("best possible")
        replay = next(iter(self.replays.values()))
        seen = replay.tape.best_steps <= share * TAPE_STEPS
        name = f"best possible at rank {replay.settings.projection_rank}"
        return BasisLine(name, replay.tape.best_steps[seen], replay.best_percent[seen])

    def _job(self) -> Iterator[Progress]:
        settings = self.settings()
        kept = {
            method: replay for method, replay in self.replays.items()
            if _picture(replay.settings) == _picture(settings) and replay.finished
        }  # fmt: skip
        self._recording = True
        for step in tape_in_steps(self.state.seed):
            yield Progress(step, 0.5 * step / TAPE_STEPS)
        self._recording = False
        replay = Replay(settings, digits_tape(self.state.seed))
        self.replays = {**kept, settings.projection_method: replay}
        while not replay.finished:
            replay.advance()
            yield Progress(len(replay.energy), 0.5 + 0.5 * replay.fraction)

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self.bar.show(self.runner, "recording gradients" if self._recording else "following them")
            if not self._recording:
                self._draw()

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.replays:
            self._draw()
            self.state.record("projection", {"replays": [_summary(replay) for replay in self.replays.values()]})
        self._show_verdict()

    def _settings_changed(self) -> None:
        say(self.predicted, sentence(self._predicted_words()))
        self._show_verdict()

    def _predicted_words(self) -> str:
        settings = self.settings()
        mine, whole = settings.optimizer_bytes(), network_bytes("adamw", 1, settings.dtype)
        name = OPTIMIZER_OF[settings.projection_method]
        return (
            f"Optimizer state for {' → '.join(map(str, FEATURES))} at rank {settings.projection_rank}, "
            f"{settings.gradient_precision}: {name} {mib(mine):.3f} MiB, adamw {mib(whole):.3f} MiB (predicted)."
        )

    def _draw(self) -> None:
        with self.curves.edit() as figure:
            fill_projection(figure, self._lines(), self._best())

    def _show_verdict(self) -> None:
        if self.runner.active or not self.replays:
            return
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _COLUMNS)
        rows = (map(html.escape, _cells(replay)) for replay in self.replays.values())
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        say(self.numbers, f"<table><tr>{head}</tr>{body}</table>")
        say(self.verdict, "".join(sentence(line) for line in self._verdict()))

    def _verdict(self) -> list[str]:
        """What the last replay shows; which setting it had, where the controls now say another."""
        last = list(self.replays.values())[-1]
        lines = [_energy_words(last), *_move_words(last)]
        if last.settings != self.settings():
            lines.append(f"The last one was: {last.settings.words()}. Press Start for the new setting.")
        return lines


def _picture(settings: ProjectionSettings) -> tuple[int, str]:
    """What all replays of one picture share."""
    return settings.projection_rank, settings.gradient_precision


_COLUMNS = ("basis by", "energy kept", "best possible", "updates", "P moved", "ms an update", "optimizer MiB")


def _cells(replay: Replay) -> tuple[str, ...]:
    times = ", ".join(f"{kind} {time_ms:.2f}" for kind, time_ms in replay.times_ms())
    return (
        replay.settings.projection_method,
        f"{replay.mean_percent:.1f} %",
        f"{replay.best_percent.mean():.1f} %",
        f"{len(replay.updates)}",
        f"{sum(update.moved for update in replay.updates)}",
        f"{times or 'no update'} (measured here)",
        f"{mib(replay.settings.optimizer_bytes()):.3f} (predicted)",
    )


def _energy_words(replay: Replay) -> str:
    settings = replay.settings
    text = f"{settings.words()}: keeps {replay.mean_percent:.1f} % of the gradient energy on average"
    if not replay.finished:
        return f"{text} in the first {len(replay.energy)} steps."
    chance = 100 * settings.projection_rank / COLS
    return (
        f"{text}, the best basis at every step {replay.best_percent.mean():.1f} %, a random one about {chance:.1f} %."
    )


def _move_words(replay: Replay) -> list[str]:
    """Did P really move, and does an alignment step do what it is for?"""
    alignments = replay.of_kind("alignment")
    if not alignments:
        return []
    still = sum(not update.moved for update in alignments)
    largest = max(update.angle_degrees for update in alignments)
    count = f"{len(alignments)} alignment steps" if len(alignments) > 1 else "the one alignment step"
    if still == len(alignments):
        return [f"Did P move? No: {count} left every bit of it as it was. Only refreshes turned it."]
    moved = f"Did P move? {count[0].upper()}{count[1:]} turned it by {largest:.2g}° at most"
    return [f"{moved}; {still} of them moved not one bit." if still else f"{moved}."]


def _summary(replay: Replay) -> dict[str, object]:
    return {
        **replay.settings.__dict__,
        "steps": len(replay.energy),
        "energy_percent": replay.mean_percent,
        "best_percent": float(replay.best_percent.mean()),
        "updates": len(replay.updates),
        "moved": sum(update.moved for update in replay.updates),
        "update_time_ms": dict(replay.times_ms()),
        "optimizer_bytes": replay.settings.optimizer_bytes(),
    }
