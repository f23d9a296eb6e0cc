"""`comera-lab train`: a small model on real digits or on code, recorded; by one process or by those of torchrun."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comera_lab.commands.messages import complain
from comera_lab.commands.train_language import OVERRIDES, PROJECTED, chosen_config, progress_bar, run_language

if TYPE_CHECKING:
    import torch
    from torch import nn

    from comera_lab.experiments.distributed import World
    from comera_lab.experiments.parallel import ParallelTrainer
    from comera_lab.experiments.train import TrainConfig

_MakeOptimizer = Callable[["nn.Module"], "torch.optim.Optimizer | None"]


def add(commands: Any) -> None:
    train = commands.add_parser("train", help="train a small model on real digits or on code and record it")
    train.add_argument(
        "config", nargs="?",
        help="a language model on code: code-small, code-small-coap, .. (an unknown name lists all); without: digits",
    )  # fmt: skip
    train.add_argument("--corpus", help="of a language model: stdlib, packages or a folder (default: its own)")
    train.add_argument("--data", choices=("digits",), default="digits")
    train.add_argument("--size", type=int, choices=(8, 28), default=28, help="pixels per side (default: 28)")
    train.add_argument("--model", choices=("tt", "dense"), default="tt", help="hidden layers (default: tt)")
    train.add_argument("--hidden", type=int, nargs="+", default=[512, 512], metavar="WIDTH", help="default: 512 512")
    train.add_argument("--rank", type=int, default=8, help="tensor-train rank (default: 8)")
    train.add_argument("--order", type=int, default=3, help="modes per side of a tensor train (default: 3)")
    train.add_argument("--steps", type=int, help="default: 300, or the configuration's own")
    train.add_argument("--seconds", type=float, help="stop after this much training time")
    train.add_argument("--batch-size", type=int, help="of all processes together (default: 64)")
    train.add_argument("--learning-rate", type=float, help="default: 0.001")
    train.add_argument(
        "--optimizer",
        help="adamw, adafactor, sgd, momentum, adamw-8bit, coap, coap-8bit, coap-adafactor, galore, flora "
        "(default: adamw)",
    )
    train.add_argument("--rank-ratio", type=float, default=4.0, help="of coap, galore and flora (default: 4)")
    train.add_argument("--seed", type=int, help="default: 0")
    train.add_argument("--device", help="cpu or cuda (default: the GPU if there is one)")
    train.add_argument("--threads", type=int, default=1, help="CPU threads; small models are fastest with 1")
    train.add_argument("--out", type=Path, help="append rows to this JSON-lines file, checkpoint beside it (.pt)")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint beside --out")
    train.add_argument("--parallel", choices=("ddp", "fsdp"), help="under torchrun: copy the model, or split it")
    train.add_argument("--accumulate", type=int, default=1, help="cut a process's share of a batch into so many parts")
    train.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent process counts as lost")
    train.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.experiments.distributed import ProcessLost, World, torchrun_world
    from comera_lab.runtime import limit_threads, pick_device, tune_cpu_allocator

    started = int(os.environ.get("WORLD_SIZE", "1"))
    if options.parallel is None and started > 1:
        raise ValueError(f"torchrun started {started} processes, got no --parallel. Add --parallel ddp or fsdp.")
    if options.config is not None and options.parallel is None:
        if options.accumulate > 1:
            raise ValueError("a language model takes --accumulate with --parallel alone. Add --parallel, or drop it.")
        return run_language(options, _checkpoint_path(options))
    limit_threads(options.threads)
    tune_cpu_allocator()
    alone = contextlib.nullcontext(World(device=pick_device(options.device)))
    group = alone if options.parallel is None else torchrun_world(options.timeout, options.device)
    try:
        with group as world:
            return _in_world(options, world)
    except ProcessLost as error:
        return complain(error, 1)


def _in_world(options: argparse.Namespace, world: World) -> int:
    """The run in this process. What all processes meet alike, the first one alone says."""
    try:
        return _train(options, world)
    except (ValueError, FileNotFoundError, ImportError, ArithmeticError):
        if world.first:
            raise
        return 2


@dataclass(frozen=True)
class _Task:
    """What there is to train, before it is split over processes."""

    model: nn.Module
    data: Any
    config: TrainConfig
    optimizer: _MakeOptimizer
    trainer_type: type[ParallelTrainer]
    words: str
    recorded: dict[str, Any]


def _train(options: argparse.Namespace, world: World) -> int:
    from comera_lab.experiments.parallel import Parallel, split_model
    from comera_lab.experiments.recorder import Recorder
    from comera_lab.experiments.signals import held_signals
    from comera_lab.experiments.train import CheckpointError, TrainingError, TrainingInterrupted, fit

    checkpoint = _checkpoint_path(options)
    task = (_digits if options.config is None else _code)(options, world, checkpoint)
    if world.first:
        share = f"{world.size} processes, {options.parallel}; " if options.parallel else ""
        print(f"{task.data.name}: {len(task.data.train_y):,} to train, {len(task.data.test_y):,} to test; {share}"
              f"on {world.device}")  # fmt: skip
        print(task.words)
    else:
        warnings.simplefilter("ignore")  # the first process says it
    trainers: list[ParallelTrainer] = []
    # alone, Ctrl-C stays what `fit` makes of it
    signals = (signal.SIGTERM,) if world.size == 1 else (signal.SIGTERM, signal.SIGINT)
    with held_signals(*signals) as came, contextlib.ExitStack() as stack:
        parallel = Parallel(world, options.parallel, options.accumulate, lambda: came() is not None)
        model = split_model(task.model, parallel)

        def trainer_type(*arguments: Any, **settings: Any) -> ParallelTrainer:
            trainers.append(task.trainer_type(*arguments, parallel=parallel, **settings))
            return trainers[0]

        def should_stop() -> bool:
            return trainers[0].stop_agreed if world.size > 1 else came() is not None

        recorder = None
        if world.first:
            recorded = task.recorded | {"processes": world.size, "parallel": options.parallel}
            recorder = stack.enter_context(Recorder(options.out, recorded, device=world.device))
        on_row: Callable[[Any], None] | None = _print_evaluation if world.first else None
        if world.first and options.config is not None:
            tokens = task.data.train_x.shape[1]
            on_row = stack.enter_context(progress_bar(task.config, tokens, _print_evaluation))
        try:
            result = fit(
                model,
                task.data,
                task.config,
                recorder=recorder,
                on_row=on_row,
                should_stop=should_stop,
                checkpoint=checkpoint,
                resume=options.resume,
                optimizer=task.optimizer(model),
                trainer_type=trainer_type,
            )
        except (CheckpointError, TrainingError) as error:
            return complain(error, 1) if world.first else 1
        except TrainingInterrupted as stop:
            return complain(stop, 130)
    if world.first:
        print(f"{result.stopped} after {result.steps} steps, {result.elapsed_s:.2f} s of training (measured here)")
    if result.stopped != "stopped":
        return 0
    name = came()
    if world.first:
        kept = (
            "there is no checkpoint: no --out" if checkpoint is None else f"go on with --resume; kept in {checkpoint}"
        )
        complain(RuntimeError(f"asked to stop ({name.name if name else 'another process'}); {kept}"), 0)
    return 128 + (name or signal.SIGTERM)


def _digits(options: argparse.Namespace, world: World, checkpoint: Path | None) -> _Task:
    import torch

    from comera_lab.experiments.datasets import digits
    from comera_lab.experiments.parallel import ParallelTrainer
    from comera_lab.experiments.train import TrainConfig
    from comera_lab.memory import StateSettings, format_bytes, predict
    from comera_lab.models.mlp import MLP

    kind = options.model
    given = {name: getattr(options, name) for name in OVERRIDES if getattr(options, name) is not None}
    if (options.optimizer or "").startswith(PROJECTED):
        given["optimizer_settings"] = {"rank_ratio": options.rank_ratio}
    config = TrainConfig(**given, checkpoint_every=0 if checkpoint is None else 50)
    data = digits(options.size)
    features = (data.features, *options.hidden, data.classes)
    generator = torch.Generator().manual_seed(config.seed)
    model = MLP(features, kind, options.rank, options.order, generator=generator).to(world.device)
    settings = StateSettings(rank_ratio=options.rank_ratio)
    pools = predict(model, (config.batch_size, data.features), config.optimizer, settings=settings)
    words = f"{model.extra_repr()}; a step keeps {format_bytes(pools.total)} (predicted)"
    recorded = asdict(config) | {"data": data.name, "model": kind, "features": list(features)}
    recorded |= {"rank": options.rank, "order": options.order} if kind == "tt" else {}
    return _Task(model, data, config, lambda _: None, ParallelTrainer, words, recorded)


def _code(options: argparse.Namespace, world: World, checkpoint: Path | None) -> _Task:
    import torch

    from comera_lab.experiments.language_model import language_optimizer, prepare
    from comera_lab.experiments.parallel import ParallelLanguageTrainer

    language = chosen_config(options)
    if language.ranks is not None or language.masked:
        raise ValueError(f"several processes train decoders of fixed ranks, got {options.config!r}. Use code-small.")
    config = replace(language.training, checkpoint_every=0 if checkpoint is None else 50)
    if not world.first:
        world.total([0.0])  # wait until the first process has filled the cache
    _, data = prepare(language)
    if world.first:
        world.total([0.0])
    model = language.model.build(torch.Generator().manual_seed(config.seed)).to(world.device)
    count = sum(p.numel() for p in model.parameters())
    words = f"{options.config}: {count:,} parameters, texts of {language.tokens} tokens"
    recorded = asdict(config) | {"data": data.name, "model_name": options.config, "tokens": language.tokens}
    return _Task(
        model, data, config, lambda built: language_optimizer(built, config), ParallelLanguageTrainer, words, recorded
    )


def _checkpoint_path(options: argparse.Namespace) -> Path | None:
    """The checkpoint beside `--out`, whose folder is made; refused where `--resume` finds none."""
    if options.out is None:
        if options.resume:
            raise ValueError("--resume needs --out, got none. Give the file of the run to go on with.")
        return None
    checkpoint: Path = options.out.with_suffix(".pt")
    if options.resume and not checkpoint.is_file():
        raise FileNotFoundError(f"--resume found no checkpoint {checkpoint}. Start without --resume.")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    return checkpoint


def _print_evaluation(row: object) -> None:
    from comera_lab.experiments.recorder import EvalRow

    if isinstance(row, EvalRow):
        print(
            f"step {row.step:>5}: test loss {row.loss_nats:.4f} nats, accuracy {row.accuracy:.1%}, "
            f"{row.elapsed_s:.2f} s (measured here)",
            flush=True,
        )
