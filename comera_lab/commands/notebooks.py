"""`comera-lab notebooks`: student and solution editions from their one source."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    notebooks = commands.add_parser("notebooks", help="student and solution editions from their one source")
    notebooks.add_argument("action", choices=("build", "check"), help="write them, or report what is out of date")
    notebooks.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.teaching.build import build_all, check_drift

    if options.action == "build":
        changed = build_all()
        print("\n".join(f"wrote {path}" for path in changed) or "all notebooks were up to date")
        return 0
    problems = check_drift()
    print("\n".join(problems) or "all notebooks agree with their sources")
    return 1 if problems else 0
