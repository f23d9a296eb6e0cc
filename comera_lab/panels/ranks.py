"""Lessons 05, 06 and 08: a model that chooses its own ranks while it trains, and is really cut to them."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterator

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.memory import mib
from comera_lab.panels.figures import with_slider
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.rank_figures import RankHistory, fill_ranks, rank_figure
from comera_lab.panels.rank_run import Cost, RankRun, RankSettings, untrained_history
from comera_lab.panels.rank_tasks import TASKS, RankTask
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import GATE_KINDS, SIZE_PARTS, LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

MAX_RANK, MAX_STEPS = 32, 2000
REFRESHES_PER_SECOND = 3.0
STATIC_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
SETTINGS = (
    "target_ratio", "size_part", "max_rank", "gate_kind", "gamma", "gate_rate", "early_steps", "late_steps",
)  # fmt: skip


class RankTrainingPanel(RunPanel):
    """A model of tensor trains with a gate on every bond, in training: the one of `task`, else of `state.rank_task`.

    Controls: `target_ratio`, `size_part`, `max_rank`, `gate_kind`, `gamma`, `gate_rate`, `early_steps`, `late_steps`,
    `bar.start`, `bar.stop`, `bar.resume`, `compact_button`. Figure: `strip`. `trained` is the RankRun of the last
    run; every finished one is added to `state.rank_runs`.
    """

    kind = "ranks"

    def __init__(self, state: LabState | None = None, task: RankTask | None = None) -> None:
        super().__init__(state)
        self.task = task or TASKS[self.state.rank_task]
        self.trained: RankRun | None = None
        self._cut_wanted = threading.Event()
        self._training = threading.Lock()
        self._pace = Pace(REFRESHES_PER_SECOND)
        self._make_controls()
        self.strip = self._live(
            rank_figure(untrained_history(self.settings(), self.task)), "t-strip",
            f"Live ranks over time, size against the target, and {self.task.held_out} accuracy.",
        )  # fmt: skip
        self.numbers, self.verdict = text_widget(" ", "t-numbers"), text_widget(css_class="t-verdict")
        bar = self._run_bar("Start", self.task.start_help)
        self.compact_button = widgets.Button(
            description="Compact now", icon="scissors", disabled=True,
            tooltip="Cuts the closed ranks out of cores and optimizer, and measures a step before and after.",
        )  # fmt: skip
        self.compact_button.add_class("t-compact")
        self.compact_button.on_click(self._guarded(lambda button: self.compact()))
        row = bar.widget.children[0]
        row.children = (*row.children, self.compact_button)
        self._draw_plan = self._throttled(self._redraw_plan)
        for name in SETTINGS:
            self._bind(getattr(self, name), name)
            self._watch(name, lambda change: self._settings_changed())
        left = widgets.VBox([getattr(self, name).widget for name in SETTINGS[:4]])
        right = widgets.VBox([getattr(self, name).widget for name in SETTINGS[4:]])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._show_numbers()
        self._compose(
            heading(
                "Ranks that learn",
                f"{self.task.model_words} Early steps put a price on size; late steps, after the dotted line, steer "
                "to a target. Watch what fades.",
            ),
            columns, bar.widget, self.strip.widget, self.numbers, self.verdict,
        )  # fmt: skip

    def _make_controls(self) -> None:
        s = self.state
        self.target_ratio = NumberControl(
            "target_ratio", "target", s.target_ratio, 0.05, 1.0,
            "Share of the start size that may be left at the end; it counts only if there are late steps.",
            step=0.05, unit="of the start size",
        )  # fmt: skip
        self.size_part = ChoiceControl(
            "size_part", "target counts", s.size_part, SIZE_PARTS,
            "What the target is a share of: the cores alone (tensorised), or every parameter (model).",
        )  # fmt: skip
        self.max_rank = NumberControl("max_rank", "max rank", min(s.max_rank, MAX_RANK), 1, MAX_RANK,
                                      "The rank that every bond starts with; training can only lower it.")  # fmt: skip
        self.gate_kind = ChoiceControl(
            "gate_kind", "gates", s.gate_kind, GATE_KINDS,
            "How a closed gate is treated: straight-through ones may open again, threshold ones never.",
        )  # fmt: skip
        gamma = min(s.gamma, self.task.gamma_high)
        self.gamma = NumberControl("gamma", "gamma", gamma, 0.0, self.task.gamma_high,
                                   "The price of the whole dense size in the early stage.",
                                   step=self.task.gamma_step, unit="nats")  # fmt: skip
        self.gate_rate = NumberControl("gate_rate", "gate rate", s.gate_rate, 0.001, 0.1,
                                       "The learning rate of the gates: about how far a gate moves in one step.",
                                       step=0.001)  # fmt: skip
        self.early_steps = NumberControl("early_steps", "early steps", s.early_steps, 0, MAX_STEPS,
                                         "Steps with a price on size and no target.", step=10)  # fmt: skip
        self.late_steps = NumberControl("late_steps", "late steps", s.late_steps, 0, MAX_STEPS,
                                        "Steps that steer to the target; with 0 there is none.", step=10)  # fmt: skip

    def settings(self) -> RankSettings:
        """What the controls say now."""
        return RankSettings(**{name: getattr(self, name).value for name in SETTINGS}, seed=self.state.seed)

    def compact(self) -> None:
        """Cut the closed ranks now, as the button does: between two steps of a run, or of a stopped run at once.

        Raises ValueError where there is nothing in training.
        """
        if self.trained is None or self.trained.finished or self.runner.state not in ("running", "stopped"):
            raise ValueError("there is no run to cut: it has not begun, or its end has cut it already. Press Start.")
        if self.runner.state == "running":
            self._cut_wanted.set()
            return
        with self._training:
            self.trained.compact()
        self._draw()
        self._show_verdict()

    def table(self) -> str:
        run = self.trained
        if run is None:
            return "No rank training has been run yet: press Start, or call run(wait=True)."
        rows = _cost_rows(run)
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        ranks = [f"{name}: {' '.join(map(str, chain))}" for name, chain in run.trainer.ranks().items()]
        head = f"{self.runner.words}: {run.settings.words()}"
        return "\n".join([head, *lines, "live ranks", *ranks, *ratio_words(run), *self._verdict()])

    def static(self) -> go.Figure:
        """The last run, with a slider over its steps; before the first run an empty frame that says so."""
        history = self._history()
        begun = len(history.steps) > 0
        end = history.steps[-1] if begun else history.length
        figures = [(f"{share * end:.0f}", rank_figure(history.until(share))) for share in STATIC_SHARES]
        return with_slider(figures, "step " if begun else "no run yet: step ", active=len(STATIC_SHARES) - 1)

    def _history(self) -> RankHistory:
        return untrained_history(self.settings(), self.task) if self.trained is None else self.trained.history()

    def _job(self) -> Iterator[Progress]:
        self._cut_wanted.clear()
        run = self.trained = RankRun(self.settings(), self.task)
        while not run.finished:
            with self._training:
                if self._cut_wanted.is_set():
                    self._cut_wanted.clear()
                    run.compact()
                run.advance()
            yield Progress(run.trainer.steps_done, run.fraction, run.trainer.stage)

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self._draw()
            self.bar.show(self.runner, self._status())

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.trained is not None:
            self._draw()
            self.bar.show(runner, self._status())
            summary = self.trained.summary()
            self.state.record("ranks", summary)
            if runner.state == "finished":
                self.state.rank_runs = (*self.state.rank_runs, summary)
        self.compact_button.disabled = self.trained is None or runner.state not in ("running", "stopped")
        self._show_verdict()

    def _settings_changed(self) -> None:
        if self.trained is None:
            self._draw_plan()
        self._show_verdict()

    def _redraw_plan(self) -> None:
        """The empty picture of a run with these settings; a trained one stays as it is."""
        if self.trained is None:
            self._draw()

    def _draw(self) -> None:
        with self.strip.edit() as figure:
            fill_ranks(figure, self._history())
        self._show_numbers()

    def _status(self) -> str:
        run = self.trained
        if run is None or not self.runner.active:
            return ""
        percent = run.accuracy_percent
        accuracy = "" if percent is None else f", {run.task.held_out} accuracy {percent:.1f} %"
        return f"{run.trainer.stage} stage{accuracy}"

    def _show_numbers(self) -> None:
        if self.trained is None:
            text = "Press Start. Sizes are counted from the live ranks; ms and MiB of a step are measured around a cut."
            say(self.numbers, sentence(text))
            return
        head, *rows = _cost_rows(self.trained)
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        lines = "".join(sentence(line) for line in ratio_words(self.trained))
        say(self.numbers, f"<table><tr>{cells}</tr>{body}</table>{lines}")

    def _show_verdict(self) -> None:
        say(self.verdict, "" if self.runner.active else "".join(sentence(line) for line in self._verdict()))

    def _verdict(self) -> list[str]:
        """What came of the run so far; which setting it had, where the controls now say another."""
        run = self.trained
        if run is None:
            return []
        lines = [*end_words(run), *filter(None, [self.task.notice()])]
        if run.settings != self.settings():
            lines.append(f"This run had: {run.settings.words()}. Press Start for the new setting.")
        return lines


def _cost_rows(run: RankRun) -> list[tuple[str, str, str]]:
    """Header and rows of the table of sizes and costs around a cut."""
    if run.before is None or run.after is None:
        return [
            ("", "in memory, gates only mask", "after a cut (predicted)"),
            ("parameters in the cores", f"{run.start.cores:,}", f"{run.size.cores:,}"),
            ("MiB of weights", f"{mib(run.start.total_bytes):.3f}", f"{mib(run.size.total_bytes):.3f}"),
            ("MiB and ms of a training step", "measured at a cut", "measured at a cut"),
        ]
    pairs = [(name, show(run.before), show(run.after)) for name, show in _COSTS]
    return [("", "before the cut (measured here)", "after the cut (measured here)"), *pairs]


_COSTS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("parameters in the cores", lambda cost: f"{cost.core_parameters:,}"),
    ("MiB of weights", lambda cost: f"{mib(cost.weight_bytes):.3f}"),
    ("MiB of a training step", lambda cost: f"{mib(cost.step_bytes):.2f}"),
    ("ms of a training step", lambda cost: f"{cost.step_time_ms:.2f}"),
)


def ratio_words(run: RankRun) -> list[str]:
    """Both ratios against the dense twin, each with its name."""
    size = run.size
    gone = f"{size.tensorised_ratio:,.0f}× smaller" if size.cores else "all gone"
    return [
        f"Against its dense twin, counted at the live ranks: the whole model is {size.total_ratio:,.0f}× smaller, "
        f"the tensorised part alone {gone}."
    ]


def end_words(run: RankRun) -> list[str]:
    """Target, accuracy and cost of the last cut, and layers that are gone; empty while nothing has been cut."""
    lines = []
    finish = run.trainer.finished
    if finish is not None and finish.limit is None:
        lines.append(f"No target: the price alone took the cores from {run.start.cores:,} to {finish.size.cores:,}.")
    elif finish is not None:
        lines.append(f"Target met: {finish.size.cores:,} of {finish.limit:,} core parameters allowed.")
    if finish is not None and run.accuracy_percent is not None:
        held_out = run.task.held_out.capitalize()
        lines.append(f"{held_out} accuracy {run.accuracy_percent:.1f} %, measured here with the ranks that are left.")
    if finish is not None and finish.budget is not None:
        lines.append(
            f"The stages ended at {finish.budget.before:,} core parameters; the last cut closed "
            f"{finish.budget.closed:,} more gate entries, and cost {run.accuracy_lost_percent:.1f} points of accuracy."
        )
    if run.before is not None and run.after is not None:
        lines.append(_speed_words(run.before, run.after))
    return [*lines, *(f"{name} is gone: every rank is 0, only its bias is left." for name in run.size.removed)]


def _speed_words(before: Cost, after: Cost) -> str:
    ratio = before.step_time_ms / after.step_time_ms
    smaller = before.core_parameters / max(after.core_parameters, 1)
    speed = (
        f"{ratio:.2f}× faster" if ratio > 1.05 else f"{1 / ratio:.2f}× slower" if ratio < 0.95
        else "as fast as before within 5 %"
    )  # fmt: skip
    words = f"Measured here: the cut made the cores {smaller:.1f}× smaller, and a step is {speed}."
    if ratio < 0.8 * smaller:
        words += " At this width most of a step is spent on starting products, not on arithmetic."
    return words
