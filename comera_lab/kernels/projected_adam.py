"""A COAP step for a stack of matrices of one shape: project, moments, lift, weight update.

    low = G P,  M = b1 M + (1 - b1) low,  V = b2 V + (1 - b2) low^2
    W = decay W - step_size (M / (sqrt(V) root + eps)) P^T

W, G (rows, cols), rows >= cols as a view; P (cols, rank); M, V (rows, rank) fp32, or 8-bit codes in blocks of 256.
The matrices stay where they are: the kernels read their addresses from a table, so nothing is stacked by a copy.

Tiling, and why not always one launch: every element of W needs its whole row of M and V, so a program must hold
(BLOCK_ROWS, rank) fp32 values and read all of P twice.
- rank <= 128 (64 in fp32): they fit the registers, one launch per stack (`_fused_kernel`).
- larger ranks: P's second-level cache traffic would pass that of G and W, so two launches, each a matrix product that
  ends in an update (`_project_kernel`, `_lift_kernel`). The direction between them costs 4 bytes a moment in bf16.
- 8-bit moments: a block of 256 codes crosses rows and needs its maximum first, so three launches.
Saved: nothing. Backward: none, this lives inside an optimizer step. The step is in place, and therefore not autotuned.
Reference: `matrix_group.naive_projected_adam`. Source: COAP, the projected Adam update. Measured: `bench --suite gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from comera_lab.kernels.blockwise_quant import BLOCKS, encode_blocks
from comera_lab.kernels.cases import CompileCase
from comera_lab.kernels.dot import dot
from comera_lab.kernels.matrix_group import BLOCK, MatrixGroup

TL_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _at(table_ptr, line, stack, item, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer to matrix `item` of a line: 0 weights, 1 gradients, 2 bases, 3 and 4 moments, 5 and 6 scales."""
    address = tl.load(table_ptr + line * stack + item)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def _updated_moments(low, exp_avg, exp_avg_sq, scalars_ptr):
    """The new moments and the direction, all shaped as `low`. Scalars: see matrix_group.adam_scalars."""
    root, eps = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    exp_avg = tl.load(scalars_ptr + 4) * exp_avg + tl.load(scalars_ptr + 5) * low
    exp_avg_sq = tl.load(scalars_ptr + 6) * exp_avg_sq + tl.load(scalars_ptr + 7) * low * low
    return exp_avg, exp_avg_sq, exp_avg / (tl.sqrt(exp_avg_sq) * root + eps)


@triton.jit
def _step_moments(table_ptr, scalars_ptr, stack, item, low, offsets, mask, ALIGN: tl.constexpr):
    """Update the fp32 moments of one tile in memory and return the direction."""
    exp_avg_ptr = _at(table_ptr, 3, stack, item, tl.float32, ALIGN)
    exp_avg_sq_ptr = _at(table_ptr, 4, stack, item, tl.float32, ALIGN)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    exp_avg, exp_avg_sq, direction = _updated_moments(low, exp_avg, exp_avg_sq, scalars_ptr)
    tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
    return direction


@triton.jit
def _step_weights(weight_ptrs, mask, lifted, scalars_ptr, VALUE: tl.constexpr):
    step_size, decay = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    weight = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(weight_ptrs, (weight * decay - step_size * lifted).to(VALUE), mask=mask)


@triton.jit
def _projected(
    gradient_ptr, basis_ptr, row, k, rows, cols, rank, stride_row, stride_col, basis_row, basis_col,
    VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G P for the rows `row` [BLOCK_ROWS] and the ranks `k` [BLOCK_RANK], in fp32."""
    low = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        gradient = tl.load(
            gradient_ptr + row[:, None] * stride_row + col[None, :] * stride_col,
            mask=(row < rows)[:, None] & (col < cols)[None, :],
            other=0.0,
        )  # [BLOCK_ROWS, BLOCK_COLS]
        basis = tl.load(
            basis_ptr + col[:, None] * basis_row + k[None, :] * basis_col,
            mask=(col < cols)[:, None] & (k < rank)[None, :],
            other=0.0,
        )  # [BLOCK_COLS, BLOCK_RANK]
        low = dot(gradient, basis.to(VALUE), low, PRECISION)
    return low


@triton.jit
def _fused_kernel(
    table_ptr, scalars_ptr, stack, rows, cols, rank, basis_row, basis_col, weight_row, weight_col,
    gradient_row, gradient_col, VALUE: tl.constexpr, BASIS: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_RANK)
    basis_ptr = _at(table_ptr, 2, stack, item, BASIS, ALIGN)
    low = _projected(
        _at(table_ptr, 1, stack, item, VALUE, ALIGN), basis_ptr, row, k, rows, cols, rank, gradient_row, gradient_col,
        basis_row, basis_col, VALUE, BLOCK_ROWS, BLOCK_COLS, BLOCK_RANK, PRECISION,
    )  # fmt: skip
    offsets = row[:, None] * rank + k[None, :]
    mask = (row < rows)[:, None] & (k < rank)[None, :]
    direction = _step_moments(table_ptr, scalars_ptr, stack, item, low, offsets, mask, ALIGN).to(VALUE)
    weight_ptr = _at(table_ptr, 0, stack, item, VALUE, ALIGN)
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        basis = tl.load(
            basis_ptr + col[None, :] * basis_row + k[:, None] * basis_col,
            mask=(col < cols)[None, :] & (k < rank)[:, None],
            other=0.0,
        )  # [BLOCK_RANK, BLOCK_COLS]
        lifted = dot(direction, basis.to(VALUE), tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32), PRECISION)
        _step_weights(
            weight_ptr + row[:, None] * weight_row + col[None, :] * weight_col,
            (row < rows)[:, None] & (col < cols)[None, :], lifted, scalars_ptr, VALUE,
        )  # fmt: skip


@triton.jit
def _project_kernel(
    table_ptr, scalars_ptr, out_ptr, stack, rows, cols, rank, basis_row, basis_col, gradient_row, gradient_col,
    VALUE: tl.constexpr, BASIS: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, MOMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """out (stack, rows, rank): the direction after the moments' update, or G P itself where MOMENTS is False."""
    item = tl.program_id(1)
    tiles = tl.cdiv(rank, BLOCK_RANK)
    # rank tiles are neighbours: they read the same rows of G while those are in the second-level cache
    row = (tl.program_id(0) // tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = (tl.program_id(0) % tiles) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    low = _projected(
        _at(table_ptr, 1, stack, item, VALUE, ALIGN), _at(table_ptr, 2, stack, item, BASIS, ALIGN),
        row, k, rows, cols, rank, gradient_row, gradient_col, basis_row, basis_col,
        VALUE, BLOCK_ROWS, BLOCK_COLS, BLOCK_RANK, PRECISION,
    )  # fmt: skip
    out_ptr += item.to(tl.int64) * rows * rank
    if MOMENTS:
        # half of the ranks after the other: three fp32 tiles at once would not fit the registers
        left, right = tl.split(tl.permute(tl.reshape(low, (BLOCK_ROWS, 2, BLOCK_RANK // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            k = (tl.program_id(0) % tiles) * BLOCK_RANK + half * (BLOCK_RANK // 2) + tl.arange(0, BLOCK_RANK // 2)
            offsets = row[:, None] * rank + k[None, :]
            mask = (row < rows)[:, None] & (k < rank)[None, :]
            part = right if half else left
            direction = _step_moments(table_ptr, scalars_ptr, stack, item, part, offsets, mask, ALIGN)
            tl.store(out_ptr + offsets, direction.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        mask = (row < rows)[:, None] & (k < rank)[None, :]
        tl.store(out_ptr + row[:, None] * rank + k[None, :], low.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lift_kernel(
    table_ptr, scalars_ptr, direction_ptr, stack, rows, cols, rank, basis_row, basis_col, weight_row, weight_col,
    VALUE: tl.constexpr, BASIS: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1)
    tiles = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (tl.program_id(0) % tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    basis_ptr = _at(table_ptr, 2, stack, item, BASIS, ALIGN)
    direction_ptr += item.to(tl.int64) * rows * rank
    lifted = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        k = first + tl.arange(0, BLOCK_RANK)
        direction = tl.load(
            direction_ptr + row[:, None] * rank + k[None, :],
            mask=(row < rows)[:, None] & (k < rank)[None, :],
            other=0.0,
        )  # [BLOCK_ROWS, BLOCK_RANK]
        basis = tl.load(
            basis_ptr + col[None, :] * basis_row + k[:, None] * basis_col,
            mask=(col < cols)[None, :] & (k < rank)[:, None],
            other=0.0,
        )  # [BLOCK_RANK, BLOCK_COLS]
        lifted = dot(direction, basis.to(VALUE), lifted, PRECISION)
    _step_weights(
        _at(table_ptr, 0, stack, item, VALUE, ALIGN)
        + row[:, None] * weight_row + col[None, :] * weight_col,
        (row < rows)[:, None] & (col < cols)[None, :], lifted, scalars_ptr, VALUE,
    )  # fmt: skip


@triton.jit
def _coded_moments_kernel(
    table_ptr, scalars_ptr, low_ptr, signed_ptr, unsigned_ptr, direction_ptr, stack, count, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """low (stack, count) fp32 -> direction (stack, count); codes and scales of both moments are rewritten."""
    item = tl.program_id(1)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # [BLOCKS]
    offsets = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
    mask, scale_mask = offsets < count, block * BLOCK < count
    first_ptr = _at(table_ptr, 3, stack, item, tl.uint8, ALIGN)
    second_ptr = _at(table_ptr, 4, stack, item, tl.uint8, ALIGN)
    first_scale_ptrs = _at(table_ptr, 5, stack, item, tl.float32, ALIGN) + block
    second_scale_ptrs = _at(table_ptr, 6, stack, item, tl.float32, ALIGN) + block
    exp_avg = tl.load(signed_ptr + tl.load(first_ptr + offsets, mask=mask, other=0).to(tl.int32))
    exp_avg *= tl.load(first_scale_ptrs, mask=scale_mask, other=0.0)[:, None]
    exp_avg_sq = tl.load(unsigned_ptr + tl.load(second_ptr + offsets, mask=mask, other=0).to(tl.int32))
    exp_avg_sq *= tl.load(second_scale_ptrs, mask=scale_mask, other=0.0)[:, None]
    start = item.to(tl.int64) * count
    low = tl.load(low_ptr + start + offsets, mask=mask, other=0.0)
    exp_avg, exp_avg_sq, direction = _updated_moments(low, exp_avg, exp_avg_sq, scalars_ptr)
    tl.store(direction_ptr + start + offsets, direction.to(direction_ptr.dtype.element_ty), mask=mask)
    codes, scale = encode_blocks(tl.where(mask, exp_avg, 0.0), signed_ptr)
    tl.store(first_ptr + offsets, codes.to(tl.uint8), mask=mask)
    tl.store(first_scale_ptrs, scale, mask=scale_mask)
    codes, scale = encode_blocks(tl.where(mask, exp_avg_sq, 0.0), unsigned_ptr)
    tl.store(second_ptr + offsets, codes.to(tl.uint8), mask=mask)
    tl.store(second_scale_ptrs, scale, mask=scale_mask)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Block sizes of one launch and how many warps and pipeline stages it gets."""

    rows: int
    cols: int
    rank: int
    warps: int = 8
    stages: int = 3


# Chosen by the static report (no spills, three stages inside the shared memory of an A100) and the byte counts of the
# header; `comera-lab bench --suite gpu` times them against cuBLAS. Half-precision values take twice the depth.
TILES = {
    "fused": {2: Blocks(rows=64, cols=64, rank=128), 4: Blocks(rows=64, cols=32, rank=64)},
    "project": {2: Blocks(rows=128, cols=64, rank=128), 4: Blocks(rows=64, cols=32, rank=64, warps=4)},
    "lift": {2: Blocks(rows=128, cols=128, rank=64), 4: Blocks(rows=64, cols=64, rank=32, warps=4)},
}


def projected_adam(group: MatrixGroup, scalars: Tensor, *, precision: str = "tf32x3") -> None:
    """One step in place on weights and moments. `scalars` (8,) fp32 on the device: see matrix_group.adam_scalars.

    `precision` is that of fp32 products (tl.dot's input_precision); half-precision values ignore it. Raises ValueError,
    before anything is written, for dtypes that have no kernel.
    """
    if scalars.shape != (8,) or scalars.dtype != torch.float32:
        raise ValueError(
            f"scalars must be the 8 fp32 values of adam_scalars, got {tuple(scalars.shape)} {scalars.dtype}."
        )
    weight, basis, moment = group.weights[0], group.bases[0], group.exp_avgs[0]
    if weight.dtype not in TL_TYPES or basis.dtype not in TL_TYPES or moment.dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            f"weights and bases must be fp32, bf16 or fp16 and moments fp32 or 8-bit codes, got {weight.dtype}, "
            f"{basis.dtype}, {moment.dtype}. Use the torch path."
        )
    rows, cols, rank = group.sizes
    stack, size = len(group.weights), weight.element_size()
    common = {
        "VALUE": TL_TYPES[weight.dtype],
        "BASIS": TL_TYPES[basis.dtype],
        "ALIGN": 16 if all(address % 16 == 0 for address in group.addresses) else 1,
        "PRECISION": precision,
    }
    weight_strides, gradient_strides = weight.stride(), group.gradients[0].stride()
    tile = TILES["fused"][size]
    if rank <= tile.rank and group.scales is None:
        padded = max(16, triton.next_power_of_2(rank))
        _fused_kernel[(triton.cdiv(rows, tile.rows), stack)](
            group.table, scalars, stack, rows, cols, rank,
            *basis.stride(), *weight_strides, *gradient_strides, **common,
            BLOCK_ROWS=tile.rows, BLOCK_COLS=tile.cols, BLOCK_RANK=padded,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    coded = group.scales is not None
    out = torch.empty(stack, rows, rank, dtype=torch.float32 if coded else weight.dtype, device=weight.device)
    tile = TILES["project"][size]
    _project_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(rank, tile.rank), stack)](
        group.table, scalars, out, stack, rows, cols, rank, *basis.stride(), *gradient_strides,
        **common, MOMENTS=not coded, BLOCK_ROWS=tile.rows, BLOCK_COLS=tile.cols, BLOCK_RANK=tile.rank,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if group.maps is not None:
        low, out = out, torch.empty_like(out, dtype=weight.dtype)
        _coded_moments_kernel[(triton.cdiv(triton.cdiv(rows * rank, BLOCK), BLOCKS), stack)](
            group.table, scalars, low, *group.maps, out, stack, rows * rank, common["ALIGN"], BLOCK=BLOCK, BLOCKS=BLOCKS
        )
    tile = TILES["lift"][size]
    _lift_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(cols, tile.cols), stack)](
        group.table, scalars, out, stack, rows, cols, rank, *basis.stride(), *weight_strides, **common,
        BLOCK_ROWS=tile.rows, BLOCK_COLS=tile.cols, BLOCK_RANK=tile.rank,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel at every shipped tile, for weights as they lie in memory and, in bf16, for transposed views."""
    shape = {"table_ptr": "*i64:16", "scalars_ptr": "*fp32:16", "stack": "i32", "cols": "i32:16"}
    shape |= {"rank": "i32:16", "basis_col": "i32:16"}  # a basis comes out of a factorisation column after column
    for size, value, name in ((2, tl.bfloat16, "bf16"), (4, tl.float32, "fp32")):
        common = {"basis_row": 1, "VALUE": value, "BASIS": value, "ALIGN": 16, "PRECISION": "tf32x3"}
        for layout, steady in (("rows", "col"), ("columns", "row"))[: 2 if size == 2 else 1]:
            moving = "row" if steady == "col" else "col"
            shape["rows"] = "i32" if steady == "col" else "i32:16"
            weight = ({f"weight_{moving}": "i32:16"}, {f"weight_{steady}": 1})
            gradient = ({f"gradient_{moving}": "i32:16"}, {f"gradient_{steady}": 1})
            for kind, kernel, strides, more, flags in (
                ("fused", _fused_kernel, [weight, gradient], {}, [{}]),
                ("project", _project_kernel, [gradient], {"out_ptr": f"*{name}:16"}, [{"MOMENTS": True}]),
                ("project 8-bit", _project_kernel, [gradient], {"out_ptr": "*fp32:16"}, [{"MOMENTS": False}]),
                ("lift", _lift_kernel, [weight], {"direction_ptr": f"*{name}:16"}, [{}]),
            ):
                tile = TILES[kind.partition(" ")[0]][size]
                blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_COLS": tile.cols, "BLOCK_RANK": tile.rank}
                signature, constants = shape | more, common | blocks | flags[0]
                for typed, fixed in strides:
                    signature, constants = signature | typed, constants | fixed
                yield CompileCase(
                    f"projected_adam {kind} {name} {layout}", kernel, signature, constants, tile.warps, tile.stages
                )
        signature = {"table_ptr": "*i64:16", "scalars_ptr": "*fp32:16", "low_ptr": "*fp32:16"}
        signature |= {"signed_ptr": "*fp32:16", "unsigned_ptr": "*fp32:16", "direction_ptr": f"*{name}:16"}
        signature |= {"stack": "i32", "count": "i32:16"}
        constants = {"ALIGN": 16, "BLOCK": BLOCK, "BLOCKS": BLOCKS}
        yield CompileCase(f"projected_adam 8-bit moments {name}", _coded_moments_kernel, signature, constants, 4, 3)
