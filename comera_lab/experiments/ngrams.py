"""What counting alone can do: the loss of a unigram and of a bigram model, as marks for a language model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from comera_lab.experiments.tokens import TokenData, TokenStreams


class Marks(NamedTuple):
    """Nats per token on the same targets: all tokens alike, their frequencies, and frequencies after each token."""

    uniform: float
    unigram: float
    bigram: float


def marks(streams: TokenStreams, data: TokenData) -> Marks:
    """Losses on the targets of `data`'s test side, counted on the training side of `streams`.

    The bigram is interpolated with the unigram after Witten and Bell (1991): a token that was followed by many
    different ones leaves more to the unigram. Raises ValueError for masked data, whose tokens are known on both sides.
    """
    if data.masked:
        raise ValueError("marks are for next tokens, got masked data. Use blocks(masked=False).")
    size = len(streams.tokenizer)
    unigram = np.bincount(streams.train, minlength=size) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(streams.train[:-1].astype(np.int64) * size + streams.train[1:], minlength=size * size)
    counts = pairs.reshape(size, size)
    seen, kinds = counts.sum(axis=1), (counts > 0).sum(axis=1)
    before, after = _flat(data.test_x), _flat(data.test_y)
    share = (counts[before, after] + kinds[before] * unigram[after]) / np.maximum(seen + kinds, 1)[before]
    # a token that never stood before another says nothing about the next
    share = np.where(seen[before] > 0, share, unigram[after])
    return Marks(float(np.log(size)), float(-np.log(unigram[after]).mean()), float(-np.log(share).mean()))


def _flat(ids: Tensor) -> npt.NDArray[np.int64]:
    flat: npt.NDArray[np.int64] = ids.cpu().numpy().astype(np.int64).ravel()
    return flat
