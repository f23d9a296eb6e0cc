"""Optimizer steps at LLaMA-like shapes beside torch's AdamW: right first, then timed in turns.

COAP renews bases on a cycle of update_interval * refresh_factor = 160 steps, so each provider makes more than one whole
cycle: mean and slowest step are those of all steps after the first, which makes all bases at once and is a row of
its own. Two products of (rows, cols, rank) per matrix are what a step cannot do without; the note gives their FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.experiments import bench
from comera_lab.experiments.recorder import BenchRow
from comera_lab.optimizers import COAPAdamW
from comera_lab.optimizers.projection import captured_energy, project, random_basis, refresh_basis, svd_basis

_TURN = 20  # steps in a row: the first few find the caches full of another provider's tensors
_SETTLE = 5
_INTERVAL, _FACTOR = 32, 5
# torch's fused AdamW takes 1 - b2^t in float32: 4e-5 was seen at the second step (a wrong factor of 1.01 gives 1e-2).
ERROR_LIMIT = 2e-4


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """Matrices of a small language model, `turns` of 20 timed steps, and the tokens of a whole training step."""

    shapes: tuple[tuple[int, int], ...] = ((512, 512),) * 16 + ((1376, 512),) * 8 + ((512, 1376),) * 4
    ratio: float = 4.0
    turns: int = 11
    tokens: int = 2048
    training_steps: int = 10

    @property
    def sizes(self) -> dict[str, Any]:
        return {"parameters": sum(m * n for m, n in self.shapes), "matrices": len(self.shapes), "ratio": self.ratio}

    @property
    def gigaflops(self) -> float:
        """Of the two products per matrix and step."""
        return sum(4 * m * n * int(min(m, n) / self.ratio) for m, n in self.shapes) / 1e9


@dataclass(frozen=True, kw_only=True)
class RefreshCase:
    """One basis of a (rows, cols) gradient."""

    rows: int = 2048
    cols: int = 2048
    rank: int = 512
    svd_repeats: int = 2

    @property
    def sizes(self) -> dict[str, Any]:
        return {"rows": self.rows, "cols": self.cols, "rank": self.rank}


@dataclass
class _Provider:
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    times_ms: list[float] = field(default_factory=list)
    first_ms: float = 0.0


STEP = StepCase()
REFRESH = RefreshCase()


def correctness_rows(device: torch.device) -> Iterator[BenchRow]:
    """Worst relative error of one step against the recursion in float64. Raises ArithmeticError above the limit."""
    worst = max(_step_error(shape, STEP.ratio, device) for shape in set(STEP.shapes))
    if not worst < ERROR_LIMIT:
        raise ArithmeticError(
            f"a COAP step must stay within {ERROR_LIMIT:.0e} of float64, got {worst:.2e}. "
            "Nothing is timed until it does."
        )
    yield _row("optimizer_step", "coap", "correctness", worst, "relative error", STEP.sizes)


def optimizer_rows(device: torch.device) -> Iterator[BenchRow]:
    """Step times of torch's AdamW and COAP, a whole training step, and a refresh beside a full SVD."""
    yield from _step_rows(STEP, device)
    yield from _training_rows(STEP, device)
    yield from _refresh_rows(REFRESH, device)


def _makers(ratio: float) -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    coap = partial(COAPAdamW, rank_ratio=ratio, update_interval=_INTERVAL, refresh_factor=_FACTOR)
    return {
        "adamw fused": partial(torch.optim.AdamW, fused=True),
        "adamw foreach": partial(torch.optim.AdamW, foreach=True),
        "coap": coap,
        "coap, not staggered": partial(coap, stagger=False),
        "coap, bf16 products": coap,
        "coap-8bit": partial(coap, bits=8),
    }


def _step_rows(case: StepCase, device: torch.device) -> Iterator[BenchRow]:
    providers = {name: _provider(make, case, device) for name, make in _makers(case.ratio).items()}
    for _ in range(case.turns):
        for name, provider in providers.items():
            _take_turn(provider, device, "medium" if "bf16" in name else "highest")
    note = f"two products a matrix: {case.gigaflops:.1f} GFLOP"
    for name, provider in providers.items():
        times = provider.times_ms
        yield _timing("optimizer_step", name, "step", times, "ms", case.sizes, note if "coap" in name else "")
        yield _row("optimizer_step", name, "mean step", mean(times), "ms", case.sizes)
        yield _row("optimizer_step", name, "first step", provider.first_ms, "ms", case.sizes)
        ratio = max(times) / median(times)
        yield _row("optimizer_step", name, "slowest step", ratio, "x median", case.sizes, f"{max(times):.1f} ms")
        state = sum(v.nbytes for s in provider.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        yield _row("optimizer_step", name, "state", state / 2**20, "MiB", case.sizes)


def _take_turn(provider: _Provider, device: torch.device, precision: str) -> None:
    """A turn of steps; "medium" lets a CPU with bfloat16 matrix instructions use them for float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for number in range(_TURN):
            elapsed = _clock(provider.optimizer.step, device)
            if not provider.first_ms:
                provider.first_ms = elapsed
            elif number >= _SETTLE:
                provider.times_ms.append(elapsed)
    finally:
        torch.set_float32_matmul_precision(before)


def _training_rows(case: StepCase, device: torch.device) -> Iterator[BenchRow]:
    """Forward and backward of all matrices on one batch of tokens, and the update: what the optimizer adds to it."""
    makers = _makers(case.ratio)
    providers = {name: _provider(makers[name], case, device) for name in ("adamw fused", "coap")}
    generator = torch.Generator().manual_seed(1)
    inputs = {n: torch.randn(case.tokens, n, generator=generator).to(device) for n in {n for _, n in case.shapes}}

    def step(provider: _Provider) -> None:
        provider.optimizer.zero_grad()
        for weight in provider.parameters:
            x = inputs[weight.shape[1]].requires_grad_()
            torch.autograd.backward(nn.functional.linear(x, weight).square().mean())
        provider.optimizer.step()

    for _ in range(case.training_steps):
        for provider in providers.values():
            for timed in (False, True):
                elapsed = _clock(lambda provider=provider: step(provider), device)  # type: ignore[misc]
                if timed:
                    provider.times_ms.append(elapsed)
    note = f"forward and backward of every matrix on {case.tokens} tokens, no attention; then the update"
    for name, provider in providers.items():
        yield _timing("training_step", name, "step", provider.times_ms, "ms", case.sizes, note)
    pairs = zip(providers["coap"].times_ms, providers["adamw fused"].times_ms, strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    yield _timing("training_step", "coap over adamw fused", "step", ratios, "x time", case.sizes)


def _refresh_rows(case: RefreshCase, device: torch.device) -> Iterator[BenchRow]:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(case.rows, case.cols, generator=generator)
    gradient = (left * torch.arange(1, case.cols + 1) ** -0.5).to(device)
    basis = random_basis(case.cols, case.rank, generator).to(device)
    refreshed = [_clock(lambda: refresh_basis(gradient, basis), device) for _ in range(10)][2:]
    full = [_clock(lambda: svd_basis(gradient, case.rank), device) for _ in range(case.svd_repeats)]
    best = svd_basis(gradient, case.rank)
    warm, optimum = basis, float(captured_energy(gradient, best))
    for _ in range(2):
        warm = refresh_basis(gradient, warm)
    share = float(captured_energy(gradient, warm)) / optimum
    note = f"after two refreshes {share:.1%} of the energy that the SVD captures"
    yield _timing("basis", "warm refresh", "refresh", refreshed, "ms", case.sizes, note)
    yield _row("basis", "full svd", "refresh", median(full), "ms", case.sizes)
    ratio = median(full) / median(refreshed)
    yield _row("basis", "warm refresh over full svd", "refresh", ratio, "x faster", case.sizes)


def _provider(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], case: StepCase, device: torch.device
) -> _Provider:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device)) for shape in case.shapes]
    for parameter in parameters:
        parameter.grad = (1e-3 * torch.randn(parameter.shape, generator=generator)).to(device)
    return _Provider(make(parameters), parameters)


def _step_error(shape: tuple[int, int], ratio: float, device: torch.device) -> float:
    """The second step of one matrix, from the state of the first, against the recursion written out in float64."""
    provider = _provider(
        lambda parameters: COAPAdamW(parameters, rank_ratio=ratio, plain_up_to=0), StepCase(shapes=(shape,)), device
    )
    weight, optimizer = provider.parameters[0], provider.optimizer
    optimizer.step()
    state = {key: value.double().clone() for key, value in optimizer.state[weight].items()}
    before = weight.detach().double().clone()
    optimizer.step()
    assert weight.grad is not None
    gradient = weight.grad.double()
    low = project(gradient if shape[0] >= shape[1] else gradient.T, state["basis"])
    first = 0.9 * state["exp_avg"] + 0.1 * low
    second = 0.999 * state["exp_avg_sq"] + 0.001 * low.square()
    direction = first / (1 - 0.9**2) / ((second / (1 - 0.999**2)).sqrt() + 1e-8) @ state["basis"].T
    want = before - 1e-3 * (direction if shape[0] >= shape[1] else direction.T)
    return float((weight.detach().double() - want).norm() / (want - before).norm())


def _clock(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    bench._synchronise(device)
    start = time.perf_counter()
    call()
    bench._synchronise(device)
    return (time.perf_counter() - start) * 1e3


def _timing(
    op: str, provider: str, mode: str, samples: list[float], unit: str, sizes: dict[str, Any], note: str = ""
) -> BenchRow:
    tenths = quantiles(samples, n=10)
    spread = {"p20": tenths[1], "p80": tenths[7], "repeats": len(samples)}
    return _row(op, provider, mode, tenths[4], unit, sizes, note, **spread)


def _row(
    op: str, provider: str, mode: str, value: float, unit: str, sizes: dict[str, Any], note: str = "", **spread: Any
) -> BenchRow:
    return BenchRow(
        op=op, provider=provider, mode=mode, value=value, unit=unit, sizes=sizes, dtype="float32", note=note, **spread
    )
