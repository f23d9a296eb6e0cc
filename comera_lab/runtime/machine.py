"""Limits, threads, allocator, device and seeds of this process.

Limits come from the control groups (v1 or v2): inside a container, libraries see the whole host and start too
many threads for the share they own.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

ROOT = Path("/")
# Kept free pages count against the limit: 2 GiB machines (Binder) need them back.
TIGHT_MEMORY_BYTES = 4 * 2**30
ALLOCATOR_SWITCH = "COMERA_LAB_ALLOCATOR"


def _cgroup_values(controller: str, v2_file: str, v1_files: tuple[str, ...], root: Path) -> list[list[str]]:
    """Contents of the limit files from the process's own group up to the top one, v2 and v1 alike.

    A container often sees the host's group path but only its own part of the tree: missing levels are passed.
    """
    listing = root / "proc/self/cgroup"
    found = []
    for line in listing.read_text().splitlines() if listing.is_file() else []:
        _, controllers, path = line.split(":", 2)
        v2 = controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" if v2 else root / "sys/fs/cgroup" / controllers
        if not v2 and not mount.is_dir():
            mount = root / "sys/fs/cgroup" / controller
        files = (v2_file,) if v2 else v1_files
        group = Path(path.strip("/"))
        for level in [group, *group.parents]:
            paths = [mount / level / name for name in files]
            if all(item.is_file() for item in paths):
                found.append(" ".join(item.read_text() for item in paths).split())
    return found


def physical_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory of the machine in bytes; None where the system does not tell."""
    table = root / "proc/meminfo"
    if table.is_file():
        match = re.search(r"^MemTotal:\s+(\d+) kB", table.read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    if root == ROOT and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Smallest memory limit on this process in bytes (control groups, address space), None if there is none."""
    values = _cgroup_values("memory", "memory.max", ("memory.limit_in_bytes",), root)
    limits = [int(value) for (value,) in values if value != "max"]
    if sys.platform != "win32":
        import resource

        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [address_space] if address_space != resource.RLIM_INFINITY else []
    # v1 writes "no limit" as a number near 2**63: a limit above the machine's memory is none
    ceiling = physical_memory_bytes(root) or 2**62
    return min((limit for limit in limits if limit < ceiling), default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of CPU time that the control groups allow, for example 1.5; None if they set no limit."""
    values = _cgroup_values("cpu", "cpu.max", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), root)
    shares = [int(quota) / int(period) for quota, period in values if quota != "max" and int(quota) > 0]
    return min(shares, default=None)


def cores_allowed(root: Path = ROOT) -> int:
    """Whole cores this process may use: the smaller of CPU affinity and quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def limit_threads(threads: int | None = None) -> int:
    """Cap torch's threads and return the cap; by default the cores allowed, or OMP_NUM_THREADS where that is less."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}. Leave it out to use the cores allowed.")
    if threads is None:
        wished = os.environ.get("OMP_NUM_THREADS", "")
        threads = min([cores_allowed()] + ([int(wished)] if wished.isdecimal() and int(wished) else []))
    torch.set_num_threads(threads)
    return threads


def pick_device(name: str | None = None) -> torch.device:
    """The named device if it can be used here; without a name the GPU if there is one, else the CPU."""
    usable = ["cuda"] if torch.cuda.is_available() else []
    usable += ["mps"] if torch.backends.mps.is_available() else []
    usable += ["cpu"]
    kind, _, index = (name or usable[0]).partition(":")
    counts = {"cuda": torch.cuda.device_count()}
    if kind not in usable or (index and (not index.isdecimal() or int(index) >= counts.get(kind, 1))):
        raise ValueError(f"device must be one of {', '.join(usable)} on this machine, got {name!r}. Use one of them.")
    return torch.device(name or kind)


class AllocatorStatus(NamedTuple):
    """Whether glibc keeps freed memory for the next tensor, and why or why not."""

    tuned: bool
    reason: str


_allocator = AllocatorStatus(False, "as the system sets it: tune_cpu_allocator() was not called")
# malloc.h of glibc: parameter numbers of mallopt
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEP_BYTES = 2**31 - 1  # mallopt takes a C int
# One extension of the heap serves many tensors; the size of a glibc arena heap.
_PAD_BYTES = 64 * 2**20
# Address space of the heap that may use huge pages: not resident until it is touched.
_HUGE_HEAP_BYTES = 2 * 2**30
_HUGE_PAGE_BYTES, _MADV_HUGEPAGE = 2 * 2**20, 14


def allocator_status() -> AllocatorStatus:
    """What `tune_cpu_allocator` did in this process."""
    return _allocator


def tune_cpu_allocator() -> AllocatorStatus:
    """Let glibc keep freed memory, so that the next large tensor does not fault in fresh pages.

    By default glibc maps every tensor above 32 MiB anew and returns it when freed; touching the new pages then
    costs more than a thin product itself. The heap grows over the first steps, then settles; its first 2 GiB ask for
    huge pages, of which fewer have to be looked up. Changes the whole process and cannot be undone in it. Does
    nothing off glibc, under a memory limit below 4 GiB, and with COMERA_LAB_ALLOCATOR=off in the environment.
    """
    global _allocator
    if not _allocator.tuned:
        _allocator = _tune()
    return _allocator


def _tune() -> AllocatorStatus:
    if os.environ.get(ALLOCATOR_SWITCH, "").lower() in ("off", "0"):
        return AllocatorStatus(False, f"switched off by {ALLOCATOR_SWITCH}={os.environ[ALLOCATOR_SWITCH]}")
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return AllocatorStatus(False, f"left alone: {platform.system()} without glibc needs no tuning")
    if any(name in os.environ.get("LD_PRELOAD", "") for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return AllocatorStatus(False, f"left alone: LD_PRELOAD={os.environ['LD_PRELOAD']} replaces glibc's malloc")
    limit = min((n for n in (memory_limit_bytes(), physical_memory_bytes()) if n is not None), default=None)
    if limit is not None and limit < TIGHT_MEMORY_BYTES:
        return AllocatorStatus(False, f"left alone: only {limit / 2**20:,.0f} MiB may be used, freed memory goes back")
    libc = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    refused = [parameter for parameter, value in settings if libc.mallopt(parameter, value) != 1]
    if refused:
        return AllocatorStatus(False, f"glibc refused mallopt parameters {refused}")
    pages = "huge pages" if _ask_for_huge_pages(libc) else "small pages"
    return AllocatorStatus(True, f"freed memory is kept for the next tensor (mallopt: no mmap, no trim; {pages})")


def _ask_for_huge_pages(libc: ctypes.CDLL) -> bool:
    """Extend the heap, mark it for huge pages, free it: without mmap and trimming the next tensors come from there."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(_HUGE_HEAP_BYTES)
    if not block:  # a limit on address space
        return False
    start = -(-block // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    refused = libc.madvise(start, (block + _HUGE_HEAP_BYTES - start) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES,
                           _MADV_HUGEPAGE)  # fmt: skip
    libc.free(block)
    return bool(refused == 0)


def seed_everything(seed: int) -> torch.Generator:
    """Seed Python, numpy and torch (all devices); return a CPU generator with the same seed to pass on."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in 0 .. 2**32 - 1 (numpy's range), got {seed}. Take a small number, say 0.")
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  a learner's own cells may use numpy's global generator
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)
