"""The report of the capstone: Markdown to read and JSON to check, from the registered points and three answers."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comera_lab.experiments.provenance import commit, date, device_name, launch_command
from comera_lab.panels.budget_points import (
    QUESTIONS,
    best_claim,
    budget_fault,
    span_words,
    table_rows,
    verdict_words,
)
from comera_lab.panels.budget_run import BATCH, FEATURES, inner_digits, settings_of
from comera_lab.panels.state import LabState, lab_state
from comera_lab.runtime.files import write_whole

SCHEMA = 1
STEM = "comera_lab_report"


@dataclass(frozen=True)
class Report:
    """`data` is plain JSON; `markdown` says the same in words. Shows itself in a notebook."""

    data: dict[str, Any]

    @property
    def markdown(self) -> str:
        data, budget = self.data, self.data["budget"]
        where = ", ".join(f"{key} {value}" for key, value in data["provenance"].items() if value is not None)
        head, *rows = table_rows(data["points"], budget["mib"], budget["seconds"])
        grid = [head, ("---",) * len(head), *rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in grid]
        texts = [
            f"**{question}**\n\n{data['answers'].get(key) or '(no answer yet)'}" for key, question in QUESTIONS.items()
        ]
        return "\n\n".join([
            "# Capstone: train within a budget",
            f"Budget: {budget['mib']:g} MiB for a training step, {budget['seconds']:g} s of training.",
            self._defence(), *texts, "## All registered points", "\n".join(lines),
            "A point is all its seeds; every number was measured here. Dev accuracy is what choices were made by.",
            "## Where this comes from", f"{where}. Data: {data['data']}. Network: {data['network']}.",
        ]) + "\n"  # fmt: skip

    def _defence(self) -> str:
        data, budget = self.data, self.data["budget"]
        entry = next((entry for entry in data["points"] if entry["name"] == data["defended"]), None)
        if entry is None:
            return f"**No claim yet.** {budget_fault(data)}"
        return (
            f"**Defended: {entry['name']}**, {settings_of(entry).words()}; "
            f"{verdict_words(entry, budget['mib'], budget['seconds'])}. Dev accuracy {span_words(entry)}; on the test "
            f"side, which chose nothing, {span_words(entry, 'test_accuracy_percent')}."
        )

    @property
    def json(self) -> str:
        return json.dumps(self.data, indent=1, allow_nan=False) + "\n"

    def save(self, folder: str | Path = ".") -> tuple[Path, Path]:
        """Write both files into `folder`, each whole or not at all; their paths. OSError names the path."""
        paths = Path(folder) / f"{STEM}.md", Path(folder) / f"{STEM}.json"
        for path, text in zip(paths, (self.markdown, self.json), strict=True):
            try:
                write_whole(path, text)
            except OSError as error:
                words = f"could not write {path}: {error.strerror}. Use the download links, or another folder"
                raise OSError(error.errno, words) from error
        return paths

    def links(self) -> str:
        """HTML links that download both files without a server."""
        return " ".join(
            download_link(text, f"{STEM}.{ending}", kind, f"Download {ending}")
            for text, ending, kind in ((self.markdown, "md", "text/markdown"), (self.json, "json", "application/json"))
        )

    def __str__(self) -> str:
        return self.markdown

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return self.markdown


def budget_report(answers: Mapping[str, str] | None = None, state: LabState | None = None) -> Report:
    """The report on what is registered now; `answers` to `QUESTIONS` are added to those typed in the panel.

    Defended is the point that `state.defended` names, else the claim within the budget with the best mean of its
    seeds, else the point registered last.
    """
    state = state or lab_state()
    if answers:
        state.answers = {
            **state.answers,
            **{k: v for k, v in answers.items() if k in QUESTIONS and isinstance(v, str) and v.strip()},
        }
    best = best_claim(state.registered, state.budget_mib, state.budget_seconds)
    last = state.registered[-1] if state.registered else None
    chosen = next((entry for entry in state.registered if entry["name"] == state.defended), None)
    defended = chosen or best or last
    data = inner_digits()
    return Report({
        "schema": SCHEMA,
        "date": date(),
        "budget": {"mib": state.budget_mib, "seconds": state.budget_seconds},
        "defended": None if defended is None else defended["name"],
        "answers": {key: state.answers.get(key, "") for key in QUESTIONS},
        "points": [dict(entry) for entry in state.registered],
        "data": f"{data.name}, {len(data.train_y):,} to learn from, {len(data.test_y):,} to choose by",
        "network": f"{' → '.join(map(str, FEATURES))}, batch {BATCH}",
        "provenance": {
            "device": device_name(), "threads": torch.get_num_threads(), "torch": str(torch.__version__),
            "commit": commit(), "command": launch_command(),
        },
    })  # fmt: skip


def download_link(text: str, name: str, kind: str, label: str) -> str:
    """A link styled as a button that carries its file with it: it works offline and without a server."""
    packed = base64.b64encode(text.encode()).decode()
    return (
        f'<a class="comera-download" download="{html.escape(name)}" href="data:{kind};base64,{packed}">'
        f"{html.escape(label)}</a>"
    )
