"""The numbers that panels show: against formulas, real steps, direct computation and the trainers' own rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import comera_lab.panels as lab
from comera_lab.memory import OPTIMIZERS, PRECISIONS, predict
from comera_lab.models.mlp import MLP
from comera_lab.panels.memory import mlp_pools, real_step
from comera_lab.panels.shape import digits_matrix
from comera_lab.panels.spectrum import SOURCES, Svd
from comera_lab.panels.state import LabState
from comera_lab.shapes import TTShape


def test_the_shape_error_on_real_digits_falls_to_zero_and_matches_a_direct_cut():
    panel = lab.ShapePanel(LabState(shape=TTShape.for_features(64, 64, rank=4, order=2)))
    assert "not measured yet" in panel.table()
    assert panel.run(wait=True)
    errors = []
    for rank in (1, 4, 16, 64):
        panel.every.value = rank
        errors.append(panel.error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.3
    assert errors[-1] < 1e-6
    panel.in_modes.value = (4, 4, 4)
    assert panel.error is not None, "new modes are measured at once, the matrix is there already"
    panel.out_features.value = 4096
    assert panel.error is None
    panel.run(wait=False)
    panel.runner.join()
    assert "Choose at most 1,461 outputs" in panel.card.text


def test_the_digits_matrix_is_sorted_and_bounded():
    matrix = digits_matrix(TTShape.for_features(64, 100))
    assert matrix.shape == (100, 64)
    with pytest.raises(ValueError, match="hold 1,461 images of 784 pixels"):
        digits_matrix(TTShape.for_features(1000, 100))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_memory_formula_equals_the_general_prediction(optimizer, precision):
    features, batch = (784, 96, 80, 10), 24
    dtype, master = PRECISIONS[precision]
    target = torch.empty(batch, dtype=torch.int64, device="meta")
    pools = predict(
        MLP(features), (batch, 784), optimizer, dtype=dtype, master=master,
        loss=lambda logits: torch.nn.functional.cross_entropy(logits, target),
    )  # fmt: skip
    assert mlp_pools(features, batch, optimizer, precision) == pools


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_memory_formula_equals_a_real_step(precision, optimizer):
    measured = real_step((784, 96, 80, 10), 24, precision, optimizer).pools
    assert measured == mlp_pools((784, 96, 80, 10), 24, optimizer, precision)


def test_the_memory_panel_measures_and_a_change_makes_it_stale():
    panel = lab.MemoryPanel(LabState(width=64, depth=1))
    assert panel.run(wait=True)
    assert "measured here" in panel.table()
    assert "Every pool agrees within 5 %" in panel.line.value
    assert panel.bars.figure.data[0].x[1] > 0
    panel.batch_size.value = 65
    assert panel.report is None


@pytest.mark.parametrize(
    ("values", "message"),
    [({"width": 2048, "depth": 8}, "more than a quarter")],
)
def test_the_memory_panel_refuses_what_cannot_be_measured(values, message, monkeypatch):
    monkeypatch.setattr("comera_lab.panels.memory.memory_limit_bytes", lambda: 2**30)
    panel = lab.MemoryPanel(LabState(**values))
    with pytest.raises(RuntimeError, match=message):
        panel.run(wait=True)
    assert message in panel.card.text
    assert not panel.bar.start.disabled


def test_rank_for_energy_is_the_smallest_that_keeps_it():
    svd = Svd.of("diagonal", torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.0])))
    assert [svd.rank_for(percent) for percent in (50, 66.6, 83.3, 84, 100)] == [1, 1, 2, 3, 3]
    assert svd.error(1) == pytest.approx((2 / 6) ** 0.5)
    assert np.linalg.norm(svd.matrix - svd.cut(2)) / np.linalg.norm(svd.matrix) == pytest.approx(svd.error(2))


def test_spectrum_loads_only_by_the_button():
    panel = lab.SpectrumPanel(LabState())
    assert panel.svd.name == SOURCES[0]
    noise_rank = panel.rank
    panel.source.value = "digits matrix"
    assert panel.svd.name == SOURCES[0]
    assert "press Load matrix" in panel.bar.status.value
    assert panel.run(wait=True)
    assert panel.svd.name == "digits matrix"
    assert panel.rank < noise_rank / 10
    assert panel.state.runs["spectrum"]["source"] == "digits matrix"


def test_training_moves_a_weight_in_few_directions():
    panel = lab.SpectrumPanel(LabState())
    panel.source.value = "what training changed"
    assert panel.run(wait=True)
    assert panel.rank < 30


def test_the_start_panel_trains_and_publishes_what_it_measured():
    panel = lab.StartPanel(LabState(), steps=60)
    assert panel.run(wait=True)
    run = panel.state.runs["start"]
    assert run["steps"] == 60 == len(panel.lane.steps)
    assert run["accuracy_percent"] > 30
    assert f"test accuracy {run['accuracy_percent']:.1f} %" in panel.table()
    assert panel.curves.figure.data[0].x[-1] == 60
    panel.rank.value = 4
    assert "with rank 8" in panel.summary.value and "slider now says 4" in panel.summary.value


def test_J04_the_same_seed_gives_the_same_numbers():
    losses = []
    for _ in range(2):
        panel = lab.StartPanel(LabState(seed=3), steps=8)
        panel.run(wait=True)
        losses.append(panel.lane.steps["loss_nats"].tolist())
    assert losses[0] == losses[1]


def test_the_race_is_fair_and_says_so():
    panel = lab.RacePanel(LabState(width=32, seconds=1.0))
    assert panel.run(wait=True)
    dense, train = panel.summary()
    assert min(dense["seconds"], train["seconds"]) >= 1.0
    longest = max(lane.steps["step_time_ms"].max() for lane in panel.lanes) / 1e3
    assert abs(dense["seconds"] - train["seconds"]) <= longest + 1e-9
    text = panel.table()
    for words in ("Equal seconds (1.0 s each)", "Equal steps (", "Measured here"):
        assert words in text
    assert dense["memory_bytes"] > 0 and train["parameters"] < dense["parameters"]
    slower = train["step_time_ms"] > 1.05 * dense["step_time_ms"]
    assert ("Small is not fast" in text) == slower
    panel.axis.value = "steps"
    assert panel.curves.figure.data[2].x[-1] == train["steps"] or len(panel.curves.figure.data[2].x) == 500
    panel.width.value = 48
    assert "run with width 32" in panel.verdict.value


def test_both_lanes_see_the_same_first_batch():
    panel = lab.RacePanel(LabState(width=16, seconds=1.0))
    job = panel._job()
    next(job)
    next(job)
    first, second = (lane.trainer for lane in panel.lanes)
    assert torch.equal(first._order, second._order)
