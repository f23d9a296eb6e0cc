"""Every kernel at every shipped tile, compiled without a GPU: no spills, within the chip's limits, on tensor cores."""

from __future__ import annotations

import dataclasses

import pytest

from comera_lab.experiments import kernel_report as report
from comera_lab.experiments.recorder import read_rows
from comera_lab.experiments.rows import KernelRow

GOOD = KernelRow(
    kernel="tt_linear rows bf16",
    capability=90,
    warps=4,
    stages=3,
    registers=128,
    spill_bytes=0,
    shared_bytes=90_000,
    products=["bf16 128x64x32"],
    matrix_kind="wgmma",
    matrix_instructions=4,
    loads=20,
    wide_loads=12,
    wide_stores=4,
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_shipped_kernel_is_well_compiled():
    rows = list(report.kernel_rows())
    assert {row.capability for row in rows} == {80, 90}
    assert {row.kernel.partition(" ")[0] for row in rows} == {
        "blockwise_quant", "projected_adam", "tt_linear", "tt_lookup",
    }  # fmt: skip
    assert [(row.kernel, row.capability, report.faults(row)) for row in rows if report.faults(row)] == []
    for row in rows:
        assert 0 < row.registers <= report.REGISTER_LIMIT
        assert row.spill_bytes == 0
        assert row.shared_bytes <= report.SHARED_LIMIT[row.capability]
    for row in rows:
        if row.capability == 90 and any(product.startswith("bf16 128x") for product in row.products):
            assert row.matrix_kind == "wgmma"


@pytest.mark.slow
def test_a_table_and_rows_come_from_the_machine_code(tmp_path, capsys):
    rows = report.run_static(tmp_path / "static.jsonl", "projected_adam lift bf16 rows|quantize bf16")
    info, *read = read_rows(tmp_path / "static.jsonl")
    assert info["config"]["suite"] == "kernels-static"
    assert [row["kernel"] for row in read] == [row.kernel for row in rows]
    codes = [row for row in rows if not row.products]
    lifts = [row for row in rows if row.products]
    assert len(codes) == len(lifts) == 2
    assert {row.matrix_kind for row in lifts} == {"wgmma", "mma"}
    assert {row.matrix_kind for row in codes} == {None}
    assert all(row.wide_loads > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "nothing was run on a GPU" in printed
    assert len(printed.splitlines()) == len(rows) + 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 240_000}, "240000 bytes of shared memory, there are 232448"),
        ({"shared_bytes": 170_000, "capability": 80, "matrix_kind": "mma"}, "there are 166912"),
        ({"matrix_kind": "mma"}, "multiplies by mma instead of wgmma"),
        ({"matrix_kind": None}, "plain arithmetic instead of wgmma"),
        ({"wide_loads": 0}, "no load of 16 bytes"),
        ({"products": ["bf16 16x64x32", "f16 32x16x16"]}, "wgmma instead of mma"),
    ],
)
def test_every_fault_is_named(change, fault):
    assert report.faults(GOOD) == []
    (found,) = report.faults(dataclasses.replace(GOOD, **change))
    assert fault in found


def test_faults_fail_the_suite_after_its_last_row(tmp_path, monkeypatch):
    bad = dataclasses.replace(GOOD, kernel="bad", spill_bytes=8)
    monkeypatch.setattr(report, "kernel_rows", lambda pattern: iter([bad, GOOD]))
    with pytest.raises(ArithmeticError, match="1 of 2 kernels are badly compiled: bad sm_90: spills 8 bytes"):
        report.run_static(tmp_path / "static.jsonl")
    assert len(read_rows(tmp_path / "static.jsonl")) == 3


def test_what_cannot_be_compiled_says_why(monkeypatch):
    with pytest.raises(ValueError, match="no kernel case matches 'tpu'"):
        next(report.kernel_rows("tpu"))
    with pytest.raises(FileNotFoundError, match="nvdisasm is not at"):
        report._output(report.Path("/nowhere/nvdisasm"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="Unset it and start again"):
        next(report.kernel_rows())
