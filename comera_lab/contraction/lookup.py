"""Rows of a TT-matrix table from ids, without building the table (CoMERA, arXiv 2405.14377, section on look-ups).

The train is cut in the middle: a row id splits into (a, b) = divmod(id, rows of the right half), and
row(id) = A[a] B[b] with A (columns_left, r) and B (r, columns_right). Two levels of repetition are removed:
each different id is computed once, and each different a and b is contracted once for all ids that share it.
Memory grows with the number of different ids, never with the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from comera_lab.cores import chain, cores_to_matrix
from comera_lab.shapes import TTMShape

# A half-table that holds at most this many times the wanted rows is built whole: one chain of products and an
# index are faster than gathering a stack of core slices.
WHOLE_HALF = 4


def naive_lookup_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """The obviously right twin of `lookup_rows`: index the dense table. ids (...) -> (..., columns)."""
    return functional.embedding(ids, cores_to_matrix(cores, shape))


def lookup_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """ids (...) int32 or int64 -> (..., columns). Gradients of repeated ids are summed in a fixed order on CPU.

    Raises TypeError for other ids, IndexError for an id outside [0, rows), before anything is computed.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}. Convert them with ids.long().")
    if ids.numel() == 0:
        return cores[0].new_zeros(*ids.shape, shape.columns) + 0 * sum(core.sum() for core in cores)
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= shape.rows:
        raise IndexError(
            f"ids must lie in [0, {shape.rows}), got {low if low < 0 else high}. Check the vocabulary size."
        )
    different, place = torch.unique(ids, return_inverse=True)
    middle = len(cores) // 2
    if middle == 0:
        rows = _half_rows(different, cores, shape.row_modes).reshape(len(different), -1)
        return functional.embedding(place, rows[:, : shape.columns])
    right_rows = math.prod(shape.row_modes[middle:])
    left = _half_rows(different // right_rows, cores[:middle], shape.row_modes[:middle])  # (u, columns_left, r)
    right = _half_rows(different % right_rows, cores[middle:], shape.row_modes[middle:])  # (u, r columns_right)
    rows = torch.bmm(left, right.reshape(len(different), left.shape[2], -1)).reshape(len(different), -1)
    return functional.embedding(place, rows[:, : shape.columns])


def _half_rows(indices: Tensor, cores: Sequence[Tensor], row_modes: Sequence[int]) -> Tensor:
    """Rows of one half-table: (u,) indices -> (u, r_first columns, r_last), each different index contracted once."""
    wanted, place = torch.unique(indices, return_inverse=True)
    if math.prod(row_modes) <= WHOLE_HALF * len(wanted):
        table, place = _whole_half(cores), indices
    else:
        table = _some_half(wanted, cores, row_modes)
    return table.index_select(0, place)


def _whole_half(cores: Sequence[Tensor]) -> Tensor:
    """(rows, r_first columns, r_last) of all rows of a half."""
    count = len(cores)
    full = chain([core.reshape(core.shape[0], -1, core.shape[3]) for core in cores])
    full = full.reshape(cores[0].shape[0], *[size for core in cores for size in core.shape[1:3]], cores[-1].shape[3])
    order = [*range(1, 2 * count, 2), 0, *range(2, 2 * count + 1, 2), 2 * count + 1]
    rows = math.prod(core.shape[1] for core in cores)
    return full.permute(order).reshape(rows, -1, cores[-1].shape[3])


def _some_half(wanted: Tensor, cores: Sequence[Tensor], row_modes: Sequence[int]) -> Tensor:
    """The same for the `wanted` rows alone: gather one slice of each core, multiply the stacks."""
    state: Tensor | None = None  # (u, r_first columns.., r_k)
    for k, core in enumerate(cores):
        digit = wanted // math.prod(row_modes[k + 1 :]) % row_modes[k]
        piece = core.transpose(0, 1).index_select(0, digit)  # (u, r_k-1, column, r_k)
        if state is None:
            state = piece.reshape(len(wanted), -1, core.shape[3])
        else:
            state = torch.bmm(state, piece.reshape(len(wanted), core.shape[0], -1))
            state = state.reshape(len(wanted), -1, core.shape[3])
    assert state is not None
    return state
