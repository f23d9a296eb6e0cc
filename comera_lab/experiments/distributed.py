"""Processes that work together: who this one is, how they agree, and what is said when one of them is gone.

They are started by `torchrun` (`torchrun_world`), or on this machine by a function (`processes`), which a notebook
and the tests use. On CPUs they talk over gloo, on GPUs over NCCL.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_S = 300.0  # a process that is silent for longer counts as lost
_PRELOADED = ["comera_lab.experiments.scale_out", "torch.distributed.fsdp", "sklearn.datasets"]
_LAST_WORDS_S = 3.0
# How torch words a lost peer: gloo raises plain RuntimeErrors.
_LOST = ("gloo", "Connection closed", "Connection reset", "Timed out", "TCPStore", "Broken pipe")


class ProcessLost(RuntimeError):
    """Another process of the run ended, or was silent for too long."""


@dataclass(frozen=True)
class World:
    """This process among those of a run: number `rank` of `size`. `World()` is a process on its own."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = TIMEOUT_S

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, records and writes files."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Each of `values`, added up over all processes, which must all ask."""
        if self.size == 1:
            return list(values)
        added = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(added)
        result: list[float] = added.tolist()
        return result

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Turns torch's errors about lost connections into a ProcessLost that says what to do."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if self.size == 1 or not (isinstance(error, distributed.DistError) or any(w in text for w in _LOST)):
                raise
            raise ProcessLost(
                f"process {self.rank} of {self.size} lost another one in {doing}: it ended, or was silent for "
                f"{self.timeout_s:g} s. Its own last words say why (out of memory, say). Start all again with --resume."
            ) from error


@contextmanager
def torchrun_world(timeout_s: float = TIMEOUT_S, device: str | None = None) -> Iterator[World]:
    """Join the processes that torchrun started. Each takes the GPU of its local number, or all the CPU.

    Raises ValueError in a process that torchrun has not started.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "several processes must be started by torchrun, got a process on its own. "
            "Use: torchrun --nproc-per-node=2 -m comera_lab train ..."
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = torch.device("cpu")
    if device != "cpu" and torch.cuda.is_available():
        place = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(place)
    with _joined(World(rank, size, place, timeout_s), "env://") as world:
        yield world


@contextmanager
def _joined(world: World, address: str) -> Iterator[World]:
    with world.watched("the start"):
        distributed.init_process_group(
            "gloo" if world.device.type == "cpu" else "nccl",
            init_method=address,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout_s),
        )
    try:
        yield world
    finally:
        distributed.destroy_process_group()


def run_processes(
    count: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0, silence_s: float = 60.0
) -> list[Any]:
    """`work(world, say, *arguments)` in `count` new processes of one thread each; what they returned, by rank.

    What they `say` is dropped here. Errors as for `processes`.
    """
    results: dict[int, Any] = {}
    for _ in processes(count, work, *arguments, results=results, timeout_s=timeout_s, silence_s=silence_s):
        pass
    return [results[rank] for rank in range(count)]


def processes(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
    results: dict[int, Any],
    timeout_s: float = 300.0,
    silence_s: float = 60.0,
) -> Iterator[tuple[int, Any] | None]:
    """Start `work(world, say, *arguments)` in `count` new processes; yields (rank, x) for every `say(x)`.

    Yields None ten times a second when nothing is said. `results` takes what each returned, by rank. Closing the
    iterator ends the processes. `work` must be a function of a module; what it takes, says and gives is pickled.
    Raises RuntimeError with the first error of a process, ProcessLost where one died, was silent to the others for
    `silence_s`, or all together took longer than `timeout_s`; the others are ended then.
    """
    # forked from a server that has imported torch once, not from this process, whose threads a fork would break
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_PRELOADED)
    started: list[Any] = []
    lines: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "meeting").as_uri()
        try:
            for rank in range(count):
                here, there = context.Pipe(duplex=False)
                given = (World(rank, count, timeout_s=silence_s), address, there, work, arguments)
                started.append(context.Process(target=_process, args=given, daemon=True))
                started[-1].start()
                there.close()
                lines.append(here)
            yield from _listen(started, lines, results, time.monotonic() + timeout_s)
        finally:
            for process in started:
                process.join(1.0 if len(results) == count else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
            for line in lines:
                line.close()


def _listen(
    started: list[Any], lines: list[Connection], results: dict[int, Any], deadline: float
) -> Iterator[tuple[int, Any] | None]:
    lost = ""
    while len(results) < len(lines):
        if time.monotonic() > deadline:
            raise ProcessLost(lost or f"the {len(lines)} processes did not end in time. Give a longer timeout_s.")
        ready = wait([line for rank, line in enumerate(lines) if rank not in results], timeout=0.1)
        if not ready:
            yield None
        for rank in [rank for rank, line in enumerate(lines) if line in ready]:
            try:
                kind, content = lines[rank].recv()
            except EOFError:
                started[rank].join()
                raise ProcessLost(
                    f"process {rank} of {len(lines)} died (exit code {started[rank].exitcode}) and the others were "
                    "ended. Code -9 often means that the memory was used up."
                ) from None
            if kind == "message":
                yield rank, content
            elif kind == "error":
                raise RuntimeError(f"process {rank} of {len(lines)}: {content}")
            else:
                results[rank] = None if kind == "lost" else content
            if kind == "lost":
                lost = lost or content
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)  # the one that is gone has more to say
    if lost:
        raise ProcessLost(lost)


def _process(world: World, address: str, line: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        with _joined(world, address), world.watched("its work"):
            result = work(world, lambda content: line.send(("message", content)), *arguments)
        line.send(("result", result))
    except ProcessLost as error:
        line.send(("lost", str(error)))
    except Exception as error:
        line.send(("error", f"{type(error).__name__}: {error}"))
