"""comera_lab: teach and explore memory-efficient training.

`import comera_lab` needs torch and numpy alone. Panels, lessons, files and data enter when they are used.
"""

from comera_lab.contraction import ContractionPlan, apply_cores, naive_apply_cores, plan
from comera_lab.cores import from_tensorly, init_cores, round_cores, to_dense, to_tensorly, tt_svd
from comera_lab.layers import TTLinear, tensorize, tt_layers
from comera_lab.shapes import ShapeError, TTMShape, TTShape, max_ranks, ranks_for_budget, split_features

__version__ = "0.1.0"

__all__ = [
    "ContractionPlan",
    "ShapeError",
    "TTLinear",
    "TTMShape",
    "TTShape",
    "apply_cores",
    "from_tensorly",
    "init_cores",
    "max_ranks",
    "naive_apply_cores",
    "plan",
    "ranks_for_budget",
    "round_cores",
    "split_features",
    "tensorize",
    "to_dense",
    "to_tensorly",
    "tt_layers",
    "tt_svd",
]
