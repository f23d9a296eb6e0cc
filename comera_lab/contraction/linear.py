"""y = x W^T from x and the cores of W, the dense weight and its gradient never formed.

An order of contraction is a tuple of cuts 0 = c_0 < c_1 < .. < c_t = d + e: the cores between two cuts are
multiplied into one block, and x eats the blocks from left to right.
    (0, d, d + e)        half-chains: y = (x A) B with A (in, r_d) and B (r_d, out); right for many rows
    (0, 1, .., d + e)    sequential: no block is built; right for few rows
    (0, d + e)           the dense weight: never chosen, listed for comparison
`plan` finds the cheapest order by dynamic programming over the cuts (CoMERA, arXiv 2405.14377, optimises the
same choice by hand for d = e = 3). Gradients are exact for every order, also twice differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from comera_lab.contraction.fused import fused_linear, fused_together, linear_is_fused
from comera_lab.contraction.many_rows import naive_products, products_of_many_rows
from comera_lab.cores import chain, chain_tree, cores_to_matrix
from comera_lab.shapes import ShapeError, TTShape, positive_int

# What one more torch call and one more byte weigh, in FLOPs: rough estimates, of which only the ratios matter.
# `comera-lab bench --suite cpu` checks the choice they lead to at 1 and 8 rows.
CALL_FLOPS = 200_000
BYTE_FLOPS = 5
ELEMENT_BYTES = 4
# Half-chains are left only for an order whose estimate is so many times lower: strided passes and the backward are not
# in the estimates. Measured at 6 sizes, 1 to 128 rows, forward + backward: above it others were up to 3.3x faster,
# below it half-chains up to 1.7x.
CLEARLY_CHEAPER = 1.5
# Below this many rows a call is dominated by its number of torch calls, and `products_of_many_rows` makes more.
MANY_ROWS = 256


# One linear map of several that share their input: cores, shape, bias
Map = tuple[Sequence[Tensor], TTShape, Tensor | None]


@dataclass(frozen=True)
class Order:
    """One order of contraction and what a forward call costs: `bytes` counts each operand and result once."""

    name: str
    cuts: tuple[int, ...]
    flops: int
    bytes: int
    largest_intermediate: int
    calls: int

    @property
    def cost(self) -> int:
        return self.flops + CALL_FLOPS * self.calls + BYTE_FLOPS * self.bytes


@dataclass(frozen=True)
class ContractionPlan:
    """The chosen order for a shape and a number of rows, beside its rivals. `str()` prints a table."""

    shape: TTShape
    rows: int
    chosen: Order
    rivals: tuple[Order, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        return self.chosen.cuts

    @property
    def name(self) -> str:
        return self.chosen.name

    @property
    def flops(self) -> int:
        return self.chosen.flops

    @property
    def bytes(self) -> int:
        return self.chosen.bytes

    @property
    def largest_intermediate(self) -> int:
        return self.chosen.largest_intermediate

    def __str__(self) -> str:
        shape = self.shape
        lines = [
            f"TT linear {shape.in_features} -> {shape.out_features}, {self.rows:,} rows (predicted, forward)",
            f"modes {shape.in_modes} | {shape.out_modes}, ranks {shape.ranks}",
            f"  {'order':<22}{'FLOPs':>16}{'largest intermediate':>22}{'MiB moved':>12}  cuts",
        ]
        for order in (self.chosen, *(rival for rival in self.rivals if rival.cuts != self.chosen.cuts)):
            mark = "*" if order is self.chosen else " "
            lines.append(
                f"{mark} {order.name:<22}{order.flops:>16,}{order.largest_intermediate:>22,}"
                f"{order.bytes / 2**20:>12.2f}  {order.cuts}"
            )
        dense = 2 * self.rows * shape.dense_params
        lines.append(f"* chosen: {dense / max(self.flops, 1):.1f}x fewer FLOPs than nn.Linear ({dense:,})")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def _block(shape: TTShape, rows: int, start: int, stop: int) -> tuple[int, int, int, int]:
    """(FLOPs, bytes, largest intermediate, calls) of building cores [start, stop) and feeding them to x."""
    modes, ranks, split = shape.modes, shape.ranks, shape.split
    build, _ = chain_tree(modes[start:stop], ranks[start : stop + 1])
    eaten = math.prod(modes[start : min(stop, split)])
    waiting = math.prod(modes[max(start, min(stop, split)) : split])
    made = math.prod(modes[max(start, split) : stop])
    produced = math.prod(modes[split:start])
    before = rows * waiting * produced * eaten * ranks[start]
    after = rows * waiting * produced * made * ranks[stop]
    block = ranks[start] * eaten * made * ranks[stop]
    flops = build + 2 * before * made * ranks[stop]
    moved = ELEMENT_BYTES * (before + after + 2 * block)
    built = block if stop - start > 1 else 0
    # A waiting input mode has to be moved behind the new bond: one more call, one more pass.
    calls = stop - start + (1 if waiting > 1 else 0)
    return flops, moved, max(built, after), calls


def _order(shape: TTShape, rows: int, cuts: tuple[int, ...]) -> Order:
    blocks = [_block(shape, rows, a, b) for a, b in pairwise(cuts)]
    count = len(shape.modes)
    names = {tuple(range(count + 1)): "sequential", (0, count): "dense weight (never)"}
    name = "half-chains" if cuts == half_chain_cuts(shape) else names.get(cuts, "mixed")
    flops, moved, largest, calls = zip(*blocks, strict=True)
    return Order(name, cuts, sum(flops), sum(moved), max(largest), sum(calls))


def half_chain_cuts(shape: TTShape) -> tuple[int, ...]:
    """The cuts of y = (x A) B: one between the input modes and the output modes."""
    return (0, shape.split, len(shape.modes))


@lru_cache(maxsize=1024)
def plan(shape: TTShape, rows: int) -> ContractionPlan:
    """The order for `rows` rows: the cheapest by FLOPs, bytes and calls if it is so clearly, else half-chains."""
    rows = positive_int(rows, "rows")
    count = len(shape.modes)
    best: list[tuple[int, tuple[int, ...]]] = [(0, (0,))]
    for stop in range(1, count + 1):
        options = []
        for start in range(stop):
            if start == 0 and stop == count:
                continue
            flops, moved, _, calls = _block(shape, rows, start, stop)
            cost, cuts = best[start]
            options.append((cost + flops + CALL_FLOPS * calls + BYTE_FLOPS * moved, (*cuts, stop)))
        best.append(min(options))
    cheapest, halves = _order(shape, rows, best[-1][1]), _order(shape, rows, half_chain_cuts(shape))
    chosen = halves if halves.cost < CLEARLY_CHEAPER * cheapest.cost else cheapest
    others = [_order(shape, rows, cuts) for cuts in (tuple(range(count + 1)), (0, count))]
    rivals = {order.cuts: order for order in (halves, cheapest, *others)}
    return ContractionPlan(shape, rows, chosen, tuple(rivals.values()))


def naive_apply_cores(x: Tensor, cores: Sequence[Tensor], shape: TTShape, bias: Tensor | None = None) -> Tensor:
    """The obviously right twin of `apply_cores`: x (..., in) times the dense W^T, plus bias."""
    return functional.linear(x, cores_to_matrix(cores, shape), bias)


def apply_cores(
    x: Tensor,
    cores: Sequence[Tensor],
    shape: TTShape,
    bias: Tensor | None = None,
    cuts: tuple[int, ...] | None = None,
    backend: str | None = None,
) -> Tensor:
    """x (..., in_features) -> (..., out_features) = x W^T + bias, without forming W.

    `cuts` forces an order; None takes the planned one (half-chains while torch.compile traces, where the
    number of rows is a symbol). `backend` None takes the triton kernel for CUDA tensors of supported sizes, else
    torch; "torch" or "triton" names one. Raises ShapeError for a wrong last dimension, ValueError for a dtype that
    does not fit or a named backend that cannot run, all before anything is computed.
    """
    _check_input(x, cores, shape)
    rows = x.numel() // shape.in_features
    halves = half_chain_cuts(shape)
    if linear_is_fused(x, _weights(cores, bias), shape.middle_rank, backend, cuts in (None, halves)):
        out = fused_linear(x.reshape(-1, shape.in_features), *_halves(cores, shape), bias)
        return out.reshape(*x.shape[:-1], shape.out_features)
    tracing = torch.compiler.is_compiling()
    if cuts is None:
        cuts = halves if tracing or rows == 0 else _planned_cuts(shape, rows)
    flat = x.reshape(-1, shape.in_features)
    if cuts == halves:
        (out,) = _half_chains(flat, [(cores, shape, bias)])
    else:
        out = _in_order(flat, cores, shape, cuts)
        out = out if bias is None else out + bias.to(out.dtype)
    return out.reshape(*x.shape[:-1], shape.out_features)


def apply_cores_together(x: Tensor, maps: Sequence[Map], backend: str | None = None) -> list[Tensor]:
    """x (..., in_features) -> one (..., out_features) per (cores, shape, bias) of `maps`: q, k and v of attention.

    With many rows x is read once for all maps, and its gradient is written once; the triton kernel does so in one
    launch while the ranks together fit it. With few rows and where another order is planned the maps are applied one
    by one. Errors as in `apply_cores`.
    """
    for cores, shape, _ in maps:
        _check_input(x, cores, shape)
    rows = x.numel() // x.shape[-1]
    together = torch.compiler.is_compiling() or (
        rows >= MANY_ROWS and all(_planned_cuts(shape, rows) == half_chain_cuts(shape) for _, shape, _ in maps)
    )
    fused = [linear_is_fused(x, _weights(cores, bias), shape.middle_rank, backend, True) for cores, shape, bias in maps]
    flat = x.reshape(-1, x.shape[-1])
    outs: list[Tensor] | None = None
    if all(fused):
        outs = fused_together(flat, [(*_halves(cores, shape), bias) for cores, shape, bias in maps])
    elif together and not any(fused):
        outs = _half_chains(flat, maps)
    if outs is None:
        return [apply_cores(x, *each, backend=backend) for each in maps]
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _weights(cores: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
    return [*cores] if bias is None else [*cores, bias]


def _planned_cuts(shape: TTShape, rows: int) -> tuple[int, ...]:
    # Rounded to a power of two: one plan serves every batch of about this size.
    return plan(shape, 1 << (rows - 1).bit_length()).cuts


def _in_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # torch knows no autocast of meta tensors


def _check_input(x: Tensor, cores: Sequence[Tensor], shape: TTShape) -> None:
    if x.dim() == 0 or x.shape[-1] != shape.in_features:
        raise ShapeError(
            f"the last dimension of the input must be in_features={shape.in_features}, got a tensor of shape "
            f"{tuple(x.shape)}. Flatten or transpose the input so that its last dimension is {shape.in_features}."
        )
    if not x.is_floating_point():
        raise ValueError(f"the input must be floating point, got {x.dtype}. Convert it with x.float().")
    if x.dtype != cores[0].dtype and not _in_autocast(x):
        raise ValueError(
            f"input and cores must share a dtype outside autocast, got {x.dtype} and {cores[0].dtype}. "
            f"Convert one of them, for example x.to({cores[0].dtype})."
        )


def _in_order(x: Tensor, cores: Sequence[Tensor], shape: TTShape, cuts: tuple[int, ...]) -> Tensor:
    """x (rows, in) -> (rows, out), eating the blocks between the cuts one by one."""
    rows, split, modes = x.shape[0], shape.split, shape.modes
    state = functional.pad(x, (0, shape.padding[0])) if shape.padding[0] else x
    for start, stop in pairwise(cuts):
        block = chain(cores[start:stop])
        eaten = block.shape[0] * math.prod(modes[start : min(stop, split)])
        block = block.reshape(eaten, -1)  # (r_start n.., m.. r_stop)
        if start >= split:
            state = state.reshape(-1, eaten) @ block  # (rows m.., m.. r_stop)
            continue
        waiting = math.prod(modes[min(stop, split) : split])
        if waiting == 1:
            state = state.reshape(rows, eaten) @ block
            continue
        state = state.reshape(rows, eaten, waiting).transpose(1, 2) @ block  # (rows, n_waiting.., r_stop)
        state = state.transpose(1, 2)  # (rows, r_stop, n_waiting..)
    return state.reshape(rows, math.prod(shape.out_modes))[:, : shape.out_features]


def _halves(cores: Sequence[Tensor], shape: TTShape) -> tuple[Tensor, Tensor]:
    """A (in, r_d) and B (r_d, out), padding cut off."""
    left = chain(cores[: shape.split]).reshape(-1, shape.middle_rank)
    right = chain(cores[shape.split :]).reshape(shape.middle_rank, -1)
    # A slice that cuts nothing still costs a node of autograd, and one more pass in its backward.
    left = left if len(left) == shape.in_features else left[: shape.in_features]
    return left, right if right.shape[1] == shape.out_features else right[:, : shape.out_features]


def _half_chains(x: Tensor, maps: Sequence[Map]) -> list[Tensor]:
    """x (rows, in) -> (x A) B + bias (rows, out) of each map."""
    halves = [(*_halves(cores, shape), bias) for cores, shape, bias in maps]
    fast = x.device.type == "cpu" and not torch.compiler.is_compiling() and not _in_autocast(x)
    return products_of_many_rows(x, halves) if fast and len(x) >= MANY_ROWS else naive_products(x, halves)
