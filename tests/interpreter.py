"""Tests that run in triton's interpreter, beside a suite that must not.

The interpreter has to be chosen before triton is imported, so a decorated test runs in one worker process that
serves the whole session. An assertion that fails there fails here, with the worker's traceback.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec

import pytest
import torch

SWITCH = "TRITON_INTERPRET"
Arguments = ParamSpec("Arguments")


def _start() -> None:
    os.environ[SWITCH] = "1"
    warnings.simplefilter("error")
    torch.set_num_threads(1)


@functools.cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)


def in_interpreter(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Run this test function of a module in the worker. Its arguments must be picklable: sizes, names, dtypes."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if os.environ.get(SWITCH) != "1":
            _worker().submit(run, *args, **kwargs).result()
            return
        try:
            test(*args, **kwargs)
        except pytest.fail.Exception as failure:  # cannot be pickled
            raise AssertionError(str(failure)) from None

    return run


@contextmanager
def nan_filled() -> Iterator[None]:
    """Fresh memory holds NaN until it is written, so an element that a kernel forgets shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def within_guards() -> Iterator[Callable[[], list[bool]]]:
    """torch.empty gives the middle of a larger buffer; the yielded call tells for each buffer if its ends were left."""
    make, margin, marker = torch.empty, 64, 77
    buffers: list[torch.Tensor] = []

    def guarded(*size: int, **options: Any) -> torch.Tensor:
        count = math.prod(size)
        buffers.append(torch.full((count + 2 * margin,), marker, **options))
        return buffers[-1][margin : margin + count].view(size)

    torch.empty = guarded  # type: ignore[assignment]
    try:
        yield lambda: [bool((torch.cat([b[:margin], b[-margin:]]) == marker).all()) for b in buffers]
    finally:
        torch.empty = make
