"""The recorded pre-training study: rates by one rule, rows that can be resumed and measured again, a table of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comera_lab.experiments import studies_lm
from comera_lab.experiments.corpus import corpus_of
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.results import data_file
from comera_lab.experiments.studies_lm import ARMS, LanguageStudy, language_study, recorded_table, remeasure
from comera_lab.experiments.tokens import CodeTokenizer, encoded

RECORDED = "results/lm_code_cpu.jsonl"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(studies_lm, "_TUNING_BLOCKS", 4)
    small = {"layers": 1, "width": 64, "hidden": 96, "vocabulary": 300}
    whole = LanguageStudy()
    study = replace(
        whole, dense=replace(whole.dense, **small), tensorised=replace(whole.tensorised, **small, rank=8), tokens=16,
        validation_blocks=4, batch_size=2, steps=6, tuning_steps=2, evaluate_every=3,
    )  # fmt: skip
    monkeypatch.setattr(studies_lm, "LanguageStudy", lambda **changes: replace(study, **changes))
    texts = {f"m{k}.py": f"def name_{k}(value):\n    return value + {k}\n" * (k % 5 + 2) for k in range(60)}
    corpus = corpus_of(texts, "made", "made here")
    return study, encoded(corpus, CodeTokenizer.learn(corpus.train, 300))


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_and_is_measured_again(study, tmp_path):
    settings, streams = study
    path = tmp_path / "rows.jsonl"
    arms = (ARMS[0], replace(ARMS[5], ranks=replace(ARMS[5].ranks, compression=3.4)))
    first = language_study(path, study=settings, arms=arms[:1], seeds=(0,), streams=streams)
    rest = language_study(path, study=settings, arms=arms, seeds=(0, 1), streams=streams)
    assert [(row.method, row.seed) for row in (*first, *rest)] == [
        ("adamw", 0), ("comera-late + coap", 0), ("adamw", 1), ("comera-late + coap", 1)
    ]  # fmt: skip
    assert language_study(path, study=settings, arms=arms, seeds=(0, 1), streams=streams) == []
    runs = split_runs(read_rows(path))
    for run in runs:
        tried = run[0]["config"]["tried"]
        rate = run[-1]["learning_rate"]
        assert tried[f"{rate:g}"] == min(tried.values())
        assert {f"{rate / 2:g}", f"{2 * rate:g}"} <= tried.keys(), "the best has worse neighbours on both sides"
        assert run[-1]["loss_nats"] == [row for row in run if row["kind"] == "eval"][-1]["loss_nats"]
        assert run[-1]["tokens"] == 6 * 2 * 16
    assert runs[0][0]["config"]["tried"] == runs[2][0]["config"]["tried"], "chosen once for a method"
    assert [run[0]["config"]["tuned_on"] for run in runs[:2]] == ["adamw", "fixed ranks, coap"]
    small = runs[1][-1]
    assert small["total_ratio"] >= 3.4 and small["pools_after_mib"]["weights"] < small["pools_before_mib"]["weights"]
    before = [run[-1] for run in runs]
    assert remeasure(path, streams=streams, timed_steps=2) == 4
    after = [run[-1] for run in split_runs(read_rows(path))]
    for old, new in zip(before, after, strict=True):
        assert {k: old[k] for k in ("loss_nats", "ranks", "parameters")} == {
            k: new[k] for k in ("loss_nats", "ranks", "parameters")
        }
        assert new["step_time_ms"] > 0 and new["pools_before_mib"] == pytest.approx(old["pools_before_mib"], rel=0.05)
    table = recorded_table(path)
    assert table.count("comera-late + coap") == 1 and "6 steps, 192 tokens each; made here." in table
    assert "Recorded on" in table and "; 2)" in table


def test_the_recorded_study_is_complete_and_says_how_rates_were_chosen():
    runs = split_runs(read_rows(data_file(RECORDED)))
    results = [run[-1] for run in runs]
    assert all(row["kind"] == "language_result" for row in results)
    assert {row["method"] for row in results} == {arm.method for arm in ARMS}
    for run, row in zip(runs, results, strict=True):
        tried = run[0]["config"]["tried"]
        assert tried[f"{row['learning_rate']:g}"] == min(tried.values()) and len(tried) >= 3
        assert run[0]["config"]["data_digest"] == runs[0][0]["config"]["data_digest"]
        assert run[0]["commit"] is not None and not run[0]["commit"].endswith("-dirty")
        assert row["tokens"] == results[0]["tokens"] and row["steps"] == results[0]["steps"]
        if row["method"].startswith("comera-late"):
            assert 4.23 <= row["total_ratio"] < 4.23 * 1.02
        if "comera" not in row["method"]:
            assert row["total_ratio"] == 1 and row["ranks"] == {}
    optimizer = {row["method"]: row["pools_after_mib"]["optimizer"] for row in results}
    assert optimizer["comera-late + coap"] < optimizer["comera-late"] < optimizer["coap"] < optimizer["adamw"]
    table = recorded_table(data_file(RECORDED))
    assert all(arm.method in table for arm in ARMS) and "the standard library of Python" in table
