"""x -> (codes, scales) and back: blocks of 256 values, each over its largest magnitude, as 8-bit codes.

codes[i] = the code nearest to x[i] / scales[block], ties to the lower one; x[i] ~ map[codes[i]] * scales[block].
The map holds 256 sorted values, signed (-0.993 .. 1) for first moments, unsigned (0 .. 1) for second ones; zero and a
positive largest magnitude come back exactly. A block with a NaN gets a NaN scale: it never turns into numbers.

Tiling: one program takes BLOCKS blocks, a (BLOCKS, BLOCK) tile of the flat tensor. Saved: nothing. Backward: none,
this lives inside an optimizer step. Ranking a value takes eight look-ups in the map, which stays in the L1 cache.
Reference: `matrix_group.naive_quantize_blockwise`. Source: Dettmers et al., 8-bit optimizers via block-wise
quantization, section 2. Measured: `comera-lab bench --suite gpu`, op blockwise_quant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from comera_lab.kernels.cases import CompileCase
from comera_lab.kernels.matrix_group import BLOCK
from comera_lab.shapes import ShapeError

SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)  # stands in for the scale of a block of zeros
BLOCKS = 4  # 1,024 values a program: eight for each of 128 threads, one 128-bit load of half-precision values


@triton.jit
def nearest_code(value, map_ptr):
    """Number of the map's value nearest to `value` (any shape), ties to the lower one."""
    above = tl.zeros(value.shape, tl.int32)  # how many of the first 255 map values lie below `value`
    for level in tl.static_range(8):
        step = 128 >> level
        below = tl.load(map_ptr + above + (step - 1))
        above = tl.where(below < value, above + step, above)
    lower = tl.maximum(above - 1, 0)
    middle = 0.5 * (tl.load(map_ptr + lower) + tl.load(map_ptr + above))
    return tl.where(value > middle, above, lower)


@triton.jit
def encode_blocks(x, map_ptr):
    """x (blocks, block) fp32 -> codes (blocks, block) int32 and scales (blocks,) fp32."""
    scale = tl.max(tl.abs(x), axis=1)
    # tl.max skips NaN: a block that holds one must stay visibly broken
    scale = tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), scale)
    divisor = tl.maximum(scale, SMALLEST_NORMAL)[:, None]
    # the rounded division: x / x is exactly 1, so a positive largest magnitude survives
    return nearest_code(tl.div_rn(x, divisor), map_ptr), scale


@triton.jit
def _quantize_kernel(x_ptr, map_ptr, codes_ptr, scales_ptr, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # [BLOCKS]
    item = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
    x = tl.load(x_ptr + item, mask=item < count, other=0.0).to(tl.float32)
    codes, scale = encode_blocks(x, map_ptr)
    tl.store(codes_ptr + item, codes.to(tl.uint8), mask=item < count)
    tl.store(scales_ptr + block, scale, mask=block * BLOCK < count)


@triton.jit
def _dequantize_kernel(codes_ptr, scales_ptr, map_ptr, x_ptr, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # [BLOCKS]
    item = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
    codes = tl.load(codes_ptr + item, mask=item < count, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + block, mask=block * BLOCK < count, other=0.0)
    tl.store(x_ptr + item, tl.load(map_ptr + codes) * scale[:, None], mask=item < count)


def quantize_blockwise(x: Tensor, code: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """x of any shape, flattened, and a map (256,) fp32 -> codes (numel,) uint8, scales (ceil(numel / block),) fp32."""
    _check_map(code, block)
    flat = x.detach().reshape(-1)
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(_blocks(flat.numel(), block), dtype=torch.float32, device=x.device)
    if flat.numel():
        grid = (triton.cdiv(len(scales), BLOCKS),)
        _quantize_kernel[grid](flat.contiguous(), code, codes, scales, flat.numel(), BLOCK=block, BLOCKS=BLOCKS)
    return codes, scales


def dequantize_blockwise(
    codes: Tensor, scales: Tensor, code: Tensor, shape: tuple[int, ...] | torch.Size, block: int = BLOCK
) -> Tensor:
    """codes (numel,) uint8 and scales (ceil(numel / block),) fp32 -> values fp32 of `shape`. ShapeError if unfit."""
    _check_map(code, block)
    count = math.prod(shape)
    if codes.shape != (count,) or scales.shape != (_blocks(count, block),):
        raise ShapeError(
            f"{count} values of shape {tuple(shape)} need {count} codes and {_blocks(count, block)} scales, got "
            f"{tuple(codes.shape)} and {tuple(scales.shape)}. Give what quantize_blockwise returned."
        )
    x = torch.empty(shape, dtype=torch.float32, device=codes.device)
    if count:
        grid = (triton.cdiv(len(scales), BLOCKS),)
        _dequantize_kernel[grid](codes.contiguous(), scales, code, x, count, BLOCK=block, BLOCKS=BLOCKS)
    return x


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _check_map(code: Tensor, block: int) -> None:
    if code.shape != (256,) or code.dtype != torch.float32:
        raise ShapeError(f"code must be a float32 map of 256 values, got {tuple(code.shape)} {code.dtype}. Give all.")
    if block < 16 or block & (block - 1):
        raise ValueError(f"block must be a power of two from 16 up, got {block}. Use {BLOCK}.")


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels at the shipped tile, for the dtypes that optimizers hold."""
    constants = {"BLOCK": BLOCK, "BLOCKS": BLOCKS}
    coded = {"codes_ptr": "*u8:16", "scales_ptr": "*fp32:16", "map_ptr": "*fp32:16", "count": "i32:16"}
    for name in ("fp32", "bf16"):
        signature = {"x_ptr": f"*{name}:16", **coded}
        yield CompileCase(f"blockwise_quant quantize {name}", _quantize_kernel, signature, constants, 4, 3)
    yield CompileCase(
        "blockwise_quant dequantize fp32", _dequantize_kernel, {"x_ptr": "*fp32:16", **coded}, constants, 4, 3
    )
