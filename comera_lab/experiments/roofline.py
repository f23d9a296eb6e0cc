"""The least time that a layer can take on a device: its bytes over the bandwidth, or its FLOPs over the rate.

S. Williams and others, "Roofline", Communications of the ACM 52 (2009). All of it is arithmetic: nothing here was run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from comera_lab.experiments.provenance import date, device_name
from comera_lab.shapes import ShapeError

ITEM_BYTES = {"bf16": 2, "fp32": 4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What a CPU is measured with: far beyond any cache, and 130 MB in all.
COPY_ELEMENTS, COPY_SAMPLES = 1 << 24, 7
PRODUCT_EDGE, PRODUCT_SAMPLES, PRODUCT_SETTLE = {"fp32": 768, "bf16": 384}, 5, 2


@dataclass(frozen=True)
class Ceilings:
    """The most that `device` can do in a second: bytes read and written, and FLOPs by dtype; `source` says who says."""

    device: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte from which on arithmetic is the limit and not memory."""
        return self.flops_per_s[dtype] / self.bytes_per_s


# As their maker prints them, without sparsity: no program reaches them. fp32 is that of plain (not tf32) products.
PRINTED = (
    Ceilings("NVIDIA H200 SXM", 4.8e12, {"bf16": 989e12, "fp32": 67e12}, "NVIDIA H200 data sheet"),
    Ceilings("NVIDIA A100 SXM 80 GB", 2.039e12, {"bf16": 312e12, "fp32": 19.5e12}, "NVIDIA A100 data sheet"),
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer, forward and backward: x (rows, in_features) -> (rows, out_features), numbers of `dtype`."""

    rows: int
    in_features: int
    out_features: int
    rank: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        sizes = (self.rows, self.in_features, self.out_features, self.rank)
        if min(sizes) < 1:
            raise ShapeError(f"rows, features and rank must be at least 1, got {sizes}. Give positive whole numbers.")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}. Choose one.")


@dataclass(frozen=True)
class Work:
    """What one way to compute the layer must move and multiply."""

    name: str
    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    def floor_ms(self, ceilings: Ceilings, dtype: str) -> float:
        """Milliseconds below which no program can be: the larger of the two times."""
        return 1e3 * max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s[dtype])

    def bound(self, ceilings: Ceilings, dtype: str) -> str:
        """ "memory" or "arithmetic": what the floor is made of."""
        return "memory" if self.intensity < ceilings.ridge(dtype) else "arithmetic"


def works(problem: Problem) -> tuple[Work, Work, Work]:
    """Dense, half-chains one product at a time, half-chains fused; forward and backward, every operand moved once.

    Dense: y = x W', x' = g W, W' = g' x, each of which reads or writes x-, y- and W-sized matrices. Half-chains: x A,
    (x A) B, g B', (g B') A' and the two sums for A' and B'; each writes its result, and the next reads it again.
    Fused (kernels/tt_linear.py): x A and g B' are written, since backward needs them, but not read again in between.
    """
    rows, wide, rank = problem.rows, problem.in_features + problem.out_features, problem.rank
    size, weights = ITEM_BYTES[problem.dtype], problem.in_features * problem.out_features
    flops = 6 * rows * rank * wide
    ends = 3 * (rows + rank) * wide  # x- and y-sized matrices and the halves, three times each
    return (
        Work("dense", size * 3 * (rows * wide + weights), 6 * rows * weights),
        Work("half-chains", size * (ends + 6 * rows * rank), flops),
        Work("fused", size * (ends + 4 * rows * rank), flops),
    )


def measured_ceilings() -> Iterator[tuple[str, Ceilings | None]]:
    """Measure this machine's CPU, a piece at a time: (what was done, None), and at the end (its name, Ceilings).

    Medians; bandwidth of a copy, bytes read and written, and the rate of a square product, with torch's threads.
    """
    source = torch.ones(COPY_ELEMENTS)
    target = torch.empty_like(source)
    copies = []
    for number in range(1 + COPY_SAMPLES):
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
        yield f"copy {number} of {COPY_SAMPLES}", None
    rates = {}
    for name, dtype in DTYPES.items():
        edge = PRODUCT_EDGE[name]
        left, right = (torch.ones(edge, edge, dtype=dtype) for _ in "ab")
        times = []
        for number in range(PRODUCT_SETTLE + PRODUCT_SAMPLES):
            began = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - began)
            yield f"{name} product {number} of {PRODUCT_SAMPLES}", None
        rates[name] = 2.0 * edge**3 / median(times[PRODUCT_SETTLE:])
    threads = torch.get_num_threads()
    words = f"measured here, {date()[:10]}, {threads} thread{'s' if threads > 1 else ''}, medians"
    yield "done", Ceilings(device_name("cpu"), 2.0 * source.nbytes / median(copies[1:]), rates, words)
