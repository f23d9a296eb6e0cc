"""Saved work: answers and points come back after a lost kernel, and no disk, folder or file can hurt a lesson."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import comera_lab.panels as lab
from comera_lab.panels.budget import BudgetPanel
from comera_lab.panels.state import LabState
from comera_lab.runtime import progress as store
from comera_lab.teaching import check, checks, progress, saved_work
from comera_lab.teaching.exercises import EXERCISES


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of saved work of its own, and a kernel that has answered nothing."""
    monkeypatch.setattr(checks, "_VERDICTS", {})
    monkeypatch.setattr(checks, "_told", [])
    path = tmp_path / "work.json"
    monkeypatch.setenv("COMERA_LAB_PROGRESS", str(path))
    return path


def lose_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_VERDICTS", {})


def price(pools, steps, step_time_ms):
    return sum(pools.values()) / 2**20, steps * step_time_ms / 1000


def test_the_file_is_in_the_home_folder_unless_named_and_off_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMERA_LAB_PROGRESS")
    assert store.progress_path() == tmp_path / "comera_lab_progress.json"
    monkeypatch.setenv("COMERA_LAB_PROGRESS", "~/mine.json")
    assert store.progress_path() == tmp_path / "mine.json"
    monkeypatch.setenv("COMERA_LAB_PROGRESS", "off")
    assert (
        store.progress_path() is None and store.remember("verdicts", {"a": 1}) == "" and store.saved("verdicts") == {}
    )
    assert list(tmp_path.iterdir()) == []


def test_a_right_answer_comes_back_after_a_lost_kernel_with_its_text(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check("16.1", price).passed
    assert not check("00.2", 7.5).passed
    lose_the_kernel(monkeypatch)
    rows = {key: word for key, _, word in progress("16").rows}
    assert rows["16.1"] == "Right" and rows["16.2"] == "Not tried"
    assert {word for key, _, word in progress("00").rows if key == "00.2"} == {"Not yet"}
    kept = json.loads(file.read_text())["verdicts"]
    assert "sum(pools.values())" in kept["16.1"]["answer"] and kept["00.2"]["answer"] == "7.5"


def test_a_right_answer_stays_right_and_an_empty_one_is_not_saved(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("16.2", None)
    assert not file.exists()
    check("16.1", price)
    before = file.read_text()
    for later in (None, lambda pools, steps, ms: (1.0, 2.0)):
        assert not check("16.1", later).passed
        assert file.read_text() == before
    lose_the_kernel(monkeypatch)
    assert progress("16").right == 1


class Hostile:
    def __repr__(self) -> str:
        raise SystemExit

    __str__ = __repr__


def test_any_answer_can_be_saved(file: Path) -> None:
    for answer in (Hostile(), Hostile, float("nan"), "x" * 10_000, [Hostile()], len, EXERCISES["10.1"].reference):
        check("10.1", answer)
    assert json.loads(file.read_text())["verdicts"]["10.1"]["passed"]


def test_points_and_answers_come_back_in_a_new_kernel(file: Path) -> None:
    first = LabState(budget_steps=10, budget_seconds=60.0, rank=2)
    lab.budget_point(state=first, seeds=1)
    BudgetPanel(first).defence.texts["choice"].area.value = "The only one there is."
    panel = BudgetPanel(LabState())
    assert panel.state.registered == tuple(json.loads(json.dumps(first.registered)))
    assert panel.defence.texts["choice"].value == "The only one there is."
    assert f"1 registered point came back from {file}" in html.unescape(panel.defence.note.value)
    other = LabState(budget_steps=10, budget_seconds=60.0, rank=3)
    lab.budget_point(state=other, seeds=1)
    third = BudgetPanel(LabState())
    assert [entry["name"] for entry in third.state.registered] == ["point 1", "point 2"], "two notebooks, two names"


def test_a_saved_point_that_was_edited_is_left_out(file: Path) -> None:
    lab.budget_point(state=LabState(budget_steps=10, budget_seconds=60.0, rank=2), seeds=1)
    whole = json.loads(file.read_text())
    (entry,) = whole["registered"].values()
    whole["registered"]["other"] = {**entry, "settings": {"model": "forest"}}
    whole["registered"]["none"] = None
    file.write_text(json.dumps(whole))
    assert len(BudgetPanel(LabState()).state.registered) == 1


@pytest.mark.parametrize("content", ["", "{half", "[]", '{"schema": 99}', "\udcff"])
def test_a_damaged_file_is_kept_aside_and_said_once(
    file: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert progress("16").right == 0, "reading it is not an error"
    for _ in range(2):
        check("16.1", price)
    said = capsys.readouterr().out
    assert said.count("was damaged: it is kept as work.json.broken-1") == 1
    assert (file.parent / "work.json.broken-1").read_bytes() == content.encode("utf-8", "surrogateescape")
    assert json.loads(file.read_text())["verdicts"]["16.1"]["passed"]


@pytest.mark.parametrize("where", ["missing/work.json", "file/work.json"])
def test_a_folder_that_cannot_be_written_is_one_line_and_the_lesson_goes_on(
    file: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "file").write_text("")
    monkeypatch.setenv("COMERA_LAB_PROGRESS", str(file.parent / where))
    for _ in range(3):
        assert check("16.1", price).passed
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "Your work is not saved" in said and "The lesson goes on" in said
    assert "saved work" in saved_work().table().lower()
    panel = BudgetPanel(LabState())
    panel.defence.texts["doubt"].area.value = "Typed all the same."
    assert panel.state.answers["doubt"] and "is not saved" in panel.defence.note.value and panel.card.text == ""


@pytest.mark.slow
def test_two_notebooks_saving_at_once_lose_nothing(file: Path) -> None:
    code = """
        import sys
        from comera_lab.runtime import progress
        for number in range(25):
            assert progress.remember("verdicts", {f"{sys.argv[1]}.{number}": {"passed": True}}) == ""
    """
    jobs = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), name]) for name in "ab"]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len(store.saved("verdicts")) == 50
    assert sorted(path.name for path in file.parent.iterdir()) == [".work.json.lock", "work.json"]


def test_a_lock_that_is_never_given_back_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(store, "LOCK_WAIT_S", 0.05)
    with (file.parent / ".work.json.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another notebook holds the file" in store.remember("verdicts", {"a": {}})
    assert store.remember("verdicts", {"a": {}}) == ""


def test_a_disk_error_leaves_the_old_file_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.remember("verdicts", {"a": {"passed": True}})
    before = file.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in store.remember("verdicts", {"b": {}})
    assert file.read_text() == before and not list(file.parent.glob(".work.json.*[!k]"))


def test_values_that_json_cannot_hold_are_one_line(file: Path) -> None:
    assert "is not saved" in store.remember("verdicts", {"a": float("nan")})
    assert "is not saved" in store.remember("verdicts", {"a": object()})
    assert not file.exists()


def test_the_card_follows_every_save_and_its_button_needs_no_server(file: Path) -> None:
    card = saved_work()
    assert "Nothing yet" in card.table()
    check("16.1", price)
    assert "Lesson 16: 1 of 4 right" in card.widget.value and str(file) in card.table()
    assert "sum(pools.values())" in html.unescape(card.widget.value)
    packed = re.search(r'download="work.json" href="data:application/json;base64,([^"]+)"', card.widget.value)
    assert packed and base64.b64decode(packed[1]) == file.read_bytes()
    assert "http:" not in card.widget.value and "https:" not in card.widget.value
    second = saved_work()
    before = card.widget.value
    check("16.3", EXERCISES["16.3"].reference)
    assert card.widget.value == before and "2 of 4 right" in second.widget.value, "one live card"
    assert second._repr_mimebundle_()["text/plain"] == second.table()


def test_the_card_says_when_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "COMERA_LAB_PROGRESS is off" in saved_work().table()
