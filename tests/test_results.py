"""Recorded studies as lessons show them, and the pair encoder in the rank panel: sizes, seeds, sources, notices."""

from __future__ import annotations

import dataclasses
from statistics import mean

import pytest
import torch

import comera_lab.panels as lab
from comera_lab.experiments import results
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.experiments.results import Recorded, data_file, recorded_flights, recorded_pairs
from comera_lab.layers import tt_layers
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.panels import rank_tasks
from comera_lab.panels.pictures import encoder_parts, part_bars
from comera_lab.panels.rank_run import strip_rows
from comera_lab.panels.rank_tasks import PAIRS
from comera_lab.panels.state import LabState


def test_a_missing_data_file_names_both_places():
    with pytest.raises(FileNotFoundError, match="nothing.jsonl must be among the data files, .* and /"):
        data_file("results/nothing.jsonl")


def test_recorded_pairs_are_the_rows_with_their_seeds():
    runs = [run for run in split_runs(read_rows(data_file("results/pairs_rank_cpu.jsonl")))
            if run[-1]["kind"] == "rank_result"]  # fmt: skip
    studies = recorded_pairs()
    assert sum(len(model.accuracies) for study in studies for model in study.models) == len(runs)
    for study in studies:
        assert study.source.endswith("data/results/pairs_rank_cpu.jsonl") and "torch" in study.source
        assert study.dense.parameters > max(model.parameters for model in study.models if model is not study.dense)
    longest = studies[0]
    (same,) = {run[-1]["steps"] for run in runs if f" {run[-1]['steps']:,} steps of" in longest.label}
    dense = [run[-1]["accuracy"] for run in runs if (run[-1]["steps"], run[-1]["model"]) == (same, "dense")]
    assert longest.dense.accuracy_percent == pytest.approx(100 * mean(dense))


def test_seeds_are_kept_apart_and_sizes_averaged():
    one = Recorded("late", 100, 40, (0.5,)).with_seed(Recorded("late", 104, 44, (0.7,)))
    assert (one.parameters, one.cores, one.accuracy_percent) == (102, 42, 60.0)
    assert one.span == "mean of 2 seeds, 50.0 to 70.0 %"
    assert Recorded("late", 1, 1, (0.5,)).span == "one seed"


def test_recorded_flights_show_means_and_say_when_there_are_none(monkeypatch):
    rows = [row for row in read_rows(data_file("results/dlrm_flights_cpu.jsonl")) if row["kind"] == "recommender"]
    dense = [row["auc"] for row in rows if row["model"] == "dense"]
    assert f"{mean(dense):.4f} ({len(dense)} seeds, {min(dense):.4f} to {max(dense):.4f})" in recorded_flights()

    def missing(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(results, "data_file", missing)
    assert "No recorded rows" in recorded_flights()


def test_the_parts_of_an_encoder_add_up():
    with torch.device("meta"):
        models = {kind: PairEncoder(EncoderConfig.released(kind)) for kind in ("dense", "tt")}
    for model in models.values():
        assert sum(encoder_parts(model).values()) == model.parameter_count()
        assert encoder_parts(model)["stays dense"] == 459_267
    assert len(part_bars(models).data) == 4


def test_rows_of_the_strip_are_bonds_or_whole_layers():
    assert strip_rows({"hidden.0": (1, 3, 4, 1)}) == {"layer 1 bond 1": 3, "layer 1 bond 2": 4}
    many = {f"blocks.{k}.query": (1, 2, 3, 2, 1) for k in range(6)}
    assert strip_rows(many) == {f"block {k} query": 7 for k in range(1, 7)}


@pytest.fixture
def tiny_pairs():
    """The pair task with made-up ids and a tiny encoder."""
    draw = torch.Generator().manual_seed(0)

    def side(count):
        x = torch.randint(3, 40, (count, 2, 5), generator=draw, dtype=torch.int32)
        return x, torch.randint(0, 3, (count,), generator=draw)

    data = Dataset("made-up pairs", *side(80), *side(40), classes=3)
    config = EncoderConfig(width=8, hidden=16, heads=2, positions=8, vocabulary=40, layers=2, order=2)

    def build(rank, generator):
        return PairEncoder(dataclasses.replace(config, rank=rank, word_rank=rank), generator=generator)

    return dataclasses.replace(PAIRS, build=build, data=lambda: data, batch_size=8, evaluate_every=5, timed_steps=2,
                               notice=lambda: "These pairs are made up.")  # fmt: skip


def test_the_rank_panel_trains_an_encoder_and_its_dot_stands_beside_the_recorded_ones(tiny_pairs):
    state = LabState(rank_task="pairs", early_steps=10, late_steps=10, gate_rate=0.1, gamma=5.0, max_rank=4)
    panel, dots = lab.RankTrainingPanel(state, tiny_pairs), lab.ParetoPanel(state, tiny_pairs)
    assert panel.run(wait=True)
    run = panel.trained
    assert isinstance(run.model, PairEncoder) and run.size.cores <= run.trainer.limit
    assert len(run.history().bonds) == len(tt_layers(run.model))
    assert "Dev accuracy" in panel.verdict.value and "These pairs are made up." in panel.verdict.value
    assert "dev accuracy (%)" in [note.text for note in panel.strip.figure.layout.annotations]
    assert list(dots.dots.figure.data[1].y) == [run.accuracy_percent]
    assert "Your runs read other data (made-up pairs): compare sizes only." in dots.source.value
    assert state.rank_runs[0]["task"] == "pairs"
    digits = lab.ParetoPanel(LabState(rank_runs=state.rank_runs))
    assert list(digits.dots.figure.data[1].y or ()) == [], "another task's run is not among these dots"


def test_every_recorded_study_can_be_chosen():
    panel = lab.ParetoPanel(LabState(rank_task="pairs"))
    for label in panel.study.options:
        panel.study.dropdown.value = label
        assert panel.card.text == "" and label in panel.table()
        assert not panel.studies[label].note
    with pytest.raises(ValueError, match="must be one of"):
        panel.study.value = "0 steps"


def test_without_wordnet_the_loader_s_line_is_kept_for_the_reader(monkeypatch, tmp_path):
    def load(say):
        say("The WordNet pairs are not on this machine.")
        return "docstrings"

    monkeypatch.setattr(rank_tasks, "load_pairs", load)
    monkeypatch.setattr(rank_tasks, "_said", [])
    rank_tasks.pair_data.cache_clear()
    try:
        assert rank_tasks.pair_notice() == ""
        assert rank_tasks.pair_data() == "docstrings"
        assert PAIRS.notice is rank_tasks.pair_notice
        assert rank_tasks.pair_notice() == "The WordNet pairs are not on this machine."
    finally:
        rank_tasks.pair_data.cache_clear()
