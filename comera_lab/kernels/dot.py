"""A product of blocks that means the same compiled and interpreted, and how exact it is in fp32."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

Precision = Literal["ieee", "tf32"]
RANK_MULTIPLE = 16
# The interpreter of triton 3.6 and 3.7.1 multiplies the bit patterns of bf16. Products of bf16 are exact in fp32.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, total, PRECISION: tl.constexpr):
    """total + left right: [m, k] x [k, n] + [m, n], the sum in fp32."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


def dot_precision(wished: Precision | None) -> Precision:
    """How fp32 is multiplied: as wished, or as torch.get_float32_matmul_precision() says. ValueError for others."""
    if wished not in (None, "ieee", "tf32"):
        raise ValueError(f"precision must be None, 'ieee' or 'tf32', got {wished!r}. 'ieee' is the exact one.")
    return wished or ("ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32")


def block_rank(width: int) -> int:
    """The power of two, 16 or more, that a block of `width` ranks takes in registers."""
    return max(RANK_MULTIPLE, int(triton.next_power_of_2(width)))
