"""Bytes that an optimizer keeps between steps, from shapes alone: one closed form per parameter.

The projected optimizers keep their moments in a smaller space and the way there, a basis. With rank r, and
r_O, r_I channel ranks of a convolution (COAP, arXiv 2412.00071; GaLore, arXiv 2403.03507):

    matrix (m, n)         moments 2 max(m, n) r          basis min(m, n) r
    conv (O, I, k1, k2)   moments 2 r_O r_I k1 k2        bases O r_O + I r_I
    conv (O, I, 1, 1)     moments 2 r_O I                basis O r_O
    anything else         moments 2 numel

Adafactor (arXiv 1804.04235) keeps a row and a column in place of the second moment. Flora (arXiv 2402.03293)
projects the first moment alone and keeps no basis: a seed brings it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from comera_lab.memory.pools import QUANTIZED_BLOCK, QUANTIZED_MIN_ELEMENTS
from comera_lab.shapes import ShapeError

Shape = tuple[int, ...]
# COAP leaves convolutions up to this size alone (public code, params.py).
SMALL_CONV_ELEMENTS = 32 * 32 * 9


@dataclass(frozen=True)
class StateBytes:
    """Bytes between steps: moments, bases, the scales of 8-bit blocks, and step counters or seeds."""

    moments: int = 0
    bases: int = 0
    scales: int = 0
    counters: int = 0

    @property
    def total(self) -> int:
        return self.moments + self.bases + self.scales + self.counters

    @property
    def published(self) -> int:
        """What COAP's own report counts: moments and bases. It cannot see 8-bit scales, and its steps are ints."""
        return self.moments + self.bases

    def __add__(self, other: StateBytes) -> Self:
        return type(self)(
            self.moments + other.moments,
            self.bases + other.bases,
            self.scales + other.scales,
            self.counters + other.counters,
        )

    def __mul__(self, count: int) -> Self:
        return type(self)(self.moments * count, self.bases * count, self.scales * count, self.counters * count)


@dataclass(frozen=True)
class LowRank:
    """Where the moments of one parameter live: their shape, and the elements of the basis or bases."""

    shape: Shape
    basis_elements: int


def low_rank(shape: Iterable[int], *, rank: int | None = None, rank_ratio: float | None = None) -> LowRank | None:
    """The projected space of a parameter of this shape, or None where it is not projected.

    `rank` holds for matrices and leaves those alone whose small side is not above it; `rank_ratio` asks for
    min(m, n) / ratio, for convolutions O / sqrt(ratio) and I / sqrt(ratio), for 1x1 kernels O / ratio, rounded
    down. Raises ValueError for a ratio under 1 or a rank under 1, or for neither.
    """
    sizes = tuple(int(size) for size in shape)
    _check_ranks(rank, rank_ratio)
    if len(sizes) == 2:
        small, large = min(sizes), max(sizes)
        chosen = int(small / rank_ratio) if rank_ratio is not None else rank or 0
        if not 1 <= chosen <= small or (rank_ratio is None and chosen == small):
            return None
        return LowRank((large, chosen), small * chosen)
    if len(sizes) == 4 and rank_ratio is not None and math.prod(sizes) > SMALL_CONV_ELEMENTS:
        out_channels, in_channels, *kernel = sizes
        if kernel == [1, 1]:
            out_rank = max(1, int(out_channels / rank_ratio))
            return LowRank((out_rank, in_channels, 1, 1), out_channels * out_rank)
        out_rank, in_rank = (max(1, int(n / math.sqrt(rank_ratio))) for n in (out_channels, in_channels))
        return LowRank((out_rank, in_rank, *kernel), out_channels * out_rank + in_channels * in_rank)
    return None


def state_bytes(
    shape: Iterable[int],
    optimizer: str,
    dtype: torch.dtype = torch.float32,
    *,
    rank: int | None = None,
    rank_ratio: float | None = None,
    first_moment: bool = True,
    quantize_from: int = QUANTIZED_MIN_ELEMENTS,
) -> StateBytes:
    """Bytes that `optimizer` keeps for one parameter.

    optimizer      one of `STATE_RULES`
    dtype          of moments and bases; 8-bit moments take one byte, and fp32 under `quantize_from` elements
    first_moment   whether the Adafactor kinds keep one (beta1 given); torch's own Adafactor has none
    """
    if optimizer not in STATE_RULES:
        raise ValueError(f"optimizer must be one of {', '.join(STATE_RULES)}, got {optimizer!r}. Pick one of them.")
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ShapeError(f"a shape must hold sizes of at least 0, got {sizes}. Give the shape of a parameter.")
    space = low_rank(sizes, rank=rank, rank_ratio=rank_ratio) if optimizer in PROJECTED else None
    return STATE_RULES[optimizer](_Parameter(sizes, space, dtype.itemsize, first_moment, quantize_from))


def optimizer_bytes(
    parameters: Iterable[Tensor | Iterable[int]],
    optimizer: str,
    dtype: torch.dtype | None = None,
    *,
    rank: int | None = None,
    rank_ratio: float | None = None,
    first_moment: bool = True,
    quantize_from: int = QUANTIZED_MIN_ELEMENTS,
) -> StateBytes:
    """Bytes that `optimizer` keeps for all parameters: shapes, or tensors, on the meta device too.

    `dtype` None takes that of a tensor, and fp32 for a shape. Parameters with other settings go into a call of
    their own: results add up.
    """
    total = StateBytes()
    for parameter in parameters:
        own = parameter.dtype if isinstance(parameter, Tensor) else torch.float32
        total += state_bytes(
            parameter.shape if isinstance(parameter, Tensor) else parameter,
            optimizer,
            own if dtype is None else dtype,
            rank=rank,
            rank_ratio=rank_ratio,
            first_moment=first_moment,
            quantize_from=quantize_from,
        )
    return total


@dataclass(frozen=True)
class _Parameter:
    shape: Shape
    space: LowRank | None
    itemsize: int
    first_moment: bool
    quantize_from: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def state_shape(self) -> Shape:
        return self.shape if self.space is None else self.space.shape

    @property
    def basis_bytes(self) -> int:
        return 0 if self.space is None else self.space.basis_elements * self.itemsize


def _step_counter_bytes() -> int:
    """torch.optim keeps one float per parameter as its step: float64 only if that is the default dtype."""
    return 8 if torch.get_default_dtype() == torch.float64 else 4


def _adam(parameter: _Parameter) -> StateBytes:
    moments = 2 * math.prod(parameter.state_shape) * parameter.itemsize
    return StateBytes(moments, parameter.basis_bytes, 0, _step_counter_bytes())


def _adam_8bit(parameter: _Parameter) -> StateBytes:
    numel = math.prod(parameter.state_shape)
    if numel < parameter.quantize_from:
        return StateBytes(2 * 4 * numel, parameter.basis_bytes, 0, _step_counter_bytes())
    blocks = -(-numel // QUANTIZED_BLOCK)
    return StateBytes(2 * numel, parameter.basis_bytes, 2 * 4 * blocks, _step_counter_bytes())


def _factored(shape: Shape) -> int:
    """Elements of Adafactor's second moment: a row and a column over the last two sizes, or all of a vector."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]


def _adafactor(parameter: _Parameter) -> StateBytes:
    """torch.optim.Adafactor: no first moment."""
    return StateBytes(_factored(parameter.shape) * parameter.itemsize, 0, 0, _step_counter_bytes())


def _coap_adafactor(parameter: _Parameter) -> StateBytes:
    shape = parameter.state_shape
    first = math.prod(shape) if parameter.first_moment else 0
    return StateBytes((first + _factored(shape)) * parameter.itemsize, parameter.basis_bytes, 0, _step_counter_bytes())


def _flora(parameter: _Parameter) -> StateBytes:
    first = math.prod(parameter.state_shape) if parameter.first_moment else 0
    return StateBytes((first + _factored(parameter.shape)) * parameter.itemsize, 0, 0, _step_counter_bytes())


def _bytes_by_count(optimizer: str, numel: int, itemsize: int) -> int:
    return STATE_RULES[optimizer](_Parameter((numel,), None, itemsize, True, QUANTIZED_MIN_ELEMENTS)).total


# name -> bytes of one parameter; `PROJECTED` ones need a rank or a ratio
STATE_RULES: dict[str, Callable[[_Parameter], StateBytes]] = {
    "sgd": lambda parameter: StateBytes(),
    "momentum": lambda parameter: StateBytes(parameter.numel * parameter.itemsize),
    "adamw": _adam,
    "adamw-8bit": _adam_8bit,
    "adafactor": _adafactor,
    "coap": _adam,
    "coap-8bit": _adam_8bit,
    "coap-adafactor": _coap_adafactor,
    "galore": _adam,
    "flora": _flora,
}
PROJECTED = frozenset({"coap", "coap-8bit", "coap-adafactor", "galore", "flora"})

# The four of the memory panel, from (elements, bytes per element): their bytes do not depend on the shape.
OPTIMIZERS: dict[str, Callable[[int, int], int]] = {
    name: partial(_bytes_by_count, name) for name in ("sgd", "momentum", "adamw", "adamw-8bit")
}


def _check_ranks(rank: int | None, rank_ratio: float | None) -> None:
    if rank is None and rank_ratio is None:
        raise ValueError("a projected optimizer needs a rank or a rank_ratio, got neither. Give rank_ratio=4.")
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}. Give a number of columns to keep.")
    if rank_ratio is not None and not rank_ratio >= 1:
        raise ValueError(f"rank_ratio must be at least 1, got {rank_ratio}. 4 keeps a quarter of the small side.")
