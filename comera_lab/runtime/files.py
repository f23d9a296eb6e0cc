"""Write a text file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write to a new file beside `path`, fsync, then rename: a kill or a full disk leaves the old file as it was."""
    unfinished: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            unfinished = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        unfinished = None
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
