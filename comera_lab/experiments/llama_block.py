"""A LLaMA-shaped language model of plain torch parts, for timing and counting a real training step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes. The defaults are the LLaMA-1B of GaLore's and COAP's scripts: 1.34 billion parameters."""

    layers: int = 24
    width: int = 2048
    hidden: int = 5461
    heads: int = 32
    vocabulary: int = 32_000


class Llama(nn.Module):
    """Token ids (rows, tokens) -> logits (rows, tokens, vocabulary). Causal, rotary positions, SwiGLU, RMS norms."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention, self.norm_hidden = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        normed = self.norm_attention(x)
        query, key, value = (
            part(normed).view(rows, tokens, self.heads, -1).transpose(1, 2)  # (rows, heads, tokens, head)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        normed = self.norm_hidden(x)
        deepened: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return deepened


def _rotated(x: Tensor) -> Tensor:
    """x (rows, heads, tokens, head) turned by angles that grow with the position (rotary embedding)."""
    tokens, head = x.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, head, 2, device=x.device, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(tokens, device=x.device, dtype=torch.float32), rates)  # (tokens, head / 2)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
