"""The capstone from a cell: train and register a point, list the points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comera_lab.panels.budget_points import Entry, key_of, save, table_rows, with_rows
from comera_lab.panels.budget_run import SEEDS, BudgetRun, BudgetSettings
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState, lab_state


def settings_from(state: LabState) -> BudgetSettings:
    """What the state says now."""
    return BudgetSettings(
        model=state.budget_model, optimizer=state.budget_optimizer, rank=state.rank, target_ratio=state.target_ratio,
        rank_ratio=state.rank_ratio, steps=state.budget_steps, seconds=state.budget_seconds, rate=state.budget_rate,
    )  # fmt: skip


def budget_point(*, seeds: int = len(SEEDS), state: LabState | None = None, **settings: Any) -> Entry:
    """Train what is missing of `seeds` seeds, register the point and save it, as the panel's buttons do.

    `settings` (model, optimizer, rank, steps, ..) replace those of the state. Returns when it has ended; RuntimeError
    where a training failed or a panel is training, ValueError for settings that cannot be trained.
    """
    state = state or lab_state()
    if seeds not in range(1, len(SEEDS) + 1):
        raise ValueError(f"seeds must be 1, 2 or 3, got {seeds!r}. Three make a claim.")
    chosen = BudgetSettings(**{**settings_from(state).__dict__, **settings})
    if chosen.fault():
        raise ValueError(chosen.fault())
    known = {row["seed"] for entry in state.registered if entry["key"] == key_of(chosen) for row in entry["rows"]}
    rows: list[dict[str, Any]] = []

    def job() -> Iterator[Progress]:
        for seed in [seed for seed in SEEDS[:seeds] if seed not in known]:
            run = BudgetRun(chosen, seed)
            while not run.finished:
                run.advance()
                yield Progress(run.trainer.steps_done, run.fraction)
            rows.append(run.row())

    runner = Runner("budget")
    if not runner.start(job, wait=True):
        raise RuntimeError(runner.refusal)
    if runner.failure is not None:
        raise RuntimeError(f"the run failed: {runner.failure.summary}\n{runner.failure.trace}")
    state.registered, entry = with_rows(state.registered, chosen, rows)
    problem = save(entry)
    if problem:
        print(problem)
    return entry


def budget_table(state: LabState | None = None) -> str:
    """The registered points as text, a line or two for each."""
    state = state or lab_state()
    _, *rows = table_rows(state.registered, state.budget_mib, state.budget_seconds)
    if not rows:
        return "Nothing is registered yet: press Explore, then Register."
    lines = []
    for name, what, accuracy, step, weights, seconds, _, stands in rows:
        lines.append(f"{name}: {what}: {stands}")
        lines.append(f"    dev {accuracy}; {step} MiB a step, {weights} MiB of weights, {seconds} s (measured here)")
    return "\n".join(lines)
