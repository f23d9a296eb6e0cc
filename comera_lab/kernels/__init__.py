"""Triton kernels: one file per operation, each beside a naive twin; this door says what can run here and why not.

Importing this package imports no triton. A kernel file (`comera_lab.kernels.tt_linear`, ..) needs triton when it
is imported, so callers ask `takes_triton` first.
"""

from __future__ import annotations

import functools
import importlib
import warnings

import torch
from torch import Tensor

from comera_lab.kernels.cases import CompileCase, Tile
from comera_lab.runtime import TritonStatus, triton_status

__all__ = ["CompileCase", "KernelStatus", "Tile", "available", "takes_triton", "unsupported"]

KernelStatus = TritonStatus
# bf16, cp.async and the matrix instructions that the tiles count on
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The sums of one row of x A live in registers: 128 numbers of fp32 fill them at the shipped tiles.
MAX_RANK = 128


def available(strict: bool = False) -> KernelStatus:
    """What kernels can do in this process: "compile", "interpreter", "no-gpu", "absent" or "broken", and why.

    Where they should run, a small kernel is really launched. A missing or broken triton is told by one
    RuntimeWarning a process; `strict` raises ImportError instead.
    """
    status = triton_status()
    if status.kind in ("compile", "interpreter") and (fault := _probe_fault(status.kind)):
        status = KernelStatus("broken", fault)
    if status.kind in ("absent", "broken"):
        if strict:
            raise ImportError(f"triton kernels cannot run: {status.reason}.")
        _warn_once(status.reason)
    return status


@functools.cache
def _probe_fault(kind: str) -> str | None:
    """Why a kernel cannot be launched although triton imports, or None."""
    try:
        probe = importlib.import_module("comera_lab.kernels.probe")
        value = probe.wrote(torch.device("cuda" if kind == "compile" else "cpu"))
    except Exception as error:  # no ptxas, a stub, no C compiler: the reason is the report
        return f"launching a triton kernel failed with {type(error).__name__}: {error}"
    return None if value == probe.COUNT else f"a triton kernel that writes {probe.COUNT} wrote {value}"


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"triton kernels cannot run, torch code is used: {reason}.", RuntimeWarning, stacklevel=3)


def takes_triton(backend: str | None, device: torch.device, unsupported: str | None) -> bool:
    """Whether a kernel serves this call; `unsupported` says why these dtypes and sizes have no kernel, or is None.

    backend None takes triton for CUDA tensors of supported sizes, else torch. A named backend is taken at its
    word: ValueError, with the reason, where it cannot run or is unknown.
    """
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be None, 'torch' or 'triton', got {backend!r}. None picks by device and size.")
    if backend == "torch" or (backend is None and device.type != "cuda"):
        return False
    reason = unsupported or _obstacle(device)
    if reason and backend is not None:
        raise ValueError(f"backend='triton' cannot run this: {reason}. Use backend=None or 'torch'.")
    return reason is None


def unsupported(rank: int, *tensors: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Why no kernel of the TT operations takes these floating tensors at this rank, or None. Looks at no value.

    `dtype`: the one that they will be converted to.
    """
    dtypes = {dtype} if dtype else {tensor.dtype for tensor in tensors}
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        return f"the tensors are on several devices: {sorted(map(str, devices))}"
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"the kernels take one dtype of {DTYPES}, got {sorted(map(str, dtypes))}"
    return None if rank <= MAX_RANK else f"the kernels take ranks up to {MAX_RANK}, got {rank}"


def _obstacle(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of this device, or None."""
    status = available()
    if status.kind in ("absent", "broken"):
        return status.reason
    if device.type == "cpu":
        return None if status.kind == "interpreter" else f"the tensors are on the CPU and there is {status.reason}"
    if device.type != "cuda" or status.kind != "compile":
        return f"the tensors are on {device.type} and triton says: {status.reason}"
    if torch.version.hip is not None:
        return "the tiles were laid out for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"the kernels need compute capability {OLDEST_CAPABILITY}, this GPU has {capability}"
    return None
