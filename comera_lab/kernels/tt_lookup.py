"""rows[n] = A[a_n] B[b_n]: A (rows, columns_left, rank), B (rows, rank, columns_right), written as one row of a table.

Forward: one program per id and block of its columns, one product, each element of the output is written once. The
half-tables are small and stay in the L2 cache, so repeated ids are computed again rather than gathered.
Backward: A'[a] is the sum over ids with that a of dy_n B[b_n]^T, and B'[b] alike. Ids are sorted, so those of one
row lie side by side; a program owns one row of a half and a share of its ids, and runs through (id, inner column)
pairs as one summed axis. Shares are added in fp32 in a fixed order: no atomics, the same bits in each run.
Nothing waits for the GPU, so a CUDA graph can hold it. Saved: A, B, a, b. Recomputed: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from comera_lab.kernels import unsupported
from comera_lab.kernels.cases import CompileCase, Tile
from comera_lab.kernels.dot import Precision, block_rank, dot, dot_precision
from comera_lab.shapes import ShapeError

# By counting, not by timing: 16 rows are the least a matrix unit takes and fit a half with up to 16 columns.
FORWARD_TILES = (Tile(16, 64, 2, 1), Tile(32, 64, 4, 1))
BACKWARD_TILES = (Tile(16, 64, 4, 2), Tile(32, 64, 4, 2))
TILES = FORWARD_TILES + BACKWARD_TILES
# A row of a half that many ids share is split; more shares would only add up zeros of the other rows.
IDS_PER_SHARE, MOST_SHARES = 256, 8


@triton.jit
def _lookup_forward_kernel(
    left_ptr, right_ptr, a_ptr, b_ptr, out_ptr, columns_left, columns_right, width, columns,
    PRECISION: tl.constexpr, BLOCK_LEFT: tl.constexpr, BLOCK_RIGHT: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """out (ids, columns), columns <= columns_left columns_right."""
    item = tl.program_id(0).to(tl.int64)
    a, b = tl.load(a_ptr + item), tl.load(b_ptr + item)
    i = tl.program_id(1) * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    j = tl.program_id(2) * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    rank = tl.arange(0, BLOCK_RANK)
    i_ok, j_ok, rank_ok = i < columns_left, j < columns_right, rank < width
    left_at = left_ptr + (a * columns_left + i)[:, None] * width + rank[None, :]
    left = tl.load(left_at, mask=i_ok[:, None] & rank_ok[None, :], other=0.0)  # [BLOCK_LEFT, BLOCK_RANK]
    right_at = right_ptr + (b * width + rank)[:, None] * columns_right + j[None, :]
    right = tl.load(right_at, mask=rank_ok[:, None] & j_ok[None, :], other=0.0)  # [BLOCK_RANK, BLOCK_RIGHT]
    out = dot(left, right, tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32), PRECISION)
    column = i[:, None] * columns_right + j[None, :]
    ok = i_ok[:, None] & j_ok[None, :] & (column < columns)
    tl.store(out_ptr + item * columns + column, out.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _lookup_backward_kernel(
    grad_ptr, table_ptr, order_ptr, other_ptr, first_ptr, total_ptr, rows, outer, inner, width, columns,
    outer_stride, inner_stride, table_inner_stride, table_rank_stride,
    SHARES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_OUTER: tl.constexpr, BLOCK_INNER: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """total (SHARES, rows, outer, width): per row, its ids' gradients (outer, inner) times table[other] (inner, width).

    order: ids sorted by row; first[row]: where those of a row begin in it; other: each id's row of the other half.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = tl.program_id(2) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    rank = tl.arange(0, BLOCK_RANK)
    out_ok, rank_ok = out < outer, rank < width
    begin, end = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    share = (end - begin + SHARES - 1) // SHARES
    begin += part * share
    length = ((tl.minimum(begin + share, end) - begin) * inner).to(tl.int32)
    total = tl.zeros([BLOCK_OUTER, BLOCK_RANK], tl.float32)
    for start in range(0, length, BLOCK_INNER):
        pair = start + tl.arange(0, BLOCK_INNER)
        ok = pair < length
        item = tl.load(order_ptr + begin + pair // inner, mask=ok, other=0)
        other = tl.load(other_ptr + item, mask=ok, other=0)
        k = pair % inner
        column = out[:, None] * outer_stride + k[None, :] * inner_stride
        grad_ok = out_ok[:, None] & ok[None, :] & (column < columns)
        grad = tl.load(grad_ptr + item[None, :] * columns + column, mask=grad_ok, other=0.0)
        table_at = table_ptr + (other * inner * width + k * table_inner_stride)[:, None]
        table_ok = ok[:, None] & rank_ok[None, :]
        table = tl.load(table_at + rank[None, :] * table_rank_stride, mask=table_ok, other=0.0)
        total = dot(grad, table, total, PRECISION)  # [BLOCK_OUTER, BLOCK_RANK]
    total_at = total_ptr + ((part * rows + row) * outer + out)[:, None] * width + rank[None, :]
    tl.store(total_at, total, mask=out_ok[:, None] & rank_ok[None, :])


def _pick(tiles: tuple[Tile, Tile], size: int) -> Tile:
    return tiles[0] if size <= tiles[0].rows else tiles[1]


def _forward(left: Tensor, right: Tensor, a: Tensor, b: Tensor, columns: int, precision: Precision) -> Tensor:
    out = torch.empty(len(a), columns, dtype=left.dtype, device=left.device)
    columns_left, columns_right = left.shape[1], right.shape[2]
    tile = _pick(FORWARD_TILES, columns_left)
    grid = (len(a), triton.cdiv(columns_left, tile.rows), triton.cdiv(columns_right, tile.columns))
    if len(a):
        with torch.cuda.device_of(left):
            _lookup_forward_kernel[grid](
                left, right, a, b, out, columns_left, columns_right, left.shape[2], columns,
                PRECISION=precision, BLOCK_LEFT=tile.rows, BLOCK_RIGHT=tile.columns,
                BLOCK_RANK=block_rank(left.shape[2]), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return out


def _gradient(
    grad: Tensor, table: Tensor, mine: Tensor, other: Tensor, rows: int, outer: int, of_left: bool, precision: Precision
) -> Tensor:
    """The gradient of one half, (rows, outer, rank) in fp32: `outer` are its columns, `table` is the other half.

    mine, other (ids,): the rows of this half and of the other one. `grad` (ids, columns) is contiguous.
    """
    inner, width = (table.shape[2], table.shape[1]) if of_left else (table.shape[1], table.shape[2])
    strides = (inner, 1, 1, inner) if of_left else (1, outer, width, 1)
    shares = max(1, min(MOST_SHARES, len(mine) // IDS_PER_SHARE))
    in_order, order = torch.sort(mine, stable=True)
    first = torch.searchsorted(in_order, torch.arange(rows + 1, device=mine.device))
    total = torch.empty(shares, rows, outer, width, dtype=torch.float32, device=grad.device)
    tile = _pick(BACKWARD_TILES, outer)
    with torch.cuda.device_of(grad):
        _lookup_backward_kernel[(rows, shares, triton.cdiv(outer, tile.rows))](
            grad, table, order, other, first, total, rows, outer, inner, width, grad.shape[1], *strides,
            SHARES=shares, PRECISION=precision, BLOCK_OUTER=tile.rows, BLOCK_INNER=tile.columns,
            BLOCK_RANK=block_rank(width), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return total.sum(0)


class TTLookupFunction(torch.autograd.Function):
    """Saved: both halves and both lists of rows."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, a: Tensor, b: Tensor, columns: int, precision: Precision
    ) -> Tensor:
        ctx.precision = precision
        left, right, a, b = left.contiguous(), right.contiguous(), a.contiguous(), b.contiguous()
        ctx.save_for_backward(left, right, a, b)
        return _forward(left, right, a, b, columns, precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_left = grad_right = None
        if ctx.needs_input_grad[0]:
            total = _gradient(grad, right, a, b, len(left), left.shape[1], True, ctx.precision)
            grad_left = total.to(grad.dtype)
        if ctx.needs_input_grad[1]:
            total = _gradient(grad, left, b, a, len(right), right.shape[2], False, ctx.precision)
            grad_right = total.transpose(1, 2).to(grad.dtype)
        return grad_left, grad_right, None, None, None, None


def tt_lookup(
    left: Tensor, right: Tensor, a: Tensor, b: Tensor, columns: int | None = None, *, precision: Precision | None = None
) -> Tensor:
    """left (A, columns_left, rank)[a] times right (B, rank, columns_right)[b] -> (ids, columns).

    a, b (ids,) int64: rows of the halves, in range (not looked at: that would wait for the GPU). `columns` keeps the
    first of columns_left * columns_right; `precision` as in tt_linear. Differentiable once, in both halves.
    Raises ShapeError for sizes that do not fit, ValueError for dtypes, devices or ranks without a kernel.
    """
    fits = left.dim() == right.dim() == 3 and left.shape[2] == right.shape[1] and a.dim() == 1 and a.shape == b.shape
    full = left.shape[1] * right.shape[-1] if fits else 0
    columns = full if columns is None else columns
    if not fits or not 0 < columns <= full:
        raise ShapeError(
            f"sizes must fit: left (A, columns_left, rank), right (B, rank, columns_right), a and b (ids,), columns up "
            f"to {full}, got {[tuple(tensor.shape) for tensor in (left, right, a, b)]} and {columns}. Reshape them."
        )
    reason = unsupported(left.shape[2], left, right)
    if not reason and {a.dtype, b.dtype} != {torch.int64}:
        reason = f"rows must be int64, got {a.dtype} and {b.dtype}"
    if not reason and len(a) * full >= 2**31:
        reason = f"{len(a)} ids of {full} columns are 2**31 elements or more"
    if reason:
        raise ValueError(f"tt_lookup has no kernel for this: {reason}. Use lookup_rows with backend='torch'.")
    out: Tensor = TTLookupFunction.apply(left, right, a, b, columns, dot_precision(precision))
    return out


def naive_tt_lookup(left: Tensor, right: Tensor, a: Tensor, b: Tensor, columns: int | None = None) -> Tensor:
    """The obviously right twin of `tt_lookup`."""
    return torch.bmm(left[a], right[b]).flatten(1)[:, :columns]


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels at every tile, for the ranks 16 and 128 in bf16 and fp32, sizes divisible by 16."""
    for dtype, precision in (("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")):
        for rank in (16, 128):
            shared: dict[str, Any] = {"PRECISION": precision, "BLOCK_RANK": rank}
            for tile in FORWARD_TILES:
                pointers = {f"{name}_ptr": f"*{dtype}:16" for name in ("left", "right", "out")}
                pointers |= {"a_ptr": "*i64:16", "b_ptr": "*i64:16"}
                sizes = dict.fromkeys(("columns_left", "columns_right", "width", "columns"), "i32:16")
                constants = {"BLOCK_LEFT": tile.rows, "BLOCK_RIGHT": tile.columns}
                name = f"tt_lookup forward {dtype} {precision} {tile.rows}x{tile.columns} rank {rank}"
                kernel = _lookup_forward_kernel
                yield CompileCase(name, kernel, pointers | sizes, shared | constants, tile.warps, tile.stages)
            for tile in BACKWARD_TILES:
                pointers = {"grad_ptr": f"*{dtype}:16", "table_ptr": f"*{dtype}:16", "total_ptr": "*fp32:16"}
                pointers |= dict.fromkeys(("order_ptr", "other_ptr", "first_ptr"), "*i64:16")
                sizes = dict.fromkeys(("rows", "outer", "inner", "width", "columns"), "i32:16")
                sizes |= {"outer_stride": "i32:16", "table_rank_stride": "i32:16"}
                constants = {"inner_stride": 1, "table_inner_stride": 1, "SHARES": MOST_SHARES}
                constants |= {"BLOCK_OUTER": tile.rows, "BLOCK_INNER": tile.columns}
                name = f"tt_lookup backward {dtype} {precision} {tile.rows}x{tile.columns} rank {rank}"
                kernel = _lookup_backward_kernel
                yield CompileCase(name, kernel, pointers | sizes, shared | constants, tile.warps, tile.stages)
