"""CUDA graphs without CUDA, for tests of the code that captures and replays."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeCapture:
    """What a CUDA graph does, on a CPU: every operation once, with its numbers and tensors as they were, for ever.

    Host code is not run again at replay: a number that it computed stays, a tensor that it made anew is not seen.
    `strict` refuses what a graph refuses, reading a tensor on the host; some code does so for CPU tensors alone.
    """

    def __init__(self, strict=True):
        self.strict = strict

    def settle(self, call):
        call()

    def record(self, call):
        operations: list[Any] = []
        strict = self.strict

        class Tape(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if strict and function is torch.ops.aten._local_scalar_dense.default:
                    raise RuntimeError("the host reads a tensor while a graph is captured")
                out = function(*args, **(kwargs or {}))
                operations.append((function, args, kwargs or {}, out))
                return out

        with Tape():
            call()
        first = [True]

        def replay():
            if first.pop() if first else False:
                return  # taking down has run it on this CPU
            with torch.no_grad():
                for function, args, kwargs, out in operations:
                    again = function(*args, **kwargs)
                    for old, new in zip(_tensors(out), _tensors(again), strict=True):
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay


def _tensors(out):
    return [item for item in (out if isinstance(out, list | tuple) else [out]) if isinstance(item, torch.Tensor)]
