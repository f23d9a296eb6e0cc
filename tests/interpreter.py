"""Tests that run in triton's interpreter, beside a suite that must not.

The interpreter has to be chosen before triton is imported, so a decorated test runs in one worker process that
serves the whole session. An assertion that fails there fails here, with the worker's traceback.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec

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
        if os.environ.get(SWITCH) == "1":
            test(*args, **kwargs)
        else:
            _worker().submit(run, *args, **kwargs).result()

    return run
