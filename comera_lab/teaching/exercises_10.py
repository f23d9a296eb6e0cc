"""Exercises of lesson 10: COAP."""

from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake, WrongAnswer

BLOCK = 16


def warm_refresh(G: Tensor, P: Tensor) -> Tensor:
    """New basis (cols, rank) of G (rows, cols) from the old one: look with P, make orthonormal, small SVD."""
    Q = torch.linalg.qr(G @ P).Q
    Vh: Tensor = torch.linalg.svd(Q.T @ G, full_matrices=False).Vh
    return Vh.T


def move_factor(c: float, scale_free: bool) -> float:
    """How many times longer a step of fixed rate on the basis becomes when the gradient is multiplied by c."""
    return 1.0 if scale_free else c**2


def quantize(x: Tensor, code: Tensor) -> tuple[Tensor, float]:
    """x (n,), code (256,) in [-1, 1] -> (index of the nearest code of each x / scale, scale = largest |x|)."""
    scale = float(x.abs().max())
    return (x[:, None] / scale - code).abs().argmin(dim=1), scale


def optimizer_elements(projected: list[tuple[int, int]], rest: list[int], rank: int) -> int:
    """Numbers that COAP-AdamW keeps: projected matrices (rows, cols), and other tensors by their element counts."""
    low = sum((2 * max(shape) + min(shape)) * rank for shape in projected)
    return low + 2 * sum(rest)


def _refresh_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    """Spectra that fall slowly: there one warm step and a full SVD are not the same."""

    def case(rows: int, cols: int, rank: int) -> tuple[Tensor, Tensor]:
        left, right, old = (
            torch.linalg.qr(torch.randn(*shape, generator=generator)).Q
            for shape in ((rows, cols), (cols, cols), (cols, rank))
        )
        values = torch.arange(1, cols + 1) ** -0.5
        return left * values @ right.T, old

    return [case(24, 16, 4), case(16, 16, 3), case(20, 9, 2)]


def _factor_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = float(torch.rand(1, generator=generator)) + 0.1
    return [(0.01, False), (0.01, True), (10.0, False), (drawn, False), (drawn, True)]


def _quantize_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    code = torch.cat([-torch.logspace(-4, 0, 127).flip(0), torch.zeros(1), torch.logspace(-4, 0, 128)])
    wide = torch.randn(BLOCK, generator=generator) * 3e-4
    negative = -torch.rand(BLOCK, generator=generator)
    negative[0] = -2.0
    return [(wide, code), (negative, code), (torch.randn(BLOCK, generator=generator) * 40, code)]


def _element_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    rows, cols = torch.randint(200, 600, (2,), generator=generator).tolist()
    return [
        ([(2048, 2048), (5461, 2048), (2048, 5461)], [65_536_000, 2048], 512),
        ([(rows, cols), (cols, rows)], [rows], 16),
        ([(64, 64)], [], 8),
    ]


def _basis_view(output: Any, args: tuple[Any, ...]) -> Any:
    """The projector P P^T: the columns of a basis have free signs."""
    rank, cols = args[1].shape[1], args[0].shape[1]
    if not isinstance(output, Tensor):
        raise WrongAnswer("type", "Return one tensor, the new basis.")
    if output.shape == (rank, cols) and rank != cols:
        raise WrongAnswer("shape", f"The shape is {(rank, cols)}: transpose it, a basis is (cols, rank).")
    if output.shape != (cols, rank):
        raise WrongAnswer("shape", f"The new basis must be {(cols, rank)}, as the old one; got {tuple(output.shape)}.")
    return output @ output.T


def _codes_view(output: Any, args: tuple[Any, ...]) -> Any:
    """(what the codes stand for, scale): two codes may be equally near."""
    if not isinstance(output, list | tuple) or len(output) != 2 or not isinstance(output[0], Tensor):
        raise WrongAnswer("type", "Return two things: the codes, a tensor of whole numbers, and the scale.")
    codes, scale = output
    if codes.is_floating_point() or codes.shape != args[0].shape:
        raise WrongAnswer("value", f"The codes must be {len(args[0])} whole numbers, places in `code`, not its values.")
    if int(codes.min()) < 0 or int(codes.max()) >= len(args[1]):
        raise WrongAnswer("value", f"A code is a place in `code`: from 0 to {len(args[1]) - 1}.")
    return args[1][codes.long()], scale


def _not_warm(G: Tensor, P: Tensor) -> Tensor:
    Vh: Tensor = torch.linalg.svd(G, full_matrices=False).Vh
    return Vh[: P.shape[1]].T


def _not_orthonormal(G: Tensor, P: Tensor) -> Tensor:
    Q: Tensor = torch.linalg.qr(G @ P).Q
    return (Q.T @ G).T


def _floor(x: Tensor, code: Tensor) -> tuple[Tensor, float]:
    scale = float(x.abs().max())
    return (torch.searchsorted(code, x / scale, right=True) - 1).clamp(0, 255), scale


def _no_scale(x: Tensor, code: Tensor) -> tuple[Tensor, float]:
    return (x[:, None] - code).abs().argmin(dim=1), float(x.abs().max())


def _largest_not_absolute(x: Tensor, code: Tensor) -> tuple[Tensor, float]:
    scale = float(x.max())
    return (x[:, None] / scale - code).abs().argmin(dim=1), scale


EXERCISES = (
    Exercise(
        id="10.1",
        title="A refresh in three lines",
        wants="a function warm_refresh(G, P) that returns the new basis (cols, rank)",
        reference=warm_refresh,
        cases=_refresh_cases,
        view=_basis_view,
        right="Two thin products, a thin QR, the SVD of a flat matrix. Nothing of size rows x cols was decomposed.",
        hints=(
            "Where does G send the old directions? `G @ P` has only `rank` columns.",
            "Make those columns orthonormal (`torch.linalg.qr`), look at G through them: `Q.T @ G` is (rank, cols).",
            "`Q = torch.linalg.qr(G @ P).Q`, then `torch.linalg.svd(Q.T @ G, full_matrices=False).Vh.T`.",
        ),
        mistakes=(
            Mistake(
                name="full SVD",
                answer=_not_warm,
                message="That is the full SVD of G: the best basis, at the full price, and the old basis is not used. "
                "Start from `G @ P`.",
            ),
            Mistake(
                name="not orthonormal",
                answer=_not_orthonormal,
                message="The directions are right, but `Q.T @ G` carries the size of G. A basis has orthonormal "
                "columns: the rows of Vh in its SVD.",
            ),
            Mistake(
                name="old basis",
                answer=lambda G, P: P,
                message="That is the old basis. G has changed since then: look at it through P.",
            ),
        ),
    ),
    Exercise(
        id="10.2",
        title="Units of a loss",
        wants="a function move_factor(c, scale_free) that returns one number",
        reference=move_factor,
        cases=_factor_cases,
        right="The loss has the unit of a gradient squared, and the rate has none that could make up for it. "
        "Dividing by the size of G first removes the unit.",
        hints=(
            "Put c * G in the place of G. By what factor does the mean of squares grow?",
            "The basis has no unit: the gradient of the loss with respect to it grows exactly as the loss does.",
            "`1.0 if scale_free else c**2`",
        ),
        mistakes=(
            Mistake(
                name="linear",
                answer=lambda c, scale_free: 1.0 if scale_free else c,
                message="The loss is a mean of *squares* of the gradient: it grows with c * c.",
            ),
            Mistake(
                name="no unit",
                answer=lambda c, scale_free: 1.0,
                message="Right for the scale-free loss. The published one compares c * G with c * G P P^T, squared.",
            ),
            Mistake(
                name="never free",
                answer=lambda c, scale_free: c**2,
                message="Right for the published loss. The scale-free one divides by the size of G first: "
                "c is gone before the loss is taken.",
            ),
            Mistake(
                name="cubic",
                answer=lambda c, scale_free: 1.0 if scale_free else c**3,
                message="One c too many: the derivative is taken with respect to P, which does not grow with G.",
            ),
        ),
    ),
    Exercise(
        id="10.3",
        title="Eight bits",
        wants="a function quantize(x, code) that returns the codes of one block and its scale",
        reference=quantize,
        cases=_quantize_cases,
        view=_codes_view,
        right="One byte for each number and one scale for the block. The map decides where the 256 values lie.",
        hints=(
            "The code covers -1 to 1. Which number brings a whole block into that range?",
            "Divide by the largest |x|, then take for each number the place of the nearest code.",
            "`scale = x.abs().max()`, then `(x[:, None] / scale - code).abs().argmin(dim=1)`.",
        ),
        mistakes=(
            Mistake(
                name="no scale",
                answer=_no_scale,
                message="Divide by the scale before you look for the nearest code: moments are far smaller than 1.",
            ),
            Mistake(
                name="rounded down",
                answer=_floor,
                message="Always rounded down: every number shrinks a little, at every step. Take the nearest code.",
            ),
            Mistake(
                name="largest, not largest size",
                answer=_largest_not_absolute,
                message="The scale is the largest |x|: a block may hold nothing but negative numbers.",
            ),
        ),
    ),
    Exercise(
        id="10.4",
        title="A published size, from shapes",
        wants="a function optimizer_elements(projected, rest, rank) that returns a whole number",
        reference=optimizer_elements,
        cases=_element_cases,
        right="Counted, not measured: that is all there is behind a published optimizer size.",
        hints=(
            "Two sums: one over the projected matrices, one over everything else.",
            "A projected matrix: exercise 09.3. Anything else: two moments, full-size.",
            "`sum((2 * max(s) + min(s)) * rank for s in projected) + 2 * sum(rest)`",
        ),
        mistakes=(
            Mistake(
                name="rest forgotten",
                answer=lambda projected, rest, rank: optimizer_elements(projected, [], rank),
                message="Embeddings, norms and biases are not projected, but Adam keeps two moments for them as well.",
            ),
            Mistake(
                name="rest once",
                answer=lambda projected, rest, rank: optimizer_elements(projected, [], rank) + sum(rest),
                message="The rest counts twice: a mean and a mean of squares for each of its numbers.",
            ),
            Mistake(
                name="no basis",
                answer=lambda projected, rest, rank: sum(2 * max(s) * rank for s in projected) + 2 * sum(rest),
                message="The bases are missing: min(rows, cols) x rank numbers for each projected matrix.",
            ),
            Mistake(
                name="always rows",
                answer=lambda projected, rest, rank: sum((2 * s[0] + s[1]) * rank for s in projected) + 2 * sum(rest),
                message="Look at the wide matrix: the moments keep the *longer* side, rows or columns.",
            ),
        ),
    ),
)
