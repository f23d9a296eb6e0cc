"""Several processes against one: the same weights, one basis for all, one file for any number, clear ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from distributed_helpers import CASES, CONFIG, alone, bad_ends, die_or_sleep, model_of, resume_cases, train_cases
from tolerances import PROCESSES

from comera_lab.experiments.distributed import ProcessLost, World, run_processes
from comera_lab.experiments.parallel import Parallel, ParallelTrainer
from comera_lab.experiments.recorder import read_rows
from comera_lab.experiments.scale_out import ScaleOut, predicted_bytes, train_part
from comera_lab.optimizers.sharding import longest_side

pytestmark = pytest.mark.slow
TWO = [("coap", "fsdp", 1), ("coap", "ddp", 3), ("coap-paper", "fsdp", 2), ("coap-moved", "fsdp", 1), ("tt", "fsdp", 1)]
FOUR = [("coap", "fsdp", 1), ("adamw", "ddp", 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def by_two(folder):
    return run_processes(2, train_cases, TWO, str(folder))


@pytest.fixture(scope="module")
def references():
    return {case: alone(case) for case in CASES}


def difference(got, want):
    return max(float(np.abs(a - b).max()) for a, b in zip(got["weights"], want["weights"], strict=True))


def test_two_processes_train_as_one(by_two, references):
    for case, kind, _ in TWO:
        want = references[case]
        for found in by_two:
            got = found[f"{case}-{kind}"]
            assert difference(got, want) < PROCESSES, (case, kind)
            assert np.abs(np.subtract(got["losses"], want["losses"])).max() < PROCESSES
            assert np.abs(np.subtract(got["norms"], want["norms"])).max() < PROCESSES
            assert abs(got["judged"] - want["judged"]) < PROCESSES


def test_I05_the_basis_is_the_same_on_every_process_bit_for_bit(by_two):
    for case, kind, _ in TWO:
        first, second = (found[f"{case}-{kind}"] for found in by_two)
        assert first["bases"] == second["bases"]
        assert len(first["bases"]) == (0 if case == "tt" else 4), "161x64, 136x161, 160x136 and 10x160"
        assert all((a == b).all() for a, b in zip(first["weights"], second["weights"], strict=True))


def test_fsdp_splits_weights_gradients_and_moments_and_ddp_copies_them(by_two, references):
    whole = references["coap"]["held"]
    for found in by_two:
        copied, split = found["coap-ddp"]["held"], found["coap-fsdp"]["held"]
        assert copied == whole
        for pool in ("weights", "grads"):
            assert whole[pool] / 2 <= split[pool] < whole[pool] * 0.51
        assert found["coap-fsdp"]["report"] == split["optimizer"]
        basis = sum(map(len, found["coap-fsdp"]["bases"]))
        assert split["optimizer"] < (whole["optimizer"] - basis) * 0.52 + basis
        assert set(found["coap-fsdp"]["moments"]) == {"DTensor"}


def test_C01_saved_by_two_a_run_goes_on_in_one_and_in_four(by_two, folder, references):
    files = [("coap", "fsdp", str(folder / "coap-fsdp-2.pt")), ("coap", "ddp", str(folder / "coap-ddp-2.pt"))]
    files += [("tt", "fsdp", str(folder / "tt-fsdp-2.pt"))]
    assert torch.load(files[0][2], weights_only=True)["steps_done"] == CONFIG.steps // 2
    crossed = [(case, "ddp" if kind == "fsdp" else "fsdp", file) for case, kind, file in files]
    by_one = [resume_cases(World(), None, [(case, None, file) for case, _, file in files])]
    by_four = run_processes(4, resume_cases, crossed)
    for results in (by_one, by_four):
        for found in results:
            for case, _, file in files:
                assert difference(found[file], references[case]) < PROCESSES
                assert len(found[file]["losses"]) == CONFIG.steps


def test_four_processes_train_as_one_and_what_they_save_two_can_read(folder, references):
    found = run_processes(4, train_cases, FOUR, str(folder))
    for case, kind, _ in FOUR:
        assert max(difference(one[f"{case}-{kind}"], references[case]) for one in found) < PROCESSES
        assert len({b"".join(one[f"{case}-{kind}"]["bases"]) for one in found}) == 1
    file = str(folder / "coap-fsdp-4.pt")
    again = run_processes(2, resume_cases, [("coap", "fsdp", file)])
    assert max(difference(one[file], references["coap"]) for one in again) < PROCESSES


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_lesson_15_predicts_the_bytes_that_each_process_holds(kind):
    settings = ScaleOut(processes=4, kind=kind, optimizer="coap", steps=2)
    predicted = predicted_bytes(settings)
    held = [result["held"] for result in run_processes(4, train_part, settings)]
    assert held[0] == predicted
    for part in held[1:]:  # the last process may have a row less
        assert all(0.99 * predicted[pool] < part[pool] <= predicted[pool] for pool in predicted)


def test_every_process_hears_of_what_one_of_them_met(folder):
    first, second = run_processes(2, bad_ends, str(folder))
    assert "non-finite values (NaN or Inf) for parameter 0" in second["nan"]
    assert "non-finite values (NaN or Inf) for the part of another process" in first["nan"]
    assert "No such file" in first["disk"] and "it says why" in second["disk"]
    assert first["stop"] == second["stop"] == "True", "one was asked, both stop after the same step"
    for heard in (first, second):
        assert "COAPAdafactor is for parameters that a process holds whole" in heard["coap-adafactor"]
        assert "Flora is for parameters that a process holds whole" in heard["flora"]
        assert "8-bit moments are for parameters that a process holds whole" in heard["coap-8bit"]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("die", ProcessLost, r"process 1 of 2 died \(exit code 7\)"),
        ("raise", RuntimeError, "process 1 of 2: ValueError: the third step is refused here"),
        ("sleep", ProcessLost, "process 0 of 2 lost another one in step 3: it ended, or was silent for 2 s"),
    ],
)
def test_a_process_that_dies_raises_or_is_silent_ends_the_run_with_its_reason(how, error, message):
    with pytest.raises(error, match=message):
        run_processes(2, die_or_sleep, how, silence_s=2.0)


def test_a_run_of_torchrun_stops_at_sigterm_with_a_checkpoint_that_one_process_resumes(tmp_path):
    out = tmp_path / "run.jsonl"
    small = ["--size", "8", "--model", "dense", "--hidden", "128", "128", "--optimizer", "coap", "--device", "cpu"]
    train = ["-m", "comera_lab", "train", *small, "--out", str(out), "--steps"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *train, "100000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--parallel", "fsdp"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as run:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.read_text().count('"eval"')) and time.monotonic() < deadline:
            time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        said, complained = run.communicate(timeout=60)
    assert said.count("2 processes, fsdp; on cpu") == 1 and said.count("stopped after") == 1, "the first one alone"
    assert complained.count("asked to stop (SIGTERM); go on with --resume") == 1
    rows = read_rows(out)
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert [row["kind"] for row in rows].count("run") == 1 and steps == [*range(1, len(steps) + 1)]
    assert torch.load(out.with_suffix(".pt"), weights_only=True)["steps_done"] == steps[-1] >= 50
    last = str(steps[-1] + 3)
    again = subprocess.run(
        [sys.executable, *train, last, "--resume"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert again.returncode == 0 and f"done after {last} steps" in again.stdout, again.stderr
    assert json.loads(out.read_text().splitlines()[-1])["step"] == int(last)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--parallel", "ddp"], {}, "several processes must be started by torchrun, got a process on its own"),
        ([], {"WORLD_SIZE": "2", "RANK": "0"}, "torchrun started 2 processes, got no --parallel"),
        (["--accumulate", "0"], {}, "accumulate must be a whole number of at least 1, got 0"),
        (["code-small", "--accumulate", "2"], {}, "a language model takes --accumulate with --parallel alone"),
    ],
)
def test_wrong_starts_give_one_line(monkeypatch, capsys, arguments, environment, message):
    from comera_lab.__main__ import main

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--size", "8", "--steps", "1", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_parallel_run_refuses_what_it_cannot_honour():
    with pytest.raises(ValueError, match="2 processes need a kind, got None"):
        Parallel(World(0, 2))
    with pytest.raises(ValueError, match="kind must be one of ddp, fsdp, got 'zero'"):
        Parallel(World(), "zero")
    with pytest.raises(ValueError, match="train on the loss alone, got an objective"):
        ParallelTrainer(model_of("tt"), None, CONFIG, parallel=Parallel(), objective=lambda loss, model: loss)


def test_parameters_are_split_along_their_longest_side_where_that_is_even():
    assert [longest_side(shape, 2) for shape in ((10, 512), (512, 10), (10, 511), (511, 10), (1, 8, 4), (7,))] == [
        1, 0, 0, 0, 1, 0,
    ]  # fmt: skip
