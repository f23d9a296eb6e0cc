"""A table of rows kept as a TT-matrix: looked up, never built."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera_lab.contraction import lookup_rows
from comera_lab.cores import cores_to_matrix, init_cores, matrix_to_cores
from comera_lab.layers.base import TTModule
from comera_lab.layers.linear import known_device
from comera_lab.shapes import ShapeError, TTMShape, clip_ranks, split_features


class TTEmbedding(TTModule):
    """ids (...) -> (..., embedding_dim), the table (num_embeddings, embedding_dim) held as a TT-matrix.

    `order` modes a side, or `row_modes` and `column_modes` whose products may exceed the sizes (padding that
    no id reaches). Elements start Gaussian with standard deviation 1, as in nn.Embedding; the row of
    `padding_idx` reads as zeros and gets no gradient. Raises ShapeError for sizes that break a rule.
    """

    shape: TTMShape
    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int | Sequence[int] = 16,
        *,
        order: int = 3,
        row_modes: Sequence[int] | None = None,
        column_modes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rows = tuple(row_modes) if row_modes is not None else split_features(num_embeddings, order)
        columns = tuple(column_modes) if column_modes is not None else split_features(embedding_dim, len(rows))[::-1]
        modes = tuple(v * h for v, h in zip(rows, columns, strict=False))
        shape = TTMShape(rows, columns, clip_ranks(rank, modes), num_embeddings, embedding_dim)
        self._fill(shape, init_cores(shape, 1.0, generator, known_device(device), dtype), padding_idx)

    def _fill(self, shape: TTMShape, cores: Sequence[Tensor], padding_idx: int | None) -> None:
        if padding_idx is not None and not 0 <= padding_idx < shape.rows:
            raise ShapeError(f"padding_idx must lie in [0, {shape.rows}), got {padding_idx}. Leave it out for none.")
        self._fill_cores(shape, cores)
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        rank: int | Sequence[int] | None = None,
        *,
        error: float | None = None,
        order: int = 3,
    ) -> TTEmbedding:
        """TT-SVD of a trained table, by rank or by relative error; `embedding` is left as it is."""
        if (rank is None) == (error is None):
            raise ValueError(f"give exactly one of rank and error, got rank={rank}, error={error}. Try error=0.1.")
        rows = split_features(embedding.num_embeddings, order)
        columns = split_features(embedding.embedding_dim, order)[::-1]
        modes = tuple(v * h for v, h in zip(rows, columns, strict=True))
        shape = TTMShape(rows, columns, clip_ranks(rank or 1, modes), embedding.num_embeddings, embedding.embedding_dim)
        cores = matrix_to_cores(embedding.weight.detach(), shape, error)
        ranks = (1, *(core.shape[-1] for core in cores))
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._fill(TTMShape(rows, columns, ranks, shape.rows, shape.columns), cores, embedding.padding_idx)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        rows = lookup_rows(ids, self.gated_cores(), self.shape)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0)

    def to_dense(self) -> Tensor:
        """The table (num_embeddings, embedding_dim) that forward reads from, padding row zeroed. Differentiable."""
        table = cores_to_matrix(self.gated_cores(), self.shape)
        if self.padding_idx is None:
            return table
        at = torch.arange(self.shape.rows, device=table.device) == self.padding_idx
        return table.masked_fill(at.unsqueeze(-1), 0)

    @property
    def num_embeddings(self) -> int:
        return self.shape.rows

    @property
    def embedding_dim(self) -> int:
        return self.shape.columns

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"TTEmbedding({shape.rows:,} x {shape.columns}, modes {shape.row_modes} x {shape.column_modes}, "
            f"ranks {shape.ranks}, {shape.params:,} core parameters, {shape.compression:.1f}x fewer than dense)"
        )
