"""The checks of lesson 12's puzzles: kernels with or without their decorator, right, wrong, dear, empty and endless."""

from __future__ import annotations

import pytest

from comera_lab.experiments.kernel_report import faults, shipped_cases
from comera_lab.experiments.recorded_kernels import recorded_kernels, recorded_summary
from comera_lab.experiments.recorder import Recorder, read_rows
from comera_lab.experiments.results import data_file
from comera_lab.experiments.rows import KernelRow
from comera_lab.kernels import puzzle_mistakes
from comera_lab.kernels.pointer_model import language as tl
from comera_lab.kernels.puzzles import PUZZLES
from comera_lab.teaching import check


def _endless(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    while True:
        tl.load(x_ptr)


def _unknown(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.atomic_add(out_ptr, 1.0)


def _reads_twice(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    x = tl.load(x_ptr + at, mask=ok)
    again = tl.load(x_ptr + at, mask=ok)
    tl.store(out_ptr + at, (x + again) / 2 + tl.load(y_ptr + at, mask=ok), mask=ok)


def _stub(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Not begun."""
    at = ...
    tl.load(x_ptr + at)


def _hangs(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    while True:
        pass


class Jitted:
    """As triton.jit leaves a kernel: an object with the function inside."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args):
        raise RuntimeError("kernels are launched, not called")


@pytest.mark.parametrize("wrap", [lambda kernel: kernel, Jitted])
@pytest.mark.parametrize(
    ("kernel", "stage", "words"),
    [
        (PUZZLES["masked add"].kernel, "right", "no kernel can do with less"),
        (_stub, "stub", "Still empty"),
        (_reads_twice, "cost", "300 reads + 100 writes = 400; 200 + 100 = 300 are enough"),
        (_endless, "error", "a loop that never ends"),
        (_hangs, "time", "loop that never ends"),
        (_unknown, "error", "no tl.atomic_add"),
        (puzzle_mistakes.add_bytes, "value", "by elements, not by bytes"),
    ],
)
def test_a_kernel_is_judged_with_or_without_its_decorator(kernel, stage, words, wrap):
    verdict = check("12.1", wrap(kernel), seconds=1)
    assert (verdict.stage, verdict.passed) == (stage, stage == "right")
    assert words in verdict.message


def test_x_read_again_for_every_block_of_columns_costs():
    def unfused(x_ptr, A_ptr, B_ptr, out_ptr, rows, inner, columns, rank, BLOCK: tl.constexpr, RANK: tl.constexpr):
        lanes, r = tl.arange(0, BLOCK), tl.arange(0, RANK)
        row = (tl.program_id(0) * BLOCK + lanes)[:, None]
        for start in range(0, columns, BLOCK):
            column = (start + lanes)[None, :]
            xA = tl.zeros([BLOCK, RANK], tl.float32)
            for first in range(0, inner, BLOCK):
                k = first + lanes
                x = tl.load(x_ptr + row * inner + k[None, :], mask=(row < rows) & (k[None, :] < inner), other=0.0)
                A_ok = (k[:, None] < inner) & (r[None, :] < rank)
                xA += tl.dot(x, tl.load(A_ptr + k[:, None] * rank + r[None, :], mask=A_ok, other=0.0))
            B_ok = (r[:, None] < rank) & (column < columns)
            B = tl.load(B_ptr + r[:, None] * columns + column, mask=B_ok, other=0.0)
            tl.store(out_ptr + row * columns + column, tl.dot(xA, B), mask=(row < rows) & (column < columns))

    verdict = check("12.4", unfused)
    assert verdict.stage == "cost" and "Which element is moved twice?" in verdict.message


# ---- the compiler's report ---------------------------------------------------------------------------------


def test_the_report_comes_from_recorded_rows_with_their_source(tmp_path):
    assert "comera-lab bench --suite kernels-static" in recorded_kernels(folder=tmp_path)
    row = KernelRow(
        kernel="tt_linear rows bf16", capability=90, warps=4, stages=3, registers=128, spill_bytes=0,
        shared_bytes=65536, products=["bf16 64x64x16"], matrix_kind="wgmma", matrix_instructions=12, loads=8,
        wide_loads=8, wide_stores=2,
    )  # fmt: skip
    with Recorder(tmp_path / "kernels_static.jsonl", {"suite": "kernels-static"}) as recorder:
        recorder.add(row)
    text = recorded_kernels("bf16", folder=tmp_path)
    assert "sm_90" in text and "12 wgmma" in text and " 64.0 " in text
    assert "Compiled without a GPU on " in text and "kernels_static.jsonl" in text
    assert "No report" in recorded_kernels("fp32", folder=tmp_path)


def test_the_recorded_report_is_of_a_clean_commit_and_finds_no_fault(tmp_path):
    info, *rows = read_rows(data_file("results/kernels_static.jsonl"))
    assert info["triton"] and not info["commit"].endswith("-dirty")
    kernels = [KernelRow(**{key: value for key, value in row.items() if key != "kind"}) for row in rows]
    assert {row.capability for row in kernels} == {80, 90}
    names = [case.name for case in shipped_cases()]
    assert [row.kernel for row in kernels] == [name for name in names for _ in range(2)], "every shipped kernel, twice"
    assert [fault for row in kernels for fault in faults(row)] == []
    assert f"triton {info['triton']} (kernels_static.jsonl)" in recorded_kernels("tt_linear rows bf16")
    summary = recorded_summary().splitlines()
    assert sum(int(line.split()[2]) for line in summary[1:]) == len(kernels)
    assert all(int(line.split()[4]) == 0 for line in summary[1:]), "no kernel spills"
    assert recorded_summary(folder=tmp_path) == "No report is recorded yet."
