"""Rows of a TT-matrix table from ids, without building the table (CoMERA, arXiv 2405.14377, section on look-ups).

The train is cut in the middle: a row id splits into (a, b) = divmod(id, rows of the right half), and
row(id) = A[a] B[b] with A (columns_left, r) and B (r, columns_right). Two levels of repetition are removed:
each different id is computed once, and each different a and b is contracted once for all ids that share it.
Memory grows with the number of different ids, never with the table: the pairs A[a], B[b] are gathered block by
block, and gathered again in the backward pass instead of being kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from comera_lab.contraction.fused import lookup_is_fused
from comera_lab.cores import chain, cores_to_matrix
from comera_lab.shapes import TTMShape

# All pairs of the wanted half-rows are multiplied at once where they are at most this many times the wanted rows:
# one product and an index instead of one small product a row (15,000 rows of 29,766, 64 columns, rank 16, with
# gradients, 2 CPU cores: 8.8 -> 5.3 ms; at 4 times as many pairs both cost the same).
ALL_PAIRS = 2
# A half-table that holds at most this many times the wanted rows is built whole: one chain of products and an
# index are faster than gathering a stack of core slices.
WHOLE_HALF = 4
# Gathered elements of one block of `pair_rows`: 2 MiB in float32 stay in a core's cache.
BLOCK_ELEMENTS = 2**19


class DifferentRows(NamedTuple):
    """`rows` (different, columns) of the different `ids` in ascending order; ids[place] is what was asked for."""

    rows: Tensor
    ids: Tensor
    place: Tensor


def naive_lookup_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """The obviously right twin of `lookup_rows`: index the dense table. ids (...) -> (..., columns)."""
    return functional.embedding(ids, cores_to_matrix(cores, shape))


def lookup_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape, backend: str | None = None) -> Tensor:
    """ids (...) int32 or int64 -> (..., columns). Gradients of repeated ids are summed in a fixed order.

    The dtype is that of the cores, under autocast too, as nn.Embedding's. `backend` None takes the triton kernel for
    CUDA tensors where it can run; "torch" or "triton" names one. Raises as `different_rows`, and ValueError for a
    named backend that cannot run.
    """
    if lookup_is_fused(ids, cores, shape, backend):
        return _fused_rows(ids, cores, shape)
    if 0 < math.prod(shape.row_modes) <= ids.numel():
        return _from_whole_table(ids, cores, shape)
    found = different_rows(ids, cores, shape)
    return _take(found.rows, found.place.flatten()).reshape(*ids.shape, shape.columns)


def different_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> DifferentRows:
    """Each different id of `ids` (...) once; without ids one row of zeros, so that gradients exist.

    Raises TypeError for ids that are not int32 or int64, IndexError for an id outside [0, rows), before anything
    is computed.
    """
    _check_dtype(ids)
    if ids.numel() == 0:
        nothing = cores[0].new_zeros(1, shape.columns) + 0 * sum(core.sum() for core in cores)
        return DifferentRows(nothing, ids.new_zeros(1), ids)
    different, place = _unique(ids, shape.rows)
    _check_range(different[0], different[-1], shape)
    with _no_autocast(ids):
        return DifferentRows(_unpadded(_rows(different, cores, shape), shape), different, place)


def _from_whole_table(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """ids (...) -> (..., columns), for a table of no more rows than ids: no larger than the answer, and unsorted."""
    _check_dtype(ids)
    _check_range(*torch.aminmax(ids), shape)
    with _no_autocast(ids):
        middle = len(cores) // 2
        table = _whole_half(cores).flatten(1) if middle == 0 else _all_pairs(*_whole_halves(cores))
    return _take(_unpadded(table, shape), ids.flatten()).reshape(*ids.shape, shape.columns)


def _fused_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """ids (...) -> (..., columns) by the triton kernel, from whole half-tables.

    While a CUDA graph is being captured nothing may wait for the GPU: there, ids are taken to be in range.
    """
    from comera_lab.kernels.tt_lookup import tt_lookup

    _check_dtype(ids)
    flat = ids.flatten().long()
    if len(flat) and not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        _check_range(*torch.aminmax(flat), shape)
    with _no_autocast(ids):
        left, right = _whole_halves(cores)
        rows = tt_lookup(left, right, flat // len(right), flat % len(right), shape.columns)
    return rows.reshape(*ids.shape, shape.columns)


def _check_dtype(ids: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}. Convert them with ids.long().")


def _unique(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The different ids, ascending, and the places of all; on the meta device as many as there can be of `rows`."""
    if ids.is_meta:
        return ids.new_empty(min(ids.numel(), rows)), torch.empty_like(ids, dtype=torch.long)
    different, place = torch.unique(ids, return_inverse=True)
    return different, place


def _no_autocast(ids: Tensor) -> AbstractContextManager[object]:
    return nullcontext() if ids.is_meta else torch.autocast(ids.device.type, enabled=False)


def _check_range(lowest: Tensor, highest: Tensor, shape: TTMShape) -> None:
    if lowest.is_meta:  # ids are not known there
        return
    low, high = torch.stack([lowest, highest]).tolist()
    if low < 0 or high >= shape.rows:
        raise IndexError(
            f"ids must lie in [0, {shape.rows}), got {low if low < 0 else high}. Check the vocabulary size."
        )


def _rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """Rows of ascending, different ids (u,) -> (u, padded columns)."""
    middle = len(cores) // 2
    if middle == 0:
        table, place = _half_table(ids, cores, shape.row_modes)
        return _take(table.flatten(1), place)
    right_rows = math.prod(shape.row_modes[middle:])
    left, a = _half_table(ids // right_rows, cores[:middle], shape.row_modes[:middle])
    right, b = _half_table(ids % right_rows, cores[middle:], shape.row_modes[middle:])
    right = right.reshape(len(right), left.shape[2], -1)
    if len(left) * len(right) <= ALL_PAIRS * len(ids):
        return _take(_all_pairs(left, right), a * len(right) + b)
    return pair_rows(left, right, a, b)


def _unpadded(rows: Tensor, shape: TTMShape) -> Tensor:
    # A slice that cuts nothing still costs a pass over the rows in its backward.
    return rows if rows.shape[1] == shape.columns else rows[:, : shape.columns]


def _all_pairs(left: Tensor, right: Tensor) -> Tensor:
    """left (A, columns_left, r), right (B, r, columns_right) -> row a B + b is left[a] right[b], its columns flat."""
    count, columns, rank = left.shape
    product = left.reshape(-1, rank) @ right.transpose(0, 1).reshape(rank, -1)
    pairs = product.reshape(count, columns, len(right), -1).transpose(1, 2)
    return pairs.reshape(count * len(right), -1)


def pair_rows(left: Tensor, right: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """left (A, columns_left, r)[a] times right (B, r, columns_right)[b] -> (u, columns_left columns_right)."""
    rows: Tensor = _PairRows.apply(left, right, a, b)  # type: ignore[no-untyped-call]
    return rows


class _PairRows(torch.autograd.Function):
    """Blocks of rows: gather both halves, multiply, let the gathered go."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, a, b)
        out = left.new_empty(len(a), left.shape[1], right.shape[2])
        for block in _blocks(left, right, len(a)):
            torch.bmm(left.index_select(0, a[block]), right.index_select(0, b[block]), out=out[block])
        return out.flatten(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        left, right, a, b = ctx.saved_tensors
        grad = grad.reshape(len(a), left.shape[1], right.shape[2])
        grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right)
        for block in _blocks(left, right, len(a)):
            mine, i, j = grad[block], a[block], b[block]
            _add_rows(grad_left, i, torch.bmm(mine, right.index_select(0, j).transpose(1, 2)))
            _add_rows(grad_right, j, torch.bmm(left.index_select(0, i).transpose(1, 2), mine))
        return grad_left, grad_right, None, None


def _add_rows(total: Tensor, at: Tensor, rows: Tensor) -> None:
    """total[at] += rows, repeats summed in a fixed order: on a GPU index_add_ is not, the sorting index_put_ is."""
    if total.device.type == "cpu":
        total.index_add_(0, at, rows)
    else:
        total.index_put_((at,), rows, accumulate=True)


def _take(table: Tensor, at: Tensor) -> Tensor:
    """table (rows, columns)[at], with the same promise for the gradient."""
    if table.device.type != "cpu" or torch.compiler.is_compiling():
        return functional.embedding(at, table)
    taken: Tensor = _Take.apply(table, at)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    """index_select whose gradient is made contiguous first.

    A slice of a stack of look-ups, as in a DLRM, is added 4 to 9 times slower (40,000 x 64: 9 -> 2 ms).
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.rows = len(table)
        return table.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_add(0, at, grad.contiguous()), None


def _blocks(left: Tensor, right: Tensor, rows: int) -> list[slice]:
    size = max(1, BLOCK_ELEMENTS // (left[0].numel() + right[0].numel()))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _half_table(indices: Tensor, cores: Sequence[Tensor], row_modes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A table (rows, r_first columns, r_last) of one half with each wanted row once, and the places of `indices`."""
    wanted, place = _unique(indices, math.prod(row_modes))
    if math.prod(row_modes) <= WHOLE_HALF * len(wanted):
        return _whole_half(cores), indices
    return _some_half(wanted, cores, row_modes), place


def _whole_half(cores: Sequence[Tensor]) -> Tensor:
    """(rows, r_first columns, r_last) of all rows of a half."""
    count = len(cores)
    full = chain([core.reshape(core.shape[0], -1, core.shape[3]) for core in cores])
    full = full.reshape(cores[0].shape[0], *[size for core in cores for size in core.shape[1:3]], cores[-1].shape[3])
    order = [*range(1, 2 * count, 2), 0, *range(2, 2 * count + 1, 2), 2 * count + 1]
    rows = math.prod(core.shape[1] for core in cores)
    return full.permute(order).reshape(rows, -1, cores[-1].shape[3])


def _whole_halves(cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(A, columns_left, r) and (B, r, columns_right): every row of both halves of two or more cores."""
    middle = len(cores) // 2
    left, right = _whole_half(cores[:middle]), _whole_half(cores[middle:])
    return left, right.reshape(len(right), left.shape[2], -1)


def _some_half(wanted: Tensor, cores: Sequence[Tensor], row_modes: Sequence[int]) -> Tensor:
    """The same for the `wanted` rows alone: gather one slice of each core, multiply the stacks."""
    state: Tensor | None = None  # (u, r_first columns.., r_k)
    for k, core in enumerate(cores):
        digit = wanted // math.prod(row_modes[k + 1 :]) % row_modes[k]
        piece = _take(core.transpose(0, 1).flatten(1), digit)  # (u, r_k-1 column r_k)
        if state is None:
            state = piece.reshape(len(wanted), -1, core.shape[3])
        else:
            state = torch.bmm(state, piece.reshape(len(wanted), core.shape[0], -1))
            state = state.reshape(len(wanted), -1, core.shape[3])
    assert state is not None
    return state
