"""What happened, as typed rows in a JSON-lines file: one line per row, the first one says who ran what, where.

A row is a frozen dataclass whose field names end in their unit. Every row is flushed to the operating system
when it is added, so a killed process loses nothing but a line it was just writing. A number that JSON cannot
hold is written as null and named in the line's `nonfinite` field; `read_rows` puts it back.

Two failures, two answers. A file that cannot be opened or take its first line is an error at once: nothing
has been computed yet. A disk that fills up in the middle of a run must not cost the run: the recorder warns
once, keeps the reason in `problem` and goes on in memory; `rows` always holds everything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

import torch

from comera_lab.experiments.provenance import commit, date, device_name, driver, launch_command, triton_version
from comera_lab.experiments.result_rows import LanguageResultRow, RankResultRow
from comera_lab.experiments.rows import (
    BenchRow,
    DiffusionResultRow,
    DiffusionRow,
    EvalRow,
    OptimizerResultRow,
    RankRow,
    RecommenderRow,
    ResultRow,
    ResumeRow,
    Row,
    RunInfo,
    StepRow,
    as_dict,
    checked_row,
    to_line,
)

__all__ = [
    "BenchRow",
    "DiffusionResultRow",
    "DiffusionRow",
    "EvalRow",
    "LanguageResultRow",
    "OptimizerResultRow",
    "RankResultRow",
    "RankRow",
    "RecommenderRow",
    "Recorder",
    "RecorderWarning",
    "ResultRow",
    "ResumeRow",
    "Row",
    "RunInfo",
    "StepRow",
    "as_dict",
    "read_rows",
    "split_runs",
    "write_rows",
]


class RecorderWarning(UserWarning):
    """Rows are no longer written to the file, or a file ends in half a line."""


class Recorder:
    """Appends rows to `path`, or keeps them in memory alone where `path` is None.

    `config` (dataclass or mapping of plain values) goes into the first row; its "seed" entry is the run's
    seed unless `seed` is given. An existing file is continued with a new first row, and half a last line
    that a kill left there is cut off. Raises OSError, naming the path, where the file cannot be written, or while
    another process writes to it.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: object = None,
        *,
        seed: int | None = None,
        command: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        values = _plain_config(config)
        info = RunInfo(
            device=device_name(device),
            driver=driver(device),
            threads=torch.get_num_threads(),
            torch=str(torch.__version__),
            triton=triton_version(),
            commit=commit(),
            command=launch_command() if command is None else command,
            seed=values.get("seed") if seed is None else seed,
            config=values,
            date=date(),
        )
        self.path = None if path is None else Path(path)
        self.rows: list[Row] = []
        self.problem: str | None = None
        self._file: IO[str] | None = None
        line = to_line(info)
        if self.path is not None:
            try:
                self._file = self.path.open("a", encoding="utf-8")
                _claim(self, self._file)
                _mend_last_line(self.path)
                self._write(line)
            except BlockingIOError as error:
                self.close()
                raise OSError(
                    error.errno, f"cannot record to {self.path}: another process records to it. Give a file of its own"
                ) from error
            except OSError as error:
                self.close()
                raise OSError(
                    error.errno,
                    f"cannot record to {self.path}: {error.strerror}. "
                    "Give a file in a folder that exists, that you may write to and that has room",
                ) from error
        self.rows.append(info)

    @property
    def info(self) -> RunInfo:
        """The first row."""
        first = self.rows[0]
        assert isinstance(first, RunInfo)
        return first

    def add(self, row: Row) -> None:
        """Keep `row` and append it to the file. Raises ValueError for a row whose fields have wrong types."""
        line = to_line(row)
        self.rows.append(row)
        if self._file is None:
            return
        try:
            self._write(line)
        except OSError as error:
            self.problem = (
                f"{self.path} takes no more rows: {error.strerror}. The run goes on and its rows stay in "
                "memory. Free some space, then save them with write_rows(path, recorder.rows)"
            )
            self.close()
            warnings.warn(self.problem, RecorderWarning, stacklevel=2)

    def close(self) -> None:
        """Close the file. Rows added later are kept in memory."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                # closing flushes once more what the failed write left; that failure has been reported
                if self.problem is None and self.rows:
                    raise

    def _write(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_rows(path: str | Path, rows: list[Row]) -> None:
    """Write `rows` to a new file at `path`."""
    with Path(path).open("x", encoding="utf-8") as file:
        file.writelines(to_line(row) for row in rows)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file as dicts with `kind` and the fields of the dataclass of that kind, all checked.

    A last line that was cut off by a kill is left out with a RecorderWarning. Where a run was resumed from
    a checkpoint, the step and eval rows that it redid are left out. Raises ValueError, naming file and line,
    for anything else that is not a row of this version.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            values = json.loads(line.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                warnings.warn(
                    f"{path} ends in half a line ({len(line)} characters): the writing process was stopped. "
                    f"The {len(rows)} rows before it are complete.",
                    RecorderWarning,
                    stacklevel=2,
                )
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error}. Restore the file.") from error
        rows.append(checked_row(values, f"{path}, line {number}"))
    if rows and rows[0]["kind"] != "run":
        raise ValueError(f"{path} must start with a run row, got {rows[0]['kind']!r}. Restore its first line.")
    return _without_void_rows(rows)


def split_runs(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each run of a file, every list starting with its run row."""
    runs: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["kind"] == "run":
            runs.append([])
        runs[-1].append(row)
    return runs


def _without_void_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == "resume":
            starts = [i for i, earlier in enumerate(kept) if earlier["kind"] == "run"]
            # the run that was resumed stands before the one that this row belongs to
            first, last = (starts[-2], starts[-1]) if len(starts) > 1 else (0, 0)
            again = [
                i
                for i in range(first, last)
                if kept[i]["kind"] in ("step", "eval", "rank") and kept[i]["step"] > row["step"]
            ]
            for i in reversed(again):
                del kept[i]
        kept.append(row)
    return kept


def _plain_config(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if isinstance(config, Mapping):
        return dict(config)
    raise ValueError(f"config must be a dataclass or a mapping, got {type(config).__name__}. Give a TrainConfig.")


# Files that this process records to, by device and inode.
_ours: weakref.WeakValueDictionary[tuple[int, int], Recorder] = weakref.WeakValueDictionary()


def _claim(recorder: Recorder, file: IO[str]) -> None:
    """Take the file until it is closed or this process dies: rows of two runs at once could not be told apart.

    BlockingIOError where another process has it. A second recorder in the same process is the first one's successor: a
    cell that was run again. Where there are no locks (Windows, some network drives), two runs can still share a file.
    """
    try:
        fcntl: Any = import_module("fcntl")
    except ImportError:
        return
    status = os.fstat(file.fileno())
    key = (status.st_dev, status.st_ino)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if key not in _ours:
            raise
    except OSError:
        return
    _ours[key] = recorder


def _mend_last_line(path: Path) -> None:
    """Make an existing file end in a newline: cut off half a line, or close a whole one."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    text = path.read_bytes()
    tail = text.rpartition(b"\n")[2]
    if not tail:
        return
    try:
        json.loads(tail)
    except ValueError:
        with path.open("r+b") as file:
            file.truncate(len(text) - len(tail))
    else:
        with path.open("ab") as file:
            file.write(b"\n")
