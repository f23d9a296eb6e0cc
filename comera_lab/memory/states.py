"""Bytes that an optimizer keeps between steps, from shapes alone: one closed form per parameter.

The projected optimizers keep their moments in a smaller space and the way there, a basis. With rank r, and
r_O, r_I channel ranks of a convolution (COAP, arXiv 2412.00071; GaLore, arXiv 2403.03507):

    matrix (m, n)         moments 2 max(m, n) r          basis min(m, n) r
    conv (O, I, k1, k2)   moments 2 r_O r_I k1 k2        bases O r_O + I r_I
    conv (O, I, 1, 1)     as a matrix
    anything else         moments 2 numel

Adafactor (arXiv 1804.04235) keeps a row and a column in place of the second moment. Flora (arXiv 2402.03293)
projects the first moment alone and keeps no basis: a seed brings it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor

from comera_lab.memory.pools import QUANTIZED_BLOCK, QUANTIZED_MIN_ELEMENTS
from comera_lab.optimizers.coap import PLAIN_UP_TO
from comera_lab.optimizers.projection import projected_rank
from comera_lab.optimizers.subspaces import subspace_for
from comera_lab.shapes import ShapeError

Shape = tuple[int, ...]


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


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """What the bytes of a state depend on beside the shape; the defaults are those of the optimizers of this kit.

    rank, rank_ratio, plain_up_to  as in `COAPAdamW`
    state_dtype    of the moments; None is float32 for projected ones and the parameter's own for others
    first_moment   whether the Adafactor kinds keep one (beta1 given); torch's own Adafactor has none
    quantize_from  8-bit moments with fewer elements are kept whole
    pointwise      which side of a 1x1 convolution is projected: the smaller one, or "out", as COAP published it
    """

    rank: int | None = None
    rank_ratio: float | None = None
    plain_up_to: int = PLAIN_UP_TO
    state_dtype: torch.dtype | None = None
    first_moment: bool = True
    quantize_from: int = QUANTIZED_MIN_ELEMENTS
    pointwise: Literal["small", "out"] = "small"

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}. Give a number of columns to keep.")
        if self.rank_ratio is not None and not self.rank_ratio >= 1:
            raise ValueError(f"rank_ratio must be at least 1, got {self.rank_ratio}. 4 keeps a quarter of a side.")


def low_rank(shape: Shape, settings: StateSettings) -> LowRank | None:
    """The projected space of a parameter of this shape, or None where it is not projected."""
    ruled = {"rank": settings.rank, "rank_ratio": settings.rank_ratio, "plain_up_to": settings.plain_up_to}
    subspace = subspace_for(shape, ruled)
    if subspace is None:
        return None
    if settings.pointwise == "out" and len(shape) == 4 and shape[2:] == (1, 1):
        rank = projected_rank((shape[0], shape[0]), settings.rank, settings.rank_ratio) or 0
        return LowRank((rank, *shape[1:]), shape[0] * rank)
    ranks = subspace.ranks(shape, ruled)
    assert ranks is not None
    return LowRank(subspace.low_shape(shape, ranks), sum(map(math.prod, subspace.basis_shapes(shape, ranks))))


def state_bytes(
    shape: Iterable[int],
    optimizer: str,
    dtype: torch.dtype = torch.float32,
    settings: StateSettings | None = None,
) -> StateBytes:
    """Bytes that `optimizer`, one of `STATE_RULES`, keeps for one parameter of this shape and dtype."""
    settings = StateSettings() if settings is None else settings
    if optimizer not in STATE_RULES:
        raise ValueError(f"optimizer must be one of {', '.join(STATE_RULES)}, got {optimizer!r}. Pick one of them.")
    if optimizer in PROJECTED and settings.rank is None and settings.rank_ratio is None:
        raise ValueError(f"{optimizer} needs a rank or a rank_ratio, got neither. Give rank_ratio=4.")
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ShapeError(f"a shape must hold sizes of at least 0, got {sizes}. Give the shape of a parameter.")
    return STATE_RULES[optimizer](_Parameter(sizes, dtype, settings))


def optimizer_bytes(
    parameters: Iterable[Tensor | Iterable[int]],
    optimizer: str,
    dtype: torch.dtype | None = None,
    settings: StateSettings | None = None,
) -> StateBytes:
    """Bytes that `optimizer` keeps for all parameters: shapes, or tensors, on the meta device too.

    `dtype` None takes that of a tensor, and float32 for a shape. Parameters with other settings go into a call of
    their own: results add up.
    """
    total = StateBytes()
    for parameter in parameters:
        shape, own = (parameter.shape, parameter.dtype) if isinstance(parameter, Tensor) else (parameter, torch.float32)
        total += state_bytes(shape, optimizer, own if dtype is None else dtype, settings)
    return total


@dataclass(frozen=True)
class _Parameter:
    shape: Shape
    dtype: torch.dtype
    settings: StateSettings

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def moment_size(self, *, projected: bool) -> int:
        """Bytes of an element of a moment."""
        if self.settings.state_dtype is not None:
            return self.settings.state_dtype.itemsize
        return max(self.dtype.itemsize, 4) if projected else self.dtype.itemsize


def _step_counter_bytes() -> int:
    """torch.optim keeps one float per parameter as its step: float64 only if that is the default dtype."""
    return 8 if torch.get_default_dtype() == torch.float64 else 4


def _adam(parameter: _Parameter) -> StateBytes:
    return StateBytes(2 * parameter.numel * parameter.dtype.itemsize, 0, 0, _step_counter_bytes())


def _adam_8bit(parameter: _Parameter) -> StateBytes:
    if parameter.numel < parameter.settings.quantize_from:
        return StateBytes(2 * parameter.numel * parameter.moment_size(projected=False), 0, 0, _step_counter_bytes())
    return _codes(parameter.numel)


def _codes(numel: int, basis_bytes: int = 0) -> StateBytes:
    """Two moments of one byte an element, with a float32 scale a block."""
    return StateBytes(2 * numel, basis_bytes, 2 * 4 * -(-numel // QUANTIZED_BLOCK), _step_counter_bytes())


def _projected(parameter: _Parameter) -> StateBytes:
    space = low_rank(parameter.shape, parameter.settings)
    shape, basis_bytes = _space_of(parameter, space)
    moments = 2 * math.prod(shape) * parameter.moment_size(projected=space is not None)
    return StateBytes(moments, basis_bytes, 0, _step_counter_bytes())


def _projected_8bit(parameter: _Parameter) -> StateBytes:
    shape, basis_bytes = _space_of(parameter, low_rank(parameter.shape, parameter.settings))
    whole = math.prod(shape) < parameter.settings.quantize_from
    return _projected(parameter) if whole else _codes(math.prod(shape), basis_bytes)


def _space_of(parameter: _Parameter, space: LowRank | None) -> tuple[Shape, int]:
    """Shape of the moments, and bytes of the bases."""
    if space is None:
        return parameter.shape, 0
    return space.shape, space.basis_elements * parameter.dtype.itemsize


def _factored(shape: Shape) -> int:
    """Elements of Adafactor's second moment: a row and a column over the last two sizes, or all of a vector."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]


def _adafactor(parameter: _Parameter) -> StateBytes:
    """torch.optim.Adafactor: no first moment."""
    return StateBytes(_factored(parameter.shape) * parameter.dtype.itemsize, 0, 0, _step_counter_bytes())


def _projected_adafactor(parameter: _Parameter) -> StateBytes:
    """The second moment in float32 or wider, projected or not; the first one too unless there is a `state_dtype`."""
    shape, basis_bytes = _space_of(parameter, low_rank(parameter.shape, parameter.settings))
    first = math.prod(shape) * parameter.moment_size(projected=True) if parameter.settings.first_moment else 0
    second = _factored(shape) * max(parameter.dtype.itemsize, 4)
    return StateBytes(first + second, basis_bytes, 0, _step_counter_bytes())


def _flora(parameter: _Parameter) -> StateBytes:
    """All float32; a convolution is taken as the matrix (out, in * window)."""
    shape, settings = parameter.shape, parameter.settings
    flat = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape
    space = low_rank(flat, settings)
    first = math.prod(flat if space is None else space.shape) if settings.first_moment else 0
    return StateBytes(4 * (first + _factored(shape)), 0, 0, _step_counter_bytes())


def _bytes_by_count(optimizer: str, numel: int, itemsize: int) -> int:
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    return STATE_RULES[optimizer](_Parameter((numel,), dtype, StateSettings())).total


# name -> bytes of one parameter; `PROJECTED` ones need a rank or a ratio
STATE_RULES: dict[str, Callable[[_Parameter], StateBytes]] = {
    "sgd": lambda parameter: StateBytes(),
    "momentum": lambda parameter: StateBytes(parameter.numel * parameter.dtype.itemsize),
    "adamw": _adam,
    "adamw-8bit": _adam_8bit,
    "adafactor": _adafactor,
    "coap": _projected,
    "coap-8bit": _projected_8bit,
    "coap-adafactor": _projected_adafactor,
    "galore": _projected,
    "flora": _flora,
}
PROJECTED = frozenset({"coap", "coap-8bit", "coap-adafactor", "galore", "flora"})

# The four of the memory panel, from (elements, bytes per element): their bytes do not depend on the shape.
OPTIMIZERS: dict[str, Callable[[int, int], int]] = {
    name: partial(_bytes_by_count, name) for name in ("sgd", "momentum", "adamw", "adamw-8bit")
}
