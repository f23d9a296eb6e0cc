"""Look-ups in a TT-matrix beside a contraction for each id and beside a dense table: right first, then timed.

Ids follow Zipf's law with exponent 1.1 and stand at random places of the table: synthetic, in the shape of click
logs. Peaks are those of what torch allocates, as its profiler reports it, within one forward and backward pass (and
update, where the row says so): parameters and optimizer state are there before and are not in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.contraction import lookup_rows, naive_lookup_rows
from comera_lab.experiments import bench
from comera_lab.experiments.recorder import BenchRow
from comera_lab.layers import TTEmbedding
from comera_lab.models.dlrm import DLRM, DLRMConfig, Kind
from comera_lab.shapes import TTMShape

ZIPF = 1.1


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """`ids` drawn for a table (rows, columns) kept at `rank`; modes None splits into three."""

    ids: int
    rows: int
    columns: int
    rank: int
    row_modes: tuple[int, ...] | None = None
    column_modes: tuple[int, ...] | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        return {"ids": self.ids, "rows": self.rows, "columns": self.columns, "rank": self.rank}

    def layer(self, generator: torch.Generator) -> TTEmbedding:
        return TTEmbedding(
            self.rows, self.columns, self.rank, row_modes=self.row_modes, column_modes=self.column_modes,
            generator=generator,
        )  # fmt: skip


# The word table of the released MNLI model, and a table of recommendation size.
WORDS = TableCase(ids=4096, rows=30_522, columns=768, rank=32, row_modes=(16, 20, 10, 10), column_modes=(4, 4, 8, 6))
CLICKS = TableCase(ids=40_000, rows=10**6, columns=64, rank=16)
# Tables of the size that the crossed fields of the flights have.
STEP = DLRMConfig(table_rows=(19_267, 29_764, 11_679, 209_117), numbers=2)
STEP_ROWS = 2048


def correctness_rows(device: torch.device) -> Iterator[BenchRow]:
    """Worst error of each case. Raises ArithmeticError where a look-up is wrong."""
    for case in (WORDS, CLICKS):
        yield _correctness(case, device)


def embedding_rows(device: torch.device, repeats: int = 20) -> Iterator[BenchRow]:
    """Times and peaks of the look-ups, and a step of a whole DLRM."""
    yield from _against_per_id(WORDS, device, repeats)
    yield from _against_dense(CLICKS, device, repeats)
    yield from _dlrm_step(device, repeats)


def zipf_ids(rows: int, count: int, generator: torch.Generator, exponent: float = ZIPF) -> Tensor:
    """(count,) ids in [0, rows): frequency falls as 1 / place^exponent, places spread over the table at random."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * float(weights[-1])
    places = torch.searchsorted(weights, draws).clamp_max(rows - 1)
    return torch.randperm(rows, generator=generator)[places]


def per_id_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """What a look-up costs without sharing: for every id its slice of each core, multiplied from left to right."""
    state = torch.ones(len(ids), 1, 1, dtype=cores[0].dtype, device=ids.device)
    for k, core in enumerate(cores):
        digit = ids // math.prod(shape.row_modes[k + 1 :]) % shape.row_modes[k]
        piece = core.transpose(0, 1).index_select(0, digit).reshape(len(ids), core.shape[0], -1)
        state = torch.bmm(state, piece).reshape(len(ids), -1, core.shape[3])
    return state.flatten(1)[:, : shape.columns]


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that `call` had allocated through torch's CPU allocator at one time."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _correctness(case: TableCase, device: torch.device) -> BenchRow:
    """Worst relative error of rows and core gradients against float64, on 256 ids; the twin is the dense table."""
    generator = torch.Generator().manual_seed(0)
    layer = case.layer(generator).to(device)
    ids = zipf_ids(case.rows, 256, generator).to(device)
    results: list[list[Tensor]] = []
    for function, dtype in ((lookup_rows, torch.float32), (_dense_rows, torch.float64)):
        cores = [core.detach().to(dtype).requires_grad_() for core in layer.cores]
        out = function(ids, cores, layer.shape)
        pull = torch.sin(torch.arange(out.numel(), device=device)).to(dtype).view_as(out)
        results.append([out.detach(), *torch.autograd.grad(out, cores, pull)])
    worst = max(float((got.double() - want).norm() / want.norm()) for got, want in zip(*results, strict=True))
    limit = bench.ERROR_LIMIT[torch.float32]
    if not worst < limit:
        raise ArithmeticError(
            f"tt_lookup at {case.sizes} must stay within {limit:.0e} of float64, got {worst:.2e}. "
            "Nothing is timed until that is mended."
        )
    return _row("tt_lookup", "tt", "correctness", worst, "relative error", case.sizes)


def _dense_rows(ids: Tensor, cores: Sequence[Tensor], shape: TTMShape) -> Tensor:
    """The twin: the dense table where it is small, else each id by itself."""
    return (naive_lookup_rows if shape.dense_params < 10**8 and shape.rows < 10**5 else per_id_rows)(ids, cores, shape)


def _against_per_id(case: TableCase, device: torch.device, repeats: int) -> Iterator[BenchRow]:
    generator = torch.Generator().manual_seed(0)
    layer = case.layer(generator).to(device)
    ids = zipf_ids(case.rows, case.ids, generator).to(device)
    pull = torch.randn(case.ids, case.columns, generator=generator).to(device)
    cores = list(layer.cores)

    def call(function: Callable[[Tensor, Sequence[Tensor], TTMShape], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(ids, cores, layer.shape), cores, pull)

    calls = {"per id": call(per_id_rows), "tt": call(lookup_rows)}
    note = f"Zipf({ZIPF}) ids, {len(torch.unique(ids)):,} different; synthetic"
    yield from _timed("tt_lookup", calls, "forward+backward", case.sizes, device, repeats, note)
    yield from _peaks("tt_lookup", calls, "forward+backward", case.sizes, note)


def _against_dense(case: TableCase, device: torch.device, repeats: int) -> Iterator[BenchRow]:
    """A whole step of one table: look-up, backward and AdamW, which touches every row of a dense table."""
    generator = torch.Generator().manual_seed(0)
    ids = zipf_ids(case.rows, case.ids, generator).to(device)
    pull = torch.randn(case.ids, case.columns, generator=generator).to(device)

    def step_of(table: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(table.parameters(), lr=1e-6, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(table(ids), pull)
            optimizer.step()

        return step

    dense = nn.Embedding(case.rows, case.columns, device=device)
    calls = {"dense": step_of(dense), "tt": step_of(case.layer(generator).to(device))}
    note = f"Zipf({ZIPF}) ids, {len(torch.unique(ids)):,} different; synthetic; nn.Embedding(sparse=False)"
    yield from _timed("tt_lookup", calls, "step with AdamW", case.sizes, device, repeats, note)
    yield from _peaks("tt_lookup", calls, "step with AdamW", case.sizes, note)


def _dlrm_step(device: torch.device, repeats: int) -> Iterator[BenchRow]:
    """A training step of a whole DLRM, optimizer counted."""
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randint(0, 1440, (STEP_ROWS,), generator=generator) for _ in range(STEP.numbers)]
    columns += [zipf_ids(rows, STEP_ROWS, generator) for rows in STEP.table_rows]
    x = torch.stack(columns, dim=1).int().to(device)
    y = torch.randint(0, 2, (STEP_ROWS,), generator=generator).to(device)

    def step_of(kind: Kind) -> Callable[[], object]:
        model = DLRM(DLRMConfig(table_rows=STEP.table_rows, numbers=STEP.numbers, kind=kind)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

        return step

    sizes = {"batch": STEP_ROWS, "table_rows": list(STEP.table_rows), "columns": STEP.dim, "rank": STEP.rank}
    calls = {"dense": step_of("dense"), "tt": step_of("tt")}
    yield from _timed("dlrm_step", calls, "training step", sizes, device, repeats, f"Zipf({ZIPF}) ids; synthetic")


def _timed(
    op: str,
    calls: dict[str, Callable[[], object]],
    mode: str,
    sizes: dict[str, Any],
    device: torch.device,
    repeats: int,
    note: str,
) -> Iterator[BenchRow]:
    """Milliseconds of each provider, then how many times faster "tt" is than the other."""
    times = bench._interleaved(calls, repeats, device)
    other = next(iter(calls))
    ratios = [slow / fast for slow, fast in zip(times[other], times["tt"], strict=True)]
    for provider, samples, unit in (
        *((name, times[name], "ms") for name in calls),
        (f"tt over {other}", ratios, "x faster"),
    ):
        tenths = quantiles(samples, n=10)
        yield _row(
            op, provider, mode, tenths[4], unit, sizes, note, p20=tenths[1], p80=tenths[7], repeats=len(samples)
        )  # fmt: skip


def _peaks(
    op: str, calls: dict[str, Callable[[], object]], mode: str, sizes: dict[str, Any], note: str
) -> Iterator[BenchRow]:
    peaks = {provider: peak_bytes(call) for provider, call in calls.items()}
    other = next(iter(calls))
    for provider, peak in peaks.items():
        yield _row(op, provider, f"peak of {mode}", peak / 2**20, "MiB", sizes, note)
    yield _row(op, f"tt over {other}", f"peak of {mode}", peaks[other] / peaks["tt"], "x less", sizes, note)


def _row(
    op: str, provider: str, mode: str, value: float, unit: str, sizes: dict[str, Any], note: str = "", **spread: Any
) -> BenchRow:
    return BenchRow(
        op=op, provider=provider, mode=mode, value=value, unit=unit, sizes=sizes, dtype="float32", note=note, **spread
    )
