"""Optimizers that keep their state in a low-rank basis of the gradient: COAP, and what it is compared with."""

from comera_lab.optimizers.adafactor import COAPAdafactor
from comera_lab.optimizers.base import ProjectedOptimizer
from comera_lab.optimizers.baselines import GaLoreAdamW
from comera_lab.optimizers.build import OPTIMIZER_NAMES, make_optimizer
from comera_lab.optimizers.coap import COAPAdamW
from comera_lab.optimizers.flora import Flora
from comera_lab.optimizers.groups import projection_groups, step_in_backward
from comera_lab.optimizers.report import OptimizerReport, OptimizerRow

__all__ = [
    "OPTIMIZER_NAMES",
    "COAPAdafactor",
    "COAPAdamW",
    "Flora",
    "GaLoreAdamW",
    "OptimizerReport",
    "OptimizerRow",
    "ProjectedOptimizer",
    "make_optimizer",
    "projection_groups",
    "step_in_backward",
]
