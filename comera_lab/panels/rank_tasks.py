"""What a panel may train with ranks that learn: the MLP on the digits, or a small encoder on pairs of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.pairs import PairData, load_pairs
from comera_lab.experiments.results import Study, recorded_digits, recorded_pairs
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.models.mlp import MLP
from comera_lab.panels.lanes import digits_28

FEATURES = (784, 512, 512, 10)
# Of the 263,172 training pairs: more than a run in a notebook sees, and a fraction of their memory.
TRAIN_PAIRS, DEV_PAIRS, PAIR_TOKENS = 60_000, 1000, 16


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A model, its data and what a run on them needs. `build(max rank, generator)` makes the tensorised model.

    `data` is read at the first run. `held_out` names the side that accuracy is measured on. `gamma_high` and
    `gamma_step` bound the price that the panel offers, `timed_steps` is how often a step is timed around a cut.
    `recorded` gives the studies that stand beside the learner's own runs, `notice` what to say about the data.
    """

    name: str
    model_words: str
    start_help: str
    build: Callable[[int, torch.Generator | None], nn.Module]
    data: Callable[[], Dataset]
    recorded: Callable[[], tuple[Study, ...]]
    notice: Callable[[], str]
    held_out: str
    rate: float
    batch_size: int
    evaluate_every: int
    timed_steps: int
    gamma_high: float
    gamma_step: float


def _mlp(rank: int, generator: torch.Generator | None) -> nn.Module:
    return MLP(FEATURES, "tt", rank, generator=generator)


def _encoder(rank: int, generator: torch.Generator | None) -> nn.Module:
    config = replace(EncoderConfig.small(), rank=rank, word_rank=2 * rank)
    return PairEncoder(config, generator=generator)


# The worker of a panel may not print, so what the loader says is kept for whoever shows it.
_said: list[str] = []


@cache
def pair_data() -> PairData:
    """The WordNet pairs, or docstring pairs where those are not prepared (`pair_notice` says so); read once."""
    return load_pairs(_said.append)


def pair_notice() -> str:
    """What there is to say about the data once they were read: one line where they are not the WordNet pairs."""
    return " ".join(_said)


@cache
def _small_pairs() -> Dataset:
    return pair_data().dataset(train_pairs=TRAIN_PAIRS, test_pairs=DEV_PAIRS, tokens=PAIR_TOKENS)


DIGITS = RankTask(
    name="digits",
    model_words="A network 784 → 512 → 512 → 10 on handwritten digits.",
    start_help="Trains the network on 1,461 real digits, with a price on size.",
    build=_mlp,
    data=digits_28,
    recorded=recorded_digits,
    notice=str,
    held_out="test",
    rate=3e-3,
    batch_size=64,
    evaluate_every=25,
    timed_steps=60,
    gamma_high=200.0,
    gamma_step=1.0,
)
# At a rate of 3e-3 the tensorised encoder is still at chance after 240 steps (see studies_ranks.RankStudy).
PAIRS = RankTask(
    name="pairs",
    model_words="A transformer of two blocks, width 64, reads two texts and says how they are related.",
    start_help="Trains the encoder on pairs of texts, with a price on size.",
    build=_encoder,
    data=_small_pairs,
    recorded=recorded_pairs,
    notice=pair_notice,
    held_out="dev",
    rate=1e-3,
    batch_size=64,
    evaluate_every=50,
    timed_steps=10,
    gamma_high=20.0,
    gamma_step=0.1,
)
TASKS = {task.name: task for task in (DIGITS, PAIRS)}
