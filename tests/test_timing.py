"""Run times of lessons: the rows, the page made of them, and one real measurement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from comera_lab.experiments.recorder import read_rows
from comera_lab.teaching.lessons import lessons
from comera_lab.teaching.timing import PAGE, ROWS, run_once, times_drift, times_page

ROOT = Path(__file__).resolve().parents[1]
RECORDED = read_rows(ROOT / "data" / ROWS)
LESSONS = lessons(ROOT)


def test_the_page_is_what_the_rows_give() -> None:
    assert times_drift(ROOT) == []
    page = (ROOT / "notebooks" / PAGE).read_text(encoding="utf-8")
    assert f"torch {RECORDED[0]['torch']}, {RECORDED[0]['date'][:10]}" in page and "one thread on one core" in page


def test_rows_were_measured_with_one_thread_and_say_where() -> None:
    runs = [row for row in RECORDED if row["kind"] == "run"]
    assert {(run["threads"], run["command"]) for run in runs} == {(1, "comera-lab notebooks timing")}
    for row in (row for row in RECORDED if row["kind"] == "bench"):
        assert row["unit"] == ("MiB" if row["op"] == "lesson_peak" else "s") and row["value"] > 0 and row["device"]


def test_every_lesson_fits_a_small_machine() -> None:
    """A minute of processor on one core and 1.2 GiB, as on Binder."""
    values = {(row["provider"], row["op"]): row["value"] for row in RECORDED if row["kind"] == "bench"}
    measured = {provider for provider, _ in values}
    assert len(measured & {lesson.stem for lesson in LESSONS.values()}) >= 13
    assert max(values[stem, "lesson_cpu"] for stem in measured) < 60
    assert max(values[stem, "lesson_peak"] for stem in measured) < 1.2 * 1024
    assert sum(values[stem, "lesson_cpu"] for stem in measured) < 20 * 60


def test_a_lesson_without_a_row_says_so_and_totals_add_up() -> None:
    rows = [row for row in RECORDED if row.get("provider") != "02_low_rank"]
    page = times_page(rows, LESSONS)
    assert "| 02 Low rank: the SVD as a knife | 40 min | not measured | not measured | not measured |" in page
    last = re.search(r"\| all \| (\d+) min \| (\d+) s", page)
    assert last is not None and int(last[1]) == sum(lesson.minutes for lesson in LESSONS.values())
    assert int(last[2]) == round(sum(row["value"] for row in rows if row.get("op") == "lesson_cpu"))


@pytest.mark.slow
def test_a_run_is_measured() -> None:
    cpu, clock, peak = run_once(LESSONS["00"])
    assert 1 < cpu < 60 and clock > 1 and peak is not None and 200 < peak < 1024
