"""`comera-lab` as a person types it: exit codes, one-line errors, files written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from comera_lab import __main__ as cli
from comera_lab.commands import lab
from comera_lab.experiments import bench
from comera_lab.experiments.recorder import read_rows, split_runs
from comera_lab.runtime import doctor, report
from comera_lab.teaching import build, reference

FAST = ["train", "--size", "8", "--hidden", "32", "--rank", "2", "--device", "cpu"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _process_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_LAB_ALLOCATOR", "off")


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a first lesson, the working directory above it, no checkout around the package."""
    notebook = tmp_path / "notebooks" / lab.FIRST_LESSON
    notebook.parent.mkdir()
    notebook.write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "elsewhere" / "comera_lab" / "commands" / "lab.py"))
    monkeypatch.chdir(tmp_path)
    return notebook


def one_line(capture: Capture) -> str:
    """The single line on stderr; nothing else was printed."""
    out, err = capture.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("comera-lab")
    assert out == ""
    return err


# doctor


def test_doctor_prints_the_report_and_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    good = 0 if doctor().ok else 1
    assert cli.main(["doctor"]) == good
    assert capsys.readouterr().out.startswith("comera_lab doctor: ")
    assert cli.main(["doctor", "--json"]) == good
    assert json.loads(capsys.readouterr().out)["torch"] == torch.__version__


def test_doctor_fails_with_1_when_something_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(report, "triton_status", lambda: report.TritonStatus("broken", "libtriton.so is gone"))
    assert cli.main(["doctor"]) == 1
    assert "libtriton.so is gone" in capsys.readouterr().out


# train


@pytest.mark.parametrize("kind", ["tt", "dense"])
def test_train_records_evaluates_and_says_what_was_measured(tmp_path: Path, capsys: Capture, kind: str) -> None:
    out = tmp_path / "new folder" / "run.jsonl"
    assert cli.main([*FAST, "--model", kind, "--steps", "60", "--out", str(out)]) == 0
    rows = read_rows(out)
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 61))
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [50, 60]
    assert rows[0]["config"]["model"] == kind
    assert ("rank" in rows[0]["config"]) == (kind == "tt")
    said = capsys.readouterr().out
    assert f"accuracy {rows[-1]['accuracy']:.1%}" in said
    assert "MiB (predicted)" in said
    assert "done after 60 steps" in said
    assert all("(measured here)" in line for line in said.splitlines() if " s " in line and "accuracy" in line)


@pytest.mark.parametrize("optimizer", ["coap", "coap-8bit", "coap-adafactor", "galore", "flora"])
def test_train_takes_every_projected_optimizer_and_its_ratio(tmp_path: Path, optimizer: str) -> None:
    out = tmp_path / "run.jsonl"
    arguments = ["--model", "dense", "--hidden", "160", "--steps", "2", "--optimizer", optimizer, "--rank-ratio", "2"]
    assert cli.main([*FAST, *arguments, "--out", str(out)]) == 0
    assert read_rows(out)[0]["config"]["optimizer_settings"] == {"rank_ratio": 2.0}


def test_train_resumes_as_if_it_had_not_stopped(tmp_path: Path, capsys: Capture) -> None:
    straight, broken = tmp_path / "straight.jsonl", tmp_path / "broken.jsonl"
    losses = []
    for out, runs in ((straight, [["100"]]), (broken, [["100", "--seconds", "1e-9"], ["100", "--resume"]])):
        for extra in runs:
            assert cli.main([*FAST, "--out", str(out), "--steps", *extra]) == 0
        losses.append([row["loss_nats"] for row in read_rows(out) if row["kind"] == "step"])
    assert losses[0] == losses[1]
    assert len(split_runs(read_rows(broken))) == 2
    assert "budget after 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "0"], "rank must be"),
        (["--hidden", "0"], "features must be"),
        (["--order", "0"], "order"),
        (["--steps", "0"], "steps must be"),
        (["--batch-size", "-1"], "batch_size must be"),
        (["--learning-rate", "0"], "learning_rate must be above 0"),
        (["--optimizer", "adam"], "optimizer must be one of"),
        (["--device", "tpu"], "device must be one of"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "missing.jsonl"], "found no checkpoint missing.pt"),
        (["--size", "9"], "argument --size: invalid choice"),
        (["--rank", "many"], "argument --rank: invalid int value: 'many'"),
        (["--speed", "9"], "unrecognized arguments: --speed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main([*FAST, *arguments])
    except SystemExit as stop:  # argparse leaves this way
        code = int(str(stop.code))
    assert code == 2
    assert said in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_one_line_and_exit_code_1(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "plain").write_text("")
    assert cli.main([*FAST, "--out", str(tmp_path / "plain" / "run.jsonl")]) == 1
    assert "plain" in one_line(capsys)


def test_damaged_checkpoint_is_one_line_and_exit_code_1(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run.pt").write_bytes(b"not a checkpoint")
    assert cli.main([*FAST, "--resume", "--out", str(tmp_path / "run.jsonl")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "run.pt" in error


def test_diverging_training_is_one_line_and_exit_code_1(capsys: Capture) -> None:
    code = cli.main([*FAST, "--steps", "200", "--optimizer", "sgd", "--learning-rate", "1e30"])
    error = capsys.readouterr().err
    assert code == 1
    assert error.count("\n") == 1
    assert "step" in error


def test_S01_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert cli.main(FAST) == 1
    assert 'scikit-learn is needed for the digits data. Install it with: pip install "comera_lab[lab]"' in one_line(
        capsys
    )


@pytest.mark.slow
def test_interrupt_keeps_the_run_and_leaves_with_130(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "comera_lab", *FAST, "--steps", "1000000", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        while "accuracy" not in run.stdout.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert re.fullmatch(r"comera-lab: stopped after step \d+; .*\n", error)
    steps = [row["step"] for row in read_rows(out) if row["kind"] == "step"]
    assert torch.load(out.with_suffix(".pt"), weights_only=True)["steps_done"] == steps[-1]


# bench and notebooks


def test_bench_passes_suite_and_file_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    asked: list[tuple[str, Path | None]] = []
    monkeypatch.setattr(bench, "run_suite", lambda suite, out: asked.append((suite, out)))
    assert cli.main(["bench", "--suite", "gpu", "--out", str(tmp_path / "rows" / "a.jsonl")]) == 0
    assert cli.main(["bench"]) == 0
    assert asked == [("gpu", tmp_path / "rows" / "a.jsonl"), ("cpu", None)]
    assert (tmp_path / "rows").is_dir()


def test_bench_gpu_without_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--suite", "gpu"]) == 2
    assert "needs a CUDA device" in one_line(capsys)


def test_notebooks_build_and_check(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(reference, "write_reference", list)
    monkeypatch.setattr(reference, "reference_drift", list)
    monkeypatch.setattr(build, "build_all", lambda: [Path("a.ipynb")])
    assert cli.main(["notebooks", "build"]) == 0
    assert capsys.readouterr().out == "wrote a.ipynb\n"
    monkeypatch.setattr(build, "check_drift", lambda: ["a.ipynb differs from its source."])
    assert cli.main(["notebooks", "check"]) == 1
    assert capsys.readouterr().out == "a.ipynb differs from its source.\n"
    monkeypatch.setattr(build, "check_drift", list)
    assert cli.main(["notebooks", "check"]) == 0


# lab


def test_lab_starts_jupyterlab_on_loopback_at_the_first_lesson(lesson: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3))
    code = cli.main(["lab", "--no-browser", "--port", "9999"])
    if os.name != "posix":
        assert code == 3
        return
    (command,) = started
    assert command == [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--LabApp.default_url=/lab/tree/notebooks/{lab.FIRST_LESSON}",
        f"--ServerApp.root_dir={lesson.parent.parent}",
        "--ServerApp.ip=127.0.0.1",
        "--no-browser",
        "--ServerApp.port=9999",
    ]
    assert not any("token" in argument or "password" in argument for argument in command)
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1


def test_lab_prefers_the_lessons_beside_the_package(lesson: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = lesson.parents[1] / "elsewhere" / "notebooks"
    beside.mkdir(parents=True)
    assert lab.lessons_folder() == lesson.parent
    (beside / lab.FIRST_LESSON).write_text("{}", encoding="utf-8")
    assert lab.lessons_folder() == beside
    monkeypatch.chdir(lesson.parent)
    (beside / lab.FIRST_LESSON).unlink()
    assert lab.lessons_folder() == lesson.parent
    plain = lab.lab_command(lesson.parent, browser=True, port=None, allow_root=False)
    assert not {"--no-browser", "--allow-root"}.intersection(plain)


def test_lab_without_lessons_says_where_it_looked(lesson: Path, capsys: Capture) -> None:
    lesson.unlink()
    assert cli.main(["lab"]) == 2
    assert str(lesson.parent) in one_line(capsys)


def test_lab_copies_the_lessons_of_an_installed_package_into_a_new_folder(
    lesson: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lesson.unlink()
    packed = lesson.parents[1] / "elsewhere" / "comera_lab" / "notebooks"
    for name in (lab.FIRST_LESSON, "solutions/one.ipynb", "images/one.png", "source/one.py"):
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        (packed / name).write_text("{}", encoding="utf-8")
    assert cli.main(["lab"]) == 2
    assert "comera-lab lab --copy lessons" in one_line(capsys)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 0))
    cli.main(["lab", "--copy", "mine"])
    copied = {path.relative_to("mine").as_posix() for path in Path("mine").rglob("*") if path.is_file()}
    assert copied == {lab.FIRST_LESSON, "solutions/one.ipynb", "images/one.png"}
    if os.name == "posix":
        assert f"--ServerApp.root_dir={Path('mine').resolve()}" in started[0]
    Path("mine", lab.FIRST_LESSON).write_text("my answers", encoding="utf-8")
    assert cli.main(["lab", "--copy", "mine"]) == 2
    assert "needs a new folder" in one_line(capsys)
    assert Path("mine", lab.FIRST_LESSON).read_text(encoding="utf-8") == "my answers"


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_lab_refuses_an_impossible_port(port: str, capsys: Capture) -> None:
    assert cli.main(["lab", "--port", port]) == 2
    assert f"got {port}" in one_line(capsys)


def test_lab_without_jupyterlab_names_it(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    assert cli.main(["lab"]) == 1
    assert "jupyterlab is needed for the lessons" in one_line(capsys)


@pytest.mark.slow
def test_real_lab_answers_with_its_token_only(lesson: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""import sys
from comera_lab import __main__ as cli
from comera_lab.commands import lab
lab.__file__ = {lab.__file__!r}
sys.exit(cli.main())"""
    hidden = {"JUPYTER_TOKEN", "JPY_PARENT_PID"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {name: str(lesson.parent) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "HOME")}
    command = [sys.executable, "-c", code, "lab", "--no-browser", "--allow-root", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = _announced_address(server)
            assert address.startswith(f"http://127.0.0.1:{port}/lab/tree/notebooks/{lab.FIRST_LESSON}?token=")
            assert _status(address) == 200
            with pytest.raises(urllib.error.HTTPError, match="403"):
                _status(f"http://127.0.0.1:{port}/api/contents")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)


def _announced_address(server: subprocess.Popen[str]) -> str:
    """The address with its token that JupyterLab prints for a person; the rest of its log is read away."""
    assert server.stderr is not None
    seen = []
    for line in server.stderr:
        seen.append(line)
        found = re.search(r"http://127\S+token=\w+", line)
        if found:
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return found[0]
    raise AssertionError("JupyterLab ended without an address:\n" + "".join(seen))


def _status(address: str) -> int:
    """HTTP status of `address`; the server listens a moment after it printed its address."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(address, timeout=30) as page:
                return int(page.status)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# the program itself


def test_module_and_help_run_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "comera_lab", "--help"], capture_output=True, text=True, check=True)
    for command in ("doctor", "lab", "train", "bench", "notebooks"):
        assert command in done.stdout
    wrong = subprocess.run([sys.executable, "-m", "comera_lab"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("comera-lab: ")
    assert wrong.stderr.count("\n") == 1


def test_train_defaults_are_those_of_the_library() -> None:
    options = cli._parser().parse_args(["train"])
    for name in ("steps", "batch_size", "learning_rate", "optimizer", "seed", "seconds"):
        assert getattr(options, name) is None, f"{name}: what is not given is left to TrainConfig"
