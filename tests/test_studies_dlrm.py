"""The recommendation study: every variant leaves a whole run, sizes are those of its models, recorded files hold."""

from __future__ import annotations

import pytest
import torch

from comera_lab.experiments.capped import try_under_cap
from comera_lab.experiments.flights import load_flights
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.results import data_file
from comera_lab.experiments.studies_dlrm import VARIANTS, DLRMStudy, Variant, dlrm_costs, dlrm_study
from comera_lab.objectives import model_size

TINY = DLRMStudy(dim=8, batch_size=256, rates=(3e-3, 1e-2))
FEW = (
    Variant("dense", "dense", fields=("carrier", "date x dest")),
    Variant("hash", "hash", 4, fields=("carrier", "date x dest")),
    Variant("tt, ids shuffled", "tt", 4, fields=("carrier", "date x dest"), shuffled=True),
    Variant("late", "tt", 4, fields=("carrier", "date x dest"), learned=True, target_ratio=0.5),
)


def test_study_chooses_a_rate_on_dev_and_records_every_variant(tmp_path):
    path = tmp_path / "study.jsonl"
    rows = dlrm_study(path, study=TINY, variants=FEW, seeds=(0,), rows=1024)
    runs = split_runs(read_rows(path))
    assert [run[-1]["model"] for run in runs] == [one.name for one in FEW] == [row.model for row in rows]
    for run, row in zip(runs, rows, strict=True):
        tried = run[0]["config"]["dev_auc_by_rate_and_epochs"]
        best = max(tried, key=lambda one: one[2])
        assert [row.learning_rate, row.epochs, row.dev_auc] == pytest.approx(best)
        assert len(tried) == (2 if row.model == "late" else 4)
        assert row.steps == 4 * row.epochs
        assert 0.4 < row.auc < 0.9
        assert sum(one[2] for one in row.calibration) == 32_635
    dense, hashed, shuffled, late = rows
    assert dense.tables_ratio == dense.total_ratio == 1
    assert hashed.table_mib == pytest.approx(shuffled.table_mib, rel=0.01)
    assert hashed.tables_ratio == pytest.approx(dense.table_mib / hashed.table_mib)
    data = load_flights(fields=FEW[0].fields)
    small = 4 * 8 * data.table_rows[0] / 2**20
    # single entries of so small a table are some per cent of it
    assert 0.8 < (late.table_mib - small) / (0.5 * (shuffled.table_mib - small)) <= 1


def test_costs_count_every_pool_of_a_step(tmp_path):
    path = tmp_path / "costs.jsonl"
    dlrm_costs(path, study=DLRMStudy(dim=4), batches=(64,), timed_steps=2)
    cells = {(row["provider"], row["mode"]): row["value"] for row in read_rows(path)[1:]}
    weights = 4 * model_size(DLRMStudy(dim=4).model(load_flights(), VARIANTS[2], 0)).total / 2**20
    assert cells["dense", "peak of weights"] == pytest.approx(weights, rel=1e-3)
    assert cells["dense", "peak of optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert cells["tt 4", "peak of optimizer"] < cells["dense", "peak of optimizer"] / 20
    for name in ("dense", "hash 16", "tt 4", "tt 8", "tt 16", "tt 32"):
        pools = [cells[name, f"peak of {pool}"] for pool in ("weights", "grads", "optimizer", "activations")]
        assert sum(pools) == pytest.approx(cells[name, "peak of all pools"])
        assert cells[name, "training step"] > 0


@pytest.mark.slow
def test_a_table_that_is_refused_dense_trains_as_a_tt_matrix():
    refused = try_under_cap("dense", 1_000_000, 800)
    assert not refused.fits
    assert refused.peak_mib is None
    assert "memory" in refused.reason
    fits = try_under_cap("tt", 1_000_000, 800)
    assert fits.fits
    assert fits.peak_mib < 800


def test_a_try_that_fails_for_another_reason_says_so():
    with pytest.raises(RuntimeError, match="ValueError: limit_mib must be|ShapeError: limit_mib must be an integer"):
        try_under_cap("tt", 1000, 0)


def recorded():
    return read_rows(data_file("results/dlrm_flights_cpu.jsonl"))


def test_recorded_results_are_whole_and_their_sizes_are_those_of_their_models():
    runs = [run for run in split_runs(recorded()) if run[-1]["kind"] == "recommender"]
    found = {(run[-1]["model"], run[-1]["rank"], run[-1]["seed"]) for run in runs}
    assert found == {(one.name, one.rank, seed) for one in VARIANTS for seed in range(3)}
    study = DLRMStudy()
    by_name = {(one.name, one.rank): one for one in VARIANTS}
    sizes: dict = {}
    data = {fields: load_flights(fields=fields) for fields in {one.fields for one in VARIANTS}}
    for run in runs:
        info, result = run[0], run[-1]
        assert info["commit"] is not None
        assert not info["commit"].endswith("-dirty")
        assert result["learning_rate"] in study.rates
        variant = by_name[result["model"], result["rank"]]
        if not variant.learned and variant not in sizes:
            with torch.device("meta"):
                sizes[variant] = model_size(study.model(data[variant.fields], variant, 0)).total
        if not variant.learned:
            assert result["total_mib"] == pytest.approx(4 * sizes[variant] / 2**20)


def test_recorded_cap_is_passed_by_dense_tables_and_not_by_tt():
    tries = {
        (row["provider"], row["sizes"]["rows"]): row["value"]
        for row in recorded()
        if row["kind"] == "bench" and row["op"] == "dlrm_capped"
    }
    assert tries["dense", 1_000_000] > 0
    assert tries["dense", 2_000_000] == 0
    assert 0 < tries["tt", 10_000_000] < 2048
