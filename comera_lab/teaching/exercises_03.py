"""Exercises of lesson 03: tensor trains by hand."""

from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake, WrongAnswer

Cores = list[Tensor]


def tt_params(modes: tuple[int, ...], ranks: tuple[int, ...]) -> int:
    """Numbers in all cores; `ranks` has the closing 1s, so one more entry than `modes`."""
    return sum(left * mode * right for left, mode, right in zip(ranks, modes, ranks[1:], strict=False))


def tt_full(cores: Cores) -> Tensor:
    """Cores (r, mode, r') -> the tensor they stand for, one axis per mode."""
    full = cores[0]
    for core in cores[1:]:
        full = torch.tensordot(full, core, dims=1)  # (1, n_1, ..., n_k, r_k)
    return full.squeeze(0).squeeze(-1)


def max_ranks(modes: tuple[int, ...]) -> tuple[int, ...]:
    """The largest useful rank of every bond, closing 1s included."""
    return tuple(min(prod(modes[:cut]), prod(modes[cut:])) for cut in range(len(modes) + 1))


def weight_to_tensor(weight: Tensor, in_modes: tuple[int, ...], out_modes: tuple[int, ...]) -> Tensor:
    """nn.Linear weight (out, in) -> tensor (n_1, ..., n_d, m_1, ..., m_e), input modes first."""
    return weight.T.reshape(*in_modes, *out_modes)


def tt_svd(tensor: Tensor, rank: int) -> Cores:
    """TT-SVD (Oseledets 2011, algorithm 1) with one cap on all bonds."""
    cores, rest, left = [], tensor, 1
    for mode in tensor.shape[:-1]:
        U, S, Vh = torch.linalg.svd(rest.reshape(left * mode, -1), full_matrices=False)
        keep = min(rank, len(S))
        cores.append(U[:, :keep].reshape(left, mode, keep))
        rest, left = S[:keep, None] * Vh[:keep], keep
    return [*cores, rest.reshape(left, tensor.shape[-1], 1)]


def _cores(generator: torch.Generator, modes: tuple[int, ...], ranks: tuple[int, ...]) -> Cores:
    bonds = zip(ranks, modes, ranks[1:], strict=False)
    return [torch.randn(*shape, generator=generator) for shape in bonds]


def _params_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = torch.randint(2, 9, (3,), generator=generator).tolist()
    return [((4, 7, 7, 4), (1, 3, 5, 2, 1)), ((2, 8, 7, 7), (1, 2, 6, 4, 1)), (tuple(drawn), (1, 2, 3, 1))]


def _full_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        (_cores(generator, (2, 3, 4), (1, 2, 3, 1)),),
        (_cores(generator, (3, 3), (1, 2, 1)),),
        (_cores(generator, (2, 5, 3, 2), (1, 2, 4, 2, 1)),),
    ]


def _rank_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = torch.randint(2, 7, (5,), generator=generator).tolist()
    return [((4, 7, 7, 4),), ((2, 8, 7, 7, 8, 8, 8),), (tuple(drawn),)]


def _weight_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        (torch.randn(6, 8, generator=generator), (2, 4), (3, 2)),
        (torch.randn(4, 4, generator=generator), (2, 2), (2, 2)),
    ]


def _svd_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [
        (torch.randn(4, 5, 3, 4, generator=generator), 3),
        (torch.randn(3, 4, 5, generator=generator), 20),
    ]


def _svd_view(cores: Any, args: tuple[Any, ...]) -> list[Any]:
    """Core shapes and the tensor they give: singular vectors themselves have free signs."""
    if not isinstance(cores, list | tuple) or not all(isinstance(core, Tensor) for core in cores):
        raise WrongAnswer("type", "Return the list of cores.")
    shapes = [tuple(core.shape) for core in cores]
    if any(len(shape) != 3 for shape in shapes):
        raise WrongAnswer("shape", f"Every core has three axes (rank, mode, rank); these shapes are {shapes}.")
    if shapes and (shapes[0][0] != 1 or shapes[-1][2] != 1):
        raise WrongAnswer("shape", f"The train must open and close with rank 1 (r0 = rd = 1); shapes are {shapes}.")
    if any(a[2] != b[0] for a, b in pairwise(shapes)):
        raise WrongAnswer(
            "shape", f"Neighbours do not fit: the last axis of a core is the first of the next; {shapes}."
        )
    return [[torch.tensor(shape) for shape in shapes], tt_full(list(cores))]


def _forgot_singular_values(tensor: Tensor, rank: int) -> Cores:
    cores, rest, left = [], tensor, 1
    for mode in tensor.shape[:-1]:
        U, S, Vh = torch.linalg.svd(rest.reshape(left * mode, -1), full_matrices=False)
        keep = min(rank, len(S))
        cores.append(U[:, :keep].reshape(left, mode, keep))
        rest, left = Vh[:keep], keep
    return [*cores, rest.reshape(left, tensor.shape[-1], 1)]


def _rows_by_mode(tensor: Tensor, rank: int) -> Cores:
    cores, rest, left = [], tensor, 1
    for mode in tensor.shape[:-1]:
        U, S, Vh = torch.linalg.svd(rest.reshape(left * mode, -1), full_matrices=False)
        keep = min(rank, len(S))
        cores.append(U[:, :keep].reshape(mode, left, keep).transpose(0, 1))
        rest, left = S[:keep, None] * Vh[:keep], keep
    return [*cores, rest.reshape(left, tensor.shape[-1], 1)]


def _scaled_twice(tensor: Tensor, rank: int) -> Cores:
    cores, rest, left = [], tensor, 1
    for mode in tensor.shape[:-1]:
        U, S, Vh = torch.linalg.svd(rest.reshape(left * mode, -1), full_matrices=False)
        keep = min(rank, len(S))
        cores.append((U[:, :keep] * S[:keep]).reshape(left, mode, keep))
        rest, left = S[:keep, None] * Vh[:keep], keep
    return [*cores, rest.reshape(left, tensor.shape[-1], 1)]


EXERCISES = (
    Exercise(
        id="03.1",
        title="Count the numbers in a tensor train",
        wants="a function tt_params(modes, ranks) that returns a whole number; ranks has the closing 1s",
        reference=tt_params,
        cases=_params_cases,
        right="Each core holds (rank before) x (mode) x (rank after) numbers, and the cores add up.",
        hints=(
            "A core is a small box with three sides. Which three numbers are its sides?",
            "Core k has the shape (ranks[k], modes[k], ranks[k + 1]). Multiply the sides, add the cores.",
            "`sum(ranks[k] * modes[k] * ranks[k + 1] for k in range(len(modes)))`",
        ),
        mistakes=(
            Mistake(
                name="forgot r0 = 1",
                answer=lambda modes, ranks: sum(ranks[k - 1] * modes[k] * ranks[k] for k in range(len(modes))),
                message="Forgot r0 = 1? ranks starts with it, so core k sits between ranks[k] and ranks[k + 1].",
            ),
            Mistake(
                name="left out the outer cores",
                answer=lambda modes, ranks: sum(ranks[k] * modes[k] * ranks[k + 1] for k in range(1, len(modes) - 1)),
                message="The first and the last core are missing: with r0 = rd = 1 they are small, but they count.",
            ),
            Mistake(
                name="one rank per core",
                answer=lambda modes, ranks: sum(mode * rank for mode, rank in zip(modes, ranks[1:], strict=False)),
                message="Each core touches two bonds: multiply by the rank on its left and by the rank on its right.",
            ),
            Mistake(
                name="squared rank",
                answer=lambda modes, ranks: sum(
                    mode * rank * rank for mode, rank in zip(modes, ranks[1:], strict=False)
                ),
                message="This squares one rank. The ranks on the two sides of a core may differ.",
            ),
            Mistake(
                name="multiplied the cores",
                answer=lambda modes, ranks: prod(
                    a * mode * b for a, mode, b in zip(ranks, modes, ranks[1:], strict=False)
                ),
                message="The cores are stored side by side: add their sizes, do not multiply them.",
            ),
            Mistake(
                name="full tensor",
                answer=lambda modes, ranks: prod(modes),
                message="That is the full tensor. The whole point is that it is not stored.",
            ),
        ),
    ),
    Exercise(
        id="03.2",
        title="Multiply a train back together",
        wants="a function tt_full(cores) that returns a tensor with one axis per core",
        reference=tt_full,
        cases=_full_cases,
        right="Every bond is summed over; only the modes are left.",
        hints=(
            "Two neighbours share a bond: the last axis of one, the first axis of the next. Sum over it.",
            "`torch.tensordot(full, core, dims=1)` does one bond. Which axes are left over at the very ends?",
            "Start with cores[0], tensordot with each next core, then `.squeeze(0).squeeze(-1)`.",
        ),
        mistakes=(
            Mistake(
                name="kept r0 = rd = 1",
                answer=lambda cores: tt_full(cores)[None, ..., None],
                message="The closing ranks r0 = rd = 1 are still there, as axes of length 1. Squeeze them away.",
            ),
            Mistake(
                name="wrong core order",
                answer=lambda cores: tt_full(cores).permute(*reversed(range(len(cores)))),
                message="The axes are in reverse: wrong core order. Start with the first core and go right.",
            ),
            Mistake(
                name="flattened",
                answer=lambda cores: tt_full(cores).reshape(-1),
                message="The numbers are right, but flat. Give every mode its own axis.",
            ),
            Mistake(
                name="summed the modes",
                answer=lambda cores: tt_full(cores).sum(),
                message="The modes were summed over too. Sum over the bonds only.",
            ),
        ),
    ),
    Exercise(
        id="03.3",
        title="The largest useful rank of every bond",
        wants="a function max_ranks(modes) that returns one rank per bond, closing 1s included",
        reference=max_ranks,
        cases=_rank_cases,
        right="A bond cuts the tensor into a matrix; no rank can exceed its smaller side.",
        hints=(
            "Cut the train at one bond. All modes to its left are the rows of a matrix, all to its right the columns.",
            "The rank of a matrix is at most its smaller side: min(product of the left, product of the right).",
            "`tuple(min(prod(modes[:k]), prod(modes[k:])) for k in range(len(modes) + 1))`; an empty product is 1.",
        ),
        mistakes=(
            Mistake(
                name="forgot the closing 1s",
                answer=lambda modes: max_ranks(modes)[1:-1],
                message="The closing ranks are missing: r0 = 1 in front and rd = 1 at the end.",
            ),
            Mistake(
                name="left side only",
                answer=lambda modes: tuple(prod(modes[:cut]) for cut in range(len(modes) + 1)),
                message="Only the modes on the left are counted. The smaller of the two sides is the limit.",
            ),
            Mistake(
                name="neighbours only",
                answer=lambda modes: (1, *(min(a, b) for a, b in pairwise(modes)), 1),
                message="Only the two neighbours are counted. Everything left of the bond, and right of it, plays in.",
            ),
            Mistake(
                name="the larger side",
                answer=lambda modes: tuple(max(prod(modes[:cut]), prod(modes[cut:])) for cut in range(len(modes) + 1)),
                message="That is the larger side. The rank of a matrix is at most its smaller side.",
            ),
        ),
    ),
    Exercise(
        id="03.4",
        title="From a weight matrix to a tensor",
        wants="a function weight_to_tensor(weight, in_modes, out_modes); result: input modes first, then output modes",
        reference=weight_to_tensor,
        cases=_weight_cases,
        right="The weight of nn.Linear is stored (out, in); this kit lists the input modes first.",
        hints=(
            "Print the shape of an nn.Linear(784, 512).weight. Which side comes first?",
            "The result lists the input modes first, so the input side must come first before you reshape.",
            "`weight.T.reshape(*in_modes, *out_modes)`",
        ),
        mistakes=(
            Mistake(
                name="forgot that the weight is (out, in)",
                answer=lambda weight, in_modes, out_modes: weight.reshape(*in_modes, *out_modes),
                message="The shape is right, the numbers are scrambled: nn.Linear stores (out, in). Transpose first.",
            ),
            Mistake(
                name="output modes first",
                answer=lambda weight, in_modes, out_modes: weight.reshape(*out_modes, *in_modes),
                message="Output modes come first here. The order of this kit: input modes, then output modes.",
            ),
            Mistake(
                name="modes reversed",
                answer=lambda weight, in_modes, out_modes: weight.T.reshape(*in_modes[::-1], *out_modes[::-1]),
                message="The modes are reversed. The first mode is the slowest digit of the index, as in reshape.",
            ),
            Mistake(
                name="column-major digits",
                answer=lambda weight, in_modes, out_modes: weight.T.reshape(*in_modes[::-1], *out_modes[::-1]).permute(
                    *reversed(range(len(in_modes))),
                    *(len(in_modes) + k for k in reversed(range(len(out_modes)))),
                ),
                message="Right shape, but the index digits run backwards (column-major). Plain reshape is enough.",
            ),
        ),
    ),
    Exercise(
        id="03.5",
        title="TT-SVD: one cut after another",
        wants="a function tt_svd(tensor, rank) that returns the list of cores (rank before, mode, rank after)",
        reference=tt_svd,
        cases=_svd_cases,
        view=_svd_view,
        right="One SVD per bond, left to right (Oseledets, 2011): the cores of every tensor-train library.",
        hints=(
            "After each SVD, U becomes a core. What must travel on to the right?",
            "U[:, :keep] has `left * mode` rows: split them into (left, mode). The rest carries S and Vh.",
            "`core = U[:, :keep].reshape(left, mode, keep)` and `rest = S[:keep, None] * Vh[:keep]`",
        ),
        mistakes=(
            Mistake(
                name="forgot the singular values",
                answer=_forgot_singular_values,
                message="The shapes fit, the sizes are lost: S must travel on with Vh, or be put into the core.",
            ),
            Mistake(
                name="singular values twice",
                answer=_scaled_twice,
                message="S is used twice: in the core and in the rest. Put it into one of them only.",
            ),
            Mistake(
                name="rows split the wrong way",
                answer=_rows_by_mode,
                message="The rows of U count (left, mode), with mode the fast digit: reshape to (left, mode, keep).",
            ),
        ),
    ),
)
