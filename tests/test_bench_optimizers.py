"""The optimizer bench at toy sizes, and the study of optimizers with one seed."""

from __future__ import annotations

import pytest
import torch

from comera_lab.experiments import bench_optimizers
from comera_lab.experiments.bench_optimizers import RefreshCase, StepCase, correctness_rows, optimizer_rows
from comera_lab.experiments.recorder import read_rows
from comera_lab.experiments.results import data_file
from comera_lab.experiments.studies_optimizers import ABLATION, COMPARISON, optimizer_study

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    case = StepCase(shapes=((256, 96), (96, 256), (256, 96)), turns=2, tokens=8, training_steps=4)
    monkeypatch.setattr(bench_optimizers, "STEP", case)
    monkeypatch.setattr(bench_optimizers, "REFRESH", RefreshCase(rows=160, cols=140, rank=32))


def test_rows_are_whole_and_say_what_was_measured(small):
    rows = [*correctness_rows(CPU), *optimizer_rows(CPU)]
    modes = {(row.op, row.provider, row.mode) for row in rows}
    assert {
        ("optimizer_step", "coap", "correctness"),
        ("optimizer_step", "adamw fused", "step"),
        ("optimizer_step", "coap", "mean step"),
        ("optimizer_step", "coap, not staggered", "slowest step"),
        ("optimizer_step", "coap-8bit", "state"),
        ("training_step", "coap over adamw fused", "step"),
        ("basis", "warm refresh over full svd", "refresh"),
    } <= modes
    assert all(row.value > 0 for row in rows)
    assert all(row.p20 <= row.value <= row.p80 for row in rows if row.p20 is not None)
    state = {row.provider: row.value for row in rows if row.mode == "state"}
    assert state["adamw fused"] > state["coap"] > state["coap-8bit"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_wrong_step_is_refused_before_it_is_timed(small, monkeypatch):
    right = bench_optimizers.COAPAdamW.directions
    monkeypatch.setattr(
        bench_optimizers.COAPAdamW, "directions", lambda *args: [1.01 * direction for direction in right(*args)]
    )
    with pytest.raises(ArithmeticError, match="a COAP step must stay within 2e-04 of float64, got 1.0"):
        list(correctness_rows(CPU))


@pytest.mark.slow
def test_the_study_records_every_arm_with_the_rate_that_was_chosen_for_it(tmp_path):
    path = tmp_path / "study.jsonl"
    arms = (COMPARISON[0], COMPARISON[4], ABLATION[0])
    results = optimizer_study(path, arms=arms, seeds=(0,), rates=(1e-2, 1e-7), features=(784, 64, 64, 10), steps=20)
    assert len(results) == 6
    rows = read_rows(path)
    assert [row["kind"] for row in rows] == ["run", "optimizer_result"] * 6
    assert {row["config"]["rates_tried"][0] for row in rows[::2]} == {1e-2}
    for result in results:
        assert result.learning_rate == 1e-2
        assert 0 < result.train_loss_nats < 2.3
        assert result.state_mib > 0
    assert [result.dtype for result in results[:2]] == ["float32", "bfloat16"]
    assert results[0].state_mib > results[2].state_mib


def test_the_ablation_is_complete():
    parts = {(arm.settings.get("refresh", "warm"), arm.settings["alignment"]) for arm in ABLATION}
    assert parts == {("warm", None), ("warm", "paper"), ("warm", "scale-free"), ("svd", None)}
    assert sum(arm.settings["transfer_moments"] for arm in ABLATION) == len(ABLATION) / 2 == 4


def test_the_recorded_study_says_what_is_told_about_it():
    """Three seeds of every arm; COAP's held-out loss is within 1 % of AdamW's or below it in float32."""
    rows = [row for row in read_rows(data_file("results/coap_ablation_cpu.jsonl")) if row["kind"] == "optimizer_result"]
    assert len(rows) == len(COMPARISON + ABLATION) * 2 * 3

    def loss(optimizer, dtype="float32", **settings):
        chosen = [
            row["loss_nats"]
            for row in rows
            if (row["optimizer"], row["dtype"]) == (optimizer, dtype)
            and row["arm"] == ("ablation" if settings else "comparison")
            and all(row["settings"].get(name) == value for name, value in settings.items())
        ]
        assert len(chosen) == 3
        return chosen

    assert sum(loss("coap")) <= 1.01 * sum(loss("adamw"))
    kept = {"transfer_moments": False, "refresh": None}
    with_step, without = loss("coap", alignment="scale-free", **kept), loss("coap", alignment=None, **kept)
    spread = max(without) - min(without)
    assert abs(sum(with_step) - sum(without)) / 3 < spread, "the alignment step does less than another seed"
