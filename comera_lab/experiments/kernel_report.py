"""What the compiler made of every kernel, read off the machine code on a machine without a GPU.

`comera-lab bench --suite kernels-static` compiles each case that a kernel file ships for sm_80 (A100) and sm_90
(H100, H200) and lists the result with the tools that triton's wheel carries: registers and stack with cuobjdump,
instructions with nvdisasm. Says nothing about time.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comera_lab.experiments.recorder import Recorder
from comera_lab.experiments.rows import KernelRow
from comera_lab.runtime import cores_allowed, require

if TYPE_CHECKING:
    from comera_lab.kernels import CompileCase

CAPABILITIES = (80, 90)
# Shared memory that one program may take, bytes (CUDA programming guide, technical specifications).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
REGISTER_LIMIT = 255
# SASS names of the matrix instructions: wgmma and mma in PTX.
MATRIX = {"wgmma": r"\bHGMMA\.", "mma": r"\bHMMA\."}
LOADS, WIDE_LOADS, WIDE_STORES = r"\bLDG(STS)?\.", r"\bLDG(STS)?\.\S*128\b", r"\bSTG\.\S*128\b"
# wgmma multiplies 64 rows at least
WGMMA_ROWS = 64


def shipped_cases(pattern: str = "") -> list[CompileCase]:
    """Every case of every kernel file whose name holds a match of `pattern`, sorted by name."""
    require("triton", "compiling the kernels")
    package = importlib.import_module("comera_lab.kernels")
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        ship = getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "compile_cases", None)
        found += [case for case in ship() if re.search(pattern, case.name)] if ship else []
    return sorted(found, key=lambda case: case.name)


def kernel_rows(
    pattern: str = "", capabilities: Sequence[int] = CAPABILITIES, processes: int | None = None
) -> Iterator[KernelRow]:
    """One row per case and capability, in the order of `shipped_cases`, compiled by `processes` (the cores allowed).

    Raises ValueError where no case matches or where triton interprets kernels in this process.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("kernels cannot be compiled while TRITON_INTERPRET=1. Unset it and start again.")
    names = [case.name for case in shipped_cases(pattern)]
    if not names:
        raise ValueError(f"no kernel case matches {pattern!r}. Leave it out to compile all.")
    jobs = [(name, capability) for name in names for capability in capabilities]
    # a process takes seconds to start, a compilation one
    processes = min(cores_allowed() if processes is None else processes, 1 + len(jobs) // 8)
    if processes == 1:
        yield from map(_row_of, jobs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(_row_of, jobs)


def run_static(out: str | Path | None = None, pattern: str = "") -> list[KernelRow]:
    """Print the table and append the rows to `out`. Raises ArithmeticError, after the last row, if one has a fault."""
    rows, faulty = [], []
    print(_HEADER)
    with Recorder(out, {"suite": "kernels-static", "pattern": pattern}) as recorder:
        for row in kernel_rows(pattern):
            recorder.add(row)
            rows.append(row)
            wrong = faults(row)
            faulty += [f"{row.kernel} sm_{row.capability}: {', '.join(wrong)}"] if wrong else []
            print(_line(row) + ("  " + "; ".join(wrong) if wrong else ""), flush=True)
    print("Read off the machine code on this machine; nothing was run on a GPU.")
    if faulty:
        raise ArithmeticError(f"{len(faulty)} of {len(rows)} kernels are badly compiled: {'; '.join(faulty)}.")
    return rows


def faults(row: KernelRow) -> list[str]:
    """What a kernel must not do: spill, ask for more shared memory than the chip has, multiply halves without tensor
    cores (wgmma on sm_90 for 64 rows and more), load the operands of such products in narrow pieces alone."""
    found = []
    if row.spill_bytes:
        found.append(f"spills {row.spill_bytes} bytes")
    if row.shared_bytes > SHARED_LIMIT[row.capability]:
        found.append(f"needs {row.shared_bytes} bytes of shared memory, there are {SHARED_LIMIT[row.capability]}")
    halves = [product for product in row.products if product.startswith(("bf16", "f16"))]
    if halves:
        rows = max(int(product.rpartition(" ")[2].partition("x")[0]) for product in halves)
        want = "wgmma" if row.capability >= 90 and rows >= WGMMA_ROWS else "mma"
        if row.matrix_kind != want:
            found.append(f"multiplies by {row.matrix_kind or 'plain arithmetic'} instead of {want}")
        if not row.wide_loads:
            found.append("has no load of 16 bytes a thread")
    return found


def _row_of(job: tuple[str, int]) -> KernelRow:
    name, capability = job
    (case,) = (case for case in shipped_cases(re.escape(name)) if case.name == name)
    compiled = case.compile(capability)
    usage, listing = _disassembled(compiled.asm["cubin"])
    counts = {kind: len(re.findall(mnemonic, listing)) for kind, mnemonic in MATRIX.items()}
    kind = max(counts, key=lambda kind: counts[kind])
    return KernelRow(
        kernel=name,
        capability=capability,
        warps=case.num_warps,
        stages=case.num_stages,
        registers=int(usage["REG"]),
        spill_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=int(compiled.metadata.shared),
        products=_products(compiled.asm["ttir"]),
        matrix_kind=kind if counts[kind] else None,
        matrix_instructions=counts[kind],
        loads=len(re.findall(LOADS, listing)),
        wide_loads=len(re.findall(WIDE_LOADS, listing)),
        wide_stores=len(re.findall(WIDE_STORES, listing)),
    )


def _products(ttir: str) -> list[str]:
    """Each matrix product in triton's own listing, such as "bf16 64x32x16": operand type, rows x depth x columns."""
    pattern = r"tt\.dot .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x\w+>"
    return sorted({f"{kind} {rows}x{depth}x{columns}" for rows, depth, kind, columns in re.findall(pattern, ttir)})


def _disassembled(cubin: bytes) -> tuple[dict[str, str], str]:
    """Resource usage by name (REG, STACK, LOCAL, ..) and the listing of the machine code."""
    tools = Path(str(require("triton", "reading compiled kernels").__file__)).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        used = _output(tools / "cuobjdump", "-res-usage", str(file))
        listing = _output(tools / "nvdisasm", "-c", str(file))
    return dict(re.findall(r"\b([A-Z]+):(\d+)", used)), listing


def _output(tool: Path, *arguments: str) -> str:
    if not tool.is_file():
        raise FileNotFoundError(f"{tool.name} is not at {tool}. Install triton from its own wheel, which carries it.")
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


_HEADER = (
    f"{'kernel':<52} {'chip':<5} {'warps':>5} {'stages':>6} {'regs':>4} {'spill':>5} {'shared KiB':>10} "
    f"{'matrix':>10} {'16-byte loads':>13}"
)


def _line(row: KernelRow) -> str:
    matrix = f"{row.matrix_instructions} {row.matrix_kind}" if row.matrix_kind else "-"
    loads: Any = f"{row.wide_loads} of {row.loads}"
    return (
        f"{row.kernel:<52} sm_{row.capability:<2} {row.warps:>5} {row.stages:>6} {row.registers:>4} "
        f"{row.spill_bytes:>5} {row.shared_bytes / 1024:>10.1f} {matrix:>10} {loads:>13}"
    )
