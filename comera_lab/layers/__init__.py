"""Modules that hold cores: linear layers, tables, and the tools that put them into a model and cut them."""

from comera_lab.layers.base import GATE_THRESHOLD, GateKind, TTModule
from comera_lab.layers.compact import CompactReport, compact, fold_gates
from comera_lab.layers.embedding import TTEmbedding, TTEmbeddingBag
from comera_lab.layers.linear import TTLinear, forward_together
from comera_lab.layers.model_files import load_model, save_model
from comera_lab.layers.resize import resize, shapes_with_ranks
from comera_lab.layers.tensorize import as_linear, tensorize, tt_layers
from comera_lab.layers.tied import TiedHead

__all__ = [
    "GATE_THRESHOLD",
    "CompactReport",
    "GateKind",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTLinear",
    "TTModule",
    "TiedHead",
    "as_linear",
    "compact",
    "fold_gates",
    "forward_together",
    "load_model",
    "resize",
    "save_model",
    "shapes_with_ranks",
    "tensorize",
    "tt_layers",
]
