"""Rows that say how one training of a study of whole models ended. The other kinds are in rows.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankResultRow:
    """How one model of a rank study ended, both denominators beside each other.

    `accuracy` and `loss_nats` are those of the dev side, on which settings were chosen; None for `test_accuracy`
    where nothing was held out. `total_ratio` is dense over compressed for the whole model, `tensorised_ratio` for the
    tensorised layers alone. Step times are medians of the same batch through the model as it started and as it ended,
    taken in turn; a peak is the sum of its pools (weights, grads, optimizer, activations) in such a step. They were
    measured by the code of `cost_commit`, which may be later than the training. `note` says what a number cannot mean.
    """

    model: str
    target_ratio: float | None
    seed: int
    steps: int
    accuracy: float
    loss_nats: float
    test_accuracy: float | None
    test_loss_nats: float | None
    total_mib: float
    tensorised_mib: float
    total_ratio: float
    tensorised_ratio: float
    step_time_before_ms: float
    step_time_after_ms: float
    peak_before_mib: float
    peak_after_mib: float
    pools_before_mib: dict[str, Any]
    pools_after_mib: dict[str, Any]
    cost_commit: str | None
    elapsed_s: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LanguageResultRow:
    """How one pre-training of a language-model study ended.

    `loss_nats` (per token) and `accuracy` are those of the validation side, which chose nothing: `learning_rate` did
    best on held-out files of the training side. `parameters` are those left at the end, `total_ratio` is the dense twin
    over them, `ranks` those of each tensor-train layer. Pools are bytes of a real step in MiB: of the model as training
    began and as it ended. Step times are medians of steps of all methods in turn, for both; `tokens_per_s` follows from
    the first, in which most of the training is spent. `elapsed_s` is training time on a machine that others shared.
    """

    method: str
    optimizer: str
    settings: dict[str, Any]
    learning_rate: float
    seed: int
    steps: int
    tokens: int
    parameters: int
    total_ratio: float
    loss_nats: float
    accuracy: float
    pools_before_mib: dict[str, Any]
    pools_after_mib: dict[str, Any]
    step_time_ms: float
    step_time_after_ms: float
    tokens_per_s: float
    ranks: dict[str, Any]
    cost_commit: str | None
    elapsed_s: float
