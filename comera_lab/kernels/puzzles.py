"""Four small kernels, and how each is launched: lesson 12 steps through them and asks for them.

The functions are plain: `run_model` runs them in the kit's pointer model, `run_interpreter` in Triton's interpreter.
"""

# tl.constexpr of the model marks an argument; it is no type
# mypy: disable-error-code="name-defined"
from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comera_lab.kernels import available
from comera_lab.kernels.pointer_model import Trace, launch, with_language
from comera_lab.kernels.pointer_model import language as tl
from comera_lab.runtime import triton_status

RANK = 3
INNER = 6


def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    x = tl.load(x_ptr + at, mask=ok)
    y = tl.load(y_ptr + at, mask=ok)
    tl.store(out_ptr + at, x + y, mask=ok)


def row_sum_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


def product_kernel(x_ptr, w_ptr, out_ptr, rows, inner, columns, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    row = (tl.program_id(0) * BLOCK + lanes)[:, None]
    column = (tl.program_id(1) * BLOCK + lanes)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + lanes
        x_ok = (row < rows) & (k[None, :] < inner)
        w_ok = (k[:, None] < inner) & (column < columns)
        x = tl.load(x_ptr + row * inner + k[None, :], mask=x_ok, other=0.0)
        w = tl.load(w_ptr + k[:, None] * columns + column, mask=w_ok, other=0.0)
        total += tl.dot(x, w, input_precision="ieee")
    tl.store(out_ptr + row * columns + column, total, mask=(row < rows) & (column < columns))


def tt_kernel(x_ptr, A_ptr, B_ptr, out_ptr, rows, inner, columns, rank, BLOCK: tl.constexpr, RANK: tl.constexpr):
    lanes, r = tl.arange(0, BLOCK), tl.arange(0, RANK)
    row = (tl.program_id(0) * BLOCK + lanes)[:, None]
    xA = tl.zeros([BLOCK, RANK], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + lanes
        x = tl.load(x_ptr + row * inner + k[None, :], mask=(row < rows) & (k[None, :] < inner), other=0.0)
        A_ok = (k[:, None] < inner) & (r[None, :] < rank)
        A = tl.load(A_ptr + k[:, None] * rank + r[None, :], mask=A_ok, other=0.0)
        xA += tl.dot(x, A, input_precision="ieee")
    for start in range(0, columns, BLOCK):
        column = (start + lanes)[None, :]
        B_ok = (r[:, None] < rank) & (column < columns)
        B = tl.load(B_ptr + r[:, None] * columns + column, mask=B_ok, other=0.0)
        y = tl.dot(xA, B, input_precision="ieee")
        tl.store(out_ptr + row * columns + column, y, mask=(row < rows) & (column < columns))


@dataclass(frozen=True, repr=False)
class Call:
    """One launch: fp32 tensors by name, the last one the output and full of NaN; whole numbers; programs."""

    tensors: dict[str, Tensor]
    scalars: dict[str, int]
    grid: tuple[int, ...]

    @property
    def output(self) -> str:
        """The name of the tensor that is written."""
        return list(self.tensors)[-1]

    def __repr__(self) -> str:
        """Short, because a checker puts it into a sentence."""
        return ", ".join(f"{name}={value}" for name, value in self.scalars.items())


@dataclass(frozen=True)
class Puzzle:
    """A kernel, the call for a size, and the torch expression that it must agree with."""

    name: str
    kernel: Callable[..., None]
    spec: Callable[..., Tensor]
    sizes: Callable[[int, int], dict[str, int]]
    shapes: Callable[[dict[str, int]], dict[str, tuple[int, ...]]]
    grid: Callable[[dict[str, int]], tuple[int, ...]]

    def call(self, size: int, block: int, generator: torch.Generator) -> Call:
        """Random inputs for a main size of `size` elements and blocks of `block` lanes, a power of two."""
        scalars = self.sizes(size, block)
        shapes = self.shapes(scalars)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        tensors[list(shapes)[-1]].fill_(torch.nan)
        return Call(tensors, scalars, self.grid(scalars))

    def expected(self, call: Call) -> Tensor:
        """The right output."""
        return self.spec(*(tensor for name, tensor in call.tensors.items() if name != call.output))


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


PUZZLES = {
    puzzle.name: puzzle
    for puzzle in (
        Puzzle(
            "masked add", add_kernel, lambda x, y: x + y,
            lambda size, block: {"count": size, "BLOCK": block},
            lambda s: {"x": (s["count"],), "y": (s["count"],), "out": (s["count"],)},
            lambda s: (_blocks(s["count"], s["BLOCK"]),),
        ),
        Puzzle(
            "row sum", row_sum_kernel, lambda x: x.sum(1),
            lambda size, block: {"rows": 5, "columns": size, "BLOCK": block},
            lambda s: {"x": (s["rows"], s["columns"]), "out": (s["rows"],)},
            lambda s: (s["rows"],),
        ),
        Puzzle(
            "tiled product", product_kernel, lambda x, w: x @ w,
            lambda size, block: {"rows": size, "inner": INNER, "columns": size, "BLOCK": block},
            lambda s: {"x": (s["rows"], s["inner"]), "w": (s["inner"], s["columns"]), "out": (s["rows"], s["columns"])},
            lambda s: (_blocks(s["rows"], s["BLOCK"]), _blocks(s["columns"], s["BLOCK"])),
        ),
        Puzzle(
            "TT contraction", tt_kernel, lambda x, A, B: x @ A @ B,
            lambda size, block: {"rows": size, "inner": size, "columns": size, "rank": RANK, "BLOCK": block, "RANK": 4},
            lambda s: {"x": (s["rows"], s["inner"]), "A": (s["inner"], s["rank"]), "B": (s["rank"], s["columns"]),
                       "out": (s["rows"], s["columns"])},
            lambda s: (_blocks(s["rows"], s["BLOCK"]),),
        ),
    )
}  # fmt: skip


# A learner's last kernel for each puzzle, once a check has run it to its end.
ANSWERS: dict[str, Any] = {}


def run_model(kernel: Any, call: Call) -> Trace:
    """Run a kernel in the pointer model. Raises KernelError for what no kernel may do."""
    return launch(kernel, call.grid, call.tensors, call.scalars)


def interpreter_obstacle() -> str | None:
    """Why Triton's interpreter cannot run in this process, or None."""
    status = triton_status()
    if status.kind == "interpreter":
        status = available()
    return None if status.kind == "interpreter" else status.reason


def run_interpreter(kernel: Any, call: Call) -> Tensor:
    """The output that Triton's interpreter computes, from fresh copies of the tensors.

    Call `run_model` first: the interpreter follows a wrong pointer into the memory of the process.
    """
    module = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    # copied globals: the interpreter writes names of its own into those of the function
    interpreted = interpreter.InterpretedFunction(with_language(kernel, module))
    copies = {f"{name}_ptr": tensor.clone() for name, tensor in call.tensors.items()}
    interpreted[call.grid](**copies, **call.scalars)
    return copies[f"{call.output}_ptr"]
