"""`from comera_lab.teaching.kernels import tl, triton`: Triton itself, or the kit's pointer model in its place.

Set TRITON_INTERPRET=1 before this import. Without triton (it has no build for Windows and macOS) the same kernels run
in the model alone; `KernelStepPanel` says which it is, and why.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from comera_lab.kernels.pointer_model import language

__all__ = ["tl", "triton"]


def _undecorated(kernel: Any) -> Any:
    return kernel


def triton_or_model() -> tuple[Any, Any]:
    """(triton, triton.language), or stand-ins with what the lesson uses of them."""
    try:
        library, names = importlib.import_module("triton"), importlib.import_module("triton.language")
        if callable(library.jit):
            return library, names
    except Exception:  # absent, a stub, broken in a way of its own: `runtime.triton_status` tells which
        pass
    return SimpleNamespace(jit=_undecorated), language


triton, tl = triton_or_model()
