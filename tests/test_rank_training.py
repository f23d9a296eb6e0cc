"""Training that chooses ranks: it shrinks, meets its target from below, really cuts, and refuses what cannot work."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import RankRow, Recorder, read_rows
from comera_lab.experiments.train import TrainingError
from comera_lab.layers import TTLinear, tt_layers
from comera_lab.models.mlp import MLP
from comera_lab.objectives import model_size


@cache
def _digits() -> Dataset:
    return digits(28)


def _model(seed: int = 0) -> MLP:
    return MLP(kind="tt", rank=16, order=3, generator=torch.Generator().manual_seed(seed))


def _small() -> MLP:
    return MLP((64, 48, 10), kind="tt", rank=6, generator=torch.Generator().manual_seed(0))


def _run(model: nn.Module, data: Dataset, **settings: object) -> RankTrainer:
    trainer = RankTrainer(model, data, RankConfig(**settings))  # type: ignore[arg-type]
    while not trainer.done:
        trainer.step()
    return trainer


def _short(**settings: object) -> RankConfig:
    return RankConfig(**{"early_steps": 6, "late_steps": 6, "cut_every": 2, **settings})  # type: ignore[arg-type]


# What training does to ranks


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.5, 0.2])
def test_default_run_ends_within_two_percent_below_its_target_and_still_reads_digits(target: float) -> None:
    trainer = _run(_model(), _digits(), target_ratio=target)
    start, early = trainer.history[0].cores, next(row.cores for row in trainer.history if row.step == 300)
    assert early < start, "the early stage alone thins the ranks"
    steered = trainer.size().cores
    report = trainer.finish()
    assert trainer.limit == int(target * start)
    assert 0.98 * trainer.limit <= report.size.cores <= trainer.limit
    assert steered == report.size.cores, "the late stage ends at the target, the last cut finds nothing to do"
    assert trainer.evaluate().accuracy > 0.93


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "threshold"), [("straight-through", 0.05), ("threshold", 0.01)])
def test_early_stage_alone_shrinks_ranks_by_their_price(kind: str, threshold: float) -> None:
    settings = {"target_ratio": None, "late_steps": 0, "gate_kind": kind, "gate_threshold": threshold}
    trainer = _run(_model(), _digits(), early_steps=400, gamma=200.0, **settings)
    assert trainer.size().cores < 0.6 * trainer.history[0].cores
    report = trainer.finish()
    assert report.budget is None and report.limit is None
    assert all(layer.shape.ranks == layer.live_ranks for layer in tt_layers(trainer.model).values())
    assert trainer.evaluate().accuracy > 0.9


@pytest.mark.parametrize("kind", ["straight-through", "threshold"])
@pytest.mark.parametrize("cut_every", [0, 2])
@pytest.mark.parametrize(("target", "part"), [(0.6, "tensorised"), (0.75, "model")])
def test_target_is_met_from_below_by_every_way_of_cutting(kind: str, cut_every: int, target: float, part: str) -> None:
    model = MLP((64, 128, 128, 10), kind="tt", rank=12, generator=torch.Generator().manual_seed(0))
    settings = {"gate_kind": kind, "cut_every": cut_every, "target_ratio": target, "part": part}
    trainer = RankTrainer(model, digits(8), _short(**settings))
    whole = trainer.size()
    while not trainer.done:
        trainer.step()
    size = trainer.finish().size
    allowed = target * (whole.cores if part == "tensorised" else whole.total)
    got = size.cores if part == "tensorised" else size.total
    assert 0.98 * allowed <= got <= allowed
    assert sum(p.numel() for layer in tt_layers(model).values() for p in layer.cores) == size.cores


def test_the_line_ends_in_a_smaller_model_that_trains_on() -> None:
    trainer = RankTrainer(_small(), digits(8), _short(target_ratio=0.5))
    sizes = []
    while not trainer.done:
        trainer.step()
        sizes.append(sum(p.numel() for layer in tt_layers(trainer.model).values() for p in layer.cores))
    assert trainer.limit is not None
    assert sizes[9] <= trainer.limit < sizes[8], "compacted two thirds through the late stage"
    assert sizes[9] == sizes[11] == trainer.size().cores, "and its gates are held from then on"
    held = {id(p) for group in trainer.trainer.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in trainer.model.parameters()} <= held


def test_entries_nearest_to_life_are_opened_where_the_line_was_overshot() -> None:
    model = MLP((64, 128, 128, 10), kind="tt", rank=12, generator=torch.Generator().manual_seed(0))
    trainer = RankTrainer(model, digits(8), _short(target_ratio=0.8))
    while trainer.steps_done < 9:
        trainer.step()
    for layer in tt_layers(model).values():
        with torch.no_grad():
            layer.gates[1][:6] = 0.01
    assert trainer.limit is not None and trainer.size().cores < 0.9 * trainer.limit
    trainer.step()
    assert 0.98 * trainer.limit <= trainer.size().cores <= trainer.limit


def test_compact_in_mid_training_keeps_the_function_and_goes_on() -> None:
    trainer = RankTrainer(_small(), digits(8), _short())
    for _ in range(3):
        trainer.step()
    layer = next(iter(tt_layers(trainer.model).values()))
    with torch.no_grad():
        layer.gates[1][2:] = 0
    x = digits(8).test_x[:8]
    before = trainer.model(x).detach()
    report = trainer.compact()
    assert report.after < report.before
    assert relative_error(trainer.model(x), before) < RELATIVE[torch.float32]
    assert layer.shape.ranks == layer.live_ranks
    assert trainer.history[-1].cores == report.after
    trainer.step()


def test_compact_every_cuts_on_its_own() -> None:
    trainer = RankTrainer(_small(), digits(8), _short(compact_every=2, target_ratio=0.9, cut_every=0))
    layer = next(iter(tt_layers(trainer.model).values()))
    with torch.no_grad():
        layer.gates[1][1:] = 0
    trainer.step()
    rank = layer.live_ranks[2]
    trainer.step()
    assert layer.shape.ranks[2] == layer.live_ranks[2] <= rank + 1 and layer.shape.ranks[2] < 6


# Floors and removed layers


@pytest.mark.parametrize("kind", ["straight-through", "threshold"])
def test_ranks_never_fall_below_their_floor(kind: str) -> None:
    settings = {"gate_rate": 0.2, "gate_threshold": 0.9, "gamma": 1e6, "min_rank": 2, "target_ratio": None}
    trainer = _run(_small(), digits(8), early_steps=4, late_steps=0, rank_rows_every=1, gate_kind=kind, **settings)
    ranks = [rank for row in trainer.history for ranks in row.ranks.values() for rank in ranks[1:-1]]
    assert min(ranks) == 2


def test_removed_layer_is_reported_and_leaves_its_bias() -> None:
    settings = {"gate_rate": 0.5, "gamma": 1e6, "min_rank": 0, "target_ratio": None, "late_steps": 0}
    trainer = _run(_small(), digits(8), early_steps=3, gate_kind="threshold", **settings)
    report = trainer.finish()
    assert report.size.removed == report.compact.removed == ("hidden.0",)
    layer = tt_layers(trainer.model)["hidden.0"]
    assert isinstance(layer, TTLinear) and layer.bias is not None
    assert torch.equal(layer(torch.rand(2, 64)), layer.bias.expand(2, -1))


# Rows, stages and the end


def test_history_and_recorder_hold_ranks_from_before_the_first_step_to_the_last_cut(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run.jsonl", _short()) as recorder:
        trainer = RankTrainer(_small(), digits(8), _short(rank_rows_every=3), recorder)
        stages = []
        while not trainer.done:
            stages.append(trainer.stage)
            trainer.step()
            if trainer.evaluation_due:
                trainer.evaluate()
        trainer.finish()
    assert stages == ["early"] * 6 + ["late"] * 6 and trainer.stage == "done"
    first, last = trainer.history[0], trainer.history[-1]
    assert (first.step, first.stage, last.step, last.stage) == (0, "early", 12, "done")
    assert last.ranks == {name: list(ranks) for name, ranks in trainer.ranks().items()}
    assert [row for row in recorder.rows if isinstance(row, RankRow)] == trainer.history
    rows = [row for row in read_rows(tmp_path / "run.jsonl") if row["kind"] == "rank"]
    assert [row["cores"] for row in rows] == [row.cores for row in trainer.history]
    assert all(row.total - row.cores == model_size(trainer.model).dense for row in trainer.history)


def test_finish_ends_the_run_once() -> None:
    trainer = RankTrainer(_small(), digits(8), _short())
    trainer.step()
    report = trainer.finish()
    assert trainer.finish() is report and trainer.done
    assert trainer.limit is not None and report.size.cores <= trainer.limit
    with pytest.raises(ValueError, match="was finished after 1 steps"):
        trainer.step()


def test_asking_changes_nothing() -> None:
    trainer = RankTrainer(_small(), digits(8), _short())
    trainer.step()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.ranks(), trainer.size(), trainer.stage, trainer.evaluate()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(p.grad is not None for p in trainer.model.parameters())


def test_same_seed_same_ranks() -> None:
    runs = [_run(_small(), digits(8), **dataclasses.asdict(_short(target_ratio=0.4))) for _ in range(2)]
    assert [row.ranks for row in runs[0].history] == [row.ranks for row in runs[1].history]
    assert [row.loss_nats for row in runs[0].trainer.rows] == [row.loss_nats for row in runs[1].trainer.rows]


def test_gates_train_at_their_own_rate() -> None:
    trainer = RankTrainer(_small(), digits(8), _short(rate=1e-3, gate_rate=2e-2))
    rates = {id(p): group["lr"] for group in trainer.trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        assert rates[id(parameter)] == (2e-2 if "gates" in name else 1e-3)


# Refusals


def test_nonfinite_loss_leaves_the_model_of_the_step_before() -> None:
    trainer = RankTrainer(_small(), digits(8), _short())
    trainer.step()
    with torch.no_grad():
        trainer.model.classifier.bias[0] = torch.nan  # type: ignore[union-attr]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(TrainingError, match="loss of step 2 is nan"):
        trainer.step()
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_ratio": 0.0}, r"target_ratio must lie in \(0, 1\], got 0"),
        ({"target_ratio": 1.5}, r"target_ratio must lie in \(0, 1\], got 1.5"),
        ({"target_ratio": None}, "a late stage steers to a target"),
        ({"early_steps": 0, "late_steps": 0}, "must be at least 1, got 0"),
        ({"early_steps": -1}, "early_steps must be a whole number"),
        ({"rank_rows_every": 0}, "rank_rows_every must be a whole number of at least 1"),
        ({"gamma": -1.0}, "gamma must be a finite number"),
        ({"gate_rate": 0.0}, "gate_rate must be above 0"),
        ({"gate_threshold": 1.0}, "gate_threshold must lie in"),
        ({"gate_kind": "soft"}, "gate_kind must be one of straight-through, threshold, got 'soft'"),
        ({"rate": -1.0}, "learning_rate must be above 0"),
        ({"part": "embedding"}, "part must be 'model' or 'tensorised'"),
    ],
)
def test_config_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_ratio": 0.1, "part": "model"}, "the dense part, which cannot be cut, is 0.531"),
        ({"target_ratio": 0.2, "min_rank": 4}, "leave room for ranks of 4"),
    ],
)
def test_target_out_of_reach_is_refused_before_anything_changes(settings: dict[str, object], message: str) -> None:
    model = _small()
    with pytest.raises(ValueError, match=message):
        RankTrainer(model, digits(8), _short(**settings))
    assert not any(len(layer.gates) for layer in tt_layers(model).values())


def test_dense_model_and_gates_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="without any. Use kind='tt'"):
        RankTrainer(MLP((64, 48, 10)), digits(8), _short())
    model = _small()
    tt_layers(model)["hidden.0"].add_gates("threshold")
    with pytest.raises(ValueError, match="has gates of kind 'threshold', got gate_kind='straight-through'"):
        RankTrainer(model, digits(8), _short())


def test_dead_model_is_refused() -> None:
    model = _small()
    layer = tt_layers(model)["hidden.0"]
    layer.add_gates()
    with torch.no_grad():
        layer.gates[0].zero_()
    with pytest.raises(ValueError, match="only biases"):
        RankTrainer(model, digits(8), _short())


def test_wrapped_model_trains_its_ranks() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.module(x)
            return logits

    plain = _run(_small(), digits(8), **dataclasses.asdict(_short()))
    wrapped = _run(Wrapper(_small()), digits(8), **dataclasses.asdict(_short()))
    for one, other in zip(wrapped.history, plain.history, strict=True):
        assert list(one.ranks.values()) == list(other.ranks.values())
    assert list(wrapped.ranks()) == ["module.hidden.0"]
