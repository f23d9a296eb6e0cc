"""Exercises of lesson 14: pre-training a code model."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from comera_lab.teaching.exercise import Exercise, Mistake


def blocks(stream: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """stream (n,) -> x and y (rows, tokens): y holds the token after each one in x; as many rows as fit."""
    rows = (len(stream) - 1) // tokens
    x = stream[: rows * tokens].reshape(rows, tokens)
    y = stream[1 : rows * tokens + 1].reshape(rows, tokens)
    return x, y


def perplexity(losses: list[float], tokens: list[int]) -> float:
    """Mean losses of batches (nats per token) and how many tokens each holds -> perplexity of all tokens."""
    return math.exp(sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens))


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """hidden (n, width), weight (vocabulary, width), targets (n,) -> mean loss, `rows` rows of logits at a time."""
    total = torch.zeros(())
    for h, t in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        total = total + functional.cross_entropy(h @ weight.T, t, reduction="sum")
    return total / len(targets)


def optimizer_numbers(cores: int, projected: list[tuple[int, int]], rest: int, rank: int) -> int:
    """CoMERA + COAP: numbers in the optimizer for cores, for projected dense matrices and for the rest."""
    return 2 * cores + sum((2 * max(shape) + min(shape)) * rank for shape in projected) + 2 * rest


_ALL_AT_ONCE = (
    "The loss is right, but more than `rows` rows of logits were in memory at once. Make them piece by piece."
)


class _Largest(TorchFunctionMode):
    """Notes the numbers in the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def _few_logits(answer: Any, args: tuple[Any, ...]) -> str | None:
    hidden, weight, targets, rows = args
    allowed = max(min(rows, len(targets)) * len(weight), hidden.numel(), weight.numel())
    with _Largest() as largest:
        answer(*args)
    if largest.numbers <= allowed:
        return None
    return _ALL_AT_ONCE


def _streams(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [(torch.randperm(n, generator=generator), tokens) for n, tokens in ((25, 8), (33, 8), (50, 7), (9, 8))]


def _losses(generator: torch.Generator) -> list[tuple[Any, ...]]:
    uneven = (3 + 2 * torch.rand(5, generator=generator)).tolist()
    return [(uneven, [4096, 4096, 4096, 4096, 512]), ([2.0, 4.0], [100, 300]), ([math.log(50.0)] * 3, [10, 20, 5])]


def _heads(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(n: int, rows: int) -> tuple[Any, ...]:
        hidden, weight = (torch.randn(k, 6, generator=generator) for k in (n, 40))
        return hidden, weight, torch.randint(40, (n,), generator=generator), rows

    return [case(24, 8), case(25, 8), case(10, 3), case(5, 50)]


def _models(generator: torch.Generator) -> list[tuple[Any, ...]]:
    rows = int(torch.randint(2, 9, (1,), generator=generator)) * 512
    return [(111_276, [(1024, 128)], 1152, 32), (50_000, [(rows, 256), (256, rows)], 0, 64), (7_000, [], 300, 8)]


EXERCISES = (
    Exercise(
        id="14.1",
        title="Blocks of tokens",
        wants="a function blocks(stream, tokens) that returns two tensors x and y of shape (rows, tokens)",
        reference=blocks,
        cases=_streams,
        right="Every place of a block is a task of its own: 128 tokens, 128 answers, one pass.",
        hints=(
            "y is the same stream, begun one token later.",
            "The last token has no next one, so there are (len(stream) - 1) // tokens rows. Cut both, then reshape.",
            "x = stream[:rows * tokens], y = stream[1:rows * tokens + 1], both .reshape(rows, tokens).",
        ),
        mistakes=(
            Mistake(
                name="no shift",
                answer=lambda stream, tokens: (blocks(stream, tokens)[0],) * 2,
                message="y equals x: the model would only have to repeat what it reads. Its loss would fall to 0, and "
                "it would have learnt nothing.",
            ),
            Mistake(
                name="shifted the other way",
                answer=lambda stream, tokens: blocks(stream, tokens)[::-1],
                message="This asks for the token before. The model may see all tokens up to its place, so that one it "
                "knows already.",
            ),
            Mistake(
                name="rolled",
                answer=lambda stream, tokens: (
                    blocks(stream, tokens)[0],
                    blocks(stream, tokens)[0].roll(-1, dims=1),
                ),
                message="At the end of each row stands the first token of the row: a wrong answer in every block. The "
                "next token is the first of the next row.",
            ),
        ),
    ),
    Exercise(
        id="14.2",
        title="Perplexity of a whole set",
        wants="a function perplexity(losses, tokens) that returns a number",
        reference=perplexity,
        cases=_losses,
        right="Sum up, divide once, exp last. Then the size of the batches has no say.",
        hints=(
            "A batch of 512 tokens must not weigh as much as one of 4,096.",
            "Losses times their tokens, summed up, over all tokens: the mean loss. Its exp is the perplexity.",
            "`math.exp(sum(l * n for l, n in zip(losses, tokens)) / sum(tokens))`.",
        ),
        mistakes=(
            Mistake(
                name="mean of means",
                answer=lambda losses, tokens: math.exp(sum(losses) / len(losses)),
                message="Every batch weighs the same here, the small last one too. Weigh by tokens.",
            ),
            Mistake(
                name="off by one",
                answer=lambda losses, tokens: math.exp(
                    sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)
                    * len(losses) / (len(losses) + 1)
                ),
                message="Divided by one batch too many: the count began at 1. Public scripts do this, and every "
                "perplexity that they print is too good.",
            ),
            Mistake(
                name="mean of perplexities",
                answer=lambda losses, tokens: sum(
                    math.exp(loss) * n for loss, n in zip(losses, tokens, strict=True)
                ) / sum(tokens),
                message="exp comes last: a mean of perplexities lets the worst batch decide.",
            ),
        ),
    ),
    Exercise(
        id="14.3",
        title="A loss without all logits",
        wants="a function chunked_loss(hidden, weight, targets, rows) that returns a number",
        reference=chunked_loss,
        cases=_heads,
        cost=_few_logits,
        right="The sum does not care in how many pieces it is made; the memory does.",
        hints=(
            "Split hidden and targets into pieces of `rows`; the last one may be shorter.",
            'cross_entropy(..., reduction="sum") for each piece, and one division at the end.',
            "for h, t in zip(hidden.split(rows), targets.split(rows)): "
            'total += cross_entropy(h @ weight.T, t, reduction="sum"); return total / len(targets).',
        ),
        mistakes=(
            Mistake(
                name="mean of chunk means",
                answer=lambda hidden, weight, targets, rows: torch.stack([
                    functional.cross_entropy(h @ weight.T, t)
                    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
                ]).mean(),
                message="A mean of means: the last piece is shorter and counts too much. Sum up, divide once.",
            ),
            Mistake(
                name="last piece dropped",
                answer=lambda hidden, weight, targets, rows: functional.cross_entropy(
                    hidden[: max(1, len(hidden) // rows) * rows] @ weight.T,
                    targets[: max(1, len(targets) // rows) * rows],
                ),
                message="The rows that do not fill a piece are missing.",
            ),
            Mistake(
                name="all logits at once",
                answer=lambda hidden, weight, targets, rows: functional.cross_entropy(hidden @ weight.T, targets),
                message=_ALL_AT_ONCE,
            ),
            Mistake(
                name="not divided",
                answer=lambda hidden, weight, targets, rows: chunked_loss(hidden, weight, targets, rows) * len(targets),
                message="That is the sum over all targets. The loss is their mean.",
            ),
        ),
    ),
    Exercise(
        id="14.4",
        title="CoMERA and COAP in one table",
        wants="a function optimizer_numbers(cores, projected, rest, rank) that returns a whole number",
        reference=optimizer_numbers,
        cases=_models,
        right="Cores are few, so their moments may stay whole; what stayed dense is projected. One sum.",
        hints=(
            "Three parts with a rule each: cores and the rest under AdamW, dense matrices under COAP.",
            "AdamW keeps two numbers for each. COAP keeps two moments of (longer side x rank) and a basis of "
            "(shorter side x rank).",
            "`2 * cores + sum((2 * max(s) + min(s)) * rank for s in projected) + 2 * rest`.",
        ),
        mistakes=(
            Mistake(
                name="bases forgotten",
                answer=lambda cores, projected, rest, rank: 2 * cores
                + sum(2 * max(shape) * rank for shape in projected) + 2 * rest,
                message="COAP also keeps its basis between steps: the shorter side times the rank.",
            ),
            Mistake(
                name="nothing projected",
                answer=lambda cores, projected, rest, rank: 2 * cores
                + 2 * sum(a * b for a, b in projected) + 2 * rest,
                message="That is AdamW for everything. The dense matrices are under COAP.",
            ),
            Mistake(
                name="one moment for the cores",
                answer=lambda cores, projected, rest, rank: cores
                + sum((2 * max(shape) + min(shape)) * rank for shape in projected) + 2 * rest,
                message="AdamW keeps two moments for every number of a core.",
            ),
        ),
    ),
)  # fmt: skip
