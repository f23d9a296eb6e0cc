"""Lesson 10: optimizers on the same network and the same digits; what three seeds can tell apart, and what not."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.memory import mib
from comera_lab.panels.figures import with_slider
from comera_lab.panels.live import Pace
from comera_lab.panels.optimizer_figures import fill_race, race_figure
from comera_lab.panels.optimizer_lanes import (
    EVALUATE_EVERY,
    LANES,
    RATES,
    SEEDS,
    Axis,
    Band,
    OptimizerLane,
    RaceSettings,
    band_of,
)
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.projection_figures import byte_bars
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.toggles import TogglesControl
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

BASELINE = "adamw"
FIRST_LANES = ("adamw", "galore", "coap")
SETTINGS = ("rank_ratio", "update_interval", "refresh_factor", "optimizer_steps")
REFRESHES_PER_SECOND = 2.0
STATIC_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
STATIC_RATIOS = (1, 2, 4, 8, 16, 32)
LOCKED = "Who is ahead? One seed is an anecdote: press Three seeds."


class OptimizerRacePanel(RunPanel):
    """Lanes of optimizers on 784 → 256 → 256 → 10 and real digits, each at the rate that did best for it.

    Controls: `lanes` (names, adamw among them), `rank_ratio`, `update_interval`, `refresh_factor`, `optimizer_steps`,
    `axis` ("steps", "seconds", "bytes"), `bar.start` (one seed), `seeds_button` (three), `bar.stop`, `bar.resume`.
    Figure: `curves`. `runs` maps (name, seed) to its OptimizerLane. Lanes of one seed take turns, step by step, so that
    all see the same machine. A verdict is given only once every lane has finished its three seeds.
    """

    kind = "optimizers"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.runner.of = " of all lanes"
        self.runs: dict[tuple[str, int], OptimizerLane] = {}
        self._seeds_wanted: tuple[int, ...] = SEEDS[:1]
        self._pace, self._tests_drawn = Pace(REFRESHES_PER_SECOND), 0
        self._make_controls()
        self.curves = self._live(
            race_figure(self._bands(), self.axis.value, self._length), "t-curves",
            "Test loss and test accuracy of every optimizer.",
        )  # fmt: skip
        self.numbers, self.verdict = text_widget(" ", "t-numbers"), text_widget(css_class="t-verdict")
        bar = self._run_bar("Start", "Trains one network for each optimizer, in turns, on the same batches of digits.")
        self.seeds_button = widgets.Button(
            description="Three seeds", icon="clone",
            tooltip="Trains every lane from three seeds; lanes that are done with these settings are kept.",
        )  # fmt: skip
        self.seeds_button.add_class("t-seeds")
        self.seeds_button.on_click(self._guarded(lambda button: self.run(seeds=len(SEEDS))))
        row = bar.widget.children[0]
        row.children = (row.children[0], self.seeds_button, *row.children[1:])
        for name in SETTINGS:
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._show_numbers())
        self.lanes.on_change(self._guarded(lambda lanes: self._show_numbers()))
        self.axis.on_change(self._guarded(lambda axis: self._draw()))
        left = widgets.VBox([self.rank_ratio.widget, self.update_interval.widget, self.refresh_factor.widget])
        right = widgets.VBox([self.optimizer_steps.widget, self.axis.widget])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._show_numbers()
        self._compose(
            heading(
                "Optimizers side by side",
                "The same network, digits and batches; only the optimizer differs. Which keeps least, which learns "
                "fastest, and can you tell from one run?",
            ),
            self.lanes.widget, columns, bar.widget, self.curves.widget, self.numbers, self.verdict,
        )  # fmt: skip

    def _make_controls(self) -> None:
        s = self.state
        self.lanes = TogglesControl(
            "lanes", "optimizers", FIRST_LANES, LANES, "The optimizers that take part; AdamW always does.", BASELINE
        )
        self.rank_ratio = NumberControl(
            "rank_ratio", "rank ratio", s.rank_ratio, 1.0, 32.0,
            "Full rank over the rank that projected optimizers keep: 4 keeps a quarter of the directions.",
        )  # fmt: skip
        self.update_interval = NumberControl(
            "update_interval", "update interval", s.update_interval, 1, 500,
            "Steps from one update of COAP's basis to the next.", unit="steps",
        )  # fmt: skip
        self.refresh_factor = NumberControl(
            "refresh_factor", "refresh factor", s.refresh_factor, 1, 50,
            "COAP refreshes at every so many updates and aligns at the others; GaLore and Flora renew as often.",
        )  # fmt: skip
        self.optimizer_steps = NumberControl(
            "optimizer_steps", "steps", s.optimizer_steps, EVALUATE_EVERY, 2000, "Training steps that each lane makes.",
            step=EVALUATE_EVERY,
        )  # fmt: skip
        self.axis = ChoiceControl(
            "race_axis", "x axis", "steps", ("steps", "seconds", "bytes"),
            "Compare after equal steps, after equal training seconds, or the end against the bytes of state.",
        )  # fmt: skip

    def settings(self) -> RaceSettings:
        """What the controls say now, for all lanes."""
        return RaceSettings(**{name: getattr(self, name).value for name in SETTINGS})

    def run(self, *, wait: bool = False, seeds: int = 1) -> bool:
        """Train the chosen lanes from `seeds` (1 or 3) seeds, as Start and Three seeds do; see RunPanel.run.

        Lanes that have finished with these settings are kept if more seeds are asked for.
        """
        if seeds not in (1, len(SEEDS)):
            raise ValueError(f"seeds must be 1 or {len(SEEDS)}, got {seeds!r}. Three make a band.")
        if not self.runner.active:
            self._seeds_wanted = SEEDS[:seeds]
        return super().run(wait=wait)

    def finished_seeds(self, name: str) -> int:
        """How many seeds of an optimizer have been trained to the end."""
        return sum(lane.finished for (lane_name, _), lane in self.runs.items() if lane_name == name)

    @property
    def unlocked(self) -> bool:
        """Whether there is enough for a verdict: three finished seeds of every lane, two lanes at least."""
        names = self._names()
        return len(names) > 1 and all(self.finished_seeds(name) == len(SEEDS) for name in names)

    def table(self) -> str:
        rows = [_COLUMNS, *(self._cells(name) for name in self._names() or self.lanes.value)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *self._verdict()])

    def static(self) -> go.Figure:
        """The race with a slider over its steps; before the first one, predicted MiB with a slider over the ratio."""
        if not self.runs:
            sizes = {
                ratio: {name: mib(self._with_ratio(ratio).predicted_bytes(name)) for name in LANES}
                for ratio in STATIC_RATIOS
            }
            widest = max(size for row in sizes.values() for size in row.values())
            title = "MiB of optimizer state for 784 → 256 → 256 → 10, fp32 (predicted)"
            figures = [(str(ratio), byte_bars(row, widest, title)) for ratio, row in sizes.items()]
            return with_slider(figures, "rank ratio ", active=STATIC_RATIOS.index(4))
        steps = self._length
        figures = [
            (f"{share * steps:.0f}", race_figure(self._bands(share), self._axis, steps)) for share in STATIC_SHARES
        ]
        return with_slider(figures, "step ", active=len(STATIC_SHARES) - 1)

    @property
    def _axis(self) -> Axis:
        axis: Axis = self.axis.value
        return axis

    @property
    def _length(self) -> int:
        """Steps of the race that is shown, or of the one that would be."""
        raced = next(iter(self.runs.values()), None)
        steps: int = raced.settings.optimizer_steps if raced else self.optimizer_steps.value
        return steps

    def _with_ratio(self, ratio: float) -> RaceSettings:
        return RaceSettings(**{**self.settings().__dict__, "rank_ratio": float(ratio)})

    def _names(self) -> list[str]:
        """Optimizers in the race that is shown."""
        return [name for name in LANES if any(name == lane_name for lane_name, _ in self.runs)]

    def _of(self, name: str) -> list[OptimizerLane]:
        return [lane for (lane_name, _), lane in self.runs.items() if lane_name == name and len(lane.tests)]

    def _bands(self, share: float = 1.0) -> list[Band]:
        return [band_of(name, self._of(name), self._axis, share) for name in LANES]

    def _job(self) -> Iterator[Progress]:
        settings, names, seeds = self.settings(), self.lanes.value, self._seeds_wanted
        kept: dict[tuple[str, int], OptimizerLane] = {}
        if len(seeds) > 1:
            kept = {key: lane for key, lane in self.runs.items()
                    if lane.finished and lane.settings == settings and key[0] in names}  # fmt: skip
        self.runs = kept
        todo = [(name, seed) for seed in seeds for name in names if (name, seed) not in kept]
        whole = max(settings.optimizer_steps * len(todo), 1)
        done = 0
        for seed in seeds:
            lanes = [OptimizerLane(name, seed, settings) for name, wanted in todo if wanted == seed]
            self.runs = {**self.runs, **{(lane.name, seed): lane for lane in lanes}}
            while racing := [lane for lane in lanes if not lane.finished]:
                for lane in racing:
                    before = lane.trainer.steps_done
                    lane.advance()
                    done += lane.trainer.steps_done - before
                    yield Progress(done, done / whole, seed)

    def _item(self, progress: Progress) -> None:
        if not self._pace.due():
            return
        self.bar.show(self.runner, f"seed {progress.payload + 1} of {len(self._seeds_wanted)}")
        tested = sum(len(lane.tests) for lane in self.runs.values())
        if tested != self._tests_drawn:  # a picture with nothing new would only keep the browser busy
            self._tests_drawn = tested
            self._draw()
            self._show_numbers()

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        self.seeds_button.disabled = runner.active
        if runner.state in ("stopped", "finished", "failed") and self.runs:
            self._draw()
            self.state.record("optimizers", {"lanes": [self._summary(name) for name in self._names()]})
        self._show_numbers()

    def _draw(self) -> None:
        with self.curves.edit() as figure:
            fill_race(figure, self._bands(), self.axis.value, self._length)

    def _show_numbers(self) -> None:
        head = "".join(f"<th>{cell}</th>" for cell in _COLUMNS)
        rows = (map(html.escape, self._cells(name)) for name in self._names() or self.lanes.value)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        note = (
            '<p class="comera-lead">Predicted MiB are counted from shapes; measured ones are the real tensors of the '
            "optimizer. Each lane has the learning rate that did best for it on a split of the training side.</p>"
        )
        say(self.numbers, f"<table><tr>{head}</tr>{body}</table>{note}")
        lines = [] if self.runner.active else self._verdict()
        say(self.verdict, "".join(sentence(line) for line in lines))

    def _verdict(self) -> list[str]:
        """Locked with fewer than three seeds. Then each lane against AdamW; and which settings the race had."""
        if not self.runs:
            return []
        lines = self._conclusions() if self.unlocked else [LOCKED]
        raced = next(iter(self.runs.values())).settings
        if raced != self.settings() or tuple(self._names()) != self.lanes.value:
            lines.append(
                f"This race had: {', '.join(self._names())}, {raced.words()}. Press Start for the new setting."
            )
        return lines

    def _conclusions(self) -> list[str]:
        baseline = [float(lane.tests["loss_nats"][-1]) for lane in self._of(BASELINE)]
        lines = []
        for name in self._names():
            if name != BASELINE:
                losses = [float(lane.tests["loss_nats"][-1]) for lane in self._of(name)]
                lines.append(_against(name, losses, baseline) + self._saved(name))
        return lines

    def _saved(self, name: str) -> str:
        mine, whole = self._of(name)[0].measured_bytes, self._of(BASELINE)[0].measured_bytes
        assert mine is not None and whole is not None
        return f" Its state takes {100 * mine / whole:.0f} % of AdamW's bytes (measured here)."

    def _cells(self, name: str) -> tuple[str, ...]:
        row = self._summary(name)

        def shown(value: Any, show: Callable[[Any], str]) -> str:
            return "–" if value is None else show(value)

        return (
            name,
            f"{row['learning_rate']:g}",
            f"{mib(row['predicted_bytes']):.3f}",
            shown(row["measured_bytes"], lambda count: f"{mib(count):.3f}"),
            shown(row["step_time_ms"], "{:.2f}".format),
            shown(row["slowest_step_ms"], "{:.1f}".format),
            f"{row['finished_seeds']}",
            _spread(row["loss_nats"], 1, 3),
            _spread(row["accuracy"], 100, 1),
        )

    def _summary(self, name: str) -> dict[str, Any]:
        """Numbers of one optimizer over its seeds; None where nothing has been measured yet."""
        lanes = self._of(name)
        settings = lanes[0].settings if lanes else self.settings()
        times = [float(time_ms) for lane in lanes for time_ms in lane.times["step_time_ms"][3:]]
        return {
            "lane": name,
            "learning_rate": RATES[name],
            "predicted_bytes": settings.predicted_bytes(name),
            "measured_bytes": lanes[0].measured_bytes if lanes else None,
            "step_time_ms": median(times) if times else None,
            "slowest_step_ms": max(times) if times else None,
            "finished_seeds": self.finished_seeds(name),
            "loss_nats": [float(lane.tests["loss_nats"][-1]) for lane in lanes],
            "accuracy": [float(lane.tests["accuracy_percent"][-1]) / 100 for lane in lanes],
        }


_COLUMNS = (
    "lane", "rate", "MiB predicted", "MiB measured", "ms a step", "slowest ms", "seeds", "test loss", "accuracy %",
)  # fmt: skip


def _spread(values: list[float], factor: float, digits: int) -> str:
    """Mean of the seeds, with the least and the largest where there are several."""
    if not values:
        return "–"
    scaled = [factor * value for value in values]
    middle = f"{sum(scaled) / len(scaled):.{digits}f}"
    return middle if len(scaled) == 1 else f"{middle} ({min(scaled):.{digits}f} to {max(scaled):.{digits}f})"


def _against(name: str, losses: list[float], baseline: list[float]) -> str:
    """What three seeds can say about a lane and AdamW: bands that overlap say nothing."""
    if max(losses) < min(baseline):
        return f"{name}: a lower test loss than adamw in all pairs of seeds."
    if min(losses) > max(baseline):
        return f"{name}: a higher test loss than adamw in all pairs of seeds."
    return f"{name} and adamw: the bands overlap, so three seeds cannot tell them apart."
