"""What the optimizers ask of a subspace, for matrices (one basis) and for convolutions (two): no state in here.

The optimizers keep the bases in their own state, under the names in `keys`, and hand them over as a tuple.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from comera_lab.optimizers import projection, tucker
from comera_lab.optimizers.projection import Alignment

Bases = tuple[Tensor, ...]
Refresh = Literal["warm", "svd"]


class Subspace(Protocol):
    """How tensors of one kind are projected. `shape` is that of the parameter, `view` what the other methods take."""

    keys: tuple[str, ...]

    def ranks(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, ...] | None: ...

    def side(self, shape: tuple[int, ...]) -> str: ...

    def basis_shapes(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]: ...

    def low_shape(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]: ...

    def view(self, tensor: Tensor) -> Tensor: ...

    def is_zero(self, gradient: Tensor) -> bool: ...

    def first(self, gradient: Tensor, ranks: tuple[int, ...], refresh: Refresh) -> Bases: ...

    def refreshed(self, gradient: Tensor, bases: Bases, refresh: Refresh) -> Bases: ...

    def aligned(self, gradient: Tensor, bases: Bases, momentum: Tensor | None, kind: Alignment) -> Bases: ...

    def project(self, gradient: Tensor, bases: Bases) -> Tensor: ...

    def lift(self, low: Tensor, bases: Bases) -> Tensor: ...

    def transfer(self, mean: Tensor, square: Tensor | None, old: Bases, new: Bases) -> tuple[Tensor, Tensor | None]: ...


class Matrix:
    """A matrix, or a convolution with a 1x1 window: one basis on the smaller side."""

    keys: tuple[str, ...] = ("basis",)

    def ranks(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, ...] | None:
        rank = projection.projected_rank((shape[0], shape[1]), settings["rank"], settings["rank_ratio"])
        return None if rank is None else (rank,)

    def side(self, shape: tuple[int, ...]) -> str:
        return "columns" if shape[0] >= shape[1] else "rows"

    def basis_shapes(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return ((min(shape[:2]), ranks[0]),)

    def low_shape(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
        return max(shape[:2]), ranks[0]

    def view(self, tensor: Tensor) -> Tensor:
        return projection.oriented(tensor[..., 0, 0] if tensor.ndim == 4 else tensor)

    def is_zero(self, gradient: Tensor) -> bool:
        return not bool(torch.count_nonzero(gradient))

    def first(self, gradient: Tensor, ranks: tuple[int, ...], refresh: Refresh) -> Bases:
        make = projection.svd_basis if refresh == "svd" else projection.sketch_basis
        return (make(gradient, ranks[0]),)

    def refreshed(self, gradient: Tensor, bases: Bases, refresh: Refresh) -> Bases:
        if refresh == "svd":
            return (projection.svd_basis(gradient, bases[0].shape[1]),)
        return (projection.refresh_basis(gradient, bases[0]),)

    def aligned(self, gradient: Tensor, bases: Bases, momentum: Tensor | None, kind: Alignment) -> Bases:
        return (projection.align_basis(gradient, bases[0], momentum, kind=kind),)

    def project(self, gradient: Tensor, bases: Bases) -> Tensor:
        return projection.project(gradient, bases[0])

    def lift(self, low: Tensor, bases: Bases) -> Tensor:
        return projection.lift(low, bases[0])

    def transfer(self, mean: Tensor, square: Tensor | None, old: Bases, new: Bases) -> tuple[Tensor, Tensor | None]:
        return projection.transfer_moments(mean, square, old[0], new[0])


class _Tucker:
    """A convolution kernel (out, in, height, width): a basis on either channel side."""

    keys: tuple[str, ...] = ("basis_out", "basis_in")

    def ranks(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, ...] | None:
        return tucker.tucker_ranks(shape, settings["rank"], settings["rank_ratio"])

    def side(self, shape: tuple[int, ...]) -> str:
        return "channels"

    def basis_shapes(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return (shape[0], ranks[0]), (shape[1], ranks[1])

    def low_shape(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
        return (*ranks, *shape[2:])

    def view(self, tensor: Tensor) -> Tensor:
        return tensor

    def is_zero(self, gradient: Tensor) -> bool:
        return not bool(torch.count_nonzero(gradient))

    def first(self, gradient: Tensor, ranks: tuple[int, ...], refresh: Refresh) -> Bases:
        return tucker.hosvd_bases(gradient, (ranks[0], ranks[1]))

    def refreshed(self, gradient: Tensor, bases: Bases, refresh: Refresh) -> Bases:
        if refresh == "svd":
            return tucker.hosvd_bases(gradient, (bases[0].shape[1], bases[1].shape[1]))
        return tucker.refresh_bases(gradient, (bases[0], bases[1]))

    def aligned(self, gradient: Tensor, bases: Bases, momentum: Tensor | None, kind: Alignment) -> Bases:
        return tucker.align_bases(gradient, (bases[0], bases[1]), momentum, kind=kind)

    def project(self, gradient: Tensor, bases: Bases) -> Tensor:
        return tucker.project(gradient, (bases[0], bases[1]))

    def lift(self, low: Tensor, bases: Bases) -> Tensor:
        return tucker.lift(low, (bases[0], bases[1]))

    def transfer(self, mean: Tensor, square: Tensor | None, old: Bases, new: Bases) -> tuple[Tensor, Tensor | None]:
        return tucker.transfer_moments(mean, square, (old[0], old[1]), (new[0], new[1]))


MATRIX: Subspace = Matrix()
TUCKER: Subspace = _Tucker()


def subspace_for(shape: tuple[int, ...], settings: Mapping[str, Any]) -> Subspace | None:
    """How a parameter of `shape` is projected under `settings`, or None: it takes the plain update.

    Plain are tensors of up to `plain_up_to` elements, those with 1, 3 or 5 dimensions, and all without rank and ratio.
    """
    if settings["rank"] is None and settings["rank_ratio"] is None:
        return None
    if len(shape) not in (2, 4) or math.prod(shape) <= settings["plain_up_to"] or 0 in shape:
        return None
    return MATRIX if math.prod(shape[2:]) == 1 else TUCKER


def subspace_of(state: Mapping[str, Any]) -> Subspace | None:
    """The subspace whose bases an optimizer state holds, or None."""
    for subspace in (MATRIX, TUCKER):
        if subspace.keys[0] in state:
            return subspace
    return None


def bases_of(state: Mapping[str, Any], subspace: Subspace) -> Bases:
    """The bases in an optimizer state."""
    return tuple(state[key] for key in subspace.keys)
