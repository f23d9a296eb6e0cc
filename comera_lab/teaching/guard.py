"""Run a learner's code with a time limit, in whatever thread we are."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class TimeLimit(BaseException):
    """The code took too long. Not an Exception, so that `except Exception` in a loop does not swallow it."""


def run_limited(work: Callable[[], Result], seconds: float) -> Result:
    """What `work()` returns. TimeLimit after `seconds`; anything `work` raises comes through.

    In the main thread a timer signal ends even a tight loop, and what the code prints stays in its cell. In
    other threads and on Windows a worker thread does the work and is asked to end. A single long call into
    compiled code ends only when it returns: Python cannot break into it.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _run_with_timer(work, seconds)
    return _run_in_worker(work, seconds)


def _run_with_timer(work: Callable[[], Result], seconds: float) -> Result:
    ended: list[bool] = []

    def ring(number: int, frame: Any) -> None:
        if not ended:  # an alarm while we tidy up would leave the timer running
            raise TimeLimit

    began = time.monotonic()
    old_handler = signal.signal(signal.SIGALRM, ring)
    # the repeat every 0.2 s is for code that catches everything, BaseException included
    old_delay, old_repeat = signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        try:
            return work()
        finally:
            ended.append(True)
    finally:
        ended.append(True)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old_handler)
        if old_delay:
            left = max(old_delay - (time.monotonic() - began), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left, old_repeat)


def _run_in_worker(work: Callable[[], Result], seconds: float) -> Result:
    values: list[Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            values.append(work())
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=target, name="comera-lab-check", daemon=True)
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(TimeLimit))
        worker.join(1.0)
        raise TimeLimit
    if errors:
        raise errors[0]
    return values[0]
