"""One model in training: `Trainer` makes the steps, times them and keeps what a checkpoint needs.

Time is measured in one place, `Trainer.step`: batch, forward, backward and update, synchronised on a GPU.
Evaluation, recording and checkpoints are outside of it, and a budget in seconds counts that time alone.
The order of the batches and any dropout come from the run's own generators, seeded by `config.seed`, so that a
run does not depend on what the process drew before; they are part of the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from comera_lab.experiments.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.recorder import EvalRow, Recorder, ResumeRow, StepRow
from comera_lab.experiments.runs import TrainConfig, TrainingError, build_optimizer
from comera_lab.optimizers.sharding import whole
from comera_lab.shapes import ShapeError

_EVALUATION_ROWS = 1024  # rows at a time through the model without gradients
# A resumed run must be the run that was cut; steps, seconds, patience and intervals may change.
_FIXED_BY_CHECKPOINT = ("seed", "batch_size", "learning_rate", "weight_decay", "optimizer", "optimizer_settings")

_R = TypeVar("_R", StepRow, EvalRow)


class Trainer:
    """One model in training on one data set: cross-entropy, one batch a step, on the model's own device.

    Each epoch visits every training sample once in a new order; the last batch of an epoch may be smaller.
    An `optimizer` instance replaces the one that `config` names. `objective(loss, model)` gives the 0-d tensor to
    differentiate in the place of the loss; rows and refusals stay about the loss itself. Raises ValueError for a
    model without trainable parameters and for an optimizer that holds other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        config: TrainConfig,
        recorder: Recorder | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        objective: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("the model must have trainable parameters, got none. Set requires_grad on some.")
        self.model, self.config, self.recorder, self.objective = model, config, recorder, objective
        self.device = parameters[0].device
        self.data = data.to(self.device)
        self.optimizer = optimizer or build_optimizer(config, parameters)
        known = {id(p) for p in model.parameters()}
        if any(id(p) not in known for group in self.optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "the optimizer must hold this model's parameters, got others. Build it from "
                "model.parameters() after the model is in its final form and on its device."
            )
        self.rows: list[StepRow | EvalRow] = []
        self.evaluations: list[EvalRow] = []
        self.steps_done = 0
        self.elapsed_s = 0.0
        self._generator = torch.Generator().manual_seed(config.seed)
        self._epoch_state = self._generator.get_state()
        self._order = torch.randperm(len(self.data.train_y), generator=self._generator)
        self._position = 0
        self._randomness = _Randomness(model, self.device, config.seed)

    @property
    def stopped(self) -> Literal["done", "early", "budget"] | None:
        """Why there are no more steps to make, or None while there are."""
        if self.steps_done >= self.config.steps:
            return "done"
        if self.config.seconds is not None and self.elapsed_s >= self.config.seconds:
            return "budget"
        if self.config.patience is not None and _stale(self.evaluations) >= self.config.patience:
            return "early"
        return None

    @property
    def done(self) -> bool:
        """Whether steps, budget or patience are used up."""
        return self.stopped is not None

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation belongs after the steps made so far: at each interval and at the end."""
        if self.steps_done == 0 or (self.rows and isinstance(self.rows[-1], EvalRow)):
            return False
        every = self.config.evaluate_every
        return self.done or (every > 0 and self.steps_done % every == 0)

    def step(self) -> StepRow:
        """One update on the next batch. The row's loss is the one before the update.

        Raises TrainingError, before any weight is touched, where loss or gradients are not finite; the
        same batch comes next then. Raises ValueError when the run is done.
        """
        if self.done:
            raise ValueError(f"the run is over ({self.stopped}) after {self.steps_done} steps. Give more steps.")
        self.model.train()
        started = self._now()
        batch = self._next_batch()
        self.optimizer.zero_grad(set_to_none=True)
        with self._randomness:
            loss_nats = self.loss_and_gradients(batch)
        seconds = self._now() - started
        self._refuse_nonfinite("loss", loss_nats)
        gradient_norm = self._gradient_norm()       # a log entry, not a part of the step: the clock stands still
        started = self._now()
        self.optimizer.step()
        seconds += self._now() - started

        self._position += len(batch)
        self.steps_done += 1
        self.elapsed_s += seconds
        return self._keep(
            StepRow(
                step=self.steps_done,
                loss_nats=loss_nats,
                step_time_ms=seconds * 1e3,
                elapsed_s=self.elapsed_s,
                gradient_norm=gradient_norm,
            )
        )

    @torch.no_grad()
    def evaluate(self) -> EvalRow:
        """Mean loss and accuracy on the test side, the model in evaluation mode. Not counted as training time."""
        was_training = self.model.training
        self.model.eval()
        loss_sum, right = 0.0, 0
        try:
            for first in range(0, len(self.data.test_y), _EVALUATION_ROWS):
                rows = slice(first, first + _EVALUATION_ROWS)
                x, y = self.data.test_x[rows], self.data.test_y[rows]
                logits = self.model(x)
                loss_sum += float(self._cross_entropy(logits, y)) * len(y)
                right += int((logits.argmax(dim=-1) == y).sum())
        finally:
            self.model.train(was_training)
        total = len(self.data.test_y)
        row = EvalRow(
            step=self.steps_done, loss_nats=loss_sum / total, accuracy=right / total, elapsed_s=self.elapsed_s
        )
        self.evaluations.append(row)
        return self._keep(row)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: model, optimizer, generators, position and rows. Atomic: see checkpoints.py."""
        write_checkpoint(Path(path), self.state())

    def state(self) -> dict[str, Any]:
        """What `save` writes: tensors and plain values."""
        return {
            "config": dataclasses.asdict(self.config),
            "optimizer_type": type(self.optimizer).__name__,
            "data_digest": self.data.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self._epoch_state,
            "position": self._position,
            "randomness": self._randomness.states,
            "steps_done": self.steps_done,
            "elapsed_s": self.elapsed_s,
            "steps": [dataclasses.asdict(row) for row in self.rows if isinstance(row, StepRow)],
            "evaluations": [dataclasses.asdict(row) for row in self.evaluations],
        }

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint as if there had been no break: on the same CPU the run is bitwise the same.

        Raises CheckpointError for an unreadable file and ValueError, before anything is changed, for one of
        another model, data set or configuration.
        """
        state = read_checkpoint(Path(path), self.device)
        self.refuse_other_run(state, Path(path), {k: tuple(v.shape) for k, v in self.model.state_dict().items()})
        self.restore(state)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, for a model and an optimizer of the same shapes."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._epoch_state = state["generator"].cpu()
        self._generator.set_state(self._epoch_state)
        self._order = torch.randperm(len(self.data.train_y), generator=self._generator)
        self._position = state["position"]
        self._randomness.states = {name: value.cpu() for name, value in state["randomness"].items()}
        self.steps_done, self.elapsed_s = state["steps_done"], state["elapsed_s"]
        self.evaluations = [EvalRow(**row) for row in state["evaluations"]]
        rows: list[StepRow | EvalRow] = [StepRow(**row) for row in state["steps"]]
        self.rows = sorted([*rows, *self.evaluations], key=lambda row: (row.step, isinstance(row, EvalRow)))
        if self.recorder is not None:
            self.recorder.add(ResumeRow(step=self.steps_done))

    def _next_batch(self) -> Tensor:
        """Row numbers of the next batch (at most batch_size,). Asking twice without a step gives the same."""
        rows = len(self._order)
        if self._position >= rows:
            self._epoch_state = self._generator.get_state()
            self._order = torch.randperm(rows, generator=self._generator)
            self._position = 0
        return self._order[self._position : self._position + self.config.batch_size].to(self.device)

    def loss_and_gradients(self, rows: Tensor) -> float:
        """Mean loss of these rows; its gradients are left in the parameters, unless it is not finite."""
        loss = self.loss_of(rows)
        loss_nats = float(loss.detach())
        if math.isfinite(loss_nats):
            torch.autograd.backward(loss if self.objective is None else self.objective(loss, self.model))
        return loss_nats

    def loss_of(self, rows: Tensor) -> Tensor:
        """Mean loss, differentiable, of these rows (numbers) of the training side."""
        return self._cross_entropy(self.model(self.data.train_x[rows]), self.data.train_y[rows])

    def _cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        if logits.shape != (len(y), self.data.classes):
            raise ShapeError(
                f"the model must give (rows, classes) = {(len(y), self.data.classes)}, got "
                f"{tuple(logits.shape)}. Make its last layer {self.data.classes} wide."
            )
        return functional.cross_entropy(logits, y)

    def _gradient_norm(self) -> float | None:
        """Euclidean norm over all gradients, None if some parameter holds none (unused, or freed in backward)."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return None
        norm = float(whole(nn.utils.get_total_norm(gradients)))
        self._refuse_nonfinite("gradient norm", norm)
        return norm if len(gradients) == len(parameters) else None

    def _refuse_nonfinite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        step = self.steps_done + 1
        rate = self.optimizer.param_groups[0]["lr"]
        raise TrainingError(
            f"the {what} of step {step} is {value}, so this step was not made: the weights are those after "
            f"step {self.steps_done}. Start again with a smaller learning rate than {float(rate):g}.",
            step,
        )

    def refuse_other_run(self, state: dict[str, Any], path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise for a checkpoint of another run, or of a model whose state has other shapes than `shapes`."""
        mine = {name: getattr(self.config, name) for name in _FIXED_BY_CHECKPOINT}
        mine |= {"optimizer_type": type(self.optimizer).__name__, "data_digest": self.data.digest}
        try:
            theirs = {name: state["config"][name] for name in _FIXED_BY_CHECKPOINT}
            theirs |= {"optimizer_type": state["optimizer_type"], "data_digest": state["data_digest"]}
            saved = {name: tuple(value.shape) for name, value in state["model"].items()}
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a Trainer. Give another file.") from error
        for name, value in mine.items():
            if value != theirs[name]:
                raise ValueError(
                    f"{path} belongs to a run with {name}={theirs[name]!r}, got {name}={value!r}. "
                    "Use the same value, or start without resume."
                )
        if shapes != saved:
            different = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
            raise ValueError(
                f"{path} must fit the model, but {', '.join(different[:3])} differ: {saved.get(different[0])} "
                f"in the file, {shapes.get(different[0])} in the model. Build the model as it was then."
            )

    def _keep(self, row: _R) -> _R:
        self.rows.append(row)
        if self.recorder is not None:
            self.recorder.add(row)
        return row

    def _now(self) -> float:
        """Seconds, after the device has finished what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class _Randomness:
    """The run's own stream of torch's global random numbers, put in place while a model with dropout steps.

    A context manager; for a model that draws nothing it does nothing, and leaves the global stream alone.
    `states` maps device type to generator state and goes into the checkpoint.
    """

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self.states: dict[str, Tensor] = {}
        self._device = device
        self._outer: dict[str, Tensor] = {}
        drawing = (_DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)
        if any(isinstance(module, drawing) for module in model.modules()):
            self.states["cpu"] = torch.Generator().manual_seed(seed).get_state()
            if device.type == "cuda":
                self.states["cuda"] = torch.Generator(device).manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._outer = self._swap(self.states)

    def __exit__(self, *_: object) -> None:
        self.states = self._swap(self._outer)

    def _swap(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        before: dict[str, Tensor] = {}
        if "cpu" in states:
            before["cpu"] = torch.get_rng_state()
            torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            before["cuda"] = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(states["cuda"], self._device)
        return before


def _stale(evaluations: list[EvalRow]) -> int:
    """Evaluations in a row, up to the last one, without a lower loss than the lowest before them."""
    best, stale = math.inf, 0
    for row in evaluations:
        stale = 0 if row.loss_nats < best else stale + 1
        best = min(best, row.loss_nats)
    return stale
