"""Exercises of lesson 08: a compressed transformer."""

from typing import Any

import torch

from comera_lab.teaching.exercise import Exercise, Mistake

# Sizes of the published encoder: width, hidden, blocks, positions, segments, classes
RELEASED = (768, 3072, 6, 512, 2, 3)


def dense_rest(width: int, hidden: int, blocks: int, positions: int, segments: int, classes: int) -> int:
    """Parameters that stay dense: places, segments, norms, biases of the tensorised layers, and the last layer."""
    places = (positions + segments) * width
    norms = (1 + 2 * blocks) * 2 * width
    biases = blocks * (5 * width + hidden) + width
    return places + norms + biases + classes * width + classes


def cores_left(times: float, denominator: str, tensorised: int, rest: int) -> float:
    """Core parameters of a model that is `times` smaller, as a whole or in its tensorised part."""
    if denominator == "whole":
        return (tensorised + rest) / times - rest
    return tensorised / times


def flops_per_token(tokens: int, width: int, hidden: int, rank: int) -> tuple[int, int]:
    """FLOPs of one block for one token, (dense, tensorised): four square layers, two wide ones, attention."""
    attention = 2 * 2 * tokens * width
    dense = 2 * (4 * width * width + 2 * width * hidden)
    thin = 2 * rank * (4 * 2 * width + 2 * (width + hidden))
    return dense + attention, thin + attention


def one_sided(sides: list[str], labels: list[int]) -> float:
    """Share of pairs that the best reader of one side alone gets right, with everything known to it."""
    right = 0
    for side in set(sides):
        seen = [label for text, label in zip(sides, labels, strict=True) if text == side]
        right += max(seen.count(label) for label in set(seen))
    return right / len(sides)


def who_wins(first: list[float], second: list[float]) -> str:
    """ "first" or "second" where three seeds or more of each lie apart, "cannot tell" otherwise."""
    if min(len(first), len(second)) >= 3:
        if min(first) > max(second):
            return "first"
        if min(second) > max(first):
            return "second"
    return "cannot tell"


def _rest_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    width, blocks, classes = (int(torch.randint(low, high, (), generator=generator)) for low, high in
                              ((32, 96), (2, 5), (4, 7)))  # fmt: skip
    return [RELEASED, (64, 256, 2, 64, 2, 3), (width, 5 * width, blocks, 40, 1, classes)]


def _cores_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    tensorised, rest = 66_498_048, 459_267
    cases = [(times, name, tensorised, rest) for times in (43.0, 80.0, 361.0) for name in ("whole", "tensorised")]
    return [*cases, (5.0, "whole", int(torch.randint(50_000, 90_000, (), generator=generator)), 6_275)]


def _flop_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    tokens = int(torch.randint(20, 60, (), generator=generator))
    return [(128, 768, 3072, 30), (16, 64, 256, 16), (tokens, 100, 300, 7)]


def _side_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = torch.randint(0, 4, (18,), generator=generator).tolist()
    return [
        (["a dog", "a dog", "a dog", "rain", "rain", "rain"], [0, 1, 2, 2, 0, 1]),
        (["not here", "here", "not here", "here", "not here"], [2, 0, 2, 1, 1]),
        ([f"text {k}" for k in drawn], [k % 3 for k in range(18)]),
    ]


def _win_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        ([0.71, 0.72, 0.73], [0.68, 0.69, 0.70]),
        ([0.71, 0.72, 0.73], [0.70, 0.71, 0.74]),
        ([0.60, 0.61, 0.62], [0.70, 0.66, 0.64]),
        ([0.75], [0.70]),
        ([0.75, 0.76, 0.77], [0.70]),
        ([0.5, 0.6, 0.7], [0.7, 0.8, 0.9]),
    ]


def _rest_without(part: str) -> Any:
    def answer(width: int, hidden: int, blocks: int, positions: int, segments: int, classes: int) -> int:
        taken = {
            "biases": blocks * (5 * width + hidden) + width,
            "norms": (1 + 2 * blocks) * 2 * width,
            "norm shifts": (1 + 2 * blocks) * width,
            "pooler": width,
        }
        return dense_rest(width, hidden, blocks, positions, segments, classes) - taken[part]

    return answer


def _mean_wins(first: list[float], second: list[float]) -> str:
    one, other = sum(first) / len(first), sum(second) / len(second)
    return "first" if one > other else "second" if other > one else "cannot tell"


def _any_seeds(first: list[float], second: list[float]) -> str:
    return "first" if min(first) > max(second) else "second" if min(second) > max(first) else "cannot tell"


def _best_wins(first: list[float], second: list[float]) -> str:
    return "first" if max(first) > max(second) else "second" if max(second) > max(first) else "cannot tell"


EXERCISES = (
    Exercise(
        id="08.1",
        title="What stays dense",
        wants="a function dense_rest(width, hidden, blocks, positions, segments, classes) that returns a whole number",
        reference=dense_rest,
        cases=_rest_cases,
        right="At rank 30 that is nearly a third of the whole model: what you do not compress comes to rule the size.",
        hints=(
            "Go through the list above line by line. A norm has a scale and a shift for each column.",
            "Tables: (positions + segments) x width. Norms: one at the start, two in a block, 2 x width each. "
            "Biases: each block has five layers with width outputs and one with hidden; the pooler has width.",
            "`(positions + segments) * width + (1 + 2 * blocks) * 2 * width + blocks * (5 * width + hidden) + width "
            "+ classes * (width + 1)`",
        ),
        mistakes=(
            Mistake(
                name="no biases",
                answer=_rest_without("biases"),
                message="The biases of the tensorised layers are missing: a train replaces a matrix, not its bias.",
            ),
            Mistake(
                name="no norms",
                answer=_rest_without("norms"),
                message="The norms are missing: one after the embedding, two in every block.",
            ),
            Mistake(
                name="norms without shift",
                answer=_rest_without("norm shifts"),
                message="A norm has two vectors, a scale and a shift: you counted one.",
            ),
            Mistake(
                name="pooler bias forgotten",
                answer=_rest_without("pooler"),
                message="Off by one width: the pooler in front of the last layer has a bias, too.",
            ),
        ),
    ),
    Exercise(
        id="08.2",
        title="Which denominator?",
        wants="a function cores_left(times, denominator, tensorised, rest) that returns a number of core parameters",
        reference=cores_left,
        cases=_cores_cases,
        right="Read as a ratio of whole models, 361 leaves less than nothing for the cores: it cannot be one.",
        hints=(
            'Times smaller is dense over compressed. With "whole", both contain the rest.',
            '"whole": (tensorised + rest) / times is the whole compressed model. "tensorised": tensorised / times.',
            '`(tensorised + rest) / times - rest if denominator == "whole" else tensorised / times`',
        ),
        mistakes=(
            Mistake(
                name="rest not taken off",
                answer=lambda times, name, tensorised, rest: (tensorised + (rest if name == "whole" else 0)) / times,
                message='For "whole" that is the compressed model with its rest. What is left of it for the cores?',
            ),
            Mistake(
                name="rest compressed too",
                answer=lambda times, name, tensorised, rest: tensorised / times,
                message='Right for "tensorised". In a ratio of whole models the rest stands above and below the line.',
            ),
            Mistake(
                name="rest only below",
                answer=lambda times, name, tensorised, rest: tensorised / times - (rest if name == "whole" else 0),
                message="The dense whole has the rest as well: the ratio divides (tensorised + rest).",
            ),
        ),
    ),
    Exercise(
        id="08.3",
        title="Arithmetic of a block",
        wants="a function flops_per_token(tokens, width, hidden, rank) that returns two numbers: dense, tensorised",
        reference=flops_per_token,
        cases=_flop_cases,
        right="Attention between tokens is the same in both: the thinner the layers, the more of the time it takes.",
        hints=(
            "A product of a row with an (a, b) matrix costs 2 a b. Thin first, it costs 2 rank (a + b).",
            "Four layers width x width, two width x hidden, and 4 x tokens x width for attention in both models.",
            "`2 * rank * (4 * 2 * width + 2 * (width + hidden)) + 4 * tokens * width` is the tensorised one.",
        ),
        mistakes=(
            Mistake(
                name="attention left out",
                answer=lambda tokens, *sizes: tuple(n - 4 * tokens * sizes[0] for n in flops_per_token(tokens, *sizes)),
                message="The layers are right. Add attention between tokens, 4 x tokens x width, to both.",
            ),
            Mistake(
                name="attention compressed",
                answer=lambda tokens, width, hidden, rank: (
                    flops_per_token(tokens, width, hidden, rank)[0],
                    flops_per_token(tokens, width, hidden, rank)[1] - 4 * tokens * width,
                ),
                message="No train replaces attention between tokens: both models pay for it.",
            ),
            Mistake(
                name="multiplications only",
                answer=lambda *sizes: tuple(number / 2 for number in flops_per_token(*sizes)),
                message="You count multiplications. Every one is followed by an addition: twice as many FLOPs.",
            ),
        ),
    ),
    Exercise(
        id="08.4",
        title="Can it be done with half the input?",
        wants="a function one_sided(sides, labels) that returns a share from 0 to 1",
        reference=one_sided,
        cases=_side_cases,
        right="At a third for three classes nothing leaks: a model has to read both texts.",
        hints=(
            "Somebody who has seen every label, but reads one text only, says what was most frequent with that text.",
            "For every different text: count its labels, take the largest count. Sum, then divide by all pairs.",
            "`collections.Counter` for each text, `counter.most_common(1)[0][1]`, and `/ len(sides)` at the end.",
        ),
        mistakes=(
            Mistake(
                name="one answer for all",
                answer=lambda sides, labels: max(labels.count(label) for label in set(labels)) / len(labels),
                message="That is the share of the most frequent label, whatever the text. Ask for each text apart.",
            ),
            Mistake(
                name="a third",
                answer=lambda sides, labels: 1 / len(set(labels)),
                message="That is chance. A leak is what lies above it: count how labels go with texts.",
            ),
            Mistake(
                name="mean over texts",
                answer=lambda sides, labels: (
                    sum(
                        one_sided(
                            [s for s in sides if s == side],
                            [k for s, k in zip(sides, labels, strict=True) if s == side],
                        )
                        for side in set(sides)
                    )
                    / len(set(sides))
                ),
                message="You average over texts; a text that stands in many pairs counts as often as it stands there.",
            ),
        ),
    ),
    Exercise(
        id="08.5",
        title="May you say that?",
        wants='a function who_wins(first, second) that returns "first", "second" or "cannot tell"',
        reference=who_wins,
        cases=_win_cases,
        right="A difference inside the spread of the seeds is not a difference. And one seed has no spread to show.",
        hints=(
            "How far do the seeds of one model lie apart? A gap smaller than that says little.",
            "Three seeds or more on both sides, and the worst of one better than the best of the other.",
            '`min(first) > max(second)` for "first", and count the seeds before you look.',
        ),
        mistakes=(
            Mistake(
                name="means",
                answer=_mean_wins,
                message="You compare means. Where the seeds overlap, the next seed may turn it round.",
            ),
            Mistake(
                name="seeds not counted",
                answer=_any_seeds,
                message="Right where there are three seeds each. With one seed the spread is unknown: cannot tell.",
            ),
            Mistake(
                name="best seed",
                answer=_best_wins,
                message="You compare the best seeds: whoever tries more often wins that.",
            ),
        ),
    ),
)
