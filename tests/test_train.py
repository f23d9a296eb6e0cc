"""Laws of the training loop: the same run every time, honest clocks, and no way to end that loses the results."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from comera_lab.experiments import checkpoints, trainer
from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.recorder import EvalRow, Recorder, StepRow, read_rows
from comera_lab.experiments.train import (
    CheckpointError,
    CheckpointWarning,
    RunResult,
    TrainConfig,
    Trainer,
    TrainingError,
    TrainingInterrupted,
    fit,
)
from comera_lab.models.mlp import MLP
from comera_lab.shapes import ShapeError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _data(train: int = 50, test: int = 20, features: int = 6) -> Dataset:
    """Three classes, told apart by which of the first three features is largest."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(train + test, features, generator=draw)
    y = x[:, :3].argmax(dim=1)
    return Dataset("largest of three", x[:train], y[:train], x[train:], y[train:], 3)


def _model(seed: int = 0) -> MLP:
    return MLP((6, 16, 3), generator=torch.Generator().manual_seed(seed))


def _losses(rows: list[StepRow | EvalRow]) -> list[float]:
    return [row.loss_nats for row in rows]


def _same_weights(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


# What a run gives


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
def test_training_on_digits_learns(kind: str, optimizer: str) -> None:
    rate = {"adamw": 3e-3, "sgd": 0.2, "momentum": 0.03}[optimizer]
    model = MLP((64, 32, 10), kind=kind, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    result = fit(model, digits(8), TrainConfig(steps=200, optimizer=optimizer, learning_rate=rate))
    assert result.stopped == "done" and result.steps == 200
    assert result.best_accuracy is not None and result.best_accuracy > 0.8


def test_rows_are_numbered_timed_and_evaluated_where_due() -> None:
    result = fit(_model(), _data(), TrainConfig(steps=7, evaluate_every=3, batch_size=16))
    steps = [row for row in result.rows if isinstance(row, StepRow)]
    assert [row.step for row in steps] == list(range(1, 8))
    assert [row.step for row in result.rows if isinstance(row, EvalRow)] == [3, 6, 7]
    assert all(row.step_time_ms > 0 for row in steps)
    assert steps[-1].elapsed_s == pytest.approx(sum(row.step_time_ms for row in steps) / 1e3)
    assert result.elapsed_s == steps[-1].elapsed_s


def test_evaluation_every_zero_means_once_at_the_end() -> None:
    result = fit(_model(), _data(), TrainConfig(steps=4, evaluate_every=0))
    assert [type(row) for row in result.rows] == [StepRow] * 4 + [EvalRow]


def test_callbacks_see_every_row_and_so_does_the_recorder(tmp_path: Path) -> None:
    seen: list[StepRow | EvalRow] = []
    config = TrainConfig(steps=5, evaluate_every=2)
    with Recorder(tmp_path / "run.jsonl", config) as recorder:
        result = fit(_model(), _data(), config, recorder=recorder, on_row=seen.append)
    assert seen == result.rows == recorder.rows[1:]
    assert [row["loss_nats"] for row in read_rows(tmp_path / "run.jsonl")[1:]] == _losses(seen)


def test_evaluation_equals_the_whole_test_side_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = _model(), _data(test=23)
    model.eval()
    monkeypatch.setattr(trainer, "_EVALUATION_ROWS", 5)
    row = Trainer(model, data, TrainConfig()).evaluate()
    logits = model(data.test_x)
    assert row.loss_nats == pytest.approx(nn.functional.cross_entropy(logits, data.test_y).item(), rel=1e-6)
    assert row.accuracy == (logits.argmax(1) == data.test_y).double().mean().item()
    assert not model.training
    model.train()
    Trainer(model, data, TrainConfig()).evaluate()
    assert model.training, "evaluation leaves the mode of the model as it was"


# Batches


@pytest.mark.parametrize(("rows", "batch_size"), [(50, 16), (50, 7), (50, 50), (5, 64), (1, 1), (3, 1)])
def test_each_epoch_visits_every_sample_once_in_a_new_order(rows: int, batch_size: int) -> None:
    x = torch.arange(rows, dtype=torch.float32)[:, None]
    seen: list[list[int]] = []

    class Spy(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            if self.training:
                seen.append(batch[:, 0].int().tolist())
            return super().forward(batch)

    data = Dataset("numbers", x, torch.zeros(rows, dtype=torch.int64), x, torch.zeros(rows, dtype=torch.int64), 2)
    epoch = -(-rows // batch_size)
    fit(Spy(1, 2), data, TrainConfig(steps=2 * epoch, batch_size=batch_size, learning_rate=1e-6))
    first, second = list(chain(*seen[:epoch])), list(chain(*seen[epoch:]))
    assert sorted(first) == sorted(second) == list(range(rows))
    assert first != second or rows < 4
    assert [len(batch) for batch in seen[: epoch - 1]] == [batch_size] * (epoch - 1)
    assert len(seen[epoch - 1]) == rows - batch_size * (epoch - 1), "the last batch holds the rest"


# The same run every time


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _model()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.mlp(self.drop(x))
        return logits


@pytest.mark.parametrize("build", [_model, _Dropping])
def test_J04_same_seed_gives_bitwise_the_same_run_whatever_ran_before(build: type[nn.Module]) -> None:
    config = TrainConfig(steps=20, batch_size=16, evaluate_every=5)
    one, two = build(), build()
    first = fit(one, _data(), config)
    torch.manual_seed(99)
    torch.rand(17)
    fit(_model(5), _data(), TrainConfig(steps=3, seed=8))
    second = fit(two, _data(), config)
    assert _losses(first.rows) == _losses(second.rows)
    assert _same_weights(one, two)


def test_another_seed_gives_another_run() -> None:
    runs = [fit(_model(), _data(), TrainConfig(steps=3, batch_size=16, seed=seed)) for seed in (0, 1)]
    assert _losses(runs[0].rows) != _losses(runs[1].rows)


@pytest.mark.parametrize("build", [_model, _Dropping])
def test_training_leaves_the_global_random_stream_alone(build: type[nn.Module]) -> None:
    model = build()
    torch.manual_seed(4)
    want = torch.rand(3)
    torch.manual_seed(4)
    fit(model, _data(), TrainConfig(steps=3))
    assert torch.equal(torch.rand(3), want)


def test_two_interleaved_trainers_do_not_disturb_each_other() -> None:
    config = TrainConfig(steps=6, batch_size=16)
    alone = fit(_Dropping(), _data(), config)
    racers = [Trainer(_Dropping(), _data(), config) for _ in range(2)]
    while not racers[0].done:
        for racer in racers:
            racer.step()
    for racer in racers:
        assert _losses(racer.rows) == [row.loss_nats for row in alone.rows if isinstance(row, StepRow)]


# Stopping


def test_J02_stop_answers_in_under_one_step_and_keeps_the_rows() -> None:
    pressed = threading.Event()
    rows: list[StepRow | EvalRow] = []

    def on_row(row: StepRow | EvalRow) -> None:
        rows.append(row)
        if row.step == 4:
            pressed.set()

    result = fit(
        _model(), _data(), TrainConfig(steps=10_000, evaluate_every=4), on_row=on_row, should_stop=pressed.is_set
    )
    assert result.stopped == "stopped" and result.steps == 4
    assert [type(row) for row in result.rows] == [StepRow] * 4, "no evaluation delays the stop"
    assert result.accuracy is None and result.best_accuracy is None


def test_stop_before_the_first_step_makes_none() -> None:
    model = _model()
    result = fit(model, _data(), TrainConfig(), should_stop=lambda: True)
    assert (result.steps, result.rows, result.stopped) == (0, [], "stopped")
    assert _same_weights(model, _model())


def test_patience_stops_after_evaluations_without_a_lower_loss() -> None:
    model = _model()
    # a rate this small moves nothing in float32, so no evaluation after the first is better
    result = fit(model, _data(), TrainConfig(steps=100, learning_rate=1e-30, evaluate_every=2, patience=3))
    assert result.stopped == "early" and result.steps == 8


def test_patience_is_not_used_up_while_the_loss_falls() -> None:
    config = TrainConfig(steps=30, batch_size=50, evaluate_every=2, patience=1)
    assert fit(_model(), _data(), config).stopped == "done"


def test_budget_counts_training_time_alone() -> None:
    def slow_screen(_: StepRow | EvalRow) -> None:
        time.sleep(0.02)

    config = TrainConfig(steps=10**6, seconds=0.02, evaluate_every=10**6)
    result = fit(_model(), _data(), config, on_row=slow_screen)
    assert result.stopped == "budget"
    times = [row.step_time_ms for row in result.rows if isinstance(row, StepRow)]
    assert sum(times[:-1]) < 20 <= sum(times) + 1e-9
    assert isinstance(result.rows[-1], EvalRow), "a used-up budget ends with an evaluation"


def test_a_finished_trainer_makes_no_further_step() -> None:
    run = Trainer(_model(), _data(), TrainConfig(steps=1))
    run.step()
    assert run.done and run.stopped == "done"
    with pytest.raises(ValueError, match=r"the run is over \(done\) after 1 steps"):
        run.step()


def _interrupt(row: StepRow | EvalRow) -> None:
    if row.step == 3:
        os.kill(os.getpid(), signal.SIGINT)


def test_J06_interrupt_leaves_the_model_usable_the_rows_kept_and_the_run_resumable(tmp_path: Path) -> None:
    config = TrainConfig(steps=10, batch_size=16, checkpoint_every=100)
    whole = _model()
    fit(whole, _data(), config, checkpoint=tmp_path / "whole.pt")
    model = _model()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3") as caught:
        fit(model, _data(), config, on_row=_interrupt, checkpoint=tmp_path / "cut.pt")
    assert signal.getsignal(signal.SIGINT) is handler
    assert isinstance(caught.value, TrainingInterrupted)
    assert [row.step for row in caught.value.result.rows] == [1, 2, 3]
    assert caught.value.result.stopped == "stopped"
    assert torch.isfinite(model(_data().test_x)).all()
    fit(model, _data(), config, checkpoint=tmp_path / "cut.pt", resume=True)
    assert _same_weights(model, whole)


def test_J06_interrupt_within_a_step_lets_the_step_finish_and_a_second_one_does_not_wait() -> None:
    class Pressing(MLP):
        times = 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
            return super().forward(x)

    with pytest.raises(TrainingInterrupted) as caught:
        fit(Pressing((6, 8, 3)), _data(), TrainConfig(steps=5))
    assert caught.value.result.steps == 1
    Pressing.times = 2
    with pytest.raises(TrainingInterrupted) as caught:
        fit(Pressing((6, 8, 3)), _data(), TrainConfig(steps=5))
    assert caught.value.result.steps == 0


def test_J06_fit_in_a_worker_thread_leaves_signals_to_the_main_thread() -> None:
    results: list[RunResult] = []
    worker = threading.Thread(target=lambda: results.append(fit(_model(), _data(), TrainConfig(steps=3))))
    handler = signal.getsignal(signal.SIGINT)
    worker.start()
    worker.join()
    assert results[0].stopped == "done"
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_in_a_callback_reaches_the_caller() -> None:
    def broken(_: StepRow | EvalRow) -> None:
        raise LookupError("no such figure")

    with pytest.raises(LookupError, match="no such figure"):
        fit(_model(), _data(), TrainConfig(), on_row=broken)


# Numbers that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_loss_is_named_before_any_weight_is_touched(value: float) -> None:
    class Breaks(MLP):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            logits = super().forward(x)
            return logits * value if self.calls > 3 else logits

    model, twin = Breaks((6, 8, 3), generator=torch.Generator().manual_seed(0)), MLP(
        (6, 8, 3), generator=torch.Generator().manual_seed(0)
    )
    config = TrainConfig(steps=10, batch_size=16, learning_rate=0.02)
    message = r"the loss of step 4 is nan, .*weights are those after step 3.*smaller learning rate than 0\.02"
    with pytest.raises(TrainingError, match=message) as caught:
        fit(model, _data(), config)
    fit(twin, _data(), TrainConfig(steps=3, batch_size=16, learning_rate=0.02))
    assert _same_weights(model, twin)
    assert caught.value.step == 4
    assert caught.value.result is not None and caught.value.result.stopped == "failed"
    assert [row.step for row in caught.value.result.rows] == [1, 2, 3]


def test_a_learning_rate_that_blows_up_ends_in_a_training_error() -> None:
    model = _model()
    with pytest.raises(TrainingError, match="smaller learning rate than 1e"):
        fit(model, _data(), TrainConfig(steps=50, optimizer="sgd", learning_rate=1e25))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_nonfinite_gradients_under_a_finite_loss_are_named_too() -> None:
    class Root(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.sqrt(self.classifier.bias.clamp(max=0).abs())

    model = Root((6, 8, 3))
    with torch.no_grad():
        model.classifier.bias.zero_()
    with pytest.raises(TrainingError, match="the gradient norm of step 1 is nan"):
        fit(model, _data(), TrainConfig())
    assert torch.equal(model.classifier.bias, torch.zeros(3))


# The gradient norm


def test_D05_gradient_norm_is_the_one_before_the_step() -> None:
    model, norms = _model(), []
    optimizer = torch.optim.AdamW(model.parameters())

    def measure(*_: object) -> None:
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(sum(squares)) ** 0.5)

    optimizer.register_step_pre_hook(measure)
    result = fit(model, _data(), TrainConfig(steps=5), optimizer=optimizer)
    logged = [row.gradient_norm for row in result.rows if isinstance(row, StepRow)]
    assert logged == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0


def test_D05_gradient_norm_is_none_where_gradients_are_freed_in_backward() -> None:
    model = _model()

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)
    result = fit(model, _data(), TrainConfig(steps=2))
    assert [row.gradient_norm for row in result.rows if isinstance(row, StepRow)] == [None, None]


def test_D05_gradient_norm_is_none_where_a_part_of_the_gradients_is_missing() -> None:
    model = _model()
    model.unused = nn.Parameter(torch.zeros(2))
    row = Trainer(model, _data(), TrainConfig()).step()
    assert row.gradient_norm is None
    assert torch.equal(model.unused, torch.zeros(2)), "no gradient, no update (D01)"


# The clock


def test_the_clock_runs_around_the_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])

    class Slow(MLP):
        def forward(self, x: Tensor) -> Tensor:
            now[0] += 2
            return super().forward(x)

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    model = Slow((6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: pass_time(3))
    monkeypatch.setattr(Trainer, "_gradient_norm", lambda self: pass_time(100))
    run = Trainer(model, _data(), TrainConfig(), optimizer=optimizer)
    row = run.step()
    assert (row.step_time_ms, run.elapsed_s) == (5000, 5)
    run.evaluate()
    pass_time(50)
    assert run.step().elapsed_s == 10


def test_the_clock_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    run = Trainer(_model(), _data(), TrainConfig())
    run.step()
    assert waits == []
    run.device = torch.device("cuda")
    monkeypatch.setattr(Trainer, "_next_batch", lambda self: torch.arange(4))
    run.step()
    assert waits == [torch.device("cuda")] * 4, "before and after forward + backward, before and after the update"


# Checkpoints


@pytest.mark.parametrize("build", [_model, _Dropping])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("cut", [1, 4, 8, 9])
def test_C01_a_resumed_run_is_bitwise_the_unbroken_one(
    tmp_path: Path, build: type[nn.Module], optimizer: str, cut: int
) -> None:
    data = _data()                                                       # 4 batches an epoch: cut within, at, after
    config = TrainConfig(steps=15, batch_size=16, optimizer=optimizer, evaluate_every=4)
    whole = build()
    unbroken = fit(whole, data, config)
    first = Trainer(build(), data, config)
    while first.steps_done < cut:
        first.step()
        if first.evaluation_due:
            first.evaluate()
    first.save(tmp_path / "cut.pt")
    second = build()
    resumed = fit(second, data, config, checkpoint=tmp_path / "cut.pt", resume=True)
    assert _losses(resumed.rows) == _losses(unbroken.rows)
    assert [row.step for row in resumed.rows] == [row.step for row in unbroken.rows]
    assert _same_weights(second, whole)


def test_C01_a_checkpoint_holds_tensors_and_plain_values_only(tmp_path: Path) -> None:
    fit(_Dropping(), _data(), TrainConfig(steps=2), checkpoint=tmp_path / "run.pt")
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert state["steps_done"] == 2


def test_patience_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    config = TrainConfig(steps=100, learning_rate=1e-30, evaluate_every=2, patience=3)
    fit(_model(), _data(), TrainConfig(steps=4, learning_rate=1e-30, evaluate_every=2), checkpoint=tmp_path / "run.pt")
    result = fit(_model(), _data(), config, checkpoint=tmp_path / "run.pt", resume=True)
    assert result.stopped == "early" and result.steps == 8


def test_a_finished_run_can_be_given_more_steps_and_a_finished_one_resumed_is_itself(tmp_path: Path) -> None:
    whole = _model()
    fit(whole, _data(), TrainConfig(steps=9, batch_size=16))
    model = _model()
    fit(model, _data(), TrainConfig(steps=5, batch_size=16), checkpoint=tmp_path / "run.pt")
    again = fit(_model(1), _data(), TrainConfig(steps=5, batch_size=16), checkpoint=tmp_path / "run.pt", resume=True)
    assert again.steps == 5 and again.stopped == "done" and again.accuracy is not None
    other = _model(2)
    fit(other, _data(), TrainConfig(steps=9, batch_size=16), checkpoint=tmp_path / "run.pt", resume=True)
    assert _same_weights(other, whole)


def test_resume_without_a_file_starts_from_the_beginning(tmp_path: Path) -> None:
    result = fit(_model(), _data(), TrainConfig(steps=3), checkpoint=tmp_path / "new.pt", resume=True)
    assert result.steps == 3 and (tmp_path / "new.pt").is_file()


_CHILD = """
    import sys, torch
    from comera_lab.experiments.datasets import Dataset
    from comera_lab.experiments.recorder import Recorder
    from comera_lab.experiments.train import TrainConfig, fit
    from comera_lab.models.mlp import MLP

    folder, resume = sys.argv[1], sys.argv[2] == "resume"
    torch.set_num_threads(1)
    config = TrainConfig(steps=300, checkpoint_every=20, evaluate_every=50, seed=3)
    model = MLP((64, 16, 10), kind="tt", rank=4, generator=torch.Generator().manual_seed(3))
    x = torch.rand(1000, 64, generator=torch.Generator().manual_seed(0))
    data = Dataset.from_tensors("largest of ten", x, x[:, :10].argmax(dim=1))
    with Recorder(folder + "/rows.jsonl", config) as recorder:
        fit(model, data, config, recorder=recorder, checkpoint=folder + "/run.pt", resume=resume)
    torch.save(model.state_dict(), folder + "/final.pt")
"""


def _start(folder: Path, how: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(_CHILD), str(folder), how])


def test_kill_9_loses_at_most_one_interval_and_the_resumed_run_ends_bitwise_the_same(tmp_path: Path) -> None:
    unbroken = _start(tmp_path / "whole", "fresh")
    victim = _start(tmp_path / "cut", "fresh")
    rows = tmp_path / "cut" / "rows.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_bytes().count(b'"kind": "step"') >= 130):
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    steps_made = rows.read_bytes().count(b'"kind": "step"')
    saved = torch.load(tmp_path / "cut" / "run.pt", weights_only=True)["steps_done"]
    assert saved % 20 == 0 and steps_made - saved <= 21                  # one interval, and a step in flight
    assert _start(tmp_path / "cut", "resume").wait() == 0
    assert unbroken.wait() == 0
    want = torch.load(tmp_path / "whole" / "final.pt", weights_only=True)
    got = torch.load(tmp_path / "cut" / "final.pt", weights_only=True)
    assert all(torch.equal(got[name], want[name]) for name in want)
    losses = [
        [(row["kind"], row["step"], row["loss_nats"]) for row in read_rows(folder) if row["kind"] in ("step", "eval")]
        for folder in (tmp_path / "whole" / "rows.jsonl", rows)
    ]
    assert losses[0] == losses[1]


def test_a_file_size_limit_during_a_checkpoint_leaves_the_old_one_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    config = TrainConfig(steps=4, checkpoint_every=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old: list[bytes] = []

    def limit(row: StepRow | EvalRow) -> None:
        if row.step == 3:
            old.append(path.read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    model = _model()
    try:
        with pytest.warns(CheckpointWarning, match=r"could not write the checkpoint .*run.pt: File too large"):
            result = fit(model, _data(), config, on_row=limit, checkpoint=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.stopped == "done" and result.steps == 4
    assert len(result.problems) == 1 and "an older checkpoint there is unchanged" in result.problems[0]
    assert path.read_bytes() == old[0]
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"], "no unfinished file is left behind"
    assert torch.load(path, weights_only=True)["steps_done"] == 2


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_error_at_any_point_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "run.pt"
    run = Trainer(_model(), _data(), TrainConfig())
    run.save(path)
    old = path.read_bytes()
    run.step()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((checkpoints.os, "fsync", full) if call == "fsync" else (Path, "replace", full)))
    with pytest.raises(CheckpointError, match="run.pt: No space left on device"):
        run.save(path)
    assert path.read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def test_a_recorder_that_fails_is_a_problem_of_the_result() -> None:
    recorder = Recorder(None)
    recorder.problem = "rows.jsonl takes no more rows"
    result = fit(_model(), _data(), TrainConfig(steps=1), recorder=recorder)
    assert result.problems == ("rows.jsonl takes no more rows",)


@pytest.mark.parametrize("where", ["missing/run.pt", "file/run.pt"])
def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    model = _model()
    with pytest.raises(CheckpointError, match=f"cannot write checkpoints to .*{where}"):
        fit(model, _data(), TrainConfig(), checkpoint=tmp_path / where)
    assert _same_weights(model, _model())


@pytest.mark.parametrize("content", [b"", b"half a file", b"PK\x03\x04 cut short"])
def test_a_broken_checkpoint_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"could not read the checkpoint .*run.pt"):
        fit(_model(), _data(), TrainConfig(), checkpoint=tmp_path / "run.pt", resume=True)


def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    torch.save(_model().state_dict(), tmp_path / "weights.pt")
    run = Trainer(_model(), _data(), TrainConfig())
    with pytest.raises(CheckpointError, match="must hold a checkpoint, got a Tensor"):
        run.load(tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match=r"weights.pt is not a checkpoint of a Trainer"):
        run.load(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="could not read the checkpoint .*none.pt: No such file"):
        run.load(tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": TrainConfig(seed=1)}, "a run with seed=0, got seed=1"),
        ({"config": TrainConfig(learning_rate=0.5)}, "learning_rate=0.001, got learning_rate=0.5"),
        ({"config": TrainConfig(optimizer="sgd")}, "optimizer='adamw', got optimizer='sgd'"),
        ({"data": _data(train=40)}, "data_digest="),
        ({"model": MLP((6, 8, 3))}, r"must fit the model, but .*: \(3, 16\) in the file, \(3, 8\) in the model"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    first = Trainer(_model(), _data(), TrainConfig())
    first.step()
    first.save(tmp_path / "run.pt")
    values = {"model": _model(7), "data": _data(), "config": TrainConfig()} | changes
    other = Trainer(**values)  # type: ignore[arg-type]
    before = [p.clone() for p in other.model.parameters()]
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "run.pt")
    assert other.steps_done == 0
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))


# Bad input


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"batch_size": -4}, "batch_size must be a whole number of at least 1, got -4"),
        ({"evaluate_every": -1}, "evaluate_every must be a whole number of at least 0"),
        ({"patience": 0}, "patience must be a whole number of at least 1"),
        ({"patience": 2, "evaluate_every": 0}, "patience needs evaluations"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0, got -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd, momentum, .*, got 'adam'"),
        ({"seconds": 0}, "seconds must be above 0, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)  # type: ignore[arg-type]


def test_a_typo_in_a_config_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        TrainConfig(step=3)  # type: ignore[call-arg]


def test_models_and_optimizers_that_cannot_train_are_refused() -> None:
    with pytest.raises(ValueError, match="must have trainable parameters, got none"):
        Trainer(_model().requires_grad_(False), _data(), TrainConfig())
    with pytest.raises(ValueError, match="the optimizer must hold this model's parameters, got others"):
        Trainer(_model(), _data(), TrainConfig(), optimizer=torch.optim.SGD(_model().parameters()))
    with pytest.raises(ShapeError, match=r"must give \(rows, classes\) = \(50, 3\), got \(50, 4\)"):
        fit(MLP((6, 8, 4)), _data(), TrainConfig())


def test_checkpoint_options_need_a_path() -> None:
    with pytest.raises(ValueError, match="resume=True needs a checkpoint"):
        fit(_model(), _data(), TrainConfig(), resume=True)
    with pytest.raises(ValueError, match="checkpoint_every=5 needs a checkpoint"):
        fit(_model(), _data(), TrainConfig(checkpoint_every=5))


def test_any_optimizer_may_be_passed_and_is_the_one_used() -> None:
    model = _model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    run = Trainer(model, _data(), TrainConfig(), optimizer=optimizer)
    run.step()
    assert run.optimizer is optimizer and len(optimizer.state) == 4


def test_frozen_parameters_stay_as_they_are() -> None:
    model = _model()
    model.hidden.requires_grad_(False)
    fit(model, _data(), TrainConfig(steps=3, weight_decay=0.1))
    assert torch.equal(model.hidden[0].weight, _model().hidden[0].weight)
    assert not torch.equal(model.classifier.weight, _model().classifier.weight)
