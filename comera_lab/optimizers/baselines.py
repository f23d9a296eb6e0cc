"""GaLore: AdamW in the leading singular directions of the gradient, found again by a full SVD every so many steps.

GaLore (Zhao et al. 2024, arXiv 2403.03507), algorithm 2. The moments are read in the new basis as they are.

Its released projection of convolutions never makes a second basis, and lifts the raw gradient in the place of Adam's
update; the Tucker version here does both as for matrices, with a basis per channel side (HOSVD).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from comera_lab.optimizers.coap import PLAIN_UP_TO, COAPAdamW


class GaLoreAdamW(COAPAdamW):
    """COAPAdamW whose every renewal is a full SVD, at once for all parameters and without alignment steps.

    update_interval, scale: 200 and 0.25 are those of the paper, which multiplies the rate of projected updates by the
    scale. Other settings, errors and state as for `COAPAdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: int | None = None,
        rank_ratio: float | None = 4.0,
        update_interval: int = 200,
        scale: float = 0.25,
        bits: Literal[32, 8] = 32,
        state_dtype: torch.dtype | None = None,
        plain_up_to: int = PLAIN_UP_TO,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            rank=rank,
            rank_ratio=rank_ratio,
            update_interval=update_interval,
            refresh_factor=1,
            scale=scale,
            alignment=None,
            refresh="svd",
            stagger=False,
            transfer_moments=False,
            bits=bits,
            state_dtype=state_dtype,
            plain_up_to=plain_up_to,
            foreach=foreach,
            maximize=maximize,
        )
