"""Requests from outside to end a run in order: SIGTERM from a cluster's scheduler, Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_signals(*signals: signal.Signals) -> Iterator[Callable[[], signal.Signals | None]]:
    """Yields a question: which of `signals` came, if any? None of them ends the process meanwhile.

    Handlers that were there come back at the end. Only the main thread gets signals: in another one nothing is held.
    """
    came: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(number))

    before = {one: signal.signal(one, note) for one in signals}
    try:
        yield lambda: came[0] if came else None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
