"""`comera-lab doctor`: what this machine can do for the kit."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="what this machine can do for the kit")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.runtime import doctor

    report = doctor()
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.text())
    return 0 if report.ok else 1
