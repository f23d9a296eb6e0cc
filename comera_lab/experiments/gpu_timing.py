"""Honest times on a GPU: events around calls, buffers that rotate past the cache, floors from ceilings of the same run.

A floor is the larger of bytes / copy bandwidth and FLOPs / rate of a large bf16 product, both measured first, on the
same device. A row's note says how far its median is from it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Protocol

import torch
from torch import Tensor

from comera_lab.experiments.graphs import Capture
from comera_lab.experiments.rows import BenchRow

SAMPLES = 25
# A sample lasts at least this long: events count in steps of half a microsecond.
SAMPLE_MS = 0.3
Call = Callable[[], object]


class Watch(Protocol):
    """A clock for calls on one device."""

    def samples(self, calls: Sequence[Call], count: int = SAMPLES, settle: int = 3) -> list[float]:
        """`count` samples: mean milliseconds of a call, the calls taken in turn, after `settle` untimed rounds."""

    def peak_mib(self, call: Call) -> float | None:
        """Most memory allocated at once while `call` runs, MiB, what was there before included; None if unknown."""


class CudaWatch:
    """CUDA events on the current stream."""

    def samples(self, calls: Sequence[Call], count: int = SAMPLES, settle: int = 3) -> list[float]:
        turn = itertools.cycle(calls)
        for _ in range(settle * len(calls)):
            next(turn)()
        first = self._timed([(turn, 1)] * settle)
        inner = max(1, math.ceil(SAMPLE_MS / max(min(first), 1e-4)))
        return self._timed([(turn, inner)] * count)

    def _timed(self, plan: list[tuple[Any, int]]) -> list[float]:
        torch.cuda.synchronize()
        marks = [[_event() for _ in range(2)] for _ in plan]
        for (turn, inner), (start, end) in zip(plan, marks, strict=True):
            start.record()
            for _ in range(inner):
                next(turn)()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / inner for (_, inner), (start, end) in zip(plan, marks, strict=True)]

    def peak_mib(self, call: Call) -> float | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostWatch:
    """The host's clock, for a CPU: what the tests of the GPU suite use."""

    def samples(self, calls: Sequence[Call], count: int = SAMPLES, settle: int = 3) -> list[float]:
        times = []
        for number, call in zip(range(settle + count), itertools.cycle(calls), strict=False):
            start = time.perf_counter()
            call()
            if number >= settle:
                times.append((time.perf_counter() - start) * 1e3)
        return times

    def peak_mib(self, call: Call) -> float | None:
        call()
        return None


@dataclass(kw_only=True)
class Bench:
    """One run of the suite on one device: what to time with, how big to make things, the ceilings found so far.

    `shrink` divides sizes (tests on a CPU); `deadline` is a time.monotonic() after which no new measurement is begun.
    `capture` makes graphs.
    """

    device: torch.device
    watch: Watch
    samples: int = SAMPLES
    shrink: int = 1
    deadline: float = math.inf
    capture: Callable[[], Capture] | None = None
    bytes_per_ms: float | None = None
    flops_per_ms: float | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def size(self, value: int, least: int = 16) -> int:
        """`value`, or the shrunken one."""
        return value if self.shrink == 1 else max(least, value // self.shrink)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Random numbers; large ones are drawn on the device."""
        if math.prod(shape) > 1 << 20:
            return (torch.randn(shape, device=self.device) * scale).to(dtype)
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)

    def copies(self, bytes_each: float) -> int:
        """How many sets of buffers to rotate through so that the cache holds less than half of them: 1 to 16."""
        if self.device.type != "cuda":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, min(16, math.ceil(2 * cache / max(bytes_each, 1)) + 1))

    def floor_ms(self, moved: float, flops: float) -> float | None:
        """Milliseconds below which no version can run on this device, by the ceilings of this run."""
        if self.bytes_per_ms is None or self.flops_per_ms is None:
            return None
        return max(moved / self.bytes_per_ms, flops / self.flops_per_ms)

    def time(
        self,
        op: str,
        provider: str,
        mode: str,
        calls: Sequence[Call],
        sizes: dict[str, Any],
        dtype: torch.dtype,
        *,
        moved: float | None = None,
        flops: float | None = None,
        note: str = "",
        samples: int | None = None,
        settle: int = 3,
    ) -> BenchRow:
        """Time `calls` in turn. `moved` bytes and `flops`, the least that the operation needs, give the floor."""
        tenths = quantiles(self.watch.samples(calls, samples or self.samples, settle), n=10, method="inclusive")
        parts = [note] if note else []
        counted: dict[str, Any] = {}
        if moved is not None and flops is not None:
            counted = {"bytes": round(moved), "flops": round(flops)}
            floor = self.floor_ms(moved, flops)
            if floor is not None:
                counted["floor_ms"] = floor
                parts.append(f"{100 * floor / tenths[4]:.0f} % of the floor ({floor:.4g} ms)")
        return BenchRow(
            op=op,
            provider=provider,
            mode=mode,
            value=tenths[4],
            unit="ms",
            p20=tenths[1],
            p80=tenths[7],
            repeats=samples or self.samples,
            sizes={**sizes, **counted},
            dtype=name_of(dtype),
            note="; ".join(parts),
        )

    def peak(
        self, op: str, provider: str, mode: str, call: Call, sizes: dict[str, Any], dtype: torch.dtype
    ) -> list[BenchRow]:
        """The peak of allocated memory in one call, as no or one row."""
        mib = self.watch.peak_mib(call)
        if mib is None:
            return []
        return [number_row(op, provider, f"{mode}, peak memory", mib, "MiB", sizes, dtype)]


def number_row(
    op: str,
    provider: str,
    mode: str,
    value: float,
    unit: str,
    sizes: dict[str, Any],
    dtype: torch.dtype,
    note: str = "",
) -> BenchRow:
    """A row for one number without a spread."""
    return BenchRow(
        op=op, provider=provider, mode=mode, value=value, unit=unit, sizes=sizes, dtype=name_of(dtype), note=note
    )


def ratio_row(slow: BenchRow, fast: BenchRow, note: str = "") -> BenchRow:
    """How many times faster `fast` is than `slow`, by their medians."""
    return BenchRow(
        op=fast.op,
        provider=f"{fast.provider} over {slow.provider}",
        mode=fast.mode,
        value=slow.value / fast.value,
        unit="x faster",
        sizes={name: value for name, value in fast.sizes.items() if name not in ("bytes", "flops", "floor_ms")},
        dtype=fast.dtype,
        note=note,
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ceilings(bench: Bench) -> list[BenchRow]:
    """Measure copy bandwidth and bf16 product rate, keep them in `bench` and give them as rows."""
    count = bench.size(1 << 29, 1 << 16)
    source, target = (torch.zeros(count, dtype=torch.bfloat16, device=bench.device) for _ in "ab")
    source.normal_()
    moved = 2.0 * source.nbytes
    copy = bench.time(
        "ceiling", "copy", "device to device", [lambda: target.copy_(source)], {"elements": count}, source.dtype
    )
    edge = bench.size(8192, 64)
    left, right = (bench.randn(edge, edge, dtype=torch.bfloat16) for _ in "ab")
    product = bench.time("ceiling", "product", "left @ right", [lambda: left @ right], {"edge": edge}, left.dtype)
    bench.bytes_per_ms, bench.flops_per_ms = moved / copy.value, 2.0 * edge**3 / product.value
    return [
        copy,
        number_row("ceiling", "copy", "bandwidth", bench.bytes_per_ms / 1e9, "TB/s", copy.sizes, source.dtype,
                   "bytes read and written"),
        product,
        number_row("ceiling", "product", "rate", bench.flops_per_ms / 1e9, "TFLOP/s", product.sizes, left.dtype),
    ]  # fmt: skip


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`, in float64."""
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm().clamp_min(1e-300))


def refuse_wrong(op: str, error: float, limit: float, sizes: dict[str, Any], dtype: torch.dtype) -> BenchRow:
    """The row of a correctness check. Raises ArithmeticError, so that nothing is timed, above `limit`."""
    if not error < limit:
        raise ArithmeticError(
            f"{op} at {sizes} {name_of(dtype)} must stay within {limit:.0e} of float64, got {error:.2e}. "
            "Nothing is timed until that is mended."
        )
    return number_row(op, "kernel", "correctness", error, "relative error", sizes, dtype, f"limit {limit:.0e}")
