"""The rank study: every variant leaves a whole run, both ratios count what they say, the recorded file is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comera_lab.experiments.pairs import PairData, pairs_from_texts
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.studies_ranks import VARIANTS, RankStudy, rank_study
from comera_lab.models.encoder import EncoderConfig, PairEncoder

RECORDED = Path(__file__).parents[1] / "data" / "results" / "pairs_rank_cpu.jsonl"


def _pairs() -> PairData:
    draw = torch.Generator().manual_seed(0)
    words = [f"w{chr(97 + i)}" for i in range(26)]

    def text() -> str:
        return " ".join(words[i] for i in torch.randint(26, (5,), generator=draw).tolist())

    splits = {split: [(text(), text(), n % 3) for n in range(24)] for split in ("train", "dev")}
    return pairs_from_texts("words", splits)


def test_study_records_every_variant_with_what_it_cost(tmp_path: Path) -> None:
    encoder = EncoderConfig(width=16, hidden=32, heads=2, layers=1, vocabulary=300, rank=4, word_rank=6)
    study = RankStudy(encoder=encoder, steps=12, batch_size=8, tokens=6, evaluate_every=6)
    path = tmp_path / "study.jsonl"
    results = rank_study(path, _pairs(), study=study)
    runs = split_runs(read_rows(path))
    assert [(run[-1]["model"], run[-1]["target_ratio"]) for run in runs] == list(VARIANTS)
    by_name = {(row.model, row.target_ratio): row for row in results}
    dense, fixed = by_name["dense", None], by_name["fixed", None]
    assert dense.total_ratio == dense.tensorised_ratio == 1
    twin = PairEncoder(EncoderConfig(**{**encoder.__dict__, "kind": "dense"}))
    assert dense.total_mib * 2**20 == 4 * twin.parameter_count()
    assert dense.total_mib - dense.tensorised_mib == pytest.approx(fixed.total_mib - fixed.tensorised_mib)
    for (name, target), row in by_name.items():
        assert row.total_mib == pytest.approx(dense.total_mib / row.total_ratio)
        assert row.tensorised_mib == pytest.approx(dense.tensorised_mib / row.tensorised_ratio)
        assert row.steps == 12 and row.step_time_after_ms > 0 and row.peak_after_mib > row.total_mib
        if name == "late":
            assert target is not None and 0.95 * target <= row.tensorised_mib / fixed.tensorised_mib <= target
            assert row.peak_after_mib < row.peak_before_mib
    for run in runs:
        assert [row["step"] for row in run if row["kind"] == "eval"] == [6, 12]
        assert any(row["kind"] == "rank" for row in run) == (run[-1]["model"] in ("early", "late"))


def test_recorded_study_is_whole_and_its_sizes_are_those_of_its_models() -> None:
    runs = split_runs(read_rows(RECORDED))
    assert sorted((run[-1]["model"], run[-1]["target_ratio"] or 0) for run in runs if run[0]["seed"] == 0) == sorted(
        (name, target or 0) for name, target in VARIANTS
    )
    study = RankStudy()
    dense = 4 * PairEncoder(EncoderConfig.small("dense")).parameter_count() / 2**20
    for run in runs:
        info, result = run[0], run[-1]
        assert info["commit"] is not None and not info["commit"].endswith("-dirty")
        assert info["config"]["tokens"] == study.tokens and result["steps"] == study.steps
        assert result["total_mib"] * result["total_ratio"] == pytest.approx(dense)
        evaluations = [row for row in run if row["kind"] == "eval"]
        assert result["accuracy"] == evaluations[-1]["accuracy"]


def test_recorded_targets_were_met_from_below_and_the_cut_saves_memory() -> None:
    runs = split_runs(read_rows(RECORDED))
    whole = next(run[-1]["tensorised_mib"] for run in runs if run[-1]["model"] == "fixed")
    for result in (run[-1] for run in runs if run[-1]["model"] == "late"):
        assert 0.98 * result["target_ratio"] <= result["tensorised_mib"] / whole <= result["target_ratio"]
        assert result["peak_after_mib"] < result["peak_before_mib"]
