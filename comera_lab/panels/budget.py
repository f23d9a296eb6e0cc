"""Lesson 16: train within a budget of MiB and seconds; every run can become a dot on the learner's own plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.panels import budget_points as points
from comera_lab.panels.budget_defence import Defence, small_button
from comera_lab.panels.budget_figures import AXES, budget_figure, fill_budget
from comera_lab.panels.budget_run import DENSE, FITTING, LEARNED, SEEDS, TRAINS, BudgetRun, BudgetSettings
from comera_lab.panels.figures import fill_training, training_curves, with_slider
from comera_lab.panels.lanes import empty_curve
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.projection_figures import byte_bars
from comera_lab.panels.runner import Failure, Progress, Runner
from comera_lab.panels.state import BUDGET_MODELS, BUDGET_OPTIMIZERS, BUDGET_RATES, LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, RunBar, heading, say, sentence, text_widget
from comera_lab.runtime import progress

MAX_RANK = 32
EXPLORE, REGISTER = "Explore", "Register"
SETTINGS = (
    "budget_mib", "budget_seconds", "budget_model", "rank", "target_ratio",
    "budget_optimizer", "rank_ratio", "budget_rate", "budget_steps",
)  # fmt: skip
STATIC_RANKS, STATIC_BUDGETS = (2, 4, 8, 16, 32), (1.0, 2.0, 4.0, 8.0, 16.0)


class BudgetPanel(RunPanel):
    """Dense, tensor trains or ranks that learn, with an optimizer, on real digits; within `budget_mib` and
    `budget_seconds`.

    Controls: those of SETTINGS, `axis`, `bar.start` (Explore trains the next seed; once a run has ended it is
    Register), `seeds_button` (what is missing of three seeds), `bar.stop`, `bar.resume`, and those of `defence`.
    Figures: `curves`, `dots`. `waiting` holds finished rows that are not registered.
    """

    kind = "budget"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.training: BudgetRun | None = None
        self.done: dict[str, dict[int, dict[str, Any]]] = {}
        self._wanted: tuple[int, ...] = SEEDS[:1]
        self._pace = Pace()
        back = points.restore(self.state)
        self._make_controls()
        self.curves = self._live(
            training_curves([empty_curve("this run")], "step"),
            "t-curves",
            "Training loss and dev accuracy of a run.",
        )
        self.curves.figure.layout.annotations[1].text = "dev accuracy (%)"
        self.dots = self._live(self._dots(), "t-dots", "Dev accuracy of the registered points against what they cost.")
        self.plan, self.line = text_widget(" ", "t-plan"), text_widget(css_class="t-line")
        self.points = text_widget(css_class="t-points")
        self.defence = Defence(self.state, self._guarded)
        self._make_bar()
        self._redraw = self._throttled(self._show_plan_and_points)
        for name in SETTINGS:
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._settings_changed())
        self.axis.on_change(self._guarded(lambda axis: self._draw_dots()))
        self._watch("registered", lambda change: self._registered_changed())
        self._watch("answers", lambda change: self.defence.show_answers())
        self._compose_all()
        self._registered_changed()
        if back:
            self.defence.say_saved(
                f"{back} registered point{'s' * (back > 1)} came back from {progress.progress_path()}."
            )

    def _make_bar(self) -> None:
        help = "Trains the next seed of these settings; when it has ended, registers it as a dot."
        self.bar = RunBar(EXPLORE, help)
        self.seeds_button = small_button("Three seeds", "clone", "Trains what is missing of three seeds.", "t-seeds")
        actions: dict[widgets.Button, Callable[[], object]] = {
            self.bar.start: self.explore_or_register, self.seeds_button: lambda: self.run(seeds=len(SEEDS)),
            self.bar.stop: self.stop, self.bar.resume: self.resume,
        }  # fmt: skip
        for button, action in actions.items():
            button.on_click(self._guarded(lambda button, action=action: action()))
        row = self.bar.widget.children[0]
        row.children = (row.children[0], self.seeds_button, *row.children[1:])
        self.bar.show(self.runner)

    def _compose_all(self) -> None:
        left = widgets.VBox([getattr(self, name).widget for name in SETTINGS[:5]])
        right = widgets.VBox([getattr(self, name).widget for name in SETTINGS[5:]])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._compose(
            heading(
                "Train within a budget",
                "So many MiB for a training step, so many seconds of training: how well can a network read digits? "
                "Every run can become a dot; three seeds make it a claim.",
            ),
            columns, self.plan, self.bar.widget, self.line, self.curves.widget, self.axis.widget, self.dots.widget,
            self.points, self.defence.widget,
        )  # fmt: skip

    def _make_controls(self) -> None:
        s = self.state
        self.budget_mib = NumberControl("budget_mib", "memory", s.budget_mib, 0.25, 64.0,
                                        "What a training step may keep: weights, grads, optimizer and activations.",
                                        step=0.25, unit="MiB")  # fmt: skip
        self.budget_seconds = NumberControl("budget_seconds", "time", s.budget_seconds, 0.5, 120.0,
                                            "Training time of one seed; a run ends before it would go past.",
                                            step=0.5, unit="s")  # fmt: skip
        self.budget_model = ChoiceControl("budget_model", "model", s.budget_model, BUDGET_MODELS,
                                          "What the two hidden layers are made of, 784 to 512 to 512.")  # fmt: skip
        self.rank = NumberControl("rank", "rank", min(s.rank, MAX_RANK), 1, MAX_RANK,
                                  "The rank of every bond; the first one where ranks learn.")  # fmt: skip
        self.target_ratio = NumberControl("target_ratio", "target", s.target_ratio, 0.05, 1.0,
                                          "Share of the cores that is left at the end, where ranks learn.",
                                          step=0.05)  # fmt: skip
        self.budget_optimizer = ChoiceControl("budget_optimizer", "optimizer", s.budget_optimizer, BUDGET_OPTIMIZERS,
                                              "Which optimizer trains it; a basis needs a dense model.")  # fmt: skip
        self.rank_ratio = NumberControl("rank_ratio", "rank ratio", s.rank_ratio, 1.0, 32.0,
                                        "Full rank over the rank that projected optimizers keep.")  # fmt: skip
        self.budget_rate = ChoiceControl("budget_rate", "learning rate", s.budget_rate, BUDGET_RATES,
                                         "The rate that did best in earlier lessons, or your own.")  # fmt: skip
        self.budget_steps = NumberControl("budget_steps", "steps", s.budget_steps, 10, 3000,
                                          "Training steps that are planned; time may run out.", step=10)  # fmt: skip
        axes = tuple(AXES)
        self.axis = ChoiceControl("budget_axis", "x axis", axes[0], axes, "Against which cost the points are drawn.")

    def settings(self) -> BudgetSettings:
        """What the controls say now."""
        return BudgetSettings(
            model=self.budget_model.value, optimizer=self.budget_optimizer.value, rank=self.rank.value,
            target_ratio=self.target_ratio.value, rank_ratio=self.rank_ratio.value, steps=self.budget_steps.value,
            seconds=self.budget_seconds.value, rate=self.budget_rate.value,
        )  # fmt: skip

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """Finished rows of these settings that are not registered yet."""
        rows, known = self.done.get(points.key_of(self.settings()), {}), self._registered_seeds()
        return [row for seed, row in sorted(rows.items()) if seed not in known]

    def explore_or_register(self) -> None:
        """What the first button does: register what is finished, else train the next seed."""
        if self.waiting and not self.runner.active:
            self.register()
        else:
            self.run()

    def run(self, *, wait: bool = False, seeds: int = 1) -> bool:
        """Train the next seed of these settings, or with `seeds=3` all that are missing; see RunPanel.run.

        Settings that cannot be trained are refused: on the card, or with `wait=True` as a ValueError.
        """
        if seeds not in (1, len(SEEDS)):
            raise ValueError(f"seeds must be 1 or {len(SEEDS)}, got {seeds!r}. Three make a claim.")
        fault = self.settings().fault()
        if not fault and not self.runner.active:
            have = {*self.done.get(points.key_of(self.settings()), {}), *self._registered_seeds()}
            missing = tuple(seed for seed in SEEDS if seed not in have)
            self._wanted = missing[: 1 if seeds == 1 else None]
            if not missing:
                fault = "All three seeds of these settings are trained. Register them, or change a setting."
        if fault:
            if wait:
                raise ValueError(fault)
            self.card.show(Failure(fault, ""), "Not started", of_run=True)
            return False
        return super().run(wait=wait)

    def register(self) -> points.Entry:
        """Make the finished runs of these settings a dot, and save it. ValueError where there is nothing new."""
        rows = self.waiting
        if not rows:
            raise ValueError("there is no finished run that is not registered, got none. Press Explore first.")
        self.state.registered, entry = points.with_rows(self.state.registered, self.settings(), rows)
        self.defence.say_saved(points.save(entry))
        return entry

    def table(self) -> str:
        rows = points.table_rows(self.state.registered, self.state.budget_mib, self.state.budget_seconds)
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        body = lines if len(rows) > 1 else ["Nothing is registered yet: press Explore, then Register."]
        return "\n".join([self._plan_words(), *body])

    def static(self) -> go.Figure:
        """Registered points with a slider over the budget; before that, predicted MiB with one over the rank."""
        if self.state.registered:
            seconds, axis = self.state.budget_seconds, next(iter(AXES))
            figures = [
                (f"{mib:g} MiB", budget_figure(self.state.registered, axis, mib, seconds)) for mib in STATIC_BUDGETS
            ]
            return with_slider(figures, "budget ", active=STATIC_BUDGETS.index(8.0))
        sizes = {rank: {name: _predicted(*what, rank) for name, what in _LINES.items()} for rank in STATIC_RANKS}
        widest = max(size for row in sizes.values() for size in row.values())
        title = "MiB of a training step, batch 64 (predicted)"
        bars = [(str(rank), byte_bars(row, widest, title)) for rank, row in sizes.items()]
        return with_slider(bars, "rank ", active=STATIC_RANKS.index(8))

    def _registered_seeds(self) -> set[int]:
        key = points.key_of(self.settings())
        return {row["seed"] for entry in self.state.registered if entry["key"] == key for row in entry["rows"]}

    def _job(self) -> Iterator[Progress]:
        settings, wanted, made = self.settings(), self._wanted, 0
        for place, seed in enumerate(wanted):
            run = self.training = BudgetRun(settings, seed)
            while not run.finished:
                run.advance()
                yield Progress(made + run.trainer.steps_done, (place + run.fraction) / len(wanted))
            made += run.trainer.steps_done
            key = points.key_of(settings)
            self.done[key] = {**self.done.get(key, {}), seed: run.row()}

    def _item(self, item: Progress) -> None:
        if self._pace.due():
            self._draw_run()
            self.bar.show(self.runner, self._numbers())

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.training is not None:
            self._draw_run()
            self.bar.show(runner, self._numbers())
            self.state.record("budget", {"settings": self.training.settings.__dict__, "waiting": self.waiting})
        self.seeds_button.disabled = runner.active
        self._show_button()

    def _numbers(self) -> str:
        run = self.training
        if run is None or not len(run.steps):
            return ""
        accuracy = run.evaluations["accuracy_percent"]
        dev = f", dev accuracy {accuracy[-1]:.1f} %" if len(accuracy) else ""
        cost = f"{run.elapsed_s:.2f} s of training, {run.train_bytes / 2**20:.2f} MiB a step"
        return f"seed {run.seed}, {cost} (measured here){dev}"

    def _draw_run(self) -> None:
        if self.training is not None:
            with self.curves.edit() as figure:
                fill_training(figure, [self.training.curve()])

    def _dots(self) -> go.Figure:
        return budget_figure(self.state.registered, self.axis.value, self.state.budget_mib, self.state.budget_seconds)

    def _draw_dots(self) -> None:
        with self.dots.edit() as figure:
            fill_budget(
                figure, self.state.registered, self.axis.value, self.state.budget_mib, self.state.budget_seconds
            )

    def _settings_changed(self) -> None:
        model, optimizer = self.budget_model.value, self.budget_optimizer.value
        self.rank.enabled = model != DENSE
        self.target_ratio.enabled = model == LEARNED
        self.rank_ratio.enabled = model == DENSE and not optimizer.startswith("adamw")
        self._redraw()
        self._show_button()

    def _registered_changed(self) -> None:
        self.defence.show_names()
        self._settings_changed()

    def _plan_words(self) -> str:
        settings, limit = self.settings(), self.state.budget_mib
        fault = settings.fault()
        if fault:
            return f"Cannot be trained: {fault}"
        size = _predicted(settings.model, settings.optimizer, settings.rank_ratio, settings.rank)
        fits = "within" if size <= limit else "over"
        end = "" if size <= limit else " You may look, but it cannot become a claim."
        return f"{settings.words()}: {size:.2f} MiB for a training step (predicted), {fits} {limit:g} MiB.{end}"

    def _show_button(self) -> None:
        ready = bool(self.waiting) and not self.runner.active
        self.bar.start.description, self.bar.start.icon = (REGISTER, "check") if ready else (EXPLORE, "play")
        rows = self.waiting
        words = ""
        if ready:
            mean = sum(row["dev_accuracy_percent"] for row in rows) / len(rows)
            what = f"{len(rows)} seed{'s' * (len(rows) > 1)}"
            words = f"Ready to register: {what}, dev accuracy {mean:.1f} % (measured here)."
        say(self.line, sentence(words) if words else "")

    def _show_plan_and_points(self) -> None:
        say(self.plan, sentence(self._plan_words()))
        self._draw_dots()
        registered = self.state.registered
        rows = points.table_rows(registered, self.state.budget_mib, self.state.budget_seconds)
        say(self.points, points.table_html(rows) if registered else "")


# Lines of the picture before any run: (model, optimizer, rank ratio)
_LINES = {
    **{f"dense, {optimizer}": (DENSE, optimizer, 4.0) for optimizer in FITTING[DENSE]},
    "tensor trains, adamw": (TRAINS, "adamw", 4.0),
    "learned ranks, adamw": (LEARNED, "adamw", 4.0),
}


@lru_cache(maxsize=256)
def _predicted(model: str, optimizer: str, rank_ratio: float, rank: int) -> float:
    settings = BudgetSettings(
        model=model, optimizer=optimizer, rank=rank, target_ratio=0.3, rank_ratio=rank_ratio, steps=1, seconds=1.0
    )
    return settings.predicted_mib
