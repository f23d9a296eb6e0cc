"""The six-encoder pair classifier of CoMERA (arXiv 2405.14377, MNLI), dense or tensorised: two twins from one class.

Post-LN encoder blocks, GELU, learned positions, two segments. Tensorised are the word table, q, k, v and the output
of attention, both halves of the feed-forward and the first layer of the classifier; positions, segments, norms,
biases and the last layer stay dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.layers import TTEmbedding, TTLinear, forward_together
from comera_lab.models.dense import dense_linear, dense_table
from comera_lab.shapes import ShapeError

Modes = tuple[int, ...]
# Positions and segments start small beside words (1.0), as in BERT; a norm follows their sum.
_PLACE_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder. `rank` is for linear layers, `word_rank` for the table; both mean nothing when dense.

    `head="cross"` reads one sequence with both texts in it and classifies its first token (released model);
    `head="siamese"` encodes each text alone and classifies [u, v, |u - v|, u * v] of their mean tokens, which
    starts to learn in a minute on a CPU where the other takes hours. `word_modes` None splits by `order`.
    """

    kind: Literal["dense", "tt"] = "tt"
    head: Literal["cross", "siamese"] = "siamese"
    layers: int = 2
    width: int = 64
    hidden: int = 256
    heads: int = 4
    positions: int = 64
    vocabulary: int = 8000
    classes: int = 3
    rank: int = 16
    word_rank: int = 32
    order: int = 3
    word_modes: tuple[Modes, Modes] | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-9
    padding_id: int = 0
    separator_id: int = 2

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "tt"):
            raise ValueError(f'kind must be "dense" or "tt", got {self.kind!r}.')
        if self.head not in ("cross", "siamese"):
            raise ValueError(f'head must be "cross" or "siamese", got {self.head!r}.')
        for name in ("layers", "width", "hidden", "heads", "positions", "vocabulary", "classes", "rank", "word_rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ShapeError(f"{name} must be a whole number above 0, got {value!r}.")
        if self.width % self.heads:
            raise ShapeError(
                f"width must be a multiple of heads, got {self.width} and {self.heads}. Each head gets an equal share."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}. Use 0.0 for none.")

    @classmethod
    def released(cls, kind: Literal["dense", "tt"] = "tt", rank: int = 30) -> EncoderConfig:
        """The published MNLI model: 66,957,315 parameters dense; at rank 30 1,490,157 with its 4,362 gate entries."""
        return cls(
            kind=kind,
            head="cross",
            layers=6,
            width=768,
            hidden=3072,
            heads=12,
            positions=512,
            vocabulary=30522,
            rank=rank,
            word_modes=((16, 20, 10, 10), (4, 4, 8, 6)),
            dropout=0.1,
            separator_id=102,
        )

    @classmethod
    def small(cls, kind: Literal["dense", "tt"] = "tt", width: int = 64, layers: int = 2) -> EncoderConfig:
        """A siamese model for a CPU: `width` 64 to 256, four times that hidden, one head for 16 columns."""
        return cls(kind=kind, layers=layers, width=width, hidden=4 * width, heads=max(1, width // 16))


class PairEncoder(nn.Module):
    """ids -> logits (rows, classes). ids are (rows, tokens) for a cross head, (rows, 2, tokens) for a siamese one.

    ids are int32 or int64; `padding_id` fills up texts and is never read. A cross head takes all behind the first
    `separator_id` for the second segment. With one `generator` seed both twins start from the same dense parts
    as far as they share them. Raises ShapeError for ids of another shape, IndexError for ids outside the vocabulary.
    """

    def __init__(self, config: EncoderConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.positions = dense_table(config.positions, config.width, _PLACE_STD, generator)
        self.segments = dense_table(2, config.width, _PLACE_STD, generator)
        self.classifier = dense_linear(config.width, config.classes, generator)
        self.words = _words(config, generator)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.dropout = _dropout(config)
        self.blocks = nn.ModuleList(EncoderBlock(config, generator) for _ in range(config.layers))
        features = config.width if config.head == "cross" else 4 * config.width
        self.pooler = _linear(features, config.width, config, generator)

    def forward(self, ids: Tensor) -> Tensor:
        self._check(ids)
        texts = ids.reshape(-1, ids.shape[-1])  # (texts, tokens): rows, or 2 rows
        real = texts != self.config.padding_id
        if texts.device.type == "cpu" and not torch.compiler.is_compiling():
            # Columns of padding alone cost time and change nothing; on other devices a fixed size is worth more.
            longest = int((real.any(0) * torch.arange(1, real.shape[1] + 1)).max())
            texts, real = texts[:, : max(longest, 1)], real[:, : max(longest, 1)]
        tokens = self.encode(texts, real)  # (texts, tokens, width)
        if self.config.head == "siamese":
            shares = real.unsqueeze(-1) / real.sum(1).clamp_min(1)[:, None, None]
            u, v = (tokens * shares).sum(1).reshape(len(ids), 2, -1).unbind(1)  # (rows, width) each
            features = torch.cat([u, v, (u - v).abs(), u * v], dim=-1)
        else:
            features = tokens[:, 0]
        pooled = self.dropout(torch.tanh(self.pooler(features)))
        logits: Tensor = self.classifier(pooled)  # (rows, classes)
        return logits

    def encode(self, texts: Tensor, real: Tensor) -> Tensor:
        """ids (texts, tokens), real (texts, tokens) bool, False at padding -> (texts, tokens, width)."""
        separators = texts == self.config.separator_id
        behind = (separators.cumsum(1) - separators.long()).clamp_max(1)  # the separator itself is still the first's
        place = torch.arange(texts.shape[1], device=texts.device)
        tokens: Tensor = self.words(texts) + self.positions(place) + self.segments(behind)
        tokens = self.dropout(self.norm(tokens))
        # A text of padding alone would leave softmax nothing to choose from: its first token stays visible.
        visible = real | (place == 0)
        for block in self.blocks:
            tokens = block(tokens, visible[:, None, None, :])
        return tokens

    def _check(self, ids: Tensor) -> None:
        wanted, dims = ("(rows, 2, tokens)", 3) if self.config.head == "siamese" else ("(rows, tokens)", 2)
        if ids.dim() != dims or (dims == 3 and ids.shape[1] != 2) or not 1 <= ids.shape[-1] <= self.config.positions:
            raise ShapeError(
                f"ids must be {wanted} with 1 to {self.config.positions} tokens for a {self.config.head} head, got "
                f"{tuple(ids.shape)}. Cut or arrange the texts so."
            )

    def parameter_count(self) -> int:
        """Trainable numbers, gate entries included if there are any."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def extra_repr(self) -> str:
        return f"kind={self.config.kind!r}, head={self.config.head!r}, parameters={self.parameter_count():,}"


class EncoderBlock(nn.Module):
    """tokens (texts, tokens, width) -> the same: attention and feed-forward, each added to its input, then normed."""

    def __init__(self, config: EncoderConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.heads, self.dropout_share = config.heads, config.dropout
        width, hidden = config.width, config.hidden
        self.query = _linear(width, width, config, generator)
        self.key = _linear(width, width, config, generator)
        self.value = _linear(width, width, config, generator)
        self.out = _linear(width, width, config, generator)
        self.widen = _linear(width, hidden, config, generator)
        self.narrow = _linear(hidden, width, config, generator)
        self.norm_attention = nn.LayerNorm(width, config.norm_eps)
        self.norm_forward = nn.LayerNorm(width, config.norm_eps)
        self.dropout = _dropout(config)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """`visible` (texts, 1, 1, tokens) bool says which tokens may be attended to."""
        tokens = self.norm_attention(tokens + self.dropout(self._attend(tokens, visible)))
        widened = functional.gelu(self.widen(tokens))  # (texts, tokens, hidden)
        normed: Tensor = self.norm_forward(tokens + self.dropout(self.narrow(widened)))
        return normed

    def _attend(self, tokens: Tensor, visible: Tensor) -> Tensor:
        layers = [self.query, self.key, self.value]
        trains = [layer for layer in layers if isinstance(layer, TTLinear)]
        made = forward_together(tokens, trains) if len(trains) == 3 else [layer(tokens) for layer in layers]
        query, key, value = (
            one.reshape(*tokens.shape[:2], self.heads, -1).transpose(1, 2)  # (texts, heads, tokens, share)
            for one in made
        )
        dropout = self.dropout_share if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))  # (texts, tokens, width)
        return out


def _linear(in_features: int, out_features: int, config: EncoderConfig, generator: torch.Generator | None) -> nn.Module:
    if config.kind == "dense":
        return dense_linear(in_features, out_features, generator)
    return TTLinear(in_features, out_features, config.rank, order=config.order, generator=generator)


def _words(config: EncoderConfig, generator: torch.Generator | None) -> nn.Module:
    if config.kind == "dense":
        return dense_table(config.vocabulary, config.width, 1.0, generator)
    rows, columns = config.word_modes or (None, None)
    return TTEmbedding(
        config.vocabulary,
        config.width,
        config.word_rank,
        order=config.order,
        row_modes=rows,
        column_modes=columns,
        generator=generator,
    )


def _dropout(config: EncoderConfig) -> nn.Module:
    # Without dropout there must be no Dropout module: the trainer keeps a random stream for models that have one.
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()
