"""Let a decoder write on: token by token, the likeliest or drawn by chance, as text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from comera_lab.experiments.tokens import END, MASK, PAD, CodeTokenizer
from comera_lab.models.decoder import Decoder


class Candidate(NamedTuple):
    """A token that may come next: its text, and the probability that the model gives it."""

    text: str
    probability: float


@torch.no_grad()
def next_tokens(model: Decoder, tokenizer: CodeTokenizer, prompt: str, top: int = 5) -> list[Candidate]:
    """The `top` likeliest tokens after `prompt`, best first."""
    probabilities = _distribution(model, _ids(tokenizer, prompt))
    best = probabilities.topk(min(top, len(probabilities)))
    return [Candidate(tokenizer.decode([i]) if i != END else "<end>", float(p))
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]  # fmt: skip


@torch.no_grad()
def complete(
    model: Decoder,
    tokenizer: CodeTokenizer,
    prompt: str,
    *,
    tokens: int = 48,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """What the model writes after `prompt`: at most `tokens` tokens, ended by <end> where it ends a file.

    `temperature` 0 takes the likeliest token each time; at 1 tokens are drawn as probable as the model says, above
    they are drawn more evenly. The model reads as much of the end as its positions hold. An empty prompt begins a
    file. The model is left in the mode it was in. Raises ValueError for a negative temperature.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, got {temperature}. 0 takes the likeliest token.")
    draw = torch.Generator().manual_seed(seed)
    ids = _ids(tokenizer, prompt)
    begun = len(ids)
    for _ in range(tokens):
        probabilities = _distribution(model, ids, temperature or 1.0)
        chosen = (
            int(torch.multinomial(probabilities, 1, generator=draw)) if temperature else int(probabilities.argmax())
        )
        if chosen == END:
            break
        ids.append(chosen)
    return tokenizer.decode(ids[begun:])


def _ids(tokenizer: CodeTokenizer, prompt: str) -> list[int]:
    return [END, *tokenizer.encode(prompt)]


def _distribution(model: Decoder, ids: list[int], temperature: float = 1.0) -> Tensor:
    """(vocabulary,) probabilities of the next token on the CPU; never padding or a mask."""
    was_training = model.training
    model.eval()
    try:
        seen = torch.tensor([ids[-model.config.positions :]], device=next(model.parameters()).device)
        hidden = model.hidden_states(seen)[0, -1]
        logits = (model.head_weight() @ hidden).float().cpu()
    finally:
        model.train(was_training)
    logits[[PAD, MASK]] = -torch.inf
    return torch.softmax(logits / temperature, dim=0)
