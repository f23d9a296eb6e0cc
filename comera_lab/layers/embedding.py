"""Tables of rows kept as TT-matrices: looked up or summed up in bags, never built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.contraction import different_rows, lookup_rows
from comera_lab.cores import cores_to_matrix, init_cores, matrix_to_cores
from comera_lab.layers.base import TTModule
from comera_lab.layers.linear import known_device
from comera_lab.shapes import ShapeError, TTMShape

BagMode = Literal["sum", "mean"]


class TTEmbedding(TTModule):
    """ids (...) -> (..., embedding_dim), the table (num_embeddings, embedding_dim) held as a TT-matrix.

    `rank` for every bond (16 unless given), or `params`, a limit on the core elements. `order` modes a side, or
    `row_modes` and `column_modes` whose products may exceed the sizes (padding that no id reaches). Elements start
    Gaussian with standard deviation `std`, by default 1 as in nn.Embedding; the row of `padding_idx` reads as zeros
    and gets no gradient. `backend` as in `lookup_rows`; the attribute may be set at any time. Gradients are dense and
    as small as the cores, so any optimizer serves. Raises ShapeError for sizes that break a rule.
    """

    shape: TTMShape
    padding_idx: int | None
    backend: str | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int | Sequence[int] | None = None,
        *,
        params: int | None = None,
        order: int = 3,
        row_modes: Sequence[int] | None = None,
        column_modes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        rank = 16 if rank is None and params is None else rank
        shape = TTMShape.for_table(num_embeddings, embedding_dim, rank, order, row_modes, column_modes, params)
        self._fill(shape, init_cores(shape, std, generator, known_device(device), dtype), padding_idx)

    def _fill(self, shape: TTMShape, cores: Sequence[Tensor], padding_idx: int | None) -> None:
        if padding_idx is not None and not 0 <= padding_idx < shape.rows:
            raise ShapeError(f"padding_idx must lie in [0, {shape.rows}), got {padding_idx}. Leave it out for none.")
        self._fill_cores(shape, cores)
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding | nn.EmbeddingBag,
        rank: int | Sequence[int] | None = None,
        *,
        error: float | None = None,
        params: int | None = None,
        order: int = 3,
    ) -> Self:
        """TT-SVD of a trained table, by rank, relative error or core elements; `embedding` is left as it is."""
        if sum(choice is not None for choice in (rank, error, params)) != 1:
            raise ValueError(
                f"give exactly one of rank, error and params, got rank={rank}, error={error}, params={params}. "
                "Try error=0.1."
            )
        rows, columns = embedding.num_embeddings, embedding.embedding_dim
        shape = TTMShape.for_table(rows, columns, 1 if error is not None else rank, order, params=params)
        cores = matrix_to_cores(embedding.weight.detach(), shape, error)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._fill(shape.with_ranks((1, *(core.shape[-1] for core in cores))), cores, embedding.padding_idx)
        return layer.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Raises TypeError for ids that are not int32 or int64, IndexError for one outside [0, num_embeddings)."""
        rows = lookup_rows(ids, self.gated_cores(), self.shape, self.backend)
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

    @torch.no_grad()
    def row_chunks(self, rows: int = 65_536) -> Iterator[Tensor]:
        """The table from the top, at most `rows` rows at a time, each chunk (rows, embedding_dim) without gradient."""
        cores, device = self.gated_cores(), self.cores[0].device
        for start in range(0, self.num_embeddings, rows):
            ids = torch.arange(start, min(start + rows, self.num_embeddings), device=device)
            chunk = lookup_rows(ids, cores, self.shape)
            if self.padding_idx is not None:
                chunk[ids == self.padding_idx] = 0
            yield chunk

    def export_npy(self, path: str | Path, rows: int = 65_536) -> None:
        """Write the table (num_embeddings, embedding_dim) as .npy, never holding more than `rows` rows in memory.

        For programs that want plain rows. bfloat16, which numpy has not, is written as float32.
        """
        first = self.cores[0].detach().flatten()[:1].cpu()
        kind = (first.float() if first.dtype == torch.bfloat16 else first).numpy().dtype
        table = np.lib.format.open_memmap(path, "w+", kind, (self.num_embeddings, self.embedding_dim))
        start = 0
        for chunk in self.row_chunks(rows):
            table[start : start + len(chunk)] = (
                chunk.cpu().to(torch.float32) if first.dtype == torch.bfloat16 else chunk.cpu()
            )
            start += len(chunk)
        table.flush()

    @property
    def num_embeddings(self) -> int:
        return self.shape.rows

    @property
    def embedding_dim(self) -> int:
        return self.shape.columns

    def __repr__(self) -> str:
        shape = self.shape
        padding = f", {shape.padding[0]} padded rows" if shape.padding[0] else ""
        return (
            f"{type(self).__name__}({shape.rows:,} x {shape.columns}, modes {shape.row_modes} x {shape.column_modes}, "
            f"ranks {shape.ranks}{padding}, {shape.params:,} core parameters, "
            f"{shape.compression:.1f}x fewer than dense)"
        )


class TTEmbeddingBag(TTEmbedding):
    """Sums or means of rows, as nn.EmbeddingBag: ids (B, N), or ids (N,) with `offsets`, -> (B, embedding_dim).

    `mode` "sum" (which takes `per_sample_weights`) or "mean". `offsets` (B,) holds where each bag begins; with
    `include_last_offset` (B + 1,) also where the last one ends. An empty bag gives zeros, ids equal to `padding_idx`
    neither add nor count. The rows of repeated ids are made once: memory follows the different ids, and the bags.
    """

    mode: BagMode
    include_last_offset: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int | Sequence[int] | None = None,
        *,
        mode: BagMode = "mean",
        include_last_offset: bool = False,
        params: int | None = None,
        order: int = 3,
        row_modes: Sequence[int] | None = None,
        column_modes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, rank, params=params, order=order, row_modes=row_modes,
            column_modes=column_modes, padding_idx=padding_idx, std=std, device=device, dtype=dtype,
            generator=generator,
        )  # fmt: skip
        self._fill_bag(mode, include_last_offset)

    def _fill_bag(self, mode: str, include_last_offset: bool) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(
                f"mode must be 'sum' or 'mean', got {mode!r}. Use TTEmbedding and reduce its rows yourself."
            )
        self.mode, self.include_last_offset = mode, include_last_offset  # type: ignore[assignment]

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding | nn.EmbeddingBag,
        rank: int | Sequence[int] | None = None,
        *,
        error: float | None = None,
        params: int | None = None,
        order: int = 3,
    ) -> Self:
        """As TTEmbedding.from_embedding; `mode` and `include_last_offset` come from an nn.EmbeddingBag."""
        layer = super().from_embedding(embedding, rank, error=error, params=params, order=order)
        bag = isinstance(embedding, nn.EmbeddingBag)
        layer._fill_bag(str(embedding.mode) if bag else "mean", bool(bag and embedding.include_last_offset))
        return layer

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Raises as TTEmbedding.forward, and ValueError for offsets or weights that do not fit the ids."""
        self._check_bags(ids, offsets, per_sample_weights)
        found = different_rows(ids, self.gated_cores(), self.shape)
        padding = None
        if self.padding_idx is not None and ids.numel():
            place = int(torch.searchsorted(found.ids, self.padding_idx))
            if place < len(found.ids) and int(found.ids[place]) == self.padding_idx:
                padding = place
        if offsets is None:
            offsets = torch.arange(len(ids), device=ids.device) * ids.shape[1]
            include_last = False
        else:
            include_last = self.include_last_offset
        return functional.embedding_bag(
            found.place.flatten(),
            found.rows,
            offsets.to(found.place.dtype),
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.flatten(),
            include_last_offset=include_last,
            padding_idx=padding,
        )

    def _check_bags(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
        if ids.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    "ids (B, N) are B bags already, got offsets too. Leave offsets out, or flatten the ids."
                )
        elif ids.dim() == 1:
            self._check_offsets(ids, offsets)
        else:
            raise ShapeError(f"ids must be (B, N), or (N,) with offsets, got {tuple(ids.shape)}. Flatten other axes.")
        if weights is None:
            return
        if self.mode != "sum":
            raise ValueError(f"per_sample_weights need mode='sum', got mode={self.mode!r}. Divide by your own count.")
        if weights.shape != ids.shape:
            raise ShapeError(
                f"per_sample_weights must have one weight for each id, {tuple(ids.shape)}, got {tuple(weights.shape)}."
                " Give a weight for every id."
            )
        if weights.dtype != self.cores[0].dtype:
            raise ValueError(
                f"per_sample_weights must have the dtype of the table, {self.cores[0].dtype}, got {weights.dtype}. "
                "Convert them."
            )

    def _check_offsets(self, ids: Tensor, offsets: Tensor | None) -> None:
        if offsets is None:
            raise ValueError(
                "ids (N,) need offsets that say where each bag begins, got None. Give offsets, or ids (B, N)."
            )
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"offsets must be (B,) int32 or int64, got {tuple(offsets.shape)} {offsets.dtype}. "
                "Give the position in ids where each bag begins."
            )
        if self.include_last_offset and not len(offsets):
            raise ValueError("with include_last_offset there is at least one offset, got none. End it with len(ids).")
        if not len(offsets):
            if len(ids):
                raise ValueError(f"offsets must begin with 0, got none for {len(ids)} ids. Give one for each bag.")
            return
        steps = offsets.diff(prepend=offsets.new_zeros(1))
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or bool((steps < 0).any()):
            shown = f"{offsets[:8].tolist()}{' and more' if len(offsets) > 8 else ''}"
            raise ValueError(f"offsets must begin with 0 and never fall, got {shown}. Sort the ids by bag.")
        if last > len(ids) or (self.include_last_offset and last != len(ids)):
            rule = (
                f"end with the number of ids, {len(ids)}," if self.include_last_offset else f"lie in [0, {len(ids)}],"
            )
            raise ValueError(f"offsets must {rule} got {last}. Check the ids that belong to them.")
