"""The diffusion study: every method leaves a whole run, and the recorded file says what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from comera_lab.experiments.diffusion import DiffusionConfig
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.studies_diffusion import (
    CHANNELS,
    METHODS,
    StepTime,
    diffusion_study,
    optimizer_maker,
    step_times,
    tuned_rate,
)
from comera_lab.memory import StateSettings, optimizer_bytes
from comera_lab.models.unet import UNet

RECORDED = Path(__file__).parents[1] / "data" / "results" / "ddpm_digits_cpu.jsonl"


@pytest.mark.slow
def test_study_records_every_method_with_its_own_rate(tmp_path: Path) -> None:
    config = DiffusionConfig(steps=6, batch_size=8, warmup=2, evaluate_every=3, samples=20)
    path = tmp_path / "study.jsonl"
    times = {method: StepTime(2.0, 1.0, 3.0) for method in METHODS}
    results = diffusion_study(path, seeds=(0, 1), config=config, channels=(16, 48), times=times)
    runs = split_runs(read_rows(path))
    assert [(run[0]["config"]["method"], run[0]["seed"]) for run in runs] == [(m, s) for s in (0, 1) for m in METHODS]
    for run, result in zip(runs, results, strict=True):
        assert [row["kind"] for row in run] == ["run", "diffusion", "diffusion", "diffusion_result"]
        tried = run[0]["config"]["tried"]
        assert tried[f"{result.learning_rate:g}"] == min(tried.values())
        assert (result.rank_ratio is None) == (result.optimizer == "adamw")
        assert result.frechet == run[2]["frechet"] and 0 < result.update_time_ms < result.step_time_ms
    by_method = {row.optimizer: row.optimizer_bytes for row in results}
    parameters = UNet((16, 48)).parameters()
    assert by_method["adamw"] == optimizer_bytes(parameters, "adamw").total
    assert by_method["galore"] == by_method["coap"] < by_method["adamw"]


@pytest.mark.slow
def test_step_times_are_taken_of_every_method() -> None:
    times = step_times(("adamw", "coap"), config=DiffusionConfig(batch_size=2), channels=(8, 48))
    for time in times.values():
        assert 0 < time.update_ms <= time.slowest_update_ms and time.update_ms < time.whole_ms


def test_only_methods_of_the_study_have_a_rate() -> None:
    assert tuned_rate("coap-8bit") == tuned_rate("coap")
    with pytest.raises(ValueError, match=r"one of adamw, galore, coap, coap-8bit, got 'sgd'"):
        tuned_rate("sgd")


def test_the_recorded_study_is_whole_and_its_sizes_are_those_of_its_optimizers() -> None:
    runs = split_runs(read_rows(RECORDED))
    assert sorted((run[-1]["optimizer"], run[-1]["seed"]) for run in runs) == [
        (method, seed) for method in sorted(METHODS) for seed in (0, 1, 2)
    ]
    model = UNet(CHANNELS)
    for run in runs:
        info, result = run[0], run[-1]
        method = result["optimizer"]
        assert info["commit"] is not None and not info["commit"].endswith("-dirty")
        tried, chosen = info["config"]["tried"], result["learning_rate"]
        assert all(tried[f"{rate:g}"] > tried[f"{chosen:g}"] for rate in (chosen / 2, 2 * chosen))
        assert result["learning_rate"] == tuned_rate(method)
        assert optimizer_maker(method, 4.0, 1e-3)(model).param_groups[0]["lr"] == 1e-3
        settings = StateSettings(rank_ratio=result["rank_ratio"])
        assert result["optimizer_bytes"] == optimizer_bytes(model.parameters(), method, settings=settings).total


def test_recorded_samples_lie_between_real_digits_and_noise() -> None:
    for run in split_runs(read_rows(RECORDED)):
        result = run[-1]
        assert result["frechet_real"] < result["frechet"] < 0.3 * result["frechet_noise"]
        evaluations = [row for row in run if row["kind"] == "diffusion"]
        assert evaluations[-1]["test_loss_mse"] < evaluations[0]["test_loss_mse"]
