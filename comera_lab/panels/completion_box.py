"""A box to type code into: the model that was trained last writes on, and says what it would have put next."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets as widgets

from comera_lab.experiments.completion import complete, next_tokens
from comera_lab.panels.widgets import NumberControl, say, sentence, text_widget

if TYPE_CHECKING:
    from comera_lab.panels.code_model import CodeModelPanel

TOKENS, TOP, LONGEST = 64, 5, 2000
_BLOCK = (
    "margin:4px 0;padding:6px 10px;border:1px solid var(--comera-line);border-radius:4px;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font-size:14px;line-height:1.4"
)


class CompletionBox:
    """`prompt` (text), `temperature`, and a button: `complete()` shows what the model writes, `answer` is that text.

    Closed while its panel trains: it would read weights in the middle of an update.
    """

    def __init__(self, panel: CodeModelPanel, prompt: str) -> None:
        self._panel = panel
        self.answer = ""
        self.entry = widgets.Textarea(
            value=prompt, rows=4, tooltip="The beginning of a Python program; the model goes on where it ends.",
            layout={"width": "100%", "max_width": "820px"},
        )  # fmt: skip
        self.entry.add_class("t-prompt")
        self.temperature = NumberControl(
            "code_temperature", "temperature", 0.0, 0.0, 2.0,
            "0 takes the likeliest token each time; higher values let chance in.", step=0.1,
        )  # fmt: skip
        self.button = widgets.Button(
            description="Complete", icon="pencil", tooltip="Lets the model that was trained last write on."
        )
        self.button.add_class("t-complete")
        self.button.on_click(panel._guarded(lambda button: self.complete()))
        self.output, self.candidates = text_widget(css_class="t-completion"), text_widget(css_class="t-candidates")
        title = widgets.HTML(
            "<h4>Try it</h4><p class='comera-lead'>Type the beginning of a program. The model goes on.</p>"
        )
        row = widgets.HBox([self.button])
        row.add_class("comera-buttons")
        self.widget = widgets.VBox([title, self.entry, self.temperature.widget, row, self.output, self.candidates])

    @property
    def prompt(self) -> str:
        return str(self.entry.value)

    def complete(self) -> str:
        """Write on from the prompt. Raises ValueError before the first training, during one, and for a long prompt."""
        run = self._panel.last
        if run is None:
            raise ValueError("There is no model yet. Press Train first; a few seconds are enough to see something.")
        if self._panel.runner.active:
            raise ValueError("The model is in training. Press Stop, or wait for the end.")
        if len(self.prompt) > LONGEST:
            raise ValueError(
                f"the prompt must have at most {LONGEST:,} characters, got {len(self.prompt):,}. Shorten it."
            )
        model, tokenizer, prompt = run.model, run.streams.tokenizer, self.prompt
        self.answer = complete(
            model, tokenizer, prompt, tokens=TOKENS, temperature=float(self.temperature.value),
            seed=self._panel.state.seed,
        )  # fmt: skip
        best = next_tokens(model, tokenizer, prompt, TOP)
        rows = "".join(
            f"<tr><td><code>{html.escape(repr(one.text))}</code></td><td>{one.probability:.1%}</td></tr>"
            for one in best
        )
        who = f"{run.settings.method}, {run.trainer.steps_done} steps, writes:"
        say(self.output, sentence(who) + code_block(prompt, self.answer))
        say(self.candidates, f"<table><tr><th>next token</th><th>probability</th></tr>{rows}</table>")
        return self.answer

    def enable(self, on: bool) -> None:
        """Open or close the button."""
        self.button.disabled = not on


def code_block(prompt: str, text: str) -> str:
    """HTML of a program: what was given in plain, what the model wrote in bold."""
    return f'<pre style="{_BLOCK}">{html.escape(prompt)}<b>{html.escape(text)}</b></pre>'
