"""`comera-lab train CONFIG`: a language model on code, with a bar that tells tokens per second and time to go."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comera_lab.commands.messages import complain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comera_lab.experiments.language_model import LanguageConfig
    from comera_lab.experiments.runs import TrainConfig
PROJECTED = ("coap", "galore", "flora")
OVERRIDES = ("steps", "batch_size", "learning_rate", "seed", "seconds", "optimizer")


def chosen_config(options: argparse.Namespace) -> LanguageConfig:
    """The named configuration with what the command line changes. Raises ValueError for a name that is none."""
    from comera_lab.experiments.language_model import language_config

    config = language_config(options.config)
    changes = {name: value for name in OVERRIDES if (value := getattr(options, name)) is not None}
    if options.optimizer is not None:
        projected = options.optimizer.startswith(PROJECTED)
        changes["optimizer_settings"] = {"rank_ratio": options.rank_ratio} if projected else {}
    training = replace(config.training, **changes)
    return replace(config, training=training, corpus=options.corpus or config.corpus)


def run_language(options: argparse.Namespace, checkpoint: Path | None) -> int:
    """The run of a configuration in this process, with its bar; interrupts as `fit` takes them."""
    from comera_lab.experiments.language_model import perplexity, prepare, train_language_model
    from comera_lab.experiments.recorder import EvalRow, Recorder
    from comera_lab.experiments.train import CheckpointError, TrainingError, TrainingInterrupted
    from comera_lab.runtime import limit_threads, pick_device, tune_cpu_allocator

    config = chosen_config(options)
    if config.ranks is not None and options.resume:
        raise ValueError(
            f"{options.config} learns its ranks and writes no checkpoint here, got --resume. Start it anew."
        )
    if config.ranks is None and checkpoint is not None:
        config = replace(config, training=replace(config.training, checkpoint_every=50))
    device = pick_device(options.device)
    limit_threads(options.threads)
    tune_cpu_allocator()
    try:
        streams, data = prepare(config)
    except OSError as error:
        return complain(error, 1)
    print(f"{streams.source}: {len(streams.train):,} tokens to train, {len(streams.validation):,} to validate")
    print(f"{options.config}: {config.training.steps} steps of {config.training.batch_size} x {config.tokens} tokens")
    recorded = asdict(config) | {"data_digest": streams.digest, "model_name": options.config}
    try:
        with (
            Recorder(options.out, recorded, seed=config.training.seed, device=device) as recorder,
            progress_bar(config.training, config.tokens) as on_row,
        ):
            run = train_language_model(
                config,
                streams=streams,
                device=device,
                recorder=recorder,
                on_row=on_row,
                checkpoint=None if config.ranks is not None else checkpoint,
                resume=options.resume,
            )
    except (CheckpointError, TrainingError) as error:
        return complain(error, 1)
    except TrainingInterrupted as stop:
        return complain(stop, 130)
    tests = [row for row in run.result.rows if isinstance(row, EvalRow)]
    if tests:
        loss = tests[-1].loss_nats
        print(
            f"validation loss {loss:.4f} nats per token, perplexity {perplexity(loss):.1f} on {len(data.test_x)} blocks"
        )
    if run.finish is not None:
        print(f"{run.finish.size.total:,} parameters, {run.finish.size.total_ratio:.2f}x smaller than the dense model")
    print(
        f"{run.result.stopped} after {run.result.steps} steps, {run.result.elapsed_s:.2f} s of training (measured here)"
    )
    return 0


@contextmanager
def progress_bar(
    training: TrainConfig, tokens: int, say: Callable[[Any], object] | None = None, file: Any = None
) -> Iterator[Callable[[Any], None]]:
    """A function for rows that moves a tqdm bar: tokens, tokens per second, time to go, the last losses.

    `say` gets the evaluations. The bar is drawn on a terminal alone, unless `file` is given.
    """
    from comera_lab.experiments.recorder import EvalRow, StepRow
    from comera_lab.runtime import require

    tqdm = require("tqdm", "progress bars").tqdm
    block = training.batch_size * tokens
    shown: dict[str, str] = {}
    bar = tqdm(
        total=training.steps * block, unit="token", unit_scale=True, file=file,
        disable=None if file is None else False, dynamic_ncols=True,
    )  # fmt: skip

    def on_row(row: Any) -> None:
        if isinstance(row, StepRow):
            if not bar.n:
                bar.initial = bar.last_print_n = bar.n = (row.step - 1) * block  # where a resumed run goes on
            shown["loss"] = f"{row.loss_nats:.3f}"
            bar.set_postfix(shown, refresh=False)
            bar.update(block)
        elif isinstance(row, EvalRow):
            shown["validation"] = f"{row.loss_nats:.3f}"
            if say is not None:
                bar.clear()
                say(row)

    try:
        yield on_row
    finally:
        bar.close()
