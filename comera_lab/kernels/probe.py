"""out[0] = count: the smallest kernel with a loop, launched once to learn whether kernels run here at all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COUNT = 3


@triton.jit
def _probe_kernel(out_ptr, count):
    # Bounds known at run time only: the interpreter of triton 3.6 fails on them beside numpy 2.4.
    total = 0
    for _ in range(count):
        total += 1
    tl.store(out_ptr, total)


def wrote(device: torch.device) -> int:
    """What the kernel wrote on `device`; it should be COUNT."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _probe_kernel[(1,)](out, COUNT)
    return int(out)
