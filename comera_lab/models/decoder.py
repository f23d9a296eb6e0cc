"""A LLaMA-style decoder: RMS norms, rotary positions, SwiGLU, no biases; dense or tensorised, tied head or not.

Sizes of `DECODERS` are those of the public LLaMA configurations that ReLoRA, GaLore and COAP train on C4 (configs/ of
their code); positions are their longest sequence. Tensorised are the seven matrices of every block, and with a
`word_rank` the word table; an untied head and the norms stay dense.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from comera_lab.layers import TTEmbedding, TTLinear, forward_together
from comera_lab.models.dense import dense_table
from comera_lab.objectives.token_loss import token_loss, token_scores
from comera_lab.shapes import ShapeError

Kind = Literal["dense", "tt"]
_START_STD = 0.02  # initializer_range of the public configurations
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. `rank` and `order` are of the blocks' cores and mean nothing when dense.

    `word_rank` is the rank of the word table, None keeps it dense. `tied` makes the head read the word table, cores
    or not. `recompute` keeps only the input of each block for backward and makes the rest again.
    """

    kind: Kind = "dense"
    layers: int = 4
    width: int = 128
    hidden: int = 352
    heads: int = 4
    vocabulary: int = 32_000
    positions: int = 1024
    tied: bool = False
    rank: int = 16
    word_rank: int | None = None
    order: int = 3
    norm_eps: float = 1e-6
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "tt"):
            raise ValueError(f'kind must be "dense" or "tt", got {self.kind!r}.')
        check_sizes(self, "layers", "width", "hidden", "heads", "vocabulary", "positions", "rank", "order")
        if self.word_rank is not None:
            check_sizes(self, "word_rank")
        if self.width % (2 * self.heads):
            raise ShapeError(
                f"width must be a multiple of 2 heads, got {self.width} and {self.heads}. "
                "Each head turns pairs of columns."
            )

    def build(self, generator: torch.Generator | None = None) -> Decoder:
        """The model."""
        return Decoder(self, generator=generator)


class Decoder(nn.Module):
    """ids (rows, tokens) -> logits (rows, tokens, vocabulary); with `targets` (rows, tokens) the mean loss in nats.

    `targets` are the next tokens; `IGNORE` marks those that do not count. With `scores` too the result is that of
    `token_scores`. Both go through the head in chunks: all logits are never in memory. With one `generator` seed both
    twins start from the same dense parts as far as they share them. Raises ShapeError for more tokens than positions,
    IndexError for ids outside the vocabulary.
    """

    def __init__(self, config: DecoderConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.head = None if config.tied else bare_linear(config.width, config.vocabulary, generator)
        self.words = word_table(config, generator)
        self.blocks = nn.ModuleList(DecoderBlock(config, generator) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)

    def forward(self, ids: Tensor, targets: Tensor | None = None, scores: bool = False) -> Tensor:
        hidden = self.hidden_states(ids)
        if targets is None:
            return functional.linear(hidden, self.head_weight())
        return (token_scores if scores else token_loss)(hidden, self.head_weight(), targets)

    def hidden_states(self, ids: Tensor) -> Tensor:
        """ids (rows, tokens) -> what the head reads (rows, tokens, width)."""
        check_ids(ids, self.config.positions)
        x: Tensor = self.words(ids)
        turns = rotary_turns(ids.shape[1], self.config.width // self.config.heads, x)
        for block in self.blocks:
            if self.config.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        normed: Tensor = self.norm(x)
        return normed

    def head_weight(self) -> Tensor:
        """(vocabulary, width), differentiable."""
        return table_of(self.words) if self.head is None else self.head.weight

    def parameter_count(self) -> int:
        """Trainable numbers, a tied table once, gate entries included if there are any."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def extra_repr(self) -> str:
        return f"kind={self.config.kind!r}, tied={self.config.tied}, parameters={self.parameter_count():,}"


class DecoderBlock(nn.Module):
    """x (rows, tokens, width) -> the same: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: DecoderConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, generator)
        self.norm_forward = nn.RMSNorm(config.width, config.norm_eps)
        self.feed_forward = FeedForward(config, generator)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm_attention(x), turns)
        deepened: Tensor = x + self.feed_forward(self.norm_forward(x))
        return deepened


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: DecoderConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (
            _linear(config.width, config.width, config, generator) for _ in range(4)
        )

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            one.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (rows, heads, tokens, share)
            for one in _together(x, self.query, self.key, self.value)
        )
        query, key = turned(query, turns), turned(key, turns)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU."""

    def __init__(self, config: DecoderConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.gate = _linear(config.width, config.hidden, config, generator)
        self.up = _linear(config.width, config.hidden, config, generator)
        self.down = _linear(config.hidden, config.width, config, generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _together(x, self.gate, self.up)
        down: Tensor = self.down(functional.silu(gate) * up)
        return down


def rotary_turns(tokens: int, share: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (tokens, share / 2) of the angle of every position and pair of columns."""
    rates = _ROTARY_BASE ** (-torch.arange(0, share, 2, device=like.device, dtype=torch.float32) / share)
    angles = torch.outer(torch.arange(tokens, device=like.device, dtype=torch.float32), rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x (rows, heads, tokens, share): column i and column i + share / 2 turned by the angle of position and pair."""
    cosine, sine = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def check_sizes(config: object, *names: str) -> None:
    """Raise ShapeError unless every named field is a whole number above 0."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError(f"{name} must be a whole number above 0, got {value!r}.")


def check_ids(ids: Tensor, positions: int) -> None:
    """Raise ShapeError unless ids are (rows, tokens) and fit the positions."""
    if ids.ndim != 2 or not 1 <= ids.shape[1] <= positions:
        raise ShapeError(
            f"ids must be (rows, tokens) with 1 to {positions:,} tokens, the positions of this model, got "
            f"{tuple(ids.shape)}. Cut the texts, or build the model with more positions."
        )


def word_table(config: DecoderConfig, generator: torch.Generator | None) -> nn.Module:
    """Vocabulary x width, of cores where the kind is "tt" and there is a word_rank."""
    if config.kind == "dense" or config.word_rank is None:
        return dense_table(config.vocabulary, config.width, _START_STD, generator)
    return TTEmbedding(
        config.vocabulary, config.width, config.word_rank, order=config.order, std=_START_STD, generator=generator
    )


def table_of(words: nn.Module) -> Tensor:
    """The table (vocabulary, width) of nn.Embedding or TTEmbedding, differentiable."""
    if isinstance(words, TTEmbedding):
        return words.to_dense()
    weight = words.weight
    assert isinstance(weight, Tensor)
    return weight


def bare_linear(in_features: int, out_features: int, generator: torch.Generator | None) -> nn.Linear:
    """nn.Linear without bias, Gaussian with standard deviation 0.02."""
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear = linear.to_empty(device=torch.get_default_device())
    with torch.no_grad():
        linear.weight.normal_(0, _START_STD, generator=generator)
    return linear


def _linear(in_features: int, out_features: int, config: DecoderConfig, generator: torch.Generator | None) -> nn.Module:
    if config.kind == "dense":
        return bare_linear(in_features, out_features, generator)
    return TTLinear(in_features, out_features, config.rank, order=config.order, bias=False, generator=generator)


def _together(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    trains = [layer for layer in layers if isinstance(layer, TTLinear)]
    return forward_together(x, trains) if len(trains) == len(layers) else [layer(x) for layer in layers]


def _public(
    layers: int, width: int, hidden: int, heads: int, vocabulary: int = 32_000, positions: int = 1024
) -> DecoderConfig:
    return DecoderConfig(
        layers=layers, width=width, hidden=hidden, heads=heads, vocabulary=vocabulary, positions=positions
    )


DECODERS = {
    "llama-9m": _public(4, 128, 352, 4),
    "llama-20m": _public(4, 256, 688, 4),
    "llama-35m": _public(6, 384, 1024, 8),
    "llama-40m": _public(8, 416, 1024, 8),
    "llama-60m": _public(8, 512, 1376, 8),
    "llama-71m": _public(12, 512, 1368, 8),
    "llama-100m": _public(12, 640, 1708, 10, vocabulary=32_100),
    "llama-130m": _public(12, 768, 2048, 12),
    "llama-250m": _public(24, 768, 2560, 16),
    "llama-350m": _public(24, 1024, 2736, 16),
    "llama-1b": _public(24, 2048, 5461, 32),
    "llama-3b": _public(32, 2560, 6848, 32),
    "llama-7b": _public(32, 4096, 11008, 32, positions=2048),
}


def decoder_config(name: str, **changes: object) -> DecoderConfig:
    """The public configuration `name`, with fields changed. Raises ValueError, listing the names, for another."""
    if name not in DECODERS:
        raise ValueError(f"model must be one of {', '.join(DECODERS)}, got {name!r}. Pick one of them.")
    return dataclasses.replace(DECODERS[name], **changes)  # type: ignore[arg-type]
