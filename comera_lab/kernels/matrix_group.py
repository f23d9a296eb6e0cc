"""Matrices of one shape that a projected Adam step updates together, and the step in plain torch.

Imports no triton: the naive twins of `projected_adam` and `blockwise_quant` live here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from comera_lab.shapes import ShapeError

BLOCK = 256  # codes that share one scale
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixGroup:
    """Matrices of one shape and layout, updated together; every list has one tensor a matrix.

    weights, gradients (rows, cols) views of one dtype; bases (cols, rank); exp_avgs, exp_avg_sqs (rows, rank) fp32.
    For 8-bit moments these are uint8 codes (rows * rank,) instead, `scales` holds two lists of fp32 tensors (one value
    per 256 codes) and `maps` the (signed, unsigned) maps. Raises ShapeError or ValueError for lists that do not fit.
    `table` (lists x matrices) int64 holds the addresses: it belongs to the group, and a CUDA graph that captured
    steps of a group reads it at every replay, so the group must outlive the graph.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    bases: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    scales: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
    maps: tuple[Tensor, Tensor] | None = None
    addresses: list[int] = field(init=False, repr=False)
    table: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.weights or any(len(line) != len(self.weights) for line in self.lines):
            counts = [len(line) for line in self.lines]
            raise ShapeError(f"every list must hold one tensor a matrix, got {counts} tensors. Give equally many.")
        if (self.scales is None) != (self.maps is None):
            raise ValueError("8-bit moments must come with both scales and maps, got one of them. Give both or none.")
        if self.weights[0].ndim != 2 or self.bases[0].ndim != 2:
            sizes = tuple(self.weights[0].shape), tuple(self.bases[0].shape)
            raise ShapeError(
                f"weights and bases must be matrices, got {sizes[0]} and {sizes[1]}. Flatten or unstack them."
            )
        rows, cols, rank = self.sizes
        weight = self.weights[0]
        if rows * cols >= 2**31:
            raise ShapeError(f"a matrix must have fewer than 2**31 elements, got {rows} x {cols}. Split it.")
        state = torch.uint8 if self.scales else self.exp_avgs[0].dtype
        places = ((rows * rank,), (1,)) if self.scales else ((rows, rank), (rank, 1))
        moments: _Form = (*places, state)
        blocks: _Form = ((-(-rows * rank // BLOCK),), (1,), torch.float32)
        wanted: list[_Form] = [
            ((rows, cols), weight.stride(), weight.dtype),
            ((rows, cols), self.gradients[0].stride(), weight.dtype),
            ((cols, rank), self.bases[0].stride(), self.bases[0].dtype),
            *(moments, moments),
            *((blocks, blocks) if self.scales else ()),
        ]
        names = ("weights", "gradients", "bases", "exp_avgs", "exp_avg_sqs", "first scales", "second scales")
        for name, line, want in zip(names, self.lines, wanted, strict=False):
            for tensor in line:
                got = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
                if got != want or tensor.device != weight.device:
                    raise ShapeError(
                        f"{name} must be {want[0]} with strides {want[1]}, {want[2]}, on {weight.device}: got {got[0]} "
                        f"with strides {got[1]}, {got[2]}, on {tensor.device}. Group only matrices that are alike."
                    )
        object.__setattr__(self, "addresses", [tensor.data_ptr() for line in self.lines for tensor in line])
        object.__setattr__(self, "table", torch.tensor(self.addresses, dtype=torch.int64, device=weight.device))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """rows, cols, rank."""
        rows, cols = self.weights[0].shape
        return rows, cols, self.bases[0].shape[1]

    @property
    def lines(self) -> tuple[Sequence[Tensor], ...]:
        """The lists in the order of the address table."""
        return (self.weights, self.gradients, self.bases, self.exp_avgs, self.exp_avg_sqs, *(self.scales or ()))


def adam_scalars(
    step: int, lr: float, *, betas: tuple[float, float], eps: float, weight_decay: float = 0.0, scale: float = 1.0
) -> list[float]:
    """[step_size, decay, root, eps, b1, 1 - b1, b2, 1 - b2] of step 1, 2, ..., with torch.optim.AdamW's corrections."""
    first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
    decay = 1 - lr * weight_decay
    return [lr * scale / first, decay, second**-0.5, eps, betas[0], 1 - betas[0], betas[1], 1 - betas[1]]


@torch.no_grad()
def naive_projected_adam(group: MatrixGroup, scalars: Tensor) -> None:
    """One step in place in plain torch, matrix by matrix, in the precision of the moments (fp32 for 8-bit ones)."""
    step_size, decay, root, eps, b1, c1, b2, c2 = scalars.tolist()
    for item, (weight, gradient, basis) in enumerate(zip(group.weights, group.gradients, group.bases, strict=True)):
        coded = [group.exp_avgs[item], group.exp_avg_sqs[item]]
        first, second = coded
        if group.scales is not None and group.maps is not None:
            scales = [line[item] for line in group.scales]
            first, second = map(naive_dequantize_blockwise, coded, scales, group.maps)
        rounded = basis.to(weight.dtype).to(first.dtype)
        low = gradient.to(first.dtype) @ rounded
        first = b1 * first.view_as(low) + c1 * low
        second = b2 * second.view_as(low) + c2 * low.square()
        direction = first / (second.sqrt() * root + eps)
        weight.copy_(weight.to(first.dtype) * decay - step_size * direction @ rounded.T)
        if group.scales is not None and group.maps is not None:
            for codes, scale, value, code in zip(coded, scales, (first, second), group.maps, strict=True):
                new_codes, new_scale = naive_quantize_blockwise(value, code)
                codes.copy_(new_codes)
                scale.copy_(new_scale)
        else:
            coded[0].copy_(first)
            coded[1].copy_(second)


def naive_quantize_blockwise(x: Tensor, code: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in plain torch: codes (numel,) uint8 and scales (blocks,) fp32."""
    padded = x.new_zeros(-(-x.numel() // block) * block, dtype=torch.float32)
    padded[: x.numel()] = x.flatten()
    rows = padded.view(-1, block)
    scales = rows.abs().amax(dim=1)
    unit = rows / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(unit, (code[1:] + code[:-1]) / 2)
    return codes.flatten()[: x.numel()].to(torch.uint8), scales


def naive_dequantize_blockwise(codes: Tensor, scales: Tensor, code: Tensor, block: int = BLOCK) -> Tensor:
    """Values (numel,) fp32."""
    return code[codes.long()] * scales.repeat_interleave(block)[: codes.numel()]
