"""Lesson 07: which flights will be late? One recommender with dense, hashed and tensor-train tables, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from comera_lab.panels.figures import INK, LANE_STYLES, STATIC_WIDTH, TEMPLATE, with_slider
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.recommender_run import (
    CURVE_ROWS,
    ID_ORDERS,
    LANES,
    RATES,
    SPLITS,
    RecommenderLane,
    RecommenderSettings,
    flights,
)
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

REFRESHES_PER_SECOND = 2.0
STATIC_SHARES = (0.25, 0.5, 0.75, 1.0)
_COLUMNS = ("large tables", "rate", "MiB of tables", "smaller", "ms a step", "steps", "dev AUC", "norm. entropy")


class RecommenderPanel(RunPanel):
    """Lanes "dense", "hashed" (to the bytes of the third) and "tensor train" of a DLRM on flights, in turns.

    Controls: `split`, `ids`, `rates`, `rank`, `steps`, `bar.start`, `bar.stop`, `bar.resume`. Figure: `curves`.
    `lanes` holds the three lanes of the last run.
    """

    kind = "recommender"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.runner.of = " of all lanes"
        self.lanes: list[RecommenderLane] = []
        self.trained: RecommenderSettings | None = None
        self._pace = Pace(REFRESHES_PER_SECOND)
        self.split = ChoiceControl(
            "flight_split", "held out", "date", SPLITS,
            "Hold out single flights of known dates, or every tenth day as a whole.",
        )  # fmt: skip
        self.ids = ChoiceControl(
            "flight_ids", "ids", "by date", ID_ORDERS,
            "Number the ids of a crossed field by date, or at random: the control of this experiment.",
        )  # fmt: skip
        self.rates = ChoiceControl(
            "flight_rates", "rates", "tuned on dev", tuple(RATES),
            "Train at the rate that was best on dev for every lane, or at one that suits only some.",
        )  # fmt: skip
        self.rank = NumberControl(
            "flight_rank", "rank", 16, 2, 32, "One rank for all bonds; the hashed lane gets as many bytes."
        )
        self.steps = NumberControl(
            "flight_steps", "steps", 128, 16, 512, "Training steps of each lane; 128 read every flight once.", step=16
        )
        self.curves = self._live(recommender_figure([]), "t-flights", "AUC over steps, and calibration, of each lane.")
        self.numbers, self.verdict = text_widget(" ", "t-flight-numbers"), text_widget(css_class="t-flight-verdict")
        bar = self._run_bar("Start", "Trains the three recommenders in turns, on the same flights.")
        for control in self._controls:
            control.on_change(self._guarded(lambda value: self._show_verdict()))
        left = widgets.VBox([control.widget for control in self._controls[:3]])
        right = widgets.VBox([control.widget for control in self._controls[3:]])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._show_numbers()
        self._compose(
            heading(
                "Which flights will be late?",
                "A recommender reads 15 ids and two numbers that are known before a flight leaves New York. The lanes "
                "differ in their largest tables only.",
            ),
            columns, bar.widget, self.curves.widget, self.numbers, self.verdict,
        )  # fmt: skip

    @property
    def _controls(self) -> tuple[ChoiceControl | NumberControl, ...]:
        return (self.split, self.ids, self.rates, self.rank, self.steps)

    def settings(self) -> RecommenderSettings:
        """What the controls say now."""
        return RecommenderSettings(
            split=self.split.value, ids=self.ids.value, rates=self.rates.value, rank=int(self.rank.value),
            steps=int(self.steps.value), seed=self.state.seed,
        )  # fmt: skip

    def summary(self) -> list[dict[str, Any]]:
        """One dict of numbers per lane; empty before the first run. AUC and entropy are None before a test."""
        return [
            {
                "lane": lane.name,
                "learning_rate": lane.rate,
                "table_mib": lane.table_mib,
                "times_smaller": lane.times_smaller,
                "step_time_ms": lane.step_time_ms,
                "steps": lane.trainer.steps_done,
                "auc": lane.scores and lane.scores.auc,
                "normalised_entropy": lane.scores and lane.scores.normalised_entropy,
            }
            for lane in self.lanes
        ]

    def table(self) -> str:
        if not self.lanes:
            return "No recommender has been trained yet: press Start, or call run(wait=True)."
        rows = [_COLUMNS, *(_cells(row) for row in self.summary())]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *self._verdict()])

    def static(self) -> go.Figure:
        """The last run, with a slider over its steps; before the first run an empty frame that says so."""
        figures = []
        for share in STATIC_SHARES:
            until = share * self.steps.value
            figures.append((f"{until:.0f}", recommender_figure(self.lanes, until)))
        prefix = "step " if self.lanes else "nothing has been trained yet: step "
        return with_slider(figures, prefix, active=len(STATIC_SHARES) - 1)

    def _job(self) -> Iterator[Progress]:
        settings = self.settings()
        data = flights(settings.split, settings.ids)
        lanes = [RecommenderLane(name, data, settings) for name in LANES]
        self.lanes, self.trained = lanes, settings
        for made in range(1, settings.steps * len(lanes) + 1):
            lanes[(made - 1) % len(lanes)].advance()
            yield Progress(made, made / (settings.steps * len(lanes)))

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self._draw()

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        if runner.state in ("stopped", "finished", "failed") and self.lanes:
            self._draw()
            self.state.record("recommender", {"lanes": self.summary()})
        self._show_verdict()

    def _draw(self) -> None:
        with self.curves.edit() as figure:
            fill_recommender(figure, self.lanes)
        self._show_numbers()
        self.bar.show(self.runner)

    def _show_numbers(self) -> None:
        rows = [_cells(row) for row in self.summary()] or [(name, *["–"] * (len(_COLUMNS) - 1)) for name in LANES]
        head = "".join(f"<th>{cell}</th>" for cell in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        note = (
            '<p class="comera-lead">Sizes are counted, all tables together; ms, AUC and entropy are measured here. '
            f"During a run AUC is that of {CURVE_ROWS:,} dev flights, at its end of all. Entropy: 1 is knowing only "
            "how many flights are late, 0 is knowing all.</p>"
        )
        say(self.numbers, f"<table><tr>{head}</tr>{body}</table>{note}")

    def _show_verdict(self) -> None:
        say(self.verdict, "" if self.runner.active else "".join(sentence(line) for line in self._verdict()))

    def _verdict(self) -> list[str]:
        """What came of a whole run, and which setting it had where the controls now say another."""
        if self.trained is None or not all(lane.finished for lane in self.lanes):
            return []
        dense, hashed, train = (lane.scores.auc for lane in self.lanes if lane.scores)
        rows = self.lanes[2]
        lines = [
            f"Dev AUC after equal steps: dense {dense:.4f}; {rows.times_smaller:.0f}× smaller, hashed {hashed:.4f} and "
            f"tensor train {train:.4f}. One seed, measured here: a small gap may be chance."
        ]
        if self.trained != self.settings():
            lines.append(f"This run had: {self.trained.words()}. Press Start for the new setting.")
        return lines


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(name: str, pattern: str) -> str:
        return "–" if row[name] is None else pattern.format(row[name])

    return (
        row["lane"],
        f"{row['learning_rate']:g}",
        f"{row['table_mib']:.2f}",
        f"{row['times_smaller']:.0f}×",
        shown("step_time_ms", "{:.1f}"),
        f"{row['steps']:,}",
        shown("auc", "{:.4f}"),
        shown("normalised_entropy", "{:.4f}"),
    )


def recommender_figure(lanes: Sequence[RecommenderLane], until: float | None = None) -> go.Figure:
    """AUC over steps on the left; on the right how often flights were late against what was predicted."""
    figure = make_subplots(1, 2, column_widths=[0.6, 0.4], horizontal_spacing=0.11)
    figure.update_layout(
        template=TEMPLATE, height=330, width=STATIC_WIDTH, margin={"l": 64, "r": 16, "t": 66, "b": 50},
        legend={"yref": "container", "y": 0.99, "yanchor": "top"},
    )  # fmt: skip
    figure.update_xaxes(title_text="steps of each lane", rangemode="tozero", row=1, col=1, fixedrange=True)
    figure.update_yaxes(range=[0.5, 0.85], row=1, col=1, fixedrange=True)
    for axis in (figure.update_xaxes, figure.update_yaxes):
        axis(range=[0, 100], row=1, col=2, fixedrange=True, dtick=25)
    figure.update_xaxes(title_text="predicted chance (%)", row=1, col=2)
    for name, (colour, dash, marker) in zip(LANES, LANE_STYLES, strict=True):
        line, dot = {"color": colour, "dash": dash, "width": 2}, {"symbol": marker, "size": 7}
        shared: dict[str, Any] = {"name": name, "mode": "lines+markers", "line": line, "marker": dot}
        figure.add_trace(go.Scatter(**shared), row=1, col=1)
        figure.add_trace(go.Scatter(**shared, showlegend=False), row=1, col=2)
    figure.layout.shapes = [{"type": "line", "x0": 0, "y0": 0, "x1": 100, "y1": 100, "xref": "x2", "yref": "y2",
                             "line": {"color": INK, "width": 1.5, "dash": "dot"}}]  # fmt: skip
    figure.layout.annotations = [
        {"x": x, "y": 1.02, "xref": "paper", "yref": "paper", "xanchor": side, "yanchor": "bottom", "text": text,
         "showarrow": False}
        for x, side, text in ((0.0, "left", "dev AUC"), (1.0, "right", "late (%), ten bins; dotted: honest"))
    ]  # fmt: skip
    fill_recommender(figure, lanes, until)
    return figure


def fill_recommender(figure: go.Figure, lanes: Sequence[RecommenderLane], until: float | None = None) -> None:
    """Change a `recommender_figure` into the one of these lanes, up to a step."""
    for k, lane in enumerate(lanes):
        points = [point for point in lane.curve if until is None or point[0] <= until]
        figure.data[2 * k].x, figure.data[2 * k].y = [step for step, _ in points], [auc for _, auc in points]
        figure.data[2 * k + 1].x = [100 * one.predicted for one in lane.bins]
        figure.data[2 * k + 1].y = [100 * one.observed for one in lane.bins]
