"""Task loss and model size in one scalar, exact sizes, and the last cut to a target (CoMERA, arXiv 2405.14377)."""

from comera_lab.objectives.budget import BudgetReport, meet_target
from comera_lab.objectives.sizes import ModelSize, core_decay, model_size, size_surrogate
from comera_lab.objectives.stages import EarlyStage, LateStage, linear_ramp

__all__ = [
    "BudgetReport",
    "EarlyStage",
    "LateStage",
    "ModelSize",
    "core_decay",
    "linear_ramp",
    "meet_target",
    "model_size",
    "size_surrogate",
]
