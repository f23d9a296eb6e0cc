"""Task loss and size in one scalar: the early stage puts a price on size, the late stage steers to a size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from comera_lab.objectives.sizes import (
    core_decay,
    dense_elements,
    gated_layers,
    live_elements,
    model_size,
    size_surrogate,
)

Schedule = float | Callable[[int], float]
Part = Literal["model", "tensorised"]


def linear_ramp(start: float, stop: float, calls: int) -> Callable[[int], float]:
    """A schedule that goes from `start` to `stop` in `calls` calls and stays there."""
    if calls < 1:
        raise ValueError(f"calls must be at least 1, got {calls}. Give the number of steps of the ramp.")
    return lambda call: start + (stop - start) * min(call / calls, 1.0)


@dataclass
class EarlyStage:
    """loss + gamma * size_surrogate + beta * sum ||G||_F^2 (CoMERA, arXiv 2405.14377, early stage).

    `gamma` has the unit of the loss: the price of the whole dense size. A callable gets the number of calls so
    far. `beta` is no ornament: gates and cores count only as products, so without it cores grow while gates shrink
    and few entries die (tests/test_objectives.py, G01: with both, ranks fall to about those of a teacher). Gates
    settle when their threshold is about ten steps of their learning rate. Raises ValueError for negative weights.
    """

    gamma: Schedule = 1.0
    beta: float = 0.0
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        _check_weight("beta", self.beta)
        if not callable(self.gamma):
            _check_weight("gamma", self.gamma)

    def __call__(self, loss: Tensor, model: nn.Module) -> Tensor:
        """The scalar to differentiate; `loss` is the task loss of this batch. The model is only read."""
        gamma = self.gamma(self.calls) if callable(self.gamma) else self.gamma
        total = _with_decay(_finite(loss) + gamma * size_surrogate(model), model, self.beta)
        self.calls += 1
        return total


@dataclass
class LateStage:
    """Steer to a size: minimise max{(L - L0) / L0, w (S - S0) / S0} + rho (L + S1) (CoMERA, late stage).

    While the relative size gap is the larger one the gates are pushed, else the loss is. The switch compares
    exact sizes S, the push is the surrogate S1 in units of the target. Give exactly one of `target_ratio` (of
    the size at the first call), `target_params`, `target_bytes`; `part` says whether it means the whole model
    or its cores. `target_loss` None takes the lowest smoothed loss so far.
    Gradients seldom end on a number: `meet_target(model, late.limit)` does the rest.
    """

    target_ratio: float | None = None
    target_params: int | None = None
    target_bytes: int | None = None
    part: Part = "model"
    target_loss: float | None = None
    size_weight: float = 1.0
    rho: float = 0.1
    beta: float = 0.0
    limit: int | None = field(default=None, init=False)
    smooth_loss: Tensor | None = field(default=None, init=False)
    best_loss: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        targets = {
            "target_ratio": self.target_ratio,
            "target_params": self.target_params,
            "target_bytes": self.target_bytes,
        }
        given = {name: value for name, value in targets.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(targets)}, got {given or 'none'}. Try target_ratio=0.5.")
        if self.target_ratio is not None and not 0 < self.target_ratio <= 1:
            raise ValueError(f"target_ratio must lie in (0, 1], got {self.target_ratio}. 0.5 halves the size.")
        if self.part not in ("model", "tensorised"):
            raise ValueError(f"part must be 'model' or 'tensorised', got {self.part!r}. Use 'model' for everything.")
        for name in ("size_weight", "rho", "beta"):
            _check_weight(name, getattr(self, name))

    def start(self, model: nn.Module) -> int:
        """Fix the target for `model` as core elements allowed; raises ValueError for one out of reach."""
        gated_layers(model)
        size = model_size(model)
        if not size.cores:
            raise ValueError(
                "every tensor-train layer has a bond whose gate entries are all dead, got a model of biases. "
                "Start from a model that is alive, or train with a smaller gamma."
            )
        whole = self.part == "model"
        dense, dense_bytes = (size.dense, size.dense_bytes) if whole else (0, 0)
        if self.target_ratio is not None:
            allowed = int(self.target_ratio * (size.total if whole else size.cores)) - dense
            target, floor = f"target_ratio={self.target_ratio}", f"{dense / size.total:.3f} of the model"
        elif self.target_params is not None:
            allowed = self.target_params - dense
            target, floor = f"target_params={self.target_params:,}", f"{dense:,} parameters"
        else:
            assert self.target_bytes is not None
            element = size.core_bytes / size.cores if size.cores else 4
            allowed = int((self.target_bytes - dense_bytes) / element)
            target, floor = f"target_bytes={self.target_bytes:,}", f"{dense_bytes:,} bytes"
        if allowed < 1:
            raise ValueError(
                f"the target must leave room for cores, got {target} of the {self.part}: the dense part, which "
                f"cannot be cut, is {floor}. Raise the target, or tensorise more layers."
            )
        if allowed > size.tensorised_dense:
            raise ValueError(
                f"the target must lie below the dense size, got {target}: {allowed:,} core elements where a dense "
                f"model has {size.tensorised_dense:,}. Lower it."
            )
        self.limit = allowed
        return allowed

    def __call__(self, loss: Tensor, model: nn.Module) -> Tensor:
        """The scalar to differentiate. The first call fixes the target if `start` has not. The model is only read."""
        value = _finite(loss).detach().float()
        limit = self.start(model) if self.limit is None else self.limit
        layers = gated_layers(model)
        self.smooth_loss = value if self.smooth_loss is None else 0.95 * self.smooth_loss + 0.05 * value
        best = self.smooth_loss if self.best_loss is None else torch.minimum(self.best_loss, self.smooth_loss)
        self.best_loss = best
        goal = best if self.target_loss is None else torch.full_like(best, self.target_loss)
        loss_gap = (self.smooth_loss - goal) / goal.abs().clamp_min(1e-12)
        size_gap = self.size_weight * (live_elements(layers) - limit) / limit
        push = self.size_weight * size_surrogate(model) * (dense_elements(layers) / limit)
        focus = torch.where(size_gap > loss_gap.clamp_min(0), push, loss)
        return _with_decay(focus + self.rho * (loss + push), model, self.beta)


def _with_decay(total: Tensor, model: nn.Module, beta: float) -> Tensor:
    return total + beta * core_decay(model) if beta else total


def _check_weight(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}. Use 0 to switch it off.")


def _finite(loss: Tensor) -> Tensor:
    # On a GPU the check would wait for the device; the trainer looks at its losses there.
    if loss.device.type == "cpu" and not torch.isfinite(loss):
        raise ValueError(
            f"the task loss must be finite, got {float(loss)}. Lower the learning rate; nothing was changed."
        )
    return loss
