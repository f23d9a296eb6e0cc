"""Criteo's click logs (Kaggle Display Advertising) as they are downloaded: TSV, .gz or parquet, read as a stream.

A row is a label, 13 integers and 26 hexadecimal tokens, an empty one missing: 40 columns. Tokens are hashed into
tables of chosen sizes, id 0 being a missing token. The logs are CC BY-NC-SA and are not shipped: get train.txt from
Criteo or Kaggle and give its path.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comera_lab.experiments.recommendation import RecommendationData, Rows
from comera_lab.runtime import require
from comera_lab.shapes import ShapeError

NUMBERS = tuple(f"I{k}" for k in range(1, 14))
FIELDS = tuple(f"C{k}" for k in range(1, 27))
COLUMNS = 1 + len(NUMBERS) + len(FIELDS)
HASHED_ROWS = (10_000,) * len(FIELDS)
_LARGEST = 2**31 - 1
_SHOWN = 5
_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads tokens that differ in their last digits alone


@dataclass
class CriteoReport:
    """What was read: good rows, and bad ones by reason with the first few of them by line."""

    rows: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def refuse(self, line: int, reason: str, what: object) -> None:
        self.bad[reason] = self.bad.get(reason, 0) + 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"line {line}: {reason}, got {what!r:.60}")

    def __str__(self) -> str:
        if not self.bad:
            return f"{self.rows:,} rows, none left out"
        reasons = ", ".join(f"{count:,} with {reason}" for reason, count in self.bad.items())
        return "\n".join([f"{self.rows:,} rows, {sum(self.bad.values()):,} left out: {reasons}", *self.examples])


def criteo_batches(
    path: str | Path,
    batch_size: int = 2048,
    *,
    hashed_rows: Sequence[int] = HASHED_ROWS,
    limit: int | None = None,
    report: CriteoReport | None = None,
) -> Iterator[Rows]:
    """Batches of rows in the order of the file, the last one smaller; memory holds one batch.

    `hashed_rows` gives the table size of each of the 26 fields; `limit` stops after so many good rows. Bad rows
    (another number of columns, something that is no number or token) are left out and counted in `report`. Raises
    FileNotFoundError, ShapeError for sizes, ValueError for a parquet file without its 40 columns.
    """
    if len(hashed_rows) != len(FIELDS) or min(hashed_rows) < 2:
        raise ShapeError(f"hashed_rows must be {len(FIELDS)} sizes of at least 2, got {tuple(hashed_rows)}.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}. Try 2048.")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no Criteo file at {path}. Download train.txt and give its path.")
    report = CriteoReport() if report is None else report
    lines = _parquet_rows(path) if path.suffix == ".parquet" else _text_rows(path)
    waiting: list[list[int]] = []
    for number, cells in enumerate(lines, start=1):
        if limit is not None and report.rows >= limit:
            break
        row = _parsed(cells, number, hashed_rows, report)
        if row is None:
            continue
        report.rows += 1
        waiting.append(row)
        if len(waiting) == batch_size:
            yield _rows(waiting)
            waiting = []
    if waiting:
        yield _rows(waiting)


def load_criteo(
    path: str | Path,
    *,
    hashed_rows: Sequence[int] = HASHED_ROWS,
    limit: int | None = 1_000_000,
    report: CriteoReport | None = None,
) -> RecommendationData:
    """The first `limit` rows in memory (160 bytes each), split by time as in the public DLRM: the first six sevenths
    are "train", the halves of the last one (the seventh day) "dev" and "test".

    Raises as `criteo_batches`, and ValueError, with the report, where too few good rows are left for three splits.
    """
    report = CriteoReport() if report is None else report
    batches = list(criteo_batches(path, 65_536, hashed_rows=hashed_rows, limit=limit, report=report))
    x = torch.cat([batch.x for batch in batches]) if batches else torch.zeros(0, COLUMNS - 1, dtype=torch.int32)
    y = torch.cat([batch.y for batch in batches]) if batches else torch.zeros(0, dtype=torch.int64)
    train, dev = len(y) * 6 // 7, len(y) * 13 // 14
    if not 0 < train < dev < len(y):
        raise ValueError(f"{path} must hold at least 14 good rows for three splits, got {report}")
    parts = {"train": slice(0, train), "dev": slice(train, dev), "test": slice(dev, None)}
    splits = {name: Rows(x[part], y[part]) for name, part in parts.items()}
    return RecommendationData("Criteo Kaggle", NUMBERS, FIELDS, tuple(hashed_rows), splits, str(report))


def _text_rows(path: Path) -> Iterator[Sequence[Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            yield line.rstrip("\r\n").split("\t")


def _parquet_rows(path: Path) -> Iterator[Sequence[Any]]:
    parquet = require("pyarrow.parquet", "reading parquet files")
    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    if len(names) != COLUMNS:
        raise ValueError(
            f"{path} must have {COLUMNS} columns (label, 13 integers, 26 tokens), got {len(names)}: "
            f"{', '.join(names[:5])} .. Export all columns in the order of the TSV file."
        )
    for batch in file.iter_batches(batch_size=65_536):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _parsed(cells: Sequence[Any], line: int, hashed_rows: Sequence[int], report: CriteoReport) -> list[int] | None:
    """Label, 13 integers and 26 ids, or None for a bad row."""
    if len(cells) != COLUMNS:
        report.refuse(line, f"other than {COLUMNS} columns", len(cells))
        return None
    if str(cells[0]) not in ("0", "1"):
        report.refuse(line, "a label other than 0 and 1", cells[0])
        return None
    row = [int(cells[0])]
    for value in cells[1 : 1 + len(NUMBERS)]:
        try:
            row.append(0 if value in ("", None) else min(max(int(value), -_LARGEST), _LARGEST))
        except ValueError:
            report.refuse(line, "an integer that is none", value)
            return None
    for k, (token, rows) in enumerate(zip(cells[1 + len(NUMBERS) :], hashed_rows, strict=True)):
        try:
            row.append(0 if token in ("", None) else hashed(int(token, 16), k, rows))
        except (ValueError, TypeError):
            report.refuse(line, "a token that is not hexadecimal", token)
            return None
    return row


def hashed(token: int, salt: int, rows: int) -> int:
    """A token's id in [1, rows), the same on every machine; `salt` makes the fields differ."""
    mixed = (token + salt + 1) * _MIX % 2**64
    return 1 + (mixed >> 32) % (rows - 1)


def _rows(parsed: Iterable[list[int]]) -> Rows:
    table = torch.from_numpy(np.array(list(parsed), dtype=np.int64))
    return Rows(table[:, 1:].int(), table[:, 0].contiguous())
