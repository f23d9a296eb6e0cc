"""A product of blocks that means the same compiled and interpreted."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter of triton 3.6 and 3.7.1 multiplies the bit patterns of bf16. Products of bf16 are exact in fp32.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, total, PRECISION: tl.constexpr):
    """total + left right: [m, k] x [k, n] + [m, n], the sum in fp32."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)
