"""Exercises of lesson 15: beyond one machine."""

from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake, WrongAnswer


def bytes_in_process(weights: int, processes: int, split: bool) -> float:
    """Bytes of weights, gradients and AdamW's moments in one process, in fp32."""
    return 16 * weights / (processes if split else 1)


def batch_gradient(means: list[Tensor], rows: list[int]) -> Tensor:
    """Mean gradient of each process and its number of rows -> mean gradient of the whole batch."""
    total = sum(rows)
    return torch.stack([mean * count / total for mean, count in zip(means, rows, strict=True)]).sum(dim=0)


def shared_refresh(parts: list[Tensor], P: Tensor) -> Tensor:
    """Rows of G (own rows, cols) in each process, basis P (cols, rank) -> refreshed basis (cols, rank)."""
    added = torch.stack([part.T @ (part @ P) for part in parts]).sum(dim=0)
    Q: Tensor = torch.linalg.qr(added).Q
    return Q


def _byte_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = int(torch.randint(1000, 9000, (1,), generator=generator))
    return [(1_000_000, 4, True), (1_000_000, 4, False), (drawn, 8, True), (drawn, 1, True)]


def _mean_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(rows: list[int]) -> tuple[list[Tensor], list[int]]:
        return [torch.randn(5, 3, generator=generator) for _ in rows], rows

    return [case([32, 32]), case([13, 13, 12, 12]), case([64, 0]), case([7])]


def _refresh_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(rows: list[int], cols: int, rank: int) -> tuple[list[Tensor], Tensor]:
        parts = [torch.randn(count, cols, generator=generator) for count in rows]
        return parts, torch.linalg.qr(torch.randn(cols, rank, generator=generator)).Q

    return [case([12, 12], 9, 3), case([10, 7, 4], 8, 2), case([20], 6, 2)]


def _basis_view(output: Any, args: tuple[Any, ...]) -> Any:
    """The projector P P^T: the columns of a basis have free signs."""
    want = tuple(args[1].shape)
    if not isinstance(output, Tensor):
        raise WrongAnswer("type", "Return one tensor, the new basis.")
    if output.shape != want:
        raise WrongAnswer("shape", f"The new basis must be {want}, as the old one; got {tuple(output.shape)}.")
    return output @ output.T


def _mean_of_bases(parts: list[Tensor], P: Tensor) -> Tensor:
    return torch.stack([torch.linalg.qr(part.T @ (part @ P)).Q for part in parts]).mean(dim=0)


def _first_only(parts: list[Tensor], P: Tensor) -> Tensor:
    Q: Tensor = torch.linalg.qr(parts[0].T @ (parts[0] @ P)).Q
    return Q


def _not_orthonormal(parts: list[Tensor], P: Tensor) -> Tensor:
    return torch.stack([part.T @ (part @ P) for part in parts]).sum(dim=0)


EXERCISES = (
    Exercise(
        id="15.1",
        title="Bytes in one process",
        wants="a function bytes_in_process(weights, processes, split) that returns one number",
        reference=bytes_in_process,
        cases=_byte_cases,
        right="DDP buys time and no memory. FSDP divides all three pools; activations stay what they are.",
        hints=(
            "Count numbers for each weight: itself, its gradient, two moments.",
            "Four numbers of four bytes. Who holds them, with and without a split?",
            "`16 * weights / (processes if split else 1)`",
        ),
        mistakes=(
            Mistake(
                name="DDP divides",
                answer=lambda weights, processes, split: 16 * weights / processes,
                message="Without a split (DDP) every process has its own copy of everything: nothing is divided.",
            ),
            Mistake(
                name="only the optimizer is split",
                answer=lambda weights, processes, split: 8 * weights + 8 * weights / (processes if split else 1),
                message="FSDP splits weights and gradients as well, not only the optimizer's moments.",
            ),
            Mistake(
                name="numbers, not bytes",
                answer=lambda weights, processes, split: 4 * weights / (processes if split else 1),
                message="Those are numbers. A number in fp32 has four bytes.",
            ),
        ),
    ),
    Exercise(
        id="15.2",
        title="The gradient of the whole batch",
        wants="a function batch_gradient(means, rows) that returns one tensor",
        reference=batch_gradient,
        cases=_mean_cases,
        right="Each row counts once, wherever it was computed. A plain mean is right for equal parts alone.",
        hints=(
            "A process with twice the rows should count twice.",
            "Turn each mean back into a sum, add up, divide by all rows.",
            "`sum(mean * count for mean, count in zip(means, rows)) / sum(rows)`",
        ),
        mistakes=(
            Mistake(
                name="plain mean",
                answer=lambda means, rows: torch.stack(means).mean(dim=0),
                message="Right for equal parts. The last batch of an epoch may give 13 rows to one process and 12 to "
                "another: weigh each mean with its rows.",
            ),
            Mistake(
                name="sum",
                answer=lambda means, rows: torch.stack(means).sum(dim=0),
                message="A sum of means grows with the number of processes, and so would the step.",
            ),
            Mistake(
                name="sum of all rows",
                answer=lambda means, rows: torch.stack(
                    [mean * count for mean, count in zip(means, rows, strict=True)]
                ).sum(dim=0),
                message="That is the sum over all rows. The mean of the batch divides it by their number.",
            ),
        ),
    ),
    Exercise(
        id="15.3",
        title="One basis for all",
        wants="a function shared_refresh(parts, P) that returns the new basis (cols, rank)",
        reference=shared_refresh,
        cases=_refresh_cases,
        view=_basis_view,
        right="G is never put together: what travels is (cols x rank) from each process, and all get the same basis.",
        hints=(
            "G^T G P is a sum over the rows of G, and the rows are what the processes have.",
            "Each process makes part.T @ (part @ P). Add these up, then make the columns orthonormal.",
            "`torch.linalg.qr(sum(part.T @ (part @ P) for part in parts)).Q`",
        ),
        mistakes=(
            Mistake(
                name="mean of bases",
                answer=_mean_of_bases,
                message="A mean of bases is no basis: signs are free, and columns of different processes do not match. "
                "Add up first, make orthonormal after.",
            ),
            Mistake(
                name="first process only",
                answer=_first_only,
                message="That is what one process sees. The other rows of the gradient count as well.",
            ),
            Mistake(
                name="not orthonormal",
                answer=_not_orthonormal,
                message="The span is right; the columns must be made orthonormal too: `torch.linalg.qr(..).Q`.",
            ),
        ),
    ),
)
