"""`comera-lab notebooks`: student and solution editions from their one source."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    notebooks = commands.add_parser("notebooks", help="student and solution editions from their one source")
    notebooks.add_argument("action", choices=("build", "check", "timing", "pictures"),
                           help="write them, report drift, measure how long they compute, draw panels")  # fmt: skip
    notebooks.add_argument("lessons", nargs="*", help="for timing: the two digits of those to measure (default: all)")
    notebooks.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.teaching.build import build_all, check_drift
    from comera_lab.teaching.reference import reference_drift, write_reference
    from comera_lab.teaching.timing import measure, times_drift, write_times

    if options.action == "build":
        changed = build_all() + write_reference() + write_times()
        print("\n".join(f"wrote {path}" for path in changed) or "all pages were up to date")
        return 0
    if options.action == "timing":
        print(f"wrote {measure(options.lessons)}")
        return 0
    if options.action == "pictures":
        from comera_lab.teaching.build import notebooks_folder
        from comera_lab.teaching.twins import draw_pictures

        print("\n".join(f"drew {path}" for path in draw_pictures(notebooks_folder())))
        return 0
    problems = check_drift() + reference_drift() + times_drift()
    print("\n".join(problems) or "all pages agree with their sources")
    return 1 if problems else 0
