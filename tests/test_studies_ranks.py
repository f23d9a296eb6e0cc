"""The rank study: every variant leaves a whole run, both ratios count what they say, the recorded file is whole."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from comera_lab.experiments.pairs import PairData, pairs_from_texts
from comera_lab.experiments.rank_costs import remeasure
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import RankRow, read_rows, split_runs
from comera_lab.experiments.studies_ranks import (
    VARIANTS,
    RankStudy,
    Variant,
    rank_study,
    rate_grid,
    rate_share,
    thinned,
    train_with_schedule,
)
from comera_lab.models.encoder import EncoderConfig, PairEncoder

RECORDED = Path(__file__).parents[1] / "data" / "results" / "pairs_rank_cpu.jsonl"


TINY = EncoderConfig(width=16, hidden=32, heads=2, layers=1, vocabulary=300, rank=4, word_rank=6)


def _pairs() -> PairData:
    draw = torch.Generator().manual_seed(0)
    words = [f"w{chr(97 + i)}" for i in range(26)]

    def text() -> str:
        return " ".join(words[i] for i in torch.randint(26, (5,), generator=draw).tolist())

    splits = {split: [(text(), text(), n % 3) for n in range(24)] for split in ("train", "dev", "test")}
    return pairs_from_texts("words", splits)


def test_study_records_every_variant_with_what_it_cost(tmp_path: Path) -> None:
    study = RankStudy(encoder=TINY, steps=12, batch_size=8, tokens=6, evaluate_every=6, timed_steps=3)
    path = tmp_path / "study.jsonl"
    results = rank_study(path, _pairs(), study=study, seeds=(0,))
    runs = split_runs(read_rows(path))
    assert [(run[-1]["model"], run[-1]["target_ratio"]) for run in runs] == list(VARIANTS)
    by_name = {(row.model, row.target_ratio): row for row in results}
    dense, fixed = by_name["dense", None], by_name["fixed", None]
    assert dense.total_ratio == dense.tensorised_ratio == 1
    twin = PairEncoder(dataclasses.replace(TINY, kind="dense"))
    assert dense.total_mib * 2**20 == 4 * twin.parameter_count()
    assert dense.total_mib - dense.tensorised_mib == pytest.approx(fixed.total_mib - fixed.tensorised_mib)
    for (name, target), row in by_name.items():
        assert row.total_mib == pytest.approx(dense.total_mib / row.total_ratio)
        assert row.tensorised_mib == pytest.approx(dense.tensorised_mib / row.tensorised_ratio)
        assert row.steps == 12 and row.step_time_after_ms > 0 and row.peak_after_mib > row.total_mib
        assert row.peak_after_mib == pytest.approx(sum(row.pools_after_mib.values()))
        assert row.test_accuracy is not None and row.note == ""
        if name == "late":
            assert target is not None and 0.95 * target <= row.tensorised_mib / fixed.tensorised_mib <= target
            assert row.peak_after_mib < row.peak_before_mib
            assert all(row.pools_after_mib[pool] < row.pools_before_mib[pool] for pool in ("weights", "optimizer"))
    for run in runs:
        assert [row["step"] for row in run if row["kind"] == "eval"] == [6, 12]
        assert any(row["kind"] == "rank" for row in run) == (run[-1]["model"] in ("early", "late"))


def test_costs_are_taken_again_from_the_recorded_ranks_and_nothing_else_changes(tmp_path: Path) -> None:
    study = RankStudy(encoder=TINY, steps=12, batch_size=8, tokens=6, evaluate_every=0, timed_steps=3)
    path, pairs = tmp_path / "study.jsonl", _pairs()
    rank_study(path, pairs, study=study, variants=[("dense", None), ("early", None), ("late", 0.5)], seeds=(3,))
    was = read_rows(path)
    assert remeasure(path, pairs, timed_steps=3) == 3
    now = read_rows(path)
    times = {"step_time_before_ms", "step_time_after_ms", "cost_commit"}
    for old, new in zip(was, now, strict=True):
        assert {name: value for name, value in old.items() if name not in times} == {
            name: value for name, value in new.items() if name not in times
        }, "pools are those of the trained models: the same ranks weigh the same"
    late = now[-1]
    assert late["step_time_after_ms"] > 0 and list(tmp_path.iterdir()) == [path]


def test_rate_rises_then_falls_to_nothing_for_every_group() -> None:
    shares = [rate_share(made, 100) for made in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:51] == [1.0] * 46 and shares[75] == 0.5 and shares[99] == pytest.approx(0.02)


def test_D04_schedule_reaches_every_group_through_a_cut() -> None:
    study = RankStudy(encoder=TINY, steps=20, batch_size=8, tokens=6, evaluate_every=0, rate=1e-3, gate_rate=1e-2)
    model = PairEncoder(TINY, generator=torch.Generator().manual_seed(0))
    trainer = RankTrainer(model, study.dataset(_pairs()), RankConfig(early_steps=10, late_steps=10, rate=1e-3))
    seen: list[list[float]] = []
    trainer.trainer.optimizer.register_step_pre_hook(lambda own, *_: seen.append([g["lr"] for g in own.param_groups]))
    train_with_schedule(trainer, study, lambda row: None)
    assert len(seen) == 20
    for made, rates in enumerate(seen):
        share = rate_share(made, 20)
        assert rates == pytest.approx([1e-3 * share, 1e-2 * share, 1e-3 * share], rel=1e-12)


def test_grid_judges_each_rate_on_dev_alone(tmp_path: Path) -> None:
    pairs = _pairs()
    blind = dataclasses.replace(pairs, splits={name: pairs.splits[name] for name in ("train", "dev")})
    study = RankStudy(encoder=TINY, batch_size=8, tokens=6)
    found = rate_grid(tmp_path / "grid.jsonl", blind, {"dense": (1e-3,), "fixed": (1e-3, 1e-2)}, study=study, steps=4)
    assert list(found) == [("dense", 1e-3), ("fixed", 1e-3), ("fixed", 1e-2)]
    runs = split_runs(read_rows(tmp_path / "grid.jsonl"))
    assert [(run[0]["config"]["variant"], run[0]["config"]["learning_rate"]) for run in runs] == list(found)
    assert [run[-1]["accuracy"] for run in runs] == [row.accuracy for row in found.values()]


def test_released_study_reads_joined_pairs_and_says_that_its_accuracy_means_nothing(tmp_path: Path) -> None:
    study = RankStudy.released(steps=4)
    assert study.encoder.width == 768 and study.encoder.head == "cross"
    small = dataclasses.replace(study, encoder=dataclasses.replace(TINY, head="cross"), tokens=6, timed_steps=3)
    path = tmp_path / "run.jsonl"
    row = rank_study(path, _pairs(), study=small, variants=[("late", 0.5)], seeds=(0,))[0]
    assert row.test_accuracy is None and "its accuracy means nothing" in row.note
    assert remeasure(path, _pairs(), timed_steps=3) == 1
    assert read_rows(path)[-1]["pools_after_mib"] == row.pools_after_mib


def test_thinned_history_keeps_both_ends() -> None:
    rows = [RankRow(step=n, stage="early", cores=1, total=1, ranks={}, elapsed_s=0.0) for n in (0, 3, 4, 7, 8, 8)]
    assert [row.step for row in thinned(rows, 4)] == [0, 4, 8, 8]
    assert thinned(rows, 4)[-1] is rows[-1]


# The recorded file


def _recorded() -> list[list[dict[str, Any]]]:
    """The runs of the study as it is now; the file also holds an earlier one of 1,000 steps."""
    return [run for run in split_runs(read_rows(RECORDED)) if run[-1]["steps"] == RankStudy().steps]


def test_recorded_study_is_whole_and_its_sizes_are_those_of_its_models() -> None:
    by_seed: dict[int, list[Variant]] = {}
    study, dense = RankStudy(), 4 * PairEncoder(EncoderConfig.small("dense")).parameter_count() / 2**20
    for run in _recorded():
        info, result = run[0], run[-1]
        by_seed.setdefault(info["seed"], []).append((result["model"], result["target_ratio"]))
        for commit in (info["commit"], result["cost_commit"]):
            assert commit is not None and not commit.endswith("-dirty")
        config = info["config"]
        assert (config["tokens"], config["batch_size"], result["steps"]) == (
            study.tokens,
            study.batch_size,
            study.steps,
        )
        rate = config["rate"] if "rate" in config else config["learning_rate"]
        assert rate == (study.dense_rate if result["model"] == "dense" else study.rate)
        assert result["total_mib"] * result["total_ratio"] == pytest.approx(dense)
        assert result["accuracy"] == [row for row in run if row["kind"] == "eval"][-1]["accuracy"]
        assert result["peak_after_mib"] == pytest.approx(sum(result["pools_after_mib"].values()))
    assert sorted(by_seed) == [0, 1, 2]
    for variants in by_seed.values():
        assert variants == [variant for variant in VARIANTS if variant in variants], "each once, in order"
        assert {("dense", None), ("late", 0.5)} <= set(variants), "what the claim about late 0.5 compares"
    assert set(by_seed[0]) >= set(VARIANTS) - {("late", 0.2)}


def test_recorded_targets_were_met_from_below_and_the_cut_saves_memory() -> None:
    results = [run[-1] for run in _recorded()]
    whole = next(row["tensorised_mib"] for row in results if row["model"] == "fixed")
    for row in results:
        if row["model"] == "late":
            assert 0.98 * row["target_ratio"] <= row["tensorised_mib"] / whole <= row["target_ratio"]
            assert row["peak_after_mib"] < row["peak_before_mib"]


def test_recorded_published_configuration_has_its_sizes_and_no_claim_of_accuracy() -> None:
    rows = {
        run[-1]["model"]: (run[0], run[-1])
        for run in split_runs(read_rows(RECORDED))
        if run[0]["config"]["encoder"]["width"] == 768
    }
    info, late = rows["late"]
    assert rows["dense"][1]["total_mib"] * 2**20 == 4 * 66_957_315
    cores = round(late["tensorised_mib"] * 2**20 / 4)
    assert 0.98 * 1_026_528 * 0.5 <= cores <= 1_026_528 * 0.5
    assert late["total_ratio"] == pytest.approx(66_957_315 / (cores + 459_267))
    assert late["step_time_after_ms"] < late["step_time_before_ms"] < rows["dense"][1]["step_time_before_ms"]
    assert late["peak_after_mib"] < late["peak_before_mib"]
    assert not info["commit"].endswith("-dirty")
    assert all(row["test_accuracy"] is None and "accuracy means nothing" in row["note"] for _, row in rows.values())


def test_rates_were_the_best_of_a_recorded_grid_with_another_seed() -> None:
    grid = split_runs(read_rows(RECORDED.with_name("pairs_rates_cpu.jsonl")))
    losses: dict[str, dict[float, float]] = {}
    for run in grid:
        config = run[0]["config"]
        assert config["seed"] == 100 and "dev" in config["data"]
        losses.setdefault(config["variant"], {})[config["learning_rate"]] = run[-1]["loss_nats"]
    assert {name: min(some, key=some.__getitem__) for name, some in losses.items()} == {
        "dense": RankStudy().dense_rate,
        "fixed": RankStudy().rate,
    }
    assert all(len(some) == 3 for some in losses.values())


def test_readme_of_the_data_says_what_the_rows_say() -> None:
    """Points of test accuracy that each model loses against dense, means over its seeds, as the README's table has."""
    readme = RECORDED.parents[1].joinpath("README.md").read_text()
    found: dict[Variant, list[float]] = {}
    for run in _recorded():
        found.setdefault((run[-1]["model"], run[-1]["target_ratio"]), []).append(run[-1]["test_accuracy"])
    means = {variant: 100 * mean(values) for variant, values in found.items()}
    for (name, target), value in means.items():
        label = name if target is None else f"{name} {target:g}"
        lost = means["dense", None] - value
        assert re.search(
            rf"\| {re.escape(label)} \| {len(found[name, target])} \| {value:.1f} \| {lost:.1f} \|", readme
        ), f"{label}: {value:.1f}, lost {lost:.1f}"
