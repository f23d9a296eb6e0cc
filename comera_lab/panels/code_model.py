"""Lesson 14: a small decoder learns Python from the standard library; four ways to train it, and a box to try it."""

from __future__ import annotations

import html
from collections.abc import Iterator

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go
import torch

from comera_lab.experiments.language_model import perplexity
from comera_lab.memory import LLAMA, StateSettings, llama_shapes, mib, optimizer_bytes
from comera_lab.panels.code_figures import LossLine, fill_losses, loss_figure
from comera_lab.panels.code_run import AVERAGED, METHODS, START_PROMPT, CodeRun, CodeSettings, code_data
from comera_lab.panels.completion_box import CompletionBox, code_block
from comera_lab.panels.figures import with_slider
from comera_lab.panels.live import Pace
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.projection_figures import byte_bars
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget

FEWEST_STEPS, MOST_STEPS, FIRST_STEPS = 20, 4000, 240
REFRESHES_PER_SECOND = 2.0
STATIC_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class CodeModelPanel(RunPanel):
    """A decoder of a million weights in pre-training on Python code, on this machine.

    Controls: `method`, `steps`, `bar.start`, `bar.stop`, `bar.resume`; `box` is the CompletionBox, which asks the
    model that was trained last. Figure: `curves`. `trained` maps a method to its last CodeRun; the text under the chart
    always goes on from the prompt that stood in the box when training began.
    """

    kind = "code"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.trained: dict[str, CodeRun] = {}
        self._pace, self._texts_drawn = Pace(REFRESHES_PER_SECOND), 0
        self.method = ChoiceControl(
            "code_method", "method", METHODS[0], METHODS,
            "Who trains: AdamW, COAP in small bases, CoMERA with tensor trains that end 4.23 times smaller, or both.",
        )  # fmt: skip
        self.steps = NumberControl(
            "code_steps", "steps", FIRST_STEPS, FEWEST_STEPS, MOST_STEPS,
            "Training steps, each on 8 blocks of 128 tokens.", step=20,
        )  # fmt: skip
        self.curves = self._live(
            loss_figure(self._lines(), FIRST_STEPS, None), "t-curves",
            "Losses on training batches and on the validation side, in nats per token.",
        )  # fmt: skip
        self.growing = text_widget(css_class="t-growing")
        self.numbers, self.verdict = text_widget(css_class="t-numbers"), text_widget(css_class="t-verdict")
        self.box = CompletionBox(self, START_PROMPT)
        bar = self._run_bar("Train", "Trains the decoder from the start, with the chosen method.")
        for control in (self.method, self.steps):
            control.on_change(self._guarded(lambda value: self._show_results()))
        columns = widgets.HBox([widgets.VBox([self.method.widget]), widgets.VBox([self.steps.widget])])
        columns.add_class("comera-columns")
        self._compose(
            heading(
                "A model of code",
                "A small decoder reads the standard library of Python and learns to tell the next token. Press Train "
                "and watch it write; before, it knows nothing.",
            ),
            columns, bar.widget, self.curves.widget, self.growing, self.numbers, self.verdict, self.box.widget,
        )  # fmt: skip

    @property
    def last(self) -> CodeRun | None:
        """The training that was begun last."""
        return list(self.trained.values())[-1] if self.trained else None

    def settings(self) -> CodeSettings:
        """What the controls say now."""
        return CodeSettings(method=self.method.value, steps=int(self.steps.value), seed=self.state.seed)

    def table(self) -> str:
        runs = [run for run in self.trained.values() if len(run.losses)]
        if not runs:
            return "Nothing has been trained yet: press Train, or call run(wait=True)."
        rows = [_COLUMNS, *map(_cells, runs)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        step, text = runs[-1].texts[-1]
        return "\n".join([*lines, *self._verdict(), f"After step {step}: {runs[-1].prompt + text!r}"])

    def static(self) -> go.Figure:
        """The losses with a slider over the steps; before the first training predicted MiB over LLaMA's sizes."""
        length = self._length()
        if self.last is None:
            return with_slider([(name, _state_bars(name)) for name in LLAMA], "LLaMA ")
        figures = [
            (f"{share * length:.0f}", loss_figure(self._lines(share * length), length, self.last.marks))
            for share in STATIC_SHARES
        ]
        return with_slider(figures, "step ", active=len(STATIC_SHARES) - 1)

    def _length(self) -> int:
        return int(self.steps.value) if self.last is None else self.last.settings.steps

    def _lines(self, until: float = float("inf")) -> list[LossLine]:
        return [LossLine(name) if name not in self.trained else _line(self.trained[name], until) for name in METHODS]

    def _job(self) -> Iterator[Progress]:
        settings = self.settings()
        code_data()
        run = CodeRun(settings, self.box.prompt)
        # the newest one stands last; other lengths belong to another picture
        self.trained = {
            name: other for name, other in self.trained.items()
            if name != settings.method and other.finished and other.settings.steps == settings.steps
        } | {settings.method: run}  # fmt: skip
        while not run.finished:
            run.advance()
            yield Progress(run.trainer.steps_done, run.fraction)

    def _item(self, progress: Progress) -> None:
        if self._pace.due():
            self._draw()
            self.bar.show(self.runner, self._status())

    def _status(self) -> str:
        run = self.last
        if run is None or not len(run.losses):
            return ""
        return f"loss {run.losses['loss_nats'][-AVERAGED:].mean():.2f} nats · {run.tokens_per_s:,.0f} tokens/s"

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        self.box.enable(not runner.active)
        if runner.state in ("stopped", "finished", "failed") and self.trained:
            self._draw()
            self.bar.show(runner, self._status())
            self.state.record("code", {"runs": [r.summary() for r in self.trained.values() if len(r.losses)]})
        self._show_results()

    def _draw(self) -> None:
        run = self.last
        with self.curves.edit() as figure:
            fill_losses(figure, self._lines(), self._length(), None if run is None else run.marks)
        if run is not None:
            step, text = run.texts[-1]
            say(self.growing, sentence(f"After step {step} it writes:") + code_block(run.prompt, text))

    def _show_results(self) -> None:
        runs = [run for run in self.trained.values() if len(run.losses)]
        if self.runner.active or not runs:
            return
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in _cells(run)) + "</tr>" for run in runs)
        say(self.numbers, f"<table><tr>{head}</tr>{body}</table>")
        say(self.verdict, "".join(sentence(line) for line in self._verdict()))

    def _verdict(self) -> list[str]:
        run = self.last
        if run is None:
            return []
        lines = ["MiB are bytes of a real step on this machine (measured here); where two stand, before and after the "
                 "last cut."]  # fmt: skip
        if len(self.trained) > 1:
            lines.append("One seed each: a small difference between two trainings may be chance.")
        if run.settings != self.settings():
            lines.append(f"The last training was: {run.settings.words()}. Press Train for the new setting.")
        return lines


_COLUMNS = (
    "method", "parameters", "smaller", "weights", "grads", "optimizer", "activations", "tokens/s", "loss", "perplexity",
)  # fmt: skip


def _cells(run: CodeRun) -> tuple[str, ...]:
    before, after = run.pools, run.pools_after

    def pool(name: str) -> str:
        if before is None:
            return "–"
        first = f"{mib(before.as_dict()[name]):.2f}"
        return first if after is None else f"{first} → {mib(after.as_dict()[name]):.2f}"

    tested = len(run.tests) > 0
    loss = float(run.tests["loss_nats"][-1]) if tested else 0.0
    return (
        run.settings.method,
        f"{run.parameters:,}",
        f"{run.compression:.2f}x",
        *(pool(name) for name in ("weights", "grads", "optimizer", "activations")),
        f"{run.tokens_per_s:,.0f}",
        f"{loss:.3f}" if tested else "–",
        f"{perplexity(loss):.0f}" if tested else "–",
    )


def _line(run: CodeRun, until: float) -> LossLine:
    steps, losses = run.losses["step"], run.losses["loss_nats"]
    seen = int((steps <= until).sum())
    ends = range(AVERAGED, seen + 1, AVERAGED)
    tests = run.tests["step"] <= until
    return LossLine(
        run.settings.method,
        np.array([steps[end - 1] for end in ends]),
        np.array([losses[end - AVERAGED : end].mean() for end in ends]),
        run.tests["step"][tests],
        run.tests["loss_nats"][tests],
    )


def _state_bars(name: str) -> go.Figure:
    """Predicted optimizer state of a public LLaMA in bf16: AdamW, and COAP on attention and feed-forward."""
    matrices, rest = llama_shapes(name)
    quarter = StateSettings(rank_ratio=4.0, state_dtype=torch.bfloat16)

    def state(optimizer: str) -> float:
        inside = optimizer_bytes(matrices, optimizer, torch.bfloat16, quarter)
        return mib((inside + optimizer_bytes(rest, "adamw", torch.bfloat16)).total)

    bars = {"adamw": state("adamw"), "coap": state("coap")}
    return byte_bars(bars, max(bars.values()), "MiB of optimizer state, bf16 (predicted)")
