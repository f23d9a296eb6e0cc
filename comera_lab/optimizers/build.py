"""Optimizers by name, for settings that are written down: configurations, recorded runs, panels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers.adafactor import COAPAdafactor
from comera_lab.optimizers.baselines import GaLoreAdamW
from comera_lab.optimizers.coap import COAPAdamW
from comera_lab.optimizers.flora import Flora

_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "coap": COAPAdamW,
    "coap-8bit": lambda params, **settings: COAPAdamW(params, bits=8, **settings),
    "adamw-8bit": lambda params, **settings: COAPAdamW(params, bits=8, rank=None, rank_ratio=None, **settings),
    "coap-adafactor": COAPAdafactor,
    "galore": GaLoreAdamW,
    "flora": Flora,
}
OPTIMIZER_NAMES = tuple(_MAKERS)


def make_optimizer(
    name: str, params: Any, lr: float | Tensor, *, weight_decay: float = 0.0, **settings: Any
) -> torch.optim.Optimizer:
    """The optimizer `name`, one of `OPTIMIZER_NAMES`, over `params` (tensors, named tensors or groups).

    `settings` are those of its class, rank_ratio=4 for "coap", say; they are not changed. "adamw" and "adafactor" are
    torch's own. Raises ValueError for an unknown name or a value out of range, TypeError for an unknown setting.
    """
    if name not in _MAKERS:
        raise ValueError(f"optimizer must be one of {', '.join(_MAKERS)}, got {name!r}.")
    return _MAKERS[name](params, lr=lr, weight_decay=weight_decay, **settings)
