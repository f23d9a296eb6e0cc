"""`comera-lab notebooks`: student and solution editions from their one source."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    notebooks = commands.add_parser("notebooks", help="student and solution editions from their one source")
    notebooks.add_argument("action", choices=("build", "check", "timing"),
                           help="write them, report what is out of date, or measure how long they compute")  # fmt: skip
    notebooks.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.teaching.build import build_all, check_drift
    from comera_lab.teaching.reference import reference_drift, write_reference

    if options.action == "build":
        changed = build_all() + write_reference()
        print("\n".join(f"wrote {path}" for path in changed) or "all pages were up to date")
        return 0
    if options.action == "timing":
        from comera_lab.teaching.timing import measure

        print(f"wrote {measure()}")
        return 0
    problems = check_drift() + reference_drift()
    print("\n".join(problems) or "all pages agree with their sources")
    return 1 if problems else 0
