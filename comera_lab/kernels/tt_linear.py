"""y = (x A) B + bias: x (rows, in), A (in, rank), B (rank, out), bias (out,); each element of x and y moves once.

Forward, one launch: a program owns BLOCK_ROWS rows. It sums x A over blocks of columns in fp32, rounds it to the
dtype of x, keeps it, then writes y block by block. With few rows several programs share the columns of y and each
repeats x A.
Backward, two passes: (1) the same kernel on transposed halves, g = dy B^T kept and dx = g A^T; (2) A' = x^T g,
B' = (x A)^T dy and bias' = sum of dy, by blocks of rows whose fp32 sums are added in a fixed order.
Moved in all: 3 (in + out) elements a row. Saved: x, A, B, x A. Recomputed: nothing.
A and B are widened to a multiple of 16 ranks and laid so that the summed axis runs fastest, as tf32 needs it.
Gates need no kernel: they are multiplied into the cores that A and B come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from comera_lab.kernels import unsupported
from comera_lab.kernels.cases import CompileCase, Tile
from comera_lab.kernels.dot import RANK_MULTIPLE, Precision, block_rank, dot, dot_precision
from comera_lab.shapes import ShapeError

# Programs that fill the GPU: the multiprocessors of an H100 or H200.
PROGRAMS = 132
# Tiles by the kind of products: (rows at least, padded rank at most, tile), the first that fits is taken.
# Chosen by counting, not by timing (`tune` times): 128 rows halve the reads of A and B from the L2 cache, which at
# 64 rows and 4096 -> 4096, rank 64 equal those of x and y; below 100 programs of them 64 rows fill the GPU better, and
# 16 are for batches where nothing fills it. Stages: two programs of a tile fit the shared memory of one processor.
ROW_TILES: dict[str, tuple[tuple[int, int, Tile], ...]] = {
    "half": (
        (12_800, 64, Tile(128, 64, 8, 4)),
        (12_800, 128, Tile(128, 64, 8, 3)),
        (257, 128, Tile(64, 64, 4, 3)),
        (0, 128, Tile(16, 64, 4, 3)),
    ),
    "tf32": (
        (12_800, 64, Tile(128, 32, 8, 3)),
        (257, 128, Tile(64, 32, 8, 3)),
        (0, 128, Tile(16, 32, 4, 3)),
    ),
    "ieee": (
        (257, 128, Tile(64, 32, 8, 2)),
        (0, 128, Tile(16, 32, 4, 2)),
    ),
}
# The second pass: rows are the summed axis, columns those of x or dy.
SUM_TILES: dict[str, tuple[tuple[int, int, Tile], ...]] = {
    "half": ((0, 128, Tile(64, 128, 8, 3)),),
    "tf32": ((0, 128, Tile(32, 64, 8, 3)),),
    "ieee": ((0, 64, Tile(32, 64, 8, 3)), (0, 128, Tile(32, 32, 8, 3))),
}
TILES = tuple({tile for table in (ROW_TILES, SUM_TILES) for rows in table.values() for _, _, tile in rows})
_tuned: dict[tuple[Any, ...], Tile] = {}


@triton.jit
def _rows_kernel(
    x_ptr, left_ptr, right_ptr, bias_ptr, inner_ptr, out_ptr,
    rows, in_features, out_features, width, x_stride, share,
    HAS_BIAS: tl.constexpr, KEEP_INNER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """x (rows, in) -> out (rows, out), inner (rows, width); left (width, in), right (out, width)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rank = tl.arange(0, BLOCK_RANK)
    columns = tl.arange(0, BLOCK_COLUMNS)
    row_ok, rank_ok = row < rows, rank < width
    total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for start in range(0, in_features, BLOCK_COLUMNS):
        column = start + columns
        ok = column < in_features
        x_at = x_ptr + row[:, None] * x_stride + column[None, :]
        x = tl.load(x_at, mask=row_ok[:, None] & ok[None, :], other=0.0)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        left_at = left_ptr + rank[None, :] * in_features + column[:, None]
        left = tl.load(left_at, mask=ok[:, None] & rank_ok[None, :], other=0.0)  # [BLOCK_COLUMNS, BLOCK_RANK]
        total = dot(x, left, total, PRECISION)
    inner = total.to(out_ptr.dtype.element_ty)  # [BLOCK_ROWS, BLOCK_RANK]
    if KEEP_INNER and tl.program_id(1) == 0:
        inner_at = inner_ptr + row[:, None] * width + rank[None, :]
        tl.store(inner_at, inner, mask=row_ok[:, None] & rank_ok[None, :])
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, out_features), BLOCK_COLUMNS):
        column = start + columns
        ok = column < out_features
        right_at = right_ptr + column[None, :] * width + rank[:, None]
        right = tl.load(right_at, mask=rank_ok[:, None] & ok[None, :], other=0.0)  # [BLOCK_RANK, BLOCK_COLUMNS]
        out = dot(inner, right, tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32), PRECISION)
        if HAS_BIAS:
            out += tl.load(bias_ptr + column, mask=ok, other=0.0).to(tl.float32)[None, :]
        out_at = out_ptr + row[:, None] * out_features + column[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & ok[None, :])


@triton.jit
def _sums_kernel(
    wide_ptr, thin_ptr, out_ptr, sums_ptr, rows, columns, width, wide_stride, share,
    HAS_SUMS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """wide (rows, columns), thin (rows, width) -> out (shares, columns, width), sums (shares, columns), fp32."""
    part = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rank = tl.arange(0, BLOCK_RANK)
    ok, rank_ok = column < columns, rank < width
    total = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
    # Column sums as a product with ones, 16 wide as the matrix units want: no reduction between warps.
    sixteen = tl.arange(0, 16)
    sums = tl.zeros([BLOCK_COLUMNS, 16], tl.float32)
    ones = tl.full([BLOCK_ROWS, 16], 1.0, tl.float32).to(wide_ptr.dtype.element_ty)
    first = part * share
    for start in range(first, tl.minimum(first + share, rows), BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        row_ok = row < rows
        wide_at = wide_ptr + row[:, None] * wide_stride + column[None, :]
        wide = tl.load(wide_at, mask=row_ok[:, None] & ok[None, :], other=0.0)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        thin_at = thin_ptr + row[:, None] * width + rank[None, :]
        thin = tl.load(thin_at, mask=row_ok[:, None] & rank_ok[None, :], other=0.0)  # [BLOCK_ROWS, BLOCK_RANK]
        total = dot(tl.trans(wide), thin, total, PRECISION)
        if HAS_SUMS:
            sums = dot(tl.trans(wide), ones, sums, PRECISION)
    place = part * columns + column
    tl.store(out_ptr + place[:, None] * width + rank[None, :], total, mask=ok[:, None] & rank_ok[None, :])
    if HAS_SUMS:
        sums_at = sums_ptr + place[:, None] + 0 * sixteen[None, :]
        tl.store(sums_at, sums, mask=ok[:, None] & (sixteen == 0)[None, :])


def _kind(dtype: torch.dtype, precision: Precision) -> str:
    return precision if dtype == torch.float32 else "half"


def _pick(table: dict[str, tuple[tuple[int, int, Tile], ...]], kind: str, rows: int, width: int) -> Tile:
    return next(tile for least, most, tile in table[kind] if rows >= least and width <= most)


def _by_rows(tensor: Tensor) -> Tensor:
    """The same values with columns side by side; rows may lie anywhere."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _rows_forward(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, keep: bool, precision: Precision, tile: Tile | None
) -> tuple[Tensor, Tensor | None]:
    """x (rows, in), left (in, width), right (width, out) -> (rows, out) and, if kept, x left (rows, width)."""
    (rows, in_features), (width, out_features) = x.shape, right.shape
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    inner = torch.empty(rows, width, dtype=x.dtype, device=x.device) if keep else None
    if rows == 0:
        return out, inner
    kind = _kind(x.dtype, precision)
    tile = tile or _tuned.get((rows, in_features, out_features, width, kind)) or _pick(ROW_TILES, kind, rows, width)
    blocks, steps = triton.cdiv(rows, tile.rows), triton.cdiv(out_features, tile.columns)
    share = triton.cdiv(steps, max(1, PROGRAMS // blocks)) * tile.columns
    x = _by_rows(x)
    with torch.cuda.device_of(x):
        _rows_kernel[(blocks, triton.cdiv(out_features, share))](
            x, left.t().contiguous(), right.t().contiguous(), out if bias is None else bias.contiguous(),
            out if inner is None else inner, out, rows, in_features, out_features, width, x.stride(0), share,
            HAS_BIAS=bias is not None, KEEP_INNER=keep, PRECISION=precision,
            BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns, BLOCK_RANK=block_rank(width),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, inner


def _sums_over_rows(
    wide: Tensor, thin: Tensor, want_sums: bool, precision: Precision, tile: Tile | None = None
) -> tuple[Tensor, Tensor | None]:
    """wide (rows, columns), thin (rows, width) -> wide^T thin (columns, width) and column sums of wide, fp32."""
    (rows, columns), width = wide.shape, thin.shape[1]
    kind = _kind(wide.dtype, precision)
    tile = tile or _pick(SUM_TILES, kind, rows, width)
    blocks, steps = triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)
    # The split depends on sizes alone, so the order of the additions is the same in each run.
    share = triton.cdiv(max(steps, 1), max(1, PROGRAMS // blocks)) * tile.rows
    parts = max(1, triton.cdiv(rows, share))
    total = torch.empty(parts, columns, width, dtype=torch.float32, device=wide.device)
    sums = torch.empty(parts, columns, dtype=torch.float32, device=wide.device) if want_sums else None
    wide, thin = _by_rows(wide), thin.contiguous()
    with torch.cuda.device_of(wide):
        _sums_kernel[(blocks, parts)](
            wide, thin, total, total if sums is None else sums, rows, columns, width, wide.stride(0), share,
            HAS_SUMS=want_sums, PRECISION=precision,
            BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns, BLOCK_RANK=block_rank(width),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return total.sum(0), None if sums is None else sums.sum(0)


class TTLinearFunction(torch.autograd.Function):
    """Saved: x, A and B widened, x A; only what the wanted gradients need."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None,
        grad_enabled: bool, precision: Precision, tile: Tile | None,
    ) -> Tensor:  # fmt: skip
        want_x, want_left, want_right = (wanted and grad_enabled for wanted in ctx.needs_input_grad[:3])
        ctx.precision, ctx.rank, ctx.tile = precision, left.shape[1], tile
        wider = -left.shape[1] % RANK_MULTIPLE
        left, right = functional.pad(left, (0, wider)), functional.pad(right, (0, 0, 0, wider))
        out, inner = _rows_forward(x, left, right, bias, want_right, precision, tile)
        ctx.save_for_backward(
            x if want_left else None, left if want_x else None, right if want_x or want_left else None, inner
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, left, right, inner = ctx.saved_tensors
        want_x, want_left, want_right, want_bias = ctx.needs_input_grad[:4]
        grad_x = grad_left = grad_right = grad_bias = inner_grad = None
        grad = _by_rows(grad)
        if want_x:
            grad_x, inner_grad = _rows_forward(grad, right.t(), left.t(), None, want_left, ctx.precision, ctx.tile)
        if want_left:
            total, _ = _sums_over_rows(x, grad @ right.t() if inner_grad is None else inner_grad, False, ctx.precision)
            grad_left = total[:, : ctx.rank].to(grad.dtype)
        if want_right:
            total, sums = _sums_over_rows(grad, inner, want_bias, ctx.precision)
            grad_right = total[:, : ctx.rank].t().to(grad.dtype)
            grad_bias = None if sums is None else sums.to(grad.dtype)
        elif want_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_left, grad_right, grad_bias, None, None, None


def tt_linear(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, *,
    precision: Precision | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x (rows, in), left (in, rank), right (rank, out), bias (out,) -> (rows, out) = (x left) right + bias.

    `precision` names the products of fp32: "ieee", or "tf32" on the matrix units; None follows
    torch.get_float32_matmul_precision(). `tile` forces one of the shipped tiles. Differentiable once.
    Raises ShapeError for sizes that do not chain, ValueError for a dtype, device or rank without a kernel.
    """
    _check(x, left, right, bias)
    out: Tensor = TTLinearFunction.apply(x, left, right, bias, torch.is_grad_enabled(), dot_precision(precision), tile)
    return out


def _check(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    sizes = [tuple(tensor.shape) for tensor in (x, left, right)]
    fits = [len(size) for size in sizes] == [2, 2, 2] and x.shape[1] == len(left) and left.shape[1] == len(right)
    if not fits or (bias is not None and bias.shape != right.shape[1:]):
        raise ShapeError(
            f"sizes must chain: x (rows, in), left (in, rank), right (rank, out), bias (out,), got {sizes} and "
            f"{None if bias is None else tuple(bias.shape)}. Reshape them."
        )
    if reason := unsupported(left.shape[1], x, left, right, *([] if bias is None else [bias])):
        raise ValueError(f"tt_linear has no kernel for this: {reason}. Use apply_cores with backend='torch'.")


def naive_tt_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """The obviously right twin of `tt_linear`."""
    out = x @ left @ right
    return out if bias is None else out + bias


def candidates(rank: int, dtype: torch.dtype, precision: Precision = "ieee") -> list[Tile]:
    """The shipped tiles that `tune` tries for this rank and dtype."""
    kind, width = _kind(dtype, precision), rank + -rank % RANK_MULTIPLE
    return [tile for _, most, tile in ROW_TILES[kind] if width <= most]


def tune(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, *,
    precision: Precision = "ieee", measure: Callable[[Callable[[], Tensor]], float] | None = None,
) -> Tile:  # fmt: skip
    """Time every candidate tile on this call and use the fastest for its sizes from now on; returns it.

    `measure` maps a call to its time in ms; by default the median of triton.testing.do_bench, which needs a GPU.
    """
    _check(x, left, right, bias)
    measure = measure or (lambda call: triton.testing.do_bench(call, return_mode="median"))
    rank = left.shape[1]
    times = {
        tile: measure(partial(tt_linear, x, left, right, bias, precision=precision, tile=tile))
        for tile in candidates(rank, x.dtype, precision)
    }
    key = (len(x), len(left), right.shape[1], rank + -rank % RANK_MULTIPLE, _kind(x.dtype, precision))
    _tuned[key] = min(times, key=lambda tile: times[tile])
    return _tuned[key]


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels at every shipped tile, the smallest and the largest rank it serves, sizes divisible by 16."""
    names = {"half": "bf16", "tf32": "fp32", "ieee": "fp32"}
    shared = dict.fromkeys(("rows", "width", "share"), "i32:16")
    for kind, dtype in names.items():
        precision = "ieee" if kind == "half" else kind
        pointer = f"*{dtype}:16"
        for table, kernel in ((ROW_TILES, _rows_kernel), (SUM_TILES, _sums_kernel)):
            for tile, rank in {(tile, rank) for _, most, tile in table[kind] for rank in {16, most}}:
                constants: dict[str, Any] = {"PRECISION": precision, "BLOCK_RANK": rank}
                constants |= {"BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns}
                if kernel is _rows_kernel:
                    signature = {f"{name}_ptr": pointer for name in ("x", "left", "right", "bias", "inner", "out")}
                    signature |= dict.fromkeys(("in_features", "out_features", "x_stride"), "i32:16")
                    constants |= {"HAS_BIAS": True, "KEEP_INNER": True}
                else:
                    signature = {"wide_ptr": pointer, "thin_ptr": pointer, "out_ptr": "*fp32:16"}
                    signature |= {"sums_ptr": "*fp32:16", "columns": "i32:16", "wide_stride": "i32:16"}
                    constants["HAS_SUMS"] = True
                part = "rows" if kernel is _rows_kernel else "sums"
                name = f"tt_linear {part} {dtype} {precision} {tile.rows}x{tile.columns}x{tile.stages} rank {rank}"
                yield CompileCase(name, kernel, signature | shared, constants, tile.warps, tile.stages)
