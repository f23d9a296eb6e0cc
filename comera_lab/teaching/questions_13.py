"""The guess-first question of lesson 13, computed when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comera_lab.experiments.roofline import PRINTED, Problem, works

if TYPE_CHECKING:
    from comera_lab.panels.predict import Question

CHOICES = ("32 times", "about 10 times", "about 3 times", "not at all")
TIMES = (32.0, 10.0, 3.0, 1.0)


def gpu_question() -> Question:
    """Fewer FLOPs against a lower floor."""
    from comera_lab.panels.predict import Question

    return Question(
        text="The layer above, 4096 to 4096, needs 32 times fewer FLOPs at rank 64 than its dense twin. How many times "
        "faster can it be on an H200 at most?",
        choices=CHOICES,
        then="Now read the tiles above, drag the rank to 16, and then inputs and outputs to 768.",
        answer=_floor_ratio,
    )


def _floor_ratio() -> tuple[int, str]:
    ceilings = PRINTED[0]

    def ratio(width: int) -> float:
        dense, _, fused = works(Problem(rows=16_384, in_features=width, out_features=width, rank=64))
        return dense.floor_ms(ceilings, "bf16") / fused.floor_ms(ceilings, "bf16")

    found = ratio(4096)
    index = min(range(len(TIMES)), key=lambda choice: abs(TIMES[choice] - found))
    return index, (
        f"{found:.1f} times, and {ratio(768):.1f} times at 768 (computed from printed ceilings). x, y and their "
        "gradients have to be moved whatever the rank is: the thin layer waits for memory, so fewer FLOPs buy nothing."
    )
