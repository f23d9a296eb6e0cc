"""A BERT-style encoder that fills in masked tokens, as CodeBERT is pre-trained; dense or tensorised, tied or not.

The blocks are those of the pair classifier (encoder.py): post-LN, GELU. Tensorised are the six matrices of every block,
the transform of the head and, with a `word_rank`, the word table; positions, norms, biases and an untied head stay
dense. `CODEBERT` has the sizes of microsoft/codebert-base, which are RoBERTa-base's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.layers import TTEmbedding, TTLinear
from comera_lab.models.decoder import Kind, check_ids, check_sizes, table_of
from comera_lab.models.dense import dense_table
from comera_lab.models.encoder import EncoderBlock, EncoderConfig
from comera_lab.objectives.token_loss import IGNORE, token_loss, token_scores

_START_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """Sizes of an encoder with a masked-token head. `rank`, `word_rank`, `order` and `tied` as in `DecoderConfig`."""

    kind: Kind = "dense"
    layers: int = 4
    width: int = 128
    hidden: int = 512
    heads: int = 4
    vocabulary: int = 2048
    positions: int = 128
    segments: int = 1
    tied: bool = True
    rank: int = 16
    word_rank: int | None = None
    order: int = 3
    dropout: float = 0.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "positions", "segments")
        if self.word_rank is not None:
            check_sizes(self, "word_rank")
        self.blocks()

    def blocks(self) -> EncoderConfig:
        """Sizes of the blocks, checked."""
        return EncoderConfig(
            kind=self.kind,
            layers=self.layers,
            width=self.width,
            hidden=self.hidden,
            heads=self.heads,
            positions=self.positions,
            vocabulary=self.vocabulary,
            rank=self.rank,
            order=self.order,
            dropout=self.dropout,
            norm_eps=self.norm_eps,
        )

    def build(self, generator: torch.Generator | None = None) -> MaskedModel:
        """The model."""
        return MaskedModel(self, generator=generator)


CODEBERT = MaskedConfig(
    layers=12, width=768, hidden=3072, heads=12, vocabulary=50_265, positions=514, dropout=0.1, rank=30
)


class MaskedModel(nn.Module):
    """ids (rows, tokens) -> logits (rows, tokens, vocabulary); with `targets` (rows, tokens) the mean loss in nats.

    Targets are `IGNORE` wherever nothing is asked: only the other places go through the head. Texts fill their rows,
    there is no padding. Otherwise as `Decoder`.
    """

    def __init__(self, config: MaskedConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        blocks, width = config.blocks(), config.width
        self.places = dense_table(config.positions, width, _START_STD, generator)
        self.segments = dense_table(config.segments, width, _START_STD, generator)
        self.words: nn.Module = (
            dense_table(config.vocabulary, width, _START_STD, generator)
            if config.kind == "dense" or config.word_rank is None
            else TTEmbedding(
                config.vocabulary, width, config.word_rank, order=config.order, std=_START_STD, generator=generator
            )
        )
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(EncoderBlock(blocks, generator) for _ in range(config.layers))
        self.transform = _small_start(width, config, generator)
        self.norm_head = nn.LayerNorm(width, config.norm_eps)
        self.head = None if config.tied else dense_table(config.vocabulary, width, _START_STD, generator)
        self.head_bias = nn.Parameter(torch.zeros(config.vocabulary))
        with torch.no_grad():
            for block in self.blocks:
                for linear in block.modules():
                    if isinstance(linear, nn.Linear):
                        linear.weight.normal_(0, _START_STD, generator=generator)
                        linear.bias.zero_()

    def forward(self, ids: Tensor, targets: Tensor | None = None, scores: bool = False) -> Tensor:
        hidden = self.encode(ids)
        if targets is None:
            return functional.linear(self.transformed(hidden), self.head_weight(), self.head_bias)
        if hidden.device.type != "meta":  # how many are asked for depends on the numbers, which meta has not
            asked = targets != IGNORE
            hidden, targets = hidden[asked], targets[asked]
        else:
            hidden, targets = hidden.flatten(0, 1), targets.flatten()
        made = token_scores if scores else token_loss
        return made(self.transformed(hidden), self.head_weight(), targets, self.head_bias)

    def encode(self, ids: Tensor) -> Tensor:
        """ids (rows, tokens) -> (rows, tokens, width)."""
        check_ids(ids, self.config.positions)
        place = torch.arange(ids.shape[1], device=ids.device)
        summed = self.words(ids) + self.places(place) + self.segments(torch.zeros_like(place))
        tokens: Tensor = self.dropout(self.norm(summed))
        visible = torch.ones(1, 1, 1, ids.shape[1], dtype=torch.bool, device=ids.device)
        for block in self.blocks:
            tokens = block(tokens, visible)
        return tokens

    def transformed(self, hidden: Tensor) -> Tensor:
        """What the head reads: norm(gelu(transform(hidden)))."""
        normed: Tensor = self.norm_head(functional.gelu(self.transform(hidden)))
        return normed

    def head_weight(self) -> Tensor:
        """(vocabulary, width), differentiable."""
        return table_of(self.words if self.head is None else self.head)

    def parameter_count(self) -> int:
        """Trainable numbers, a tied table once, gate entries included if there are any."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def extra_repr(self) -> str:
        return f"kind={self.config.kind!r}, tied={self.config.tied}, parameters={self.parameter_count():,}"


def _small_start(width: int, config: MaskedConfig, generator: torch.Generator | None) -> nn.Module:
    if config.kind == "tt":
        return TTLinear(width, width, config.rank, order=config.order, generator=generator)
    linear = nn.Linear(width, width, device="meta").to_empty(device=torch.get_default_device())
    with torch.no_grad():
        linear.weight.normal_(0, _START_STD, generator=generator)
        linear.bias.zero_()
    return linear
