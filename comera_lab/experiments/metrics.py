"""How good probabilities of yes are: their order (AUC), their information (cross-entropy), and their honesty."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comera_lab.experiments.recommendation import Rows
from comera_lab.shapes import ShapeError

_ROWS_AT_A_TIME = 8192


class Scores(NamedTuple):
    """`auc` in [0, 1], `normalised_entropy` (1 is knowing the base rate alone, 0 is knowing all), `accuracy` at 1/2."""

    auc: float
    normalised_entropy: float
    accuracy: float


class CalibrationBin(NamedTuple):
    """Mean of the probabilities in a bin, the share of yes among its rows, and how many they are."""

    predicted: float
    observed: float
    rows: int


def auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a random yes scores above a random no, ties counting one half. scores, labels (rows,).

    By the sum of ranks (Mann and Whitney 1947). Raises ShapeError for sizes that differ, ValueError for scores that
    are not finite, labels other than 0 and 1, or one class alone.
    """
    _check(scores, labels)
    _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    above = counts.cumsum(0)
    ranks = (above.double() - (counts.double() - 1) / 2)[inverse]
    yes = labels == 1
    positives, negatives = int(yes.sum()), int((~yes).sum())
    return float((ranks[yes].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def normalised_entropy(logits: Tensor, labels: Tensor) -> float:
    """Cross-entropy over that of always saying the base rate of `labels` (He et al., ADKDD 2014). logits (rows,).

    Raises as `auc`.
    """
    _check(logits, labels)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    rate = float(labels.double().mean())
    return float(loss) / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def calibration(logits: Tensor, labels: Tensor, bins: int = 10) -> list[CalibrationBin]:
    """Bins of equally many rows from the lowest to the highest probability; honest ones predict what is observed.

    Raises as `auc`, and ValueError for more bins than rows.
    """
    _check(logits, labels)
    if not 1 <= bins <= len(labels):
        raise ValueError(f"bins must lie in [1, {len(labels)}], one row each at least, got {bins}. Try 10.")
    order = torch.argsort(logits, stable=True)
    chunks = torch.tensor_split(order, bins)
    probabilities = logits.double().sigmoid()
    return [
        CalibrationBin(float(probabilities[rows].mean()), float(labels[rows].double().mean()), len(rows))
        for rows in chunks
    ]


def scores(logits: Tensor, labels: Tensor) -> Scores:
    """All three of logits (rows,) and labels (rows,). Raises as `auc`."""
    _check(logits, labels)
    right = (logits > 0) == (labels == 1)
    return Scores(auc(logits, labels), normalised_entropy(logits, labels), float(right.double().mean()))


@torch.no_grad()
def logits_of(model: nn.Module, rows: Rows) -> Tensor:
    """(rows,) log-odds of yes from a model with two logits, in evaluation mode, on the CPU."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        chunks = [model(x.to(device)) for x in torch.split(rows.x, _ROWS_AT_A_TIME)]
    finally:
        model.train(was_training)
    logits = torch.cat(chunks).cpu()
    return logits[:, 1] - logits[:, 0]


def _check(scores: Tensor, labels: Tensor) -> None:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ShapeError(
            f"scores and labels must both be (rows,), got {tuple(scores.shape)} and {tuple(labels.shape)}. "
            "Give one score for each label."
        )
    if not torch.isfinite(scores).all():
        raise ValueError("scores must be finite, got NaN or infinity. The model that made them has diverged.")
    if not ((labels == 0) | (labels == 1)).all():
        raise ValueError(f"labels must be 0 or 1, got values from {labels.min()} to {labels.max()}.")
    if not 0 < int(labels.sum()) < len(labels):
        raise ValueError(f"both classes must be there, got {int(labels.sum())} yes in {len(labels)} rows.")
