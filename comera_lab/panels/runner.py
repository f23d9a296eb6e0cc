"""One worker thread per process, with a Stop that answers in under one step.

A job is an iterator that does one step of work for each item it yields. The runner asks for items, hands each to
`on_item`, and looks at Stop in between: a stopped job is a suspended iterator, so Resume goes on from there with
nothing lost. Nothing here knows about widgets or torch.

The kernel's interrupt (the square button of JupyterLab) reaches the main thread only. So it ends a
`run(wait=True)`, which stops the worker and raises KeyboardInterrupt, but not a run in the background: press
Stop for that, or run the cell that made the panel again.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from comera_lab.runtime.exhausted import memory_words

# Only the thread that holds this may run a job: two trainings at once would share the cores and spoil both timings.
_worker_slot = threading.Lock()
_slot_owner: list[str] = []

SLOT_WAIT_S = 2.0  # how long Start waits for the last step of a panel that was closed

STATES = ("idle", "running", "stopping", "stopped", "finished", "failed")


@dataclass(frozen=True)
class Progress:
    """What a job yields after each step: steps done so far, share of the whole in [0, 1], and any payload."""

    step: int
    fraction: float
    payload: Any = None


@dataclass(frozen=True)
class Failure:
    """An exception of a job: one line for the reader, and the traceback to unfold."""

    summary: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = str(error) or "no message"
        summary = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        memory = memory_words(error)
        summary = f"{memory}. What was there before is kept." if memory else summary
        return cls(summary, "".join(traceback.format_exception(error)))


class Runner:
    """Runs one job at a time in a daemon thread.

    `on_item(progress)` is called in the worker after each step, `on_change(runner)` after each change of state,
    in whichever thread caused it. `state` is one of STATES, `words` the same for a reader, with `of` after the count.
    Results of a run that was closed or replaced are dropped: every run has a generation number.
    """

    def __init__(
        self,
        name: str,
        on_item: Callable[[Progress], None] | None = None,
        on_change: Callable[[Runner], None] | None = None,
        of: str = "",
    ) -> None:
        self.name, self.of = name, of
        self.state = "idle"
        self.progress = Progress(0, 0.0)
        self.failure: Failure | None = None
        self.refusal = ""
        self._on_item = on_item or (lambda progress: None)
        self._on_change = on_change or (lambda runner: None)
        self._job: Iterator[Progress] | None = None
        self._generation = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    @property
    def words(self) -> str:
        """The state as a person says it: "running 34 %", "stopped at step 120"."""
        percent, count = f"{100 * self.progress.fraction:.0f} %", f"{self.progress.step:,}"
        return {
            "running": f"running {percent}" if self.progress.step else "starting",
            "stopped": f"stopped at step {count}{self.of}",
            "finished": f"finished after {count} steps{self.of}",
            "failed": f"failed after {count} steps{self.of}",
        }.get(self.state, self.state)

    @property
    def active(self) -> bool:
        """True from Start until the worker has put down its last step."""
        return self.state in ("running", "stopping")

    @property
    def can_resume(self) -> bool:
        return self.state == "stopped" and self._job is not None

    def start(self, make_job: Callable[[], Iterator[Progress]], *, wait: bool = False) -> bool:
        """Begin a new job from its first step; False, with the reason in `refusal`, while one is running.

        `make_job` is called in the worker, so that loading data does not block a button.
        """
        return self._launch(make_job, wait)

    def resume(self, *, wait: bool = False) -> bool:
        """Go on with a stopped job; False where there is none."""
        return self._launch(None, wait)

    def stop(self, *, wait: bool = False) -> None:
        """Ask the worker to end after its current step. Harmless when nothing runs."""
        with self._lock:
            if self.state == "running":
                self._stop.set()
                self._set("stopping")
        if wait:
            self.join()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the worker; True when it has ended. A kernel interrupt stops the run, then goes on up."""
        ended = self._ended
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            # An event in short waits: an interrupt during Thread.join makes CPython 3.11 take a live thread for dead.
            while not ended.wait(0.05) and (deadline is None or time.monotonic() < deadline):
                pass
        except KeyboardInterrupt:
            self.stop()
            ended.wait(SLOT_WAIT_S)
            raise
        return ended.is_set()

    def close(self) -> None:
        """End the run for good: later results are dropped, callbacks are not called again."""
        with self._lock:
            self._generation += 1
            self._stop.set()
            self._job = None
            self._on_item, self._on_change = (lambda progress: None), (lambda runner: None)
            self.state = "idle"

    def _launch(self, make_job: Callable[[], Iterator[Progress]] | None, wait: bool) -> bool:
        with self._lock:
            if self.active:
                self.refusal = "This run is still going. Press Stop first."
                return False
            if make_job is None and not self.can_resume:
                self.refusal = "There is no stopped run to resume. Press Start."
                return False
            if not _worker_slot.acquire(timeout=SLOT_WAIT_S):
                owner = _slot_owner[0] if _slot_owner else "another panel"
                self.refusal = f"The {owner} panel is training in this notebook. Press its Stop first."
                return False
            _slot_owner[:] = [self.name]
            self._generation += 1
            self._stop.clear()
            self.refusal, self.failure = "", None
            if make_job is not None:
                self._job, self.progress = None, Progress(0, 0.0)
            self._ended = threading.Event()
            work = (make_job, self._generation, self._ended)
            thread = threading.Thread(target=self._work, args=work, name=f"comera-lab-{self.name}", daemon=True)
            # The worker cannot report its own ending before this: it needs the lock for that.
            thread.start()
            self._set("running")
        if wait:
            self.join()
        return True

    def _work(self, make_job: Callable[[], Iterator[Progress]] | None, generation: int, ended: threading.Event) -> None:
        ending, failure = "failed", None
        try:
            job = self._job if make_job is None else make_job()
            assert job is not None
            ending = self._drive(job, generation)
        except Exception as error:
            failure = Failure.of(error)
        finally:
            _slot_owner.clear()
            _worker_slot.release()
            try:
                with self._lock:
                    if generation == self._generation:
                        self._job = job if ending == "stopped" else None
                        self.failure = failure
                        self._set(ending)
            finally:
                ended.set()

    def _drive(self, job: Iterator[Progress], generation: int) -> str:
        while not self._stop.is_set():
            progress = next(job, None)
            if progress is None:
                return "finished"
            with self._lock:
                if generation != self._generation:
                    return "stopped"
                self.progress = progress
            self._on_item(progress)
        return "stopped"

    def _set(self, state: str) -> None:
        self.state = state
        self._on_change(self)
