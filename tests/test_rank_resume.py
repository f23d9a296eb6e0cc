"""A rank training that was cut off goes on bitwise as if it had not been: before a cut of its cores and after it."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from comera_lab.experiments.datasets import digits
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.experiments.recorder import Recorder, read_rows
from comera_lab.experiments.train import CheckpointError
from comera_lab.experiments.trainer import Trainer
from comera_lab.layers import TTLinear, resize, shapes_with_ranks, tt_layers
from comera_lab.models.mlp import MLP
from comera_lab.shapes import ShapeError


def _model(rank: int = 6) -> MLP:
    return MLP((64, 48, 10), kind="tt", rank=rank, generator=torch.Generator().manual_seed(0))


def _config(**settings: object) -> RankConfig:
    return RankConfig(**{"early_steps": 6, "late_steps": 6, "cut_every": 2, **settings})  # type: ignore[arg-type]


def _trainer(recorder: Recorder | None = None, **settings: object) -> RankTrainer:
    return RankTrainer(_model(), digits(8), _config(**settings), recorder)


def _go(trainer: RankTrainer, steps: int) -> None:
    while not trainer.done and trainer.steps_done < steps:
        trainer.step()


def _same_run(one: RankTrainer, other: RankTrainer) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad
    assert [(row.step, row.stage, row.ranks) for row in one.history] == [
        (row.step, row.stage, row.ranks) for row in other.history
    ]
    assert [row.loss_nats for row in one.rows] == [row.loss_nats for row in other.rows]
    states = (one.trainer.optimizer.state_dict()["state"], other.trainer.optimizer.state_dict()["state"])
    assert states[0].keys() == states[1].keys()
    for number, values in states[0].items():
        assert all(torch.equal(value, states[1][number][name]) for name, value in values.items())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gate_kind": "threshold", "cut_every": 0, "compact_every": 3},
        {"target_ratio": 0.7, "part": "model"},
        {"target_ratio": None, "late_steps": 0},
    ],
)
@pytest.mark.parametrize("cut", [1, 5, 7, 10, 11])
def test_C01_resumed_run_is_bitwise_the_unbroken_one(tmp_path: Path, settings: dict[str, object], cut: int) -> None:
    whole, broken = _trainer(**settings), _trainer(**settings)
    _go(whole, 99)
    _go(broken, cut)
    broken.save(tmp_path / "run.pt")
    again = _trainer(**settings)
    again.load(tmp_path / "run.pt")
    assert again.stage == broken.stage and again.limit == broken.limit
    _go(again, 99)
    _same_run(again, whole)
    assert again.finish() == whole.finish()
    assert again.evaluate().loss_nats == whole.evaluate().loss_nats


def test_checkpoint_after_a_cut_really_holds_smaller_cores_and_state(tmp_path: Path) -> None:
    trainer = _trainer(target_ratio=0.3)
    trainer.save(tmp_path / "start.pt")
    _go(trainer, 99)
    trainer.save(tmp_path / "end.pt")
    start, end = (torch.load(tmp_path / name, weights_only=True) for name in ("start.pt", "end.pt"))
    elements = [sum(v.numel() for k, v in state["model"].items() if "cores" in k) for state in (start, end)]
    assert trainer.limit is not None and elements[1] == trainer.size().cores <= trainer.limit < elements[0]
    trainer.load(tmp_path / "start.pt")
    assert (trainer.steps_done, trainer.size().cores) == (0, elements[0]), "and back to larger cores"


def test_finished_run_comes_back_finished(tmp_path: Path) -> None:
    trainer = _trainer()
    _go(trainer, 8)
    report = trainer.finish()
    trainer.save(tmp_path / "run.pt")
    again = _trainer()
    again.load(tmp_path / "run.pt")
    assert again.finished == report == again.finish() and again.done
    with pytest.raises(ValueError, match="was finished after 8 steps"):
        again.step()


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    def trainer() -> RankTrainer:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(TTLinear(64, 48, 6, generator=generator), nn.Dropout(0.5), nn.Linear(48, 10))
        for parameter in model[2].parameters():
            nn.init.zeros_(parameter)
        return RankTrainer(model, digits(8), _config())

    whole, broken, again = trainer(), trainer(), trainer()
    _go(whole, 99)
    _go(broken, 7)
    broken.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    _go(again, 99)
    _same_run(again, whole)


def test_rows_of_a_resumed_run_read_as_one_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with Recorder(rows, _config()) as recorder:
        broken = _trainer(recorder)
        _go(broken, 7)
        broken.save(tmp_path / "run.pt")
        _go(broken, 9)
    with Recorder(rows, _config()) as recorder:
        again = _trainer(recorder)
        again.load(tmp_path / "run.pt")
        _go(again, 99)
    whole = _trainer()
    _go(whole, 99)
    ranks = [(row["step"], row["ranks"]) for row in read_rows(rows) if row["kind"] == "rank"]
    assert ranks == [(row.step, row.ranks) for row in whole.history]
    steps = [row["loss_nats"] for row in read_rows(rows) if row["kind"] == "step"]
    assert steps == [row.loss_nats for row in whole.rows]


# Refusals: nothing is changed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_ratio": 0.6}, "belongs to a run with target_ratio=0.5, got target_ratio=0.6"),
        ({"gate_rate": 0.5}, "belongs to a run with gate_rate=0.01"),
        ({"seed": 1}, "belongs to a run with seed=0, got seed=1"),
        ({"late_steps": 7}, "belongs to a run with late_steps=6"),
    ],
)
def test_checkpoint_of_another_run_is_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    saved = _trainer()
    _go(saved, 11)
    saved.save(tmp_path / "run.pt")
    _refused(_trainer(**settings), tmp_path / "run.pt", ValueError, message)


def test_checkpoint_of_another_model_or_kind_is_refused(tmp_path: Path) -> None:
    saved = _trainer()
    _go(saved, 11)
    saved.save(tmp_path / "run.pt")
    wider = MLP((64, 40, 10), kind="tt", rank=6, generator=torch.Generator().manual_seed(0))
    _refused(RankTrainer(wider, digits(8), _config()), tmp_path / "run.pt", ValueError, "must fit the model")
    other = nn.Sequential(TTLinear(64, 48, 6), nn.Linear(48, 10))
    message = "ranks must be given for the layers 0, got hidden.0"
    _refused(RankTrainer(other, digits(8), _config()), tmp_path / "run.pt", ValueError, message)
    Trainer(_model(), digits(8), _config().training()).save(tmp_path / "plain.pt")
    _refused(_trainer(), tmp_path / "plain.pt", CheckpointError, "is not a checkpoint of a RankTrainer")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "run.pt").read_bytes()[:500])
    _refused(_trainer(), tmp_path / "torn.pt", CheckpointError, "could not read the checkpoint")


def _refused(trainer: RankTrainer, path: Path, error: type[Exception], message: str) -> None:
    before = copy.deepcopy(trainer.model.state_dict())
    parameters = [id(p) for p in trainer.model.parameters()]
    with pytest.raises(error, match=message):
        trainer.load(path)
    assert [id(p) for p in trainer.model.parameters()] == parameters and trainer.steps_done == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_resize_replaces_in_model_and_optimizer_and_names_other_layers() -> None:
    layer = TTLinear(24, 36, 4)
    layer.add_gates()
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    ranks = [1, *(max(1, rank - 1) for rank in layer.shape.ranks[1:-1]), 1]
    resize(layer, {"": ranks}, optimizer)
    assert list(layer.shape.ranks) == ranks and not any(value.any() for value in (*layer.cores, *layer.gates))
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == shapes_with_ranks(layer, {"": ranks})
    assert {id(p) for p in layer.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert set(optimizer.state) <= set(layer.parameters()) and len(tt_layers(layer)) == 1
    with pytest.raises(ShapeError, match="ranks must be given for the layers"):
        resize(layer, {"other": ranks}, optimizer)


# kill -9

_CHILD = """
    import sys, time
    from pathlib import Path
    import torch
    from comera_lab.experiments.datasets import digits
    from comera_lab.experiments.rank_training import RankConfig, RankTrainer
    from comera_lab.models.mlp import MLP

    torch.set_num_threads(1)
    folder, how = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(exist_ok=True)
    model = MLP((64, 48, 10), kind="tt", rank=6, generator=torch.Generator().manual_seed(0))
    config = RankConfig(early_steps=60, late_steps=90, cut_every=5, compact_every=25, target_ratio=0.4)
    trainer = RankTrainer(model, digits(8), config)
    if how == "resume":
        trainer.load(folder / "run.pt")
    while not trainer.done:
        trainer.step()
        if trainer.steps_done % 10 == 0:
            trainer.save(folder / "run.pt")
            (folder / "saved").write_text(str(trainer.steps_done))
    trainer.finish()
    torch.save([trainer.model.state_dict(), trainer.ranks(), trainer.evaluate().loss_nats], folder / "final.pt")
"""


def _start(folder: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(_CHILD), str(folder), how])


@pytest.mark.slow
def test_kill_9_after_a_cut_loses_at_most_one_interval_and_ends_bitwise_the_same(tmp_path: Path) -> None:
    victim, unbroken = _start(tmp_path / "cut", "fresh"), _start(tmp_path / "whole", "fresh")
    saved, deadline = tmp_path / "cut" / "saved", time.monotonic() + 120
    while not (saved.exists() and int(saved.read_text() or 0) >= 110):
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    state = torch.load(tmp_path / "cut" / "run.pt", weights_only=True)
    assert 110 <= state["steps_done"] <= 150
    fresh = {name: list(layer.shape.ranks) for name, layer in tt_layers(_model()).items()}
    assert state["rank_training"]["ranks"] != fresh, "the cores had been cut when the process died"
    assert _start(tmp_path / "cut", "resume").wait() == 0
    assert unbroken.wait() == 0
    want, got = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "cut"))
    assert got[1:] == want[1:]
    assert all(torch.equal(got[0][name], value) for name, value in want[0].items())
