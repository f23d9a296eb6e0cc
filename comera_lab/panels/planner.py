"""Lesson 15: what a step of a large model would take, method by method, against the memory of real GPUs."""

from __future__ import annotations

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.memory import METHODS, PRECISIONS, Plan, PlanSettings
from comera_lab.models.planned import PLANNED
from comera_lab.panels.figures import with_slider
from comera_lab.panels.panel import Panel
from comera_lab.panels.planner_figures import fill_plan, plan_bars
from comera_lab.panels.state import LabState
from comera_lab.panels.toggles import TogglesControl
from comera_lab.panels.widgets import ChoiceControl, heading, say, sentence, text_widget, tiles

# Those of the planner that cores make 4.23 times smaller: in shorter ones the dense head alone is too much.
MODELS = ("llama-130m", "llama-350m", "llama-1b", "llama-3b", "llama-7b", "codebert", "dlrm")
SEQUENCES = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROWS = (1_000, 10_000, 20_000, 40_000)  # of the recommender; the last three are those of CoMERA's figure
NO_SEQUENCE = "none"
GIB = 2**30
_ABOUT = {
    "adamw": "Two numbers kept for every weight.",
    "adamw-8bit": "Two bytes kept for every weight.",
    "galore": "Moments of attention and feed-forward in a basis from a full SVD.",
    "coap": "Moments of attention and feed-forward in a basis that follows the gradient.",
    "coap-8bit": "As COAP, with one byte for every moment.",
    "comera": "Cores in the place of matrices and word tables, under AdamW.",
    "comera+coap": "Cores under AdamW, and what stays dense under COAP.",
}


class PlannerPanel(Panel):
    """Four predicted pools per method, as stacked bars over the sizes of GPUs. Nothing of the model is allocated.

    Controls: `model`, `methods`, `sequence`, `batch`, `precision`, `checkpointing`, `layerwise`. `plan` is the `Plan`
    that is shown. Figure: `bars`.
    """

    kind = "planner"

    def __init__(self, state: LabState | None = None, model: str = "llama-1b") -> None:
        super().__init__(state)
        self.model = ChoiceControl(
            "plan_model", "model", model, MODELS,
            "LLaMA sizes of the GaLore and COAP papers, CodeBERT, and a recommender of 4.2 billion numbers.",
        )  # fmt: skip
        self.sequence = ChoiceControl("plan_sequence", "sequence", NO_SEQUENCE, (NO_SEQUENCE,),
                                      "Tokens of one text. Activations grow with it.")  # fmt: skip
        self.batch = ChoiceControl("plan_batch", "batch", "1", ("1",), "Texts, or rows of the recommender, in a step.")
        self.precision = ChoiceControl(
            "plan_precision", "precision", "bf16", tuple(PRECISIONS),
            "Bytes of weights, gradients and activations; a master copy keeps weights and moments in fp32 too.",
        )  # fmt: skip
        self.checkpointing = ChoiceControl(
            "plan_checkpointing", "checkpointing", "off", ("off", "on"),
            "Keep only the input of each block and compute the rest again during backward: about a third more time.",
        )  # fmt: skip
        self.layerwise = ChoiceControl(
            "plan_layerwise", "layer-wise", "off", ("off", "on"),
            "Update each weight as soon as its gradient is there, and free it: one gradient is alive at a time.",
        )  # fmt: skip
        labels = {METHODS[name].label: text for name, text in _ABOUT.items()}
        self.methods = TogglesControl(
            "plan_methods", "methods", tuple(labels), labels, "Which ways to train are compared.", "AdamW"
        )
        self._offer_sizes()
        self.plan = self._planned()
        self.tiles, self.line = text_widget(" ", "t-plan-tiles"), text_widget(" ", "t-plan-line")
        self.bars = self._live(plan_bars(self.plan), "t-plan-bars", self._words())
        self._draw = self._throttled(self._replan)
        self.model.on_change(self._guarded(lambda name: self._other_model()))
        for control in self._controls()[1:]:
            control.on_change(lambda value: self._draw())
        self._say()
        columns = [[self.model, self.sequence, self.batch], [self.precision, self.checkpointing, self.layerwise]]
        self._compose_columns(columns)

    def table(self) -> str:
        return self.plan.table()

    def static(self) -> go.Figure:
        """The bars with a slider over some batches."""
        chosen = self._batches()[1::3] if len(self._batches()) > 4 else self._batches()
        plans = {str(batch): self._planned(batch) for batch in chosen}
        figures = [(batch, plan_bars(plan)) for batch, plan in plans.items()]
        return with_slider(figures, f"{self.model.value}, batch ", active=1)

    def _controls(self) -> tuple[ChoiceControl | TogglesControl, ...]:
        return (
            self.model, self.sequence, self.batch, self.precision, self.checkpointing, self.layerwise, self.methods
        )  # fmt: skip

    def _compose_columns(self, columns: list[list[ChoiceControl]]) -> None:
        boxes = widgets.HBox([widgets.VBox([control.widget for control in column]) for column in columns])
        boxes.add_class("comera-columns")
        self._compose(
            heading(
                "What fits on which GPU",
                "All bars are predicted, from a copy of the model that holds no numbers. Upright lines are the memory "
                "of GPUs as their makers print it, less 0.8 GB for what is in no pool: a bar that ends left of a line "
                "fits on that card.",
            ),
            boxes, self.methods.widget, self.tiles, self.bars.widget, self.line,
        )  # fmt: skip

    def _batches(self) -> tuple[int, ...]:
        return ROWS if PLANNED[self.model.value].longest is None else BATCHES

    def _offer_sizes(self) -> None:
        """The sequences, batches and checkpointing that the model allows; kept where they still fit."""
        planned = PLANNED[self.model.value]
        lengths = tuple(str(n) for n in SEQUENCES if planned.longest and n <= planned.longest) or (NO_SEQUENCE,)
        batches = tuple(str(n) for n in self._batches())
        for control, options, usual in (
            (self.sequence, lengths, str(planned.sequence)),
            (self.batch, batches, str(planned.batch)),
            (self.checkpointing, ("off", "on") if planned.blocks else ("off",), "off"),
        ):
            kept = control.value if control.value in options and len(control.options) > 1 else usual
            control.offer_options(options, kept if kept in options else options[-1])

    def _planned(self, batch: int | None = None) -> Plan:
        settings = PlanSettings(
            precision=self.precision.value,
            checkpointing=self.checkpointing.value == "on",
            layerwise=self.layerwise.value == "on",
        )
        methods = tuple(name for name, method in METHODS.items() if method.label in self.methods.value)
        return PLANNED[self.model.value].plan(
            settings,
            sequence=None if self.sequence.value == NO_SEQUENCE else int(self.sequence.value),
            batch=batch or int(self.batch.value),
            methods=methods,
        )

    def _other_model(self) -> None:
        self._offer_sizes()
        self._draw()

    def _replan(self) -> None:
        self.plan = self._planned()
        with self.bars.edit(self._words()) as figure:
            fill_plan(figure, self.plan)
        self._say()

    def _say(self) -> None:
        first, least = self.plan.rows[0], min(self.plan.rows, key=lambda row: row.pools.total)
        say(self.tiles, tiles([
            (f"{first.parameters:,}", "parameters, dense"),
            (f"{first.pools.total / GIB:,.2f} GiB", f"{first.label}, predicted"),
            (f"{least.pools.total / GIB:,.2f} GiB", f"{least.label}, the least"),
            (f"{100 * first.pools.activations / first.pools.total:.0f} %", f"of {first.label} activations"),
        ]))  # fmt: skip
        say(self.line, sentence(self._words()))

    def _words(self) -> str:
        cards: dict[str, list[str]] = {}
        for row in self.plan.rows:
            cards.setdefault(row.smallest, []).append(f"{row.label} {row.pools.total / GIB:,.2f} GiB")
        held = "; ".join(f"{card}: {', '.join(rows)}" for card, rows in cards.items())
        return f"{self.plan.title}. Predicted, with the smallest card that holds it: {held}."
