"""Dense layers with torch's own start distributions, drawn from a generator instead of the global stream."""

from __future__ import annotations

import math

import torch
from torch import nn


def dense_linear(in_features: int, out_features: int, generator: torch.Generator | None = None) -> nn.Linear:
    """nn.Linear, weight and bias uniform in +-1 / sqrt(in_features)."""
    # a meta layer is not initialised, so the global random stream stays where it is
    linear = nn.Linear(in_features, out_features, device="meta").to_empty(device=torch.get_default_device())
    bound = 1 / math.sqrt(in_features)
    with torch.no_grad():
        linear.weight.uniform_(-bound, bound, generator=generator)
        linear.bias.uniform_(-bound, bound, generator=generator)
    return linear


def dense_table(rows: int, columns: int, std: float, generator: torch.Generator | None = None) -> nn.Embedding:
    """nn.Embedding, Gaussian with standard deviation `std`."""
    table = nn.Embedding(rows, columns, device="meta").to_empty(device=torch.get_default_device())
    with torch.no_grad():
        table.weight.normal_(0, std, generator=generator)
    return table
