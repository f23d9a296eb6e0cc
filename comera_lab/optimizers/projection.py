"""Bases of gradients: make one, keep it fresh, project on it, lift back. Pure functions on tensors.

One orientation: a gradient G is (rows, cols) with rows >= cols, transposed once at the door (`oriented`); a basis
P is (cols, rank) with orthonormal columns, and G P is (rows, rank). Leading dimensions are a batch. Half-precision
inputs are computed in float32 and handed back in their own dtype.

COAP (Xiao et al. 2024, arXiv 2412.00071) keeps P near where it was: a cheap refresh every few hundred steps and a
gradient step on an alignment loss in between. GaLore (Zhao et al. 2024, arXiv 2403.03507) takes a full SVD.

Where processes share the rows of a gradient, each hands in its own rows, and `total`, which adds a tensor up over all
processes: every sum over rows goes through it, so all processes get the same basis.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from comera_lab.shapes import ShapeError

_NotConverged: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

Alignment = Literal["scale-free", "paper"]
Total = Callable[[Tensor], Tensor]

# Up to this many columns the exact basis costs less than a sketch: eigh of 128 x 128 takes 0.8 ms on two CPU cores.
_EXACT_COLS = 128
_SKETCH_ITERATIONS = 3
# A refresh adds this share of the gradient's energy along the old basis: where the gradient says nothing (its rank is
# below that of the basis, or it is zero) the old directions stay, and the columns never become dependent.
_INERTIA = 1e-6
# Published alignment step (COAP's released code, section 2a.1 of the method): SGD with this rate, norm clipped to 1.
_PAPER_STEP = 0.1
# Columns this far from orthonormal are made again by Householder QR; Cholesky in float64 reaches 1e-6.
_ORTHONORMAL = 1e-5


def projected_rank(shape: tuple[int, int], rank: int | None, rank_ratio: float | None) -> int | None:
    """Rank of the basis for a matrix of `shape`: `rank` if given, else min(shape) / rank_ratio, in 1 .. min(shape).

    None if neither is given: the matrix is not projected. Raises ValueError for a rank below 1 or a ratio below 1.
    """
    side = min(shape)
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}. Use None to project nothing.")
        return min(rank, side)
    if rank_ratio is None:
        return None
    if not (rank_ratio >= 1 and math.isfinite(rank_ratio)):
        raise ValueError(f"rank_ratio must be at least 1, got {rank_ratio!r}. 4 keeps a quarter of the smaller side.")
    return max(1, int(side / rank_ratio))


def oriented(matrix: Tensor) -> Tensor:
    """`matrix` (.., m, n) as a view (.., rows, cols) with rows >= cols."""
    return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT


def svd_basis(gradient: Tensor, rank: int) -> Tensor:
    """The best basis (cols, rank) for `gradient` (rows, cols): its leading right singular vectors, by a full SVD.

    Where the library's driver does not converge it is tried again in float64, then through G'G; one warning then.
    GaLore, equation 12.
    """
    _check_rank(gradient, rank)
    wide = _widened(gradient)
    try:
        vectors: Tensor = torch.linalg.svd(wide, full_matrices=False).Vh
    except _NotConverged:
        warnings.warn("an SVD did not converge and was repeated in float64", RuntimeWarning, stacklevel=2)
        try:
            vectors = torch.linalg.svd(wide.double(), full_matrices=False).Vh
        except _NotConverged:
            exact = wide.double().cpu()
            vectors = torch.linalg.eigh(exact.mT @ exact).eigenvectors.flip(-1).mT
    return vectors[..., :rank, :].mT.to(gradient).contiguous()


def gram_basis(gradient: Tensor, rank: int, total: Total) -> Tensor:
    """`svd_basis` for rows that processes share: eigenvectors of G'G, added up in float64, (cols x cols) in one sum."""
    exact = gradient.double()
    return leading_eigenvectors(total(exact.mT @ exact), rank).to(gradient).contiguous()


def random_basis(
    cols: int,
    rank: int,
    generator: torch.Generator | None = None,
    *,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """An orthonormal basis (*batch, cols, rank) in a random direction, on the device of `generator`."""
    device = generator.device if generator is not None else None
    wide = torch.promote_types(dtype, torch.float32)
    normal = torch.randn(*batch, cols, rank, generator=generator, dtype=wide, device=device)
    return orthonormalize(normal).to(dtype)


def sketch_basis(
    gradient: Tensor, rank: int, generator: torch.Generator | None = None, total: Total | None = None
) -> Tensor:
    """A first basis (cols, rank) for `gradient` (rows, cols), ordered by energy, without an SVD of the gradient.

    At most 128 columns: exact, from the eigenvectors of G'G. Beyond: a random start twice as wide, three subspace
    iterations, and the best `rank` directions in it (Halko et al. 2011, arXiv 0909.4061, algorithm 4.4). A zero
    gradient gives some orthonormal basis. `generator` makes the start; None is a fixed one, the same on every
    machine of a distributed run.
    """
    if total is None:
        _check_rank(gradient, rank)
    wide = _widened(gradient)
    cols = wide.shape[-1]
    if cols <= _EXACT_COLS:
        start = torch.eye(cols, dtype=wide.dtype, device=wide.device).expand(*wide.shape[:-2], cols, cols)
    else:
        draw = generator if generator is not None else torch.Generator().manual_seed(cols)
        start = random_basis(cols, min(cols, 2 * rank), draw, batch=wide.shape[:-2], dtype=wide.dtype).to(wide.device)
        for _ in range(_SKETCH_ITERATIONS):
            start = refresh_basis(wide, start, total)
    inside = _over(wide @ start, _length(wide, total))  # (rows, width)
    turn = leading_eigenvectors(_summed(inside.mT @ inside, total), rank)  # (width, rank)
    return orthonormalize(start @ turn).to(gradient.dtype)


def refresh_basis(gradient: Tensor, basis: Tensor, total: Total | None = None) -> Tensor:
    """COAP's refresh: one subspace iteration, orth(G' G P), from the basis (cols, rank) that is there.

    The published form takes QR of G P and a small SVD (COAP, equation 6); this spans the same subspace with two thin
    products and no decomposition of anything longer than the rank, and its columns continue the old ones, so that
    kept moments keep their meaning. Directions without energy stay as they were; a zero gradient changes nothing.
    """
    _check_basis(gradient, basis)
    wide, old = _widened(gradient), _widened(basis)
    length = _length(wide, total)
    # the thin matrices are scaled: the gradient is not copied
    again = _summed(wide.mT @ _over(wide @ old, length), total)
    return orthonormalize(_over(again, length) + _INERTIA * old).to(basis.dtype)


def align_basis(
    gradient: Tensor,
    basis: Tensor,
    momentum: Tensor | None = None,
    *,
    kind: Alignment = "scale-free",
    step: float = _PAPER_STEP,
    total: Total | None = None,
) -> Tensor:
    """COAP's alignment step: one gradient step on the basis P (cols, rank), `momentum` M (rows, rank) or None.

    Loss: MSE(G P P', G) * (1 - mean over rows of cos(M P', G)) (COAP, equation 5); without M the first factor alone.
    "paper" is that loss with SGD's rate `step`, the norm of its gradient clipped to 1 and P left as it falls: MSE has
    the unit of G squared, so P does not move at all at the gradient scales of language models. "scale-free" takes G in
    units of its RMS, so that the MSE is the share of the energy that P misses, and makes P orthonormal again.
    The (rows, cols) residual is never formed: one thin product more than a projection.
    """
    _check_basis(gradient, basis)
    if kind not in ("scale-free", "paper"):
        raise ValueError(f"kind must be 'scale-free' or 'paper', got {kind!r}.")
    wide, old = _widened(gradient), _widened(basis)
    if momentum is not None and momentum.shape != (*wide.shape[:-1], old.shape[-1]):
        raise ShapeError(
            f"momentum must be (rows, rank) = {(*wide.shape[:-1], old.shape[-1])}, got {tuple(momentum.shape)}."
        )
    rows = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # (rows, 1), the one pass over all of G
    slope = _alignment_slope(wide, rows, old, None if momentum is None else momentum.to(wide.dtype), kind, total)
    if kind == "paper":
        norm: Tensor = torch.linalg.vector_norm(slope, dim=(-2, -1), keepdim=True)
        return (old - step * slope / norm.clamp_min(1.0)).to(basis.dtype)
    return orthonormalize(old - step * slope).to(basis.dtype)


def _alignment_slope(
    gradient: Tensor,
    row_lengths: Tensor,
    basis: Tensor,
    momentum: Tensor | None,
    kind: Alignment,
    total: Total | None,
) -> Tensor:
    """Derivative by P of scale |G P P' - G|^2 (1 - mean cos(M P', G)), (cols, rank), from thin products alone.

    "paper": scale is 1 / (rows cols). Else it is 1 and G is divided by its norm: by way of the small factors, so that
    G is not copied.
    """
    tiny = torch.finfo(gradient.dtype).tiny
    unit = torch.ones_like(row_lengths[..., :1, :])
    if kind == "scale-free":
        norm = _length_of(row_lengths, total)
        unit = torch.where(norm > 0, 1 / norm.clamp_min(tiny), 0.0)
    count = gradient.shape[-2]
    if total is not None:
        count = int(total(torch.tensor(float(count), dtype=torch.float64, device=gradient.device)))
    scale = 1.0 if kind == "scale-free" else 1.0 / (count * gradient.shape[-1])
    low = gradient @ basis  # (rows, rank), still without its factor `unit`
    overlap = basis.mT @ basis  # (rank, rank), I if orthonormal
    inside = unit.square() * _summed(low.mT @ low, total)  # (rank, rank)
    # by d|G P P' - G|^2: 2 G'(G P P'P - 2 G P) + 2 P P'G'G P
    away = 2 * scale * unit * (overlap - 2 * torch.eye(overlap.shape[-1], dtype=low.dtype, device=low.device))
    if momentum is None:
        return unit * _summed(gradient.mT @ (low @ away), total) + basis @ (2 * scale * inside)
    lengths = unit * row_lengths
    energy = _summed(lengths.square().sum((-2, -1), keepdim=True), total)
    missed = scale * (energy - 2 * _trace(inside) + (inside * overlap).sum((-2, -1), keepdim=True))
    size = (momentum * (momentum @ overlap)).sum(-1, keepdim=True).clamp_min(0).sqrt()  # |M_i P'|
    weight = torch.where(size > 0, 1 / (size * lengths).clamp_min(tiny), 0.0) / count
    cosine = (momentum * low).sum(-1, keepdim=True) * (unit * weight)  # cos_i / rows
    far = (1 - _summed(cosine.sum(-2, keepdim=True), total)).clamp_min(0)
    # by d cos_i: G_i M_i / (|M_i P'| |G_i|) - cos_i P M_i M_i' / |M_i P'|^2
    outside = torch.addcmul(low @ (far * away), missed * weight, momentum, value=-1)
    turned = _summed(momentum.mT @ (cosine / size.square().clamp_min(tiny) * momentum), total)
    return unit * _summed(gradient.mT @ outside, total) + basis @ (2 * scale * far * inside + missed * turned)


def project(gradient: Tensor, basis: Tensor) -> Tensor:
    """G (rows, cols) in the coordinates of the basis: G P (rows, rank), in float32 or wider."""
    _check_basis(gradient, basis)
    return _widened(gradient) @ _widened(basis)


def lift(low: Tensor, basis: Tensor) -> Tensor:
    """Back to full size: low (rows, rank) P' -> (rows, cols), in float32 or wider."""
    if low.shape[-1] != basis.shape[-1]:
        raise ShapeError(
            f"low (rows, rank) and basis (cols, rank) must share their rank, got {tuple(low.shape)} and "
            f"{tuple(basis.shape)}. Lift what `project` gave with the same basis."
        )
    return _widened(low) @ _widened(basis).mT


def transfer_moments(mean: Tensor, square: Tensor | None, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor | None]:
    """Moments (rows, rank) of the coordinates in `old` (cols, rank) as moments of the coordinates in `new`.

    mean: M P_old' P_new. square: with C = P_old' P_new, coordinates taken as uncorrelated, V C^2 (entry by entry) and
    the mean of V for the share of a new direction that lay outside of the old basis: never negative, and no direction
    starts with a vanishing V, which would make its first updates too long. COAP's code maps sqrt(V) as if it were a
    vector instead, where signs cancel.
    """
    change = _widened(old).mT @ _widened(new)  # (rank, rank)
    moved = (mean.to(change.dtype) @ change).to(mean.dtype)
    if square is None:
        return moved, None
    share = change.square()
    unseen = (1 - share.sum(-2, keepdim=True)).clamp_min(0)  # (1, rank)
    wide = square.to(change.dtype)
    return moved, (wide @ share + wide.mean(-1, keepdim=True) * unseen).to(square.dtype)


def captured_energy(gradient: Tensor, basis: Tensor) -> Tensor:
    """Share of |G|^2 that lies inside an orthonormal basis, in [0, 1], one number per matrix; 0 for a zero gradient."""
    low = _over(project(gradient, basis), _length(_widened(gradient)))
    return low.square().sum((-2, -1)).clamp(0, 1)


def subspace_angle_degrees(first: Tensor, second: Tensor) -> Tensor:
    """Largest principal angle between the spans of two bases (cols, rank), in 0 .. 90 degrees, computed in float64."""
    if first.shape[-2] != second.shape[-2]:
        raise ShapeError(f"both bases must have the same cols, got {tuple(first.shape)} and {tuple(second.shape)}.")
    one, two = (torch.linalg.qr(basis.double()).Q for basis in (first, second))
    outside = two - one @ (one.mT @ two)
    sine = torch.linalg.matrix_norm(outside, ord=2)
    cosine = torch.linalg.svdvals(one.mT @ two)[..., -1]
    return torch.rad2deg(torch.atan2(sine, cosine))


def orthonormalize(columns: Tensor) -> Tensor:
    """Orthonormal columns of the same span, each pointing as its original does: (.., cols, rank) -> the same shape.

    Cholesky QR in float64 on columns of length 1; where columns are dependent, or the device has no float64,
    Householder QR.
    """
    length: Tensor = torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    scaled = columns / length.clamp_min(torch.finfo(columns.dtype).tiny)
    if columns.device.type != "mps":
        exact = scaled.double()
        factor, info = torch.linalg.cholesky_ex(exact.mT @ exact)
        found: Tensor = torch.linalg.solve_triangular(factor.mT, exact, upper=True, left=False).to(columns.dtype)
        unit = torch.eye(found.shape[-1], dtype=found.dtype, device=found.device)
        error = (found.mT @ found - unit).abs().amax()
        if bool((info == 0).all() & (error <= _ORTHONORMAL)):
            return found
    made: Tensor
    made, upper = torch.linalg.qr(scaled)
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1, 1).to(made.dtype)
    return made * signs.unsqueeze(-2)


def leading_eigenvectors(symmetric: Tensor, rank: int) -> Tensor:
    """The `rank` eigenvectors of the largest eigenvalues, as columns, largest first: (.., n, n) -> (.., n, rank).

    Repeated in float64 on the CPU, with one warning, where the driver does not converge.
    """
    try:
        vectors: Tensor = torch.linalg.eigh(symmetric).eigenvectors
    except _NotConverged:
        warnings.warn("an eigendecomposition did not converge and was repeated in float64", RuntimeWarning, 2)
        vectors = torch.linalg.eigh(symmetric.double().cpu()).eigenvectors.to(symmetric)
    return vectors.flip(-1)[..., :rank]


def _length(gradient: Tensor, total: Total | None = None) -> Tensor:
    """Frobenius norm of each matrix, (.., 1, 1); 0 where the entries are so small that their squares vanish."""
    return _length_of(torch.linalg.vector_norm(gradient, dim=-1, keepdim=True), total)


def _length_of(row_lengths: Tensor, total: Total | None = None) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(row_lengths, dim=(-2, -1), keepdim=True)
    return length if total is None else total(length.double().square()).sqrt().to(length.dtype)


def _summed(part: Tensor, total: Total | None) -> Tensor:
    return part if total is None else total(part)


def _over(tensor: Tensor, length: Tensor) -> Tensor:
    """`tensor` / `length`, zeros where the length is 0."""
    return torch.where(length > 0, tensor / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _check_rank(gradient: Tensor, rank: int) -> None:
    if gradient.ndim < 2 or gradient.shape[-2] < gradient.shape[-1]:
        raise ShapeError(
            f"gradient must be (rows, cols) with rows >= cols, got {tuple(gradient.shape)}. "
            "Transpose it first: oriented(gradient)."
        )
    if not 1 <= rank <= gradient.shape[-1]:
        raise ShapeError(f"rank must lie in 1 .. cols = {gradient.shape[-1]}, got {rank}.")


def _check_basis(gradient: Tensor, basis: Tensor) -> None:
    if gradient.ndim < 2 or basis.ndim < 2 or basis.shape[-2] != gradient.shape[-1]:
        raise ShapeError(
            f"basis must be (cols, rank) with cols = {gradient.shape[-1]} of the gradient, got {tuple(basis.shape)}. "
            "Transpose the gradient first: oriented(gradient)."
        )
