"""Run the source of a Triton kernel on numpy blocks and write down every address that it touches.

`launch(kernel, grid, tensors, scalars)` runs each program after the other. It needs no triton: the kernel's global
that is triton.language (or `language` of this file) is replaced. Stricter than a GPU, so that mistakes show: an
address outside its tensor raises, a lane that is masked without `other` reads NaN, outputs start as NaN.
Counts elements, not bytes and not caches; says nothing about time. Knows the few functions that `Language` lists.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_ACCESSES = 2_000  # a learner's loop that never ends, but loads


class KernelError(ValueError):
    """A kernel did what no kernel may do; the text is a sentence for the learner."""


@dataclass(frozen=True)
class Access:
    """One load or store of one program: element offsets of all lanes, and which lanes were masked off."""

    program: tuple[int, ...]
    tensor: str
    writes: bool
    offsets: np.ndarray
    active: np.ndarray
    line: str

    @property
    def count(self) -> int:
        """Elements really read or written."""
        return int(self.active.sum())


@dataclass
class Trace:
    """What a launch did, in order, and the tensors afterwards."""

    accesses: list[Access] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def reads(self) -> int:
        """Elements read from memory by all programs."""
        return sum(access.count for access in self.accesses if not access.writes)

    @property
    def writes(self) -> int:
        """Elements written to memory by all programs."""
        return sum(access.count for access in self.accesses if access.writes)

    @property
    def score(self) -> int:
        """Reads and writes together: fewer is better."""
        return self.reads + self.writes


class Block(np.ndarray):
    """A numpy array with the methods of a Triton block that kernels use."""

    def to(self, dtype: Any) -> Block:
        """The same numbers in another dtype."""
        return _block(self.astype(dtype))


def _block(value: Any) -> Block:
    return np.asarray(value).view(Block)


@dataclass(frozen=True)
class _Element:
    element_ty: Any = np.float32


class Pointer:
    """Addresses into one tensor, a block of them or one."""

    __array_ufunc__ = None  # block + pointer asks the pointer
    dtype = _Element()

    def __init__(self, machine: _Machine, tensor: str, offsets: Any = 0) -> None:
        self.machine, self.tensor, self.offsets = machine, tensor, np.asarray(offsets)

    def __add__(self, more: Any) -> Pointer:
        steps = np.asarray(more)
        if steps.dtype.kind not in "iu":
            raise KernelError(f"a pointer moves by whole elements, got {steps.dtype} to add. Use offsets that are int.")
        return Pointer(self.machine, self.tensor, self.offsets + steps)

    __radd__ = __add__

    def __sub__(self, less: Any) -> Pointer:
        return self + -np.asarray(less)


class _Machine:
    """The memory, the program that is running, and the log."""

    def __init__(self, code: Any, values: Mapping[str, np.ndarray], grid: tuple[int, ...]) -> None:
        self.code, self.values, self.grid = code, values, grid
        self.program: tuple[int, ...] = (0,) * len(grid)
        self.accesses: list[Access] = []

    def touch(self, pointer: Any, mask: Any, writes: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log an access; returns the tensor's elements, the offsets with masked lanes at 0, and the mask."""
        verb = "store" if writes else "load"
        if not isinstance(pointer, Pointer):
            raise KernelError(f"tl.{verb} needs a pointer, got {_kind(pointer)}. Add offsets to one of the arguments.")
        try:
            shape = np.broadcast_shapes(pointer.offsets.shape, np.shape(True if mask is None else mask))
            offsets = np.broadcast_to(pointer.offsets, shape)
        except ValueError:
            raise KernelError(
                f"tl.{verb}: the mask has shape {np.shape(mask)}, the addresses {pointer.offsets.shape}. Give them one."
            ) from None
        active = np.broadcast_to(np.asarray(True if mask is None else mask, dtype=bool), shape)
        values = self.values[pointer.tensor]
        outside = active & ((offsets < 0) | (offsets >= values.size))
        if outside.any():
            first = int(offsets[outside].flat[0])
            raise KernelError(
                f"Program {program_words(self.program)} {'writes' if writes else 'reads'} {pointer.tensor}[{first}], "
                f"outside its {values.size} elements: mask that lane."
            )
        if len(self.accesses) >= MAX_ACCESSES:
            raise KernelError(f"more than {MAX_ACCESSES:,} loads and stores: is there a loop that never ends?")
        self.accesses.append(
            Access(self.program, pointer.tensor, writes, offsets.ravel().copy(), active.ravel().copy(), self._line())
        )
        return values, np.where(active, offsets, 0), active

    def _line(self) -> str:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back  # type: ignore[assignment]
        return linecache.getline(self.code.co_filename, frame.f_lineno).strip() if frame else ""


class Language:
    """The part of triton.language that the model knows."""

    float32, float64, float16 = np.float32, np.float64, np.float16
    int1, int32, int64 = np.bool_, np.int32, np.int64
    range = static_range = range

    class constexpr(int):
        """An argument that is fixed when the kernel is compiled."""

    def __init__(self, machine: _Machine | None = None) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(name for name in vars(Language) if not name.startswith("_")))
        raise KernelError(f"the kit's pointer model has no tl.{name}. It knows {known}.")

    def program_id(self, axis: int) -> Block:
        return _block(np.int64((*self._running.program, 0, 0)[axis]))

    def num_programs(self, axis: int) -> Block:
        return _block(np.int64((*self._running.grid, 1, 1)[axis]))

    def arange(self, start: int, end: int) -> Block:
        size = int(end) - int(start)
        if size < 1 or size & (size - 1):
            raise KernelError(
                f"tl.arange makes blocks of 1, 2, 4, 8, ... lanes, got {size}. Take the next one; mask it."
            )
        return _block(np.arange(int(start), int(end)))

    def load(self, pointer: Any, mask: Any = None, other: Any = np.nan, **_: Any) -> Block:
        values, offsets, active = self._running.touch(pointer, mask, writes=False)
        return _block(np.where(active, values[offsets], np.asarray(other, dtype=values.dtype)))

    def store(self, pointer: Any, value: Any, mask: Any = None, **_: Any) -> None:
        values, offsets, active = self._running.touch(pointer, mask, writes=True)
        try:
            values[offsets[active]] = np.broadcast_to(np.asarray(value), active.shape)[active]
        except ValueError:
            raise KernelError(
                f"tl.store: the values have shape {np.shape(value)}, the addresses {active.shape}. Give them one."
            ) from None

    def zeros(self, shape: Sequence[int], dtype: Any) -> Block:
        return _block(np.zeros([int(size) for size in shape], dtype))

    def full(self, shape: Sequence[int], value: float, dtype: Any) -> Block:
        return _block(np.full([int(size) for size in shape], value, dtype))

    def dot(self, a: Any, b: Any, acc: Any = None, **_: Any) -> Block:
        if np.ndim(a) != 2 or np.ndim(b) != 2 or np.shape(a)[1] != np.shape(b)[0]:
            raise KernelError(f"tl.dot needs (m, k) and (k, n), got {np.shape(a)} and {np.shape(b)}.")
        out = np.asarray(a) @ np.asarray(b)
        return _block(out if acc is None else acc + out)

    def sum(self, block: Any, axis: int | None = None) -> Block:
        return _block(np.sum(block, axis=axis))

    def max(self, block: Any, axis: int | None = None) -> Block:
        return _block(np.max(block, axis=axis))

    def trans(self, block: Any) -> Block:
        return _block(np.transpose(block))

    def where(self, condition: Any, a: Any, b: Any) -> Block:
        return _block(np.where(condition, a, b))

    def maximum(self, a: Any, b: Any) -> Block:
        return _block(np.maximum(a, b))

    def minimum(self, a: Any, b: Any) -> Block:
        return _block(np.minimum(a, b))

    def exp(self, block: Any) -> Block:
        return _block(np.exp(block))

    def cdiv(self, a: int, b: int) -> int:
        return -(-int(a) // int(b))

    @property
    def _running(self) -> _Machine:
        if self._machine is None:
            raise KernelError("this works inside a kernel only. Launch the kernel instead of calling it.")
        return self._machine


language: Any = Language()


def source_of(kernel: Any) -> FunctionType:
    """The plain function of a kernel, decorated with triton.jit or not. KernelError for anything else."""
    inner = kernel if isinstance(kernel, FunctionType) else inspect.getattr_static(kernel, "fn", None)
    if not isinstance(inner, FunctionType):
        raise KernelError(f"a kernel is a function under @triton.jit, got {_kind(kernel)}. Hand in its name.")
    return inner


def with_language(kernel: Any, replacement: Any) -> FunctionType:
    """A copy of the kernel's function, in globals of its own, that finds `replacement` as its language."""
    function = source_of(kernel)
    names = {name: replacement if _is_language(value) else value for name, value in function.__globals__.items()}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__annotations__, copy.__module__ = function.__annotations__, function.__module__
    copy.__qualname__ = function.__qualname__
    return copy


def launch(kernel: Any, grid: tuple[int, ...], tensors: Mapping[str, Tensor], scalars: Mapping[str, int]) -> Trace:
    """Run every program of `grid`. `tensors` are fp32 of any shape, by argument name without its "_ptr".

    The tensors are copied; the trace holds the ones after the launch. Raises KernelError for what no kernel may do;
    whatever else the kernel raises comes through.
    """
    values = {name: tensor.detach().numpy().astype(np.float32).ravel() for name, tensor in tensors.items()}
    function = source_of(kernel)
    machine = _Machine(function.__code__, values, grid)
    run = with_language(function, Language(machine))
    arguments = {f"{name}_ptr": Pointer(machine, name) for name in tensors} | dict(scalars)
    try:
        inspect.signature(run).bind(**arguments)
    except TypeError:
        raise KernelError(f"the kernel must take the arguments {', '.join(arguments)}. Keep the first line.") from None
    for program in product(*map(range, grid)):
        machine.program = program
        run(**arguments)
    after = {name: torch.from_numpy(values[name]).reshape(tensor.shape) for name, tensor in tensors.items()}
    return Trace(machine.accesses, after)


def _is_language(value: Any) -> bool:
    return isinstance(value, Language) or (isinstance(value, ModuleType) and value.__name__ == "triton.language")


def program_words(program: tuple[int, ...]) -> str:
    """3 for a grid of one axis, (1, 3) for two."""
    return str(program[0]) if len(program) == 1 else str(program)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
