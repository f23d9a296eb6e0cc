"""Sections of the GPU suite about training steps: the pair classifier, optimizers alone, a LLaMA-1B in real memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.experiments.gpu_timing import (
    Bench,
    number_row,
    ratio_row,
    refuse_wrong,
    relative_error,
)
from comera_lab.experiments.graphs import GraphedStep
from comera_lab.experiments.llama_block import Llama, LlamaConfig
from comera_lab.experiments.rows import BenchRow
from comera_lab.layers import tt_layers
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.objectives import EarlyStage
from comera_lab.optimizers import COAPAdamW
from comera_lab.optimizers.device_step import DeviceStep
from comera_lab.optimizers.projection import refresh_basis, sketch_basis, svd_basis
from comera_lab.optimizers.quantized import dequantize_blockwise, quantize_blockwise, signed_map

BATCHES = (32, 1, 128)
TOKENS = 128
RANK = 512
# Never due while a step is timed; what renewals cost is a row of its own.
NEVER = 1 << 30
BF16 = torch.bfloat16
LIMITS = {torch.float32: 1e-4, BF16: 2e-2}


def correctness(bench: Bench) -> Iterator[BenchRow]:
    """The COAP step as it will be timed, at every shape, against the same step in float64; the 8-bit codes."""
    for rows, cols in ((2048, 2048), (5461, 2048), (2048, 5461)):
        for dtype in (BF16, torch.float32):
            for rank in (64, RANK):
                shape = bench.size(rows), bench.size(cols)
                yield _step_is_right(bench, shape, min(rank, bench.size(rank, 4)), dtype)
    x = bench.randn(bench.size(1 << 20, 5000))
    quantize, dequantize = _coders(bench)
    code = signed_map().to(bench.device)
    codes, scales = quantize(x, code)
    want = dequantize_blockwise(*quantize_blockwise(x, code), code, x.shape)
    error = relative_error(dequantize(codes, scales, code, x.shape), want)
    yield refuse_wrong("blockwise_quant", error, 1e-4, {"elements": x.numel()}, x.dtype)


def encoder_section(bench: Bench) -> Iterator[BenchRow]:
    """A training step of the six-encoder pair classifier, AdamW, bf16 autocast: dense, TT, TT with the early stage."""
    for batch in BATCHES:
        rows: dict[str, BenchRow] = {}
        for provider in ("dense", "tt", "tt early stage"):
            for graphed in (False, True) if bench.capture is not None else (False,):
                if bench.late:
                    return
                name = f"{provider} graph" if graphed else provider
                rows[name] = _encoder_row(bench, name, batch, graphed)
                yield rows[name]
        for slow, fast in (("dense", "tt"), ("dense graph", "tt graph"), ("dense", "dense graph"), ("tt", "tt graph")):
            if slow in rows and fast in rows:
                yield ratio_row(rows[slow], rows[fast])


def optimizer_section(bench: Bench) -> Iterator[BenchRow]:
    """The update alone over the matrices of LLaMA-1B in bf16: fused AdamW, COAP at rank 512 (as
    a graph would hold it, by its own step(), without kernels), with 8-bit moments."""
    layers, sizes = max(1, 24 // bench.shrink), {"model": "LLaMA-1B matrices", "rank": RANK}
    rows: dict[str, BenchRow] = {}
    for provider in ("adamw fused", "coap", "coap eager", "coap torch", "coap 8-bit"):
        if bench.late:
            return
        parameters = _llama_matrices(bench, layers)
        elements = sum(parameter.numel() for parameter in parameters)
        step, state_bytes = _update_of(bench, provider, parameters)
        moved, flops = 14.0 * elements, 0.0
        if provider != "adamw fused":
            # gradient read, weight read and written; moments read and written; two products
            low = sum(max(p.shape) * _rank(bench) for p in parameters)
            per_moment = 4 if provider == "coap 8-bit" else 16
            moved, flops = 6.0 * elements + per_moment * low, 4.0 * elements * _rank(bench)
        rows[provider] = bench.time("optimizer_step", provider, "update", [step], sizes, BF16, moved=moved, flops=flops)
        yield rows[provider]
        mib = state_bytes() / 2**20
        yield number_row("optimizer_step", provider, "state", mib, "MiB", sizes, BF16, f"{elements:,} weights")
    for other in rows:
        if other != "adamw fused":
            yield ratio_row(rows["adamw fused"], rows[other])


def refresh_section(bench: Bench) -> Iterator[BenchRow]:
    """Renewing one basis: COAP's warm iteration against the full SVD of GaLore."""
    for edges in ((2048, 2048), (5461, 2048)):
        rows, cols, rank = bench.size(edges[0]), bench.size(edges[1]), _rank(bench)
        sizes = {"rows": rows, "cols": cols, "rank": rank}
        gradient = bench.randn(rows, cols)
        basis = sketch_basis(gradient, rank)
        calls = {
            "warm": lambda g=gradient, b=basis: refresh_basis(g, b),
            "svd": lambda g=gradient, r=rank: svd_basis(g, r),
        }
        timed = {
            name: bench.time(
                "basis_refresh", name, "one matrix", [call], sizes, gradient.dtype, samples=count, settle=1
            )
            for (name, call), count in zip(calls.items(), (bench.samples, 3), strict=True)
        }
        yield from timed.values()
        yield ratio_row(timed["svd"], timed["warm"], "3 samples of the SVD")


def codes_section(bench: Bench) -> Iterator[BenchRow]:
    """Quantise and dequantise block-wise; the floor is one read and one write."""
    count = bench.size(1 << 26, 1 << 12)
    quantize, dequantize = _coders(bench)
    code, x = signed_map().to(bench.device), bench.randn(count)
    codes, scales = quantize(x, code)
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: quantize(x, code),
        "dequantize": lambda: dequantize(codes, scales, code, x.shape),
    }
    for mode, call in calls.items():
        sizes = {"elements": count}
        yield bench.time("blockwise_quant", "kernel", mode, [call], sizes, x.dtype, moved=5.0 * count, flops=0.0)


def llama_section(bench: Bench) -> Iterator[BenchRow]:
    """A training step of LLaMA-1B in bf16 on 16 x 256 tokens, all memory real: AdamW, COAP, 8-bit COAP."""
    config = LlamaConfig()
    if bench.shrink > 1:
        config = LlamaConfig(layers=1, width=64, hidden=96, heads=4, vocabulary=100)
    sizes = {"layers": config.layers, "width": config.width, "rows": bench.size(16, 2), "tokens": bench.size(256)}
    rows: dict[str, BenchRow] = {}
    for provider in ("adamw fused", "coap", "coap 8-bit"):
        if bench.late:
            return
        step, parameters = _llama_step(bench, provider, config, sizes)
        rows[provider] = bench.time(
            "llama_step", provider, "training step", [step], sizes, BF16, note=f"{parameters:,} weights"
        )
        yield rows[provider]
        yield from bench.peak("llama_step", provider, "training step", step, sizes, BF16)
        del step
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    for other in ("coap", "coap 8-bit"):
        yield ratio_row(rows["adamw fused"], rows[other])


def _encoder_row(bench: Bench, name: str, batch: int, graphed: bool) -> BenchRow:
    config = replace(EncoderConfig.released("dense" if name.startswith("dense") else "tt"), dropout=0.0)
    if bench.shrink > 1:
        config = EncoderConfig(kind=config.kind, layers=1, head="cross", positions=TOKENS, vocabulary=2000)
    model = PairEncoder(config, generator=bench.generator).to(bench.device)
    objective = EarlyStage(1.0) if "early stage" in name else None
    for layer in tt_layers(model).values() if objective else ():
        layer.add_gates()
    rows, kind = bench.size(batch, 1), bench.device.type
    ids = torch.randint(1000, config.vocabulary, (rows, TOKENS), generator=bench.generator).to(bench.device)
    labels = torch.randint(0, config.classes, (rows,), generator=bench.generator).to(bench.device)

    def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        # without the cache: a graph would keep casts of one step's weights
        with torch.autocast(kind, BF16, cache_enabled=False):
            logits = model(ids)
        return functional.cross_entropy(logits.float(), labels)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def eager() -> None:
        optimizer.zero_grad()
        loss = loss_of(model, ids, labels)
        torch.autograd.backward(loss if objective is None else objective(loss, model))
        optimizer.step()

    call: Callable[[], object] = eager
    if graphed:
        assert bench.capture is not None
        step = GraphedStep(model, loss_of, optimizer, objective=objective, capture=bench.capture())
        for _ in range(4):
            step.step(ids, labels)
        call = lambda: step.step(ids, labels)  # noqa: E731
    sizes = {"batch": rows, "tokens": TOKENS}
    peak = bench.watch.peak_mib(call)
    note = "" if peak is None else f"peak {peak:.0f} MiB"
    return bench.time("encoder_step", name, "training step", [call], sizes, BF16, note=note)


def _rank(bench: Bench) -> int:
    return bench.size(RANK, 4)


def _llama_matrices(bench: Bench, layers: int) -> list[nn.Parameter]:
    """Weights of all blocks with a gradient each: four width x width and three width x hidden a layer."""
    width, hidden = bench.size(2048), bench.size(5461)
    shapes = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    parameters = [nn.Parameter(bench.randn(*shape, dtype=BF16, scale=0.02)) for _ in range(layers) for shape in shapes]
    for parameter in parameters:
        parameter.grad = bench.randn(*parameter.shape, dtype=BF16, scale=1e-3)
    return parameters


def _coap(parameters: Any, rank: int, provider: str) -> COAPAdamW:
    """COAP as LLaMA's script has it, its bases fixed."""
    bits: Any = 8 if provider == "coap 8-bit" else 32
    return COAPAdamW(
        parameters, lr=1e-3, rank=rank, rank_ratio=None, scale=0.25, update_interval=NEVER, plain_up_to=100, bits=bits
    )


def _update_of(
    bench: Bench, provider: str, parameters: list[nn.Parameter]
) -> tuple[Callable[[], object], Callable[[], int]]:
    """One update of all parameters, ready to be timed, and the bytes of its state."""
    optimizer: torch.optim.Optimizer
    if provider == "adamw fused":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    else:
        optimizer = _coap(parameters, _rank(bench), provider)
        optimizer.backend = "torch" if provider == "coap torch" else None
    optimizer.step()

    def state_bytes() -> int:
        tensors = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in tensors if isinstance(value, Tensor))

    if provider in ("adamw fused", "coap eager", "coap torch"):
        return optimizer.step, state_bytes
    update = DeviceStep(optimizer)

    def step() -> None:
        update.renew()
        update.write_scalars()
        update.run()
        update.count()

    return step, state_bytes


def _llama_step(
    bench: Bench, provider: str, config: LlamaConfig, sizes: dict[str, Any]
) -> tuple[Callable[[], object], int]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with bench.device:
            model = Llama(config)
    finally:
        torch.set_default_dtype(default)
    ids = torch.randint(0, config.vocabulary, (sizes["rows"], sizes["tokens"] + 1), generator=bench.generator)
    ids = ids.to(bench.device)
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    known = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]

    def backward() -> None:
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        torch.autograd.backward(loss)

    optimizer: torch.optim.Optimizer
    if provider == "adamw fused":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        groups = [{"params": matrices}, {"params": others, "rank": None, "rank_ratio": None, "bits": 32}]
        optimizer = _coap(groups, min(_rank(bench), config.width // 4), provider)
    backward()
    optimizer.step()
    update = DeviceStep(optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        backward()
        update.renew()
        update.write_scalars()
        update.run()
        update.count()

    return step, sum(parameter.numel() for parameter in model.parameters())


def _step_is_right(bench: Bench, shape: tuple[int, int], rank: int, dtype: torch.dtype) -> BenchRow:
    """Two updates of two matrices: the timed path in `dtype` against torch's own code in float64, the basis fixed."""
    weights = [bench.randn(*shape, dtype=dtype) for _ in range(2)]
    gradients = [bench.randn(*shape, dtype=dtype) for _ in range(2)]
    ours, truth = ([nn.Parameter(w.to(kind, copy=True)) for w in weights] for kind in (dtype, torch.float64))
    optimizers = [_coap(parameters, rank, "coap") for parameters in (ours, truth)]
    for parameters in (ours, truth):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.1  # so that the change counts beside the weights
        optimizer.step()
    for parameter, twin in zip(ours, truth, strict=True):
        optimizers[1].state[twin]["basis"].copy_(optimizers[0].state[parameter]["basis"])
        twin.data.copy_(parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            optimizers[1].state[twin][name].copy_(optimizers[0].state[parameter][name])
    before = [parameter.detach().double() for parameter in ours]
    update = DeviceStep(optimizers[0])
    update.write_scalars()
    update.run()
    optimizers[1].step()
    error = max(
        relative_error(got.double() - old, want.detach() - old) if dtype == torch.float32 else relative_error(got, want)
        for got, want, old in zip(ours, truth, before, strict=True)
    )
    sizes = {"rows": shape[0], "cols": shape[1], "rank": rank}
    return refuse_wrong("optimizer_step", error, LIMITS[dtype], sizes, dtype)


def _coders(bench: Bench) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """The kernels on a GPU, the torch code elsewhere."""
    if bench.device.type != "cuda":
        return quantize_blockwise, dequantize_blockwise
    from comera_lab.kernels import blockwise_quant

    return blockwise_quant.quantize_blockwise, blockwise_quant.dequantize_blockwise
