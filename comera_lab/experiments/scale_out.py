"""A small training by several processes of this machine, with the bytes that each holds: predicted and measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comera_lab.experiments.datasets import digits
from comera_lab.experiments.distributed import World
from comera_lab.experiments.parallel import Kind, Parallel, ParallelTrainer, held_bytes, split_model
from comera_lab.experiments.runs import TrainConfig
from comera_lab.models.mlp import MLP
from comera_lab.optimizers.coap import PLAIN_UP_TO
from comera_lab.optimizers.projection import projected_rank
from comera_lab.optimizers.sharding import longest_side

FEATURES = (784, 512, 512, 10)
RANK_RATIO = 4.0
_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ScaleOut:
    """Digits of 28 x 28, a dense network of 670,000 weights, a batch of 64 for all processes together."""

    processes: int = 2
    kind: Kind = "fsdp"
    optimizer: str = "coap"
    steps: int = 20


def predicted_bytes(settings: ScaleOut) -> dict[str, int]:
    """Weights, gradients and optimizer state of the process that holds most, from the shapes alone."""
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in MLP(FEATURES).parameters()]
    weights = optimizer = 0
    for shape in shapes:
        part = list(shape)
        if settings.kind == "fsdp":
            split = longest_side(shape, settings.processes)
            part[split] = -(-part[split] // settings.processes)
        weights += math.prod(part)
        moments = 2 * math.prod(part)
        if settings.optimizer == "coap" and len(shape) == 2 and math.prod(shape) > PLAIN_UP_TO:
            rank = projected_rank((shape[0], shape[1]), None, RANK_RATIO) or 0
            rows = max(shape) if settings.kind == "ddp" else -(-max(shape) // settings.processes)
            moments = (2 * rows + min(shape)) * rank  # the basis, (cols, rank), is whole on every process
        optimizer += moments + 1  # and the number of the step
    return {"weights": _BYTES * weights, "grads": _BYTES * weights, "optimizer": _BYTES * optimizer}


def train_part(world: World, say: Callable[[Any], None], settings: ScaleOut) -> dict[str, Any]:
    """What one process does: its part of the training. Says (step, loss, ms) after each step, the first process alone.

    Gives its loss, the bytes that it holds after the last step, and a number that stands for its bases.
    """
    config = TrainConfig(
        steps=settings.steps,
        evaluate_every=0,
        optimizer=settings.optimizer,
        optimizer_settings={"rank_ratio": RANK_RATIO} if settings.optimizer == "coap" else {},
    )
    parallel = Parallel(world, settings.kind)
    model: nn.Module = MLP(FEATURES, generator=torch.Generator().manual_seed(config.seed))
    model = split_model(model, parallel)
    trainer = ParallelTrainer(model, digits(28), config, parallel=parallel)
    loss = math.nan
    while not trainer.done:
        row = trainer.step()
        loss = row.loss_nats
        if world.first:
            say((row.step, loss, row.step_time_ms))
    bases = [state["basis"] for state in trainer.optimizer.state.values() if "basis" in state]
    print_of = hashlib.sha1(b"".join(basis.numpy().tobytes() for basis in bases)).hexdigest()
    return {"loss": loss, "held": held_bytes(model, trainer.optimizer), "bases": print_of if bases else None}
