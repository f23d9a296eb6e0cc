"""`comera-lab bench`: the measurements of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure tensor-train layers against dense ones here")
    bench.add_argument("--suite", choices=("cpu", "gpu", "kernels-static"), default="cpu")
    bench.add_argument("--out", type=Path, help="append the measurements to this JSON-lines file")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.experiments.bench import run_suite
    from comera_lab.experiments.kernel_report import run_static

    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.suite == "kernels-static":
        run_static(options.out)
    else:
        run_suite(options.suite, options.out)
    return 0
