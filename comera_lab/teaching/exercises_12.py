"""Exercises of lesson 12: four Triton kernels, right first, then with as few reads and writes as they need."""

from collections.abc import Callable
from typing import Any

import torch

from comera_lab.kernels import puzzle_mistakes as wrong
from comera_lab.kernels.pointer_model import KernelError, source_of
from comera_lab.kernels.puzzles import ANSWERS, PUZZLES, Call, interpreter_obstacle, run_interpreter, run_model
from comera_lab.teaching.compare import difference
from comera_lab.teaching.exercise import Exercise, Mistake


def _run(name: str) -> Callable[[Any, tuple[Any, ...]], Any]:
    """Runs a kernel in the pointer model; a learner's then in Triton's interpreter, where there is one."""

    def run(kernel: Any, args: tuple[Any, ...]) -> torch.Tensor:
        call: Call = args[0]
        out = run_model(kernel, call).tensors[call.output]
        if source_of(kernel).__module__.startswith("comera_lab."):
            return out
        ANSWERS[name] = kernel
        if difference(out, PUZZLES[name].expected(call)) is None and interpreter_obstacle() is None:
            interpreted = run_interpreter(kernel, call)
            if difference(interpreted, out) is not None:
                raise KernelError("Triton's interpreter computes something else than the kit's pointer model.")
        return out

    return run


def _cost(name: str) -> Callable[[Any, tuple[Any, ...]], str | None]:
    """A sentence where a right kernel reads and writes more than the kit's."""

    def cost(kernel: Any, args: tuple[Any, ...]) -> str | None:
        mine, best = run_model(kernel, args[0]), run_model(PUZZLES[name].kernel, args[0])
        if mine.score <= best.score:
            return None
        return (
            f"The values are right. Score: {mine.reads} reads + {mine.writes} writes = {mine.score}; "
            f"{best.reads} + {best.writes} = {best.score} are enough ({args[0]!r}). Which element is moved twice?"
        )

    return cost


def _cases(name: str, *sizes: tuple[int, int]) -> Callable[[torch.Generator], list[tuple[Any, ...]]]:
    return lambda generator: [(PUZZLES[name].call(size, block, generator),) for size, block in sizes]


def _exercise(id: str, name: str, title: str, sizes: tuple[tuple[int, int], ...], **words: Any) -> Exercise:
    kernel = PUZZLES[name].kernel
    return Exercise(
        id=id, title=title, wants="a kernel under @triton.jit with the first line as it was", reference=kernel,
        cases=_cases(name, *sizes), call=_run(name), cost=_cost(name), **words,
    )  # fmt: skip


EXERCISES = (
    _exercise(
        "12.1", "masked add", "Add two vectors", ((100, 32), (64, 16), (5, 8)),
        right="Each element of x and y is read once, each of out written once: no kernel can do with less.",
        hints=(
            "Which elements belong to program 0, which to program 1? Write their numbers down for BLOCK = 4.",
            "Lane k of program p owns element p * BLOCK + k. The mask says which of those exist.",
            "`at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)`, then load both and store with `mask=at < count`.",
        ),
        mistakes=(
            Mistake(name="mask forgotten", answer=wrong.add_without_mask,
                    message="The last program reaches beyond the end, because BLOCK does not divide count. Every load "
                    "and every store needs mask=at < count."),
            Mistake(name="program id forgotten", answer=wrong.add_one_program,
                    message="All programs do the same first block, and the rest of out stays NaN: start at "
                    "tl.program_id(0) * BLOCK."),
            Mistake(name="bytes", answer=wrong.add_bytes,
                    message="Only every fourth element is written. A pointer moves by elements, not by bytes: no "
                    "factor of 4."),
        ),
    ),
    _exercise(
        "12.2", "row sum", "Sum each row", ((37, 16), (32, 8), (3, 8)),
        right="Each element is read once, in blocks, and one number a row is written.",
        hints=(
            "One program for one row. A row is longer than a block: go along it in a loop.",
            "Keep BLOCK partial sums, add block after block to them, and sum the lanes at the end.",
            "`total += tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)` in the loop, then "
            "`tl.store(out_ptr + row, tl.sum(total, axis=0))`.",
        ),
        mistakes=(
            Mistake(name="other forgotten", answer=wrong.sum_without_other,
                    message="A masked lane holds no number, and here it is added up. Say what it holds: other=0.0."),
            Mistake(name="first block only", answer=wrong.sum_first_block,
                    message="Only the first BLOCK elements of a row are summed. Loop: for start in range(0, columns, "
                    "BLOCK)."),
            Mistake(name="down instead of along", answer=wrong.sum_down,
                    message="Rows lie one after the other in memory: element (i, j) is at i * columns + j. You walk "
                    "with a stride of rows."),
        ),
    ),
    _exercise(
        "12.3", "tiled product", "A product in tiles", ((20, 4), (16, 8), (5, 4)),
        right="A tile of out is summed where it is made and written once; each program reads only its rows of x and "
        "columns of w.",
        hints=(
            "Program (i, j) owns one BLOCK x BLOCK tile of out. Which rows of x and columns of w does it need?",
            "Go along the inner dimension in blocks: load a tile of x and one of w, and add their tl.dot to total.",
            "`x = tl.load(x_ptr + row * inner + k[None, :], ...)`, `w = tl.load(w_ptr + k[:, None] * columns + column, "
            '...)`, `total += tl.dot(x, w, input_precision="ieee")`.',
        ),
        mistakes=(
            Mistake(name="last block only", answer=wrong.product(last_only=True),
                    message="Each turn of the loop replaces the total. Add to it: total += tl.dot(x, w)."),
            Mistake(name="w transposed", answer=wrong.product(w_turned=True),
                    message="w is (inner, columns): element (k, j) is at k * columns + j. You read it as if it were "
                    "(columns, inner)."),
            Mistake(name="out too narrow", answer=wrong.product(narrow_out=True),
                    message="Rows of out are columns long, so row i begins at i * columns, not at i * inner."),
        ),
    ),
    _exercise(
        "12.4", "TT contraction", "A TT contraction in one kernel", ((21, 8), (16, 16), (5, 4)),
        right="x is read once, out written once, and x A never leaves the program: that is the fusion of the kit's "
        "own tt_linear.",
        hints=(
            "A program owns BLOCK rows. Two loops, one after the other: what does the second need of the first?",
            "The first sums x A over blocks of inner, BLOCK x RANK numbers that stay in the program. The second makes "
            "out block by block: tl.dot of them with a block of B.",
            "First loop: `xA += tl.dot(x, A)`. Second: `tl.store(out_ptr + row * columns + column, tl.dot(xA, B), "
            "...)`. Lanes of RANK from rank on are masked, with other=0.0.",
        ),
        mistakes=(
            Mistake(name="last block only", answer=wrong.train(last_only=True),
                    message="x A is a sum over all blocks of inner: add to xA in the loop, do not replace it."),
            Mistake(name="first columns only", answer=wrong.train(first_columns=True),
                    message="Only the first BLOCK columns of out are written. The second loop goes over all columns."),
            Mistake(name="first rows only", answer=wrong.train(first_rows=True),
                    message="All programs do the same rows: start at tl.program_id(0) * BLOCK."),
        ),
    ),
)  # fmt: skip
