"""The recorded pre-training study on code: dense AdamW, COAP and GaLore against CoMERA, alone and with COAP."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from comera_lab.experiments.language_costs import costs, trainer_of
from comera_lab.experiments.language_model import (
    LanguageConfig,
    LanguageTrainer,
    RankPlan,
    evaluate,
    language_config,
    perplexity,
    prepare,
)
from comera_lab.experiments.rank_training import RankTrainer
from comera_lab.experiments.recorder import EvalRow, LanguageResultRow, Recorder, read_rows, split_runs
from comera_lab.experiments.tokens import TokenStreams
from comera_lab.layers import tt_layers
from comera_lab.models.decoder import DecoderConfig
from comera_lab.objectives import model_size

SEEDS = (0, 1, 2)
START_RATE = 5e-3
_TUNING_SEED, _TUNING_BLOCKS = 100, 128
_TIMED_STEPS = 20
_EVERY = 80  # steps between two looks at the gradient, for GaLore by SVD, for COAP warm, with four alignment steps
_COAP: Mapping[str, Any] = {"rank_ratio": 4.0, "update_interval": _EVERY // 5, "refresh_factor": 5}
_COMMAND = 'python -c "from comera_lab.experiments.studies_lm import language_study; language_study(PATH)"'


@dataclass(frozen=True)
class Arm:
    """One way to train. `optimizer` has everything dense; cores and gates are under AdamW.

    `tensorised` without `ranks` keeps its ranks: what the rate of arms that learn theirs is tuned on.
    """

    method: str
    optimizer: str = "adamw"
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: RankPlan | None = None
    tensorised: bool = False

    @property
    def tuned(self) -> Arm:
        """The arm whose best rate this one takes: itself, or its twin at fixed ranks."""
        if self.ranks is None:
            return self
        return Arm(f"fixed ranks, {self.optimizer}", self.optimizer, self.settings, tensorised=True)


ARMS = (
    Arm("adamw"),
    Arm("coap", "coap", _COAP),
    Arm("galore", "galore", {"rank_ratio": 4.0, "update_interval": _EVERY}),
    Arm("comera-early", ranks=RankPlan(compression=None, gamma=1.0)),
    Arm("comera-late", ranks=RankPlan(compression=4.23)),
    Arm("comera-late + coap", "coap", _COAP, RankPlan(compression=4.23)),
)


@dataclass(frozen=True, kw_only=True)
class LanguageStudy:
    """What all arms share: the decoder of "code-small", its tensorised twin, data, batches and steps."""

    dense: DecoderConfig = field(default_factory=lambda: _decoder("code-small"))
    tensorised: DecoderConfig = field(default_factory=lambda: _decoder("code-small-comera"))
    corpus: str = "stdlib"
    tokens: int = 128
    validation_blocks: int = 256
    batch_size: int = 8
    steps: int = 500
    tuning_steps: int = 250
    evaluate_every: int = 125

    def config(self, arm: Arm, rate: float, seed: int, steps: int | None = None) -> LanguageConfig:
        """The run of one arm."""
        training = replace(
            language_config("code-small").training,
            steps=self.steps if steps is None else steps,
            batch_size=self.batch_size,
            learning_rate=rate,
            optimizer=arm.optimizer,
            optimizer_settings=dict(arm.settings),
            seed=seed,
            evaluate_every=self.evaluate_every if steps is None else 0,
        )
        return LanguageConfig(
            model=self.tensorised if arm.ranks is not None or arm.tensorised else self.dense,
            training=training,
            corpus=self.corpus,
            tokens=self.tokens,
            validation_blocks=self.validation_blocks,
            ranks=arm.ranks,
        )


def language_study(
    out_path: str | Path,
    *,
    study: LanguageStudy | None = None,
    arms: Sequence[Arm] = ARMS,
    seeds: Iterable[int] = SEEDS,
    start_rate: float = START_RATE,
    streams: TokenStreams | None = None,
    tried: Mapping[str, Mapping[float, float]] | None = None,
    on_result: Callable[[LanguageResultRow], None] | None = None,
) -> list[LanguageResultRow]:
    """Train every arm from every seed on one thread; append run, evaluation and result rows to `out_path`.

    Each arm gets the rate, of those that double from one to the next, with the lowest loss on the last files of the
    training side after `tuning_steps` steps, with a seed used nowhere else; arms that learn ranks take over the best
    rate of fixed ranks. `tried` is what `tune` found for some of them. An interrupted study goes on where it was: what
    `out_path` holds is not made again. On a busy machine call `remeasure` afterwards.
    """
    study = LanguageStudy() if study is None else study
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = []
    try:
        streams, _ = prepare(study.config(arms[0], start_rate, 0), streams)
        known = {name: dict(losses) for name, losses in {**(tried or {}), **_tried(out_path)}.items()}
        for seed in seeds:
            for arm in arms:
                if (arm.method, seed) in _finished(out_path):
                    continue
                name = arm.tuned.method
                if name not in known:
                    known[name] = tune(arm, study, start_rate, streams)
                made.append(_recorded(out_path, study, arm, known[name], seed, streams))
                if on_result is not None:
                    on_result(made[-1])
    finally:
        torch.set_num_threads(threads)
    return made


def remeasure(path: str | Path, *, streams: TokenStreams | None = None, timed_steps: int = _TIMED_STEPS) -> int:
    """Take step times and pools of every finished run in `path` again, one thread, and rewrite the file.

    Steps of all methods are taken in turn, so that a busy second meets all of them. Runs of one method get the same
    times as its first seed, whose ranks are used. Returns how many rows were renewed.
    """
    path = Path(path)
    rows = read_rows(path)
    runs = [run for run in split_runs(rows) if run[-1]["kind"] == "language_result"]
    firsts = {run[-1]["method"]: run for run in reversed(runs)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = costs([_config_of(run[0]["config"], run[-1]) for run in firsts.values()],
                       [run[-1]["ranks"] for run in firsts.values()], streams, timed_steps)  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    for run in runs:
        run[-1].update(found[list(firsts).index(run[-1]["method"])])
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    read_rows(fresh)
    fresh.replace(path)
    return len(runs)


def recorded_table(path: str | Path) -> str:
    """A recorded study as text: one line a method, losses over its seeds, and where it was recorded."""
    runs = [run for run in split_runs(read_rows(path)) if run[-1]["kind"] == "language_result"]
    lines = [
        f"{'method':<19} {'rate':<6} {'smaller':>7}  {'loss, nats per token (seeds)':<29} {'perplexity':>10}  "
        f"{'weights':>7} {'grads':>6} {'optim.':>6} {'activ.':>6}  {'ms/step':>7} {'tokens/s':>8}"
    ]
    for method in dict.fromkeys(run[-1]["method"] for run in runs):
        results = [run[-1] for run in runs if run[-1]["method"] == method]
        first, losses = results[0], [row["loss_nats"] for row in results]
        pools = [first["pools_after_mib"][name] for name in ("weights", "grads", "optimizer", "activations")]
        spread = f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}; {len(losses)})"
        lines.append(
            f"{method:<19} {first['learning_rate']:<6g} {mean(row['total_ratio'] for row in results):>6.2f}x  "
            f"{spread:<29} {perplexity(mean(losses)):>10.0f}  {pools[0]:>7.2f} {pools[1]:>6.2f} {pools[2]:>6.2f} "
            f"{pools[3]:>6.1f}  {first['step_time_ms']:>7.0f} {first['tokens_per_s']:>8,.0f}"
        )
    info, last = runs[0][0], runs[0][-1]
    return "\n".join([
        *lines,
        f"MiB by pool as training ended, ms of a step as it began. {last['steps']} steps, {last['tokens']:,} tokens "
        f"each; {info['config']['data']}.",
        f"Recorded on {info['device']}, {info['threads']} thread, torch {info['torch']}.",
    ])  # fmt: skip


def _decoder(name: str) -> DecoderConfig:
    model = language_config(name).model
    assert isinstance(model, DecoderConfig)
    return model


def _runs(path: str | Path) -> list[list[dict[str, Any]]]:
    return split_runs(read_rows(path)) if Path(path).is_file() else []


def _finished(path: str | Path) -> set[tuple[str, int]]:
    return {(run[-1]["method"], run[-1]["seed"]) for run in _runs(path) if run[-1]["kind"] == "language_result"}


def _tried(path: str | Path) -> dict[str, dict[float, float]]:
    """What a rate was chosen from, by the method it was tuned on, as far as `path` tells."""
    configs = [run[0]["config"] for run in _runs(path)]
    return {one["tuned_on"]: {float(rate): loss for rate, loss in one["tried"].items()} for one in configs}


def tune(arm: Arm, study: LanguageStudy, start_rate: float, streams: TokenStreams) -> dict[float, float]:
    """Rate -> loss on held-out files of the training side; doubles or halves until the best has worse neighbours.

    On the thread count that is set.
    """
    cut = len(streams.train) - 1 - _TUNING_BLOCKS * study.tokens
    inner = replace(streams, train=streams.train[:cut], validation=streams.train[cut:])

    def loss_at(rate: float) -> float:
        config = study.config(arm.tuned, rate, _TUNING_SEED, study.tuning_steps)
        data = inner.blocks(study.tokens)
        trainer = trainer_of(config, data)
        while not trainer.done:
            trainer.step()
        return evaluate(trainer.model, data)[0]

    losses = {start_rate: loss_at(start_rate)}
    while True:
        best = min(losses, key=lambda rate: losses[rate])
        missing = [rate for rate in (best / 2, 2 * best) if rate not in losses]
        if not missing:
            return losses
        losses[missing[0]] = loss_at(missing[0])


def _recorded(
    out_path: str | Path,
    study: LanguageStudy,
    arm: Arm,
    tried: dict[float, float],
    seed: int,
    streams: TokenStreams,
) -> LanguageResultRow:
    config = study.config(arm, min(tried, key=lambda rate: tried[rate]), seed)
    about = {
        "method": arm.method,
        "tuned_on": arm.tuned.method,
        "data": streams.source,
        "data_digest": streams.digest,
        "characters_per_token": streams.characters_per_token,
        "tried": {f"{rate:g}": loss for rate, loss in tried.items()},
        "tuning_steps": study.tuning_steps,
        "schedule": "rises over the first twentieth, falls to 0 over the second half",
        **dataclasses.asdict(config),
    }
    with Recorder(out_path, about, seed=seed, command=_COMMAND) as recorder:
        # Not handed to the trainer: a row for every step would make the file ten times as long.
        _, data = prepare(config, streams)
        trainer = trainer_of(config, data)
        while not trainer.done:
            trainer.step()
            if trainer.evaluation_due and not trainer.done:
                recorder.add(trainer.evaluate())
        if isinstance(trainer, RankTrainer):
            trainer.finish()
            for row in trainer.history[:: max(1, len(trainer.history) // 6)]:
                recorder.add(row)
        last = trainer.evaluate()
        recorder.add(last)
        result = _result(config, arm, trainer, last, streams)
        recorder.add(result)
    return result


def _result(
    config: LanguageConfig, arm: Arm, trainer: LanguageTrainer | RankTrainer, last: EvalRow, streams: TokenStreams
) -> LanguageResultRow:
    ranks = {name: list(layer.shape.ranks) for name, layer in tt_layers(trainer.model).items()}
    size, training = model_size(trainer.model), config.training
    return LanguageResultRow(
        method=arm.method,
        optimizer=arm.optimizer,
        settings=dict(arm.settings),
        learning_rate=training.learning_rate,
        seed=training.seed,
        steps=trainer.steps_done,
        tokens=trainer.steps_done * training.batch_size * config.tokens,
        parameters=size.total,
        total_ratio=size.dense_twin / size.total,
        loss_nats=last.loss_nats,
        accuracy=last.accuracy,
        ranks=ranks,
        elapsed_s=trainer.elapsed_s,
        **costs([config], [ranks], streams, 3)[0],
    )


def _config_of(recorded: Mapping[str, Any], result: Mapping[str, Any]) -> LanguageConfig:
    ranks = None if recorded["ranks"] is None else RankPlan(**recorded["ranks"])
    arm = Arm(result["method"], result["optimizer"], result["settings"], ranks)
    study = LanguageStudy(batch_size=recorded["training"]["batch_size"], tokens=recorded["tokens"])
    return study.config(arm, result["learning_rate"], 0)
