from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest
import torch

from comera_lab.experiments import bench, bench_embeddings, bench_optimizers
from comera_lab.experiments.bench import Case, run_suite
from comera_lab.experiments.bench_embeddings import TableCase
from comera_lab.experiments.bench_optimizers import RefreshCase, StepCase
from comera_lab.experiments.recorder import read_rows
from comera_lab.models.dlrm import DLRMConfig
from comera_lab.models.encoder import EncoderConfig

SMALL = Case(rows=300, in_features=24, out_features=36, rank=4)


@pytest.fixture(scope="module")
def small():
    """The CPU suite with the same code, smaller layers and shorter turns."""
    monkeypatch = pytest.MonkeyPatch()
    for name, value in {
        "SETTLE": 1,
        "TIMED": 2,
        "HEADLINE": SMALL,
        "FEW_ROWS": [Case(rows=2, in_features=24, out_features=36, rank=4)],
        "TINY": SMALL,
        "WIDTHS": [SMALL],
        "ENCODER": EncoderConfig(layers=1, head="cross", positions=128, vocabulary=2000),
    }.items():
        monkeypatch.setattr(bench, name, value)
    table = TableCase(ids=64, rows=500, columns=16, rank=4)
    step = DLRMConfig(table_rows=(500, 300), numbers=2, dim=16, rank=4, threshold=400)
    for name, value in {"WORDS": table, "CLICKS": table, "STEP": step, "STEP_ROWS": 64}.items():
        monkeypatch.setattr(bench_embeddings, name, value)
    step_case = StepCase(shapes=((128, 96),), turns=2, tokens=8, training_steps=2)
    monkeypatch.setattr(bench_optimizers, "STEP", step_case)
    monkeypatch.setattr(bench_optimizers, "REFRESH", RefreshCase(rows=40, cols=36, rank=8))
    monkeypatch.setenv("COMERA_LAB_ALLOCATOR", "off")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    monkeypatch.undo()


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Rows, file and printed lines of one run."""
    path, printed = tmp_path_factory.mktemp("bench") / "bench.jsonl", io.StringIO()
    with contextlib.redirect_stdout(printed):
        rows = run_suite("cpu", path)
    return rows, path, printed.getvalue()


@pytest.mark.slow
def test_rows_are_recorded_printed_and_whole(run):
    rows, path, printed = run
    info, *read = read_rows(path)
    assert info["config"]["suite"] == "cpu"
    assert info["config"]["allocator"]
    assert [row["op"] for row in read] == [row.op for row in rows]
    assert len(printed.splitlines()) == len(rows) + 1
    modes = {(row.op, row.provider, row.mode) for row in rows}
    assert {
        ("tt_linear", "tt", "correctness"),
        ("tt_linear", "dense", "forward+backward"),
        ("tt_linear", "tt over dense", "forward+backward"),
        ("tt_linear", "tt over dense", "forward+backward, cold"),
        ("tt_linear", "tt", "kept for backward"),
        ("tt_order", "planned over better", "forward+backward"),
        ("tt_linear_width", "tt over dense", "forward"),
        ("encoder_step", "early stage over none", "training step"),
        ("tt_lookup", "tt", "correctness"),
        ("tt_lookup", "tt over per id", "forward+backward"),
        ("tt_lookup", "tt over per id", "peak of forward+backward"),
        ("tt_lookup", "tt over dense", "step with AdamW"),
        ("dlrm_step", "tt over dense", "training step"),
    } <= modes
    for row in rows:
        assert row.value > 0
        if row.p20 is not None:
            assert row.p20 <= row.value <= row.p80


@pytest.mark.slow
def test_correctness_comes_before_every_timing(run):
    modes = [row.mode for row in run[0]]
    last = max(k for k, mode in enumerate(modes) if mode == "correctness")
    assert set(modes[: last + 1]) == {"correctness"}


def test_a_wrong_layer_is_refused_before_it_is_timed(small, tmp_path, monkeypatch):
    right = bench.TTLinear.forward
    monkeypatch.setattr(bench.TTLinear, "forward", lambda layer, x: 1.01 * right(layer, x))
    with pytest.raises(ArithmeticError, match=r"must stay within 1e-05 of float64, got 1\.0"):
        run_suite("cpu", tmp_path / "bench.jsonl")
    assert len(read_rows(tmp_path / "bench.jsonl")) == 1


def test_memory_kept_for_backward_is_x_xA_and_the_half_chains():
    row = bench._extra_memory(Case(rows=4096, in_features=768, out_features=3072, rank=30), torch.device("cpu"))
    expected = 4 * (4096 * (768 + 30) + 30 * (768 + 3072)) / 2**20
    assert expected <= row.value <= 1.02 * expected


@pytest.mark.parametrize(
    ("suite", "message"),
    [("tpu", "suite must be 'cpu' or 'gpu', got 'tpu'"), ("gpu", "suite 'gpu' needs a CUDA device, got none")],
)
def test_suites_that_cannot_run_say_why(suite, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        run_suite(suite)


def test_the_bench_needs_torch_and_numpy_alone():
    code = (
        "import sys\n"
        "for name in ('tensorly', 'ipywidgets', 'plotly', 'sklearn', 'safetensors', 'IPython', 'triton', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import comera_lab.experiments.bench\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
