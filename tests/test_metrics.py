from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from comera_lab.experiments.metrics import auc, calibration, logits_of, normalised_entropy, scores
from comera_lab.experiments.recommendation import Rows
from comera_lab.shapes import ShapeError


def drawn(rows: int, levels: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that take `levels` values, so that there are ties, and labels that follow them loosely."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows,), generator=draw).float() / levels * 4 - 2
    labels = (torch.rand(rows, generator=draw) < torch.sigmoid(logits)).long()
    labels[:2] = torch.tensor([0, 1])
    return logits, labels


@pytest.mark.parametrize("levels", [1, 2, 7, 10**6])
def test_auc_counts_ties_as_scikit_learn_does(levels):
    logits, labels = drawn(500, levels)
    assert auc(logits, labels) == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)


def test_auc_by_hand():
    labels = torch.tensor([0, 1, 0, 1])
    assert auc(torch.tensor([0.1, 0.9, 0.2, 0.8]), labels) == 1
    assert auc(torch.tensor([0.9, 0.1, 0.8, 0.2]), labels) == 0
    assert auc(torch.zeros(4), labels) == 0.5
    assert auc(torch.tensor([0.0, 0.5, 0.5, 1.0]), labels) == 0.875


def test_normalised_entropy_is_log_loss_over_that_of_the_base_rate():
    logits, labels = drawn(500, 10**6)
    rate = float(labels.double().mean())
    base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    want = log_loss(labels, logits.double().sigmoid()) / base
    assert normalised_entropy(logits, labels) == pytest.approx(want, rel=1e-9)
    constant = torch.full((500,), math.log(rate / (1 - rate)), dtype=torch.float64)
    assert normalised_entropy(constant, labels) == pytest.approx(1)


def test_calibration_bins_are_equal_ordered_and_honest_where_labels_follow_the_logits():
    logits, labels = drawn(20_003, 10**6)
    bins = calibration(logits, labels, 10)
    assert sum(one.rows for one in bins) == 20_003
    assert max(one.rows for one in bins) - min(one.rows for one in bins) <= 1
    assert [one.predicted for one in bins] == sorted(one.predicted for one in bins)
    # 2,000 rows a bin: a standard error of at most 0.011
    assert all(abs(one.predicted - one.observed) < 0.04 for one in bins)
    boasting = calibration(3 * logits, labels, 10)
    assert boasting[0].predicted < boasting[0].observed - 0.05


def test_scores_and_logits_of_a_model_with_two_logits():
    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            assert not self.training
            return torch.stack([self.shift.expand(len(x)), x[:, 0] + self.shift], dim=1)

    x = torch.arange(-10_000, 10_000, dtype=torch.int32)[:, None]
    model = Fixed()
    logits = logits_of(model, Rows(x, (x[:, 0] > 0).long()))
    assert torch.equal(logits, x[:, 0].float())
    assert model.training
    got = scores(logits, (x[:, 0] > 0).long())
    assert got.auc == 1
    assert got.accuracy == 1


@pytest.mark.parametrize(
    ("logits", "labels", "kind", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 1]), ShapeError, r"both be \(rows,\), got \(3,\) and \(2,\)"),
        (torch.tensor([0.0, math.nan]), torch.tensor([0, 1]), ValueError, "scores must be finite, got NaN"),
        (torch.zeros(2), torch.tensor([0, 2]), ValueError, "labels must be 0 or 1, got values from 0 to 2"),
        (torch.zeros(2), torch.tensor([1, 1]), ValueError, "both classes must be there, got 2 yes in 2 rows"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64), ValueError, "both classes must be there, got 0 yes"),
    ],
)
def test_bad_scores_are_refused(logits, labels, kind, message):
    for measure in (auc, normalised_entropy, calibration, scores):
        with pytest.raises(kind, match=message):
            measure(logits, labels)


def test_more_bins_than_rows_are_refused():
    with pytest.raises(ValueError, match=r"bins must lie in \[1, 2\], one row each at least, got 3"):
        calibration(torch.zeros(2), torch.tensor([0, 1]), 3)
