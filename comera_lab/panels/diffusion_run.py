"""One training of the DDPM on digits with what a panel shows of it: grids from the same noise, errors, costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np
import torch

from comera_lab.experiments.diffusion import DiffusionConfig, DiffusionTrainer, image_grid
from comera_lab.experiments.frechet import digit_judge
from comera_lab.experiments.studies_diffusion import CHANNELS, optimizer_maker, state_size_bytes, tuned_rate
from comera_lab.memory import StateSettings, optimizer_bytes
from comera_lab.models.unet import UNet
from comera_lab.panels.diffusion_figures import ErrorLine
from comera_lab.panels.figures import Array

COLUMNS, ROWS = 8, 6
SAMPLE_EVERY = 25  # training steps
SAMPLER_STEPS = 15
JUDGED = 500  # images for the distance at the end
AVERAGED = 10  # steps that make one point of a curve


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings:
    """What the learner chose."""

    diffusion_optimizer: str
    rank_ratio: float
    diffusion_steps: int
    seed: int = 0

    @property
    def projected(self) -> bool:
        return self.diffusion_optimizer != "adamw"

    def optimizer_bytes(self) -> int:
        """Predicted bytes of the optimizer's state."""
        return network_bytes(self.diffusion_optimizer, self.rank_ratio)

    def words(self) -> str:
        ratio = f", ratio {self.rank_ratio:g}" if self.projected else ""
        return f"{self.diffusion_optimizer}{ratio}, {self.diffusion_steps} steps"


@cache
def network_bytes(optimizer: str, rank_ratio: float) -> int:
    """Predicted bytes of an optimizer's state for the U-Net of the panel, from its shapes."""
    with torch.device("meta"):
        parameters = list(UNet(CHANNELS).parameters())
    return optimizer_bytes(parameters, optimizer, settings=StateSettings(rank_ratio=rank_ratio)).total


class DiffusionRun:
    """`advance` makes one step, draws a grid every SAMPLE_EVERY steps, and judges the samples at the end.

    `grids` holds (step, grid) pairs; `frechet` and `noise_error` are None until the end.
    """

    def __init__(self, settings: DiffusionSettings) -> None:
        self.settings = settings
        rate = tuned_rate(settings.diffusion_optimizer)
        config = DiffusionConfig(
            steps=settings.diffusion_steps, learning_rate=rate, seed=settings.seed, samples=JUDGED,
            warmup=min(50, settings.diffusion_steps // 4),
        )  # fmt: skip
        model = UNet(CHANNELS, generator=torch.Generator().manual_seed(settings.seed))
        make = optimizer_maker(settings.diffusion_optimizer, settings.rank_ratio, rate)
        self.trainer = DiffusionTrainer(model, config, make_optimizer=make)
        self.frechet: float | None = None
        self.noise_error: float | None = None
        self.grids: list[tuple[int, Array]] = []
        self._keep_grid()

    @property
    def finished(self) -> bool:
        return self.frechet is not None

    @property
    def fraction(self) -> float:
        return self.trainer.steps_done / self.settings.diffusion_steps

    @property
    def judging(self) -> bool:
        """Whether all steps are made and what is left is the verdict."""
        return self.trainer.done and not self.finished

    def advance(self) -> None:
        if self.trainer.done:
            row = self.trainer.evaluate()
            self.noise_error, self.frechet = row.test_loss_mse, row.frechet
            return
        self.trainer.step()
        if self.trainer.done or self.trainer.steps_done % SAMPLE_EVERY == 0:
            self._keep_grid()

    def _keep_grid(self) -> None:
        images = self.trainer.sampled(COLUMNS * ROWS, steps=SAMPLER_STEPS)
        self.grids.append((self.trainer.steps_done, image_grid(images, COLUMNS)))

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors that the optimizer holds now."""
        return state_size_bytes(self.trainer.optimizer)

    @property
    def step_time_ms(self) -> float:
        return median(row.step_time_ms for row in self.trainer.steps)

    @property
    def update_time_ms(self) -> float:
        """The part of a step that is the optimizer's."""
        return median(row.update_time_ms for row in self.trainer.steps)

    def until(self, share: float) -> tuple[int, Array]:
        """The last (step, grid) after that share of the grids."""
        return self.grids[round(share * (len(self.grids) - 1))]

    def line(self, last_step: int | None = None) -> ErrorLine:
        steps = self.trainer.steps[:last_step]
        points = [steps[first : first + AVERAGED] for first in range(0, len(steps), AVERAGED)]
        return ErrorLine(
            self.settings.diffusion_optimizer,
            np.array([chunk[-1].step for chunk in points], dtype=float),
            np.array([np.mean([row.loss_mse for row in chunk]) for chunk in points]),
        )

    def summary(self) -> dict[str, object]:
        """Settings and results as plain numbers; `frechet` and `noise_error` are None before the end."""
        return {
            **self.settings.__dict__,
            "steps": self.trainer.steps_done,
            "learning_rate": self.trainer.config.learning_rate,
            "optimizer_bytes": self.state_bytes,
            "noise_error": self.noise_error,
            "frechet": self.frechet,
            "step_time_ms": self.step_time_ms,
            "update_time_ms": self.update_time_ms,
        }


def marks() -> tuple[float, float, float]:
    """(distance of held-out real digits, of noise, test accuracy of the classifier that judges)."""
    judge = digit_judge()
    return judge.real, judge.noise, judge.accuracy


def empty_grid() -> Array:
    """The noise that every sample starts from: what the panel shows before training."""
    images = torch.randn(COLUMNS * ROWS, 64, generator=torch.Generator().manual_seed(0))
    return image_grid(((images + 1) / 2).clamp(0, 1), COLUMNS)
