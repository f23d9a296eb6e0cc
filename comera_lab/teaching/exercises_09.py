"""Exercises of lesson 09: projecting gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake

Direction = Callable[[Tensor], Tensor]


def captured(G: Tensor, P: Tensor) -> float:
    """Share of the energy of G (rows, cols) that a basis P (cols, rank) with orthonormal columns keeps."""
    return float((G @ P).square().sum() / G.square().sum())


def there_and_back(G: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """(projected, lifted back): P (short side, rank) acts on the shorter side of G, lifted is (rows, cols)."""
    if G.shape[0] >= G.shape[1]:
        low = G @ P
        return low, low @ P.T
    low = P.T @ G
    return low, P @ low


def state_elements(rows: int, cols: int, rank: int) -> int:
    """Numbers that a projected Adam keeps for one matrix: two moments and the basis."""
    long, short = max(rows, cols), min(rows, cols)
    return 2 * long * rank + short * rank


def low_rank_step(W: Tensor, G: Tensor, P: Tensor, lr: float, scale: float, adam: Direction) -> Tensor:
    """W (rows, cols) after one step: project G, let Adam choose a direction there, lift it, scale it, subtract."""
    return W - lr * scale * adam(G @ P) @ P.T


def _basis(cols: int, rank: int, generator: torch.Generator) -> Tensor:
    Q: Tensor = torch.linalg.qr(torch.randn(cols, rank, generator=generator)).Q
    return Q


def _captured_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        (torch.randn(rows, cols, generator=generator), _basis(cols, rank, generator))
        for rows, cols, rank in ((12, 8, 3), (9, 9, 1), (7, 5, 4))
    ]


def _back_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        (torch.randn(rows, cols, generator=generator), _basis(min(rows, cols), rank, generator))
        for rows, cols, rank in ((11, 6, 3), (6, 11, 2), (5, 9, 4), (7, 7, 3))
    ]


def _element_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    long, short = torch.randint(300, 900, (2,), generator=generator).tolist()
    return [(2048, 2048, 512), (5461, 2048, 512), (256, 784, 32), (long, short, 16)]


def _by_sign(low: Tensor) -> Tensor:
    """Adam's first step, whatever the betas are: every entry divided by its own size."""
    return low.sign()


def _by_norm(low: Tensor) -> Tensor:
    return low / (low.abs() + 0.5)


def _step_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(rows: int, cols: int, rank: int, scale: float, adam: Direction) -> tuple[Any, ...]:
        W, G = (torch.randn(rows, cols, generator=generator) for _ in range(2))
        return W, G, _basis(cols, rank, generator), 0.1, scale, adam

    return [case(9, 6, 2, 0.25, _by_sign), case(8, 8, 3, 0.5, _by_norm), case(7, 4, 3, 0.25, _by_norm)]


def _always_right(G: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    low = G @ P
    return low, low @ P.T


def _lifted_transposed(G: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    low, lifted = there_and_back(G, P)
    return (low, lifted) if G.shape[0] >= G.shape[1] else (low.T, lifted.T)


EXERCISES = (
    Exercise(
        id="09.1",
        title="How much of a gradient a basis keeps",
        wants="a function captured(G, P) that returns a share between 0 and 1",
        reference=captured,
        cases=_captured_cases,
        right="A sum of squares before and after. The panel draws this number, step by step.",
        hints=(
            "Energy is the sum of all squared entries, as for the singular values of lesson 02.",
            "What is left after projecting is `G @ P`. Compare its energy with that of G.",
            "`(G @ P).square().sum() / G.square().sum()`",
        ),
        mistakes=(
            Mistake(
                name="not squared",
                answer=lambda G, P: (G @ P).norm() / G.norm(),
                message="That is a ratio of norms. Energy is the norm squared: so pieces at right angles add up to 1.",
            ),
            Mistake(
                name="what is lost",
                answer=lambda G, P: 1 - captured(G, P),
                message="That is the share that is lost. Asked is the share that is kept.",
            ),
            Mistake(
                name="share of columns",
                answer=lambda G, P: P.shape[1] / P.shape[0],
                message="rank / cols is what a random basis keeps on average. It depends on G which directions count.",
            ),
            Mistake(
                name="upside down",
                answer=lambda G, P: 1 / captured(G, P),
                message="Upside down: what is kept, over the whole.",
            ),
        ),
    ),
    Exercise(
        id="09.2",
        title="Project and lift, tall and wide",
        wants="a function there_and_back(G, P) that returns the projected gradient and the one lifted back",
        reference=there_and_back,
        cases=_back_cases,
        right="The long side stays, the short side shrinks to the rank. Lifted back it has the shape of the weight.",
        hints=(
            "P has as many rows as the *shorter* side of G: that tells you from which side it can multiply.",
            "Tall or square: `G @ P`, back with `@ P.T`. Wide: `P.T @ G`, back with `P @`.",
            "`if G.shape[0] >= G.shape[1]:` low = G @ P and low @ P.T, else low = P.T @ G and P @ low.",
        ),
        mistakes=(
            Mistake(
                name="always from the right",
                answer=_always_right,
                message="Right for tall gradients. Of a wide one the rows are the short side: P.T from the left.",
            ),
            Mistake(
                name="wide ones transposed",
                answer=_lifted_transposed,
                message="Wide gradients come back transposed: the lifted one must fit the weight, (rows, cols).",
            ),
            Mistake(
                name="not lifted",
                answer=lambda G, P: (there_and_back(G, P)[0],) * 2,
                message="The first is right. The second must be lifted back to the shape of G.",
            ),
            Mistake(
                name="other order",
                answer=lambda G, P: there_and_back(G, P)[::-1],
                message="Both are right, in the other order: first the projected one, then the lifted one.",
            ),
        ),
    ),
    Exercise(
        id="09.3",
        title="What the optimizer keeps",
        wants="a function state_elements(rows, cols, rank) that returns a whole number",
        reference=state_elements,
        cases=_element_cases,
        right="Two moments on the long side, and the basis on the short one. Times the bytes of a number, that is all.",
        hints=(
            "Adam keeps two moments of what it sees. What it sees has the long side and the rank.",
            "Do not forget the basis: (short side) x rank.",
            "`2 * max(rows, cols) * rank + min(rows, cols) * rank`",
        ),
        mistakes=(
            Mistake(
                name="no basis",
                answer=lambda rows, cols, rank: 2 * max(rows, cols) * rank,
                message="The moments are right. The basis has to be kept as well, min(rows, cols) x rank numbers.",
            ),
            Mistake(
                name="short side kept",
                answer=lambda rows, cols, rank: 2 * min(rows, cols) * rank + max(rows, cols) * rank,
                message="The sides are swapped: the basis acts on the short side, so the moments keep the long one.",
            ),
            Mistake(
                name="one moment",
                answer=lambda rows, cols, rank: (rows + cols) * rank,
                message="That is one moment and the basis. Adam keeps two: a mean and a mean of squares.",
            ),
            Mistake(
                name="not projected",
                answer=lambda rows, cols, rank: 2 * rows * cols,
                message="That is AdamW without any projection. Here the moments live in the small space.",
            ),
        ),
    ),
    Exercise(
        id="09.4",
        title="One step in the small space",
        wants="a function low_rank_step(W, G, P, lr, scale, adam) that returns the new weight",
        reference=low_rank_step,
        cases=_step_cases,
        right="Project, let Adam work on the small matrix, lift, subtract. That is GaLore.",
        hints=(
            "Four things, in this order: project, adam, lift, subtract.",
            "`adam` takes the projected gradient and returns a direction of the same small shape.",
            "`W - lr * scale * adam(G @ P) @ P.T`",
        ),
        mistakes=(
            Mistake(
                name="adam on the full gradient",
                answer=lambda W, G, P, lr, scale, adam: W - lr * scale * adam(G) @ P @ P.T,
                message="Adam sees the full gradient here, so its moments would be full-size: nothing is saved. "
                "Project first.",
            ),
            Mistake(
                name="adam after lifting",
                answer=lambda W, G, P, lr, scale, adam: W - lr * scale * adam(G @ P @ P.T),
                message="Adam comes after lifting here, where everything is full-size again. It belongs in between.",
            ),
            Mistake(
                name="scale forgotten",
                answer=lambda W, G, P, lr, scale, adam: W - lr * adam(G @ P) @ P.T,
                message="The direction is right; `scale` is missing. GaLore multiplies each lifted step by 0.25.",
            ),
            Mistake(
                name="uphill",
                answer=lambda W, G, P, lr, scale, adam: W + lr * scale * adam(G @ P) @ P.T,
                message="The sign is wrong: this walks uphill. The step is subtracted.",
            ),
            Mistake(
                name="the step alone",
                answer=lambda W, G, P, lr, scale, adam: lr * scale * adam(G @ P) @ P.T,
                message="That is the step. Wanted is the new weight, W minus the step.",
            ),
        ),
    ),
)
