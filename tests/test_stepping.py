"""Lesson 12: the pointer model, and the panel that steps through kernels."""

from __future__ import annotations

import html
import json
import math
import time

import pytest
import torch

import comera_lab.panels as lab
from comera_lab.kernels import puzzles
from comera_lab.kernels.pointer_model import KernelError, launch
from comera_lab.kernels.pointer_model import language as tl
from comera_lab.kernels.puzzles import ANSWERS, PUZZLES, run_model
from comera_lab.panels import kernel_step
from comera_lab.panels.kernel_figures import MASKED, READ, TOUCHED, UNTOUCHED, WRITTEN, cell_states, memory_figure
from comera_lab.panels.kernel_step import BLOCKS, KIT, MAX_SIZE, MINE
from comera_lab.panels.state import LabState
from comera_lab.runtime import TritonStatus
from comera_lab.teaching import check
from comera_lab.teaching import kernels as door

IDS = {"masked add": "12.1", "row sum": "12.2", "tiled product": "12.3", "TT contraction": "12.4"}


def call_of(name, size=13, block=4):
    return PUZZLES[name].call(size, block, torch.Generator().manual_seed(0))


def _reads_twice(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    x = tl.load(x_ptr + at, mask=ok)
    again = tl.load(x_ptr + at, mask=ok)
    tl.store(out_ptr + at, (x + again) / 2 + tl.load(y_ptr + at, mask=ok), mask=ok)


@pytest.fixture
def panel():
    return lab.KernelStepPanel(LabState())


@pytest.fixture(autouse=True)
def _no_answers():
    ANSWERS.clear()


# ---- the pointer model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUZZLES)
@pytest.mark.parametrize(("size", "block"), [(1, 2), (13, 4), (16, 8), (37, 16)])
def test_the_model_computes_what_torch_computes(name, size, block):
    call = call_of(name, size, block)
    trace = run_model(PUZZLES[name].kernel, call)
    torch.testing.assert_close(trace.tensors[call.output], PUZZLES[name].expected(call))
    assert bool(call.tensors[call.output].isnan().all()), "the caller's tensors stay as they were"


def test_reads_and_writes_are_those_of_the_closed_forms():
    n, block, inner, rank = 13, 4, puzzles.INNER, puzzles.RANK
    tiles = math.ceil(n / block)
    want = {
        "masked add": (2 * n, n),
        "row sum": (5 * n, 5),
        "tiled product": (2 * n * inner * tiles, n * n),
        "TT contraction": (n * n + 2 * n * rank * tiles, n * n),
    }
    traces = {name: run_model(PUZZLES[name].kernel, call_of(name)) for name in PUZZLES}
    assert {name: (trace.reads, trace.writes) for name, trace in traces.items()} == want


def test_a_masked_lane_holds_nan_and_an_unwritten_element_too():
    def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < 1), mask=at < 2)

    trace = launch(kernel, (1,), {"x": torch.ones(3), "out": torch.full((3,), torch.nan)}, {"count": 3, "BLOCK": 4})
    assert trace.tensors["out"].isnan().tolist() == [False, True, True]
    assert (trace.reads, trace.writes) == (1, 2)


def _outside(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + count + tl.arange(0, BLOCK)))


def _negative(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.load(x_ptr - 1)


def _odd_block(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.arange(0, 3)


def _float_offset(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.load(x_ptr + 0.5)


def _no_pointer(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.load(count)


def _mask_shape(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, 4), mask=tl.arange(0, 2) < 1)


def _value_shape(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 2))


def _dot_shape(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.dot(tl.zeros([2, 4], tl.float32), tl.zeros([2, 4], tl.float32))


def _unknown(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.atomic_add(out_ptr, 1.0)


def _endless(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    while True:
        tl.load(x_ptr)


def _other_arguments(x_ptr):
    tl.load(x_ptr)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (_outside, r"Program 0 reads x\[13\], outside its 13 elements: mask"),
        (_negative, r"reads x\[-1\]"),
        (_odd_block, "blocks of 1, 2, 4, 8, ... lanes, got 3"),
        (_float_offset, "whole elements, got float64"),
        (_no_pointer, "tl.load needs a pointer, got a int"),
        (_mask_shape, r"mask has shape \(2,\), the addresses \(4,\)"),
        (_value_shape, r"values have shape \(2,\), the addresses \(4,\)"),
        (_dot_shape, r"needs \(m, k\) and \(k, n\), got \(2, 4\) and \(2, 4\)"),
        (_unknown, "no tl.atomic_add. It knows arange, "),
        (_endless, "a loop that never ends"),
        (_other_arguments, "must take the arguments x_ptr, y_ptr, out_ptr, count, BLOCK"),
        (7, "a kernel is a function under @triton.jit, got a int"),
    ],
)
def test_what_no_kernel_may_do_is_refused_in_a_sentence(kernel, words):
    with pytest.raises(KernelError, match=words):
        run_model(kernel, call_of("masked add"))


def test_calling_the_language_outside_a_kernel_is_refused():
    with pytest.raises(KernelError, match="inside a kernel only"):
        tl.program_id(0)


def test_every_access_names_the_line_that_made_it():
    trace = run_model(PUZZLES["masked add"].kernel, call_of("masked add"))
    assert [access.line for access in trace.accesses[:3]] == [
        "x = tl.load(x_ptr + at, mask=ok)", "y = tl.load(y_ptr + at, mask=ok)",
        "tl.store(out_ptr + at, x + y, mask=ok)",
    ]  # fmt: skip


# ---- the panel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUZZLES)
def test_every_control_at_its_ends(panel, name):
    panel.kernel.value = name
    for size in (1, 13, MAX_SIZE):
        for block in (BLOCKS[0], BLOCKS[-1]):
            panel.size.value, panel.block.value = size, block
            panel.program.value = panel.program.high
            panel.step.value = panel.step.high
            last = panel.trace.accesses[-1]
            assert panel.position == len(panel.trace.accesses) - 1 and last.writes
            assert f"{panel.trace.reads} of {panel.trace.reads}" in panel.numbers.value
            assert "agrees with torch (computed here)" in panel.numbers.value
            assert last.line.startswith("tl.store") and last.line.split("(")[0] in panel.where.value
            assert panel.card.text == ""
    assert panel.state.runs["kernel_step"]["kernel"] == name
    assert panel.state.runs["kernel_step"]["score"] == panel.trace.score


@pytest.mark.parametrize(
    ("control", "value", "words"),
    [("size", 0, "from 1 to 16"), ("block", "3", "must be one of 2, 4"), ("kernel", "soft-max", "must be one of"),
     ("program", 99, "from 0 to 3"), ("step", 0, "from 1 to 3"), ("whose", "theirs", "must be one of")],
)  # fmt: skip
def test_illegal_settings_change_nothing(panel, control, value, words):
    before = panel.table()
    with pytest.raises(ValueError, match=words):
        getattr(panel, control).value = value
    assert panel.table() == before and words.split()[0] in getattr(panel, control).message.value


def test_cells_show_what_is_read_written_masked_and_touched_before(panel):
    panel.block.value = "8"
    panel.program.value = 1
    codes, marks = cell_states(panel.trace, "x", panel.position)
    assert codes.tolist() == [TOUCHED] * 8 + [READ] * 5 and marks.tolist() == ["·"] * 8 + ["R"] * 5
    codes, marks = cell_states(panel.trace, "out", panel.position + 2)
    assert codes.tolist() == [TOUCHED] * 8 + [WRITTEN] * 5 and marks[-1] == "W"
    drawn = memory_figure(panel.trace, panel.position).data[0]
    assert drawn.text[0][13:] == ["×"] * 3 and drawn.z[0][15] == MASKED, "masked lanes behind the end are drawn, too"
    assert "3 of 3 lie outside x" in panel.where.value and "(13), (14), (15)" in panel.where.value
    panel.kernel.value = "tiled product"
    panel.size.value, panel.block.value = 5, "4"
    codes, marks = cell_states(panel.trace, "x", 2)
    assert (codes == MASKED).sum() == 8 and marks[6] == "×", "lanes beyond a row lie on the next row"
    assert cell_states(panel.trace, "out", 0)[0].tolist() == [UNTOUCHED] * 25


def test_re_reads_are_counted_in_the_cells(panel):
    panel.kernel.value, panel.block.value = "tiled product", "4"
    _, marks = cell_states(panel.trace, "x", len(panel.trace.accesses) - 1)
    assert set(marks) == {"4"}, "13 columns are 4 tiles wide, and every tile reads x again"
    assert "x 4×, w 4×" in panel.numbers.value


def test_the_drawn_cells_follow_the_step(panel):
    panel.step.value = 3
    end = time.monotonic() + 5
    while "W" not in panel.memory.figure.data[2].text[0] and time.monotonic() < end:
        time.sleep(0.02)
    assert panel.memory.figure.data[2].text[0][:5] == ["W"] * 4 + [""]
    assert "writes 4 elements of out" in panel.memory.widget.description


@pytest.mark.parametrize("name", PUZZLES)
def test_the_static_twin_ends_with_everything_written(panel, name):
    panel.kernel.value = name
    figure = panel.static()
    steps = figure.layout.sliders[0].steps
    assert 2 <= len(steps) <= kernel_step.STATIC_POSITIONS + 1
    assert steps[-1].label == str(len(panel.trace.accesses))
    out = [mark for row in steps[-1].args[0]["text"][-1] for mark in row]
    assert set(out) <= {"·", "W", "×"} and "W" in out
    assert out.count("×") == (3 if name == "masked add" else 0), "three lanes of four lie behind the end"
    assert len(json.dumps(figure.to_plotly_json(), default=str)) < 150_000


def test_the_table_lists_every_access(panel):
    lines = panel.table().splitlines()
    assert lines[0] == "masked add by the kit, count=13, BLOCK=4: 26 reads, 13 writes"
    assert [line.split() for line in lines[-4:-1]] == [
        ["3", "reads", "x", "1", "3"], ["3", "reads", "y", "1", "3"], ["3", "writes", "out", "1", "3"],
    ]  # fmt: skip
    panel.kernel.value = "TT contraction"
    assert "more" in panel.table() and len(panel.table().splitlines()) < 32


def test_a_kernel_of_the_learner_is_shown_after_its_check(panel):
    panel.whose.value = MINE
    assert panel.whose.value == KIT and "has been checked yet" in panel.whose.message.value
    assert not check("12.1", _reads_twice).passed
    panel.whose.value = MINE
    assert panel.trace.reads == 3 * 13 and "x 2×" in panel.numbers.value and MINE in panel.table()


def test_a_fault_of_a_learners_kernel_is_on_the_card_and_changes_nothing(panel):
    ANSWERS["masked add"] = _outside
    before = panel.trace
    panel.whose.value = MINE
    assert "reads x[13]" in panel.card.text and panel.trace is before
    panel.whose.value = KIT
    assert panel.card.text == ""


@pytest.mark.parametrize("kind", ["absent", "broken", "no-gpu"])
def test_the_panel_says_in_a_line_why_the_interpreter_is_not_there(monkeypatch, kind):
    monkeypatch.setattr(puzzles, "triton_status", lambda: TritonStatus(kind, "a reason in words"))
    line = html.unescape(lab.KernelStepPanel(LabState()).engine.value)
    assert "Triton's interpreter cannot run here: a reason in words." in line


def test_lessons_run_without_triton(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(door.importlib, "import_module", missing)
    triton, language = door.triton_or_model()
    assert language is tl and check("12.1", triton.jit(PUZZLES["masked add"].kernel)).passed
