"""`comera-lab train`: a small model on real digits, recorded."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comera_lab.commands.messages import complain

PROJECTED = ("coap", "galore", "flora")


def add(commands: Any) -> None:
    train = commands.add_parser("train", help="train a small model on real digits and record it")
    train.add_argument("--data", choices=("digits",), default="digits")
    train.add_argument("--size", type=int, choices=(8, 28), default=28, help="pixels per side (default: 28)")
    train.add_argument("--model", choices=("tt", "dense"), default="tt", help="hidden layers (default: tt)")
    train.add_argument("--hidden", type=int, nargs="+", default=[512, 512], metavar="WIDTH", help="default: 512 512")
    train.add_argument("--rank", type=int, default=8, help="tensor-train rank (default: 8)")
    train.add_argument("--order", type=int, default=3, help="modes per side of a tensor train (default: 3)")
    train.add_argument("--steps", type=int, default=300, help="default: 300")
    train.add_argument("--seconds", type=float, help="stop after this much training time")
    train.add_argument("--batch-size", type=int, default=64, help="default: 64")
    train.add_argument("--learning-rate", type=float, default=1e-3, help="default: 0.001")
    train.add_argument(
        "--optimizer", default="adamw",
        help="adamw, adafactor, sgd, momentum, adamw-8bit, coap, coap-8bit, coap-adafactor, galore, flora "
        "(default: adamw)",
    )  # fmt: skip
    train.add_argument("--rank-ratio", type=float, default=4.0, help="of coap, galore and flora (default: 4)")
    train.add_argument("--seed", type=int, default=0, help="default: 0")
    train.add_argument("--device", help="cpu or cuda (default: the GPU if there is one)")
    train.add_argument("--threads", type=int, default=1, help="CPU threads; small models are fastest with 1")
    train.add_argument("--out", type=Path, help="append rows to this JSON-lines file, checkpoint beside it (.pt)")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint beside --out")
    train.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from comera_lab.experiments.datasets import digits
    from comera_lab.experiments.recorder import Recorder
    from comera_lab.experiments.train import CheckpointError, TrainConfig, TrainingError, TrainingInterrupted, fit
    from comera_lab.memory import StateSettings, format_bytes, predict
    from comera_lab.models.mlp import MLP
    from comera_lab.runtime import limit_threads, pick_device, tune_cpu_allocator

    checkpoint = _checkpoint_path(options)
    config = TrainConfig(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        optimizer=options.optimizer,
        optimizer_settings={"rank_ratio": options.rank_ratio} if options.optimizer.startswith(PROJECTED) else {},
        seed=options.seed,
        seconds=options.seconds,
        checkpoint_every=0 if checkpoint is None else 50,
    )
    device = pick_device(options.device)
    limit_threads(options.threads)
    tune_cpu_allocator()
    data = digits(options.size)
    features = (data.features, *options.hidden, data.classes)
    generator = torch.Generator().manual_seed(config.seed)
    model = MLP(features, options.model, options.rank, options.order, generator=generator).to(device)
    settings = StateSettings(rank_ratio=options.rank_ratio)
    pools = predict(model, (config.batch_size, data.features), config.optimizer, settings=settings)
    print(f"{data.name}: {len(data.train_y):,} to train, {len(data.test_y):,} to test; on {device}")
    print(f"{model.extra_repr()}; a step keeps {format_bytes(pools.total)} (predicted)")

    recorded = asdict(config) | {"data": data.name, "model": options.model, "features": list(features)}
    recorded |= {"rank": options.rank, "order": options.order} if options.model == "tt" else {}
    try:
        with Recorder(options.out, recorded, device=device) as recorder:
            result = fit(
                model,
                data,
                config,
                recorder=recorder,
                on_row=_print_evaluation,
                checkpoint=checkpoint,
                resume=options.resume,
            )
    except (CheckpointError, TrainingError) as error:
        return complain(error, 1)
    except TrainingInterrupted as stop:
        return complain(stop, 130)
    print(f"{result.stopped} after {result.steps} steps, {result.elapsed_s:.2f} s of training (measured here)")
    return 0


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
