"""Lesson 12's kernels in Triton's own interpreter: the pointer model and Triton compute the same."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreter import in_interpreter

from comera_lab.kernels import puzzles
from comera_lab.kernels.puzzles import ANSWERS, PUZZLES, interpreter_obstacle, run_interpreter, run_model
from comera_lab.panels.kernel_step import engine_words
from comera_lab.teaching import check


@pytest.mark.parametrize("name", PUZZLES)
@pytest.mark.parametrize(("size", "block"), [(1, 2), (13, 4), (16, 8)])
@in_interpreter
def test_the_interpreter_agrees_with_the_model(name, size, block):
    puzzle = PUZZLES[name]
    call = puzzle.call(size, block, torch.Generator().manual_seed(0))
    out = run_interpreter(puzzle.kernel, call)
    torch.testing.assert_close(out, run_model(puzzle.kernel, call).tensors[call.output])
    assert bool(call.tensors[call.output].isnan().all())


@in_interpreter
def test_a_learners_kernel_is_confirmed_by_the_interpreter():
    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ok = at < count
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=ok) + tl.load(y_ptr + at, mask=ok), mask=ok)

    names = set(add_kernel.fn.__globals__)
    assert check("12.1", add_kernel).passed and "masked add" in ANSWERS
    assert set(add_kernel.fn.__globals__) == names, "triton's interpreter leaves nothing in the notebook"


@in_interpreter
def test_an_interpreter_that_disagrees_is_no_pass():
    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ok = at < count
        # the interpreter alone gives blocks a `handle`
        extra = 1.0 if hasattr(at, "handle") else 0.0
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=ok) + tl.load(y_ptr + at, mask=ok) + extra, mask=ok)

    verdict = check("12.1", add_kernel)
    assert not verdict.passed and "interpreter computes something else" in verdict.message


@in_interpreter
def test_the_panels_line_says_that_the_interpreter_runs():
    assert interpreter_obstacle() is None
    assert engine_words().endswith("Triton's interpreter runs here, too.")


def test_without_the_variable_the_reason_is_told():
    assert "TRITON_INTERPRET" in (puzzles.interpreter_obstacle() or "")
