"""Exercises of lesson 16: what fits, what is worth a look, what may be claimed, and the report of the capstone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from comera_lab.teaching.exercise import Exercise, Mistake, WrongAnswer

MIB = 2**20
POOLS = ("weights", "grads", "optimizer", "activations")
Dot = tuple[float, float]
Row = dict[str, Any]


def price(pools: dict[str, int], steps: int, step_time_ms: float) -> tuple[float, float]:
    """What a training takes: (MiB of a step, seconds); pools {name: bytes}."""
    return sum(pools.values()) / MIB, steps * step_time_ms / 1000


def pareto(dots: Sequence[Dot]) -> list[Dot]:
    """The (MiB, accuracy) dots that no other beats: the smallest first."""
    best: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot[0], -dot[1])):
        if not best or dot[1] > best[-1][1]:
            best.append(dot)
    return best


def claim(rows: Sequence[Row]) -> tuple[int, float, float, float]:
    """(seeds, mean, lowest, highest accuracy): the first finished result of each seed, rows in the order of time."""
    first: dict[int, float] = {}
    for row in rows:
        if row["finished"]:
            first.setdefault(row["seed"], row["accuracy"])
    found = list(first.values())
    return len(found), sum(found) / len(found), min(found), max(found)


def _price_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    sizes = torch.randint(10**5, 10**7, (4,), generator=generator).tolist()
    return [
        (dict(zip(POOLS, (2_678_824, 2_678_824, 5_357_672, 724_992), strict=True)), 300, 8.0),
        (dict(zip(POOLS, sizes, strict=True)), 1200, 2.5),
    ]


def _pareto_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    drawn = torch.rand(12, 2, generator=generator).tolist()
    return [
        ([(8.0, 0.97), (1.0, 0.90), (4.0, 0.89), (2.0, 0.95), (8.0, 0.96)],),
        ([(3.0, 0.9), (2.0, 0.9), (1.0, 0.7)],),
        ([(10 * size, accuracy) for size, accuracy in drawn],),
    ]


def _claim_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def row(seed: int, accuracy: float, finished: bool = True) -> Row:
        return {"seed": seed, "accuracy": accuracy, "finished": finished}

    drawn = (80 + 10 * torch.rand(3, generator=generator)).tolist()
    return [
        ([row(0, 91.0), row(1, 92.0), row(1, 95.0), row(2, 60.0, finished=False), row(2, 90.0)],),
        ([row(2, 88.0), row(2, 93.0), row(0, 70.0, finished=False), row(0, 89.0)],),
        ([*(row(seed, accuracy) for seed, accuracy in enumerate(drawn)), row(0, 99.0), row(2, 79.0)],),
    ]


def _dots_view(output: Any, args: tuple[Any, ...]) -> Any:
    """Pairs as one flat list, so that tuples and lists are alike."""
    if not isinstance(output, list | tuple) or not all(isinstance(d, list | tuple) and len(d) == 2 for d in output):
        raise WrongAnswer("type", "Return a list of (MiB, accuracy) pairs, the smallest first.")
    return [number for dot in output for number in dot]


# Wrong ways


def _rows_of(rows: Sequence[Row], keep: str) -> list[float]:
    """Finished accuracies, one for each seed: the "best" or the "last" of it."""
    found: dict[int, float] = {}
    for row in rows:
        if row["finished"]:
            seed, value = row["seed"], row["accuracy"]
            found[seed] = max(value, found.get(seed, value)) if keep == "best" else value
    return list(found.values())


def _spread(found: Sequence[float]) -> tuple[int, float, float, float]:
    return len(found), sum(found) / len(found), min(found), max(found)


def _all_rows(rows: Sequence[Row]) -> tuple[int, float, float, float]:
    return _spread([row["accuracy"] for row in rows if row["finished"]])


def _unfinished_too(rows: Sequence[Row]) -> tuple[int, float, float, float]:
    return claim([{**row, "finished": True} for row in rows])


def _best_seed(rows: Sequence[Row]) -> tuple[int, float, float, float]:
    seeds, _, low, high = claim(rows)
    return seeds, high, low, high


# The report

# Tensor trains of rank 2, twenty steps: what BudgetPanel gave on a CPU; the check trains one seed of it again.
_REPORT: dict[str, Any] = {
    "budget": {"mib": 8.0, "seconds": 3.0},
    "defended": "point 1",
    "points": [{
        "name": "point 1",
        "key": "",
        "settings": {
            "model": "tensor trains", "optimizer": "adamw", "rank": 2, "target_ratio": 0.3, "rank_ratio": 4.0,
            "steps": 20, "seconds": 3.0, "rate": "suggested",
        },
        "rows": [
            {"seed": seed, "steps": 20, "seconds": 0.2, "train_mib": 0.81, "dev_accuracy_percent": 100 * right / 288}
            for seed, right in enumerate((52, 115, 61))
        ],
    }],
    "answers": {
        "choice": "Rank two, because nothing else is as small and it still beats guessing.",
        "price": "Most of the accuracy: twenty steps are far too few for this network.",
        "doubt": "Three seeds differ widely here, so more steps could turn the order around.",
    },
}  # fmt: skip


def _changed(**point: Any) -> dict[str, Any]:
    report = copy.deepcopy(_REPORT)
    entry = report["points"][0]
    entry["rows"] = entry["rows"][: point.pop("seeds", 3)]
    report["answers"].update(point.pop("answers", {}))
    entry["rows"][-1].update(point)
    return report


def _report_view(report: Any, args: tuple[Any, ...]) -> Any:
    """Three words on a report, or on what holds one as `data`: its budget, its texts, its repetition."""
    from comera_lab.panels.budget_points import answer_fault, budget_fault, defended_entry, is_claim, repeat_fault

    data = getattr(report, "data", report)
    if not isinstance(data, dict) or not {"budget", "defended", "points", "answers"} <= set(data):
        raise WrongAnswer("type", "Hand in the report: `report = lab.budget_report(answers)`.")
    if not data["points"]:
        raise WrongAnswer("stub", "Nothing is registered yet: train three seeds within the budget, press Register.")
    if not any(isinstance(text, str) and text.strip() for text in data["answers"].values()):
        raise WrongAnswer("stub", "Still empty: three questions wait for a sentence each. Type them in the panel.")
    try:
        if budget_fault(data):
            entry = defended_entry(data)
            return ["over the budget" if entry is not None and is_claim(entry) else "anecdote", "", ""]
        if answer_fault(data):
            return ["within the budget", "too short", ""]
        return ["within the budget", "answered", "differs" if repeat_fault(data) else "repeated"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WrongAnswer("type", f"The report is not whole ({error}): make it anew with budget_report().") from None


EXERCISES = (
    Exercise(
        id="16.1",
        title="What a training takes",
        wants="a function price(pools, steps, step_time_ms) that returns MiB and seconds",
        reference=price,
        cases=_price_cases,
        right="Four pools, all at once: that is what has to fit. And milliseconds add up to seconds.",
        hints=(
            "Which of the four pools could you do without in the middle of a step?",
            "None: add all of them, then turn bytes into MiB and milliseconds into seconds.",
            "`return sum(pools.values()) / 2**20, steps * step_time_ms / 1000`",
        ),
        mistakes=(
            Mistake(
                name="weights only",
                answer=lambda pools, steps, ms: (pools["weights"] / MIB, steps * ms / 1000),
                message="That is the model as it lies on a disk. A training step keeps gradients, optimizer state and "
                "activations as well.",
            ),
            Mistake(
                name="megabytes",
                answer=lambda pools, steps, ms: (sum(pools.values()) / 1e6, steps * ms / 1000),
                message="A MiB has 2**20 bytes, not a million: near a budget the five per cent decide.",
            ),
            Mistake(
                name="largest pool",
                answer=lambda pools, steps, ms: (max(pools.values()) / MIB, steps * ms / 1000),
                message="The pools are there at the same time: add them, do not take the largest.",
            ),
            Mistake(
                name="milliseconds",
                answer=lambda pools, steps, ms: (sum(pools.values()) / MIB, steps * ms),
                message="The memory is right. The time is still in milliseconds.",
            ),
        ),
    ),
    Exercise(
        id="16.2",
        title="Dots worth a look",
        wants="a function pareto(dots) that returns a list of (MiB, accuracy) pairs, the smallest first",
        reference=pareto,
        cases=_pareto_cases,
        view=_dots_view,
        right="What is left is the price list: each step to the right buys accuracy.",
        hints=(
            "A dot is out if another one is no larger and at least as accurate.",
            "Go through them from small to large, at equal size the more accurate first: when is a dot worth keeping?",
            "`for dot in sorted(dots, key=lambda dot: (dot[0], -dot[1])):` keep it if it is more accurate than the "
            "last one kept.",
        ),
        mistakes=(
            Mistake(
                name="all of them",
                answer=lambda dots: sorted(dots, key=lambda dot: (dot[0], -dot[1])),
                message="Sorted, but none is out. A larger dot that is not more accurate has lost.",
            ),
            Mistake(
                name="the best one",
                answer=lambda dots: [max(dots, key=lambda dot: dot[1])],
                message="The most accurate one alone is not a front: a smaller one, nearly as good, has its place.",
            ),
            Mistake(
                name="ties kept",
                answer=lambda dots: sorted(
                    [d for d in dots if not any(o[0] < d[0] and o[1] > d[1] for o in dots)], key=lambda d: (d[0], -d[1])
                ),
                message="Ties: of two dots equal in one thing, the one that is worse in the other has lost as well.",
            ),
            Mistake(
                name="largest first",
                answer=lambda dots: pareto(dots)[::-1],
                message="The right dots. Hand them in with the smallest first.",
            ),
        ),
    ),
    Exercise(
        id="16.3",
        title="What may be claimed",
        wants="a function claim(rows) that returns how many seeds, mean, lowest and highest accuracy",
        reference=claim,
        cases=_claim_cases,
        right="Finished runs, one for each seed, the first one: there is nothing left to pick.",
        hints=(
            "Who decides which of two runs of the same seed counts? Not their result.",
            "Go through the rows in order; take a finished one if its seed is new.",
            "`first.setdefault(row['seed'], row['accuracy'])` in the loop, for rows with `row['finished']`.",
        ),
        mistakes=(
            Mistake(
                name="best of each seed",
                answer=lambda rows: _spread(_rows_of(rows, "best")),
                message="You kept the better of two runs of a seed. Repeated often, chance wins: the first counts.",
            ),
            Mistake(
                name="last of each seed",
                answer=lambda rows: _spread(_rows_of(rows, "last")),
                message="You kept the last run of a seed: then one can go on until it is a good one. The first counts.",
            ),
            Mistake(
                name="every run a seed",
                answer=_all_rows,
                message="Two runs of one seed are not two seeds: count each seed once.",
            ),
            Mistake(
                name="unfinished runs",
                answer=_unfinished_too,
                message="A run that was stopped is no result: leave rows that are not finished out.",
            ),
            Mistake(
                name="best seed",
                answer=_best_seed,
                message="In the place of the mean stands the best seed. It says how lucky one can be.",
            ),
        ),
    ),
    Exercise(
        id="16.4",
        title="The report",
        wants="a report from lab.budget_report(): a claim within the budget, three answers",
        reference=_REPORT,
        view=_report_view,
        right="Within the budget with all its seeds, answered, and trained again just now: the same within the band.",
        hints=(
            "Look at the table of the panel: is there a point that stands as a claim?",
            "Press Three seeds, then Register. If it is over the budget, a smaller model or optimizer state helps.",
            "`lab.budget_point(model='tensor trains', rank=8, steps=100)` registers one from a cell; the answers are a "
            "sentence of eight words or more each.",
        ),
        mistakes=(
            Mistake(
                name="one seed",
                answer=_changed(seeds=1),
                message="What you defend has fewer than three seeds: an anecdote. Press Three seeds, then Register.",
            ),
            Mistake(
                name="over the budget",
                answer=_changed(train_mib=9.0),
                message="A seed of the point you defend took more MiB or seconds than the budget has. Every seed "
                "has to fit: defend another point, or make it smaller or shorter.",
            ),
            Mistake(
                name="texts missing",
                answer=_changed(answers={"doubt": "None."}),
                message="Each of the three questions needs a sentence of its own, of eight words or more.",
            ),
            Mistake(
                name="not repeatable",
                answer=_changed(dev_accuracy_percent=97.0),
                message="Trained again from its settings, the best seed of your point comes to another accuracy. "
                "Report what the runs gave, without editing.",
            ),
        ),
    ),
)
