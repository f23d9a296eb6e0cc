"""comera_lab: teach and explore memory-efficient training.

`import comera_lab` needs torch and numpy alone. Panels, lessons, files and data enter when they are used.
"""

from comera_lab.contraction import ContractionPlan, apply_cores, lookup_rows, naive_apply_cores, naive_lookup_rows, plan
from comera_lab.cores import from_tensorly, init_cores, round_cores, to_dense, to_tensorly, tt_svd
from comera_lab.layers import TTEmbedding, TTEmbeddingBag, TTLinear, compact, tensorize, tt_layers
from comera_lab.objectives import EarlyStage, LateStage, ModelSize, linear_ramp, meet_target, model_size, size_surrogate
from comera_lab.optimizers import COAPAdafactor, COAPAdamW, Flora, GaLoreAdamW
from comera_lab.shapes import ShapeError, TTMShape, TTShape, max_ranks, ranks_for_budget, split_features

__version__ = "0.1.0"

__all__ = [
    "COAPAdafactor",
    "COAPAdamW",
    "ContractionPlan",
    "EarlyStage",
    "Flora",
    "GaLoreAdamW",
    "LateStage",
    "ModelSize",
    "ShapeError",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTLinear",
    "TTMShape",
    "TTShape",
    "apply_cores",
    "compact",
    "from_tensorly",
    "init_cores",
    "linear_ramp",
    "lookup_rows",
    "max_ranks",
    "meet_target",
    "model_size",
    "naive_apply_cores",
    "naive_lookup_rows",
    "plan",
    "ranks_for_budget",
    "round_cores",
    "size_surrogate",
    "split_features",
    "tensorize",
    "to_dense",
    "to_tensorly",
    "tt_layers",
    "tt_svd",
]
