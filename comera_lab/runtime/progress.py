"""A learner's work in one local file: verdicts, answers and registered results, kept when a kernel is lost.

The file is ~/comera_lab_progress.json, or what COMERA_LAB_PROGRESS names; "off" keeps nothing. It never leaves the
machine. Nothing here raises for a disk, a folder or a file that is not as it should be: a lesson goes on, and gets
one line to show instead.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from comera_lab.runtime.files import write_whole

SCHEMA = 1
VERDICTS, POINTS, ANSWERS = "verdicts", "registered", "answers"  # the sections of the file
LOCK_WAIT_S = 2.0
_listeners: list[Callable[[], None]] = []
_in_process = threading.RLock()


def progress_path() -> Path | None:
    """Where the work of this learner is kept; None where COMERA_LAB_PROGRESS is "off"."""
    named = os.environ.get("COMERA_LAB_PROGRESS", "")
    if named == "off":
        return None
    return Path(named).expanduser() if named else Path.home() / "comera_lab_progress.json"


def read_progress() -> tuple[dict[str, Any], str]:
    """(what was saved, what is wrong with the file in one line or ""); never raises."""
    path = progress_path()
    if path is None:
        return {}, ""
    try:
        return _parse(path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"Saved work could not be read from {path}: {error.strerror}."
    except ValueError as error:
        return {}, f"{path} is not a file of saved work ({error}). It is kept under another name at the next save."


def text() -> str:
    """The file as it is, "" where there is none or it cannot be read; never raises."""
    path = progress_path()
    try:
        return "" if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def saved(section: str) -> dict[str, Any]:
    """The entries of one section, "verdicts" say, by their key."""
    found = read_progress()[0].get(section)
    return found if isinstance(found, dict) else {}


def remember(section: str, entries: dict[str, Any]) -> str:
    """Save JSON values under their keys, beside what other notebooks saved; "" or one line on why not. Never raises.

    The file is read, changed and renamed into place under a lock: a kill leaves the old file or the new one.
    """
    path = progress_path()
    if path is None:
        return ""
    try:
        with _in_process, _locked(path):
            note = _set_aside(path)
            whole = read_progress()[0]
            whole.update(schema=SCHEMA, saved=datetime.now(UTC).isoformat(timespec="seconds"))
            old = whole.get(section)
            whole[section] = {**(old if isinstance(old, dict) else {}), **entries}
            write_whole(path, json.dumps(whole, indent=1, allow_nan=False))
    except OSError as error:
        return (
            f"Your work is not saved: {path}: {error.strerror or error}. "
            "The lesson goes on; set COMERA_LAB_PROGRESS to a file that can be written."
        )
    except (TypeError, ValueError) as error:
        return f"Your work is not saved: {error}."
    for listener in tuple(_listeners):
        listener()
    return note


def on_saved(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` after every save; returns a function that ends this."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener) if listener in _listeners else None


def _parse(text: str) -> dict[str, Any]:
    whole = json.loads(text)
    if not isinstance(whole, dict) or whole.get("schema") != SCHEMA:
        raise ValueError(f"its schema must be {SCHEMA}")
    return whole


def _set_aside(path: Path) -> str:
    """Rename a file that cannot be read as saved work, so that the next save does not overwrite it."""
    try:
        _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except ValueError:
        number = 1
        while (kept := path.with_name(f"{path.name}.broken-{number}")).exists():
            number += 1
        path.replace(kept)
        return f"{path} was damaged: it is kept as {kept.name}, and saving began anew."
    return ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, also among notebooks. Where there are no locks, the rename alone has to do."""
    try:
        fcntl: Any = import_module("fcntl")
    except ImportError:
        yield
        return
    with path.with_name(f".{path.name}.lock").open("a") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(None, "another notebook holds the file") from None
                time.sleep(0.01)
        yield
