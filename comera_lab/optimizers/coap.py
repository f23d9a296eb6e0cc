"""COAP with AdamW: both moments live in a basis of the gradient that is kept near where it was.

low = G P;  M = b1 M + (1 - b1) low;  V = b2 V + (1 - b2) low^2
W = (1 - lr wd) W - lr scale (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps) P'

Source: COAP (Xiao et al. 2024, arXiv 2412.00071). The middle line is torch's own AdamW on the small coordinates, from
weights of zero at a rate of -1: one fused pass, and the basis I gives torch.optim.AdamW back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from comera_lab.kernels import takes_triton
from comera_lab.optimizers import fused
from comera_lab.optimizers.base import ProjectedOptimizer
from comera_lab.optimizers.fused import MOMENTS
from comera_lab.optimizers.projection import Alignment
from comera_lab.optimizers.quantized import new_moment, read_moment, write_moment
from comera_lab.optimizers.stacks import Slot, descend
from comera_lab.optimizers.subspaces import MATRIX, Bases, Refresh

# Convolutions of up to 32 * 32 * 3 * 3 elements are left alone in COAP's released code; here all tensors are.
PLAIN_UP_TO = 9216


class COAPAdamW(ProjectedOptimizer):
    """AdamW in a low-rank basis per matrix (and two per convolution), renewed every `update_interval` steps.

    rank, rank_ratio: width of the basis, or the smaller side over the ratio; with neither a tensor takes torch's AdamW.
    update_interval, refresh_factor: an alignment step every so many steps, and at every `refresh_factor`-th of them a
    refresh. `alignment` None only refreshes; "paper" is the published step. `refresh` "svd" takes a full SVD instead of
    one warm iteration, as GaLore does.
    stagger: each parameter has its own place in the interval, so that no step renews all bases; False renews at
    steps 0, update_interval, .. of every parameter.
    transfer_moments: carry M and V over to a new basis, else they are read in it as they are. On digits it helps a
    full SVD, whose columns come in another order each time, and changes nothing for a warm basis, whose columns go on
    where the old ones were: hence False (data/results/coap_ablation_cpu.jsonl).
    scale: factor on projected updates alone, which are sqrt(rank / cols) as long as AdamW's: with the root of the ratio
    (2 for 4) AdamW's own rate is a good start; with 1 take two to three times that rate.
    bits: 8 keeps moments as codes (quantized.py), from 4,096 values up.
    state_dtype: of the moments; None is float32 for projected ones and the parameter's own for others, as in torch
    (in bfloat16 a second moment soon stops growing: its steps are 0.4 %, an update adds 0.1 %).
    plain_up_to: tensors of so many elements or fewer take torch's AdamW, as do those with 1, 3 or 5 dimensions.
    foreach: True stacks alike matrices into one product, False takes one at a time, None by size and device.
    stochastic_rounding: for bfloat16 weights, whose steps of 0.4 % swallow small updates; all moments are float32 then.

    Every setting but the names may differ by group. Raises ValueError for settings out of range, unknown keys, and a
    request for projection that meets no parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
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

    splits = True
    # As for the kernels: None takes one launch a shape for CUDA matrices that have made a step, where it can, else
    # torch; "torch" or "triton" insist. An attribute and no setting: checkpoints move between machines.
    backend: str | None = None

    def new_moments(
        self, shape: tuple[int, ...], parameter: Tensor, group: Mapping[str, Any], *, low: bool
    ) -> dict[str, Tensor]:
        dtype = _moment_dtype(parameter, group, low)
        state: dict[str, Tensor] = {}
        for name in MOMENTS:
            new_moment(state, name, shape, bits=group["bits"], dtype=dtype, device=parameter.device)
            if not low and name in state and dtype == parameter.dtype:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def momentum(self, slot: Slot) -> Tensor | None:
        return read_moment(slot.state, MOMENTS[0], slot.low_shape)

    def transfer(self, slot: Slot, old: Bases) -> None:
        assert slot.subspace is not None
        moments = [read_moment(slot.state, name, slot.projected.shape) for name in MOMENTS]
        moved = slot.subspace.transfer(moments[0], moments[1], old, slot.bases)
        for name, moment in zip(MOMENTS, moved, strict=True):
            assert moment is not None
            write_moment(slot.state, name, moment)

    def directions(self, group: dict[str, Any], slots: Sequence[Slot]) -> list[Tensor]:
        lows = [slot.projected for slot in slots]
        directions = [torch.zeros_like(low) for low in lows]
        # fused is one pass over the moments, and on a CPU several times as fast as op by op
        fused = group["foreach"] is None and all(low.device.type == "cpu" for low in lows)
        foreach = False if fused else group["foreach"]
        _adamw(group, slots, directions, lows, lr=-1.0, weight_decay=0.0, foreach=foreach, fused=fused)
        return directions

    def whole_steps(self, slots: Sequence[Slot]) -> set[int]:
        if self.backend == "torch" or (self.backend is None and not any(slot.weight.is_cuda for slot in slots)):
            return set()
        return {
            id(slot)
            for slot in slots
            if slot.subspace is MATRIX and self._begun(slot.state)
            if takes_triton(self.backend, slot.weight.device, _obstacle(slot))
        }

    def update_whole(self, group: dict[str, Any], slots: Sequence[Slot]) -> None:
        if slots:
            fused.step_whole(group, slots)

    def update_plain(self, group: dict[str, Any], slots: Sequence[Slot]) -> None:
        same = [slot for slot in slots if MOMENTS[0] in slot.state and _keeps_dtype(slot)]
        if same:
            weights, gradients = [slot.weight for slot in same], [slot.gradient for slot in same]
            decay, foreach = group["weight_decay"], group["foreach"]
            _adamw(group, same, weights, gradients, lr=group["lr"], weight_decay=decay, foreach=foreach)
        other = [slot for slot in slots if slot not in same]
        if other:
            wide = [slot.gradient.to(torch.promote_types(slot.gradient.dtype, torch.float32)) for slot in other]
            directions = [torch.zeros_like(gradient) for gradient in wide]
            _adamw(group, other, directions, wide, lr=-1.0, weight_decay=0.0, foreach=group["foreach"])
            rate = float(group["lr"])
            for slot, direction in zip(other, directions, strict=True):
                decay = 1 - rate * group["weight_decay"]
                descend(slot.weight, direction, rate, decay, stochastic=group["stochastic_rounding"])


def _adamw(
    group: Mapping[str, Any],
    slots: Sequence[Slot],
    weights: list[Tensor],
    gradients: list[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    foreach: bool | None,
    fused: bool | None = None,
) -> None:
    """torch's AdamW on `weights`; the moments are those of the slots, widened for it where they are kept narrower."""
    moments = [
        [
            read_moment(slot.state, name, gradient.shape).to(gradient.dtype)
            for slot, gradient in zip(slots, gradients, strict=True)
        ]
        for name in MOMENTS
    ]
    adamw(
        weights,
        gradients,
        moments[0],
        moments[1],
        [],
        [slot.state["step"] for slot in slots],
        foreach=foreach,
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
    )
    for name, values in zip(MOMENTS, moments, strict=True):
        for slot, value in zip(slots, values, strict=True):
            write_moment(slot.state, name, value)


def _obstacle(slot: Slot) -> str | None:
    """Why the kernel cannot step this matrix, or None."""
    if slot.group["stochastic_rounding"]:
        return "the kernel rounds to nearest, and stochastic_rounding is on"
    return fused.why_not(fused.matrix_of(slot))


def _moment_dtype(parameter: Tensor, group: Mapping[str, Any], low: bool) -> torch.dtype:
    if group["state_dtype"] is not None:
        dtype: torch.dtype = group["state_dtype"]
        return dtype
    widened = low or group["stochastic_rounding"]
    return torch.promote_types(parameter.dtype, torch.float32) if widened else parameter.dtype


def _keeps_dtype(slot: Slot) -> bool:
    """Whether torch's AdamW can step the weight itself: full precision kept as it is, and nearest rounding."""
    rounds = slot.group["stochastic_rounding"] and slot.parameter.dtype == torch.bfloat16
    return slot.state[MOMENTS[0]].dtype == slot.parameter.dtype and not rounds
