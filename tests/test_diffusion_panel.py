"""The diffusion panel: what a training shows, what it records, and what a learner may change in between."""

from __future__ import annotations

import pytest

import comera_lab.panels as lab
from comera_lab.memory import mib
from comera_lab.panels import diffusion_run
from comera_lab.panels.diffusion_run import network_bytes
from comera_lab.panels.state import DIFFUSION_OPTIMIZERS, LabState

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _few_samples():
    """Judging 500 samples takes longer than a short training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion_run, "JUDGED", 30)
        yield


@pytest.fixture(scope="module")
def finished():
    """Two short trainings, coap and then adamw; read only."""
    panel = lab.DiffusionPanel(LabState(diffusion_steps=20))
    assert panel.run(wait=True)
    panel.diffusion_optimizer.value = "adamw"
    assert panel.run(wait=True)
    return panel


def test_predicted_bytes_are_those_of_the_trained_optimizers(finished) -> None:
    for name, run in finished.trained.items():
        assert run.state_bytes == network_bytes(name, 4.0)
        assert f"{mib(run.state_bytes):.2f} (measured)" in finished.table()
    assert list(finished.trained) == ["coap", "adamw"]
    assert network_bytes("coap-8bit", 4.0) < network_bytes("coap", 4.0) < network_bytes("adamw", 4.0)


def test_the_verdict_gives_the_marks_and_warns_of_one_seed(finished) -> None:
    text = finished.verdict.value
    for words in ("test accuracy 9", "held-out real digits", "pure noise", "One seed each"):
        assert words in text and words in finished.table()
    assert finished.runner.words == "finished after 20 steps"
    finished.diffusion_steps.value = 40
    assert "The last training was: adamw, 20 steps" in finished.verdict.value
    finished.diffusion_steps.value = 20


def test_the_grid_grows_from_one_noise_and_the_lines_fall(finished) -> None:
    coap, adamw = finished.trained.values()
    assert [step for step, _ in adamw.grids] == [0, 20]
    assert (coap.grids[0][1] == adamw.grids[0][1]).all() and (adamw.grids[0][1] != adamw.grids[1][1]).any()
    grid, *lines = finished.picture.figure.data
    assert grid.z.shape == adamw.grids[-1][1].shape and abs(grid.z - adamw.grids[-1][1]).max() <= 0.005 + 1e-6
    assert [line.name for line in lines] == list(DIFFUSION_OPTIMIZERS)
    assert [len(line.x) for line in lines] == [2, 0, 2, 0] and [line.showlegend for line in lines] == [
        True, False, True, False
    ]  # fmt: skip
    assert lines[0].y[1] < lines[0].y[0]


def test_a_finished_training_is_recorded_as_plain_numbers(finished) -> None:
    first, second = finished.state.runs["diffusion"]["runs"]
    assert (first["diffusion_optimizer"], second["diffusion_optimizer"]) == ("coap", "adamw")
    for summary, run in zip((first, second), finished.trained.values(), strict=True):
        assert summary["frechet"] == run.frechet > 0 and summary["optimizer_bytes"] == run.state_bytes
        assert summary["steps"] == 20 and 0 < summary["update_time_ms"] < summary["step_time_ms"]


def test_static_figures_before_and_after(finished) -> None:
    frames = finished.static().layout.sliders[0].steps
    assert [step.label for step in frames] == ["0", "0", "0", "20", "20"]
    panel = lab.DiffusionPanel(LabState())
    assert panel.static().layout.sliders[0].currentvalue.prefix == "rank ratio "
    less = 1 - network_bytes("coap", 4.0) / network_bytes("adamw", 4.0)
    assert f"{less:.0%} less" in panel.table() and "Nothing has been trained yet" in panel.table()


def test_stop_keeps_what_there_is_and_resume_ends_it() -> None:
    panel = lab.DiffusionPanel(LabState(diffusion_steps=30))
    panel.runner._on_item = lambda progress: panel.runner.stop() if progress.step == 7 else None
    panel.run(wait=True)
    run = panel.trained["coap"]
    assert panel.runner.state == "stopped" and run.trainer.steps_done == 7 and "at the end" in panel.table()
    panel.runner._on_item = panel._guarded_item
    panel.resume(wait=True)
    assert run.finished and run.trainer.steps_done == 30


def test_adamw_has_no_ratio_to_choose() -> None:
    panel = lab.DiffusionPanel(LabState(diffusion_optimizer="adamw"))
    assert not panel.rank_ratio.enabled and "two numbers for every weight" in panel.predicted.value
    panel.diffusion_optimizer.value = "galore"
    assert panel.rank_ratio.enabled and "less" in panel.predicted.value
    panel.rank_ratio.offer("0.5")
    assert "rank ratio must be a number from 1.0 to 32.0, got 0.5" in panel.rank_ratio.message.value
