"""Exercises of lesson 05: training that chooses the ranks."""

from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake


def gated_product(left: Tensor, gate: Tensor, right: Tensor) -> Tensor:
    """left (a, r), gate (r,), right (r, b) -> (a, b): every entry of the bond is multiplied by its gate."""
    return (left * gate) @ right


def sizes(gates: list[Tensor], modes: tuple[int, ...], threshold: float) -> tuple[float, float]:
    """(exact count of live core elements, surrogate) of a train with `modes` and one gate per inner bond."""
    live = [1, *(int((gate.abs() > threshold).sum()) for gate in gates), 1]
    norms = [1.0, *(float(gate.abs().sum()) for gate in gates), 1.0]
    exact = sum(live[k] * mode * live[k + 1] for k, mode in enumerate(modes))
    surrogate = sum(norms[k] * mode * norms[k + 1] for k, mode in enumerate(modes))
    return exact, surrogate


def gate_gradient(gate: Tensor, upstream: Tensor, threshold: float, kind: str) -> Tensor:
    """What reaches the gate (r,) of the gradient `upstream` (r,) of the cut gate."""
    if kind == "threshold":
        return torch.where(gate > threshold, upstream, torch.zeros_like(upstream))
    return upstream


def early_objective(loss: float, gamma: float, surrogate: float, dense_elements: int) -> float:
    """Task loss plus the price of size: gamma is what the whole dense layer would cost."""
    return loss + gamma * surrogate / dense_elements


def _product_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(a: int, r: int, b: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(*shape, generator=generator) for shape in ((a, r), (r,), (r, b)))

    return [case(5, 3, 4), case(4, 4, 4), case(2, 1, 3)]


def _gate(*values: float) -> Tensor:
    return torch.tensor(values)


def _size_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = [torch.rand(rank, generator=generator) + 0.1 for rank in (4, 3)]
    drawn[0][1] = 0.002
    signed = [_gate(0.9, -0.5, 0.004), _gate(-1.2, 0.3), _gate(0.7, 0.001, -0.02, 0.8)]
    return [(signed, (4, 7, 7, 4), 0.01), (drawn, (14, 8, 7), 0.05), ([_gate(0.5, 0.01)], (3, 5), 0.01)]


def _gradient_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    gate, upstream = _gate(0.8, 0.004, -0.6, 0.02), torch.randn(4, generator=generator)
    return [(gate, upstream, 0.01, kind) for kind in ("threshold", "straight-through")]


def _objective_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    gamma, surrogate = (torch.rand(2, generator=generator) * 100 + 20).tolist()
    return [(0.4, 30.0, 1800.0, 401_408), (2.3, gamma, 50 * surrogate, 262_144), (1.0, 0.0, 900.0, 1_000)]


def _counted(gates: list[Tensor], modes: tuple[int, ...], threshold: float) -> tuple[float, float]:
    exact, _ = sizes(gates, modes, threshold)
    return exact, float(exact)


def _without_ends(gates: list[Tensor], modes: tuple[int, ...], threshold: float) -> tuple[float, float]:
    live = [int((gate.abs() > threshold).sum()) for gate in gates]
    norms = [float(gate.abs().sum()) for gate in gates]
    inner = range(len(gates) - 1)
    return (
        sum(live[k] * modes[k + 1] * live[k + 1] for k in inner),
        sum(norms[k] * modes[k + 1] * norms[k + 1] for k in inner),
    )


def _full_ranks(gates: list[Tensor], modes: tuple[int, ...], threshold: float) -> tuple[float, float]:
    ranks = [1, *map(len, gates), 1]
    exact = sum(ranks[k] * mode * ranks[k + 1] for k, mode in enumerate(modes))
    return exact, sizes(gates, modes, threshold)[1]


def _signed(gates: list[Tensor], modes: tuple[int, ...], threshold: float) -> tuple[float, float]:
    norms = [1.0, *(float(gate.sum()) for gate in gates), 1.0]
    surrogate = sum(norms[k] * mode * norms[k + 1] for k, mode in enumerate(modes))
    return sizes(gates, modes, threshold)[0], surrogate


def _by_magnitude(gate: Tensor, upstream: Tensor, threshold: float, kind: str) -> Tensor:
    if kind == "threshold":
        return torch.where(gate.abs() > threshold, upstream, torch.zeros_like(upstream))
    return upstream


EXERCISES = (
    Exercise(
        id="05.1",
        title="A gate on a bond",
        wants="a function gated_product(left, gate, right) that returns left, gate and right multiplied, (a, b)",
        reference=gated_product,
        cases=_product_cases,
        right="One gate entry scales one column of the left core: set it to 0 and the bond has one rank less.",
        hints=(
            "The gate is the diagonal of a small matrix that sits between the two.",
            "Multiplying by a diagonal matrix from the right scales the columns of `left`.",
            "`(left * gate) @ right`: the last axis of left is the bond.",
        ),
        mistakes=(
            Mistake(
                name="no gate",
                answer=lambda left, gate, right: left @ right,
                message="That is the product without the gate. Every entry of the bond has its own factor.",
            ),
            Mistake(
                name="gate twice",
                answer=lambda left, gate, right: (left * gate) @ (gate[:, None] * right),
                message="The gate acts twice. It belongs to the bond, so multiply one of the two cores only.",
            ),
            Mistake(
                name="gate added",
                answer=lambda left, gate, right: (left + gate) @ right,
                message="The gate is added. It has to multiply, so that 0 switches its entry off.",
            ),
            Mistake(
                name="transposed",
                answer=lambda left, gate, right: ((left * gate) @ right).T,
                message="It is transposed: the rows are those of `left`, the columns those of `right`.",
            ),
        ),
    ),
    Exercise(
        id="05.2",
        title="What is left, exactly and smoothly",
        wants="a function sizes(gates, modes, threshold) that returns the exact count and the surrogate",
        reference=sizes,
        cases=_size_cases,
        right="The count is what memory will hold; the surrogate is what a gradient can feel. They differ, on purpose.",
        hints=(
            "Both are a sum over cores of (left rank) x mode x (right rank). Only what stands for the rank differs.",
            "Exact: how many |g| lie above the threshold. Surrogate: the sum of all |g|. The ends are 1 in both.",
            "Put `[1, ..., 1]` around each list, then `sum(r[k] * mode * r[k + 1] for k, mode in enumerate(modes))`.",
        ),
        mistakes=(
            Mistake(
                name="count twice",
                answer=_counted,
                message="The first is right; the second counts again. A count is flat, so no gradient comes out of it: "
                "the surrogate adds up |g|.",
            ),
            Mistake(
                name="forgot the closing ranks",
                answer=_without_ends,
                message="The first and the last core are missing: r0 = rd = 1 close the train, their cores count too.",
            ),
            Mistake(
                name="dead entries counted",
                answer=_full_ranks,
                message="The first number counts every entry, dead or alive. Count those with |g| above the threshold.",
            ),
            Mistake(
                name="signs kept",
                answer=_signed,
                message="The surrogate must add up |g|: with signs, +1 and -1 would pass for an empty bond.",
            ),
        ),
    ),
    Exercise(
        id="05.3",
        title="The one-way door",
        wants="a function gate_gradient(gate, upstream, threshold, kind) that returns the gradient of the gate",
        reference=gate_gradient,
        cases=_gradient_cases,
        right="Behind a hard threshold nothing calls a dead entry back. Straight-through leaves the door open.",
        hints=(
            "Think of `torch.where(gate > threshold, gate, 0)`: where it returns 0, it does not depend on the gate.",
            '"threshold": the gradient passes where gate > threshold, and is 0 elsewhere. '
            '"straight-through": backward pretends that nothing was cut.',
            '`torch.where(gate > threshold, upstream, 0)` for "threshold", `upstream` for "straight-through".',
        ),
        mistakes=(
            Mistake(
                name="door always open",
                answer=lambda gate, upstream, threshold, kind: upstream,
                message='Right for "straight-through". For "threshold" a dead entry gets no gradient: '
                "its output is 0 whatever the gate is.",
            ),
            Mistake(
                name="door always shut",
                answer=lambda gate, upstream, threshold, kind: gate_gradient(gate, upstream, threshold, "threshold"),
                message='Right for "threshold". "straight-through" hands the whole gradient on, to dead entries too.',
            ),
            Mistake(
                name="by magnitude",
                answer=_by_magnitude,
                message="Look at the negative gate: the published threshold takes g, not |g|, so it is dead.",
            ),
            Mistake(
                name="value, not gradient",
                answer=lambda gate, upstream, threshold, kind: torch.where(
                    gate > threshold, gate, torch.zeros_like(gate)
                ),
                message="That is the cut gate itself. Wanted is what reaches the gate of `upstream`.",
            ),
        ),
    ),
    Exercise(
        id="05.4",
        title="A price on size",
        wants="a function early_objective(loss, gamma, surrogate, dense_elements) that returns one number",
        reference=early_objective,
        cases=_objective_cases,
        right="Loss and price in one unit. gamma says what the whole dense layer would cost, in nats.",
        hints=(
            "The loss is in nats, the surrogate in numbers of a core. A share of the dense size has no unit.",
            "loss + gamma x share, and the share is surrogate / dense_elements.",
            "`loss + gamma * surrogate / dense_elements`",
        ),
        mistakes=(
            Mistake(
                name="not a share",
                answer=lambda loss, gamma, surrogate, dense: loss + gamma * surrogate,
                message="Thousands of nats: divide the surrogate by the dense size, then gamma means the same "
                "for every model.",
            ),
            Mistake(
                name="rewarded",
                answer=lambda loss, gamma, surrogate, dense: loss - gamma * surrogate / dense,
                message="The sign is wrong: this rewards size. What is minimised must grow with it.",
            ),
            Mistake(
                name="price on the loss",
                answer=lambda loss, gamma, surrogate, dense: gamma * loss + surrogate / dense,
                message="gamma is the price of size, not of the loss: it multiplies the share.",
            ),
        ),
    ),
)
