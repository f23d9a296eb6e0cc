"""Cross-entropy of a language model's head, a few rows of logits at a time: all of them are never in memory.

    loss = mean over targets t != IGNORE of  logsumexp(z) - z[t],   z = weight h (+ bias)

One chunk of logits is made, turned into its own gradient p - onehot, multiplied into the gradients of hidden states,
weight and bias, and dropped. So the gradients are finished in the forward pass: backward multiplies them by a number.
Twin for tests: `naive_token_loss`. Same idea as in Cut Cross-Entropy (arXiv 2411.09009), without a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from comera_lab.shapes import ShapeError

IGNORE = -100
CHUNK_ELEMENTS = 2**22  # logits alive at a time: 16 MiB in fp32, 131 rows of a vocabulary of 32,000


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """hidden (..., width), weight (vocabulary, width), targets (...), bias (vocabulary,) -> mean loss in nats, fp32.

    Targets equal to `IGNORE` do not count; without any other the loss is NaN, as in torch. `chunk_elements` bounds
    the logits that are alive, at least one row of them. float64 stays float64. Raises ShapeError for sizes that do not
    fit. A target outside the vocabulary raises as `gather` does on the device.
    """
    _check(hidden, weight, targets, bias)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = max(1, len(flat) if flat.is_meta else chunk_elements // len(weight))  # nothing is allocated on meta
    loss: Tensor = _TokenLoss.apply(flat, weight, wanted, bias, rows)  # type: ignore[no-untyped-call]
    return loss


def naive_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same number from all logits at once."""
    logits = functional.linear(hidden, weight, bias).flatten(0, -2)
    return functional.cross_entropy(logits, targets.flatten().long(), ignore_index=IGNORE)


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Shapes as in `token_loss` -> (3,) float64: loss in nats, targets met by the largest logit, targets that count.

    Sums: add them over the batches of an evaluation and divide once, by the count.
    """
    _check(hidden, weight, targets, bias)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)
    for part, aim in zip(*_chunks(flat, wanted, max(1, chunk_elements // len(weight))), strict=True):
        logits, kept = _logits(part, weight, bias), aim != IGNORE
        losses = functional.cross_entropy(logits, aim, ignore_index=IGNORE, reduction="none")
        sums += torch.stack([losses.sum(dtype=torch.float64), ((logits.argmax(-1) == aim) & kept).sum(), kept.sum()])
    return sums


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        targets = targets.long()
        precise = torch.promote_types(weight.dtype, torch.float32)
        count = (targets != IGNORE).sum()
        total = hidden.new_zeros((), dtype=precise)
        wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[3]
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
        to_bias = torch.zeros_like(weight[:, 0], dtype=precise) if wanted[2] else None
        for number, (part, aim) in enumerate(zip(*_chunks(hidden, targets, rows), strict=True)):
            logits = _logits(part, weight, bias)  # (rows, vocabulary)
            kept = aim != IGNORE
            places = aim.masked_fill(~kept, 0).unsqueeze(-1)
            norms = logits.logsumexp(-1, keepdim=True)
            total += ((norms - logits.gather(-1, places)).squeeze(-1) * kept).sum()
            if not any(wanted):
                continue
            slope = logits.sub_(norms).exp_()  # probabilities, in place of the logits
            slope.scatter_add_(-1, places, slope.new_full(places.shape, -1.0))
            slope *= (kept.to(precise) / count).unsqueeze(-1)
            low = slope.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[number * rows : number * rows + len(part)] = low @ weight
            if to_weight is not None:
                to_weight += low.T @ part
            if to_bias is not None:
                to_bias += slope.sum(0)
        ctx.save_for_backward(*(
            None if gradient is None else gradient.to(like)
            for gradient, like in ((to_hidden, hidden.dtype), (to_weight, weight.dtype), (to_bias, weight.dtype))
        ))  # fmt: skip
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight, to_bias = (
            None if gradient is None else gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors
        )
        return to_hidden, to_weight, None, to_bias, None


def _chunks(hidden: Tensor, targets: Tensor, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return torch.split(hidden, rows), torch.split(targets, rows)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, vocabulary) in at least fp32."""
    logits = functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    fits = weight.ndim == 2 and hidden.ndim >= 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or targets.shape != hidden.shape[:-1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [None if t is None else tuple(t.shape) for t in (hidden, weight, targets, bias)]
        raise ShapeError(
            "hidden (..., width), weight (vocabulary, width), targets (...) and bias (vocabulary,) must fit, got "
            f"{', '.join(map(str, shapes))}. Give one target for each hidden state."
        )
