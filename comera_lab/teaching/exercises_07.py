"""Exercises of lesson 07: embedding tables and recommendation."""

import math
from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake

Grid = dict[str, dict[float, tuple[float, float]]]


def table_params(row_modes: tuple[int, ...], column_modes: tuple[int, ...], ranks: tuple[int, ...]) -> int:
    """Numbers in all cores of a TT-matrix, core k being (ranks[k], row mode, column mode, ranks[k + 1])."""
    pairs = zip(row_modes, column_modes, strict=True)
    return sum(ranks[k] * v * h * ranks[k + 1] for k, (v, h) in enumerate(pairs))


def table_row(index: int, cores: list[Tensor]) -> Tensor:
    """Row `index` of the table with cores (r, v, h, r'), from one slice of each core."""
    digits = []
    for core in reversed(cores):
        index, digit = divmod(index, core.shape[1])
        digits.append(digit)
    row = torch.ones(1, 1)
    for core, digit in zip(cores, reversed(digits), strict=True):
        row = torch.tensordot(row, core[:, digit], dims=1).reshape(-1, core.shape[3])
    return row.flatten()


def fair_tests(grid: Grid) -> list[float]:
    """Test score of every method at the rate that is best for it on dev. grid: method -> rate -> (dev, test)."""
    return [max(tried.values(), key=lambda pair: pair[0])[1] for tried in grid.values()]


def renumber(train_ids: Tensor, test_ids: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Both with their ids renumbered: id i becomes fresh[i]."""
    return fresh[train_ids], fresh[test_ids]


def gain_kept(without: list[float], dense: list[float], small: list[float]) -> Any:
    """Share of the gain of dense tables that small ones keep; "no test" where dense tables gain nothing for sure."""
    if min(dense) <= max(without):
        return "no test"
    gain = sum(dense) / len(dense) - sum(without) / len(without)
    return (sum(small) / len(small) - sum(without) / len(without)) / gain


def _count_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = [int(n) for n in torch.randint(2, 9, (6,), generator=generator)]
    return [
        ((100, 100, 100), (4, 4, 4), (1, 16, 16, 1)),
        ((16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1)),
        (tuple(drawn[:2]), tuple(drawn[2:4]), (1, drawn[4], 1)),
    ]


def _row_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def cores(rows: tuple[int, ...], columns: tuple[int, ...], ranks: tuple[int, ...]) -> list[Tensor]:
        return [
            torch.randn(ranks[k], v, h, ranks[k + 1], generator=generator)
            for k, (v, h) in enumerate(zip(rows, columns, strict=True))
        ]

    three = cores((3, 4, 5), (2, 3, 2), (1, 2, 3, 1))
    return [(0, three), (37, three), (59, three), (11, cores((4, 6), (3, 2), (1, 4, 1)))]


def _grid_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    a, b, c = (float(x) for x in torch.rand(3, generator=generator))
    return [
        ({"dense": {1e-3: (0.80, 0.79), 1e-2: (0.76, 0.75)}, "tt": {1e-3: (0.77, 0.77), 1e-2: (0.81, 0.80)}},),
        ({"dense": {1e-3: (0.70, 0.74), 1e-2: (0.72, 0.71)}, "hash": {1e-3: (0.71, 0.69), 1e-2: (0.60, 0.73)}},),
        ({"one": {1.0: (a, 0.1), 2.0: (a + 0.1, 0.2), 3.0: (b - 1, 0.3)}, "two": {1.0: (c + 2, 0.4), 2.0: (c, 0.6)}},),
    ]


def _id_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(vocabulary: int) -> tuple[Any, ...]:
        train = torch.randint(0, vocabulary, (12,), generator=generator)
        test = torch.randint(0, vocabulary, (7,), generator=generator)
        return train, test, torch.randperm(vocabulary, generator=generator)

    return [case(6), case(20)]


def _gain_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        ([0.766, 0.763, 0.765], [0.808, 0.808, 0.808], [0.806, 0.804, 0.805]),
        ([0.754, 0.753, 0.755], [0.753, 0.755, 0.754], [0.754, 0.753, 0.755]),
        ([0.70, 0.72], [0.80, 0.82], [0.70, 0.70]),
        ([0.70, 0.75], [0.74, 0.80], [0.78, 0.79]),
    ]


def _row_backwards(index: int, cores: list[Tensor]) -> Tensor:
    digits = []
    for core in cores:
        index, digit = divmod(index, core.shape[1])
        digits.append(digit)
    rows = [core.shape[1] for core in cores]
    place = sum(digit * math.prod(rows[k + 1 :]) for k, digit in enumerate(digits))
    return table_row(place, cores)


def _row_clipped(index: int, cores: list[Tensor]) -> Tensor:
    rows = [core.shape[1] for core in cores]
    place = sum((index % v) * math.prod(rows[k + 1 :]) for k, v in enumerate(rows))
    return table_row(place, cores)


def _same_rate(grid: Grid) -> list[float]:
    first = next(iter(next(iter(grid.values()))))
    return [tried[first][1] for tried in grid.values()]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


EXERCISES = (
    Exercise(
        id="07.1",
        title="Count a TT-matrix",
        wants="a function table_params(row_modes, column_modes, ranks) that returns a whole number",
        reference=table_params,
        cases=_count_cases,
        right="A core has its row mode AND its column mode. The published counter forgot the second one.",
        hints=(
            "One core for each pair of modes, with a rank on either side: four axes.",
            "Core k has ranks[k] x row_modes[k] x column_modes[k] x ranks[k + 1] numbers; add them up.",
            "`sum(ranks[k] * row_modes[k] * column_modes[k] * ranks[k + 1] for k in range(len(row_modes)))`",
        ),
        mistakes=(
            Mistake(
                name="column modes forgotten",
                answer=lambda rows, columns, ranks: table_params(rows, (1,) * len(rows), ranks),
                message="The column modes are missing: a core holds a piece of every row's numbers, too.",
            ),
            Mistake(
                name="one core per mode",
                answer=lambda rows, columns, ranks: sum(
                    ranks[k] * (v + h) * ranks[k + 1] for k, (v, h) in enumerate(zip(rows, columns, strict=True))
                ),
                message="You add row and column mode. They are two axes of one core: multiply them.",
            ),
            Mistake(
                name="the dense table",
                answer=lambda rows, columns, ranks: math.prod(rows) * math.prod(columns),
                message="That is the dense table. A train adds its cores up; their products are never stored.",
            ),
        ),
    ),
    Exercise(
        id="07.2",
        title="One row from the cores",
        wants="a function table_row(index, cores) that returns a tensor with the numbers of that row",
        reference=table_row,
        cases=_row_cases,
        right="One slice of each core, one small product for each bond: the table was never there.",
        hints=(
            "Write the index as digits, as a clock does with hours, minutes, seconds. The LAST mode is the fastest.",
            "From the last core to the first: `index, digit = divmod(index, core.shape[1])`. "
            "Each digit picks `core[:, digit]`.",
            "Start with `torch.ones(1, 1)`; for each core `torch.tensordot(row, core[:, digit], dims=1)`, then reshape "
            "to (-1, right rank).",
        ),
        mistakes=(
            Mistake(
                name="first mode fastest",
                answer=_row_backwards,
                message="Your digits run the other way: the last mode is the one that changes with every id.",
            ),
            Mistake(
                name="remainder of each mode",
                answer=_row_clipped,
                message="You take index % mode for every core. After each digit the index has to be divided as well.",
            ),
            Mistake(
                name="always the first row",
                answer=lambda index, cores: table_row(0, cores),
                message="That is row 0, whatever the index is.",
            ),
        ),
    ),
    Exercise(
        id="07.3",
        title="A rate for each method",
        wants="a function fair_tests(grid) that returns one test score for each method",
        reference=fair_tests,
        cases=_grid_cases,
        right="Each at its best, chosen on dev, judged on test. At one rate for all you measure whom the rate suits.",
        hints=(
            "Two steps: choose the rate of a method on dev; then look at its test score, once.",
            "For each method: the (dev, test) pair with the largest dev. Return its test.",
            "`[max(tried.values(), key=lambda pair: pair[0])[1] for tried in grid.values()]`",
        ),
        mistakes=(
            Mistake(
                name="one rate for all",
                answer=_same_rate,
                message="All methods at the first rate: whoever would like another one loses by your choice.",
            ),
            Mistake(
                name="chosen on test",
                answer=lambda grid: [max(test for _, test in tried.values()) for tried in grid.values()],
                message="You choose by the test score. Then it is no test any more: choose on dev.",
            ),
            Mistake(
                name="dev reported",
                answer=lambda grid: [max(dev for dev, _ in tried.values()) for tried in grid.values()],
                message="The rate is chosen rightly, but you return dev scores: the best of several tries flatters.",
            ),
        ),
    ),
    Exercise(
        id="07.4",
        title="The shuffled control",
        wants="a function renumber(train_ids, test_ids, fresh) that returns both, renumbered",
        reference=renumber,
        cases=_id_cases,
        right="One new numbering for both sides. Only the order of ids is gone: what is lost now came from it.",
        hints=(
            "Every id gets a new number, the same wherever it stands.",
            "`fresh` is a list to look up in: the new number of id i is fresh[i].",
            "`return fresh[train_ids], fresh[test_ids]`",
        ),
        mistakes=(
            Mistake(
                name="rows shuffled",
                answer=lambda train, test, fresh: (
                    train[torch.argsort(fresh[train], stable=True)],
                    test[torch.argsort(fresh[test], stable=True)],
                ),
                message="You move rows and keep their ids: flights come in another order, and nothing has changed.",
            ),
            Mistake(
                name="train alone",
                answer=lambda train, test, fresh: (fresh[train], test),
                message="The test side keeps the old numbers: now every flight looks up the row of another one.",
            ),
            Mistake(
                name="inverse",
                answer=lambda train, test, fresh: (torch.argsort(fresh)[train], torch.argsort(fresh)[test]),
                message="A renumbering too, but the inverse of the one asked for: id i becomes fresh[i].",
            ),
        ),
    ),
    Exercise(
        id="07.5",
        title="Is it a test of compression?",
        wants='a function gain_kept(without, dense, small) that returns a share, or "no test"',
        reference=gain_kept,
        cases=_gain_cases,
        right="Where large tables gain nothing, compression is free and proves nothing. Ask for the baseline.",
        hints=(
            "First question: do the dense tables gain anything over a model without them, in every seed?",
            'If the worst dense seed is not above the best seed without: "no test". Else compare means.',
            "`(mean(small) - mean(without)) / (mean(dense) - mean(without))`",
        ),
        mistakes=(
            Mistake(
                name="never asked",
                answer=lambda without, dense, small: (
                    (_mean(small) - _mean(without)) / ((_mean(dense) - _mean(without)) or 1.0)
                ),
                message='The share is right where there is a gain. Where the seeds of both overlap, say "no test".',
            ),
            Mistake(
                name="share of dense",
                answer=lambda without, dense, small: (
                    "no test" if min(dense) <= max(without) else _mean(small) / _mean(dense)
                ),
                message="You divide by the dense score. Most of it is there without the tables: compare gains.",
            ),
            Mistake(
                name="gain lost",
                answer=lambda without, dense, small: (
                    "no test" if min(dense) <= max(without) else 1 - gain_kept(without, dense, small)
                ),
                message="That is the share that is lost. Asked for is what is kept.",
            ),
        ),
    ),
)
