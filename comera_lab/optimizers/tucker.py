"""Tucker-2 bases for convolution gradients: one basis per channel side, the kernel window left whole.

G (out, in, *window) ~ core (rank_out, rank_in, *window) times U_out (out, rank_out) and U_in (in, rank_in), both with
orthonormal columns. COAP's released code recomputes them by HOOI, full SVDs iterated to convergence; here a refresh
is one warm subspace iteration per side, on the gradient that the other side has already made small.
Source: COAP (arXiv 2412.00071), section on convolutions; De Lathauwer et al. 2000 for HOSVD and HOOI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comera_lab.optimizers import projection
from comera_lab.optimizers.projection import Alignment
from comera_lab.shapes import ShapeError

Bases = tuple[Tensor, Tensor]


def tucker_ranks(
    shape: Sequence[int], rank: int | Sequence[int] | None, rank_ratio: float | None
) -> tuple[int, int] | None:
    """(rank_out, rank_in) for a kernel (out, in, *window): `rank` for both sides or one each, clipped to the channels.

    With a ratio both channel counts are divided by its root, so that the core has 1 / ratio of the elements. None if
    neither is given. Raises ValueError for a rank below 1 or a ratio below 1.
    """
    if rank is None and rank_ratio is None:
        return None
    wanted = (rank, rank) if rank is None or isinstance(rank, int) else tuple(rank)
    if len(wanted) != 2:
        raise ValueError(f"rank must be one number or (rank_out, rank_in), got {rank!r}.")
    root = None if rank_ratio is None else rank_ratio**0.5 if rank_ratio >= 1 else rank_ratio
    found = [projection.projected_rank((size, size), one, root) for size, one in zip(shape[:2], wanted, strict=True)]
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def hosvd_bases(gradient: Tensor, ranks: tuple[int, int]) -> Bases:
    """First bases: leading eigenvectors of the out side, then of the in side of what is left (sequential HOSVD)."""
    _check(gradient, ranks)
    basis_out = _leading(_columns(gradient, 0), ranks[0])
    small = project(gradient, (basis_out, None))
    return basis_out, _leading(_columns(small, 1), ranks[1]).to(gradient.dtype)


def refresh_bases(gradient: Tensor, bases: Bases) -> Bases:
    """One warm subspace iteration per side: HOOI with one step of iteration in the place of its SVDs."""
    return _each_side(gradient, bases, lambda side, columns, basis: projection.refresh_basis(columns, basis))


def align_bases(
    gradient: Tensor, bases: Bases, momentum: Tensor | None = None, *, kind: Alignment = "scale-free"
) -> Bases:
    """COAP's alignment step on each side, of the gradient that the other side has projected; momentum is a core."""

    def align(side: int, columns: Tensor, basis: Tensor) -> Tensor:
        rows = None if momentum is None else _columns(momentum, side)
        return projection.align_basis(columns, basis, rows, kind=kind)

    return _each_side(gradient, bases, align)


def project(gradient: Tensor, bases: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """G (out, in, *window) -> core (rank_out, rank_in, *window), in float32 or wider; a side that is None stays."""
    return _times(gradient, *(None if basis is None else basis.mT for basis in bases))


def lift(core: Tensor, bases: Bases) -> Tensor:
    """core (rank_out, rank_in, *window) -> (out, in, *window), in float32 or wider."""
    return _times(core, *bases)


def transfer_moments(mean: Tensor, square: Tensor | None, old: Bases, new: Bases) -> tuple[Tensor, Tensor | None]:
    """Moments (rank_out, rank_in, *window) in the coordinates of other bases: as for matrices, side by side."""
    for side in (0, 1):
        turned = None if square is None else square.movedim(side, -1)
        moved, moved_square = projection.transfer_moments(mean.movedim(side, -1), turned, old[side], new[side])
        mean = moved.movedim(-1, side)
        square = None if moved_square is None else moved_square.movedim(-1, side)
    return mean.contiguous(), None if square is None else square.contiguous()


def captured_energy(gradient: Tensor, bases: Bases) -> Tensor:
    """Share of |G|^2 that lies inside orthonormal bases, in [0, 1]; 0 for a zero gradient."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    total = wide.square().sum()
    return (project(wide, bases).square().sum() / total.clamp_min(torch.finfo(wide.dtype).tiny)).clamp(0, 1)


def _each_side(gradient: Tensor, bases: Bases, renew: Callable[[int, Tensor, Tensor], Tensor]) -> Bases:
    """`renew(side, columns, basis)` for out, then for in with the new out basis."""
    _check(gradient, (bases[0].shape[1], bases[1].shape[1]))
    basis_out = renew(0, _columns(project(gradient, (None, bases[1])), 0), bases[0])
    basis_in = renew(1, _columns(project(gradient, (basis_out, None)), 1), bases[1])
    return basis_out, basis_in


def _columns(tensor: Tensor, side: int) -> Tensor:
    """A tensor (a, b, *window) as a matrix with side 0 or 1 as its columns: the transposed unfolding."""
    return tensor.movedim(side, -1).reshape(-1, tensor.shape[side])


def _leading(columns: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors (cols, rank) of (n, cols), from the eigenvectors of the (cols, cols) product."""
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    unit = wide / wide.abs().amax().clamp_min(torch.finfo(wide.dtype).tiny)
    return projection.leading_eigenvectors(unit.mT @ unit, rank).to(columns.dtype)


def _times(tensor: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """left (p, a) or None, tensor (a, b, *window), right (q, b) or None -> (p, q, *window)."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if left is not None:
        wide = (left.to(wide.dtype) @ wide.reshape(wide.shape[0], -1)).view(-1, *wide.shape[1:])
    if right is not None:
        wide = (right.to(wide.dtype) @ wide.reshape(*wide.shape[:2], -1)).view(wide.shape[0], -1, *wide.shape[2:])
    return wide


def _check(gradient: Tensor, ranks: tuple[int, int]) -> None:
    if gradient.ndim < 3:
        raise ShapeError(f"gradient must be (out, in, *window), got {tuple(gradient.shape)}. Matrices need one basis.")
    for name, size, rank in zip(("out", "in"), gradient.shape, ranks, strict=False):
        if not 1 <= rank <= size:
            raise ShapeError(f"rank_{name} must lie in 1 .. {name} channels = {size}, got {rank}.")
    if math.prod(gradient.shape) == 0:
        raise ShapeError(f"gradient must hold values, got {tuple(gradient.shape)}.")
