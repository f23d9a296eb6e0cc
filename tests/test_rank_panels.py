"""Ranks that learn, in panels: what a run shows, what a cut does, and what the dots bring back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from statistics import mean

import pytest

import comera_lab.panels as lab
from comera_lab.experiments.recorder import read_rows
from comera_lab.experiments.results import recorded_digits
from comera_lab.models.mlp import MLP
from comera_lab.objectives import model_size
from comera_lab.panels.pareto import AXES, NOTHING, PUBLISHED
from comera_lab.panels.rank_run import RankRun, RankSettings, core_parameters, costs_of_a_step
from comera_lab.panels.state import LabState

RESULTS = Path(__file__).parents[1] / "data" / "results" / "digits_mlp_cpu.jsonl"
QUICK = {"max_rank": 8, "gate_rate": 0.1, "gamma": 100.0, "early_steps": 20, "late_steps": 30}


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def trained(**values):
    panel = lab.RankTrainingPanel(LabState(**{**QUICK, **values}))
    assert panel.run(wait=True)
    return panel


@pytest.fixture(scope="module")
def finished():
    """One short run to a target; read only."""
    return trained()


def test_a_run_meets_its_target_and_is_really_cut(finished):
    run = finished.trained
    assert core_parameters(run.model) == run.size.cores <= run.trainer.limit == int(0.3 * run.start.cores)
    assert run.after.core_parameters == run.size.cores < run.before.core_parameters == run.start.cores
    assert run.after.step_bytes < run.before.step_bytes and run.after.weight_bytes < run.before.weight_bytes
    assert finished.runner.words == "finished after 50 steps"
    assert f"Target met: {run.size.cores:,} of {run.trainer.limit:,} core parameters" in finished.verdict.value


def test_every_number_says_how_it_is_known(finished):
    text = finished.table()
    for words in ("before the cut (measured here)", "after the cut (measured here)", "counted at the live ranks",
                  "whole model is", "tensorised part alone", "ms of a training step", "MiB of a training step"):
        assert words in text
        assert words in finished.numbers.value or words in finished.verdict.value
    panel = lab.RankTrainingPanel(LabState())
    assert "No rank training has been run yet" in panel.table()
    panel.trained = RankRun(panel.settings())
    assert "after a cut (predicted)" in panel.table()


def test_G01_ranks_fall_and_their_history_can_be_read(finished):
    run, history = finished.trained, finished.trained.history()
    assert history.live.shape == (len(history.bonds), len(run.trainer.history))
    assert (history.live[:, -1] <= history.live[:, 0]).all() and history.live[:, -1].sum() < history.live[:, 0].sum()
    assert finished.state.runs["ranks"]["ranks"] == {name: list(r) for name, r in run.trainer.ranks().items()}
    strip = finished.strip.figure.data[0]
    assert strip.y == history.bonds and strip.z.shape[0] == len(history.bonds)


def test_both_ratios_are_those_of_the_exact_count(finished):
    size = model_size(finished.trained.model)
    summary = finished.state.runs["ranks"]
    assert (summary["total_ratio"], summary["tensorised_ratio"]) == (size.total_ratio, size.tensorised_ratio)
    assert f"{size.total_ratio:,.0f}× smaller" in finished.numbers.value
    assert f"tensorised part alone {size.tensorised_ratio:,.0f}× smaller" in finished.numbers.value


def test_without_late_steps_there_is_no_target():
    panel = trained(late_steps=0, early_steps=30)
    assert panel.trained.trainer.limit is None
    assert "No target: the price alone" in panel.verdict.value
    assert list(panel.strip.figure.data[3].x) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"early_steps": 0, "late_steps": 0}, "early_steps + late_steps must be at least 1, got 0"),
        ({"target_ratio": 0.05, "size_part": "model"}, "the dense part, which cannot be cut"),
        ({"max_rank": 1, "target_ratio": 0.3}, "the target must leave room for ranks of 1"),
    ],
)
def test_G03_impossible_plans_are_a_card_with_the_numbers_in_it(values, message):
    panel = lab.RankTrainingPanel(LabState(**{**QUICK, **values}))
    panel.bar.start.click()
    panel.runner.join()
    assert message in panel.card.text
    assert panel.trained is None and panel.state.rank_runs == ()
    assert panel.compact_button.disabled and not panel.bar.start.disabled


def test_the_rank_floor_and_ceiling_of_the_controls_train():
    for values in ({"max_rank": 1, "late_steps": 0}, {"max_rank": 32, "target_ratio": 1.0, "late_steps": 5}):
        assert "finished" in trained(**{**values, "early_steps": 3}).runner.words


@pytest.mark.parametrize("kind", ["threshold", "straight-through"])
def test_a_hard_threshold_is_a_one_way_door_and_straight_through_is_not(kind):
    history = trained(gate_kind=kind, late_steps=0, early_steps=200).trained.history()
    risen = (history.live[:, 1:] > history.live[:, :-1]).any()
    assert risen == (kind == "straight-through"), "as lesson 05 says"
    assert (history.live[:, -1] < history.live[:, 0]).any()


def test_the_card_stands_under_the_buttons():
    panel = lab.RankTrainingPanel(LabState())
    children = panel.widget.children
    assert children.index(panel.card.widget) == children.index(panel.bar.widget) + 1
    assert lab.ParetoPanel(LabState()).widget.children[-1]._dom_classes == ("t-error",)


def test_stop_compact_now_and_resume_go_on_with_the_smaller_model():
    panel = lab.RankTrainingPanel(LabState(**{**QUICK, "early_steps": 2000, "late_steps": 0}))
    assert panel.compact_button.disabled
    panel.bar.start.click()
    until(lambda: panel.trained is not None and panel.trained.size.cores < 0.7 * panel.trained.start.cores)
    panel.bar.stop.click()
    assert panel.runner.join(3.0)
    run, steps = panel.trained, panel.trained.trainer.steps_done
    assert core_parameters(run.model) == run.start.cores, "a gate only masks"
    assert not panel.compact_button.disabled
    panel.compact_button.click()
    assert panel.card.text == ""
    cut = core_parameters(run.model)
    assert cut == run.size.cores < run.start.cores
    assert "after the cut (measured here)" in panel.numbers.value and "the cut made the cores" in panel.verdict.value
    panel.bar.resume.click()
    until(lambda: run.trainer.steps_done > steps + 3)
    panel.stop(wait=True)
    assert core_parameters(run.model) == cut, "only a cut changes memory"


def test_compact_now_in_the_middle_of_a_run_is_done_between_two_steps():
    panel = lab.RankTrainingPanel(LabState(**{**QUICK, "early_steps": 2000, "late_steps": 0}))
    panel.run()
    until(lambda: panel.trained is not None and panel.trained.size.cores < 0.7 * panel.trained.start.cores)
    panel.compact_button.click()
    until(lambda: panel.trained.after is not None)
    panel.stop(wait=True)
    assert panel.card.text == "" and panel.runner.state == "stopped"
    assert core_parameters(panel.trained.model) < panel.trained.start.cores


def test_compact_without_a_run_says_so(finished):
    panel = lab.RankTrainingPanel(LabState())
    for idle in (panel, finished):
        with pytest.raises(ValueError, match="there is no run to cut"):
            idle.compact()


def test_timing_a_step_moves_nothing():
    model = MLP((784, 64, 10), "tt", 4)
    before = [parameter.clone() for parameter in model.parameters()]
    cost, same = costs_of_a_step(model, model)
    assert all((old == new).all() for old, new in zip(before, model.parameters(), strict=True))
    assert (cost.core_parameters, cost.step_bytes) == (same.core_parameters, same.step_bytes)
    assert cost.step_time_ms > 0


def test_the_static_twin_plays_the_run_back(finished):
    (slider,) = finished.static().layout.sliders
    assert slider.currentvalue.prefix == "step " and len(slider.steps) == 5
    assert len(finished.static().to_json()) < 400_000


def test_the_same_seed_gives_the_same_ranks(finished):
    assert trained().state.runs["ranks"]["ranks"] == finished.state.runs["ranks"]["ranks"]


def test_settings_that_changed_since_the_run_are_named():
    panel = trained(late_steps=0)
    panel.gamma.value = 5
    assert "This run had: no target, max rank 8, gamma 100" in panel.verdict.value


# the dots


def test_recorded_marks_are_the_rows_of_the_study():
    rows = [row for row in read_rows(RESULTS) if row["kind"] == "result"]
    (study,) = recorded_digits()
    for model in study.models:
        rank = None if model.name == "dense" else int(model.name.split()[1])
        same = [row for row in rows if row["rank"] == rank]
        assert len(same) == 3 and {row["parameters"] for row in same} == {model.parameters}
        assert 100 * mean(row["accuracy"] for row in same) == pytest.approx(model.accuracy_percent)
        size = model_size(MLP()) if rank is None else model_size(MLP(kind="tt", rank=rank))
        assert model.cores == (size.cores if rank else model.parameters - model_size(MLP(kind="tt")).dense)
    marks = lab.ParetoPanel(LabState()).dots.figure.data[2]
    assert list(marks.text) == [model.name for model in study.models]
    assert list(marks.y) == [model.accuracy_percent for model in study.models]


def test_published_marks_name_their_denominator_and_claim_no_accuracy():
    panel = lab.ParetoPanel(LabState())
    for axis in AXES:
        panel.axis.value = axis
        notes = [note.text for note in panel.dots.figure.layout.annotations]
        assert notes == [label for label, _ in PUBLISHED[axis]]
        assert panel.card.text == ""
    assert "published: 361× (tensorised part, times smaller; another model, on MNLI)" in panel.table()
    assert "compare sizes only" in panel.line.value


def test_a_finished_run_becomes_a_dot_and_brings_its_settings_back():
    state = LabState(**QUICK)
    ranks, pareto = lab.RankTrainingPanel(state), lab.ParetoPanel(state)
    assert "No run is finished yet" in pareto.line.value
    ranks.run(wait=True)
    ranks.gamma.value = 10
    ranks.late_steps.value = 0
    ranks.run(wait=True)
    assert pareto.chosen.options == (NOTHING, "run 1", "run 2")
    assert list(pareto.dots.figure.data[1].text) == ["1", "2"]
    assert list(pareto.dots.figure.data[1].y) == [run["accuracy_percent"] for run in state.rank_runs]
    pareto.chosen.dropdown.value = "run 1"
    assert (ranks.gamma.value, ranks.late_steps.value) == (100, 30)
    assert "run 1 loaded: target 0.3" in pareto.line.value
    pareto.dots.widget.clicked = {"trace": 1, "point": 1, "count": 1}
    assert (ranks.gamma.value, ranks.late_steps.value, pareto.chosen.value) == (10, 0, "run 2")
    ranks.gamma.value = 7
    pareto.dots.widget.clicked = {"trace": 1, "point": 1, "count": 2}
    assert ranks.gamma.value == 10, "the same dot again"
    pareto.dots.widget.clicked = {"trace": 2, "point": 0, "count": 3}
    assert pareto.chosen.value == "run 2" and pareto.card.text == ""
    assert "run 2" in pareto.table() and threading.active_count() < 20


@pytest.mark.parametrize("name", ["axis", "chosen"])
def test_the_choices_of_the_dots_at_their_ends_and_beyond(name):
    panel = lab.ParetoPanel(LabState())
    control = getattr(panel, name)
    for option in (*control.options, control.options[0]):
        control.dropdown.value = option
        assert control.value == option and panel.card.text == "" and panel.table()
    for illegal in ("run 99", True):
        with pytest.raises(ValueError, match="must be one of"):
            control.value = illegal
    assert control.value == control.options[0]


def test_the_dots_have_both_twins():
    panel = lab.ParetoPanel(LabState())
    assert [step.label for step in panel.static().layout.sliders[0].steps] == list(AXES)
    assert panel._repr_mimebundle_()["text/plain"] == panel.table()


def test_settings_say_themselves():
    settings = RankSettings(
        target_ratio=0.5, size_part="model", max_rank=16, gamma=30.0, gate_rate=0.02, gate_kind="threshold",
        early_steps=300, late_steps=300,
    )  # fmt: skip
    assert settings.words() == (
        "target 0.5 of the whole model, max rank 16, gamma 30, gate rate 0.02, threshold gates, 300 + 300 steps"
    )
