"""What a run is asked for and what it comes back with. No loop in here: see trainer.py and train.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from comera_lab.experiments.recorder import EvalRow, StepRow
from comera_lab.optimizers import OPTIMIZER_NAMES, make_optimizer

Stopped = Literal["done", "stopped", "early", "budget", "failed"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train with. `evaluate_every` and `checkpoint_every` count steps, 0 means at the end only.

    `patience` stops after so many evaluations in a row without a lower test loss; `seconds` is a budget of
    training time. `weight_decay` is decoupled for "adamw" and added to the gradient for "sgd" and
    "momentum" (0.9), as in torch.optim. `optimizer` may also name one of `comera_lab.optimizers`, and
    `optimizer_settings` are its keywords: {"rank_ratio": 4}, say.
    """

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    optimizer_settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    evaluate_every: int = 50
    checkpoint_every: int = 0
    patience: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("batch_size", 1),
            ("evaluate_every", 0),
            ("checkpoint_every", 0),
            ("patience", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if name == "patience" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate!r}. Try 1e-3.")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay!r}. Use 0.0 for none.")
        known = dict.fromkeys([*_OPTIMIZERS, *OPTIMIZER_NAMES])
        if self.optimizer not in known:
            raise ValueError(
                f"optimizer must be one of {', '.join(known)}, got {self.optimizer!r}. "
                "Pass any other as an instance: Trainer(..., optimizer=torch.optim.RMSprop(...))."
            )
        if self.patience is not None and self.evaluate_every == 0:
            raise ValueError("patience needs evaluations, got evaluate_every=0. Give an interval in steps.")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds!r}. Use None for no budget.")


class TrainingError(RuntimeError):
    """Training cannot go on. The weights are those before `step`; `fit` adds the `result` so far."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
        self.result: RunResult | None = None


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, or the notebook's interrupt: the step in progress was finished, `result` holds the rows."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"stopped after step {result.steps}; the model and its rows are kept")
        self.result = result


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run as it ended. `accuracy` and `best_accuracy` are None if nothing was evaluated."""

    rows: list[StepRow | EvalRow]
    steps: int
    stopped: Stopped
    accuracy: float | None
    best_accuracy: float | None
    elapsed_s: float
    problems: tuple[str, ...] = ()


def build_optimizer(config: TrainConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over `parameters`."""
    if config.optimizer in _OPTIMIZERS:
        return _OPTIMIZERS[config.optimizer](parameters, config)
    decay, settings = config.weight_decay, config.optimizer_settings
    return make_optimizer(config.optimizer, parameters, config.learning_rate, weight_decay=decay, **settings)


def _keywords(parameters: list[nn.Parameter], config: TrainConfig) -> dict[str, Any]:
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "fused": fused,
        **config.optimizer_settings,
    }


# Those of torch that can step in one pass; all others come from `make_optimizer`
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], TrainConfig], torch.optim.Optimizer]] = {
    "adamw": lambda parameters, config: torch.optim.AdamW(parameters, **_keywords(parameters, config)),
    "sgd": lambda parameters, config: torch.optim.SGD(parameters, **_keywords(parameters, config)),
    "momentum": lambda parameters, config: torch.optim.SGD(parameters, momentum=0.9, **_keywords(parameters, config)),
}
