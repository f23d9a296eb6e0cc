"""One file per checkpoint, written so that a kill or a full disk leaves the old file as it was."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The file that was there before is unchanged."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) to `path`: to a new file beside it, fsync, then rename.

    Raises CheckpointError, naming the path, where that fails; the unfinished file is removed.
    """
    unfinished: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            unfinished = Path(file.name)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch's zip writer turns a failed write into a RuntimeError of its own
        raise CheckpointError(
            f"could not write the checkpoint {path}: {_reason(error)}. Give a file in a folder that exists, "
            "that you may write to and that has room; an older checkpoint there is unchanged."
        ) from error
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Raise CheckpointError if no file can be made beside `path`: better now than after the first interval."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {path}: {_reason(error)}. "
            "Give a file in a folder that exists and that you may write to."
        ) from error


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """The state that `write_checkpoint` wrote, tensors on `device`, read without running code from the file.

    Raises CheckpointError where the file is missing, cut short, damaged or not a checkpoint.
    """
    try:
        damaged = _damaged_part(path)
        if damaged is not None:
            raise ValueError(f"its part {damaged!r} is damaged, the sum of its bytes is another one")
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError, *_ZIP_ERRORS) as error:
        raise CheckpointError(
            f"could not read the checkpoint {path}: {_reason(error)}. Start without resume, or give another file."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} must hold a checkpoint, got a {type(state).__name__}. Give another file.")
    return state


_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error)  # NotImplementedError is a RuntimeError


def _damaged_part(path: Path) -> str | None:
    """The first part of the archive whose checksum does not fit; torch.load would take its numbers as they are."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable. Windows cannot open a folder and does not need it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
