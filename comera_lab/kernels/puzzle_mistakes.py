"""Kernels as people write them at first: the checks of lesson 12 know these by name."""

# tl.constexpr of the model marks an argument; it is no type
# mypy: disable-error-code="name-defined"
from __future__ import annotations

from collections.abc import Callable

from comera_lab.kernels.pointer_model import language as tl


def add_without_mask(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


def add_one_program(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    ok = at < count
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=ok) + tl.load(y_ptr + at, mask=ok), mask=ok)


def add_bytes(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = 4 * (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    ok = at < count
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=ok) + tl.load(y_ptr + at, mask=ok), mask=ok)


def sum_without_other(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + at, mask=at < columns)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


def sum_first_block(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, axis=0))


def sum_down(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row + at * rows, mask=at < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


def product(last_only: bool = False, w_turned: bool = False, narrow_out: bool = False) -> Callable[..., None]:
    """The product kernel with one thing wrong."""

    def kernel(x_ptr, w_ptr, out_ptr, rows, inner, columns, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        row = (tl.program_id(0) * BLOCK + lanes)[:, None]
        column = (tl.program_id(1) * BLOCK + lanes)[None, :]
        total = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(0, inner, BLOCK):
            k = start + lanes
            w_at = column * inner + k[:, None] if w_turned else k[:, None] * columns + column
            x_ok, w_ok = (row < rows) & (k[None, :] < inner), (k[:, None] < inner) & (column < columns)
            x = tl.load(x_ptr + row * inner + k[None, :], mask=x_ok, other=0.0)
            part = tl.dot(x, tl.load(w_ptr + w_at, mask=w_ok, other=0.0), input_precision="ieee")
            total = part if last_only else total + part
        step = inner if narrow_out else columns
        tl.store(out_ptr + row * step + column, total, mask=(row < rows) & (column < columns))

    return kernel


def train(last_only: bool = False, first_columns: bool = False, first_rows: bool = False) -> Callable[..., None]:
    """The TT kernel with one thing wrong."""

    def kernel(x_ptr, A_ptr, B_ptr, out_ptr, rows, inner, columns, rank, BLOCK: tl.constexpr, RANK: tl.constexpr):
        lanes, r = tl.arange(0, BLOCK), tl.arange(0, RANK)
        row = ((0 if first_rows else tl.program_id(0) * BLOCK) + lanes)[:, None]
        xA = tl.zeros([BLOCK, RANK], tl.float32)
        for start in range(0, inner, BLOCK):
            k = start + lanes
            x = tl.load(x_ptr + row * inner + k[None, :], mask=(row < rows) & (k[None, :] < inner), other=0.0)
            A_ok = (k[:, None] < inner) & (r[None, :] < rank)
            part = tl.dot(x, tl.load(A_ptr + k[:, None] * rank + r[None, :], mask=A_ok, other=0.0))
            xA = part if last_only else xA + part
        for start in range(0, BLOCK if first_columns else columns, BLOCK):
            column = (start + lanes)[None, :]
            B_ok = (r[:, None] < rank) & (column < columns)
            B = tl.load(B_ptr + r[:, None] * columns + column, mask=B_ok, other=0.0)
            tl.store(out_ptr + row * columns + column, tl.dot(xA, B), mask=(row < rows) & (column < columns))

    return kernel
