"""Modules that hold cores: linear layers, tables, and the tools that put them into a model and cut them."""

from comera_lab.layers.base import GATE_THRESHOLD, GateKind, TTModule
from comera_lab.layers.compact import CompactReport, compact, fold_gates
from comera_lab.layers.embedding import TTEmbedding, TTEmbeddingBag
from comera_lab.layers.linear import TTLinear, forward_together
from comera_lab.layers.resize import resize, shapes_with_ranks
from comera_lab.layers.tensorize import tensorize, tt_layers

__all__ = [
    "GATE_THRESHOLD",
    "CompactReport",
    "GateKind",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTLinear",
    "TTModule",
    "compact",
    "fold_gates",
    "forward_together",
    "resize",
    "shapes_with_ranks",
    "tensorize",
    "tt_layers",
]
