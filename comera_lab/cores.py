"""Make, read, round and convert lists of cores. Pure functions on tensors; nothing is changed in place.

A TT core is (r_{k-1}, s_k, r_k), a TTM core (r_{k-1}, v_k, h_k, r_k). Element order is row-major throughout:
W[j, i] of a linear weight (out, in) is the train at the mixed-radix digits of i over `in_modes`, then those of
j over `out_modes`, most significant digit first.
TT-SVD and rounding: Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 2011, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from comera_lab.runtime import require
from comera_lab.shapes import ShapeError, TTMShape, TTShape, clip_ranks

GATE_KINDS = ("straight-through", "threshold")


def init_cores(
    shape: TTShape | TTMShape,
    std: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Gaussian cores whose product has elements of standard deviation `std`.

    An element is a sum over prod(r_1..r_{n-1}) paths of products of n entries, so each core entry gets the
    variance (std^2 / prod of ranks)^(1/n) (CoMERA's initialisation, spread evenly over the cores).
    """
    paths = math.prod(shape.ranks)
    core_std = (std**2 / paths) ** (0.5 / len(shape.core_shapes))
    return [torch.randn(size, generator=generator, device=device, dtype=dtype) * core_std for size in shape.core_shapes]


def chain(cores: Sequence[Tensor]) -> Tensor:
    """Product of neighbouring TT cores: (r_0, s_1, r_1), .. -> (r_0, s_1 .. s_k, r_k), cheapest order first.

    The order is chosen by the matrix-chain recurrence on FLOPs; for k cores that is O(k^3) integers.
    """
    sizes = [core.shape[0] for core in cores] + [cores[-1].shape[2]]
    modes = [core.shape[1] for core in cores]
    cheapest = chain_tree if torch.compiler.is_compiling() else _remembered_tree  # dynamo warns of caches
    return _multiply(cores, cheapest(tuple(modes), tuple(sizes))[1])


Tree = int | tuple["Tree", "Tree"]


def chain_tree(modes: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, Tree]:
    """(FLOPs, tree) of the cheapest order to multiply a chain of cores with these modes and bond ranks."""
    count = len(modes)
    best: dict[tuple[int, int], tuple[int, Tree]] = {(k, k + 1): (0, k) for k in range(count)}
    for length in range(2, count + 1):
        for start in range(count - length + 1):
            stop = start + length
            options: list[tuple[int, Tree]] = []
            outer = math.prod(modes[start:stop]) * ranks[start] * ranks[stop]
            for cut in range(start + 1, stop):
                (left, left_tree), (right, right_tree) = best[start, cut], best[cut, stop]
                options.append((left + right + 2 * outer * ranks[cut], (left_tree, right_tree)))
            best[start, stop] = min(options, key=lambda option: option[0])
    return best[0, count]


_remembered_tree = lru_cache(maxsize=4096)(chain_tree)


def _multiply(cores: Sequence[Tensor], tree: Tree) -> Tensor:
    if isinstance(tree, int):
        return cores[tree]
    left, right = _multiply(cores, tree[0]), _multiply(cores, tree[1])
    product = left.reshape(-1, left.shape[2]) @ right.reshape(right.shape[0], -1)
    return product.reshape(left.shape[0], -1, right.shape[2])


def to_dense(cores: Sequence[Tensor]) -> Tensor:
    """The full tensor (s_1, .., s_n) of a TT, or (v_1, h_1, .., v_n, h_n) of a TTM."""
    flat = [core.reshape(core.shape[0], -1, core.shape[-1]) for core in cores]
    return chain(flat).reshape([size for core in cores for size in core.shape[1:-1]])


def cores_to_matrix(cores: Sequence[Tensor], shape: TTShape | TTMShape) -> Tensor:
    """Linear cores -> W (out, in); TTM cores -> E (rows, columns). Padding is cut off."""
    full = to_dense(cores)
    if isinstance(shape, TTShape):
        return full.reshape(math.prod(shape.in_modes), -1)[: shape.in_features, : shape.out_features].t()
    count = len(shape.row_modes)
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]
    return full.permute(order).reshape(math.prod(shape.row_modes), -1)[: shape.rows, : shape.columns]


def matrix_to_cores(matrix: Tensor, shape: TTShape | TTMShape, error: float | None = None) -> list[Tensor]:
    """W (out, in) or E (rows, columns) -> cores by TT-SVD, at the ranks of `shape` or up to `error`.

    With `error` the ranks of `shape` are ignored and the smallest ranks are taken for which
    ||matrix - result||_F <= error * ||matrix||_F. Padding is filled with zeros.
    """
    ranks = None if error is not None else shape.ranks
    if isinstance(shape, TTShape):
        padded = _padded(matrix, shape.out_features, shape.in_features, shape.out_modes, shape.in_modes)
        return tt_svd(padded.t().reshape(shape.modes), ranks, error)
    padded = _padded(matrix, shape.rows, shape.columns, shape.row_modes, shape.column_modes)
    count = len(shape.row_modes)
    paired = [axis for k in range(count) for axis in (k, count + k)]
    full = padded.reshape(*shape.row_modes, *shape.column_modes).permute(paired).reshape(shape.modes)
    sizes = zip(tt_svd(full, ranks, error), shape.row_modes, shape.column_modes, strict=True)
    return [core.reshape(core.shape[0], v, h, core.shape[2]) for core, v, h in sizes]


def _padded(matrix: Tensor, rows: int, columns: int, row_modes: Sequence[int], column_modes: Sequence[int]) -> Tensor:
    if tuple(matrix.shape) != (rows, columns):
        raise ShapeError(
            f"the shape describes a {(rows, columns)} matrix, got {tuple(matrix.shape)}. Transpose it, or rebuild it."
        )
    padded = matrix.new_zeros(math.prod(row_modes), math.prod(column_modes))
    padded[:rows, :columns] = matrix
    return padded


def _truncate(matrix: Tensor, rank: int | None, budget: float) -> tuple[Tensor, Tensor]:
    """matrix ~ left @ right with orthonormal `left`; at most `rank` columns, dropped tail norm <= `budget`."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    tails = values.flip(0).square().cumsum(0).sqrt().flip(0)
    needed = max(1, int((tails > budget).sum()))
    keep = needed if rank is None else min(rank, values.numel())
    return left[:, :keep], values[:keep, None] * right[:keep]


def _budget(error: float | None, norm: float, bonds: int) -> float:
    """Share of one bond: n bonds that each drop `error * norm / sqrt(n)` stay below `error * norm` together."""
    if error is None:
        return 0.0
    if not 0 <= error < 1:
        raise ShapeError(f"error is relative and lies in [0, 1), got {error}. 0.01 allows one per cent.")
    return error * norm / math.sqrt(max(bonds, 1))


def _check_real(tensor: Tensor) -> None:
    if tensor.is_complex() or not tensor.is_floating_point():
        raise TypeError(
            f"TT-SVD takes real floating-point tensors, got {tensor.dtype}. Convert with .to(torch.float32)."
        )
    if not torch.isfinite(tensor).all():
        raise ValueError("TT-SVD takes finite numbers, got NaN or Inf. Find the first bad value before decomposing.")


def tt_svd(tensor: Tensor, ranks: int | Sequence[int] | None = None, error: float | None = None) -> list[Tensor]:
    """Full tensor (s_1, .., s_n) -> TT cores, by ranks, by relative Frobenius error, or exactly (neither).

    By ranks the error is at most sqrt(sum of squared dropped singular values over all unfoldings), by `error`
    at most error * ||tensor||. Half types are decomposed in float32 and cast back.
    Raises TypeError for complex or integer tensors, ValueError for NaN or Inf.
    """
    _check_real(tensor)
    modes = tuple(tensor.shape)
    limits = None if ranks is None else clip_ranks(ranks, modes)
    work = tensor if tensor.dtype == torch.float64 else tensor.float()
    budget = _budget(error, float(torch.linalg.vector_norm(work)), len(modes) - 1)
    cores, rank = [], 1
    rest = work.reshape(1, -1)
    for k, mode in enumerate(modes[:-1]):
        left, rest = _truncate(rest.reshape(rank * mode, -1), limits[k + 1] if limits else None, budget)
        cores.append(left.reshape(rank, mode, -1))
        rank = left.shape[1]
    cores.append(rest.reshape(rank, modes[-1], 1))
    return [core.to(tensor.dtype).contiguous() for core in cores]


def round_cores(
    cores: Sequence[Tensor], ranks: int | Sequence[int] | None = None, error: float | None = None
) -> list[Tensor]:
    """The same train with smaller ranks, never forming the full tensor (TT-rounding).

    One sweep of QR from the right makes every later cut optimal, one sweep of SVD from the left cuts.
    """
    modes = tuple(core.shape[1] for core in cores)
    for core in cores:
        _check_real(core)
    limits = None if ranks is None else clip_ranks(ranks, modes)
    work = [core if core.dtype == torch.float64 else core.float() for core in cores]
    for k in range(len(work) - 1, 0, -1):
        rank, mode, right_rank = work[k].shape
        q, r = torch.linalg.qr(work[k].reshape(rank, -1).t())
        work[k] = q.t().reshape(-1, mode, right_rank)
        work[k - 1] = work[k - 1] @ r.t()
    budget = _budget(error, float(torch.linalg.vector_norm(work[0])), len(modes) - 1)
    for k in range(len(work) - 1):
        rank, mode, right_rank = work[k].shape
        left, carry = _truncate(work[k].reshape(rank * mode, right_rank), limits[k + 1] if limits else None, budget)
        work[k] = left.reshape(rank, mode, -1)
        work[k + 1] = torch.tensordot(carry, work[k + 1], dims=1)
    return [core.to(cores[0].dtype).contiguous() for core in work]


def effective_gate(gate: Tensor, kind: str, threshold: float) -> Tensor:
    """What a gate (r,) multiplies its bond with: entries at or below the threshold are exactly 0.

    "threshold" is the published mask (CoMERA code): negative entries count as dead, and a dead entry has no
    gradient, so it never comes back. "straight-through" kills by magnitude and hands the gradient through
    as if nothing had been cut (Bengio et al., arXiv 1308.3432), so an entry that is missed grows back.
    """
    if kind == "threshold":
        return torch.where(gate > threshold, gate, 0)
    if kind == "straight-through":
        cut = torch.where(gate.abs() > threshold, gate, 0)
        return gate + (cut - gate).detach()
    raise ValueError(f"gate must be one of {', '.join(GATE_KINDS)}, got {kind!r}. Use 'straight-through'.")


def apply_gates(cores: Sequence[Tensor], gates: Sequence[Tensor]) -> list[Tensor]:
    """Cores with each inner bond multiplied by its gate (r_k,): G_k D_k (CoMERA, arXiv 2405.14377)."""
    return [*(core * gate for core, gate in zip(cores, gates, strict=False)), cores[-1]]


def to_tensorly(cores: Sequence[Tensor]) -> Any:
    """TT cores -> tensorly TTTensor, TTM cores -> tensorly TTMatrix (numpy copies, tensorly's default backend)."""
    tensorly = require("tensorly", "exchanging cores with it")
    arrays = [tensorly.tensor(core.detach().cpu().numpy()) for core in cores]
    kind = tensorly.tt_tensor.TTTensor if cores[0].dim() == 3 else tensorly.tt_matrix.TTMatrix
    return kind(arrays)


def from_tensorly(tensor: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """tensorly TTTensor or TTMatrix, of any tensorly backend -> cores as torch tensors (copies)."""
    tensorly = require("tensorly", "exchanging cores with it")
    return [torch.tensor(tensorly.to_numpy(factor), dtype=dtype) for factor in tensor]
