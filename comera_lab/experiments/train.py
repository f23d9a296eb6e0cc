"""`fit` makes a whole run with a `Trainer`: rows, evaluations, checkpoints, and every way a run can end."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from comera_lab.experiments.checkpoints import CheckpointError, check_folder
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.recorder import EvalRow, Recorder, StepRow
from comera_lab.experiments.runs import RunResult, Stopped, TrainConfig, TrainingError, TrainingInterrupted
from comera_lab.experiments.trainer import Trainer
from comera_lab.runtime.exhausted import memory_words

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "RunResult",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "fit",
]


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the run goes on and the older checkpoint is unchanged."""


def fit(
    model: nn.Module,
    data: Dataset,
    config: TrainConfig,
    *,
    recorder: Recorder | None = None,
    on_row: Callable[[StepRow | EvalRow], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    trainer_type: Callable[..., Trainer] = Trainer,
) -> RunResult:
    """Train `model` in place until the steps, the budget or the patience of `config` are used up.

    `on_row` gets every new row. `should_stop` is asked before every step and every evaluation; a stop is not
    followed by an evaluation. `checkpoint` is written every `config.checkpoint_every` steps and at the end;
    `resume=True` goes on from it if it exists. `trainer_type` is for another loss. An interrupt (Ctrl-C) lets the step
    in progress finish.

    Raises TrainingError for a loss or gradient that is not finite, or where memory runs out, and TrainingInterrupted (a
    KeyboardInterrupt) for an interrupt: both carry the `result` so far. Raises CheckpointError where the
    checkpoint's folder cannot be written at the start; a checkpoint that fails later (disk full) is a
    CheckpointWarning and an entry in `RunResult.problems`, and training goes on.
    """
    if checkpoint is None:
        if resume:
            raise ValueError("resume=True needs a checkpoint, got None. Give checkpoint=path.")
        if config.checkpoint_every:
            raise ValueError(
                f"checkpoint_every={config.checkpoint_every} needs a checkpoint, got None. Give checkpoint=path."
            )
    trainer = trainer_type(model, data, config, recorder, optimizer=optimizer)
    run = _Run(trainer, None if checkpoint is None else Path(checkpoint), on_row, should_stop)
    if run.checkpoint is not None:
        check_folder(run.checkpoint)
        if resume and run.checkpoint.exists():
            trainer.load(run.checkpoint)
            run.saved_at = trainer.steps_done
    try:
        with _held_interrupts() as interrupted:
            run.go(interrupted)
            run.save()
            was_interrupted = interrupted()
    except TrainingError as error:
        error.result = run.result("failed")
        raise
    except (MemoryError, RuntimeError) as error:
        memory = memory_words(error)
        if memory is None:
            raise
        step = trainer.steps_done + 1
        failed = TrainingError(f"step {step} was not finished. {memory}.", step)
        failed.result = run.result("failed")
        raise failed from error
    except KeyboardInterrupt:
        # a second Ctrl-C, or one that a callback raised: the model may be between two states, so no checkpoint
        raise TrainingInterrupted(run.result("stopped")) from None
    if was_interrupted:
        raise TrainingInterrupted(run.result("stopped"))
    return run.result("stopped")


class _Run:
    """The state of one call of `fit`."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoint: Path | None,
        on_row: Callable[[StepRow | EvalRow], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.trainer = trainer
        self.checkpoint = checkpoint
        self.saved_at = 0
        self._on_row = on_row
        self._should_stop = should_stop
        self._checkpoint_problem: str | None = None

    def go(self, interrupted: Callable[[], bool]) -> None:
        """Steps, evaluations and checkpoints until something ends the run."""
        every = self.trainer.config.checkpoint_every
        while not interrupted() and not (self._should_stop is not None and self._should_stop()):
            if self.trainer.evaluation_due:
                self._tell(self.trainer.evaluate())
                continue
            if every and self.trainer.steps_done % every == 0:
                self.save()
            if self.trainer.done:
                return
            self._tell(self.trainer.step())

    def save(self) -> None:
        """Write the checkpoint unless there is none or it is up to date."""
        if self.checkpoint is None or self.saved_at == self.trainer.steps_done:
            return
        try:
            self.trainer.save(self.checkpoint)
        except CheckpointError as error:
            self._checkpoint_problem = str(error)
            warnings.warn(self._checkpoint_problem, CheckpointWarning, stacklevel=4)
        else:
            self.saved_at = self.trainer.steps_done
            self._checkpoint_problem = None

    def result(self, otherwise: Stopped) -> RunResult:
        """The run so far; `otherwise` is why it ended if steps, budget or patience are not used up."""
        trainer = self.trainer
        complete = None if trainer.evaluation_due else trainer.stopped
        accuracies = [row.accuracy for row in trainer.evaluations]
        recorder_problem = trainer.recorder.problem if trainer.recorder is not None else None
        return RunResult(
            rows=list(trainer.rows),
            steps=trainer.steps_done,
            stopped=complete or otherwise,
            accuracy=accuracies[-1] if accuracies else None,
            best_accuracy=max(accuracies, default=None),
            elapsed_s=trainer.elapsed_s,
            problems=tuple(p for p in (recorder_problem, self._checkpoint_problem) if p is not None),
        )

    def _tell(self, row: StepRow | EvalRow) -> None:
        if self._on_row is not None:
            self._on_row(row)


@contextmanager
def _held_interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a question: was there a Ctrl-C? It waits for the step to finish; a second one does not wait.

    Without this an interrupt between the updates of two parameters would leave the model half a step on.
    Only the main thread gets signals, and only Python's own handler is replaced.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    pressed = threading.Event()

    def hold(_signal: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
