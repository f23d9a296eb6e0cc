"""Exercises of lesson 02: low rank, the SVD as a knife."""

from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake


def truncate(W: Tensor, rank: int) -> Tensor:
    """(rows, columns) -> the nearest matrix of that rank, same shape (Eckart and Young, 1936)."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    kept: Tensor = U[:, :rank] * S[:rank] @ Vh[:rank]
    return kept


def truncation_error(S: Tensor, rank: int) -> float:
    """Frobenius norm of what is cut away when `rank` singular values are kept."""
    return float(S[rank:].square().sum().sqrt())


def rank_for_energy(S: Tensor, energy: float) -> int:
    """The smallest rank whose squared singular values hold the share `energy` (0 to 1) of the whole."""
    share = S.square().cumsum(0) / S.square().sum()
    return int((share < energy).sum()) + 1


def break_even_rank(rows: int, columns: int) -> int:
    """The largest rank whose two factors hold fewer numbers than the matrix."""
    return (rows * columns - 1) // (rows + columns)


def _matrix(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    decay = torch.logspace(0.5, -1.0, columns)
    return torch.randn(rows, columns, generator=generator) * decay


def _truncate_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [(_matrix(generator, 9, 6), 3), (_matrix(generator, 5, 8), 2), (_matrix(generator, 6, 6), 1)]


def _spectra(generator: torch.Generator) -> list[Tensor]:
    drawn = torch.rand(12, generator=generator).sort(descending=True).values * 5
    return [torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5]), drawn + 0.1]


def _error_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    short, long = _spectra(generator)
    return [(short, 2), (long, 5), (long, 0), (short, 5)]


def _energy_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    short, long = _spectra(generator)
    return [(short, 0.9), (long, 0.5), (long, 0.99), (short, 0.3), (long, 0.8)]


def _break_even_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    draw = torch.randint(50, 400, (2,), generator=generator).tolist()
    return [(512, 784), (10, 10), (12, 12), tuple(draw), (3, 1000)]


def _no_singular_values(W: Tensor, rank: int) -> Tensor:
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    kept: Tensor = U[:, :rank] @ Vh[:rank]
    return kept


def _smallest_kept(W: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    kept: Tensor = U[:, -rank:] * S[-rank:] @ Vh[-rank:]
    return kept


def _transposed_again(W: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    kept: Tensor = U[:, :rank] * S[:rank] @ Vh.T[:rank]
    return kept


EXERCISES = (
    Exercise(
        id="02.1",
        title="Cut a matrix down to rank r",
        wants="a function truncate(W, rank) that returns a matrix of the shape of W",
        reference=truncate,
        cases=_truncate_cases,
        right="No matrix of that rank is nearer to W (Eckart and Young, 1936).",
        hints=(
            "`torch.linalg.svd(W, full_matrices=False)` gives U, S and Vh. How many columns and rows do you keep?",
            "Keep the first `rank` columns of U, values of S and rows of Vh; then multiply the three again.",
            "`U[:, :rank] * S[:rank] @ Vh[:rank]`: the product with S scales the columns of U.",
        ),
        mistakes=(
            Mistake(
                name="forgot the singular values",
                answer=_no_singular_values,
                message="The singular values S are missing: U and Vh only hold directions, S holds the sizes.",
            ),
            Mistake(
                name="kept the smallest",
                answer=_smallest_kept,
                message="These are the smallest singular values. S is sorted, largest first: keep the front.",
            ),
            Mistake(
                name="transposed Vh",
                answer=_transposed_again,
                message="torch already returns V transposed (that is the h in Vh): no .T is needed.",
            ),
            Mistake(
                name="one too many",
                answer=lambda W, rank: truncate(W, rank + 1),
                message="One direction too many: `[:rank]` already keeps `rank` of them, 0 up to rank - 1.",
            ),
            Mistake(
                name="what was cut away",
                answer=lambda W, rank: W - truncate(W, rank),
                message="This is the part that was cut away. Return the part that is kept.",
            ),
            Mistake(name="unchanged", answer=lambda W, rank: W, message="This is W itself, at full rank."),
        ),
    ),
    Exercise(
        id="02.2",
        title="The error, from the spectrum alone",
        wants="a function truncation_error(S, rank) that returns one number: the Frobenius norm of what is cut away",
        reference=truncation_error,
        cases=_error_cases,
        right="The tail of the spectrum is the whole error: you know it before you cut.",
        hints=(
            "The Frobenius norm of a matrix is the root of the sum of its squared singular values.",
            "What is cut away has the singular values from position `rank` on.",
            "`S[rank:].square().sum().sqrt()`",
        ),
        mistakes=(
            Mistake(
                name="forgot the root",
                answer=lambda S, rank: float(S[rank:].square().sum()),
                message="The sum of squares is right; its square root is missing.",
            ),
            Mistake(
                name="forgot the squares",
                answer=lambda S, rank: float(S[rank:].sum()),
                message="The values are added as they are. Square them first, take the root of the sum last.",
            ),
            Mistake(
                name="head, not tail",
                answer=lambda S, rank: float(S[:rank].square().sum().sqrt()),
                message="That is the size of what is kept. The error is the size of the tail, from `rank` on.",
            ),
            Mistake(
                name="largest of the tail",
                answer=lambda S, rank: float(S[rank]) if rank < len(S) else 0.0,
                message="That is the largest of the tail, the error in the spectral norm. Frobenius adds up all of it.",
            ),
            Mistake(
                name="off by one",
                answer=lambda S, rank: float(S[rank + 1 :].square().sum().sqrt()),
                message="Off by one: Python counts from 0, so the first value cut away is `S[rank]`.",
            ),
            Mistake(
                name="relative",
                answer=lambda S, rank: float(S[rank:].norm() / S.norm()),
                message="This is relative to the norm of W. Here the error itself is wanted.",
            ),
        ),
    ),
    Exercise(
        id="02.3",
        title="The rank for a share of the energy",
        wants="a function rank_for_energy(S, energy) that returns a whole number; energy is a fraction from 0 to 1",
        reference=rank_for_energy,
        cases=_energy_cases,
        right="Energy counts squares, so the first few directions weigh far more than their number.",
        hints=(
            "Energy is the sum of the squares of S. How much of it do the first 1, 2, 3 ... values hold?",
            "`S.square().cumsum(0) / S.square().sum()` is that share for every rank at once.",
            "Count how many shares are still below `energy`, and add 1.",
        ),
        mistakes=(
            Mistake(
                name="not squared",
                answer=lambda S, energy: int(((S.cumsum(0) / S.sum()) < energy).sum()) + 1,
                message="The singular values are added as they are. Energy is the sum of their squares.",
            ),
            Mistake(
                name="off by one",
                answer=lambda S, energy: rank_for_energy(S, energy) - 1,
                message="One too few: an index counts from 0, a rank from 1.",
            ),
            Mistake(
                name="share of the rank",
                answer=lambda S, energy: round(energy * len(S)),
                message="That is a share of the rank. 90 % of the energy is not 90 % of the rank.",
            ),
            Mistake(
                name="percentage",
                answer=lambda S, energy: rank_for_energy(S, min(energy / 100, 1.0)),
                message="energy is a fraction here, 0.9 and not 90: do not divide by 100.",
            ),
            Mistake(
                name="relative error",
                answer=lambda S, energy: next(
                    r for r in range(1, len(S) + 1) if float(S[r:].norm() / S.norm()) <= 1 - energy
                ),
                message="This compares norms. Energy is squared: the tail may hold 1 - energy of the squares.",
            ),
        ),
    ),
    Exercise(
        id="02.4",
        title="When two factors stop being smaller",
        wants="a function break_even_rank(rows, columns): the largest rank whose factors hold fewer numbers than W",
        reference=break_even_rank,
        cases=_break_even_cases,
        right="Above it, low rank costs memory instead of saving it.",
        hints=(
            "How many numbers are in a (rows, rank) factor and a (rank, columns) factor together?",
            "rank * (rows + columns) must be smaller than rows * columns; equal is not smaller.",
            "Whole-number division, just below the limit: `(rows * columns - 1) // (rows + columns)`",
        ),
        mistakes=(
            Mistake(
                name="full rank",
                answer=lambda rows, columns: min(rows, columns),
                message="That is the full rank. The factors outgrow the matrix long before it.",
            ),
            Mistake(
                name="equal counts as smaller",
                answer=lambda rows, columns: rows * columns // (rows + columns),
                message="Nearly: where the division comes out even, the factors hold as many numbers, not fewer.",
            ),
            Mistake(
                name="not a whole number",
                answer=lambda rows, columns: rows * columns / (rows + columns),
                message="The limit is right; a rank is a whole number strictly below it.",
            ),
            Mistake(
                name="upside down",
                answer=lambda rows, columns: (rows + columns) / (rows * columns),
                message="The ratio is upside down: rank * (rows + columns) < rows * columns.",
            ),
            Mistake(
                name="one factor",
                answer=lambda rows, columns: min(rows, columns) - 1,
                message="That counts one factor only. There are two: rank * rows and rank * columns.",
            ),
        ),
    ),
)
