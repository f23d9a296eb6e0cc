"""Data that is there without a download, and the small class that any other data fits in.

A split is decided by the sha1 of a sample's own content: the same on every machine, with no seed, and two
equal samples can never stand on both sides of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comera_lab.runtime import require
from comera_lab.shapes import ShapeError

# sha256 of the finished arrays: what every recorded accuracy of this kit belongs to.
_DIGITS_DIGEST = {
    8: "2cf593409024a5655aa78a2f9e71ed322d97de2b56e088167be6e1e48d15cd2c",
    28: "bc2baf5550bae3c49e656eb0a72b610f79235c93b80710f94bd48d6083dda7f5",
}
_TEST_SHARE = 5  # one sample in five goes to the test side
_PIXEL_LEVELS = 16  # scikit-learn's digits hold the integers 0..16


@dataclass(frozen=True)
class Dataset:
    """A classification task held in memory: `train_x (rows, ...)`, `train_y (rows,)`, the same for test.

    x is floating point and finite, or int32 token ids; y is int64 in `[0, classes)`. Neither side may be empty.
    Raises ShapeError for sizes that do not fit together and ValueError for values that cannot be trained on.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    note: str = ""

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes}. Count the distinct labels.")
        _check_side("train", self.train_x, self.train_y, self.classes)
        _check_side("test", self.test_x, self.test_y, self.classes)
        if self.train_x.shape[1:] != self.test_x.shape[1:] or self.train_x.dtype != self.test_x.dtype:
            raise ShapeError(
                f"train_x and test_x must hold samples of one shape and dtype, got {_describe(self.train_x)} "
                f"and {_describe(self.test_x)}. Prepare both in the same way."
            )

    @classmethod
    def from_tensors(cls, name: str, x: Tensor, y: Tensor, *, classes: int | None = None, note: str = "") -> Dataset:
        """x (rows, ...), y (rows,) -> a data set split about 80/20 by the sha1 of each row's bytes.

        `classes` is the largest label plus one unless given. Raises ShapeError where the split would leave a
        side empty, which happens with a handful of rows: build `Dataset(...)` with your own split then.
        """
        if x.ndim < 2 or y.shape != x.shape[:1]:
            raise ShapeError(
                f"x must be (rows, ...) and y (rows,), got {tuple(x.shape)} and {tuple(y.shape)}. "
                "Give one label per row."
            )
        test = torch.tensor([_in_test(_bytes(row)) for row in x.detach().cpu()], dtype=torch.bool)
        if classes is None:
            classes = int(y.max()) + 1 if len(y) else 0
        return cls(name, x[~test], y[~test], x[test], y[test], classes, note)

    @property
    def features(self) -> int:
        """Numbers in one sample."""
        return self.train_x[0].numel()

    @cached_property
    def digest(self) -> str:
        """sha256 over dtype, shape and bytes of the four tensors: two data sets are equal if these are."""
        digest = hashlib.sha256()
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(_describe(tensor).encode())
            digest.update(_bytes(tensor))
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Dataset:
        """The same data with its tensors on `device`."""
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
        )


def digits(size: Literal[8, 28] = 8) -> Dataset:
    """Handwritten digits: x (rows, size * size) float32 in [0, 1], ten classes, 1,461 to train and 336 to test.

    `size=8` is scikit-learn's bundled copy of the UCI test set (Alpaydin and Kaynak 1998), read from the
    installed package. `size=28` scales the same images up bilinearly to 784 features, with no new
    information: it is there to give layers the width of an MNIST model. The split is the same for both.
    Raises ImportError where scikit-learn is missing and ValueError where its digits are not the known ones.
    """
    if size not in (8, 28):
        raise ValueError(f"size must be 8 or 28 pixels, got {size!r}. Use digits(8) or digits(28).")
    require("sklearn", "the digits data")
    from sklearn.datasets import load_digits

    bundled = load_digits()
    pixels = np.asarray(bundled.images).astype(np.int64)                  # (rows, 8, 8), values 0..16
    keys = [image.astype(np.uint8).tobytes() for image in pixels]
    test = np.array([_in_test(key) for key in keys])
    x = torch.from_numpy(_scale_up(pixels, size).reshape(len(pixels), -1))  # (rows, size * size)
    y = torch.from_numpy(np.asarray(bundled.target).astype(np.int64))
    data = Dataset(
        name=f"digits {size}x{size}",
        train_x=x[~test],
        train_y=y[~test],
        test_x=x[test],
        test_y=y[test],
        classes=10,
        note="scikit-learn's bundled digits; split by sha1 of the pixels"
        + ("" if size == 8 else "; scaled up bilinearly from 8x8"),
    )
    if data.digest != _DIGITS_DIGEST[size]:
        raise ValueError(
            f"the digits must have digest {_DIGITS_DIGEST[size][:12]}, got {data.digest[:12]}: this "
            "scikit-learn ships other data than the one the recorded results were made with. "
            "Reinstall it with: pip install --force-reinstall scikit-learn"
        )
    return data


def _check_side(side: str, x: Tensor, y: Tensor, classes: int) -> None:
    if x.ndim < 2 or y.shape != x.shape[:1]:
        raise ShapeError(
            f"{side}_x must be (rows, ...) and {side}_y (rows,), got {tuple(x.shape)} and {tuple(y.shape)}. "
            "Give one label per row."
        )
    if x.numel() == 0:
        raise ShapeError(f"{side}_x must hold at least one sample, got {tuple(x.shape)}. Check the split.")
    if not x.is_floating_point() and x.dtype != torch.int32:
        raise ValueError(
            f"{side}_x must be floating point, got {x.dtype}. Convert it with .float(), or token ids with .int()."
        )
    if y.dtype != torch.int64:
        raise ValueError(f"{side}_y must be int64, got {y.dtype}. Convert it with .long().")
    if not torch.isfinite(x).all():
        raise ValueError(f"{side}_x must be finite, got NaN or infinity. Drop or fill those samples first.")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{side}_y must lie in [0, {classes}), got labels from {low} to {high}. "
            "Number the classes from 0, or raise `classes`."
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _in_test(key: bytes) -> bool:
    return int.from_bytes(hashlib.sha1(key, usedforsecurity=False).digest(), "big") % _TEST_SHARE == 0


def _scale_up(pixels: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float32]:
    """pixels (rows, s, s) integers 0..16 -> (rows, size, size) float32 in [0, 1], bilinear.

    All weights are whole multiples of 1 / (2 size), so the sums are made in integers and rounded once, in the
    division: every machine gets the same bits, which an interpolation in floating point does not promise.
    """
    weights, unit = _bilinear_weights(pixels.shape[-1], size)
    scaled = np.einsum("ia,nab,jb->nij", weights, pixels, weights)        # (rows, size, size)
    fractions: npt.NDArray[np.float32] = scaled.astype(np.float32) / np.float32(_PIXEL_LEVELS * unit * unit)
    return fractions


def _bilinear_weights(old: int, new: int) -> tuple[npt.NDArray[np.int64], int]:
    """(new, old) integer weights and their unit: pixel centres aligned, edges repeated."""
    unit = 2 * new
    weights = np.zeros((new, old), dtype=np.int64)
    for i in range(new):
        # the centre of new pixel i lies at (i + 1/2) old / new - 1/2 of the old grid
        position = min(max((2 * i + 1) * old - new, 0), (old - 1) * unit)
        left, share = divmod(position, unit)
        weights[i, left] += unit - share
        weights[i, min(left + 1, old - 1)] += share
    return weights, unit
