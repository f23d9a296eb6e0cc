"""The recorded study: it can be made again, and the committed file is what it says."""

from __future__ import annotations

from pathlib import Path

import torch

from comera_lab.experiments.datasets import digits
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.studies import RANKS, SEEDS, digits_study, tuned_rate
from comera_lab.models.mlp import MLP

RECORDED = Path(__file__).parents[1] / "data" / "results" / "digits_mlp_cpu.jsonl"


def test_study_records_a_whole_run_for_each_model_and_seed(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    threads = torch.get_num_threads()
    results = digits_study(path, ranks=(None, 2), seeds=(0, 1), rates=(1e-3, 3e-3), steps=52)
    assert torch.get_num_threads() == threads
    runs = split_runs(read_rows(path))
    assert [(run[0]["config"]["rank"], run[0]["seed"]) for run in runs] == [(None, 0), (2, 0), (None, 1), (2, 1)]
    assert [row.accuracy for row in results] == [run[-1]["accuracy"] for run in runs]
    for run in runs:
        kinds = [row["kind"] for row in run]
        assert kinds.count("step") == (6 if run[0]["seed"] == 0 else 0)
        assert [row["step"] for row in run if row["kind"] == "eval"] == [50, 52]
        assert run[0]["config"]["learning_rate"] in (1e-3, 3e-3)
        assert run[-1]["step_time_p20_ms"] <= run[-1]["step_time_ms"] <= run[-1]["step_time_p80_ms"]


def test_recorded_study_is_whole_and_belongs_to_this_data_and_these_models() -> None:
    runs = split_runs(read_rows(RECORDED))
    assert sorted((str(run[-1]["rank"]), run[-1]["seed"]) for run in runs) == sorted(
        (str(rank), seed) for rank in RANKS for seed in SEEDS
    )
    for run in runs:
        info, result = run[0], run[-1]
        model = MLP() if result["rank"] is None else MLP(kind="tt", rank=result["rank"])
        assert result["parameters"] == model.parameter_count()
        assert info["config"]["data_digest"] == digits(28).digest
        assert info["commit"] is not None and not info["commit"].endswith("-dirty")
        assert result["accuracy"] == run[-2]["accuracy"]


def test_recorded_accuracies_support_what_the_lessons_say() -> None:
    accuracy: dict[int | None, list[float]] = {}
    for run in split_runs(read_rows(RECORDED)):
        accuracy.setdefault(run[-1]["rank"], []).append(run[-1]["accuracy"])
    assert min(accuracy[None]) >= 0.95
    assert min(accuracy[8]) >= 0.93


def test_panels_train_at_the_rates_that_the_study_chose() -> None:
    for run in split_runs(read_rows(RECORDED)):
        assert tuned_rate(run[-1]["rank"]) == run[0]["config"]["learning_rate"]
    assert [tuned_rate(rank) for rank in (1, 3, 12, 64)] == [1e-2, 1e-2, 3e-3, 1e-3]
