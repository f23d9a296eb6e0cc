"""8-bit optimizer state as plain tensors: uint8 codes and one float32 scale per block of 256 values.

A value x of a block is kept as the nearest entry of a map of 256 numbers to x / (largest magnitude of the block).
The maps are the dynamic ones of Dettmers et al. (2022, arXiv 2110.02861, section 2): ten-fold ranges, each cut into
equal cells, finer towards 1. First moments take the signed map, second moments, which are never negative, the
unsigned one. Tensors under 4,096 values stay in float32: little is to be gained, and norms and biases are delicate.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers.sharding import local
from comera_lab.shapes import ShapeError

BLOCK = 256
MIN_ELEMENTS = 4096
_DECADES = 7


@functools.cache
def signed_map() -> Tensor:
    """256 sorted numbers of -0.993 .. 1 with 0 (float32): 2^k cells in the k-th of seven decades, both signs."""
    with torch.device("cpu"):  # the first call may come under another default device, and the result is kept
        positive = _cell_centres(1)
        return torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)])


@functools.cache
def unsigned_map() -> Tensor:
    """256 sorted numbers of 0 .. 1 (float32): twice as many cells per decade as `signed_map`."""
    with torch.device("cpu"):
        return torch.cat([torch.zeros(1), _cell_centres(2), torch.ones(1)])


def quantize_blockwise(x: Tensor, code: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """x of any shape, flattened -> codes uint8 (numel,) and scales float32 (blocks,), the largest magnitudes.

    `code` is a sorted map of 256 numbers. Zero and a positive largest magnitude of a block come back exactly (the
    signed map ends at -0.993); a block of zeros gets the scale 0 and comes back as zeros. Ties go to the lower code.
    """
    _check_code(code)
    flat = x.detach().reshape(-1).to(torch.float32)
    count = flat.numel()
    if count == 0:
        return flat.to(torch.uint8), flat
    padded = torch.nn.functional.pad(flat, (0, -count % block)).view(-1, block)
    scales = padded.abs().amax(1)
    # a scale below the smallest normal number has no finite reciprocal; dividing by it is exact
    unit = padded / scales.clamp_min(torch.finfo(torch.float32).smallest_normal).unsqueeze(1)
    return _nearest(unit.view(-1)[:count], code), scales


def dequantize_blockwise(
    codes: Tensor, scales: Tensor, code: Tensor, shape: tuple[int, ...] | torch.Size, block: int = BLOCK
) -> Tensor:
    """codes (numel,) and scales (blocks,) -> float32 of `shape`. Raises ShapeError where they do not fit."""
    count = math.prod(shape)
    if codes.numel() != count or scales.numel() != -(-count // block):
        raise ShapeError(
            f"{count} values of shape {tuple(shape)} need {count} codes and {-(-count // block)} scales, "
            f"got {codes.numel()} and {scales.numel()}. Give what quantize_blockwise returned."
        )
    values = code.to(codes.device).index_select(0, codes.to(torch.int32))
    whole = count // block * block
    values[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
    if whole < count:
        values[whole:] *= scales[-1]
    return values.view(shape)


def read_moment(state: dict[str, Any], name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Moment `name` of an optimizer state: the tensor itself, or float32 from its codes."""
    if name in state:
        return local(state[name])
    return dequantize_blockwise(state[f"{name}_codes"], state[f"{name}_scales"], _map_of(name), shape)


def write_moment(state: dict[str, Any], name: str, value: Tensor) -> None:
    """Put `value` into moment `name` of an optimizer state, in place and in the form in which it is kept there."""
    if name in state:
        kept = local(state[name])
        if kept is not value:
            kept.copy_(value)
        return
    codes, scales = quantize_blockwise(value, _map_of(name))
    state[f"{name}_codes"].copy_(codes)
    state[f"{name}_scales"].copy_(scales)


def new_moment(
    state: dict[str, Any], name: str, shape: tuple[int, ...], *, bits: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Put moment `name`, all zeros, into an optimizer state: codes for `bits` 8 from 4,096 values up, else `dtype`."""
    count = math.prod(shape)
    if bits == 8 and count >= MIN_ELEMENTS:
        zero = int((_map_of(name) == 0).nonzero())
        state[f"{name}_codes"] = torch.full((count,), zero, dtype=torch.uint8, device=device)
        state[f"{name}_scales"] = torch.zeros(-(-count // BLOCK), dtype=torch.float32, device=device)
    else:
        state[name] = torch.zeros(shape, dtype=dtype, device=device)


def _map_of(name: str) -> Tensor:
    return unsigned_map() if name.endswith("_sq") else signed_map()


def _cell_centres(cells: int) -> Tensor:
    """Centres of cells * 2^k equal cells of [0.1, 1] times 10^(k - 6), k = 0 .. 6, ascending."""
    decades = []
    for k in range(_DECADES):
        edges = torch.linspace(0.1, 1, cells * 2**k + 1)
        decades.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (k + 1 - _DECADES))
    return torch.cat(decades)


def _nearest(unit: Tensor, code: Tensor) -> Tensor:
    """Number of the entry of `code` nearest to each value of -1 .. 1, as uint8.

    The upper half of a float32 picks a code from a table of all 2^16 upper halves; within such a cell lies at most
    one border between neighbouring codes, so one comparison with that border finishes: several times as fast on a
    CPU as a binary search.
    """
    first, borders = _tables(tuple(code.tolist()), unit.device)
    cell = (unit.view(torch.int32) >> 16).add_(1 << 15)
    return first.index_select(0, cell).add_(unit > borders.index_select(0, cell))


@functools.lru_cache(maxsize=16)
def _tables(code: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each of the 65,536 cells: the code of its smallest value (uint8) and the border above it (float32)."""
    entries = torch.tensor(code)
    borders = torch.cat([(entries[1:] + entries[:-1]) / 2, torch.tensor([math.inf])])
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    # a negative float grows towards 0 as its lower half shrinks: its cell starts at the largest lower half
    starts = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32)
    first = torch.bucketize(starts.nan_to_num(0.0), borders[:-1])
    return first.to(torch.uint8).to(device), borders[first].to(device)


def _check_code(code: Tensor) -> None:
    if code.shape != (256,):
        raise ShapeError(f"code must be a map of 256 numbers, got {tuple(code.shape)}. Use signed_map().")
