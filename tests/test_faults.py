"""Fault drill: kills, full and read-only disks, damaged files, jumping clocks, no memory, storms of clicks.

Each drill asks the same two things: was anything lost, and did a clear word say what happened? What other files test
already is not repeated here: a NaN loss in `fit`, a kill between two steps, half a last line, /dev/full.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import comera_lab.panels as lab
from comera_lab.experiments.checkpoints import CheckpointError
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.recorder import Recorder, StepRow, read_rows
from comera_lab.experiments.train import TrainConfig, Trainer, TrainingError, fit
from comera_lab.models.mlp import MLP
from comera_lab.panels import panel as panels
from comera_lab.panels.budget import BudgetPanel
from comera_lab.panels.budget_run import run_again
from comera_lab.panels.runner import Failure, Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.runtime import progress
from comera_lab.runtime.exhausted import memory_words

POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, signals and resource limits of POSIX")


def _data() -> Dataset:
    x = torch.rand(300, 64, generator=torch.Generator().manual_seed(0))
    return Dataset.from_tensors("largest of ten", x, x[:, :10].argmax(dim=1))


def _model() -> MLP:
    return MLP((64, 16, 10), kind="tt", rank=4, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Drill:
    """What one process of the drill printed, and how it ended: 0, or minus the signal."""

    said: str
    ended: int


_PRELUDE = """
import os, sys, json, signal, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from comera_lab.experiments import checkpoints, recorder as recording
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.recorder import Recorder, read_rows
from comera_lab.experiments.train import TrainConfig, Trainer, fit
from comera_lab.models.mlp import MLP

x = torch.rand(300, 64, generator=torch.Generator().manual_seed(0))
data = Dataset.from_tensors("largest of ten", x, x[:, :10].argmax(dim=1))
config = TrainConfig(steps=24, checkpoint_every=8, evaluate_every=6, seed=3)

def model():
    return MLP((64, 16, 10), kind="tt", rank=4, generator=torch.Generator().manual_seed(3))

def train(folder, resume=False, **more):
    net = model()
    with Recorder(folder / "rows.jsonl", config) as recorder:
        result = fit(net, data, config, recorder=recorder, checkpoint=folder / "run.pt", resume=resume, **more)
    return net, result

import comera_lab.panels as lab
from comera_lab.experiments.train import TrainingError
from comera_lab.panels import budget_run
from comera_lab.panels.budget_report import budget_report
from comera_lab.panels.state import LabState
from comera_lab.runtime import progress
from comera_lab.teaching import check

def drill(code, arguments, environment, out):
    sys.argv[1:] = arguments
    os.environ.update(environment)
    with open(out, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        exec(code, globals())
    except BaseException:
        import traceback
        traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)

# Whoever may not read root's home later on needs all modules by now.
Trainer(model(), data, TrainConfig(steps=1)).step()
budget_report(state=LabState())

ended = {}
for name, code, arguments, environment in json.loads(Path(sys.argv[1]).read_text()):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        drill(code, arguments, environment, Path(sys.argv[1]).parent / f"{name}.txt")
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Drill]]:
    """All drills that need a process of their own, forked from one that has imported everything."""
    root = tmp_path_factory.mktemp("drills")
    for name in ("whole", "disk", "shared"):
        (root / name).mkdir()
    # nobody must be able to reach the read-only folder: pytest's own are closed to others
    closed = Path(tempfile.mkdtemp(prefix="comera-lab-read-only-"))
    closed.chmod(0o555)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root / "disk")]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    kept = {"COMERA_LAB_PROGRESS": str(root / "work.json")}
    plan = [
        ("kills", _KILLS, [str(root)], {}),
        ("first kernel", _LOST_KERNEL, ["first"], kept),
        ("second kernel", _LOST_KERNEL, ["second"], kept),
        # without the right to mount, a limit on file sizes
        ("full disk", _FULL_DISK, [str(root / "disk"), "tmpfs" if mounted else "limit"], {}),
        ("read-only", _READ_ONLY, [str(closed)], {}),
        ("no memory", _NO_MEMORY, [], {}),
        ("two notebooks", _TWO, [str(root / "shared")], {}),
    ]
    (root / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-W", "ignore", "-c", _PRELUDE, str(root / "plan.json")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert list(closed.iterdir()) == []
        ended = json.loads(done.stdout)
        yield {name: Drill((root / f"{name}.txt").read_text(), ended[name]) for name, *_ in plan}
    finally:
        closed.rmdir()
        if mounted:
            subprocess.run(["umount", str(root / "disk")], check=True)


# kill -9 in every phase of a run

_KILLS = """
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def patched(owner, name, when):
    'Calls `die` in the place of the call of owner.name for which when(count) is true.'
    real, count = getattr(owner, name), [0]
    def call(*args, **kwargs):
        count[0] += 1
        return die() if when(count[0]) else real(*args, **kwargs)
    setattr(owner, name, call)

def half_a_line(count=[0]):
    real = Recorder._write
    def write(self, line):
        count[0] += 1
        if count[0] == 14:
            self._file.write(line[: len(line) // 2]); self._file.flush(); die()
        real(self, line)
    Recorder._write = write

PHASES = {
    "before the first step": lambda: patched(Trainer, "step", lambda n: n == 1),
    "in a step, gradients made": lambda: patched(torch.optim.AdamW, "step", lambda n: n == 12),
    "in an evaluation": lambda: patched(Trainer, "evaluate", lambda n: n == 3),
    "while a row is written": half_a_line,
    "while a checkpoint is written": lambda: patched(checkpoints.torch, "save", lambda n: n == 2),
    "checkpoint written, not yet named": lambda: patched(checkpoints.Path, "replace", lambda n: n == 2),
    "checkpoint named, folder not synced": lambda: patched(checkpoints, "_sync_folder", lambda n: n == 2),
    "after the last step": lambda: patched(Trainer, "save", lambda n: n == 3),
}
whole, _ = train(Path(sys.argv[1]) / "whole")
want = whole.state_dict()
rows_wanted = [(r["kind"], r["step"], r["loss_nats"]) for r in read_rows(Path(sys.argv[1]) / "whole" / "rows.jsonl")
               if r["kind"] in ("step", "eval")]
for number, (phase, arm) in enumerate(PHASES.items()):
    folder = Path(sys.argv[1]) / f"cut{number}"
    folder.mkdir()
    child = os.fork()
    if child == 0:
        arm()
        train(folder)
        os._exit(7)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (phase, status)
    begun = (folder / "run.pt").exists()
    net, result = train(folder, resume=True)
    got = net.state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want), phase
    rows = [(r["kind"], r["step"], r["loss_nats"]) for r in read_rows(folder / "rows.jsonl")
            if r["kind"] in ("step", "eval")]
    if not begun:  # killed before the first checkpoint: it starts again, as a second run in the file
        rows = rows[-len(rows_wanted):]
    assert rows == rows_wanted, (phase, len(rows), len(rows_wanted))
    print(phase, "|", sorted(p.name for p in folder.iterdir()))
"""


@POSIX
@pytest.mark.slow
def test_kill_9_in_every_phase_and_the_resumed_run_is_the_unbroken_one(drills: dict[str, Drill]) -> None:
    kills = drills["kills"]
    assert kills.ended == 0, kills.said
    assert kills.said.count("|") == 8, "each phase was killed and came back bitwise"
    assert kills.said.count(".run.pt.") <= 2, "a kill leaves at most the file it was just writing"


_LOST_KERNEL = """
how = sys.argv[1]
state = LabState(budget_steps=10, budget_seconds=60.0, rank=2)
if how == "first":
    lab.budget_point(state=state)
    panel = lab.BudgetPanel(state)
    panel.defence.texts["choice"].area.value = "Typed before the kernel was lost."
    panel.budget_steps.value = 3000
    panel.run()
    while not (panel.training and len(panel.training.steps) > 5):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
panel = lab.BudgetPanel(state)
print(panel.table())
print(state.answers["choice"], panel.runner.state, panel.waiting)
state.rank = 3
assert panel.run(wait=True) and len(panel.waiting) == 1
"""


@POSIX
@pytest.mark.slow
def test_a_kernel_that_dies_in_mid_training_gives_points_and_texts_back(drills: dict[str, Drill]) -> None:
    first, second = drills["first kernel"], drills["second kernel"]
    assert first.ended == -signal.SIGKILL, first.said
    assert second.ended == 0, second.said
    assert "point 1" in second.said and "a claim" in second.said
    assert "Typed before the kernel was lost. idle []" in second.said, "half a run is no result"


# Disks

_FULL_DISK = """
import resource, warnings
disk = Path(sys.argv[1])
os.environ["COMERA_LAB_PROGRESS"] = str(disk / "work.json")
assert progress.remember("verdicts", {"a": {"passed": True}}) == ""
filler = disk / "filler"

def fill(row):
    if row.step == 10 and not filler.exists():
        if sys.argv[2] == "limit":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
            filler.write_bytes(b"")
            return
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    net, result = train(disk, on_row=fill)
print(result.stopped, result.steps, len([r for r in result.rows]))
for problem in result.problems:
    print("problem:", problem)
print("told:", sorted({w.category.__name__ for w in told}))
print("saved:", progress.remember("verdicts", {"b": {"passed": True, "answer": "x" * 4000}}))
state = LabState()
try:
    lab.budget_report(state=state).save(disk)
    print("report written")
except OSError as error:
    print("report:", error)
before = progress.saved("verdicts")
assert before == {"a": {"passed": True}}, before
old = torch.load(disk / "run.pt", weights_only=True)["steps_done"]
print("old checkpoint:", old)
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
filler.unlink()
assert progress.remember("verdicts", {"b": {"passed": True}}) == "" and len(progress.saved("verdicts")) == 2
net2, result2 = train(disk, resume=True)
assert result2.steps == 24 and all(torch.equal(a, b) for a, b in zip(net.parameters(), net2.parameters()))
print("left:", sorted(p.name for p in disk.iterdir()))
"""


@POSIX
@pytest.mark.slow
def test_a_full_disk_costs_no_run_no_file_and_is_said_each_time(drills: dict[str, Drill]) -> None:
    disk = drills["full disk"]
    assert disk.ended == 0, disk.said
    reason = "No space left on device" if "No space left" in disk.said else "File too large"
    assert "done 24" in disk.said, "the run goes on to its end"
    assert disk.said.count("problem:") == 2, disk.said
    assert f"run.pt: {reason}" in disk.said and f"takes no more rows: {reason}" in disk.said
    assert "told: ['CheckpointWarning', 'RecorderWarning']" in disk.said
    assert "saved: Your work is not saved" in disk.said and "The lesson goes on" in disk.said
    assert f"report: [Errno {28 if 'No space' in reason else 27}] could not write" in disk.said
    assert "old checkpoint: 8" in disk.said
    assert "left: ['.work.json.lock', 'rows.jsonl', 'run.pt', 'work.json']" in disk.said


_READ_ONLY = """
folder = Path(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)  # permissions mean nothing to root
os.environ["COMERA_LAB_PROGRESS"] = str(folder / "work.json")
for what in (
    lambda: Recorder(folder / "rows.jsonl", config),
    lambda: fit(model(), data, config, checkpoint=folder / "run.pt"),
    lambda: budget_report(state=LabState()).save(folder),
):
    try:
        what()
        print("NOT REFUSED")
    except (OSError, checkpoints.CheckpointError) as error:
        print(error)
print(progress.remember("verdicts", {"a": {}}))
print(check("00.2", 3.0).stage)
print(progress.read_progress())
"""


@POSIX
@pytest.mark.slow
def test_a_read_only_folder_is_named_with_a_remedy_and_a_check_goes_on(drills: dict[str, Drill]) -> None:
    closed = drills["read-only"]
    assert closed.ended == 0 and "NOT REFUSED" not in closed.said, closed.said
    assert closed.said.count("Permission denied") >= 4
    for remedy in ("Give a file in a folder that exists", "Use the download links", "set COMERA_LAB_PROGRESS"):
        assert remedy in closed.said
    assert "value" in closed.said.splitlines()


# Damaged files


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    trainer = Trainer(_model(), _data(), TrainConfig(seed=3))
    trainer.step()
    trainer.save(path)
    whole, draw = path.read_bytes(), random.Random(0)
    noticed = 0
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        fresh = Trainer(_model(), _data(), TrainConfig(seed=3))
        before = [parameter.clone() for parameter in fresh.model.parameters()]
        try:
            fresh.load(path)
        except (CheckpointError, ValueError) as error:
            noticed += 1
            assert "run.pt" in str(error)
            assert all(torch.equal(a, b) for a, b in zip(fresh.model.parameters(), before, strict=True))
        else:
            pairs = zip(fresh.model.parameters(), trainer.model.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    assert noticed >= 10, "most of a file is numbers, and torch alone would take them as they are"


def test_a_checkpoint_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    Trainer(_model(), _data(), TrainConfig()).save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"could not read the checkpoint .*run.pt.*Start without resume"):
            Trainer(_model(), _data(), TrainConfig()).load(path)


def test_rows_cut_at_any_byte_give_all_whole_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Recorder(path, {"seed": 1}) as recorder:
        for step in (1, 2, 3):
            recorder.add(StepRow(step=step, loss_nats=1.0, step_time_ms=2.0, elapsed_s=3.0))
    whole = path.read_bytes()
    ends = [k + 1 for k, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(ends[0], len(whole)):
        path.write_bytes(whole[:length])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows = read_rows(path)
        complete = sum(end - 1 <= length for end in ends)
        assert len(rows) == complete and bool(told) == (length not in ends and length + 1 not in ends)


@pytest.mark.parametrize("damage", [b"\x00\x00\x00", b"\xff\xfe", b'"', b"}{"])
def test_damage_in_the_middle_of_a_rows_file_is_named_by_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    with Recorder(path, {}) as recorder:
        for step in (1, 2, 3):
            recorder.add(StepRow(step=step, loss_nats=1.0, step_time_ms=2.0, elapsed_s=3.0))
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:20] + damage + lines[2][20:]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3"):
        read_rows(path)


# Clocks


@pytest.mark.slow
def test_a_wall_clock_that_jumps_changes_neither_run_nor_budget_nor_saved_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMERA_LAB_PROGRESS", str(tmp_path / "work.json"))
    calm = LabState(budget_steps=20, budget_seconds=60.0, rank=2)
    lab.budget_point(state=calm, seeds=1)
    jumps = iter(range(10**9))
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: 1.8e9 + (-1) ** next(jumps) * 86_400.0)
        jumpy = LabState(budget_steps=20, budget_seconds=60.0, rank=2)
        lab.budget_point(state=jumpy, seeds=1)
        result = fit(_model(), _data(), TrainConfig(steps=10, seconds=60.0))
    assert result.stopped == "done" and all(row.elapsed_s >= 0 for row in result.rows)
    assert [row.elapsed_s for row in result.rows] == sorted(row.elapsed_s for row in result.rows)
    one, other = calm.registered[0]["rows"][0], jumpy.registered[0]["rows"][0]
    assert one["dev_accuracy_percent"] == other["dev_accuracy_percent"] and other["ended"] == "steps"
    assert len(progress.saved(progress.POINTS)) == 1


def test_a_training_clock_that_leaps_ends_a_budget_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that slept in the middle of a step: the step took an hour by every clock there is."""
    real, asked = time.perf_counter, [0]

    def leaping() -> float:
        asked[0] += 1
        return real() + (3600.0 if asked[0] > 13 else 0.0)

    monkeypatch.setattr(time, "perf_counter", leaping)
    result = fit(_model(), _data(), TrainConfig(steps=50, seconds=30.0))
    assert result.stopped == "budget" and result.steps < 10 and result.accuracy is not None


# Losses and memory


def test_a_nan_in_a_panel_is_a_card_nothing_is_registered_and_the_next_run_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    panel = BudgetPanel(LabState(budget_steps=20, budget_seconds=60.0, rank=2))
    real, calls = Trainer.loss_of, [0]

    def loss_of(self: Trainer, rows: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return real(self, rows) * (float("nan") if calls[0] == 5 else 1.0)

    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "loss_of", loss_of)
        with pytest.raises(RuntimeError, match="the loss of step 5 is nan"):
            panel.run(wait=True)
    assert "The run failed" in panel.card.text and "smaller learning rate" in panel.card.text
    assert panel.waiting == [] and not panel.bar.start.disabled
    assert panel.training is not None and len(panel.training.steps) == 4, "what was trained is still there"
    assert panel.run(wait=True) and panel.card.text == "" and len(panel.waiting) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory. Choose a smaller batch"),
        (RuntimeError("can't allocate memory: you tried to allocate 8388608 bytes."), "for 8 MiB more"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), "for 2.00 GiB more"),
        (OSError(12, "Cannot allocate memory"), "close other notebooks"),
    ],
)
def test_all_kinds_of_too_little_memory_get_the_same_words(error: Exception, words: str) -> None:
    assert words in (memory_words(error) or "")
    summary = Failure.of(error).summary
    assert words in summary and summary.endswith("kept.") and type(error).__name__ not in summary


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ValueError("out of memory"), OSError(2, "No file")])
def test_other_errors_keep_their_own_words(error: Exception) -> None:
    assert memory_words(error) is None and str(error) in Failure.of(error).summary


_NO_MEMORY = """
import resource
budget = lab.BudgetPanel(LabState(budget_steps=30, budget_seconds=60.0, rank=2))
assert budget.run(wait=True) and budget.register()["name"] == "point 1"

def used():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

class Greedy(MLP):
    def forward(self, x):
        if self.training and self.calls == 5:
            x = x + torch.ones(1 << 29).sum() * 0
        self.calls += self.training
        return super().forward(x)

net = Greedy((64, 16, 10), kind="tt", rank=4, generator=torch.Generator().manual_seed(3))
net.calls = 0
resource.setrlimit(resource.RLIMIT_AS, (used() + (512 << 20), resource.RLIM_INFINITY))
try:
    fit(net, data, TrainConfig(steps=24, seed=3))
except TrainingError as error:
    print("fit:", error, f"{len(error.result.rows)} rows, {error.result.stopped}")
same = model()
fit(same, data, TrainConfig(steps=5, seed=3))
assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters())), "weights of the step before"

step = budget_run.BudgetRun._step
def greedy(self):
    if len(self.steps) == 5:
        torch.ones(1 << 29)
    return step(self)
budget_run.BudgetRun._step = greedy
budget.rank.value = 3
budget.run()
budget.runner.join()
print("card:", budget.card.text)
print(budget.runner.state, budget.waiting, len(budget.state.registered), len(budget.training.steps))
budget_run.BudgetRun._step = step
assert budget.run(wait=True) and budget.card.text == "" and len(budget.waiting) == 1
print("goes on")
"""


@POSIX
@pytest.mark.slow
def test_no_memory_in_a_step_is_said_in_words_and_the_weights_are_those_before(drills: dict[str, Drill]) -> None:
    memory = drills["no memory"]
    assert memory.ended == 0, memory.said
    assert "fit: step 6 was not finished. There is not enough memory for 2,048 MiB more" in memory.said
    assert "5 rows, failed" in memory.said
    assert "card: The run failed: There is not enough memory for 2,048 MiB more" in memory.said
    assert "What was there before is kept." in memory.said
    assert "failed [] 1 5" in memory.said and "goes on" in memory.said


# Two of everything

_TWO = """
folder = Path(sys.argv[1])
first = Recorder(folder / "rows.jsonl", config)
first.add(recording.StepRow(step=1, loss_nats=1.0, step_time_ms=2.0, elapsed_s=3.0))

def second():
    child = os.fork()
    if child == 0:
        recording._ours.clear()  # a process of its own knows nothing of this one
        try:
            train(folder)
            print("recorded", flush=True)
        except OSError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

second()
first.add(recording.StepRow(step=2, loss_nats=1.0, step_time_ms=2.0, elapsed_s=3.0))
print([row.get("step") for row in read_rows(folder / "rows.jsonl")], flush=True)
first.close()
second()
"""


@POSIX
@pytest.mark.slow
def test_of_two_notebooks_on_one_runs_folder_the_second_is_refused(
    drills: dict[str, Drill],
) -> None:
    two = drills["two notebooks"]
    assert two.ended == 0, two.said
    refused, rows, later = two.said.splitlines()
    assert "rows.jsonl: another process records to it. Give a file of its own" in refused
    assert rows == "[None, 1, 2]" and later == "recorded", "free again as soon as the first is closed"


def test_a_cell_that_is_run_again_may_record_to_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Recorder(path, {})
    second = Recorder(path, {})
    second.add(StepRow(step=1, loss_nats=1.0, step_time_ms=2.0, elapsed_s=3.0))
    first.close(), second.close()
    assert [row["kind"] for row in read_rows(path)] == ["run", "run", "step"]


# Storms


def storm(*actions: Callable[[], object], times: int, threads: int = 3) -> list[BaseException]:
    """Each thread does `times` drawn actions as fast as it can; what they raised."""
    raised: list[BaseException] = []

    def go(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(times):
            try:
                draw.choice(actions)()
            except BaseException as error:
                raised.append(error)

    workers = [threading.Thread(target=go, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return raised


def test_a_storm_of_start_stop_and_resume_leaves_one_worker_and_loses_no_step() -> None:
    working: list[int] = []
    most, seen = [0], list[int]()

    def job():
        for step in range(1, 2001):
            working.append(step)
            most[0] = max(most[0], len(working))
            time.sleep(0.0002)
            working.pop()
            yield Progress(step, step / 2000)

    runner = Runner("storm", on_item=lambda progress: seen.append(progress.step))
    assert runner.start(job)
    raised = storm(runner.stop, runner.resume, lambda: runner.start(job) if runner.state == "idle" else None, times=150)
    assert raised == [] and most[0] == 1
    runner.stop(wait=True)
    while runner.state != "finished":
        assert runner.resume(wait=True) or runner.state == "finished"
    assert seen == list(range(1, 2001)), "every step once, in order"


def test_a_storm_of_clicks_on_a_panel_ends_in_the_same_network() -> None:
    panel = BudgetPanel(LabState(budget_steps=60, budget_seconds=120.0, rank=2))
    panel.bar.start.click()
    raised = storm(panel.bar.stop.click, panel.bar.resume.click, times=60)
    assert raised == []
    panel.stop(wait=True)
    if panel.runner.can_resume:
        panel.resume(wait=True)
    panel.runner.join()
    assert panel.runner.state == "finished" and len(panel.waiting) == 1
    calm = run_again(panel.settings(), 0, 60).row()
    assert panel.waiting[0]["dev_accuracy_percent"] == calm["dev_accuracy_percent"]
    assert sum(thread.name.startswith("comera-lab") for thread in threading.enumerate()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [lab.BudgetPanel, lab.StartPanel, lab.RankTrainingPanel, lab.OptimizerRacePanel])
def test_a_storm_of_500_slider_events_ends_at_the_last_value_while_a_run_goes_on(make: type[panels.RunPanel]) -> None:
    state = LabState(budget_steps=3000, budget_seconds=120.0, optimizer_steps=2000)
    panel = make(state)
    controls = [
        control for name, control in vars(panel).items()
        if isinstance(control, lab.budget.NumberControl) and name not in ("seconds",)
    ]  # fmt: skip
    panel.run()
    draw = random.Random(0)
    began = time.monotonic()
    for _ in range(500):
        control = draw.choice(controls)
        between = draw.randint if control.whole else draw.uniform
        control.slider.value = between(control.low, control.high)
    assert time.monotonic() - began < 20
    last = {control.name: control.slider.value for control in controls}
    panel.stop(wait=True)
    assert panel.runner.state in ("stopped", "finished") and panel.card.text == ""
    time.sleep(0.3)
    for control in controls:
        assert control.value == last[control.name] == control.slider.value
        assert control.message.value == ""
        if control.name in state.trait_names():
            assert getattr(state, control.name) == control.value
    assert max(figure.refreshes for figure in panel._figures) < 8 * (time.monotonic() - began) + 20
    panel.close()


def test_signals_of_the_drill_leave_no_handler_behind() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(TrainingError):
        fit(_model(), _data(), TrainConfig(steps=3, learning_rate=1e30))
