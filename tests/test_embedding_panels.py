"""Lesson 07's panels: sizes in closed form, real tables up to the cap, three recommenders and their controls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import comera_lab.panels as lab
from comera_lab.experiments.metrics import logits_of, scores
from comera_lab.experiments.recommendation import RecommendationData, Rows
from comera_lab.layers import TTEmbedding
from comera_lab.memory import mib
from comera_lab.panels import recommender
from comera_lab.panels.embedding import REAL_MIB, frequent_few, rows_at, table_shape
from comera_lab.panels.recommender_run import RATES, RecommenderLane, RecommenderSettings
from comera_lab.panels.state import LabState

QUICK = {"exponent": 3.0, "columns": "16", "rank": 4}


def embedding(**values):
    panel = lab.EmbeddingPanel(LabState())
    for name, value in values.items():
        getattr(panel, name).value = value
    return panel


@pytest.fixture(scope="module")
def timed():
    """A small real table of both kinds; read only."""
    panel = embedding(**QUICK)
    assert panel.run(wait=True)
    return panel


@pytest.mark.parametrize("rows", [1000, 18_000, 100_000])
def test_sizes_are_those_of_real_tables(rows):
    shape = table_shape(rows, 32, 8)
    layer = TTEmbedding(rows, 32, 8)
    assert shape.params == sum(core.numel() for core in layer.cores)
    assert shape.dense_params == rows * 32


def test_the_largest_table_is_computed_and_never_built():
    panel = embedding(exponent=9.0)
    assert panel.rows == 10**9 and not panel.dense_is_real
    assert f"{mib(4 * 64 * 10**9):,.2f} MiB" in panel.numbers.value and "computed, not built" in panel.numbers.value
    assert panel.run(wait=True)
    (took,) = panel.timings.values()
    assert set(took) == {"tensor train"} and "is not built" in panel.line.value
    assert list(panel.figure.figure.data[1].x) == []


def test_both_kinds_are_timed_where_the_dense_table_is_small(timed):
    took = timed.timings[4, 16, 1000]
    assert set(took) == {"dense", "tensor train"}
    assert all(0 < look < step for look, step in took.values())
    assert "Measured here for 4,096 ids" in timed.line.value and f"{took['dense'][1]:.2f}" in timed.table()
    assert list(timed.figure.figure.data[1].x) == [1000] and timed.state.runs["embedding"]["timings"]


def test_break_even_is_where_the_cores_become_smaller():
    panel = embedding(columns="16", rank=64)
    rows = panel.break_even
    at = [k for k in range(25) if rows_at(3 + k / 4) == rows]
    assert table_shape(rows, 16, 64).compression > 1 >= table_shape(rows_at(3 + (at[0] - 1) / 4), 16, 64).compression
    assert f"from {rows:,} rows on" in panel.line.value


def test_the_dense_cap_is_about_bytes():
    for exponent, columns in ((6.0, "16"), (6.25, "16"), (5.0, "256")):
        panel = embedding(exponent=exponent, columns=columns)
        assert panel.dense_is_real == (4 * panel.rows * int(columns) <= REAL_MIB * 2**20)


def test_synthetic_ids_lie_in_the_table_and_few_are_frequent():
    ids = frequent_few(10**9, torch.Generator().manual_seed(0))
    assert int(ids.min()) >= 0 and int(ids.max()) < 10**9
    assert (ids < 1000).float().mean() > 0.2


# recommenders


def small_flights(split, ids):
    draw = torch.Generator().manual_seed(0)
    sizes = (5, 3200)

    def rows(count):
        x = torch.stack([torch.randint(0, high, (count,), generator=draw) for high in (900, 300, *sizes)], dim=1)
        return Rows(x.int(), (x[:, 2] > 2).long())

    splits = {"train": rows(4096), "dev": rows(600), "test": rows(100)}
    return RecommendationData(f"made up, {split}, {ids}", ("a", "b"), ("few", "many"), sizes, splits)


@pytest.fixture
def trained(monkeypatch):
    monkeypatch.setattr(recommender, "flights", small_flights)
    panel = lab.RecommenderPanel(LabState())
    panel.steps.value, panel.rank.value, panel.split.value, panel.ids.value = 16, 4, "day", "shuffled"
    assert panel.run(wait=True)
    return panel


def test_lanes_differ_in_their_large_tables_alone_and_show_what_they_are(trained):
    dense, hashed, train = trained.lanes
    assert "made up, day, shuffled" in dense.data.name
    assert isinstance(dense.model.tables[1], nn.Embedding) and isinstance(train.model.tables[1], TTEmbedding)
    assert dense.times_smaller == 1
    assert hashed.table_mib == pytest.approx(train.table_mib, rel=0.05)
    assert torch.equal(dense.model.bottom[0].weight.isnan(), train.model.bottom[0].weight.isnan())
    for lane, row in zip(trained.lanes, trained.summary(), strict=True):
        assert (row["steps"], len(lane.times_ms)) == (16, 16)
        found = scores(logits_of(lane.model, lane.data.splits["dev"]), lane.data.splits["dev"].y)
        assert row["auc"] == pytest.approx(found.auc)
        assert f"{found.auc:.4f}" in trained.numbers.value and f"{found.auc:.4f}" in trained.table()
    assert "Dev AUC after equal steps" in trained.verdict.value
    assert list(trained.curves.figure.data[4].y) == [auc for _, auc in train.curve]
    assert trained.state.runs["recommender"]["lanes"] == trained.summary()


def test_settings_that_changed_since_the_run_are_named(trained):
    trained.rates.value = "1e-3 for all"
    assert "This run had: split by day, ids shuffled, rates tuned on dev, rank 4" in trained.verdict.value
    assert [step.label for step in trained.static().layout.sliders[0].steps] == ["4", "8", "12", "16"]


@pytest.mark.parametrize("rates", RATES)
def test_each_lane_has_the_rate_that_was_asked_for(rates):
    settings = RecommenderSettings(rates=rates, rank=2, steps=16)
    for name, rate in RATES[rates].items():
        lane = RecommenderLane(name, small_flights("date", "by date"), settings)
        assert lane.trainer.optimizer.param_groups[0]["lr"] == rate


def test_before_a_run_it_says_so():
    panel = lab.RecommenderPanel(LabState())
    assert "No recommender has been trained yet" in panel.table() and panel.verdict.value == ""
    assert panel.static().layout.sliders[0].currentvalue.prefix == "nothing has been trained yet: step "
