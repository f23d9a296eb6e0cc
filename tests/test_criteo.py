"""A tiny file in Criteo's format: 40 tab-separated columns, empty ones missing, some lines broken as real ones are."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from comera_lab.experiments import criteo
from comera_lab.experiments.criteo import CriteoReport, criteo_batches, hashed, load_criteo
from comera_lab.shapes import ShapeError

BAD = {
    "0\t1\t2": "other than 40 columns",
    "\t".join(["2", *["1"] * 13, *["0a"] * 26]): "a label other than 0 and 1",
    "\t".join(["1", "1.5", *["1"] * 12, *["0a"] * 26]): "an integer that is none",
    "\t".join(["1", *["1"] * 13, *["0a"] * 25, "zz"]): "a token that is not hexadecimal",
}


def line(k: int) -> str:
    numbers = [str(k - 2) if j != 3 else "" for j in range(13)]
    tokens = [f"{k * 31 + j:08x}" if j != 5 else "" for j in range(26)]
    return "\t".join([str(k % 2), *numbers, *tokens])


@pytest.fixture
def file(tmp_path):
    lines = [line(k) for k in range(28)]
    for place, broken in zip((3, 9, 9, 20), BAD, strict=True):
        lines.insert(place, broken)
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_are_read_in_order_bad_ones_counted_and_shown(file):
    report = CriteoReport()
    batches = list(criteo_batches(file, 10, report=report))
    assert [len(batch.y) for batch in batches] == [10, 10, 8]
    x, y = torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])
    assert torch.equal(y, torch.arange(28) % 2)
    assert x.dtype == torch.int32
    assert x.shape == (28, 39)
    assert torch.equal(x[:, 0], torch.arange(-2, 26, dtype=torch.int32))
    assert not x[:, 3].any()
    ids = x[:, 13:]
    assert not ids[:, 5].any()
    assert int(ids.min()) == 0
    assert int(ids[:, :5].min()) >= 1
    assert int(ids.max()) < 10_000
    assert int(ids[7, 2]) == hashed(7 * 31 + 2, 2, 10_000)
    assert report.rows == 28
    assert report.bad == dict.fromkeys(BAD.values(), 1)
    text = str(report)
    assert text.startswith("28 rows, 4 left out: 1 with other than 40 columns")
    assert "line 4: other than 40 columns, got 3" in text
    assert str(CriteoReport(rows=3)) == "3 rows, none left out"


def test_gzip_windows_line_ends_and_limit(file, tmp_path):
    packed = tmp_path / "train.txt.gz"
    with gzip.open(packed, "wt", newline="") as out:
        out.write(file.read_text().replace("\n", "\r\n"))
    plain = torch.cat([batch.x for batch in criteo_batches(file, 100)])
    assert torch.equal(torch.cat([batch.x for batch in criteo_batches(packed, 100)]), plain)
    report = CriteoReport()
    assert sum(len(batch.y) for batch in criteo_batches(file, 4, limit=6, report=report)) == 6
    assert report.rows == 6


def test_nothing_is_read_ahead_of_need(file, monkeypatch):
    read = []
    right = criteo._parsed
    monkeypatch.setattr(criteo, "_parsed", lambda *given: (read.append(1), right(*given))[1])
    next(iter(criteo_batches(file, 2)))
    assert len(read) == 2


def test_splits_follow_time_and_missing_tokens_are_the_unseen_id(file):
    data = load_criteo(file)
    assert [len(rows.y) for rows in data.splits.values()] == [24, 2, 2]
    assert data.splits["dev"].x[0, 0] == 22
    assert len(data.dataset("test").train_y) == 24
    assert "4 left out" in data.note


def test_hashing_spreads_tokens_and_differs_between_fields():
    ids = torch.tensor([[hashed(token, field, 100) for token in range(10_000)] for field in range(2)])
    counts = torch.stack([ids[field].bincount(minlength=100) for field in range(2)])
    assert not counts[:, 0].any()
    # 101 a row on average; a standard deviation of ten
    assert 50 < int(counts[:, 1:].min()) <= int(counts.max()) < 160
    assert float((ids[0] == ids[1]).float().mean()) < 0.05


def fake_parquet(names, columns):
    """pyarrow's three calls that the loader makes, for a test environment without it."""
    batch = SimpleNamespace(columns=[SimpleNamespace(to_pylist=lambda c=c: c) for c in columns])
    module = ModuleType("pyarrow.parquet")
    module.ParquetFile = lambda path: SimpleNamespace(
        schema_arrow=SimpleNamespace(names=names), iter_batches=lambda batch_size: [batch]
    )
    return module


def test_parquet_columns_read_as_the_lines_do(file, tmp_path, monkeypatch):
    good = [line(k).split("\t") for k in range(28)]
    typed = [[int(row[0]), *(int(v) if v else None for v in row[1:14]), *(t or None for t in row[14:])] for row in good]
    columns = [list(column) for column in zip(*typed, strict=True)]
    path = tmp_path / "train.parquet"
    path.write_bytes(b"")
    names = ["label", *criteo.NUMBERS, *criteo.FIELDS]
    monkeypatch.setattr(criteo, "require", lambda package, purpose: fake_parquet(names, columns))
    (from_parquet,) = criteo_batches(path, 100)
    (from_text,) = criteo_batches(file, 100)
    assert torch.equal(from_parquet.x, from_text.x)
    assert torch.equal(from_parquet.y, from_text.y)
    monkeypatch.setattr(criteo, "require", lambda package, purpose: fake_parquet(names[:-2], columns[:-2]))
    with pytest.raises(ValueError, match="must have 40 columns .*got 38: label, I1, I2"):
        next(criteo_batches(path, 100))


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pyarrow is needed for reading parquet files.*comera_lab\[data\]"):
        next(criteo_batches(path, 100))


def test_bad_requests_are_refused(file, tmp_path):
    with pytest.raises(FileNotFoundError, match="no Criteo file at .*missing"):
        next(criteo_batches(tmp_path / "missing.txt"))
    with pytest.raises(ShapeError, match="hashed_rows must be 26 sizes of at least 2"):
        next(criteo_batches(file, hashed_rows=(5,) * 25))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        next(criteo_batches(file, 0))
    empty = Path(tmp_path / "empty.txt")
    empty.write_text(next(iter(BAD)) + "\n")
    with pytest.raises(ValueError, match=r"at least 14 good rows for three splits, got 0 rows, 1 left out"):
        load_criteo(empty)
