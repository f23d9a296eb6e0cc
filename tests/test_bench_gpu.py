"""The GPU suite run through on a CPU: every section, with few rows and a host clock. No time in it means anything."""

from __future__ import annotations

import math

import pytest
import torch
from fake_graph import FakeCapture

from comera_lab.experiments import bench, bench_gpu, bench_gpu_training, gpu_timing
from comera_lab.experiments.gpu_timing import Bench, CudaWatch, HostWatch
from comera_lab.experiments.recorder import read_rows, to_line
from comera_lab.objectives import stages

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(stages, "_finite", lambda loss: loss)  # as on a GPU: no read of the loss
    monkeypatch.setattr(bench_gpu, "SIZES", ((4096, 4096), (768, 3072)))
    monkeypatch.setattr(bench_gpu, "ROWS", (16_384, 128))
    monkeypatch.setattr(bench_gpu, "RANKS", (64, 32))
    monkeypatch.setattr(bench_gpu_training, "BATCHES", (32,))
    monkeypatch.setattr(bench_gpu_training, "TOKENS", 16)


def small(**changes):
    settings = {
        "device": CPU,
        "watch": HostWatch(),
        "samples": 5,
        "shrink": 64,
        "capture": lambda: FakeCapture(strict=False),
    }
    return Bench(**settings | changes)


@pytest.mark.slow
def test_every_section_gives_whole_rows(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)  # half a minute of a C++ compiler
    rows = list(bench_gpu.gpu_rows(CPU, small()))
    for row in rows:
        assert to_line(row)
        assert math.isfinite(row.value)
        assert row.value > 0 or row.mode == "correctness"
        if row.p20 is not None:
            assert row.p20 <= row.value <= row.p80
    checks = [k for k, row in enumerate(rows) if row.mode == "correctness"]
    assert checks == list(range(len(checks))), "everything is checked before anything is timed"
    assert {row.op for row in rows[: len(checks)]} == {"tt_linear", "tt_lookup", "optimizer_step", "blockwise_quant"}
    assert {"bandwidth", "rate"} <= {row.mode for row in rows if row.op == "ceiling"}
    found = {(row.op, row.provider) for row in rows}
    assert {
        ("tt_linear", "tt over dense"),
        ("tt_linear", "tt graph over dense graph"),
        ("encoder_step", "tt graph over dense graph"),
        ("encoder_step", "tt early stage graph"),
        ("optimizer_step", "coap over adamw fused"),
        ("optimizer_step", "coap 8-bit"),
        ("optimizer_step", "coap eager over adamw fused"),
        ("tt_linear", "tt compiled"),
        ("basis_refresh", "warm over svd"),
        ("tt_lookup", "tt over dense"),
        ("llama_step", "coap 8-bit over adamw fused"),
        ("blockwise_quant", "kernel"),
    } <= found
    floors = [row for row in rows if "floor_ms" in row.sizes]
    assert floors
    for row in floors:
        assert row.sizes["floor_ms"] > 0
        assert "% of the floor" in row.note


def test_floors_are_the_larger_of_bytes_and_flops():
    run = small(bytes_per_ms=1e6, flops_per_ms=1e9)
    assert run.floor_ms(2e6, 1e9) == 2.0
    assert run.floor_ms(2e6, 5e9) == 5.0
    assert small().floor_ms(1.0, 1.0) is None
    row = run.time("op", "p", "m", [lambda: None], {"rows": 1}, torch.float32, moved=2e6, flops=1e9)
    assert row.sizes == {"rows": 1, "bytes": 2_000_000, "flops": 1_000_000_000, "floor_ms": 2.0}


def test_counted_bytes_and_flops_of_the_layer():
    (row,) = bench_gpu._linear_rows(small(), (100, 64, 32, 8), torch.bfloat16, ("tt",), True)
    assert row.sizes["bytes"] == 3 * 2 * (100 * (64 + 32) + 8 * (64 + 32))
    assert row.sizes["flops"] == 3 * 2 * 100 * 8 * (64 + 32)
    (row,) = bench_gpu._linear_rows(small(), (100, 64, 32, 8), torch.bfloat16, ("dense",), False)
    assert row.sizes["flops"] == 2 * 100 * 64 * 32


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (bench_gpu.TTLinear, "tt_linear"),
        (bench_gpu.TTEmbedding, "tt_lookup"),
    ],
)
def test_a_wrong_layer_stops_the_suite_before_any_time(place, name, monkeypatch):
    right = place.forward
    monkeypatch.setattr(place, "forward", lambda layer, x: 1.05 * right(layer, x))
    rows = []
    with pytest.raises(ArithmeticError, match=f"{name} at .* must stay within"):
        rows.extend(row for row in bench_gpu.gpu_rows(CPU, small()))
    assert all(row.mode == "correctness" for row in rows)


def test_a_wrong_update_stops_the_suite(monkeypatch):
    right = bench_gpu_training.DeviceStep.write_scalars

    def wrong(update):
        right(update)
        update._scalars[:, 0] *= 1.05

    monkeypatch.setattr(bench_gpu_training.DeviceStep, "write_scalars", wrong)
    with pytest.raises(ArithmeticError, match="optimizer_step at"):
        list(bench_gpu_training.correctness(small()))


def test_a_broken_section_is_named_and_the_others_run(monkeypatch):
    def broken(bench):
        yield from ()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_gpu, "SECTIONS", {"first": broken, "codes": bench_gpu_training.codes_section})
    monkeypatch.setattr(bench_gpu, "correctness", lambda bench: iter(()))
    rows = []
    with pytest.raises(RuntimeError, match="1 sections failed: first: RuntimeError: out of memory"):
        rows.extend(row for row in bench_gpu.gpu_rows(CPU, small()))
    assert [(row.op, row.mode) for row in rows if row.mode == "failed"] == [("first", "failed")]


def test_no_section_is_begun_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(bench_gpu, "correctness", lambda bench: iter(()))
    rows = list(bench_gpu.gpu_rows(CPU, small(deadline=0.0)))
    assert [row.op for row in rows if row.mode == "not run"] == list(bench_gpu.SECTIONS)
    assert all(row.op == "ceiling" or row.mode == "not run" for row in rows)


def test_events_are_spread_over_calls_in_turn(monkeypatch):
    """The CUDA clock with fake events: a call takes 0.11 ms, so a sample holds three and its mean is that of one."""
    now, called = [0.0], []

    class Event:
        def record(self):
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    def call(name):
        called.append(name)
        now[0] += 0.11

    monkeypatch.setattr(gpu_timing, "_event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = CudaWatch().samples([lambda: call("a"), lambda: call("b")], count=20, settle=2)
    assert times == pytest.approx([0.11] * 20)
    assert len(called) == 4 + 2 + 20 * 3
    assert called[:4] == ["a", "b", "a", "b"]


def test_rows_go_to_a_file_named_after_device_and_date(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(bench, "date", lambda: "2026-12-01T10:00:00+00:00")
    monkeypatch.setattr(bench_gpu, "gpu_rows", lambda device: bench_gpu_training.codes_section(small()))
    made = bench.Recorder

    def on_this_cpu(out, config, *, device, seed):
        return made(out, config, device="cpu", seed=seed)

    monkeypatch.setattr(bench, "Recorder", on_this_cpu)
    rows = bench.run_suite("gpu")
    info, *read = read_rows(tmp_path / "gpu_nvidia-h200_2026-12-01.jsonl")
    assert info["config"]["suite"] == "gpu"
    assert len(read) == len(rows) == 2
