"""Speed and memory of the tensor-train layer beside torch's own, as rows: right first, then timed.

`comera-lab bench --suite cpu`; the GPU suite, with its own clocks, is bench_gpu.py. Providers of one case
are timed in short turns, so that a busy moment of the machine meets all of them; a row gives the median with p20 and
p80, and ratios are medians of the ratios of neighbouring turns. A provider that differs from the float64 reference is
refused before anything is timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera_lab.contraction import apply_cores, half_chain_cuts, naive_apply_cores, plan
from comera_lab.experiments.provenance import date, device_name, recording_name
from comera_lab.experiments.recorder import BenchRow, Recorder
from comera_lab.layers import TTLinear, tt_layers
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.objectives import EarlyStage
from comera_lab.runtime import allocator_status, cores_allowed, tune_cpu_allocator

# Largest relative error against float64 on the same rounded inputs, forward and gradients (a wrong core: 1e-2).
ERROR_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and batch. `rank` is given to every bond and clipped to what the modes carry."""

    rows: int
    in_features: int
    out_features: int
    rank: int
    dtype: torch.dtype = torch.float32

    @property
    def sizes(self) -> dict[str, Any]:
        names = ("rows", "in_features", "out_features", "rank")
        return {name: value for name, value in asdict(self).items() if name in names}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


HEADLINE = Case(rows=4096, in_features=768, out_features=3072, rank=30)
FEW_ROWS = [Case(rows=rows, in_features=768, out_features=3072, rank=30) for rows in (1, 8)]
TINY = Case(rows=64, in_features=64, out_features=64, rank=8)
WIDTHS = [Case(rows=256, in_features=width, out_features=width, rank=8) for width in (64, 128, 256, 512, 1024, 2048)]
# Calls of one turn: the first fill caches and heap, the others count.
SETTLE, TIMED = 10, 10
# Dropout draws as many random numbers in both twins and would hide what is compared.
ENCODER = replace(EncoderConfig.released(), dropout=0.0)


def run_suite(suite: str, out: str | Path | None = None) -> list[BenchRow]:
    """Run "cpu" or "gpu", print one line a row, append the rows to `out` (JSON lines; on a GPU always: gpu_*.jsonl).

    Raises ValueError for another suite or without a CUDA device, ArithmeticError where a provider is wrong.
    """
    if suite not in ("cpu", "gpu"):
        raise ValueError(f"suite must be 'cpu' or 'gpu', got {suite!r}. Use 'cpu' on a machine without a GPU.")
    if suite == "gpu" and not torch.cuda.is_available():
        raise ValueError("suite 'gpu' needs a CUDA device, got none. Use --suite cpu here.")
    device = torch.device("cuda" if suite == "gpu" else "cpu")
    if suite == "cpu":
        tune_cpu_allocator()
        torch.set_num_threads(min(2, cores_allowed()))
    if suite == "gpu" and out is None:
        out = recording_name(device_name(device), date())
    config = {"suite": suite, "allocator": allocator_status().reason if suite == "cpu" else "cuda caching"}
    rows = []
    with Recorder(out, config, device=device, seed=0) as recorder:
        info = recorder.info
        print(f"{info.device}, torch {info.torch}, {info.threads} threads, allocator: {config['allocator']}")
        for row in _cpu_rows(device) if suite == "cpu" else _gpu_rows(device):
            recorder.add(row)
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def record_gpu() -> Iterator[Recorder]:
    """The suite on this machine's GPU into its file in the working directory; the recorder after every row.

    Raises ValueError without a CUDA device, and as `bench_gpu.gpu_rows`.
    """
    if not torch.cuda.is_available():
        raise ValueError("suite 'gpu' needs a CUDA device, got none. Run it on a machine that has one.")
    device = torch.device("cuda")
    with Recorder(recording_name(device_name(device), date()), {"suite": "gpu"}, device=device, seed=0) as recorder:
        for row in _gpu_rows(device):
            recorder.add(row)
            yield recorder


def _cpu_rows(device: torch.device) -> Iterator[BenchRow]:
    from comera_lab.experiments import bench_embeddings, bench_optimizers  # which use the clocks below

    for case in (HEADLINE, *FEW_ROWS, TINY, *WIDTHS):
        yield from _correctness(case, device)
    yield from bench_embeddings.correctness_rows(device)
    yield from bench_optimizers.correctness_rows(device)
    yield from _against_dense(HEADLINE, device, repeats=20)
    yield _extra_memory(HEADLINE, device)
    for case in FEW_ROWS:
        yield from _orders(case, device, repeats=200)
    yield from _against_dense(TINY, device, repeats=200)
    for case in WIDTHS:
        yield from _against_dense(case, device, repeats=30, op="tt_linear_width")
    yield from _encoder_rows(
        ENCODER, Case(rows=8 * 128, in_features=768, out_features=3072, rank=30), device, repeats=5
    )
    yield from bench_embeddings.embedding_rows(device)
    yield from bench_optimizers.optimizer_rows(device)


def _gpu_rows(device: torch.device) -> Iterator[BenchRow]:
    from comera_lab.experiments.bench_gpu import gpu_rows

    return gpu_rows(device)


def _pair(case: Case, device: torch.device) -> tuple[TTLinear, nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = TTLinear(case.in_features, case.out_features, case.rank, generator=generator)
    layer = layer.to(device, case.dtype)
    linear = nn.Linear(case.in_features, case.out_features, device=device, dtype=case.dtype)
    x = torch.randn(case.rows, case.in_features, generator=generator).to(device, case.dtype).requires_grad_()
    weights = torch.randn(case.rows, case.out_features, generator=generator).to(device, case.dtype)
    return layer, linear, x, weights


def _correctness(case: Case, device: torch.device) -> Iterator[BenchRow]:
    """Relative error of forward and each gradient against the float64 naive twin; the worst is the row."""
    layer, _, x, weights = _pair(case, device)
    inputs = [x, layer.bias, *layer.cores]
    out = layer(x)
    got = [out, *torch.autograd.grad(out, inputs, weights)]
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact_x, bias, *cores = exact_inputs
    exact = naive_apply_cores(exact_x, cores, layer.shape, bias)
    want = [exact, *torch.autograd.grad(exact, exact_inputs, weights.double())]
    worst = max(
        float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())
        for ours, theirs in zip(got, want, strict=True)
    )
    if not worst < ERROR_LIMIT[case.dtype]:
        raise ArithmeticError(
            f"tt_linear at {case.sizes} {case.dtype_name} must stay within {ERROR_LIMIT[case.dtype]:.0e} of float64, "
            f"got {worst:.2e}. Nothing is timed until that is mended."
        )
    yield _row("tt_linear", "tt", "correctness", worst, "relative error", case)


def _against_dense(case: Case, device: torch.device, repeats: int, op: str = "tt_linear") -> Iterator[BenchRow]:
    layer, linear, x, weights = _pair(case, device)
    for mode, backward in (("forward", False), ("forward+backward", True)):
        calls = {
            provider: _call(module, x, weights, backward) for provider, module in (("dense", linear), ("tt", layer))
        }
        times = _interleaved(calls, repeats, device)
        for provider, samples in times.items():
            yield _timing(op, provider, mode, samples, "ms", case)
        speedups = [dense / ours for dense, ours in zip(times["dense"], times["tt"], strict=True)]
        floor = 3 * 2 * case.rows * layer.shape.dense_params / (3 * plan(layer.shape, case.rows).flops)
        note = f"nn.Linear / TTLinear; ratio of FLOPs {floor:.1f}"
        yield _timing(op, "tt over dense", mode, speedups, "x faster", case, note)
    if case is HEADLINE:
        cold = _interleaved(calls, repeats, device, settle=0, timed=1)
        speedups = [dense / ours for dense, ours in zip(cold["dense"], cold["tt"], strict=True)]
        note = "each call right after one of the other layer"
        yield _timing(op, "tt over dense", "forward+backward, cold", speedups, "x faster", case, note)


def _encoder_rows(config: EncoderConfig, case: Case, device: torch.device, repeats: int) -> Iterator[BenchRow]:
    """A training step (forward, backward, fused AdamW) of the pair classifier: dense, tensorised, with early stage."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, config.vocabulary, (8, 128), generator=generator).to(device)
    labels = torch.randint(0, config.classes, (8,), generator=generator).to(device)

    def step_of(kind: Literal["dense", "tt"], gates: bool) -> Callable[[], object]:
        model = PairEncoder(replace(config, kind=kind), generator=generator).to(device)
        for layer in tt_layers(model).values() if gates else ():
            layer.add_gates()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        objective = EarlyStage(1.0)

        def step() -> None:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), labels)
            total = objective(loss, model) if gates else loss
            torch.autograd.backward(total)
            optimizer.step()

        return step

    calls = {"dense": step_of("dense", False), "tt": step_of("tt", False), "tt + early stage": step_of("tt", True)}
    times = _interleaved(calls, repeats, device)
    for provider, samples in times.items():
        yield _timing("encoder_step", provider, "training step", samples, "ms", case)
    for name, over in (("tt", "dense"), ("tt", "tt + early stage")):
        ratios = [slow / fast for slow, fast in zip(times[over], times[name], strict=True)]
        unit = "x faster" if over == "dense" else "x time"
        provider = "tt over dense" if over == "dense" else "early stage over none"
        yield _timing("encoder_step", provider, "training step", ratios, unit, case, f"{over} / {name}, batch 8 x 128")


def _call(module: nn.Module, x: Tensor, weights: Tensor, backward: bool) -> Callable[[], object]:
    if not backward:
        return torch.no_grad()(lambda: module(x))
    inputs = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x), inputs, weights)


def _orders(case: Case, device: torch.device, repeats: int) -> Iterator[BenchRow]:
    """The planned order against the two fixed ones, forward + backward, at few rows."""
    layer, _, x, weights = _pair(case, device)
    inputs = [x, *layer.parameters()]
    cores, shape = list(layer.cores), layer.shape

    def call(cuts: tuple[int, ...] | None) -> Callable[[], object]:
        return lambda: torch.autograd.grad(apply_cores(x, cores, shape, layer.bias, cuts), inputs, weights)

    fixed = {"half-chains": half_chain_cuts(shape), "sequential": tuple(range(len(shape.modes) + 1))}
    calls = {"planned": call(None), **{name: call(cuts) for name, cuts in fixed.items()}}
    times = _interleaved(calls, repeats, device)
    for provider, samples in times.items():
        yield _timing("tt_order", provider, "forward+backward", samples, "ms", case)
    better = min((times[name] for name in fixed), key=median)
    ratios = [ours / theirs for ours, theirs in zip(times["planned"], better, strict=True)]
    note = f"planned: {plan(shape, case.rows).name}"
    yield _timing("tt_order", "planned over better", "forward+backward", ratios, "x time", case, note)


def _extra_memory(case: Case, device: torch.device) -> BenchRow:
    """Bytes kept for backward by one call, parameters apart, over x, x A and the two half-chains."""
    layer, _, x, _ = _pair(case, device)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept_alive = layer(x)
    rank = layer.shape.middle_rank
    parts = case.rows * (case.in_features + rank) + rank * (case.in_features + case.out_features)
    expected = parts * x.element_size()
    note = f"x, x A and two half-chains are {expected / 2**20:.2f} MiB; y is {kept_alive.nbytes / 2**20:.2f} MiB more"
    return _row("tt_linear", "tt", "kept for backward", sum(saved.values()) / 2**20, "MiB", case, note)


def _interleaved(
    calls: dict[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    settle: int | None = None,
    timed: int | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each call. In its turn a provider makes `settle` calls to fill caches and heap, then timed ones.

    Ten, because a layer that is bound by memory needs about eight calls to find its pages near again after another
    one has had the machine: 25, 15, 14.6, .. 13.2 ms at the headline size.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    settle, timed = SETTLE if settle is None else settle, TIMED if timed is None else timed
    for _ in range(max(1, repeats // timed)):
        for name, call in calls.items():
            for number in range(settle + timed):
                _synchronise(device)
                start = time.perf_counter()
                call()
                _synchronise(device)
                if number >= settle:
                    times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(op: str, provider: str, mode: str, samples: list[float], unit: str, case: Case, note: str = "") -> BenchRow:
    tenths = quantiles(samples, n=10)
    return _row(op, provider, mode, tenths[4], unit, case, note, p20=tenths[1], p80=tenths[7], repeats=len(samples))


def _row(
    op: str, provider: str, mode: str, value: float, unit: str, case: Case, note: str = "", **spread: Any
) -> BenchRow:
    return BenchRow(
        op=op,
        provider=provider,
        mode=mode,
        value=value,
        unit=unit,
        sizes=case.sizes,
        dtype=case.dtype_name,
        note=note,
        **spread,
    )


def _line(row: BenchRow) -> str:
    sizes = " ".join(str(value) for value in row.sizes.values())
    spread = "" if row.p20 is None else f"  [{row.p20:.3g} .. {row.p80:.3g}]"
    return (
        f"{row.op:<16} {row.provider:<20} {row.mode:<18} {sizes:<20} {row.dtype:<9} "
        f"{row.value:>10.4g} {row.unit}{spread}  {row.note}"
    )


if __name__ == "__main__":
    run_suite(*sys.argv[1:])
