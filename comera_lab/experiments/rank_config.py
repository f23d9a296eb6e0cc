"""What a training that chooses its ranks is asked for. No loop in here: see rank_training.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from comera_lab.cores import GATE_KINDS
from comera_lab.experiments.runs import TrainConfig
from comera_lab.layers import GateKind, tt_layers
from comera_lab.objectives import EarlyStage, LateStage, model_size
from comera_lab.objectives.stages import Part
from comera_lab.shapes import chain_params


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Two stages, in steps, and what they cost. `target_ratio` None leaves the size to the price `gamma`.

    `target_ratio` is a share of the parameters that `part` has when training starts: "tensorised" counts cores,
    "model" everything. `gamma` has the unit of the loss: the price of the whole dense size; `beta` weighs
    sum ||G||_F^2. `rate` is for cores and dense parameters, `gate_rate` for gates: an entry falls from 1 to its
    threshold in no less than 1 / gate_rate steps. `min_rank` is the floor of every rank; 0 lets training remove
    a layer down to its bias.
    `cut_every` is the interval of the late stage's closing to its line (0: the objective alone, as published);
    a closed "straight-through" entry may grow back, a "threshold" one cannot. `compact_every` really cuts every
    so many steps (0: at the end alone); what is cut cannot come back.

    Defaults were chosen on digits(28) with the 784-512-512-10 MLP at rank 16. Adam overshoots zero by some steps of
    `gate_rate`, so a threshold of one such step lets entries bounce: 600 early steps at gamma 200 leave 5,576 live
    elements of 13,188 at a threshold of 0.01, 4,194 at 0.05, at equal accuracy. Gamma 30 thins the ranks without
    passing a target of 0.5; 200 is a choice for an early stage alone. `gate_kind="threshold"`, `gate_threshold=0.01`
    and `cut_every=0` are the published training.
    """

    early_steps: int = 300
    late_steps: int = 300
    gamma: float = 30.0
    beta: float = 0.0
    rate: float = 3e-3
    gate_rate: float = 1e-2
    batch_size: int = 64
    seed: int = 0
    target_ratio: float | None = 0.5
    part: Part = "tensorised"
    gate_kind: GateKind = "straight-through"
    gate_threshold: float = 0.05
    cut_every: int = 20
    compact_every: int = 0
    evaluate_every: int = 50
    rank_rows_every: int = 10
    min_rank: int = 1

    def __post_init__(self) -> None:
        counts = ("early_steps", "late_steps", "cut_every", "compact_every", "min_rank", "rank_rows_every")
        for name in counts:
            value, least = getattr(self, name), int(name == "rank_rows_every")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.early_steps + self.late_steps < 1:
            raise ValueError("early_steps + late_steps must be at least 1, got 0. Try 300 each.")
        if self.target_ratio is None and self.late_steps:
            raise ValueError(
                f"a late stage steers to a target, got late_steps={self.late_steps} and target_ratio=None. "
                "Give a target_ratio, or late_steps=0."
            )
        if not 0 < self.gate_threshold < 1:
            raise ValueError(f"gate_threshold must lie in (0, 1), got {self.gate_threshold!r}. Try 0.05.")
        if not (self.gate_rate > 0 and math.isfinite(self.gate_rate)):
            raise ValueError(f"gate_rate must be above 0, got {self.gate_rate!r}. Try 1e-2.")
        if self.gate_kind not in GATE_KINDS:
            raise ValueError(f"gate_kind must be one of {', '.join(GATE_KINDS)}, got {self.gate_kind!r}.")
        EarlyStage(self.gamma, self.beta)
        if self.target_ratio is not None:
            LateStage(target_ratio=self.target_ratio, part=self.part)
        self.training()

    def training(self) -> TrainConfig:
        """The same run as the plain trainer sees it; checks what both have in common."""
        return TrainConfig(
            steps=self.early_steps + self.late_steps,
            batch_size=self.batch_size,
            learning_rate=self.rate,
            seed=self.seed,
            evaluate_every=self.evaluate_every,
        )


def core_limit(model: nn.Module, config: RankConfig) -> int | None:
    """Core elements that the target allows, None without a target.

    Raises ValueError for a model without cores, or a target that leaves no room for them.
    """
    if not tt_layers(model):
        raise ValueError(
            "rank training needs tensor-train layers, got a model without any. Use kind='tt', or tensorize(model)."
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "rank training cuts cores, which DistributedDataParallel cannot follow, got a model wrapped in it. "
            "Train it in one process, or write a loop with EarlyStage or LateStage and wrap again after each compact."
        )
    size = model_size(model)
    if not size.cores:
        raise ValueError(
            "every tensor-train layer has a bond without live entries, got a model that is only biases. "
            "Start from a model that is alive."
        )
    if config.target_ratio is None:
        return None
    part = size.cores if config.part == "tensorised" else size.total
    dense = 0 if config.part == "tensorised" else size.dense
    limit = int(config.target_ratio * part) - dense
    floor = sum(
        chain_params(layer.shape.modes, (1, *(min(rank, config.min_rank) for rank in layer.live_ranks[1:-1]), 1))
        for layer in tt_layers(model).values()
        if config.min_rank
    )
    if 1 <= limit < floor:
        raise ValueError(
            f"the target must leave room for ranks of {config.min_rank}, got target_ratio={config.target_ratio}: "
            f"{limit:,} core elements where those ranks need {floor:,}. Raise the target, or lower min_rank."
        )
    if limit < 1:
        raise ValueError(
            f"the target must leave room for cores, got target_ratio={config.target_ratio} of {part:,} parameters: "
            f"the dense part, which cannot be cut, is {dense / part:.3f} of them. Raise the target."
        )
    return limit
