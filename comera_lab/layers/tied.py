"""A head that stays tied to a table of cores."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from comera_lab.layers.embedding import TTEmbedding


class TiedHead(nn.Module):
    """hidden (..., embedding_dim) -> scores (..., num_embeddings) by the table of a TTEmbedding, which it does not own.

    The table is read whole, its row of `padding_idx` as zeros. The cores belong to the embedding: they are in its
    part of the state, and this module has at most a bias (num_embeddings,).
    """

    bias: nn.Parameter | None

    def __init__(self, table: TTEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._table = (table,)  # in a tuple, so that no parameter is registered twice
        self.register_parameter("bias", bias)

    @property
    def table(self) -> TTEmbedding:
        """The embedding that this head is tied to."""
        return self._table[0]

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.table.to_dense(), self.bias)

    def extra_repr(self) -> str:
        return f"{self.table.embedding_dim} -> {self.table.num_embeddings:,}, tied, bias={self.bias is not None}"
