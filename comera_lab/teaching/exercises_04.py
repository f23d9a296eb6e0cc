"""Exercises of lesson 04: a tensor-train layer that trains."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from comera_lab.teaching.exercise import Exercise, Mistake


def half_chain(cores: list[Tensor]) -> Tensor:
    """Input-side cores (1, n_1, r_1) ... (r, n_d, r_d) -> matrix A (n_1 * ... * n_d, r_d)."""
    chain = cores[0]
    for core in cores[1:]:
        chain = torch.tensordot(chain, core, dims=1)
    return chain.reshape(-1, cores[-1].shape[-1])


def tt_linear(x: Tensor, A: Tensor, B: Tensor, bias: Tensor) -> Tensor:
    """x (rows, in), A (in, rank), B (rank, out), bias (out) -> (rows, out); A @ B is never formed."""
    return x @ A @ B + bias


def flops(rows: int, in_features: int, rank: int, out_features: int) -> tuple[int, int]:
    """FLOPs of x A B: (thin first, matrix first)."""
    thin = 2 * rows * rank * (in_features + out_features)
    through_matrix = 2 * in_features * rank * out_features + 2 * rows * in_features * out_features
    return thin, through_matrix


def accuracy_within(rows: list[dict[str, float]], seconds: float) -> float:
    """The best accuracy of the rows whose `elapsed_s` is at most `seconds`; 0.0 if there is none."""
    return max((row["accuracy"] for row in rows if row["elapsed_s"] <= seconds), default=0.0)


class _LargestTensor(TorchFunctionMode):
    """Remember the most numbers any torch call inside the block returned."""

    numbers = 0

    # A dispatch mode would see more, and costs a second of imports at its first use.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.numbers = max(self.numbers, output.numel())
        return output


def _no_dense_matrix(answer: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """A sentence if the way to y passes through a tensor as large as the dense matrix."""
    _, A, B, _ = args
    dense = A.shape[0] * B.shape[1]
    with _LargestTensor() as watch:
        answer(*args)
    if watch.numbers < dense:
        return None
    return (
        f"The values are right, the way is too dear: it makes a tensor of {watch.numbers:,} numbers on the way, as "
        "large as the dense matrix. Let x meet A first, then B."
    )


def _chain_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def cores(modes: tuple[int, ...], ranks: tuple[int, ...]) -> list[Tensor]:
        bonds = zip(ranks, modes, ranks[1:], strict=False)
        return [torch.randn(*shape, generator=generator) for shape in bonds]

    return [(cores((2, 3, 4), (1, 2, 3, 5)),), (cores((3, 4), (1, 3, 2)),), (cores((4,), (1, 3)),)]


def _linear_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(rows: int, n: int, r: int, m: int) -> tuple[Tensor, ...]:
        shapes = ((rows, n), (n, r), (r, m), (m,))
        return tuple(torch.randn(*shape, generator=generator) for shape in shapes)

    return [case(4, 96, 3, 120), case(5, 6, 2, 6)]


def _flops_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    rows, rank = torch.randint(3, 60, (2,), generator=generator).tolist()
    return [(64, 784, 8, 512), (rows, 100, rank, 70), (1, 32, 4, 48)]


def _race_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    """Invented rows: one of the runs gets worse before the budget ends, one starts after it."""
    drawn = (torch.rand(5, generator=generator) / 4 + 0.7).tolist()
    rows = [{"elapsed_s": 1.5 * k, "accuracy": accuracy} for k, accuracy in enumerate((0.1, *drawn), start=1)]
    bumpy = [{"elapsed_s": float(t), "accuracy": a} for t, a in ((1, 0.3), (2, 0.8), (3, 0.6), (5, 0.9), (8, 0.95))]
    return [(bumpy, 4.0), (rows, 5.0), (bumpy, 5.0), (bumpy, 0.5)]


def _reversed_modes(cores: list[Tensor]) -> Tensor:
    chain = cores[0]
    for core in cores[1:]:
        chain = torch.tensordot(chain, core, dims=1)
    chain = chain.squeeze(0)
    order = (*reversed(range(chain.ndim - 1)), chain.ndim - 1)
    return chain.permute(*order).reshape(-1, chain.shape[-1])


def _scrambled_chain(cores: list[Tensor]) -> Tensor:
    A = half_chain(cores)
    return A.reshape(A.shape[::-1])


def _latest(rows: list[dict[str, float]], seconds: float) -> float:
    inside = [row["accuracy"] for row in rows if row["elapsed_s"] <= seconds]
    return inside[-1] if inside else 0.0


def _first_after(rows: list[dict[str, float]], seconds: float) -> float:
    return next((row["accuracy"] for row in rows if row["elapsed_s"] >= seconds), rows[-1]["accuracy"])


EXERCISES = (
    Exercise(
        id="04.1",
        title="Fold the input cores into one thin matrix",
        wants="a function half_chain(cores) that returns a matrix (product of the modes, last rank)",
        reference=half_chain,
        cases=_chain_cases,
        right="All input modes became rows, one bond is left open: that is A.",
        hints=(
            "It is `tt_full` of lesson 03, except that the last bond stays open.",
            "tensordot the cores from left to right; then join all modes into one axis.",
            "End with `chain.reshape(-1, cores[-1].shape[-1])`: the rank stays the last axis.",
        ),
        mistakes=(
            Mistake(
                name="not yet a matrix",
                answer=lambda cores: half_chain(cores).reshape(
                    1, *(core.shape[1] for core in cores), cores[-1].shape[-1]
                ),
                message="The chain is right, but it still has one axis per mode (and r0 = 1). Join the modes into one.",
            ),
            Mistake(
                name="transposed",
                answer=lambda cores: half_chain(cores).T,
                message="It is transposed: rows are the input features, columns the rank.",
            ),
            Mistake(
                name="scrambled",
                answer=_scrambled_chain,
                message="A reshape is not a transpose: reshape to (features, rank), with the rank as last axis.",
            ),
            Mistake(
                name="wrong core order",
                answer=_reversed_modes,
                message="The modes are in reverse: wrong core order. The first core holds the slowest digit.",
            ),
        ),
    ),
    Exercise(
        id="04.2",
        title="Forward without the matrix",
        wants="a function tt_linear(x, A, B, bias) that returns a tensor (rows, out)",
        reference=tt_linear,
        cases=_linear_cases,
        cost=_no_dense_matrix,
        right="x meets A first. Nothing as large as the dense matrix was made on the way.",
        hints=(
            "A matrix product may be bracketed in two ways. Which one keeps everything thin?",
            "`(x @ A)` has only `rank` columns. Then B, then the bias.",
            "`x @ A @ B + bias`: Python works from left to right.",
        ),
        mistakes=(
            Mistake(
                name="off by the bias",
                answer=lambda x, A, B, bias: x @ A @ B,
                message="Off by exactly the bias: add it at the end.",
            ),
            Mistake(
                name="subtracted the bias",
                answer=lambda x, A, B, bias: x @ A @ B - bias,
                message="The bias is subtracted. Add it.",
            ),
            Mistake(
                name="transposed",
                answer=lambda x, A, B, bias: (x @ A @ B + bias).T,
                message="It is transposed: one row per example, one column per output feature.",
            ),
            Mistake(
                name="bias twice",
                answer=lambda x, A, B, bias: x @ A @ B + 2 * bias,
                message="Off by exactly the bias: it is added twice.",
            ),
        ),
    ),
    Exercise(
        id="04.3",
        title="The price of the two orders",
        wants="a function flops(rows, in_features, rank, out_features) that returns two numbers: "
        "(x A) B first, then x (A B)",
        reference=flops,
        cases=_flops_cases,
        right="Thin first costs rank x (in + out) per row; matrix first costs in x out per row, and the matrix itself.",
        hints=(
            "A product (a, b) @ (b, c) needs a * b * c multiplications and as many additions: 2 a b c FLOPs.",
            "Each order is two products. Write 2 a b c for each of them and add.",
            "thin: 2*rows*in*rank + 2*rows*rank*out; matrix first: 2*in*rank*out + 2*rows*in*out",
        ),
        mistakes=(
            Mistake(
                name="multiplications only",
                answer=lambda *sizes: tuple(count // 2 for count in flops(*sizes)),
                message="Exactly half: these are multiplications. The additions count as well, 2 a b c in all.",
            ),
            Mistake(
                name="matrix for free",
                answer=lambda rows, n, r, m: (flops(rows, n, r, m)[0], 2 * rows * n * m),
                message="The first order is right. The second forgot the price of making the matrix A B.",
            ),
            Mistake(
                name="swapped",
                answer=lambda *sizes: flops(*sizes)[::-1],
                message="Both numbers are right, in the other order: first (x A) B, then x (A B).",
            ),
            Mistake(
                name="ranks multiplied through",
                answer=lambda rows, n, r, m: (2 * rows * n * r * m, flops(rows, n, r, m)[1]),
                message="(x A) B is two products one after the other: add their prices, do not multiply the sizes.",
            ),
        ),
    ),
    Exercise(
        id="04.4",
        title="A fair race: equal seconds",
        wants="a function accuracy_within(rows, seconds): the best accuracy reached within that time, 0.0 if none",
        reference=accuracy_within,
        cases=_race_cases,
        right="Same seconds for both: the fair question. Same steps would hide that one of them runs longer.",
        hints=(
            'Each row has "elapsed_s" and "accuracy". Which rows lie within the budget?',
            "Keep the rows with elapsed_s at most seconds, then take the largest accuracy of them.",
            '`max((row["accuracy"] for row in rows if row["elapsed_s"] <= seconds), default=0.0)`',
        ),
        mistakes=(
            Mistake(
                name="whole run",
                answer=lambda rows, seconds: max(row["accuracy"] for row in rows),
                message="That is the best of the whole run: rows after the budget must not count.",
            ),
            Mistake(
                name="last row",
                answer=lambda rows, seconds: rows[-1]["accuracy"],
                message="That is the end of the run: equal steps, not equal seconds.",
            ),
            Mistake(
                name="latest, not best",
                answer=_latest,
                message="That is the last one within the budget. Accuracy may dip; the best one so far is asked.",
            ),
            Mistake(
                name="first row after the budget",
                answer=_first_after,
                message="That row comes when the time is already up. Only rows within the budget count.",
            ),
        ),
    ),
)
