"""`comera-lab export`: a lesson as a page that needs no kernel and no network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from comera_lab.commands.messages import complain


def add(commands: Any) -> None:
    export = commands.add_parser("export", help="a lesson as one page that works without kernel and network")
    export.add_argument("lessons", type=Path, nargs="+", metavar="lesson.ipynb")
    export.add_argument("--html", action="store_true", required=True, help="the form of the page; there is one so far")
    export.add_argument("--out", type=Path, help="folder for the pages (default: here)")
    export.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.teaching.static_page import export_page

    folder = options.out or Path()
    folder.mkdir(parents=True, exist_ok=True)
    stems = {lesson.stem for lesson in options.lessons}
    for lesson in options.lessons:
        page = folder / f"{lesson.stem}.html"
        try:
            size = export_page(lesson, page, stems)
        except RuntimeError as error:
            return complain(error, 1)
        print(f"{page}  {size / 1e6:.2f} MB", flush=True)
    return 0
