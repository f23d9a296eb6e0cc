"""Registered configurations of the capstone: a point is all its seeds, and only three of them make a claim."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from comera_lab.panels.budget_run import SEEDS, BudgetSettings, run_again, settings_of
from comera_lab.panels.state import LabState
from comera_lab.runtime import progress

# Dev accuracy of the same seed and steps may differ by so many points on another processor, which rounds otherwise:
# six of the 288 images. On one machine it is the same to the last bit.
REPEAT_BAND_POINTS = 2.0
LEAST_WORDS = 8
QUESTIONS = {
    "choice": "Which configuration do you defend, and why this one?",
    "price": "What did you give up for it?",
    "doubt": "What could be wrong with your claim, and how would one find out?",
}

Entry = Mapping[str, Any]


def key_of(settings: BudgetSettings) -> str:
    """The same for two configurations that train alike."""
    return json.dumps(settings.relevant(), sort_keys=True)


def with_rows(
    registered: Sequence[Entry], settings: BudgetSettings, rows: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Entry, ...], Entry]:
    """The registered entries with these rows in, and the entry they are in.

    The first result of a seed stays: one cannot run a seed again until it is lucky.
    """
    key = key_of(settings)
    old = next((entry for entry in registered if entry["key"] == key), None)
    known = {row["seed"]: dict(row) for row in (*rows, *(old["rows"] if old else ()))}
    entry = {
        "name": old["name"] if old else _free_name(registered),
        "key": key,
        "settings": dict(settings.__dict__),
        "rows": [known[seed] for seed in sorted(known)],
    }
    if old is None:
        return (*registered, entry), entry
    return tuple(entry if other is old else other for other in registered), entry


def _free_name(registered: Sequence[Entry]) -> str:
    taken = {entry["name"] for entry in registered}
    return next(name for n in range(1, len(taken) + 2) if (name := f"point {n}") not in taken)


def values(entry: Entry, column: str) -> list[float]:
    return [float(row[column]) for row in entry["rows"]]


def mean(entry: Entry, column: str) -> float:
    found = values(entry, column)
    return sum(found) / len(found)


def is_claim(entry: Entry) -> bool:
    """Whether all three seeds are there."""
    return set(SEEDS) <= {row["seed"] for row in entry["rows"]}


def within(entry: Entry, mib: float, seconds: float) -> bool:
    """Whether every seed kept both budgets."""
    return max(values(entry, "train_mib")) <= mib and max(values(entry, "seconds")) <= seconds


def best_claim(registered: Sequence[Entry], mib: float, seconds: float) -> Entry | None:
    """The claim within the budget with the highest mean dev accuracy: means are compared, never single seeds."""
    claims = [entry for entry in registered if is_claim(entry) and within(entry, mib, seconds)]
    return max(claims, key=lambda entry: mean(entry, "dev_accuracy_percent"), default=None)


def span_words(entry: Entry, column: str = "dev_accuracy_percent") -> str:
    """ "91.2 %, 1 seed" or "91.2 % (90.1 to 92.0), 3 seeds"."""
    found = values(entry, column)
    if len(found) == 1:
        return f"{found[0]:.1f} %, 1 seed"
    return f"{mean(entry, column):.1f} % ({min(found):.1f} to {max(found):.1f}), {len(found)} seeds"


def restore(state: LabState) -> int:
    """Put saved points and answers back that this notebook does not have; how many points came back."""
    have = {entry["key"] for entry in state.registered}
    kept = [entry for key, entry in progress.saved(progress.POINTS).items() if key not in have and _whole(entry)]
    for entry in kept:
        taken = {other["name"] for other in state.registered}
        name = _free_name(state.registered) if entry["name"] in taken else entry["name"]
        state.registered = (*state.registered, {**entry, "name": name})
    texts = progress.saved(progress.ANSWERS)
    known = {key: texts[key] for key in QUESTIONS if isinstance(texts.get(key), str)}
    state.answers = {**known, **state.answers}
    return len(kept)


def save(entry: Entry) -> str:
    """Keep an entry in the file of saved work; "" or one line on why not."""
    return progress.remember(progress.POINTS, {str(entry["key"]): dict(entry)})


def _whole(entry: Any) -> bool:
    """Whether a saved entry can be used; a file may have been edited."""
    try:
        settings = settings_of(entry)
        columns = ("seed", "steps", "seconds", "train_mib", "dev_accuracy_percent", "test_accuracy_percent")
        rows = [float(row[column]) for row in entry["rows"] for column in columns]
        return bool(rows) and isinstance(entry["name"], str) and entry["key"] == key_of(settings)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def verdict_words(entry: Entry, mib: float, seconds: float) -> str:
    if not within(entry, mib, seconds):
        return "over the budget"
    return "a claim" if is_claim(entry) else "an anecdote: run three seeds"


def table_rows(registered: Sequence[Entry], mib: float, seconds: float) -> list[tuple[str, ...]]:
    """Header and a row for each point."""
    head = ("", "configuration", "dev accuracy", "MiB of a step", "MiB of weights", "seconds", "steps", "stands as")
    rows = [
        (
            str(entry["name"]), settings_of(entry).words(), span_words(entry),
            f"{max(values(entry, 'train_mib')):.2f}", f"{max(values(entry, 'weights_mib')):.3f}",
            f"{max(values(entry, 'seconds')):.2f}",
            " ".join(sorted({f"{row['steps']}" for row in entry["rows"]})), verdict_words(entry, mib, seconds),
        )
        for entry in registered
    ]  # fmt: skip
    return [head, *rows]


def table_html(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{lines}</table>"


# ---- what a report must stand up to ------------------------------------------------------------------------


def budget_fault(report: Mapping[str, Any]) -> str:
    """Why the defended point is no claim within the budget; "" if it is."""
    entry, budget = defended_entry(report), report["budget"]
    if entry is None:
        return "No registered point is defended: run three seeds within the budget, press Register, then report."
    if not is_claim(entry):
        return f"{entry['name']} has {len(entry['rows'])} of {len(SEEDS)} seeds. One seed is an anecdote: run three."
    for column, limit, unit in (("train_mib", budget["mib"], "MiB"), ("seconds", budget["seconds"], "s")):
        most = max(values(entry, column))
        if most > limit:
            return f"{entry['name']} took {most:.2f} {unit} of {limit:g} {unit}: over the budget. Each seed has to fit."
    return ""


def repeat_fault(report: Mapping[str, Any]) -> str:
    """Train the best seed of the defended point again, by its steps; why it cannot be repeated, or ""."""
    entry = defended_entry(report)
    if entry is None:
        return "There is no point to repeat."
    try:
        settings = settings_of(entry)
    except ValueError as error:
        return str(error)
    row = max(entry["rows"], key=lambda row: row["dev_accuracy_percent"])
    again = run_again(settings, int(row["seed"]), int(row["steps"])).row()["dev_accuracy_percent"]
    if abs(again - row["dev_accuracy_percent"]) <= REPEAT_BAND_POINTS:
        return ""
    return (
        f"Run again, seed {row['seed']} of {entry['name']} reaches {again:.1f} % after {row['steps']} steps, not "
        f"{row['dev_accuracy_percent']:.1f} % (band: {REPEAT_BAND_POINTS:g} points). Register what a run gave you."
    )


def answer_fault(report: Mapping[str, Any]) -> str:
    """Which text is missing or too short, or ""."""
    answers = report.get("answers") or {}
    for key, question in QUESTIONS.items():
        text = answers.get(key)
        if not isinstance(text, str) or len(text.split()) < LEAST_WORDS:
            return f'"{key}" is not answered in a sentence of {LEAST_WORDS} words: {question}'
    if len({" ".join(answers[key].split()) for key in QUESTIONS}) < len(QUESTIONS):
        return "Three questions, three answers: two of yours are the same."
    return ""


def defended_entry(report: Mapping[str, Any]) -> Entry | None:
    """The point that a report defends."""
    return next((entry for entry in report["points"] if entry["name"] == report["defended"]), None)
