"""Exercises of lesson 06: hitting a compression target."""

from typing import Any

import torch
from torch import Tensor

from comera_lab.teaching.exercise import Exercise, Mistake, WrongAnswer


def core_limit(target_ratio: float, part: str, cores: int, dense: int) -> int:
    """Core elements that a target allows: a share of the cores ("tensorised") or of everything ("model")."""
    if part == "tensorised":
        return int(target_ratio * cores)
    return int(target_ratio * (cores + dense)) - dense


def close_cheapest(losses: list[float], freed: list[int], needed: int) -> list[int]:
    """Entries to close, least loss per number freed first, until at least `needed` numbers are free."""
    closed: list[int] = []
    gained = 0
    for entry in sorted(range(len(losses)), key=lambda entry: losses[entry] / freed[entry]):
        if gained >= needed:
            break
        closed.append(entry)
        gained += freed[entry]
    return closed


def compact_pair(left: Tensor, gate: Tensor, right: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """left (a, r), gate (r,), right (r, b) -> smaller left and right with the gate inside, the same product."""
    keep = gate.abs() > threshold
    return left[:, keep] * gate[keep], right[keep]


def ratios(tensorised_dense: int, cores: int, rest: int) -> tuple[float, float]:
    """(whole dense model over whole model, tensorised weights alone over the cores)."""
    return (tensorised_dense + rest) / (cores + rest), tensorised_dense / cores


def _limit_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    cores, dense = torch.randint(5_000, 20_000, (2,), generator=generator).tolist()
    return [
        (0.5, "tensorised", 13_188, 6_154), (0.5, "model", 13_188, 6_154), (0.8, "model", cores, dense // 4),
        (0.2, "tensorised", cores, dense),
    ]  # fmt: skip


def _close_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    losses = (torch.rand(6, generator=generator) + 0.05).tolist()
    return [
        ([0.30, 0.20, 0.50, 0.10, 0.02], [240, 142, 480, 40, 8], 500),
        (losses, [142, 224, 240, 192, 136, 224], 450),
        ([0.1, 0.2], [100, 50], 100),
        ([0.1, 0.2], [100, 50], 0),
    ]


def _pair_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(a: int, gate: tuple[float, ...], b: int) -> tuple[Any, ...]:
        rank = len(gate)
        left, right = torch.randn(a, rank, generator=generator), torch.randn(rank, b, generator=generator)
        return left, torch.tensor(gate), right, 0.05

    return [case(5, (0.9, 0.01, -0.7, 0.0), 4), case(3, (0.04, 1.3), 3), case(4, (0.2, 0.6, 2.0), 2)]


def _ratio_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    cores, rest = torch.randint(2_000, 60_000, (2,), generator=generator).tolist()
    return [(663_552, 3_956, 6_154), (66_498_048, 1_026_528, 459_267), (900_000, cores, rest)]


def _pair_view(output: Any, args: tuple[Any, ...]) -> Any:
    """(left, right) as numbers of the bond, then their product, which is all that has to stay."""
    if not isinstance(output, list | tuple) or len(output) != 2 or not all(isinstance(t, Tensor) for t in output):
        raise WrongAnswer("type", "Return two tensors: the smaller left and the smaller right.")
    left, right = output
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise WrongAnswer(
            "shape", f"The two must share their bond: got shapes {tuple(left.shape)} and {tuple(right.shape)}."
        )
    return left @ right, left.shape[1]


def _by_loss(losses: list[float], freed: list[int], needed: int) -> list[int]:
    return _greedy(sorted(range(len(losses)), key=lambda entry: losses[entry]), freed, needed)


def _largest_first(losses: list[float], freed: list[int], needed: int) -> list[int]:
    return _greedy(sorted(range(len(losses)), key=lambda entry: -freed[entry]), freed, needed)


def _dearest_first(losses: list[float], freed: list[int], needed: int) -> list[int]:
    return _greedy(sorted(range(len(losses)), key=lambda entry: -losses[entry] / freed[entry]), freed, needed)


def _greedy(order: list[int], freed: list[int], needed: int) -> list[int]:
    closed: list[int] = []
    while sum(freed[entry] for entry in closed) < needed:
        closed.append(order[len(closed)])
    return closed


def _kept_dead(left: Tensor, gate: Tensor, right: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    return left * torch.where(gate.abs() > threshold, gate, torch.zeros_like(gate)), right


def _gate_lost(left: Tensor, gate: Tensor, right: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    keep = gate.abs() > threshold
    return left[:, keep], right[keep]


def _positive_only(left: Tensor, gate: Tensor, right: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    keep = gate > threshold
    return left[:, keep] * gate[keep], right[keep]


def _gate_twice(left: Tensor, gate: Tensor, right: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    keep = gate.abs() > threshold
    return left[:, keep] * gate[keep], gate[keep, None] * right[keep]


EXERCISES = (
    Exercise(
        id="06.1",
        title="What a target leaves for the cores",
        wants="a function core_limit(target_ratio, part, cores, dense) that returns a whole number",
        reference=core_limit,
        cases=_limit_cases,
        right="The dense part cannot be cut, so a share of the whole model leaves the cores a smaller share of theirs.",
        hints=(
            "First ask: a share of what? Then: what of it is not cores?",
            '"tensorised": target x cores. "model": target x (cores + dense), and the dense part stays whole.',
            "`int(target_ratio * (cores + dense)) - dense` for the model, `int(target_ratio * cores)` for its cores.",
        ),
        mistakes=(
            Mistake(
                name="same for both",
                answer=lambda ratio, part, cores, dense: int(ratio * cores),
                message='Right for "tensorised". A target for the model counts the dense part as well: it cannot be '
                "cut, so the cores pay for it.",
            ),
            Mistake(
                name="dense part not taken off",
                answer=lambda ratio, part, cores, dense: int(ratio * (cores + (dense if part == "model" else 0))),
                message="That is the allowed size of the whole model. Take off the dense part: the question is "
                "what the cores may have.",
            ),
            Mistake(
                name="what has to go",
                answer=lambda ratio, part, cores, dense: (
                    int((1 - ratio) * cores) if part == "tensorised" else int((1 - ratio) * (cores + dense))
                ),
                message="That is what has to go. The target is the share that may stay.",
            ),
        ),
    ),
    Exercise(
        id="06.2",
        title="Close the cheapest entries",
        wants="a function close_cheapest(losses, freed, needed) that returns the entries to close, in order",
        reference=close_cheapest,
        cases=_close_cases,
        right="Cheapest is a ratio: loss for each number freed. That is how the target is met exactly.",
        hints=(
            "An entry that frees ten times as much may cost ten times the loss and still be as good a bargain.",
            "Sort the entries by loss / freed and take them until the sum of `freed` reaches `needed`.",
            "`order = sorted(range(len(losses)), key=lambda e: losses[e] / freed[e])`, then a loop with a running sum.",
        ),
        mistakes=(
            Mistake(
                name="least loss first",
                answer=_by_loss,
                message="You go by the loss alone: many harmless entries free little. Divide by what each one frees.",
            ),
            Mistake(
                name="largest first",
                answer=_largest_first,
                message="You go by what is freed, whatever it costs. Divide the loss by what each one frees.",
            ),
            Mistake(
                name="dearest first",
                answer=_dearest_first,
                message="The ratio is right, the order is reversed: you close the dearest entries first.",
            ),
            Mistake(
                name="everything",
                answer=lambda losses, freed, needed: sorted(
                    range(len(losses)), key=lambda entry: losses[entry] / freed[entry]
                ),
                message="The order is right, but you never stop. Once `needed` numbers are free, the rest may stay.",
            ),
        ),
    ),
    Exercise(
        id="06.3",
        title="Really cut",
        wants="a function compact_pair(left, gate, right, threshold) that returns a smaller left and right",
        reference=compact_pair,
        cases=_pair_cases,
        view=_pair_view,
        right="The same product from smaller tensors: now memory and arithmetic shrink as well, not only a count.",
        hints=(
            "Which entries of the bond still do something? Only they have to be stored.",
            "Keep the columns of left and the rows of right where |gate| is above the threshold, with the gate inside.",
            "`keep = gate.abs() > threshold`, then `left[:, keep] * gate[keep]` and `right[keep]`.",
        ),
        mistakes=(
            Mistake(
                name="masked, not cut",
                answer=_kept_dead,
                message="The product is right, the bond is as wide as before: multiplying by 0 saves nothing. Slice.",
            ),
            Mistake(
                name="gate lost",
                answer=_gate_lost,
                message="The right entries are kept, but their gates are gone: multiply them into one of the two.",
            ),
            Mistake(
                name="negative gates dropped",
                answer=_positive_only,
                message="A gate of -0.7 is alive: compare |gate| with the threshold.",
            ),
            Mistake(
                name="gate twice",
                answer=_gate_twice,
                message="The gate went into both sides. Multiply it into one of the two only.",
            ),
        ),
    ),
    Exercise(
        id="06.4",
        title="Two denominators",
        wants="a function ratios(tensorised_dense, cores, rest): how many times smaller is the whole model, "
        "and how many times the tensorised part",
        reference=ratios,
        cases=_ratio_cases,
        right="One model, two honest numbers. Ask which one you are told.",
        hints=(
            "Dense over compressed, once with everything that both models have, once without.",
            "The rest (biases, classifier, norms) stands above and below the line of the first ratio.",
            "`(tensorised_dense + rest) / (cores + rest), tensorised_dense / cores`",
        ),
        mistakes=(
            Mistake(
                name="swapped",
                answer=lambda *counts: ratios(*counts)[::-1],
                message="Both numbers are right, in the other order: first the whole model, then the tensorised part.",
            ),
            Mistake(
                name="the same twice",
                answer=lambda dense, cores, rest: (dense / cores, dense / cores),
                message="The second is right. The first must count the rest, in the dense model and in yours.",
            ),
            Mistake(
                name="mixed",
                answer=lambda dense, cores, rest: ((dense + rest) / cores, dense / cores),
                message="The first sets a whole dense model against the cores alone: that mixes the two denominators.",
            ),
            Mistake(
                name="upside down",
                answer=lambda *counts: tuple(1 / ratio for ratio in ratios(*counts)),
                message="Upside down: these are shares that are left. Times smaller is dense over compressed.",
            ),
        ),
    ),
)
