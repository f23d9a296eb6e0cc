"""out[0] = 1: the smallest kernel, launched once to learn whether kernels run here at all. One program, one store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _probe_kernel(out_ptr):
    tl.store(out_ptr, 1)


def launch(device: torch.device) -> int:
    """What the kernel wrote on `device`: 1."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _probe_kernel[(1,)](out)
    return int(out)
