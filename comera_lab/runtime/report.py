"""The doctor: what this machine can do for the kit, as text, as a card and as JSON."""

from __future__ import annotations

import html
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import util
from typing import Any, Literal, NamedTuple

import numpy
import torch

from comera_lab.runtime import machine, packages

OLDEST_TORCH = "2.11"
OLDEST_PYTHON = (3, 11)
# The lessons stay under 1 GiB; a browser tab and the notebook server want as much again.
COMFORTABLE_BYTES = 2 * 2**30


class TritonStatus(NamedTuple):
    """compile: kernels run on the GPU here; interpreter: step by step on the CPU; else why not."""

    kind: Literal["compile", "interpreter", "no-gpu", "absent", "broken"]
    reason: str


def triton_status() -> TritonStatus:
    """What triton can do in this process; every failure of triton becomes a reason, none is raised."""
    if util.find_spec("triton") is None:
        where = "" if sys.platform == "linux" else f" (there is no official build for {platform.system()})"
        return TritonStatus("absent", f"triton is not installed{where}; the kit uses its torch code instead")
    wished = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    try:
        library = importlib.import_module("triton.language.standard")
        interpreted = "Interpreted" in type(library.sum).__name__
    except Exception as error:  # a broken install fails in any way it likes; the reason is the report
        return TritonStatus("broken", f"import triton failed with {type(error).__name__}: {error}")
    if wished != interpreted:
        # triton's own functions were fixed to one mode when it was imported
        when = "set" if wished else "taken back"
        return TritonStatus(
            "broken",
            f"TRITON_INTERPRET was {when} after triton was imported: too late. Restart the kernel and set it first",
        )
    if interpreted:
        return TritonStatus(
            "interpreter", "TRITON_INTERPRET=1: kernels run step by step on the CPU, times mean nothing"
        )
    if not torch.cuda.is_available():
        return TritonStatus(
            "no-gpu",
            "no GPU for compiled kernels; set TRITON_INTERPRET=1 before the first import to step through them",
        )
    try:
        target = importlib.import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:  # no C compiler, no libcuda, a stripped install: the reason is the report
        return TritonStatus("broken", f"triton cannot reach the GPU, {type(error).__name__}: {error}")
    return TritonStatus("compile", f"compiles for {target.backend} {target.arch}")


@dataclass(frozen=True)
class Doctor:
    """The report; `problems` stop something from working, `advice` would make it better."""

    python: str
    platform: str
    torch: str
    numpy: str
    device: str
    cuda: str | None
    cores_visible: int
    cores_allowed: int
    threads: int
    memory_bytes: int | None
    memory_limit_bytes: int | None
    allocator: machine.AllocatorStatus
    triton: TritonStatus
    widgets: packages.Verdict
    packages: dict[str, str | None]
    problems: list[str]
    advice: list[str]

    @property
    def ok(self) -> bool:
        """True if nothing that the kit needs is broken."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Every field as plain values, ready for JSON."""
        named = {name: getattr(self, name)._asdict() for name in ("allocator", "triton", "widgets")}
        return asdict(self) | named | {"ok": self.ok}

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return "✓ ready" if self.ok else f"✗ {len(self.problems)} to repair"

    def rows(self) -> Iterator[tuple[str, str]]:
        """(label, text) of each line of the report, what needs hands first."""
        yield from (("repair", text) for text in self.problems)
        yield from (("advice", text) for text in self.advice)
        limit = self.memory_limit_bytes
        memory = "unknown" if self.memory_bytes is None else _mib(self.memory_bytes)
        yield "python", f"{self.python} on {self.platform}"
        yield "torch", f"{self.torch}, numpy {self.numpy}"
        yield "device", self.device if self.cuda is None else f"{self.device}: {self.cuda}"
        yield "cores", f"{self.cores_allowed} allowed, {self.cores_visible} visible, torch uses {self.threads}"
        yield "memory", f"{memory}, " + ("no limit set" if limit is None else f"limited to {_mib(limit)}")
        yield "allocator", ("tuned: " if self.allocator.tuned else "not tuned: ") + self.allocator.reason
        yield "triton", f"{self.triton.kind}: {self.triton.reason}"
        yield "widgets", self.widgets.text
        yield "packages", ", ".join(f"{name} {version or 'missing'}" for name, version in self.packages.items())

    def text(self) -> str:
        """The report as plain text."""
        return "\n".join([f"comera_lab doctor: {self.headline}", *(f"  {k:<10} {v}" for k, v in self.rows())])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """A card in JupyterLab's own colours, so that it reads in the light and in the dark theme."""
        cells = "".join(
            f'<tr><th scope="row" style="text-align:left;padding:2px 14px 2px 0;vertical-align:top;font-weight:600">'
            f'{html.escape(label)}</th><td style="text-align:left;padding:2px 0">{html.escape(text)}</td></tr>'
            for label, text in self.rows()
        )
        edge = "var(--jp-success-color1, #009e73)" if self.ok else "var(--jp-error-color1, #d55e00)"
        return (
            f'<div role="region" aria-label="comera_lab doctor" style="border:1px solid var(--jp-border-color1, #8888);'
            f"border-left:6px solid {edge};border-radius:4px;padding:10px 14px;max-width:900px;font-size:14px;"
            "background:var(--jp-layout-color1, transparent);color:var(--jp-ui-font-color1, inherit);"
            'font-family:var(--jp-ui-font-family, sans-serif)">'
            f'<div style="font-size:16px;font-weight:600;margin-bottom:6px">comera_lab doctor: {self.headline}</div>'
            '<table style="border-collapse:collapse;table-layout:auto;margin:0;color:inherit;background:transparent">'
            f"{cells}</table></div>"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _cuda_text() -> str | None:
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    return f"{device.name}, {_mib(device.total_memory)}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} found"


def doctor() -> Doctor:
    """Look at this machine; changes nothing."""
    versions = packages.installed_versions()
    widgets, triton = packages.check_versions(versions), triton_status()
    allowed, threads, limit = machine.cores_allowed(), torch.get_num_threads(), machine.memory_limit_bytes()
    problems: list[str] = []
    advice: list[str] = []
    if sys.version_info[:2] < OLDEST_PYTHON:
        problems.append(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {platform.python_version()}."
        )
    if packages.older(torch.__version__, OLDEST_TORCH):
        problems.append(f"torch {OLDEST_TORCH} or newer is needed, this is {torch.__version__}.")
    if triton.kind == "broken":
        problems.append(f"triton: {triton.reason}.")
    if not widgets.ok:
        (problems if versions["jupyterlab"] is not None else advice).append(widgets.text)
    if threads > allowed:
        advice.append(f"torch uses {threads} threads on {allowed} allowed: call limit_threads().")
    if limit is not None and limit < COMFORTABLE_BYTES:
        advice.append(f"Only {_mib(limit)} of memory: close other notebooks before a training.")
    return Doctor(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        numpy=numpy.__version__,
        device=str(machine.pick_device()),
        cuda=_cuda_text(),
        cores_visible=os.cpu_count() or 1,
        cores_allowed=allowed,
        threads=threads,
        memory_bytes=machine.physical_memory_bytes(),
        memory_limit_bytes=limit,
        allocator=machine.allocator_status(),
        triton=triton,
        widgets=widgets,
        packages=versions,
        problems=problems,
        advice=advice,
    )
