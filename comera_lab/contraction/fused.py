"""Where a triton kernel serves a contraction instead of torch: the choice and the call. Imports triton only then."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera_lab.kernels import MAX_RANK, takes_triton, unsupported
from comera_lab.shapes import TTMShape

# The kernel for look-ups wants both half-tables whole: 256 MiB in float32 at most.
HALF_ELEMENTS = 2**26


def linear_is_fused(x: Tensor, weights: Sequence[Tensor], rank: int, backend: str | None, halves: bool) -> bool:
    """Whether the kernel computes y from x and these cores and bias; `halves`: no other order was forced.

    Raises ValueError as `takes_triton`.
    """
    if backend is None and not x.is_cuda:
        return False
    if torch.compiler.is_compiling():
        reason: str | None = "torch.compile is tracing, and fuses the torch code itself"
    elif not halves:
        reason = "cuts force another order than half-chains"
    else:
        reason = unsupported(rank, x, *weights, dtype=_autocast_dtype(x))
    return takes_triton(backend, x.device, reason)


def fused_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, in), left (in, rank), right (rank, out) -> (rows, out), in autocast's dtype where that is on."""
    from comera_lab.kernels.tt_linear import tt_linear

    dtype = _autocast_dtype(x) or x.dtype
    return tt_linear(x.to(dtype), left.to(dtype), right.to(dtype), None if bias is None else bias.to(dtype))


def fused_together(x: Tensor, maps: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor] | None:
    """One (rows, out) per (left, right, bias) of `maps` in one launch; None where their ranks together are too many.

    The lefts lie side by side and the rights along a diagonal. For k equal maps the second product meets k times as
    many numbers, k - 1 of k zero, which such thin layers have time for: x is read once instead of k times, forward
    and for the lefts' gradient, and its own gradient is written once instead of being added up.
    """
    if sum(left.shape[1] for left, _, _ in maps) > MAX_RANK:
        return None
    rights = [right for _, right, _ in maps]
    widths = [right.shape[1] for right in rights]
    given = [bias for _, _, bias in maps]
    bias = None
    if any(one is not None for one in given):
        bias = torch.cat([right.new_zeros(right.shape[1]) if one is None else one
                          for one, right in zip(given, rights, strict=True)])  # fmt: skip
    out = fused_linear(x, torch.cat([left for left, _, _ in maps], dim=1), torch.block_diag(*rights), bias)  # type: ignore[no-untyped-call]
    return list(torch.split(out, widths, dim=1))


def lookup_is_fused(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape, backend: str | None) -> bool:
    """Whether the kernel computes the rows of these ids. Raises ValueError as `takes_triton`."""
    if backend is None and not ids.is_cuda:
        return False
    middle = len(cores) // 2
    rank = shape.ranks[middle]
    elements = max(math.prod(shape.modes[:middle]), math.prod(shape.modes[middle:])) * rank
    if torch.compiler.is_compiling():
        reason: str | None = "torch.compile is tracing, and fuses the torch code itself"
    elif middle == 0:
        reason = "a table of one core has no halves"
    elif elements > HALF_ELEMENTS:
        reason = f"a half-table of {elements:,} elements is too large to build whole"
    elif ids.device != cores[0].device:
        reason = f"the ids are on {ids.device}, the cores on {cores[0].device}"
    else:
        reason = unsupported(rank, *cores)
    return takes_triton(backend, ids.device, reason)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else None
