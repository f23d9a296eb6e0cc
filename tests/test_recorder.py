"""Laws of the recorder: what is written is legal JSON, what is read is checked, what fails costs no rows."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from comera_lab.experiments import provenance
from comera_lab.experiments.recorder import (
    BenchRow,
    EvalRow,
    Recorder,
    RecorderWarning,
    ResumeRow,
    RunInfo,
    StepRow,
    as_dict,
    read_rows,
    split_runs,
    write_rows,
)
from comera_lab.experiments.runs import TrainConfig


def _step(step: int, loss: float = 1.0) -> StepRow:
    return StepRow(step=step, loss_nats=loss, step_time_ms=2.5, elapsed_s=step * 2.5e-3)


def _eval(step: int) -> EvalRow:
    return EvalRow(step=step, loss_nats=0.5, accuracy=0.9, elapsed_s=1.0)


def test_first_row_says_who_ran_what_where(tmp_path: Path) -> None:
    config = TrainConfig(steps=7, seed=3)
    with Recorder(tmp_path / "run.jsonl", config, command="comera-lab train") as recorder:
        recorder.add(_step(1))
    first, second = read_rows(tmp_path / "run.jsonl")
    assert first == as_dict(recorder.info)
    assert first["seed"] == 3 and first["config"]["steps"] == 7
    assert first["command"] == "comera-lab train"
    assert first["torch"] == torch.__version__ and first["threads"] == torch.get_num_threads()
    assert first["device"].endswith("(cpu)") and first["driver"] is None
    assert first["schema_version"] == 1
    assert first["date"].endswith("+00:00")
    assert second == as_dict(_step(1))


def test_every_row_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl")
    for step in range(1, 4):
        recorder.add(_step(step))
        assert len(read_rows(tmp_path / "run.jsonl")) == 1 + step
    recorder.close()


def test_without_a_path_rows_stay_in_memory() -> None:
    recorder = Recorder(None, {"seed": 5})
    recorder.add(_eval(1))
    assert isinstance(recorder.rows[0], RunInfo) and recorder.info.seed == 5
    assert recorder.rows[1:] == [_eval(1)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_numbers_are_legal_json_and_come_back(tmp_path: Path, value: float) -> None:
    with Recorder(tmp_path / "run.jsonl") as recorder:
        recorder.add(_step(1, value))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1], parse_constant=refuse)
    assert line["loss_nats"] is None and line["nonfinite"] == {"loss_nats": str(value)}
    back = read_rows(tmp_path / "run.jsonl")[1]["loss_nats"]
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_a_half_written_last_line_is_reported_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        recorder.add(_step(1))
        recorder.add(_step(2))
    path.write_text(path.read_text()[:-20])
    with pytest.warns(RecorderWarning, match=r"ends in half a line .* The 2 rows before it are complete"):
        rows = read_rows(path)
    assert [row["kind"] for row in rows] == ["run", "step"]


def test_a_file_with_half_a_last_line_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        recorder.add(_step(1))
        recorder.add(_step(2))
    path.write_text(path.read_text()[:-20])
    with Recorder(path) as recorder:
        recorder.add(_step(3))
    rows = read_rows(path)
    assert [(row["kind"], row.get("step")) for row in rows] == [("run", None), ("step", 1), ("run", None), ("step", 3)]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        recorder.add(_step(1))
    path.write_text(path.read_text().rstrip("\n"))
    assert len(read_rows(path)) == 2
    with Recorder(path) as recorder:
        recorder.add(_step(2))
    assert len(read_rows(path)) == 4


def test_a_killed_writer_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = f"""
        import torch
        from comera_lab.experiments.recorder import Recorder, StepRow
        recorder = Recorder({str(path)!r})
        step = 0
        while True:
            step += 1
            recorder.add(StepRow(step=step, loss_nats=1.0, step_time_ms=1.0, elapsed_s=1.0))
            if step == 50:
                print("ready", flush=True)
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline().strip() == b"ready"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with Recorder(path) as recorder:                                     # cuts off half a line, if there is one
        recorder.add(_step(0))
    steps = [row["step"] for row in read_rows(path) if row["kind"] == "step"][:-1]
    assert len(steps) >= 50 and steps == list(range(1, len(steps) + 1))


def test_rows_that_a_resumed_run_did_again_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        for step in (1, 2, 3):
            recorder.add(_step(step, loss=1.0))
    with Recorder(path) as recorder:
        recorder.add(ResumeRow(step=1))
        for step in (2, 3, 4):
            recorder.add(_step(step, loss=2.0))
    rows = [row for row in read_rows(path) if row["kind"] == "step"]
    assert [(row["step"], row["loss_nats"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_a_resume_leaves_other_runs_of_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for first in ([_step(1), _step(2)], [_step(1), _step(2), _eval(2)], [ResumeRow(step=1), _step(2)]):
        with Recorder(path) as recorder:
            for row in first:
                recorder.add(row)
    runs = split_runs(read_rows(path))
    assert [[(row["kind"], row.get("step")) for row in run[1:]] for run in runs] == [
        [("step", 1), ("step", 2)],
        [("step", 1)],
        [("resume", 1), ("step", 2)],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not JSON"),
        ("[1, 2]", "must be an object whose kind is one of"),
        ('{"kind": "steps"}', "must be an object whose kind is one of"),
        (
            '{"kind": "eval", "step": 1, "loss_nats": 1.0, "accuracy": 1.0}',
            r"kind eval must have exactly its fields, but lacks \['elapsed_s'\]",
        ),
        (
            '{"kind": "eval", "step": 1, "loss_nats": 1.0, "accuracy": 1.0, "elapsed_s": 1, "more": 2}',
            r"has unknown \['more'\]",
        ),
        (
            '{"kind": "eval", "step": 1.5, "loss_nats": 1.0, "accuracy": 1.0, "elapsed_s": 1}',
            "step in a row of kind eval must be int, got 1.5",
        ),
        (
            '{"kind": "eval", "step": 1, "loss_nats": true, "accuracy": 1.0, "elapsed_s": 1}',
            "loss_nats in a row of kind eval must be float, got True",
        ),
    ],
)
def test_a_line_that_is_no_row_is_refused_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    Recorder(path).close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_rows_of_another_schema_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Recorder(path).close()
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ValueError, match="has schema version 2, this comera_lab reads version 1"):
        read_rows(path)


def test_a_file_without_a_run_row_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [_step(1)])
    with pytest.raises(ValueError, match="must start with a run row, got 'step'"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StepRow(step=1, loss_nats=torch.tensor(1.0), step_time_ms=1, elapsed_s=1), "loss_nats in a row"),  # type: ignore[arg-type]
        (BenchRow(op="a", provider="b", mode="c", value=1.0, unit="ms", sizes={"rows": math.nan}), "plain finite"),
        ({"step": 1}, "a row must be one of .*StepRow.*, got dict"),
    ],
)
def test_a_row_of_wrong_types_is_refused_before_it_is_written(tmp_path: Path, row: StepRow, message: str) -> None:
    with Recorder(tmp_path / "run.jsonl") as recorder, pytest.raises(ValueError, match=message):
        recorder.add(row)
    assert len(read_rows(tmp_path / "run.jsonl")) == 1


def test_bench_rows_round_trip(tmp_path: Path) -> None:
    row = BenchRow(
        op="tt_linear", provider="comera_lab", mode="forward", value=1.25, unit="ms", p20=1.0, p80=2.0, repeats=9,
        sizes={"rows": 8}, dtype="float32", device="cpu", versions={"torch": "2.13.0", "triton": None}, commit=None,
    )
    with Recorder(tmp_path / "bench.jsonl") as recorder:
        recorder.add(row)
    assert read_rows(tmp_path / "bench.jsonl")[1] == as_dict(row)


def test_config_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="config must be a dataclass or a mapping, got list"):
        Recorder(None, [1])


@pytest.mark.parametrize("where", ["missing/run.jsonl", "file/run.jsonl", "folder"])
def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=f"cannot record to .*{where}: .*Give a file in a folder that exists"):
        Recorder(tmp_path / where)


def test_a_full_disk_at_the_start_is_refused_by_name() -> None:
    with pytest.raises(OSError, match="cannot record to /dev/full: No space left on device"):
        Recorder("/dev/full")


def test_a_disk_that_fills_up_costs_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)
    recorder.add(_step(1))
    assert recorder._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file.fileno())                               # from here on every write fails
    os.close(full)
    with pytest.warns(RecorderWarning, match=r"run.jsonl takes no more rows: No space left on device"):
        recorder.add(_step(2))
    recorder.add(_step(3))
    recorder.close()
    assert recorder.problem is not None and "write_rows" in recorder.problem
    assert recorder.rows[1:] == [_step(1), _step(2), _step(3)]
    assert [row.get("step") for row in read_rows(path)] == [None, 1]
    write_rows(tmp_path / "saved.jsonl", recorder.rows)
    assert [row.get("step") for row in read_rows(tmp_path / "saved.jsonl")] == [None, 1, 2, 3]


def test_commit_is_none_outside_of_the_kit_s_own_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    installed = tmp_path / "site-packages" / "comera_lab" / "experiments" / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.commit() is None
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None, "no git"


def test_commit_names_the_checkout_and_says_when_files_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "comera_lab" / "experiments" / "provenance.py"
    file.parent.mkdir(parents=True)
    file.write_text("one")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "__file__", str(file))
    clean = provenance.commit()
    assert clean is not None and len(clean) == 40
    file.write_text("two")
    assert provenance.commit() == f"{clean}-dirty"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/opt/lab/bin/comera-lab", "train", "--steps", "9"], "comera-lab train --steps 9"),
        (["/opt/comera_lab/__main__.py", "bench", "--out", "/opt/a.jsonl"], "python -m comera_lab bench --out a.jsonl"),
        (["/opt/lab/site-packages/ipykernel_launcher.py", "-f", "/home/ada/kernel.json"], "notebook"),
        (["-c"], "python"),
    ],
)
def test_launch_command_names_no_folder(monkeypatch: pytest.MonkeyPatch, argv: list[str], command: str) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.launch_command() == command


def test_device_and_driver_of_a_gpu_are_asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"fake {device}")
    monkeypatch.setattr(provenance, "_output_of", lambda *command: "580.1\n580.1" if "nvidia-smi" in command else None)
    assert provenance.device_name("cuda:0") == "fake cuda:0"
    assert provenance.driver("cuda:0") == "580.1"
    assert provenance.device_name("meta") == "meta"
