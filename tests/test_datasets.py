"""Laws of the data sets: the same everywhere, nothing on both sides, nothing that cannot be trained on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from comera_lab.experiments import datasets
from comera_lab.experiments.datasets import Dataset, digits
from comera_lab.shapes import ShapeError


def _small(**changes: object) -> Dataset:
    values: dict[str, object] = {
        "name": "small",
        "train_x": torch.rand(6, 3),
        "train_y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "test_x": torch.rand(3, 3),
        "test_y": torch.tensor([0, 1, 2]),
        "classes": 3,
    }
    return Dataset(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [8, 28])
def test_digits_have_the_promised_sizes_and_range(size: int) -> None:
    data = digits(size)  # type: ignore[arg-type]
    assert data.train_x.shape == (1461, size * size)
    assert data.test_x.shape == (336, size * size)
    assert data.features == size * size
    assert data.train_x.dtype == data.test_x.dtype == torch.float32
    assert data.train_y.dtype == torch.int64
    assert data.train_x.min() == 0 and data.train_x.max() == 1
    assert data.classes == 10
    assert data.test_y.bincount().min() >= 25, "every class must be tested"


def test_no_image_stands_on_both_sides_of_the_split() -> None:
    data = digits(8)
    train = {row.numpy().tobytes() for row in data.train_x}
    test = {row.numpy().tobytes() for row in data.test_x}
    assert len(train) == 1461 and len(test) == 336, "the data holds no equal images"
    assert not train & test


def test_both_sizes_hold_the_same_images_in_the_same_order() -> None:
    small, large = digits(8), digits(28)
    assert torch.equal(small.train_y, large.train_y)
    assert torch.equal(small.test_y, large.test_y)
    scaled = functional.interpolate(
        small.test_x.double().reshape(-1, 1, 8, 8), size=28, mode="bilinear", align_corners=False
    )
    torch.testing.assert_close(large.test_x, scaled.reshape(-1, 784).float(), rtol=1e-6, atol=1e-7)


def test_digits_depend_on_no_seed_hash_or_process_and_load_scikit_learn_lazily() -> None:
    torch.manual_seed(123)
    code = (
        "import sys; from comera_lab.experiments.datasets import digits\n"
        "assert 'sklearn' not in sys.modules\n"
        "print(digits(8).digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert other.stdout.strip() == digits(8).digest


def test_changed_digits_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets._DIGITS_DIGEST, 8, "0" * 64)
    with pytest.raises(ValueError, match=r"digest 000000000000, got .* pip install --force-reinstall scikit-learn"):
        digits(8)


def test_missing_scikit_learn_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else found(name, *rest)
    )
    with pytest.raises(ImportError, match=r"scikit-learn is needed for the digits data\. Install it with: pip"):
        digits(8)


def test_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be 8 or 28 pixels, got 32"):
        digits(32)  # type: ignore[arg-type]


@pytest.mark.parametrize("new", [4, 7, 8, 28, 33])
def test_bilinear_weights_are_a_partition_of_one(new: int) -> None:
    weights, unit = datasets._bilinear_weights(8, new)
    assert (weights.sum(axis=1) == unit).all()
    assert (weights >= 0).all()


def test_own_tensors_are_split_by_content_alone() -> None:
    x = torch.rand(200, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(200) % 4
    data = Dataset.from_tensors("mine", x, y)
    assert data.classes == 4
    assert len(data.train_y) + len(data.test_y) == 200
    assert 20 <= len(data.test_y) <= 60
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    again = Dataset.from_tensors("mine", x[shuffled], y[shuffled])
    assert {tuple(row.tolist()) for row in data.test_x} == {tuple(row.tolist()) for row in again.test_x}


def test_equal_rows_of_own_tensors_stay_on_one_side() -> None:
    x = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).repeat(3, 1)
    data = Dataset.from_tensors("mine", x, torch.arange(150) % 2)
    train = {tuple(row.tolist()) for row in data.train_x}
    assert not train & {tuple(row.tolist()) for row in data.test_x}


def test_digest_follows_the_content() -> None:
    x = torch.rand(6, 3)
    assert _small(train_x=x).digest != _small(train_x=x + 1).digest
    test_x = torch.rand(3, 3)
    one, two = _small(train_x=x, test_x=test_x), _small(train_x=x.clone(), test_x=test_x, name="other")
    assert one.digest == two.digest == one.to("cpu").digest


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train_x": torch.rand(0, 3), "train_y": torch.zeros(0, dtype=torch.int64)}, ShapeError, "at least one"),
        ({"test_x": torch.rand(0, 3), "test_y": torch.zeros(0, dtype=torch.int64)}, ShapeError, "test_x must hold"),
        ({"train_y": torch.tensor([0, 1])}, ShapeError, r"got \(6, 3\) and \(2,\). Give one label per row"),
        ({"train_x": torch.rand(6)}, ShapeError, r"must be \(rows, ...\)"),
        ({"test_x": torch.rand(3, 4)}, ShapeError, "samples of one shape and dtype"),
        ({"test_x": torch.rand(3, 3).double()}, ShapeError, "got float32 .* and float64"),
        ({"train_x": torch.ones(6, 3, dtype=torch.int64)}, ValueError, r"floating point, got torch.int64.*float\(\)"),
        ({"train_y": torch.tensor([0.0, 1, 2, 0, 1, 2])}, ValueError, r"int64, got torch.float32.*long\(\)"),
        ({"train_x": torch.full((6, 3), float("nan"))}, ValueError, "must be finite"),
        ({"test_y": torch.tensor([0, 1, 3])}, ValueError, r"\[0, 3\), got labels from 0 to 3"),
        ({"test_y": torch.tensor([0, 1, -1])}, ValueError, "from -1 to 1"),
        ({"classes": 1}, ValueError, "at least 2, got 1"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _small(**changes)


def test_too_few_own_rows_are_refused_by_name() -> None:
    with pytest.raises(ShapeError, match="must hold at least one sample"):
        Dataset.from_tensors("tiny", torch.rand(1, 2), torch.tensor([1]))
    with pytest.raises(ShapeError, match="at least one sample"):
        Dataset.from_tensors("none", torch.rand(0, 2), torch.zeros(0, dtype=torch.int64), classes=2)
    with pytest.raises(ShapeError, match="Give one label per row"):
        Dataset.from_tensors("odd", torch.rand(4, 2), torch.zeros(3, dtype=torch.int64))
