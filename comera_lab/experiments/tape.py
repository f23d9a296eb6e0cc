"""Operations as torch hands them out, counted and taken down: what a GPU would be sent, seen on any machine.

On a GPU each of them is one launch at least (views and allocations are none), and a CUDA graph is a list of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# no launch: memory is taken, or a number is read
_SILENT = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "_local_scalar_dense",
)


@dataclass
class Operations:
    """What a call did: `launches` operations that touch numbers, `bytes` read and written by them, how often each."""

    launches: int = 0
    bytes: int = 0
    names: Counter[str] = field(default_factory=Counter)


def count_operations(call: Callable[[], object]) -> Operations:
    """Run `call` and count. Every operand of an operation counts as read once, every result as written once."""
    found = Operations()

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if function.namespace != "profiler" and not function.is_view and name not in _SILENT:
                operands = _tensors((args, list((kwargs or {}).values())))
                found.launches += 1
                found.names[name] += 1
                found.bytes += sum(tensor.nbytes for tensor in [*operands, *_tensors(out)])
            return out

    with Count():  # type: ignore[no-untyped-call]
        call()
    return found


class TapeCapture:
    """What a CUDA graph does, on a CPU: every operation once, with its numbers and tensors as they were, for ever.

    Host code is not run again at replay: a number that it computed stays, a tensor that it made anew is not seen.
    `strict` refuses what a graph refuses, reading a tensor on the host; some code does so for CPU tensors alone.
    `lengths` has the number of operations of each recording. Fits `GraphedStep(capture=)`.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.lengths: list[int] = []

    def settle(self, call: Callable[[], None]) -> None:
        """Run `call` as it is."""
        call()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Take down what `call` does; the first replay is that run itself, since a CPU has to run it to see it.

        Raises RuntimeError where `strict` and the host reads a tensor.
        """
        operations: list[tuple[Any, Any, Any, Any]] = []
        strict = self.strict

        class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if strict and function is torch.ops.aten._local_scalar_dense.default:
                    raise RuntimeError("the host reads a tensor while a graph is captured")
                out = function(*args, **(kwargs or {}))
                operations.append((function, args, kwargs or {}, out))
                return out

        with Tape():  # type: ignore[no-untyped-call]
            call()
        self.lengths.append(len(operations))
        first = [True]

        def replay() -> None:
            if first and first.pop():
                return
            with torch.no_grad():
                for function, args, kwargs, out in operations:
                    again = function(*args, **kwargs)
                    for old, new in zip(_tensors(out), _tensors(again), strict=True):
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
