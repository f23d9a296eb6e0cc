"""COAP with Adafactor: the second moment of the projected gradient is kept as its row and column means.

low = G P;  R, C = row and column means of low^2, forgetting with b2 = 1 - t^-0.8
u = low / sqrt(R C / mean(R)), shortened to an RMS of 1;  M = b1 M + (1 - b1) u;  W = (1 - lr wd) W - lr scale M P'

Sources: Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5); COAP (arXiv 2412.00071).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from comera_lab.optimizers.base import ProjectedOptimizer
from comera_lab.optimizers.coap import PLAIN_UP_TO
from comera_lab.optimizers.projection import Alignment
from comera_lab.optimizers.quantized import new_moment, read_moment, write_moment
from comera_lab.optimizers.stacks import Slot, descend
from comera_lab.optimizers.subspaces import Bases, Refresh

MOMENTUM = "exp_avg"
WHOLE = "exp_avg_sq"
FACTORS = ("row_mean_sq", "col_mean_sq")


class COAPAdafactor(ProjectedOptimizer):
    """Adafactor in a low-rank basis; `COAPAdamW` tells what the settings that both share do.

    beta1: of the first moment of the update; None keeps none, and the alignment step then looks at energy alone.
    decay_rate: the second moment forgets with 1 - step ** -decay_rate. eps: added to squared gradients.
    clip: an update with a larger RMS is shortened to it. scale_parameter: multiplies the rate by the RMS of the
    weights, at least `floor`; with it, without rank and without beta1 this is torch.optim.Adafactor.

    State, float32 or wider: "step", bases, "row_mean_sq" and "col_mean_sq" (last two dimensions; tensors with one
    dimension keep "exp_avg_sq"), and "exp_avg" with beta1, which alone is an 8-bit one for `bits` 8.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        *,
        decay_rate: float = 0.8,
        eps: float = 1e-30,
        clip: float = 1.0,
        scale_parameter: bool = False,
        floor: float = 1e-3,
        rank: int | None = None,
        rank_ratio: float | None = 4.0,
        update_interval: int = 32,
        refresh_factor: int = 5,
        scale: float = 1.0,
        alignment: Alignment | None = "scale-free",
        refresh: Refresh = "warm",
        stagger: bool = True,
        transfer_moments: bool = False,
        bits: Literal[32, 8] = 32,
        state_dtype: torch.dtype | None = None,
        plain_up_to: int = PLAIN_UP_TO,
        foreach: bool | None = None,
        maximize: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        settings = {key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}
        super().__init__(params, settings)

    def new_moments(
        self, shape: tuple[int, ...], parameter: Tensor, group: Mapping[str, Any], *, low: bool
    ) -> dict[str, Tensor]:
        wide, device = torch.promote_types(parameter.dtype, torch.float32), parameter.device
        state: dict[str, Tensor] = {}
        if group["beta1"] is not None:
            dtype = group["state_dtype"] or wide
            new_moment(state, MOMENTUM, shape, bits=group["bits"], dtype=dtype, device=device)
        if len(shape) > 1:
            for name, size in zip(FACTORS, ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1])), strict=True):
                state[name] = torch.zeros(size, dtype=wide, device=device)
        else:
            state[WHOLE] = torch.zeros(shape, dtype=wide, device=device)
        return state

    def momentum(self, slot: Slot) -> Tensor | None:
        return None if slot.group["beta1"] is None else read_moment(slot.state, MOMENTUM, slot.low_shape)

    def transfer(self, slot: Slot, old: Bases) -> None:
        momentum = self.momentum(slot)
        if momentum is not None and slot.subspace is not None:
            write_moment(slot.state, MOMENTUM, slot.subspace.transfer(momentum, None, old, slot.bases)[0])

    def directions(self, group: dict[str, Any], slots: Sequence[Slot]) -> list[Tensor]:
        return [_direction(slot, slot.projected) for slot in slots]

    def update_plain(self, group: dict[str, Any], slots: Sequence[Slot]) -> None:
        rate = float(group["lr"])
        decay, stochastic = 1 - rate * group["weight_decay"], group["stochastic_rounding"]
        for slot in slots:
            wide = slot.gradient.to(torch.promote_types(slot.gradient.dtype, torch.float32))
            descend(slot.parameter, _direction(slot, wide), rate, decay, stochastic=stochastic)


def _direction(slot: Slot, gradient: Tensor) -> Tensor:
    """Update the state of a slot with its (small) gradient; what to subtract times the rate."""
    group, state = slot.group, slot.state
    state["step"] += 1
    update = adafactor_direction(gradient, state, group)
    if group["beta1"] is not None:
        mean = read_moment(state, MOMENTUM, update.shape).to(update.dtype)
        update = mean.lerp_(update, 1 - group["beta1"])
        write_moment(state, MOMENTUM, update)
    if group["scale_parameter"]:
        return update * _rms(slot.parameter.to(update.dtype)).clamp_min(group["floor"])
    return update


def adafactor_direction(gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
    """g / sqrt(V), shortened to an RMS of `clip`, in the gradient's shape; V, in `state`, is updated first.

    V is row mean times column mean over the mean of both, taken over the last two dimensions; `eps` in every square
    keeps it above 0. `state["step"]` counts from 1; settings: decay_rate, eps, clip. Adafactor, algorithm 4.
    """
    new = float(state["step"]) ** -group["decay_rate"]
    square = gradient.square().add_(group["eps"])
    if WHOLE in state:
        direction = gradient * state[WHOLE].lerp_(square, new).rsqrt()
    else:
        row, col = (state[name] for name in FACTORS)
        row.lerp_(square.mean(-1, keepdim=True), new)
        col.lerp_(square.mean(-2, keepdim=True), new)
        direction = gradient * (row / row.mean(-2, keepdim=True)).rsqrt() * col.rsqrt()
    shortened: Tensor = direction.div_((_rms(direction) / group["clip"]).clamp_min(1.0))
    return shortened


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
