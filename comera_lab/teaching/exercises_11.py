"""Exercises of lesson 11: COAP for convolutions."""

from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake


def kernel_numbers(out_channels: int, in_channels: int, side: int, ratio: float) -> int:
    """Numbers that COAP keeps for a kernel (out, in, side, side): two moments in the core, and two bases."""
    out_rank, in_rank = int(out_channels / ratio**0.5), int(in_channels / ratio**0.5)
    return 2 * out_rank * in_rank * side**2 + out_channels * out_rank + in_channels * in_rank


def project_kernel(G: Tensor, U_out: Tensor, U_in: Tensor) -> Tensor:
    """G (out, in, k, k), bases (out, r_out) and (in, r_in) -> core (r_out, r_in, k, k)."""
    return torch.einsum("oikl,or,is->rskl", G, U_out, U_in)


def noisy(x: Tensor, noise: Tensor, share: float) -> Tensor:
    """x and noise of one shape -> the mix that keeps `share` of the signal's energy and the variance 1."""
    mixed: Tensor = share**0.5 * x + (1 - share) ** 0.5 * noise
    return mixed


def frechet(mean_a: Tensor, std_a: Tensor, mean_b: Tensor, std_b: Tensor) -> float:
    """Frechet distance of two normal distributions with independent features: means and deviations (n,)."""
    return float(((mean_a - mean_b) ** 2).sum() + ((std_a - std_b) ** 2).sum())


def _kernel_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    out_channels, in_channels = (8 * torch.randint(4, 40, (2,), generator=generator)).tolist()
    return [(80, 160, 3, 4.0), (512, 512, 3, 2.0), (64, 64, 1, 4.0), (out_channels, in_channels, 5, 9.0)]


def _project_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(out_channels: int, in_channels: int, side: int, ranks: tuple[int, int]) -> tuple[Tensor, ...]:
        bases = (
            torch.linalg.qr(torch.randn(channels, rank, generator=generator)).Q
            for channels, rank in zip((out_channels, in_channels), ranks, strict=True)
        )
        return torch.randn(out_channels, in_channels, side, side, generator=generator), *bases

    return [case(8, 6, 3, (4, 3)), case(5, 7, 1, (2, 2)), case(6, 6, 2, (6, 1))]


def _noisy_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def images() -> Tensor:
        return torch.randn(3, 8, 8, generator=generator)

    return [(images(), images(), share) for share in (1.0, 0.64, 0.1, 0.0)]


def _frechet_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def normal() -> tuple[Tensor, Tensor]:
        return torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 0.2

    same = normal()
    return [(*normal(), *normal()), (*same, *same), (same[0], same[1], same[0], 2 * same[1])]


EXERCISES = (
    Exercise(
        id="11.1",
        title="Project a kernel's gradient",
        wants="a function project_kernel(G, U_out, U_in) that returns the core, (r_out, r_in, k, k)",
        reference=project_kernel,
        cases=_project_cases,
        right="Two small products, one for each kind of channel; the window of the kernel stays as it is.",
        hints=(
            "A basis acts on one of the four dimensions. Which one has its length?",
            'torch.einsum names dimensions: G is "oikl", U_out is "or". What is left over is the result.',
            '`torch.einsum("oikl,or,is->rskl", G, U_out, U_in)`.',
        ),
        mistakes=(
            Mistake(
                name="out side only",
                answer=lambda G, U_out, U_in: torch.einsum("oikl,or->rikl", G, U_out),
                message="The out channels are projected. The in channels have a basis of their own.",
            ),
            Mistake(
                name="sides in the wrong order",
                answer=lambda G, U_out, U_in: torch.einsum("oikl,or,is->srkl", G, U_out, U_in),
                message="The right numbers in the wrong order: a kernel is (out, in, k, k), so its core is "
                "(r_out, r_in, k, k).",
            ),
            Mistake(
                name="projected and lifted",
                answer=lambda G, U_out, U_in: torch.einsum("oikl,or,is,pr,qs->pqkl", G, U_out, U_in, U_out, U_in),
                message="That is the gradient seen through the bases, back at full size. The moments live in the core: "
                "stop before lifting.",
            ),
        ),
    ),
    Exercise(
        id="11.2",
        title="What a kernel costs",
        wants="a function kernel_numbers(out_channels, in_channels, side, ratio) that returns a whole number",
        reference=kernel_numbers,
        cases=_kernel_cases,
        right="Each side gives up the root of the ratio, so the core has the ratio times fewer numbers. The bases are "
        "the price, and small where kernels are wide.",
        hints=(
            "Two ranks first: what is left of the out channels, and of the in channels?",
            "int(channels / ratio ** 0.5) for each side. Two moments of r_out x r_in x side x side, and two bases.",
            "`2 * r_out * r_in * side**2 + out_channels * r_out + in_channels * r_in`.",
        ),
        mistakes=(
            Mistake(
                name="ratio on both sides",
                answer=lambda o, i, side, ratio: 2 * int(o / ratio) * int(i / ratio) * side**2
                + o * int(o / ratio) + i * int(i / ratio),
                message="With the whole ratio on both sides the core shrinks by its square. Each side takes the root.",
            ),
            Mistake(
                name="bases forgotten",
                answer=lambda o, i, side, ratio: 2 * int(o / ratio**0.5) * int(i / ratio**0.5) * side**2,
                message="Those are the moments. The two bases are kept between steps as well: count them.",
            ),
            Mistake(
                name="one moment",
                answer=lambda o, i, side, ratio: int(o / ratio**0.5) * int(i / ratio**0.5) * side**2
                + o * int(o / ratio**0.5) + i * int(i / ratio**0.5),
                message="Adam keeps two moments, the mean of the gradient and that of its square.",
            ),
        ),
    ),
    Exercise(
        id="11.3",
        title="Mix an image with noise",
        wants="a function noisy(x, noise, share) that returns a tensor of their shape",
        reference=noisy,
        cases=_noisy_cases,
        right="Energies add up, amplitudes do not: hence the roots. At 1 it is the image, at 0 it is noise.",
        hints=(
            "The share is one of energy, and energy is a square.",
            "The image keeps `share` of its energy, the noise gets the rest. Amplitudes are roots of energies.",
            "`share ** 0.5 * x + (1 - share) ** 0.5 * noise`.",
        ),
        mistakes=(
            Mistake(
                name="no roots",
                answer=lambda x, noise, share: share * x + (1 - share) * noise,
                message="These amplitudes add up to 1, but energies should: in the middle the mix would be too faint.",
            ),
            Mistake(
                name="swapped",
                answer=lambda x, noise, share: share**0.5 * noise + (1 - share) ** 0.5 * x,
                message="Swapped: `share` is what is left of the image.",
            ),
            Mistake(
                name="image kept whole",
                answer=lambda x, noise, share: x + (1 - share) ** 0.5 * noise,
                message="The image fades while the noise grows: it keeps `share` of its energy, too.",
            ),
        ),
    ),
    Exercise(
        id="11.4",
        title="How far apart are two clouds?",
        wants="a function frechet(mean_a, std_a, mean_b, std_b) that returns a number",
        reference=frechet,
        cases=_frechet_cases,
        right="A model that draws one perfect digit again and again has the wrong spread, and this distance tells.",
        hints=(
            "It is 0 for equal clouds, and grows with the distance of the means and of the spreads.",
            "Two sums of squares: of the differences of the means, and of the differences of the deviations.",
            "`((mean_a - mean_b) ** 2).sum() + ((std_a - std_b) ** 2).sum()`.",
        ),
        mistakes=(
            Mistake(
                name="means only",
                answer=lambda mean_a, std_a, mean_b, std_b: float(((mean_a - mean_b) ** 2).sum()),
                message="Two clouds with one centre may differ in spread: add the squared differences of deviations.",
            ),
            Mistake(
                name="variances",
                answer=lambda mean_a, std_a, mean_b, std_b: float(
                    ((mean_a - mean_b) ** 2).sum() + ((std_a**2 - std_b**2) ** 2).sum()
                ),
                message="Take differences of the deviations, not of the variances: both terms have one unit then.",
            ),
            Mistake(
                name="root taken",
                answer=lambda mean_a, std_a, mean_b, std_b: float(
                    ((mean_a - mean_b) ** 2).sum() + ((std_a - std_b) ** 2).sum()
                ) ** 0.5,
                message="That is the root. By custom the distance is reported squared, as FID is.",
            ),
        ),
    ),
)  # fmt: skip
