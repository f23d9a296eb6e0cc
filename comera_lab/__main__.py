"""`comera-lab`: the kit from a terminal. The subcommands are the modules of `comera_lab.commands`.

Exit codes: 0 good, 1 a check or a run failed, 2 the request was wrong. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from comera_lab.commands import bench, course, data, doctor, export, lab, notebooks, plan, train
from comera_lab.commands.messages import PROGRAM, complain

COMMANDS = (doctor, lab, train, bench, data, notebooks, course, export, plan)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See: {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand with `arguments` (default: those of the command line) and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ValueError, FileNotFoundError) as error:
        return complain(error, 2)
    except (ImportError, OSError, ArithmeticError) as error:
        return complain(error, 1)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Notebooks and a small library for memory-efficient training.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
