"""`comera-lab lab`: the lessons in JupyterLab, on this machine only."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FIRST_LESSON = "00_start_here.ipynb"


def add(commands: Any) -> None:
    lab = commands.add_parser("lab", help="open the lessons in JupyterLab, on this machine only")
    lab.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    lab.add_argument("--port", type=int, help="port to listen on (default: 8888 or the next free one)")
    lab.add_argument("--allow-root", action="store_true", help="let root start it, as in some containers")
    lab.add_argument("--copy", type=Path, metavar="FOLDER", help="copy the lessons there first, to work on them")
    lab.set_defaults(run=run)


def lessons_folder() -> Path:
    """The folder of the first lesson: beside the package's source tree, else here. FileNotFoundError if neither."""
    candidates = (Path(__file__).resolve().parents[2] / "notebooks", Path.cwd() / "notebooks", Path.cwd())
    for folder in candidates:
        if (folder / FIRST_LESSON).is_file():
            return folder
    looked = ", ".join(str(folder) for folder in candidates)
    remedy = (
        "Run: comera-lab lab --copy lessons, which copies them there from the installed package."
        if (_packed_lessons() / FIRST_LESSON).is_file()
        else "Run this inside a checkout of comera_lab."
    )
    raise FileNotFoundError(f"{FIRST_LESSON} was not found in {looked}. {remedy}")


def copy_lessons(target: Path) -> Path:
    """Copy both editions and their pictures into the new folder `target`, which is returned.

    ValueError, with nothing copied, where something is there already: it may be a learner's work.
    """
    if target.exists():
        raise ValueError(f"--copy needs a new folder, got {target}, which exists. Open it with: cd {target}; "
                         "comera-lab lab. Or give another name.")  # fmt: skip
    packed = _packed_lessons()
    found = packed if (packed / FIRST_LESSON).is_file() else lessons_folder()
    shutil.copytree(found, target, ignore=shutil.ignore_patterns("source", "*.py", ".*"))
    return target.resolve()


def _packed_lessons() -> Path:
    return Path(__file__).resolve().parents[1] / "notebooks"


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


def run(options: argparse.Namespace) -> int:
    from comera_lab.runtime import cores_allowed, require

    if options.port is not None and not 1 <= options.port <= 65535:
        raise ValueError(f"--port must lie in 1 .. 65535, got {options.port}. Leave it out to take a free one.")
    require("jupyterlab", "the lessons")
    folder = lessons_folder() if options.copy is None else copy_lessons(options.copy)
    command = lab_command(
        folder, browser=not options.no_browser, port=options.port, allow_root=options.allow_root
    )
    # Kernels inherit it: in a container their libraries would count the cores of the whole host.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_allowed()))
    if os.name == "posix":  # JupyterLab takes this process over, and with it Ctrl-C
        sys.stdout.flush()
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode
