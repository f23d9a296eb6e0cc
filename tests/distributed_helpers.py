"""What the processes of tests/test_distributed.py do. Importable without pytest: each process imports it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.distributed import World
from comera_lab.experiments.parallel import Parallel, ParallelTrainer, held_bytes, split_model
from comera_lab.experiments.recorder import StepRow
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.models.mlp import MLP
from comera_lab.optimizers.sharding import whole

# Split in 2 and 4: 161 x 64 unevenly along its rows, 136 x 161 along its columns (161 is odd), 160 x 136 along its
# rows, and the classifier, 10 x 160, along its longer second dimension. 136 columns are above the exact first basis.
FEATURES = (64, 161, 136, 160, 10)
COAP = {"rank_ratio": 4.0, "plain_up_to": 1000, "update_interval": 2, "refresh_factor": 2}
# 50 rows give 4 processes 13, 13, 12 and 12
CONFIG = TrainConfig(steps=8, batch_size=50, learning_rate=1e-2, evaluate_every=0, seed=3)
CASES = {
    "coap": replace(CONFIG, optimizer="coap", optimizer_settings=COAP),
    "coap-paper": replace(CONFIG, optimizer="coap", optimizer_settings={**COAP, "alignment": "paper"}),
    "coap-moved": replace(CONFIG, optimizer="coap", optimizer_settings={**COAP, "transfer_moments": True}),
    "adamw": CONFIG,
    "tt": CONFIG,
}


def wide_digits() -> Dataset:
    """Digits in float64: rounding is then far below the 1e-8 at which Adam starts to divide by noise."""
    data = digits(8)
    return replace(data, train_x=data.train_x.double(), test_x=data.test_x.double())


def model_of(case: str) -> MLP:
    generator = torch.Generator().manual_seed(5)
    return MLP(FEATURES, "tt" if case == "tt" else "dense", 4, 3, generator=generator).double()


def alone(case: str, steps: int = CONFIG.steps) -> dict[str, Any]:
    """The same run in one process, by the plain Trainer."""
    trainer = Trainer(model_of(case), wide_digits(), CASES[case])
    for _ in range(steps):
        trainer.step()
    return outcome(trainer)


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Losses and whole weights, and what this process holds."""
    states = trainer.optimizer.state.values()
    weights = [whole(p.detach()).numpy().copy() for p in trainer.model.parameters()]
    return {
        "losses": [row.loss_nats for row in trainer.rows if isinstance(row, StepRow)],
        "norms": [row.gradient_norm for row in trainer.rows if isinstance(row, StepRow)],
        "weights": weights,
        "bases": [state["basis"].numpy().tobytes() for state in states if "basis" in state],
        "moments": [type(state["exp_avg"]).__name__ for state in states],
        "held": held_bytes(trainer.model, trainer.optimizer),
        "report": trainer.optimizer.report().bytes if hasattr(trainer.optimizer, "report") else None,
        "judged": trainer.evaluate().loss_nats,
    }


def train_cases(world: World, say: Any, cases: list[tuple[str, Any, int]], folder: str) -> dict[str, Any]:
    """Each (case, kind, accumulate) to its end; a checkpoint of each after half of the steps."""
    found = {}
    for case, kind, accumulate in cases:
        trainer = _trainer(case, world, kind, accumulate)
        for step in range(CONFIG.steps):
            if step == CONFIG.steps // 2:
                trainer.save(f"{folder}/{case}-{kind}-{world.size}.pt")
            trainer.step()
        found[f"{case}-{kind}"] = outcome(trainer)
    return found


def resume_cases(world: World, say: Any, cases: list[tuple[str, Any, str]]) -> dict[str, Any]:
    """Each (case, kind, file) from its checkpoint to its end."""
    found = {}
    for case, kind, file in cases:
        trainer = _trainer(case, world, kind, 1)
        trainer.load(file)
        while not trainer.done:
            trainer.step()
        found[file] = outcome(trainer)
    return found


def _trainer(case: str, world: World, kind: Any, accumulate: int) -> ParallelTrainer:
    parallel = Parallel(world, kind, accumulate)
    model = split_model(model_of(case), parallel)
    return ParallelTrainer(model, wide_digits(), CASES[case], parallel=parallel)


def bad_ends(world: World, say: Any, folder: str) -> dict[str, str]:
    """What every process hears of non-finite gradients, a disk that cannot be written, and one wish to stop."""
    heard = {}
    trainer = _trainer("coap", world, "fsdp", 1)
    trainer.step()
    trainer.optimizer.zero_grad()
    trainer.loss_and_gradients(torch.arange(50))
    if world.rank == 1:
        next(iter(trainer.model.parameters())).grad.to_local()[0] = torch.nan
    try:
        trainer.optimizer.step()
    except ValueError as error:
        heard["nan"] = str(error)
    try:
        trainer.save(f"{folder}/no/such/folder/x.pt")
    except RuntimeError as error:
        heard["disk"] = str(error)
    object.__setattr__(trainer.parallel, "asked_to_stop", lambda: world.rank == 1)
    trainer.step()
    heard["stop"] = str(trainer.stop_agreed)
    for name in ("coap-adafactor", "flora", "coap-8bit"):
        config = replace(CONFIG, optimizer=name, optimizer_settings={"plain_up_to": 1000})
        try:
            ParallelTrainer(trainer.model, wide_digits(), config, parallel=trainer.parallel)
        except ValueError as error:
            heard[name] = str(error)
    return heard


def die_or_sleep(world: World, say: Any, how: str) -> None:
    """The last process dies, raises, or is silent in its third step; the others go on."""
    trainer = _trainer("adamw", world, "ddp", 1)
    for step in range(CONFIG.steps):
        if step == 2 and world.rank == world.size - 1:
            if how == "die":
                os._exit(7)
            if how == "raise":
                raise ValueError("the third step is refused here")
            time.sleep(60)
        trainer.step()
