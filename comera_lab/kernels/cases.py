"""What a kernel file ships: tiles, and cases that `triton.compile` takes on a machine without a GPU.

Every kernel file has `compile_cases()`, a generator of `CompileCase` over its shipped tiles and dtypes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WARP_THREADS = 32


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time, rows x columns, and how: warps, and stages of loads in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class CompileCase:
    """One compilation of one kernel.

    `signature` types the run-time arguments as triton does: "*bf16" is a pointer, "i32" an integer, and ":16"
    behind either promises divisibility by 16 (of the address in bytes, of the value). `constants` holds the
    constexpr arguments and those that are specialised to 1 or None.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def compile(self, capability: int) -> Any:
        """The compiled kernel for sm_`capability` (80, 90); `.asm` holds "ttgir", "ptx" and "cubin"."""
        compiler = importlib.import_module("triton.compiler")
        backends = importlib.import_module("triton.backends.compiler")
        names = list(self.kernel.arg_names)
        missing = set(names) ^ (set(self.signature) | set(self.constants))
        if missing:
            raise ValueError(
                f"case {self.name} must name every argument of its kernel once, look at {sorted(missing)}."
            )
        types = {name: self.signature.get(name, "constexpr").partition(":")[0] for name in names}
        aligned = [k for k, name in enumerate(names) if self.signature.get(name, "").endswith(":16")]
        source = compiler.ASTSource(
            fn=self.kernel,
            signature=types,
            constexprs=dict(self.constants),
            attrs={(k,): [["tt.divisibility", 16]] for k in aligned},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return compiler.compile(source, target=backends.GPUTarget("cuda", capability, WARP_THREADS), options=options)
