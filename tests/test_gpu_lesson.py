"""Lesson 13: floors by arithmetic, recordings with their provenance or refused, operations counted, two panels.

Every recording in here is made up in the test that reads it, on a device that does not exist.
"""

from __future__ import annotations

import dataclasses
import html

import pytest
import torch
from fake_graph import FakeCapture

import comera_lab.panels as lab
from comera_lab.experiments import bench, bench_gpu, recordings, roofline
from comera_lab.experiments.recorder import BenchRow, RunInfo, read_rows, write_rows
from comera_lab.experiments.roofline import PRINTED, Ceilings, Problem, measured_ceilings, works
from comera_lab.experiments.tape import count_operations
from comera_lab.panels import trace
from comera_lab.panels.state import LabState
from comera_lab.shapes import ShapeError
from comera_lab.teaching.questions_13 import gpu_question

SMALL = Problem(rows=100, in_features=64, out_features=32, rank=8, dtype="fp32")
INFO = RunInfo(
    device="Made-up GPU", driver="1.2", threads=4, torch="2.11.0", triton="3.6.0", commit="abcdef0123456789",
    command="comera-lab bench --suite gpu", seed=0, config={"suite": "gpu"}, date="2030-01-02T03:04:05+00:00",
)  # fmt: skip
SIZES = {"rows": 16_384, "in_features": 4096, "out_features": 4096, "rank": 64}


def timed(provider, value, op="tt_linear", mode="forward+backward", floor=None, **changes):
    sizes = SIZES if floor is None else {**SIZES, "bytes": 1, "flops": 2, "floor_ms": floor}
    row = BenchRow(op=op, provider=provider, mode=mode, value=value, unit="ms", p20=0.9 * value, p80=1.2 * value,
                   repeats=25, sizes=sizes, dtype="bfloat16")  # fmt: skip
    return dataclasses.replace(row, **changes)


RATIO = BenchRow(op="tt_linear", provider="tt over dense", mode="forward+backward", value=4.0, unit="x faster",
                 sizes=SIZES, dtype="bfloat16")  # fmt: skip
ROWS = [
    BenchRow(op="tt_linear", provider="kernel", mode="correctness", value=1e-3, unit="relative error"),
    timed("dense", 8.0, floor=6.0), timed("tt", 2.0, floor=1.0), RATIO,
    timed("dense", 4.0, mode="forward"), timed("adamw fused", 3.0, op="optimizer_step", mode="update"),
]  # fmt: skip


def recorded(folder, rows=ROWS, name="gpu_made-up-gpu_2030-01-02.jsonl", **changes):
    write_rows(folder / name, [dataclasses.replace(INFO, **changes), *rows])
    return [folder]


def words(widget):
    return html.unescape(widget.value)


# ---- floors ------------------------------------------------------------------------------------------------


def test_bytes_and_flops_are_those_of_the_products_one_by_one():
    """Counted from torch's own operations, forward and backward, every operand once."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(100, size, generator=generator) for size in (64, 32))
    weight, left, right = (torch.randn(size, generator=generator) for size in ((64, 32), (64, 8), (8, 32)))
    dense = count_operations(lambda: (x @ weight, grad @ weight.t(), x.t() @ grad))

    def halves():
        inner, inner_grad = x @ left, grad @ right.t()
        return inner @ right, inner_grad @ left.t(), x.t() @ inner_grad, inner.t() @ grad

    found = works(SMALL)
    counted = count_operations(halves)
    assert (dense.launches, counted.launches) == (3, 6)
    assert (found[0].bytes, found[1].bytes) == (dense.bytes, counted.bytes)
    spared = 2 * 100 * 8 * 4  # x A for (x A) B, and g B' for (g B') A', are not read again
    assert found[2].bytes == counted.bytes - spared
    assert [work.flops for work in found] == [6 * 100 * 64 * 32, *[6 * 100 * 8 * 96] * 2]


def test_a_floor_is_the_larger_of_two_times():
    work = roofline.Work("w", bytes=4_000, flops=1_000)
    slow_memory = Ceilings("d", 1e6, {"fp32": 1e6}, "test")
    assert work.floor_ms(slow_memory, "fp32") == 4.0
    assert work.floor_ms(Ceilings("d", 1e9, {"fp32": 1e6}, "test"), "fp32") == 1.0
    assert work.bound(slow_memory, "fp32") == "memory" and slow_memory.ridge("fp32") == 1.0
    assert work.bound(Ceilings("d", 1e9, {"fp32": 1e6}, "test"), "fp32") == "arithmetic"


def test_a_problem_refuses_what_is_none():
    with pytest.raises(ShapeError, match="at least 1, got"):
        dataclasses.replace(SMALL, rank=0)
    with pytest.raises(ValueError, match="must be one of bf16, fp32, got 'int8'"):
        dataclasses.replace(SMALL, dtype="int8")


def test_printed_ceilings_name_their_source():
    assert [ceilings.device for ceilings in PRINTED] == ["NVIDIA H200 SXM", "NVIDIA A100 SXM 80 GB"]
    for ceilings in PRINTED:
        assert "data sheet" in ceilings.source and set(ceilings.flops_per_s) == set(roofline.ITEM_BYTES)


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(roofline, "COPY_ELEMENTS", 1 << 16)
    monkeypatch.setattr(roofline, "PRODUCT_EDGE", {"fp32": 64, "bf16": 32})


def test_this_cpu_is_measured_piece_by_piece(_quick):
    *pieces, (done, ceilings) = measured_ceilings()
    assert done == "done" and all(found is None for _, found in pieces)
    assert ceilings.device.endswith("(cpu)") and ceilings.source.startswith("measured here")
    assert ceilings.bytes_per_s > 1e6 and min(ceilings.flops_per_s.values()) > 1e6


def test_the_guess_has_the_computed_ratio():
    question = gpu_question()
    index, why = question.answer()
    assert question.choices[index] == "about 10 times"
    assert "9.8 times" in why and "1.8 times at 768 (computed" in why


# ---- operations --------------------------------------------------------------------------------------------


def test_views_and_allocations_are_no_launches():
    x = torch.ones(4, 6)
    found = count_operations(lambda: torch.empty(9) is x.t().reshape(24).view(2, 12)[1:])
    assert found.names == {"clone": 1}, "reshape of a transposed matrix has to copy, all else is free"
    assert (found.launches, found.bytes) == (1, 2 * x.nbytes)
    assert count_operations(lambda: x.add_(1)).bytes == 2 * x.nbytes


def test_a_tape_knows_its_lengths_and_a_number_on_it_stays():
    weight, capture, rate = torch.zeros(2), FakeCapture(), 0.5
    replay = capture.record(lambda: weight.sub_(torch.ones(2), alpha=rate))
    replay()
    rate = 100.0
    replay()
    assert weight.tolist() == [-1.0, -1.0] and capture.lengths == [3]
    with pytest.raises(RuntimeError, match="the host reads a tensor"):
        capture.record(lambda: weight.sub_(torch.ones(2), alpha=float(weight[0])))


# ---- recordings --------------------------------------------------------------------------------------------


def test_a_recording_is_read_with_its_label(tmp_path):
    (found,), refused = recordings.find_recordings(recorded(tmp_path))
    assert refused == []
    assert found.label == "recorded on Made-up GPU, 2030-01-02, commit abcdef0"
    assert found.operations == ("tt_linear", "optimizer_step")
    case = found.of("tt_linear")[0]
    assert [(lane.provider, lane.time_ms, lane.floor_ms) for lane in case.lanes] == [
        ("dense", 8.0, 6.0), ("tt", 2.0, 1.0),
    ]  # fmt: skip
    assert case.words == "forward+backward, rows 16,384, in 4,096, out 4,096, rank 64, bfloat16"
    assert case.ratios == ("tt over dense: 4 x faster",)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"commit": None}, "they lack commit"),
        ({"date": ""}, "they lack date"),
        ({"device": ""}, "they lack device"),
        ({"driver": None}, "they lack driver"),
        ({"device": "Some CPU (cpu)", "driver": None}, "they lack driver, a GPU as device"),
    ],
)
def test_rows_without_provenance_are_refused_by_name(tmp_path, changes, lacks):
    found, (refused,) = recordings.find_recordings(recorded(tmp_path, **changes))
    assert found == []
    assert "gpu_made-up-gpu_2030-01-02.jsonl: 6 rows (tt_linear, optimizer_step) of the run of" in refused
    assert lacks in refused and "comera-lab bench" in refused


def test_a_file_without_a_first_row_and_a_foreign_row_are_refused(tmp_path):
    write_rows(tmp_path / "gpu_headless_2030-01-01.jsonl", ROWS)
    recorded(tmp_path, [*ROWS, timed("tt", 1.0, mode="forward", device="Another GPU")])
    recorded(tmp_path, ROWS[:1], "gpu_cut_2029-01-01.jsonl")
    (found,), refused = recordings.find_recordings([tmp_path])
    assert len(refused) == 3
    assert "tt_linear, tt, forward is refused, it says Another GPU in a run on Made-up GPU" in refused[0]
    assert "must start with a run row, got 'bench'" in refused[1]
    assert "holds no timed row" in refused[2]
    assert len(found.of("tt_linear")[1].lanes) == 1


def test_the_newest_gpu_run_comes_first_and_changes_show(tmp_path):
    recorded(tmp_path)
    recorded(tmp_path, name="gpu_a_2031-01-01.jsonl", date="2031-01-01T00:00:00", commit="1234567890-dirty")
    found, _ = recordings.find_recordings([tmp_path])
    assert [one.label.split(", ")[1] for one in found] == ["2031-01-01", "2030-01-02"]
    assert found[0].label.endswith("commit 1234567 with changes")


def test_every_recording_of_the_kit_has_its_provenance():
    found, refused = recordings.find_recordings([recordings.data_file("results/bench_cpu.jsonl").parent])
    assert refused == []
    assert any(one.name == "bench_cpu.jsonl" for one in found)


# ---- the panels --------------------------------------------------------------------------------------------


def test_without_a_gpu_run_the_panel_says_so_and_shows_floors(tmp_path):
    panel = lab.TracePanel(LabState(), folders=[tmp_path])
    assert list(panel.recordings) == ["floors of NVIDIA H200 SXM", "floors of NVIDIA A100 SXM 80 GB"]
    assert "No run on a GPU is recorded yet" in words(panel.notes)
    assert words(panel.label).count("Computed from the ceilings of NVIDIA H200 SXM") == 1
    assert "(computed)" in words(panel.line) and "recorded" not in words(panel.line)
    assert panel.bars.figure.layout.xaxis.title.text == "milliseconds, computed"
    want = [work.floor_ms(PRINTED[0], "bf16") for work in works(Problem(
        rows=16_384, in_features=4096, out_features=4096, rank=64))]  # fmt: skip
    assert list(panel.bars.figure.data[0].x) == want
    assert len(panel.static().layout.sliders[0].steps) == 4


def test_a_recorded_run_is_shown_with_its_label_and_no_floors_of_others(tmp_path):
    panel = lab.TracePanel(LabState(), folders=recorded(tmp_path))
    assert list(panel.recordings) == ["gpu_made-up-gpu_2030-01-02.jsonl"]
    assert "Recorded on Made-up GPU, 2030-01-02, commit abcdef0." in words(panel.label)
    assert "dense 8 ms; tt 2 ms (recorded). tt takes 4 times less than dense." in words(panel.line)
    assert "Share of the floor: dense 75 %, tt 50 %." in words(panel.line)
    bars, floors = panel.bars.figure.data
    assert (list(bars.y), list(bars.x), list(floors.x)) == (["dense", "tt"], [8.0, 2.0], [6.0, 1.0])
    assert list(bars.error_x.array) == pytest.approx([1.6, 0.4])
    panel.operation.value = "optimizer_step"
    assert panel.case.value.startswith("update")
    assert list(panel.bars.figure.data[0].y) == ["adamw fused"]
    assert "recorded on Made-up GPU" in panel.table() and "No run on a GPU" not in panel.table()
    assert "recorded on Made-up GPU" in panel.static().layout.xaxis.title.text
    with pytest.raises(ValueError, match="operation must be one of tt_linear, optimizer_step, got 'sleep'"):
        panel.operation.value = "sleep"


def test_refused_rows_are_named_on_the_panel(tmp_path):
    panel = lab.TracePanel(LabState(), folders=recorded(tmp_path, commit=None))
    assert "6 rows (tt_linear, optimizer_step)" in words(panel.notes) and "they lack commit" in words(panel.notes)
    assert "Made-up GPU" not in panel.table().partition("refused")[0]


def test_without_cuda_nothing_can_be_started(tmp_path):
    panel = lab.TracePanel(LabState(), folders=[tmp_path])
    assert panel.bar.start.disabled is not torch.cuda.is_available()
    if not torch.cuda.is_available():
        panel.runner.start(panel._job, wait=True)
        assert "needs a CUDA device, got none" in panel.runner.failure.summary


def on_a_gpu(monkeypatch, tmp_path, rows):
    """As if there were a CUDA device that gives these rows; the file says what this machine is."""
    made = bench.Recorder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "device_name", lambda device: "Made-up GPU")
    monkeypatch.setattr(bench, "date", lambda: INFO.date)
    monkeypatch.setattr(bench_gpu, "gpu_rows", lambda device: iter(rows))
    monkeypatch.setattr(bench, "Recorder", lambda path, config, *, device, seed: made(path, config, seed=seed))


def test_a_run_on_ones_own_gpu_fills_the_panel_and_leaves_a_file(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch, tmp_path, ROWS)
    panel = lab.TracePanel(LabState(), folders=[tmp_path])
    assert not panel.bar.start.disabled
    assert panel.run(wait=True)
    assert panel.recording.value == trace.MINE
    assert words(panel.label).startswith('<div class="comera-line">Measured here on ')
    assert panel.bars.figure.layout.xaxis.title.text == "milliseconds, measured here"
    assert "No run on a GPU is recorded yet" not in words(panel.notes)
    info, *rows = read_rows(tmp_path / "gpu_made-up-gpu_2030-01-02.jsonl")
    assert info["config"] == {"suite": "gpu"} and len(rows) == len(ROWS)


def test_stop_keeps_the_rows_so_far(tmp_path, monkeypatch):
    def endless():
        yield from ROWS[:3]
        while True:
            yield ROWS[0]

    on_a_gpu(monkeypatch, tmp_path, endless())
    panel = lab.TracePanel(LabState(), folders=[tmp_path])
    panel.run()
    while trace.MINE not in panel.recordings:
        assert panel.runner.active
    panel.stop(wait=True)
    assert panel.runner.state == "stopped"
    assert [lane.provider for lane in panel.shown.lanes][:1] == ["dense"]
    assert len(read_rows(tmp_path / "gpu_made-up-gpu_2030-01-02.jsonl")) >= 3


def test_the_roofline_follows_every_control():
    panel = lab.RooflinePanel(LabState())
    for control in (panel.rows_power, panel.in_features, panel.out_features, panel.rank):
        for value in (control.low, control.high):
            control.value = value
            assert panel.card.text == control.message.value == ""
        with pytest.raises(ValueError, match=r"got .*Choose a value in that range"):
            control.value = control.high + 1
    panel.dtype.value, panel.device.value = "fp32", PRINTED[1].device
    assert "on NVIDIA A100 SXM 80 GB" in words(panel.line)
    assert "2,039 GB/s, 19,500 GFLOP/s in fp32" in words(panel.source)
    for control, value in ((panel.in_features, 768), (panel.out_features, 768), (panel.rank, 64)):
        control.value = value
    panel.rows_power.value = 14
    panel._draw()
    dense, halves, fused = panel.works
    assert [trace.x[0] for trace in panel.roof.figure.data[1:]] == [w.intensity for w in (dense, halves, fused)]
    assert panel.roof.figure.data[0].x[1] == PRINTED[1].ridge("fp32")
    assert f"{dense.flops / fused.flops:.3g} times fewer FLOPs" in words(panel.line)
    assert panel.table().count("  arithmetic") == 3 and "(computed)" in panel.table()
    assert len(panel.static().layout.sliders[0].steps) == 5


def test_measuring_this_cpu_adds_a_roof(_quick):
    state = LabState()
    panel = lab.RooflinePanel(state)
    assert panel.run(wait=True)
    assert panel.device.value.endswith("(cpu)") and len(panel.device.options) == 3
    assert "measured here" in words(panel.source) and "Reached by a program." in words(panel.source)
    assert state.runs["roofline"]["bytes_per_s"] == panel.ceilings.bytes_per_s
