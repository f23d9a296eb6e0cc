"""Click-like data: numbers and category ids in one row of integers, a yes or no to predict, named splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from comera_lab.experiments.datasets import Dataset
from comera_lab.shapes import ShapeError


class Rows(NamedTuple):
    """x (rows, numbers + fields) int32, numbers first, then one id per field; y (rows,) int64, 0 or 1."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class RecommendationData:
    """Splits of such rows; `table_rows` holds how many different ids each field has, id 0 being "unseen in training".

    Raises ShapeError for sizes that do not fit together, ValueError for an empty split, and IndexError for an id
    that its table has not.
    """

    name: str
    numbers: tuple[str, ...]
    fields: tuple[str, ...]
    table_rows: tuple[int, ...]
    splits: Mapping[str, Rows]
    note: str = ""

    def __post_init__(self) -> None:
        columns = len(self.numbers) + len(self.fields)
        if len(self.table_rows) != len(self.fields):
            raise ShapeError(
                f"each field needs one table, got {len(self.fields)} fields and {len(self.table_rows)} sizes. "
                "Give one size a field."
            )
        for split, (x, y) in self.splits.items():
            if not len(y):
                raise ValueError(f"split {split!r} of {self.name} must hold rows, got none. Check how it was split.")
            if x.shape != (len(y), columns) or x.dtype != torch.int32:
                raise ShapeError(
                    f"split {split!r} must hold x (rows, {columns}) int32 for {len(y)} labels, "
                    f"got {tuple(x.shape)} {x.dtype}. Put the numbers first, then one id per field."
                )
            ids = x[:, len(self.numbers) :]
            for field, rows, low, high in zip(self.fields, self.table_rows, ids.amin(0), ids.amax(0), strict=True):
                if low < 0 or high >= rows:
                    raise IndexError(
                        f"ids of {field!r} must lie in [0, {rows}), got {int(low)} to {int(high)} in {split!r}. "
                        "Fit the vocabulary on this data."
                    )

    def dataset(self, held_out: str = "dev", rows: int | None = None) -> Dataset:
        """For the trainers: "train" against the split `held_out`. `rows` keeps the first so many of train.

        Choose settings on "dev", quote "test".
        """
        for split in ("train", held_out):
            if split not in self.splits:
                raise ValueError(f"held_out must be one of {', '.join(self.splits)}, got {split!r}.")
        train, test = self.splits["train"], self.splits[held_out]
        return Dataset(
            f"{self.name}, {held_out}", train.x[:rows], train.y[:rows], test.x, test.y, classes=2, note=self.note
        )

    def with_shuffled_ids(self, seed: int = 0) -> RecommendationData:
        """The control: the ids of each field renumbered at random (0 stays), the same in every split.

        A dense table cannot tell the difference. A TT-matrix shares cores between ids that are near each other, so
        what it loses here is what the order of the ids gave it.
        """
        draw = torch.Generator().manual_seed(seed)
        fresh = [torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(rows - 1, generator=draw)]).int()
                 for rows in self.table_rows]  # fmt: skip
        splits = {}
        for split, (x, y) in self.splits.items():
            columns = [x[:, : len(self.numbers)]]
            columns += [new[x[:, len(self.numbers) + k].long()][:, None] for k, new in enumerate(fresh)]
            splits[split] = Rows(torch.cat(columns, dim=1), y)
        return dataclasses.replace(self, name=f"{self.name}, ids shuffled", splits=splits)

    def table_bytes(self, dim: int, element_bytes: int = 4) -> int:
        """What dense tables of width `dim` would take."""
        return sum(self.table_rows) * dim * element_bytes
