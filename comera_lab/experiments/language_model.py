"""Pre-train a language model on code: a decoder on next tokens, an encoder on masked ones, with any optimizer here.

`LanguageTrainer` is `Trainer` with another loss: the model makes it, in chunks, and the learning rate follows
`rate_share`. Losses are means over tokens, in nats; perplexity is exp of that. An evaluation sums losses over all
targets and divides once by their number, so the size of its batches changes nothing. (The public scripts of GaLore
and COAP start counting batches at 1, and report N / (N + 1) of the mean over N batches.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.experiments.corpus import Corpus, c4, code_search_net, folder_corpus, standard_library
from comera_lab.experiments.rank_config import RankConfig
from comera_lab.experiments.rank_training import FinishReport, RankTrainer
from comera_lab.experiments.recorder import EvalRow, Recorder, StepRow
from comera_lab.experiments.runs import RunResult, TrainConfig
from comera_lab.experiments.studies_ranks import rate_share
from comera_lab.experiments.tokens import TokenData, TokenStreams, masked_batch, token_streams
from comera_lab.experiments.train import fit
from comera_lab.experiments.trainer import Trainer
from comera_lab.layers import tt_layers
from comera_lab.models.decoder import DecoderConfig
from comera_lab.models.masked import MaskedConfig
from comera_lab.objectives import model_size
from comera_lab.optimizers import make_optimizer
from comera_lab.shapes import ShapeError

EVALUATION_ROWS = 32  # blocks at a time through the model without gradients; the result does not depend on it
_SEED_STRIDE = 1_000_003  # between the masks of one seed and those of the next


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Ranks that training chooses (CoMERA). `compression` is that of the whole model: dense over compressed.

    None leaves the size to its price `gamma`, for all steps; with a target half of the steps are early, half late.
    """

    compression: float | None = 4.23
    gamma: float = 0.5
    gate_rate: float = 1e-2

    def config(self, model: nn.Module, training: TrainConfig) -> RankConfig:
        """The stages for this model and run. Raises ValueError for a compression that is no number above 1."""
        late = 0 if self.compression is None else training.steps // 2
        ratio = None
        if self.compression is not None:
            if not self.compression > 1:
                raise ValueError(f"compression must be above 1, got {self.compression}. The published one is 4.23.")
            size = model_size(model)
            ratio = min(1.0, size.dense_twin / self.compression / size.total)
        return RankConfig(
            early_steps=training.steps - late,
            late_steps=late,
            gamma=self.gamma,
            target_ratio=ratio,
            part="model",
            rate=training.learning_rate,
            gate_rate=self.gate_rate,
            batch_size=training.batch_size,
            seed=training.seed,
            evaluate_every=training.evaluate_every,
            rank_rows_every=max(1, training.steps // 40),
        )


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """One pre-training. Cores and gates are always under AdamW, `training.optimizer` has the dense remainder.

    `corpus` is "stdlib", "packages" (site-packages too), a folder, or "code_search_net:FOLDER", "c4:FOLDER". Blocks
    are `tokens` long; `validation_blocks` of the validation side judge. `ranks` needs a model of kind "tt".
    """

    model: DecoderConfig | MaskedConfig
    training: TrainConfig = field(default_factory=TrainConfig)
    corpus: str = "stdlib"
    tokens: int = 128
    validation_blocks: int | None = 256
    ranks: RankPlan | None = None

    def __post_init__(self) -> None:
        if self.tokens > self.model.positions:
            raise ShapeError(
                f"tokens must fit the positions of the model, got {self.tokens} and {self.model.positions}. "
                "Cut shorter blocks, or give the model more positions."
            )
        if self.ranks is not None and self.model.kind != "tt":
            raise ValueError('ranks are learned by a model of kind "tt", got kind="dense". Leave ranks out.')

    @property
    def masked(self) -> bool:
        """Whether the model fills in masked tokens; a decoder tells the next."""
        return isinstance(self.model, MaskedConfig)


_SMALL = DecoderConfig(vocabulary=1024, positions=128)
_TT = replace(_SMALL, kind="tt", rank=24, word_rank=16)
_RUN = TrainConfig(steps=400, batch_size=16, learning_rate=3e-3, evaluate_every=50)
_COAP: Mapping[str, Any] = {"rank_ratio": 4.0, "update_interval": 16, "refresh_factor": 5}

# The blocks of the public LLaMA-9M on a vocabulary that a laptop can learn, and the same idea for masked tokens.
LANGUAGE_CONFIGS = {
    "code-small": LanguageConfig(model=_SMALL, training=_RUN),
    "code-small-coap": LanguageConfig(model=_SMALL, training=replace(_RUN, optimizer="coap", optimizer_settings=_COAP)),
    "code-small-comera": LanguageConfig(model=_TT, training=_RUN, ranks=RankPlan()),
    "code-small-comera-coap": LanguageConfig(
        model=_TT, training=replace(_RUN, optimizer="coap", optimizer_settings=_COAP), ranks=RankPlan()
    ),
    "code-masked": LanguageConfig(model=MaskedConfig(vocabulary=1024), training=_RUN),
}


def language_config(name: str) -> LanguageConfig:
    """A named configuration. Raises ValueError, listing the names, for another."""
    if name not in LANGUAGE_CONFIGS:
        raise ValueError(f"configuration must be one of {', '.join(LANGUAGE_CONFIGS)}, got {name!r}. Pick one of them.")
    return LANGUAGE_CONFIGS[name]


class LanguageTrainer(Trainer):
    """`Trainer` for a model that makes its own loss: model(ids, targets) -> nats, model(ids, targets, True) -> sums.

    The rate of every group is its start rate times `rate_share`. Masks are drawn anew for each step, from the run's
    seed and the step alone, so a resumed run meets the same.
    """

    data: TokenData

    def __init__(
        self,
        model: nn.Module,
        data: TokenData,
        config: TrainConfig,
        recorder: Recorder | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        objective: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> None:
        super().__init__(model, data, config, recorder, optimizer=optimizer, objective=objective)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self) -> StepRow:
        share = rate_share(self.steps_done, self.config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        return super().step()

    def loss_of(self, rows: Tensor) -> Tensor:
        ids, targets = self.data.train_x[rows], self.data.train_y[rows]
        if self.data.masked:
            draw = torch.Generator().manual_seed(self.config.seed * _SEED_STRIDE + self.steps_done)
            ids, targets = masked_batch(ids, self.data.classes, draw)
        loss: Tensor = self.model(ids, targets)
        return loss

    @torch.no_grad()
    def evaluate(self) -> EvalRow:
        """Mean loss over the targets of the validation side, and the share that the largest logit meets."""
        loss, accuracy = evaluate(self.model, self.data)
        row = EvalRow(step=self.steps_done, loss_nats=loss, accuracy=accuracy, elapsed_s=self.elapsed_s)
        self.evaluations.append(row)
        return self._keep(row)


@torch.no_grad()
def evaluate(model: nn.Module, data: TokenData, rows: int = EVALUATION_ROWS) -> tuple[float, float]:
    """(mean loss in nats per target, share of targets met) on the test side, the model in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        sums = torch.zeros(3, dtype=torch.float64)
        for ids, targets in zip(torch.split(data.test_x, rows), torch.split(data.test_y, rows), strict=True):
            sums += model(ids, targets, True).cpu()
    finally:
        model.train(was_training)
    loss, hits, count = sums.tolist()
    return loss / count, hits / count


def perplexity(loss_nats: float) -> float:
    """exp(loss): how many equally likely tokens the model hesitates between. Infinite where that overflows."""
    return math.exp(loss_nats) if loss_nats < 700 else math.inf


def read_corpus(name: str) -> Corpus:
    """The corpus that `LanguageConfig.corpus` names."""
    kind, _, folder = name.partition(":")
    if kind in ("code_search_net", "c4") and folder:
        return code_search_net(folder) if kind == "code_search_net" else c4(folder)
    return standard_library(packages=name == "packages") if name in ("stdlib", "packages") else folder_corpus(name)


def prepare(config: LanguageConfig, streams: TokenStreams | None = None) -> tuple[TokenStreams, TokenData]:
    """The corpus in codes, from the cache where it has been made before, and its blocks."""
    streams = token_streams(read_corpus(config.corpus), config.model.vocabulary) if streams is None else streams
    check_fits(config, streams)
    return streams, streams.blocks(config.tokens, masked=config.masked, validation_blocks=config.validation_blocks)


def check_fits(config: LanguageConfig, streams: TokenStreams) -> None:
    """Raise ShapeError unless model and tokenizer have one vocabulary."""
    if config.model.vocabulary != len(streams.tokenizer):
        raise ShapeError(
            f"model and tokenizer must have one vocabulary, got {config.model.vocabulary:,} and "
            f"{len(streams.tokenizer):,}. Build the model for the tokenizer, or learn another tokenizer."
        )


def language_optimizer(
    model: nn.Module, training: TrainConfig, gate_rate: float | None = None
) -> torch.optim.Optimizer:
    """`training.optimizer` over the dense parameters, AdamW over cores and gates: one optimizer, one state, one report.

    "adamw" is torch's, fused. Of the others, those that project leave cores and gates unprojected: plain AdamW.
    """
    layers = tt_layers(model).values()
    cores = {id(core) for layer in layers for core in layer.cores}
    gates = {id(gate) for layer in layers for gate in layer.gates}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parts = {
        "rest": [(name, p) for name, p in named if id(p) not in cores | gates],
        "cores": [(name, p) for name, p in named if id(p) in cores],
        "gates": [(name, p) for name, p in named if id(p) in gates],
    }
    rate, plain = training.learning_rate, training.optimizer == "adamw"
    groups: list[dict[str, Any]] = []
    for part, members in parts.items():
        if members:
            group = {"params": members, "lr": gate_rate if part == "gates" and gate_rate is not None else rate}
            groups.append(group if part == "rest" or plain else {**group, "rank": None, "rank_ratio": None})
    settings = dict(training.optimizer_settings)
    if plain:
        settings.setdefault("fused", all(p.device.type in ("cpu", "cuda") for _, p in named))
    return make_optimizer(training.optimizer, groups, rate, weight_decay=training.weight_decay, **settings)


@dataclass(frozen=True)
class LanguageRun:
    """A pre-training as it ended. `finish` says what the last cut did, where ranks were learned to the end."""

    model: nn.Module
    streams: TokenStreams
    result: RunResult
    finish: FinishReport | None = None


def train_language_model(
    config: LanguageConfig,
    *,
    streams: TokenStreams | None = None,
    device: torch.device | str = "cpu",
    recorder: Recorder | None = None,
    on_row: Callable[[StepRow | EvalRow], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
) -> LanguageRun:
    """The whole run of `config`, as `fit` makes it: same rows, stops, checkpoints and errors. Nothing is printed.

    Where ranks are learned the run ends with the last cut, an evaluation behind it; it takes no checkpoint here
    (`RankTrainer.save` does). `streams` replaces the corpus.
    """
    streams, data = prepare(config, streams)
    model = config.model.build(torch.Generator().manual_seed(config.training.seed)).to(device)
    if config.ranks is None:
        result = fit(
            model,
            data,
            config.training,
            recorder=recorder,
            on_row=on_row,
            should_stop=should_stop,
            checkpoint=checkpoint,
            resume=resume,
            optimizer=language_optimizer(model, config.training),
            trainer_type=LanguageTrainer,
        )
        return LanguageRun(model, streams, result)
    if checkpoint is not None:
        raise ValueError("a run that learns its ranks takes no checkpoint here, got one. Leave it out.")
    trainer = rank_trainer(config, model, data, recorder)
    tell = (lambda row: None) if on_row is None else on_row
    stopped = False
    while not trainer.done and not (stopped := should_stop is not None and should_stop()):
        tell(trainer.step())
        if trainer.evaluation_due and not trainer.done:
            tell(trainer.evaluate())
    finish = None if stopped else trainer.finish()
    if not stopped:
        tell(trainer.evaluate())
    return LanguageRun(model, streams, _result(trainer, stopped), finish)


def rank_trainer(
    config: LanguageConfig, model: nn.Module, data: TokenData, recorder: Recorder | None = None
) -> RankTrainer:
    """The trainer of a `config` with `ranks`: step it until `done`, then `finish`."""
    if config.ranks is None:
        raise ValueError("this configuration learns no ranks, got ranks=None. Give ranks=RankPlan().")

    def optimizer_of(gated: nn.Module, ranks: RankConfig) -> torch.optim.Optimizer:
        return language_optimizer(gated, config.training, ranks.gate_rate)

    stages = config.ranks.config(model, config.training)
    return RankTrainer(model, data, stages, recorder, make_optimizer=optimizer_of, trainer_type=LanguageTrainer)


def _result(trainer: RankTrainer, stopped: bool) -> RunResult:
    accuracies = [row.accuracy for row in trainer.rows if isinstance(row, EvalRow)]
    return RunResult(
        rows=list(trainer.rows),
        steps=trainer.steps_done,
        stopped="stopped" if stopped else "done",
        accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        elapsed_s=trainer.elapsed_s,
    )
