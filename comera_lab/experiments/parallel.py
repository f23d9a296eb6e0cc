"""Training by several processes: `ParallelTrainer` is `Trainer` with a part of every batch in each of them.

All draw the same batches from the run's seed, and each takes its share of the rows, so a run is that of one process up
to rounding. "ddp" copies the model to every process and averages gradients; "fsdp" (FSDP2) splits weights, gradients
and optimizer state, and puts the weights of a block together while it is used. Every process judges the whole test
side. A checkpoint is the same single file as that of one process, written by the first: any number of processes can go
on from it, if all can read it. It is put together tensor by tensor, in the memory of the first process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera_lab.experiments.checkpoints import CheckpointError, write_checkpoint
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.distributed import World
from comera_lab.experiments.language_model import LanguageTrainer
from comera_lab.experiments.recorder import EvalRow, Recorder, StepRow
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.trainer import Trainer
from comera_lab.optimizers.sharding import is_sharded, local, longest_side, spread_state, whole

Kind = Literal["ddp", "fsdp"]
KINDS: tuple[Kind, ...] = ("ddp", "fsdp")


@dataclass(frozen=True)
class Parallel:
    """How a run is spread. `accumulate` cuts a process's part of a batch into so many, one after the other.

    `asked_to_stop` is this process's own wish; all stop after the same step. `kind` None is for one process.
    """

    world: World = field(default_factory=World)
    kind: Kind | None = None
    accumulate: int = 1
    asked_to_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if self.kind not in (None, *KINDS):
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if self.kind is None and self.world.size > 1:
            raise ValueError(f"{self.world.size} processes need a kind, got None. Give 'ddp' or 'fsdp'.")
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate must be a whole number of at least 1, got {self.accumulate!r}.")


def split_model(model: nn.Module, parallel: Parallel) -> nn.Module:
    """For "fsdp": split the parameters of `model`, in place, before an optimizer is made; else the model as it is.

    Each member of a ModuleList is put together on its own while it computes, and what is left as one.
    """
    if parallel.kind != "fsdp":
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    size = parallel.world.size
    mesh = init_device_mesh(parallel.world.device.type, (size,))

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(longest_side(tuple(parameter.shape), size))

    # it fears additions in place to what a block returns; the kit's models make none
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    blocks = [part for child in model.children() if isinstance(child, nn.ModuleList) for part in child]
    for part in [*blocks, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True, shard_placement_fn=place)
    return model


class ParallelTrainer(Trainer):
    """`Trainer` in each process of `parallel`. Give the first one the recorder, and all a model from `split_model`.

    `stop_agreed` says, after a step, whether some process was asked to stop. Raises ProcessLost where another
    process is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        config: TrainConfig,
        recorder: Recorder | None = None,
        *,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer | None = None,
        objective: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> None:
        if objective is not None:
            raise ValueError("several processes train on the loss alone, got an objective. Leave it out.")
        super().__init__(model, data, config, recorder, optimizer=optimizer)
        self.parallel, self.world = parallel, parallel.world
        self.stop_agreed = False
        if self.world.size > 1 and (self._randomness.states or getattr(data, "masked", False)):
            raise ValueError(
                "several processes would draw the same dropout or masks for different rows, got a model or data that "
                "draws. Set dropout to 0, or train a decoder."
            )
        self._wrapped: nn.Module | None = None
        if parallel.kind == "ddp":
            self._wrapped = nn.parallel.DistributedDataParallel(model)

    def step(self) -> StepRow:
        with self.world.watched(f"step {self.steps_done + 1}"):
            row = super().step()
            own = [self.elapsed_s if self.world.first else 0.0, float(self.parallel.asked_to_stop())]
            self.elapsed_s, asked = self.world.total(own)  # a budget in seconds runs by the first one's clock
        self.stop_agreed = asked > 0
        return row

    def evaluate(self) -> EvalRow:
        with self.world.watched(f"the evaluation after step {self.steps_done}"):
            return super().evaluate()

    def loss_and_gradients(self, rows: Tensor) -> float:
        """The mean over all rows and processes. Gradients of the parts are added up, then averaged once."""
        mine = rows.tensor_split(self.world.size)[self.world.rank].tensor_split(self.parallel.accumulate)
        loss_nats = 0.0
        for number, part in enumerate(mine):
            share = len(part) * self.world.size / len(rows)
            with self._held(number + 1 < len(mine)):
                # all processes must compute alike: one without rows takes a row that counts nothing
                loss = self.loss_of(part if len(part) else rows[:1]) * share
                torch.autograd.backward(loss)
            loss_nats += float(loss.detach())
        return self.world.total([loss_nats])[0] / self.world.size

    def loss_of(self, rows: Tensor) -> Tensor:
        if self._wrapped is None:
            return super().loss_of(rows)
        plain, self.model = self.model, self._wrapped
        try:
            return super().loss_of(rows)
        finally:
            self.model = plain

    def _held(self, more: bool) -> contextlib.AbstractContextManager[None]:
        """DDP sends gradients after the last part alone; FSDP after each, so that no whole gradient stays."""
        if more and isinstance(self._wrapped, nn.parallel.DistributedDataParallel):
            return self._wrapped.no_sync()
        return contextlib.nullcontext()

    # checkpoints

    def state(self) -> dict[str, Any]:
        """As of one process, tensors whole and on the CPU; the split ones are None in all but the first process."""
        gathered: dict[str, Any] = _gathered(super().state(), self.world.first)
        return gathered

    def save(self, path: str | Path) -> None:
        """Write one file, by the first process. Raises CheckpointError in all of them where that fails."""
        problem: CheckpointError | None = None
        with self.world.watched(f"the checkpoint after step {self.steps_done}"):
            state = self.state()
            if self.world.first:
                try:
                    write_checkpoint(Path(path), state)
                except CheckpointError as error:
                    problem = error
            failed = self.world.total([float(problem is not None)])[0] > 0
        if failed:
            raise problem or CheckpointError(f"the first process could not write the checkpoint {path}; it says why.")

    def restore(self, state: dict[str, Any]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept = state["optimizer"]["state"]
        optimizer = {number: spread_state(parameters[number], values) for number, values in kept.items()}
        mine = self.model.state_dict()
        super().restore(
            {
                **state,
                "model": {name: _like(value, mine[name]) for name, value in state["model"].items()},
                "optimizer": {**state["optimizer"], "state": optimizer},
            }
        )


class ParallelLanguageTrainer(ParallelTrainer, LanguageTrainer):
    """`LanguageTrainer` in several processes, for decoders."""


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this process holds now: storages of weights, gradients and optimizer state, each counted once."""
    parameters = list(model.parameters())
    pools: dict[str, list[Any]] = {
        "weights": parameters,
        "grads": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)],
    }
    found = {}
    for pool, tensors in pools.items():
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in map(local, tensors)}
        found[pool] = sum(storage.nbytes() for storage in storages.values())
    return found


def _gathered(value: Any, keep: bool) -> Any:
    """`value` with every split tensor put together; all processes must call this in the same order."""
    if isinstance(value, dict):
        return {key: _gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list):
        return [_gathered(item, keep) for item in value]
    if isinstance(value, Tensor) and is_sharded(value):
        full = whole(value)
        return full.cpu() if keep else None
    return value


def _like(value: Tensor, mine: Any) -> Tensor:
    """A whole tensor, split as `mine` is. No messages: every process has read the file."""
    if not is_sharded(mine):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None)
