"""The GPU suite: right against float64 first, then times beside torch's own, in order of worth, within seven minutes.

`comera-lab bench --suite gpu` on a machine with an NVIDIA GPU; needs torch, triton and numpy alone. A run that is cut
leaves the rows made so far, the most telling ones first. A wrong result stops the suite before anything is timed; a
section that fails in another way is named, the others still run, and the suite ends with an error.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.contraction import lookup_rows, naive_apply_cores
from comera_lab.experiments import bench_gpu_training as training
from comera_lab.experiments.gpu_timing import (
    Bench,
    Call,
    CudaWatch,
    ceilings,
    number_row,
    ratio_row,
    refuse_wrong,
    relative_error,
)
from comera_lab.experiments.graphs import CudaCapture
from comera_lab.experiments.rows import BenchRow
from comera_lab.layers import TTEmbedding, TTLinear, forward_together

SECONDS = 390.0
# Largest relative error against float64 on the same rounded inputs; a core scaled by 1.01 gives 1e-2 and more.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SIZES = ((4096, 4096), (768, 3072), (4096, 11008), (768, 768))
RANKS = (64, 32, 16, 128)
ROWS = (16_384, 2048, 128, 32_768)
HEADLINE = (16_384, 4096, 4096, 64)  # rows, in, out, rank
Section = Callable[[Bench], Iterator[BenchRow]]


def gpu_rows(device: torch.device, bench: Bench | None = None) -> Iterator[BenchRow]:
    """All rows of the suite on `device`. ArithmeticError for a wrong result, RuntimeError if a section failed."""
    if bench is None:
        deadline = time.monotonic() + SECONDS
        bench = Bench(device=device, watch=CudaWatch(), deadline=deadline, capture=CudaCapture)
    yield from correctness(bench)
    yield from ceilings(bench)
    failed = []
    for name, section in SECTIONS.items():
        if bench.late:
            yield number_row(name, "suite", "not run", SECONDS, "s", {}, torch.float32, "the time for the suite was up")
            continue
        try:
            yield from section(bench)
        except Exception as error:  # device time is dear: one broken section must not cost the rows of the others
            failed.append(f"{name}: {type(error).__name__}: {error}")
            yield number_row(name, "suite", "failed", 0.0, "rows", {}, torch.float32, failed[-1][:500])
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"{len(failed)} sections failed: {'; '.join(failed)}")


def correctness(bench: Bench) -> Iterator[BenchRow]:
    """Every operation that will be timed, at fewer rows, against float64."""
    for in_features, out_features in SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            for rank in (64, 128) if dtype == torch.bfloat16 else (64,):
                yield _linear_is_right(bench, (bench.size(1000), in_features, out_features, rank), dtype)
    yield _together_is_right(bench, torch.bfloat16)
    yield _lookup_is_right(bench)
    yield from training.correctness(bench)


def headline_section(bench: Bench) -> Iterator[BenchRow]:
    """The fused layer beside nn.Linear and beside its own torch code, with memory, eager and as a graph."""
    sizes = _shrunk(bench, HEADLINE)
    for backward in (False, True):
        yield from _linear_rows(bench, sizes, torch.bfloat16, ("dense", "tt", "tt torch"), backward, graph=True)
    yield from _linear_rows(bench, sizes, torch.float32, ("dense", "tt"), True)


def grid_section(bench: Bench) -> Iterator[BenchRow]:
    """Forward + backward over widths, rows and ranks, bf16."""
    for in_features, out_features in SIZES:
        for rows in ROWS:
            dense: BenchRow | None = None
            for rank in RANKS:
                if bench.late:
                    return
                sizes = _shrunk(bench, (rows, in_features, out_features, rank))
                dense = dense or next(_linear_rows(bench, sizes, torch.bfloat16, ("dense",), True))
                if rank == RANKS[0]:
                    yield dense
                fast = next(_linear_rows(bench, sizes, torch.bfloat16, ("tt",), True))
                yield from (fast, ratio_row(dense, fast))


def compiled_section(bench: Bench) -> Iterator[BenchRow]:
    """torch.compile of nn.Linear and of the layer's torch code, at the headline sizes."""
    sizes = _shrunk(bench, HEADLINE)
    for provider in ("dense compiled", "tt compiled"):
        if not bench.late:
            yield from _linear_rows(bench, sizes, torch.bfloat16, (provider,), True)


def lookup_section(bench: Bench) -> Iterator[BenchRow]:
    """4,096 Zipf ids in a table of 30,522 x 768 at rank 32, forward + backward, beside nn.Embedding."""
    vocabulary, width, ids = _lookup_sizes(bench)
    sizes = {"vocabulary": vocabulary, "width": width, "ids": ids.numel(), "rank": 32}
    rows: dict[str, BenchRow] = {}
    for provider in ("dense", "tt", "tt torch"):
        table = _table(bench, provider, vocabulary, width)
        weights = bench.randn(ids.numel(), width)
        call = _gradients(table, ids, list(table.parameters()), weights)
        out_bytes = 4.0 * ids.numel() * width
        own = sum(parameter.nbytes for parameter in table.parameters())
        # rows written, their gradients read, the table's gradient written
        rows[provider] = bench.time(
            "tt_lookup", provider, "forward+backward", [call], sizes, torch.float32,
            moved=2 * out_bytes + 2 * own, flops=0.0,
        )  # fmt: skip
        yield rows[provider]
        yield from bench.peak("tt_lookup", provider, "forward+backward", call, sizes, torch.float32)
    yield ratio_row(rows["dense"], rows["tt"])
    yield ratio_row(rows["tt torch"], rows["tt"])


SECTIONS: dict[str, Section] = {
    "tt_linear": headline_section,
    "encoder_step": training.encoder_section,
    "optimizer_step": training.optimizer_section,
    "basis_refresh": training.refresh_section,
    "tt_lookup": lookup_section,
    "llama_step": training.llama_section,
    "tt_linear grid": grid_section,
    "blockwise_quant": training.codes_section,
    "tt_linear compiled": compiled_section,
}


def _shrunk(bench: Bench, sizes: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    rows, in_features, out_features, rank = sizes
    return bench.size(rows, 4), bench.size(in_features), bench.size(out_features), min(rank, bench.size(rank, 4))


def _module(
    bench: Bench, provider: str, in_features: int, out_features: int, rank: int, dtype: torch.dtype
) -> nn.Module:
    if provider.startswith("dense"):
        module: nn.Module = nn.Linear(in_features, out_features, device=bench.device, dtype=dtype)
    else:
        layer = TTLinear(in_features, out_features, rank, generator=bench.generator)
        layer.backend = "torch" if provider in ("tt torch", "tt compiled") else None
        module = layer.to(bench.device, dtype)
    if provider.endswith("compiled"):
        module.compile()
    return module


def _gradients(module: nn.Module, x: Tensor, inputs: list[Tensor], weights: Tensor) -> Call:
    return lambda: torch.autograd.grad(module(x), inputs, weights)


def _linear_rows(
    bench: Bench, sizes: tuple[int, int, int, int], dtype: torch.dtype, providers: tuple[str, ...], backward: bool,
    graph: bool = False,
) -> Iterator[BenchRow]:  # fmt: skip
    """One row a provider, memory and ratios where there are several."""
    rows, in_features, out_features, rank = sizes
    named = {"rows": rows, "in_features": in_features, "out_features": out_features, "rank": rank}
    mode, passes = ("forward+backward", 3) if backward else ("forward", 1)
    moved = float(rows * (in_features + out_features) * dtype.itemsize)
    done: dict[str, BenchRow] = {}
    for provider in providers:
        module = _module(bench, provider, in_features, out_features, rank, dtype)
        own = in_features * out_features if provider.startswith("dense") else rank * (in_features + out_features)
        least, flops = passes * (moved + own * dtype.itemsize), passes * 2.0 * rows * own
        calls = []
        for _ in range(bench.copies((1 + backward) * moved)):
            x = bench.randn(rows, in_features, dtype=dtype).requires_grad_()
            weights = bench.randn(rows, out_features, dtype=dtype)
            forward = torch.no_grad()(lambda x=x, module=module: module(x))
            calls.append(_gradients(module, x, [x, *module.parameters()], weights) if backward else forward)
        done[provider] = bench.time("tt_linear", provider, mode, calls, named, dtype, moved=least, flops=flops)
        yield done[provider]
        if len(providers) > 1:
            yield from bench.peak("tt_linear", provider, mode, calls[0], named, dtype)
        if graph and bench.capture is not None and provider != "tt torch":
            capture = bench.capture()
            capture.settle(partial(_each, calls))
            replays = [capture.record(partial(_each, [call])) for call in calls]
            done[f"{provider} graph"] = bench.time(
                "tt_linear", f"{provider} graph", mode, replays, named, dtype, moved=least, flops=flops
            )
            yield done[f"{provider} graph"]
    for slow, fast in (("dense", "tt"), ("dense graph", "tt graph"), ("tt torch", "tt")):
        if slow in done and fast in done:
            yield ratio_row(done[slow], done[fast])


def _each(calls: list[Call]) -> None:
    for call in calls:
        call()


def _linear_is_right(bench: Bench, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> BenchRow:
    rows, in_features, out_features, rank = sizes
    in_features, out_features = bench.size(in_features), bench.size(out_features)
    layer = _module(bench, "tt", in_features, out_features, min(rank, bench.size(rank, 4)), dtype)
    assert isinstance(layer, TTLinear)
    x = bench.randn(rows, in_features, dtype=dtype).requires_grad_()
    weights = bench.randn(rows, out_features, dtype=dtype)
    inputs = [x, layer.bias, *layer.cores]
    out = layer(x)
    got = [out, *torch.autograd.grad(out, inputs, weights)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = naive_apply_cores(exact[0], exact[2:], layer.shape, exact[1])
    want = [truth, *torch.autograd.grad(truth, exact, weights.double())]
    error = max(relative_error(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    named = {"rows": rows, "in_features": in_features, "out_features": out_features, "rank": rank}
    return refuse_wrong("tt_linear", error, LIMITS[dtype], named, dtype)


def _together_is_right(bench: Bench, dtype: torch.dtype) -> BenchRow:
    """q, k and v of the encoder's width and rank, as its step will make them."""
    rows, width, rank = bench.size(1000), bench.size(768), min(30, bench.size(30, 4))
    layers = [_module(bench, "tt", width, width, rank, dtype) for _ in range(3)]
    x = bench.randn(rows, width, dtype=dtype).requires_grad_()
    weights = [bench.randn(rows, width, dtype=dtype) for _ in layers]
    outs = forward_together(x, [layer for layer in layers if isinstance(layer, TTLinear)])
    inputs = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    got = [*outs, *torch.autograd.grad(outs, inputs, weights)]
    wide = [copy.deepcopy(layer).double() for layer in layers]
    exact_x = x.detach().double().requires_grad_()
    truth = [
        naive_apply_cores(exact_x, list(layer.cores), layer.shape, layer.bias)
        for layer in wide
        if isinstance(layer, TTLinear)
    ]
    exact = [exact_x, *(parameter for layer in wide for parameter in layer.parameters())]
    want = [*truth, *torch.autograd.grad(truth, exact, [weight.double() for weight in weights])]
    error = max(relative_error(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    named = {"rows": rows, "in_features": width, "out_features": width, "rank": rank, "together": len(layers)}
    return refuse_wrong("tt_linear", error, LIMITS[dtype], named, dtype)


def _lookup_sizes(bench: Bench) -> tuple[int, int, Tensor]:
    vocabulary, width = bench.size(30_522, 200), bench.size(768)
    odds = 1.0 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    ids = torch.multinomial(odds, bench.size(4096, 64), replacement=True, generator=bench.generator)
    return vocabulary, width, ids.to(bench.device)


def _table(bench: Bench, provider: str, vocabulary: int, width: int) -> nn.Module:
    if provider == "dense":
        return nn.Embedding(vocabulary, width, device=bench.device)
    table = TTEmbedding(vocabulary, width, 32, generator=bench.generator)
    table.backend = "torch" if provider == "tt torch" else None
    return table.to(bench.device)


def _lookup_is_right(bench: Bench) -> BenchRow:
    vocabulary, width, ids = _lookup_sizes(bench)
    table = _table(bench, "tt", vocabulary, width)
    assert isinstance(table, TTEmbedding)
    weights = bench.randn(ids.numel(), width)
    cores = list(table.cores)
    got = [table(ids), *torch.autograd.grad(table(ids), cores, weights)]
    exact = [core.detach().double().requires_grad_() for core in cores]
    truth = lookup_rows(ids, exact, table.shape, "torch")
    want = [truth, *torch.autograd.grad(truth, exact, weights.double())]
    error = max(relative_error(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    sizes: dict[str, Any] = {"vocabulary": vocabulary, "width": width, "ids": ids.numel(), "rank": 32}
    return refuse_wrong("tt_lookup", error, LIMITS[torch.float32], sizes, torch.float32)
