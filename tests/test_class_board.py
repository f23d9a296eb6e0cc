"""The class board: what a student exports, what is read back, and what the teacher sees."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from comera_lab.panels.board import class_dots
from comera_lab.panels.state import lab_state
from comera_lab.teaching import check, checks
from comera_lab.teaching.board import KIND, ClassBoard, board_notebook, read_result, save_result


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera_lab.panels.state._shared", [])
    monkeypatch.setattr(checks, "_VERDICTS", {})


def _student(folder: Path, number: int, answer: object) -> Path:
    check("00.1", answer)
    lab_state().record("race", {"lanes": [
        {"lane": "dense", "parameters": 1000, "accuracy_percent": 90.0 + number, "loss_nats": float("nan")},
        {"lane": "tt", "parameters": 10, "accuracy_percent": 80.0 + number, "curve": [1, 2]},
    ]})  # fmt: skip
    path = folder / f"{number}.json"
    assert "exercises right" in save_result(path)
    return path


def test_a_result_has_no_name_and_only_plain_numbers(tmp_path: Path) -> None:
    path = _student(tmp_path, 1, 2.0)
    given = json.loads(path.read_text())
    assert (given["kind"], given["schema_version"]) == (KIND, 1) and len(given["who"]) == 6
    assert given["runs"][0] == {"panel": "race", "lane": "dense", "parameters": 1000, "accuracy_percent": 91.0}
    assert given["exercises"]["00.1"]["word"] == "Not yet"


def test_a_second_notebook_adds_to_the_file_and_keeps_its_sign(tmp_path: Path) -> None:
    path = _student(tmp_path, 1, 2.0)
    who = read_result(path)["who"]
    checks._VERDICTS.clear()
    check("00.2", 1.0)
    save_result(path)
    again = read_result(path)
    assert set(again["exercises"]) == {"00.1", "00.2"} and len(again["runs"]) == 2 and again["who"] == who
    save_result(path, who="group 3")
    assert read_result(path)["who"] == "group 3"


def test_the_board_counts_exercises_names_the_commonest_mistake_and_lays_runs_over_each_other(tmp_path: Path) -> None:
    from comera_lab.teaching.exercises import EXERCISES

    right = EXERCISES["00.1"].reference
    for number, answer in enumerate((right, 1 / right, 1 / right), start=1):
        _student(tmp_path, number, answer)
    board = ClassBoard.read(tmp_path)
    assert board.counts() == {"00.1": {"Right": 1, "Not yet": 2, "Not tried": 0}}
    assert "1 right   2 not yet" in board.table() and "often: upside down" in board.table()
    assert [trace.name for trace in board.bars().data] == ["Right", "Not yet", "Not tried"]
    dots = board.dots().data
    assert [(trace.name, len(trace.x)) for trace in dots] == [("dense", 3), ("tt", 3)]
    assert dots[0].marker.symbol != dots[1].marker.symbol
    assert "No run of the class has both seconds" in class_dots({}, "seconds", "loss").layout.annotations[0].text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "bad.json must be JSON, got something else. Export it again"),
        ("[]", "bad.json must be a class result of version 1, got None. Export it again"),
        (json.dumps({"kind": KIND, "schema_version": 2}), "must be a class result of version 1, got 2"),
        (" " * 1_000_001, "bad.json must be smaller than 1,000,000 bytes, got 1,000,001"),
    ],
)
def test_a_file_that_is_no_result_is_refused_and_the_others_are_shown(tmp_path: Path, text: str, problem: str) -> None:
    _student(tmp_path, 1, 2.0)
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_result(bad)
    board = ClassBoard.read(tmp_path)
    assert len(board.results) == 1 and len(board.refused) == 1 and "1 refused" in board.table()
    before = bad.read_text()
    with pytest.raises(ValueError, match=problem):
        save_result(bad)
    assert bad.read_text() == before


def test_what_is_read_is_cut_down_to_what_may_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({
        "kind": KIND, "schema_version": 1, "who": "x" * 900, "exercises": {"99.9": {"word": "Right"}, "00.1": "Right"},
        "runs": ["no dict", {"lane": "y" * 900, "parameters": 3, "deep": {"a": 1}}],
    }))  # fmt: skip
    result = read_result(path)
    assert len(result["who"]) == 60 and result["exercises"] == {}
    assert result["runs"] == [{"lane": "y" * 40, "parameters": 3}]


def test_without_a_folder_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the folder of results must exist, got .* Collect"):
        ClassBoard.read(tmp_path / "results")


def test_the_teachers_notebook_is_valid() -> None:
    nbformat.validate(nbformat.from_dict(board_notebook("Morning")))
