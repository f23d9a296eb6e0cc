"""DLRM (Naumov et al., arXiv 1906.00091), its large tables dense, TT-matrices, or hashed: twins from one class.

Numbers go through a bottom MLP, each id through its table; the dot products of all these vectors, and the bottom
vector itself, go through a top MLP to one logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.layers import TTEmbedding
from comera_lab.models.dense import dense_linear, dense_table
from comera_lab.shapes import ShapeError, TTMShape, positive_int

Kind = Literal["dense", "tt", "hash"]
# How many different tokens each of the 26 columns of Criteo Kaggle has, as counted by the public DLRM code.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
# Row modes of the tables that CoMERA's authors compress (code: ziyangjoy/Low_precision_tensorized_training).
_CRITEO_MODES = {
    2: (200, 220, 250), 3: (125, 130, 136), 11: (200, 200, 209), 15: (166, 175, 188), 20: (200, 200, 200)
}  # fmt: skip
# Multiplier of the multiplicative hash (Knuth): neighbouring ids must not fall into neighbouring rows.
_HASH = 2654435761


@dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """Sizes of a DLRM. `table_rows` gives the ids of each field, `numbers` how many numbers come before them.

    `bottom` and `top` are hidden widths: the bottom MLP ends at `dim`, the top one at 1. Tables of at least
    `threshold` rows are TT-matrices of `rank` and `order` when `kind="tt"`; when "hash" they keep as many rows as the
    cores of that TT-matrix would pay for. `row_modes` (field -> modes) and `column_modes` replace the chosen modes.
    """

    table_rows: tuple[int, ...]
    numbers: int = 13
    dim: int = 64
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (128, 64)
    kind: Kind = "tt"
    rank: int = 16
    order: int = 3
    threshold: int = 10_000
    row_modes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    column_modes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "tt", "hash"):
            raise ValueError(f"kind must be 'dense', 'tt' or 'hash', got {self.kind!r}. Use 'tt' for small tables.")
        if not self.table_rows:
            raise ShapeError("table_rows must not be empty, got no table. Give the number of ids of each field.")
        for name in ("numbers", "dim", "rank", "order", "threshold"):
            positive_int(getattr(self, name), name)
        for name in ("table_rows", "bottom", "top"):
            for k, value in enumerate(getattr(self, name)):
                positive_int(value, f"{name}[{k}]")

    @classmethod
    def criteo(cls, kind: Kind = "tt") -> DLRMConfig:
        """Criteo Kaggle as the public code of CoMERA's authors has it: dim 128, five tables as rank-16 TT-matrices."""
        return cls(
            table_rows=CRITEO_ROWS,
            numbers=13,
            dim=128,
            bottom=(512, 256, 256),
            top=(512, 256),
            kind=kind,
            threshold=1_000_000,
            row_modes=tuple(_CRITEO_MODES.items()),
            column_modes=(4, 4, 8),
        )

    def compressed(self, field: int) -> TTMShape | None:
        """Shape of a field's table as a TT-matrix, None where it stays dense."""
        rows = self.table_rows[field]
        if self.kind == "dense" or rows < self.threshold:
            return None
        modes = dict(self.row_modes).get(field)
        return TTMShape.for_table(rows, self.dim, self.rank, self.order, modes, self.column_modes if modes else None)


class HashedTable(nn.Module):
    """ids (...) in [0, rows) -> (..., dim) from a table of `kept` rows that the ids share by a hash."""

    def __init__(self, rows: int, table: nn.Embedding) -> None:
        super().__init__()
        self.rows, self.table = rows, table

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table((ids.long() * _HASH % 2**32) % self.table.num_embeddings)
        return rows


class DLRM(nn.Module):
    """x (rows, numbers + fields) int32 -> logits (rows, 2).

    Numbers enter as log(1 + max(v, 0)), the published transform. The first logit is 0 and the second is the model's
    one logit, so that cross-entropy over two classes is the published loss and the trainers serve. Tables start with
    the standard deviation of the published uniform(+-1 / sqrt(rows)), TT-matrices too.
    """

    def __init__(self, config: DLRMConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.bottom = _mlp((config.numbers, *config.bottom, config.dim), generator, last_relu=True)
        vectors = len(config.table_rows) + 1
        pairs = vectors * (vectors - 1) // 2
        self.top = _mlp((config.dim + pairs, *config.top, 1), generator, last_relu=False)
        self.tables = nn.ModuleList(_table(config, field, generator) for field in range(len(config.table_rows)))
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        # of element (i, j) of a symmetric matrix, the number of its pair; the diagonal has none and reads a zero
        numbers = torch.full((vectors, vectors), pairs)
        numbers[rows, columns] = numbers[columns, rows] = torch.arange(pairs)
        self.register_buffer("pair_of", numbers.flatten(), persistent=False)

    pairs: Tensor
    pair_of: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Raises ShapeError for another number of columns, IndexError for an id that a table has not."""
        numbers, columns = self.config.numbers, self.config.numbers + len(self.tables)
        if x.dim() != 2 or x.shape[1] != columns:
            raise ShapeError(f"x must be (rows, {columns}), got {tuple(x.shape)}. Put the numbers first, then the ids.")
        if x.is_floating_point():
            raise TypeError(f"x must hold integers, ids among them, got {x.dtype}. Convert it with .int().")
        dense = self.bottom(torch.log1p(x[:, :numbers].clamp_min(0).to(next(self.top.parameters()).dtype)))
        ids = x[:, numbers:].t().contiguous()
        vectors = torch.stack([dense, *(table(ids[k]) for k, table in enumerate(self.tables))], dim=1)
        dots: Tensor = _PairDots.apply(vectors, self.pairs, self.pair_of)  # type: ignore[no-untyped-call]
        logit = self.top(torch.cat([dense, dots], dim=1))
        return functional.pad(logit, (1, 0))

    def table_parameters(self) -> int:
        """Elements of all tables, dense ones included."""
        return sum(parameter.numel() for parameter in self.tables.parameters())


class _PairDots(torch.autograd.Function):
    """vectors (rows, k, dim) -> the dots of their k (k - 1) / 2 pairs, (rows, pairs).

    The gradient G of Z Z^T is symmetric once both halves are filled, so that G Z + G^T Z is one product.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, pair_of: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, pair_of)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        vectors, pair_of = ctx.saved_tensors
        count = vectors.shape[1]
        both = functional.pad(grad, (0, 1)).index_select(1, pair_of).reshape(-1, count, count)
        return torch.bmm(both, vectors), None, None


def _mlp(widths: Sequence[int], generator: torch.Generator | None, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layers += [dense_linear(ins, outs, generator), nn.ReLU()]
    return nn.Sequential(*layers[: None if last_relu else -1])


def _table(config: DLRMConfig, field: int, generator: torch.Generator | None) -> nn.Module:
    rows = config.table_rows[field]
    std = 1 / math.sqrt(3 * rows)
    shape = config.compressed(field)
    if shape is None:
        return dense_table(rows, config.dim, std, generator)
    if config.kind == "hash":
        kept = max(1, shape.params // config.dim)
        return HashedTable(rows, dense_table(kept, config.dim, 1 / math.sqrt(3 * kept), generator))
    return TTEmbedding(
        rows,
        config.dim,
        shape.ranks,
        row_modes=shape.row_modes,
        column_modes=shape.column_modes,
        std=std,
        generator=generator,
    )
