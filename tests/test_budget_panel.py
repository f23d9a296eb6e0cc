"""The capstone: runs within a budget, points that are all their seeds, a report that stands a second training."""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import comera_lab.panels as lab
from comera_lab.panels import budget_points as points
from comera_lab.panels.budget import EXPLORE, REGISTER, BudgetPanel
from comera_lab.panels.budget_cell import settings_from
from comera_lab.panels.budget_figures import AXES, STANDING, budget_figure, front
from comera_lab.panels.budget_report import Report
from comera_lab.panels.budget_run import (
    FITTING,
    SEEDS,
    BudgetRun,
    BudgetSettings,
    inner_digits,
    run_again,
    settings_of,
)
from comera_lab.panels.lanes import digits_28
from comera_lab.panels.state import BUDGET_MODELS, BUDGET_OPTIMIZERS, BUDGET_RATES, LabState
from comera_lab.teaching import check

QUICK = BudgetSettings(
    model="tensor trains", optimizer="adamw", rank=4, target_ratio=0.3, rank_ratio=4.0, steps=20, seconds=60.0
)
ANSWERS = {
    "choice": "The small one, because it is within the budget and good enough.",
    "price": "It reads fewer digits than a dense network would after those steps.",
    "doubt": "Twenty steps say little about two hundred: train longer and look again.",
}


def state(**values: object) -> LabState:
    return LabState(**{"budget_steps": 20, "budget_seconds": 60.0, "rank": 4, **values})


def until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def claimed() -> LabState:
    """A state with a claim and an anecdote; copy before changing."""
    shared = state()
    lab.budget_point(state=shared)
    lab.budget_point(state=shared, rank=8, seeds=1)
    return shared


@pytest.fixture
def mine(claimed: LabState) -> LabState:
    return state(registered=copy.deepcopy(claimed.registered))


# A run


@pytest.mark.parametrize(
    "model", [pytest.param("dense", marks=pytest.mark.slow), *(m for m in BUDGET_MODELS if m != "dense")]
)
def test_every_model_with_every_optimizer_trains_or_says_why_not(model: str) -> None:
    for optimizer in BUDGET_OPTIMIZERS:
        settings = replace(QUICK, model=model, optimizer=optimizer, steps=10, rank=8)
        if optimizer not in FITTING[model]:
            with pytest.raises(ValueError, match=rf"must be adamw.*got '{optimizer}'.*Choose adamw"):
                BudgetRun(settings, 0)
            continue
        row = run_again(settings, 0, 10).row()
        assert row["steps"] == 10 and 0 < row["dev_accuracy_percent"] <= 100
        gap = row["train_mib"] / settings.predicted_mib - 1
        assert abs(gap) < 0.02, f"{settings.words()}: measured {row['train_mib']}, predicted {settings.predicted_mib}"


def test_the_smaller_model_and_the_smaller_state_are_smaller() -> None:
    def mib(**values: object) -> float:
        return replace(QUICK, **values).predicted_mib  # type: ignore[arg-type]

    dense, eight_bit = mib(model="dense"), mib(model="dense", optimizer="adamw-8bit")
    assert mib() < mib(rank=32) < eight_bit < dense
    assert mib(model="dense", optimizer="coap-8bit") < mib(model="dense", optimizer="coap") < dense


def test_a_run_is_repeated_to_the_bit_from_its_settings() -> None:
    for settings in (QUICK, replace(QUICK, model="learned ranks", steps=30, rank=8)):
        first, again = run_again(settings, 1, settings.steps), run_again(settings, 1, settings.steps)
        pairs = zip(first.model.parameters(), again.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_the_clock_ends_a_run_before_it_goes_past_and_the_rest_is_repeatable() -> None:
    run = BudgetRun(replace(QUICK, steps=3000, seconds=0.5), 0)
    while not run.finished:
        run.advance()
    row = run.row()
    assert row["ended"] == "seconds" and 0 < row["steps"] < 3000
    again = run_again(run.settings, 0, row["steps"]).row()
    assert again["dev_accuracy_percent"] == row["dev_accuracy_percent"]


def test_ranks_that_learn_end_at_their_target_and_the_first_step_is_what_counts() -> None:
    settings = replace(QUICK, model="learned ranks", rank=16, steps=40, target_ratio=0.3)
    row = run_again(settings, 0, 40).row()
    fixed = run_again(replace(QUICK, rank=16, steps=10), 0, 10).row()
    assert row["weights_mib"] < fixed["weights_mib"]
    assert row["train_mib"] > fixed["train_mib"], "gates, and all ranks open"


def test_dev_and_test_sides_share_no_image_with_what_is_learned_from() -> None:
    inner, whole = inner_digits(), digits_28()
    assert len(inner.train_y) + len(inner.test_y) == len(whole.train_y)
    learned = {row.numpy().tobytes() for row in inner.train_x}
    assert not learned & {row.numpy().tobytes() for row in whole.test_x}


@pytest.mark.parametrize("rate", BUDGET_RATES)
def test_rates_are_the_suggested_ones_or_as_typed(rate: str) -> None:
    for model in BUDGET_MODELS:
        got = replace(QUICK, model=model, rate=rate).learning_rate
        assert got > 0 and (rate == "suggested" or got == float(rate))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "forest"}, "model must be one of dense, tensor trains, learned ranks, got 'forest'"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw"),
        ({"rate": "fast"}, "rate must be one of suggested"),
        ({"steps": 0}, "steps and rank must be at least 1, got 0"),
        ({"model": "learned ranks", "optimizer": "adamw-8bit"}, "must be adamw, got 'adamw-8bit'.*Choose adamw"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BudgetRun(replace(QUICK, **values), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        lab.budget_point(state=state(), **values)


# Points


def test_a_point_is_all_its_seeds_and_the_first_result_of_a_seed_stays() -> None:
    one = {"seed": 0, "dev_accuracy_percent": 80.0}
    registered, entry = points.with_rows((), QUICK, [one])
    assert entry["name"] == "point 1" and not points.is_claim(entry)
    lucky = {"seed": 0, "dev_accuracy_percent": 99.0}
    rest = [{"seed": seed, "dev_accuracy_percent": 81.0} for seed in (2, 1)]
    registered, entry = points.with_rows(registered, QUICK, [lucky, *rest])
    assert len(registered) == 1 and points.values(entry, "dev_accuracy_percent") == [80.0, 81.0, 81.0]
    assert points.is_claim(entry)
    registered, other = points.with_rows(registered, replace(QUICK, rank=8), [one])
    assert [entry["name"] for entry in registered] == ["point 1", "point 2"] and other["name"] == "point 2"


def test_settings_that_make_no_difference_make_no_other_point() -> None:
    assert points.key_of(QUICK) == points.key_of(replace(QUICK, target_ratio=0.9, rank_ratio=8.0))
    assert points.key_of(QUICK) != points.key_of(replace(QUICK, seconds=1.0))
    dense = replace(QUICK, model="dense")
    assert points.key_of(dense) == points.key_of(replace(dense, rank=9))


def test_the_best_claim_is_the_best_mean_never_the_best_seed() -> None:
    def entry(name: str, *accuracies: float) -> dict[str, object]:
        rows = [
            {"seed": seed, "dev_accuracy_percent": value, "train_mib": 1.0, "seconds": 1.0}
            for seed, value in enumerate(accuracies)
        ]
        return {"name": name, "rows": rows}

    steady, lucky, alone = entry("steady", 90, 91, 92), entry("lucky", 80, 99, 85), entry("alone", 98)
    assert points.best_claim([lucky, steady, alone], 8, 3) is steady
    assert points.best_claim([alone], 8, 3) is None and points.best_claim([steady], 0.5, 3) is None


def test_the_plot_tells_claims_anecdotes_and_what_is_over_the_budget_apart(mine: LabState) -> None:
    def drawn(mib: float, seconds: float) -> dict[str, int]:
        figure = budget_figure(mine.registered, next(iter(AXES)), mib, seconds)
        return {stand: len(trace.x) for stand, trace in zip(STANDING, figure.data[1:], strict=True)}

    assert drawn(8, 60) == {"claim": 1, "anecdote": 1, "over": 0}
    assert drawn(0.5, 60) == {"claim": 0, "anecdote": 0, "over": 2}
    for axis in AXES:
        figure = budget_figure(mine.registered, axis, 8, 60)
        assert bool(figure.layout.shapes) == (axis != "MiB of weights at the end")
    assert len({symbol for _, symbol, _ in STANDING.values()}) == len({words for *_, words in STANDING.values()}) == 3


def test_the_front_is_what_no_other_beats() -> None:
    assert front([(8, 97), (1, 90), (4, 89), (2, 95), (8, 96)]) == [(1, 90), (2, 95), (8, 97)]
    assert front([]) == []


def test_a_point_from_a_cell_trains_only_what_is_missing(mine: LabState, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    original = BudgetRun.__init__

    def counted(self: BudgetRun, settings: BudgetSettings, seed: int, **more: int) -> None:
        trained.append(seed)
        original(self, settings, seed, **more)

    monkeypatch.setattr(BudgetRun, "__init__", counted)
    before = mine.registered[0]
    assert lab.budget_point(state=mine)["rows"] == before["rows"] and trained == []
    entry = lab.budget_point(state=mine, rank=8)
    assert trained == [1, 2] and points.is_claim(entry) and len(mine.registered) == 2
    assert "a claim" in lab.budget_table(mine) and "Nothing is registered" in lab.budget_table(state())
    with pytest.raises(ValueError, match="seeds must be 1, 2 or 3, got 0"):
        lab.budget_point(state=mine, seeds=0)


# The panel


def test_the_button_is_explore_until_a_run_has_ended_and_then_register() -> None:
    panel = BudgetPanel(state())
    assert panel.bar.start.description == EXPLORE
    with pytest.raises(ValueError, match="no finished run that is not registered"):
        panel.register()
    panel.bar.start.click()
    assert panel.bar.start.description == EXPLORE or panel.runner.state == "finished"
    panel.runner.join()
    until(lambda: panel.bar.start.description == REGISTER)
    assert "1 seed, dev accuracy" in panel.line.value and panel.state.registered == ()
    panel.rank.value = 5
    assert panel.bar.start.description == EXPLORE, "other settings have no finished run"
    panel.rank.value = 4
    assert panel.bar.start.description == REGISTER, "what was trained is kept"
    panel.bar.start.click()
    assert panel.bar.start.description == EXPLORE and "an anecdote" in panel.table()
    panel.seeds_button.click()
    panel.runner.join()
    until(lambda: panel.bar.start.description == REGISTER)
    assert [row["seed"] for row in panel.waiting] == [1, 2], "the registered seed is not trained again"
    panel.bar.start.click()
    assert points.is_claim(panel.state.registered[0]) and "a claim" in panel.table()
    panel.bar.start.click()
    assert "All three seeds of these settings are trained" in panel.card.text


def test_a_combination_that_cannot_be_trained_is_said_before_and_refused() -> None:
    panel = BudgetPanel(state(budget_optimizer="coap"))
    assert "Cannot be trained" in panel.table() and "nothing to project" in panel.table()
    assert not panel.run() and "Choose adamw" in panel.card.text and panel.runner.state == "idle"
    with pytest.raises(ValueError, match="nothing to project"):
        panel.run(wait=True)
    panel.budget_model.value = "learned ranks"
    assert "cut out of its state" in panel.table()
    panel.budget_model.value = "dense"
    assert "(predicted), within 8 MiB" in panel.table()
    panel.budget_mib.value = 1
    assert "over 1 MiB. You may look" in panel.table()
    with pytest.raises(ValueError, match="seeds must be 1 or 3, got 2"):
        panel.run(seeds=2)


def test_controls_that_do_not_count_are_greyed_out() -> None:
    panel = BudgetPanel(state())

    def live() -> list[bool]:
        return [panel.rank.enabled, panel.target_ratio.enabled, panel.rank_ratio.enabled]

    seen = {}
    pairs = (("dense", "adamw"), ("dense", "coap"), ("tensor trains", "adamw"), ("learned ranks", "adamw"))
    for model, optimizer in pairs:
        panel.budget_model.value, panel.budget_optimizer.value = model, optimizer
        seen[model, optimizer] = live()
    assert list(seen.values()) == [
        [False, False, False], [False, False, True], [True, False, False], [True, True, False],
    ]  # fmt: skip


def test_stop_keeps_the_run_and_resume_ends_it() -> None:
    panel = BudgetPanel(state(budget_steps=160))
    panel.bar.start.click()
    until(lambda: panel.training is not None and len(panel.training.evaluations) > 0)
    panel.bar.stop.click()
    assert panel.runner.join(5.0) and panel.runner.state == "stopped"
    assert panel.waiting == [] and panel.bar.start.description == EXPLORE, "half a run is no result"
    made = panel.training.trainer.steps_done
    panel.bar.resume.click()
    panel.runner.join()
    assert panel.training.trainer.steps_done == 160 > made and len(panel.waiting) == 1
    assert panel.waiting[0] == {**run_again(panel.settings(), 0, 160).row(), **_measured(panel.waiting[0])}


def _measured(row: dict[str, object]) -> dict[str, object]:
    return {name: row[name] for name in ("seconds", "step_time_ms", "date")}


def test_a_registered_point_shows_in_plot_table_and_report_choice(mine: LabState) -> None:
    panel = BudgetPanel(mine)
    assert [list(trace.text) for trace in panel.dots.figure.data[1:3]] == [[" 1"], [" 2"]]
    assert "point 1" in panel.points.value and panel.defence.defended.options == (
        "the best claim",
        "point 1",
        "point 2",
    )
    panel.defence.defended.value = "point 2"
    assert mine.defended == "point 2" and lab.budget_report(ANSWERS, mine).data["defended"] == "point 2"
    assert panel.static().layout.sliders[0].currentvalue.prefix == "budget "
    panel.defence.texts["doubt"].area.value = "Typed in the panel."
    assert mine.answers["doubt"] == "Typed in the panel."
    with pytest.raises(ValueError, match="doubt must be text of at most 4,000 characters, got 4,001"):
        panel.defence.texts["doubt"].value = "x" * 4001
    mine.answers = {**mine.answers, "price": "Set by a cell."}
    assert panel.defence.texts["price"].value == "Set by a cell."


# The report


def test_the_report_is_whole_in_both_forms(mine: LabState, tmp_path: Path) -> None:
    report = lab.budget_report(ANSWERS, mine)
    markdown, data = report.save(tmp_path)
    assert json.loads(data.read_text()) == report.data
    for words in (*ANSWERS.values(), "Defended: point 1", "point 2", "torch", "3 seeds", "on the test side", "8 MiB"):
        assert words in markdown.read_text()
    assert set(report.data["provenance"]) == {"device", "threads", "torch", "commit", "command"}
    assert settings_of(report.data["points"][0]) == settings_from(mine)
    assert report.links().count('href="data:') == 2 and "http" not in report.links()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comera_lab_report.json", "comera_lab_report.md"]


def test_the_export_button_says_where_and_keeps_the_links_where_it_cannot_write(
    mine: LabState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = BudgetPanel(mine)
    monkeypatch.chdir(tmp_path)
    panel.defence.export_button.click()
    assert (tmp_path / "comera_lab_report.md").is_file() and "beside this notebook" in panel.defence.note.value
    assert panel.card.text == ""

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules[Report.__module__], "write_whole", full)
    panel.defence.export_button.click()
    assert "could not write comera_lab_report.md: No space left on device. Use the download links" in panel.card.text
    assert panel.defence.note.value.count('href="data:') == 2


def test_a_report_without_a_claim_says_what_to_do() -> None:
    report = lab.budget_report(state=state())
    assert report.data["defended"] is None and "No claim yet" in report.markdown
    verdict = check("16.4", report)
    assert verdict.stage == "stub" and "Nothing is registered yet" in verdict.message


def test_the_check_of_a_report_trains_again_and_names_what_is_wrong(mine: LabState) -> None:
    report = lab.budget_report(ANSWERS, mine)
    assert check("16.4", report).passed and check("16.4", json.loads(report.json)).passed

    def verdict(change: object) -> str | None:
        data = json.loads(report.json)
        change(data)  # type: ignore[operator]
        return check("16.4", data).mistake

    rows = report.data["points"][0]["rows"]
    best = max(range(len(SEEDS)), key=lambda k: rows[k]["dev_accuracy_percent"])
    assert verdict(lambda d: d["points"][0]["rows"][best].update(dev_accuracy_percent=99.9)) == "not repeatable"
    assert verdict(lambda d: d["budget"].update(mib=0.25)) == "over the budget"
    assert verdict(lambda d: d["budget"].update(seconds=1e-3)) == "over the budget"
    assert verdict(lambda d: d.update(defended="point 2")) == "one seed"
    assert verdict(lambda d: d["answers"].update(choice="Because.")) == "texts missing"
    same = dict.fromkeys(ANSWERS, ANSWERS["doubt"])
    assert verdict(lambda d: d.update(answers=same)) == "texts missing"


@pytest.mark.parametrize("damage", ["settings", "rows", "seeds", "budget"])
def test_a_damaged_report_is_not_yet_and_never_an_error(mine: LabState, damage: str) -> None:
    data = json.loads(lab.budget_report(ANSWERS, mine).json)
    if damage == "settings":
        data["points"][0]["settings"]["model"] = "forest"
    elif damage == "rows":
        data["points"][0]["rows"] = [None] * 3
    elif damage == "seeds":
        for row in data["points"][0]["rows"]:
            del row["seed"]
    else:
        data["budget"] = {}
    verdict = check("16.4", data)
    assert not verdict.passed and verdict.stage in ("type", "value") and verdict.message
