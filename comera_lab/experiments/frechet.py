"""How good are generated digits? Frechet distance in the features of a classifier that is trained here.

The Frechet distance of two sets of images is that of two normal distributions with the means and covariances of their
features (Heusel and others 2017, arXiv 1706.08500, there with Inception features). Its scale belongs to the
classifier, so read it between two marks that `DigitJudge` gives: real digits it was not trained on, and pure noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.experiments.train import TrainConfig, fit
from comera_lab.shapes import ShapeError

SIDE = 8
_FEATURES = 32


class DigitClassifier(nn.Module):
    """x (rows, 64) in [0, 1] -> logits (rows, 10); `features` are the (rows, 32) before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.classifier = nn.Linear(32 * 4, _FEATURES), nn.Linear(_FEATURES, 10)

    def features(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 1, SIDE, SIDE)
        h = functional.max_pool2d(functional.relu(self.conv1(images)), 2)  # (rows, 16, 4, 4)
        h = functional.max_pool2d(functional.relu(self.conv2(h)), 2)  # (rows, 32, 2, 2)
        out: Tensor = functional.gelu(self.hidden(h.flatten(1)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


@dataclass(frozen=True)
class DigitJudge:
    """A trained classifier with the feature statistics of the training digits.

    `accuracy` is its test accuracy; `real` the distance of the test digits from the training digits, `noise` that of
    images of uniform noise: what a distance is read between.
    """

    classifier: DigitClassifier
    mean: Tensor
    covariance: Tensor
    accuracy: float
    real: float
    noise: float

    def distance(self, images: Tensor) -> float:
        """Frechet distance of `images` (count, 64 numbers each, in [0, 1]) from the training digits; 0 is equal."""
        return frechet_distance(*_moments(_features(self.classifier, images)), self.mean, self.covariance)

    def labels(self, images: Tensor) -> Tensor:
        """The digit that the classifier sees in each image, (count,)."""
        with torch.no_grad():
            logits: Tensor = self.classifier(images.reshape(len(images), -1))
        return logits.argmax(1)


@cache
def digit_judge(seed: int = 0) -> DigitJudge:
    """Train the classifier on digits(8), once per process; the same on every run. A few seconds on one core."""
    data = digits(8)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        classifier = DigitClassifier()
    finally:
        torch.set_rng_state(generator_state)
    config = TrainConfig(steps=600, batch_size=64, learning_rate=3e-3, seed=seed, evaluate_every=0)
    result = fit(classifier, data, config)
    assert result.accuracy is not None
    return _judge(classifier.eval(), data, result.accuracy)


def _judge(classifier: DigitClassifier, data: Dataset, accuracy: float) -> DigitJudge:
    mean, covariance = _moments(_features(classifier, data.train_x))
    noise = torch.rand(1000, data.features, generator=torch.Generator().manual_seed(0))
    real, noisy = (
        frechet_distance(*_moments(_features(classifier, images)), mean, covariance) for images in (data.test_x, noise)
    )
    return DigitJudge(classifier, mean, covariance, accuracy, real, noisy)


def frechet_distance(mean_a: Tensor, covariance_a: Tensor, mean_b: Tensor, covariance_b: Tensor) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), in float64. Means (n,), covariances (n, n) symmetric."""
    a, b = covariance_a.double(), covariance_b.double()
    if a.shape != b.shape or a.shape != (len(mean_a), len(mean_a)) or mean_a.shape != mean_b.shape:
        raise ShapeError(
            f"means must be (n,) and covariances (n, n), got {tuple(mean_a.shape)}, {tuple(a.shape)}, "
            f"{tuple(mean_b.shape)} and {tuple(b.shape)}. Take both from the same features."
        )
    values, vectors = torch.linalg.eigh(a)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    # tr (C_a C_b)^(1/2) through the symmetric product with the same eigenvalues
    cross = torch.linalg.eigvalsh(root @ b @ root).clamp_min(0).sqrt().sum()
    distance = (mean_a.double() - mean_b.double()).square().sum() + a.trace() + b.trace() - 2 * cross
    return max(float(distance), 0.0)


def _features(classifier: DigitClassifier, images: Tensor) -> Tensor:
    flat = images.reshape(len(images), -1)
    if len(flat) < 2 or flat.shape[1] != SIDE * SIDE:
        raise ShapeError(
            f"images must be at least 2 of {SIDE * SIDE} numbers, got {tuple(images.shape)}. "
            f"Give digits of {SIDE} x {SIDE} pixels in [0, 1]."
        )
    if not torch.isfinite(flat).all():
        raise ValueError("images must be finite, got NaN or infinity. The model that made them has diverged.")
    with torch.no_grad():
        return classifier.features(flat)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    return features.double().mean(0), features.double().T.cov()
