"""The guess-first question of lesson 15, computed when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comera_lab.experiments.scale_out import ScaleOut, predicted_bytes
from comera_lab.memory import mib

if TYPE_CHECKING:
    from comera_lab.panels.predict import Question

CHOICES = ("to a quarter", "to a bit less than a half", "to three quarters", "not at all")
SHARES = (0.25, 0.45, 0.75, 1.0)


def processes_question() -> Question:
    """What does not shrink: the basis."""
    from comera_lab.panels.predict import Question

    return Question(
        text="FSDP with COAP, from one process to four. How far does the optimizer state of one process shrink?",
        choices=CHOICES,
        then="Now choose coap and 4 processes in the panel above, and read the bar.",
        answer=_optimizer_share,
    )


def _optimizer_share() -> tuple[int, str]:
    one, four = (
        predicted_bytes(ScaleOut(processes=count, kind="fsdp", optimizer="coap"))["optimizer"] for count in (1, 4)
    )
    index = min(range(len(SHARES)), key=lambda choice: abs(SHARES[choice] - four / one))
    return index, (
        f"From {mib(one):.2f} to {mib(four):.2f} MiB, {four / one:.0%} (predicted). The moments lie with the rows and "
        "are split; the basis is needed whole by every process."
    )
