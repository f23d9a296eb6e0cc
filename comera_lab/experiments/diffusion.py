"""Train a small DDPM on digits, step by step; sample a grid; say how good the samples are.

`DiffusionTrainer` follows `Trainer`: one step or one evaluation a call, its own generators, time measured inside the
step alone, a checkpoint that goes on bitwise. Its loss is the mean squared error of the noise, not nats, so it has
rows of its own.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from comera_lab.experiments.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.frechet import SIDE, digit_judge
from comera_lab.experiments.rows import DiffusionRow
from comera_lab.experiments.runs import TrainingError
from comera_lab.models.unet import NoiseSchedule, UNet, noise_loss, sample

_TEST_SEED, _TEST_DRAWS = 1234, 4  # every evaluation meets the same noise at the same levels
_LAST_RATE = 0.1  # the rate falls along a cosine to this share


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What a run shares with its rivals. `learning_rate` warms up for `warmup` steps and falls along a cosine."""

    steps: int = 400
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup: int = 50
    seed: int = 0
    evaluate_every: int = 0
    samples: int = 500

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("warmup", 0), ("evaluate_every", 0), ("samples", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate!r}. Try 2e-3.")

    def rate_at(self, step: int) -> float:
        """Learning rate of the step after `step` steps."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)


@dataclass(frozen=True, kw_only=True)
class DiffusionStep:
    """One step: mean squared error of the noise before the update; the time of the whole and of the update alone."""

    step: int
    loss_mse: float
    step_time_ms: float
    update_time_ms: float
    elapsed_s: float


class DiffusionTrainer:
    """Trains `model` in place to tell the noise in digits of 8x8 pixels.

    `make_optimizer(model)` gives the optimizer, AdamW by default; its rate is set before every step. Raises
    TrainingError, weights untouched, for a loss that is not finite, and ValueError when the run is done.
    """

    def __init__(
        self,
        model: UNet,
        config: DiffusionConfig,
        *,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        schedule: NoiseSchedule | None = None,
        data: Dataset | None = None,
    ) -> None:
        self.model, self.config = model, config
        self.schedule = NoiseSchedule.make() if schedule is None else schedule
        self.device = next(model.parameters()).device
        data = digits(8) if data is None else data
        self.images, self.test_images = (_as_images(x).to(self.device) for x in (data.train_x, data.test_x))
        self.optimizer = (_adamw if make_optimizer is None else make_optimizer)(model)
        self.steps: list[DiffusionStep] = []
        self.evaluations: list[DiffusionRow] = []
        self.steps_done = 0
        self.elapsed_s = 0.0
        self._generator = torch.Generator().manual_seed(config.seed)

    @property
    def done(self) -> bool:
        return self.steps_done >= self.config.steps

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation belongs after the steps made so far: at each interval and at the end."""
        if self.steps_done == 0 or (self.evaluations and self.evaluations[-1].step == self.steps_done):
            return False
        every = self.config.evaluate_every
        return self.done or (every > 0 and self.steps_done % every == 0)

    def step(self) -> DiffusionStep:
        """One update on a batch that is drawn with the run's own generator."""
        if self.done:
            raise ValueError(f"the run is over after {self.steps_done} steps. Give more steps.")
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.steps_done)
        began = self._now()
        before = self._generator.get_state()
        rows = torch.randint(len(self.images), (self.config.batch_size,), generator=self._generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss = noise_loss(self.model, self.schedule, self.images[rows.to(self.device)], self._generator)
        value = float(loss.detach())
        if not math.isfinite(value):
            self._generator.set_state(before)
            raise TrainingError(
                f"the loss of step {self.steps_done + 1} is {value}, so this step was not made. "
                f"Start again with a smaller learning rate than {self.config.learning_rate:g}.",
                self.steps_done + 1,
            )
        torch.autograd.backward(loss)
        update_began = self._now()
        self.optimizer.step()
        ended = self._now()
        self.steps_done += 1
        self.elapsed_s += ended - began
        row = DiffusionStep(
            step=self.steps_done,
            loss_mse=value,
            step_time_ms=1e3 * (ended - began),
            update_time_ms=1e3 * (ended - update_began),
            elapsed_s=self.elapsed_s,
        )
        self.steps.append(row)
        return row

    def evaluate(self) -> DiffusionRow:
        """Noise error on the test digits, and the Frechet distance of fresh samples. No training time."""
        row = DiffusionRow(
            step=self.steps_done,
            test_loss_mse=self.noise_error(),
            frechet=digit_judge().distance(self.sampled(self.config.samples)),
            samples=self.config.samples,
            elapsed_s=self.elapsed_s,
        )
        self.evaluations.append(row)
        return row

    @torch.no_grad()
    def noise_error(self) -> float:
        """Mean squared error of the noise in the test digits, at draws that are the same every time."""
        self.model.eval()
        generator = torch.Generator().manual_seed(_TEST_SEED)
        errors = [float(noise_loss(self.model, self.schedule, self.test_images, generator)) for _ in range(_TEST_DRAWS)]
        return sum(errors) / len(errors)

    def sampled(self, count: int, *, seed: int = 0, steps: int = 25) -> Tensor:
        """`count` digits (count, 64) in [0, 1] from the noise of `seed`: the same noise shows a model growing."""
        generator = torch.Generator().manual_seed(seed)
        images = sample(self.model, self.schedule, count, SIDE, generator, steps=steps)
        return ((images + 1) / 2).reshape(count, -1).cpu()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: model, optimizer, generator and rows. Atomic: see checkpoints.py."""
        state = {
            "config": dataclasses.asdict(self.config),
            "optimizer_type": type(self.optimizer).__name__,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "steps": [dataclasses.asdict(row) for row in self.steps],
            "evaluations": [dataclasses.asdict(row) for row in self.evaluations],
        }
        write_checkpoint(Path(path), state)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint as if there had been no break.

        Raises CheckpointError for a file that is none and ValueError, before anything is changed, for one of another
        configuration or optimizer.
        """
        state: dict[str, Any] = read_checkpoint(Path(path), self.device)
        try:
            theirs = {**state["config"], "optimizer": state["optimizer_type"]}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a DiffusionTrainer. Give another file.") from error
        mine = {**dataclasses.asdict(self.config), "optimizer": type(self.optimizer).__name__}
        different = [name for name in mine if mine[name] != theirs.get(name)]
        if different:
            name = different[0]
            raise ValueError(
                f"{path} belongs to a run with {name}={theirs.get(name)!r}, got {name}={mine[name]!r}. Use the same."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"].cpu())
        self.steps = [DiffusionStep(**row) for row in state["steps"]]
        self.evaluations = [DiffusionRow(**row) for row in state["evaluations"]]
        self.steps_done = len(self.steps)
        self.elapsed_s = self.steps[-1].elapsed_s if self.steps else 0.0

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def image_grid(images: Tensor, columns: int) -> npt.NDArray[np.float32]:
    """(count, side * side) in [0, 1] -> one array (rows * (side + 1) + 1, columns * (side + 1) + 1) with lines of 0.

    The last row is filled up with empty images.
    """
    side = math.isqrt(images[0].numel())
    rows = -(-len(images) // columns)
    grid = np.zeros((rows * (side + 1) + 1, columns * (side + 1) + 1), dtype=np.float32)
    for index, image in enumerate(images.reshape(-1, side, side).detach().numpy()):
        top, left = 1 + index // columns * (side + 1), 1 + index % columns * (side + 1)
        grid[top : top + side, left : left + side] = image
    return grid


def _as_images(x: Tensor) -> Tensor:
    """(rows, 64) in [0, 1] -> (rows, 1, 8, 8) in [-1, 1]."""
    return (2 * x - 1).reshape(-1, 1, SIDE, SIDE)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return torch.optim.AdamW(parameters, weight_decay=0.0, fused=fused)
