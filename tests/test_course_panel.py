"""The panel of notebook T0: what its controls do, what Build writes, and its twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from comera_lab.panels.board import minutes_bars
from comera_lab.panels.course import OWN
from comera_lab.panels.live import figure_mode
from comera_lab.teaching.course import make_course
from comera_lab.teaching.course_panel import CoursePanel, course_text
from comera_lab.teaching.lessons import lessons
from comera_lab.teaching.routes import ROUTES
from comera_lab.teaching.teachers import teachers_question

LESSONS = lessons(Path(__file__).resolve().parents[1])


@pytest.fixture
def panel(tmp_path: Path) -> CoursePanel:
    return CoursePanel(tmp_path)


def test_a_route_ticks_its_lessons_and_another_choice_is_ones_own(panel: CoursePanel) -> None:
    assert figure_mode()[0] in ("live", "plain")
    for route in ROUTES.values():
        panel.route.value = route.title
        assert panel.lessons.value == tuple(sorted(set(route.numbers)))
        assert [number for number, box in panel.lessons.boxes.items() if box.value] == list(panel.lessons.value)
    panel.lessons.boxes["02"].value = False
    assert panel.route.value == OWN and "02" not in panel.lessons.value
    panel.lessons.value = ROUTES["half-day"].numbers
    assert panel.route.value == ROUTES["half-day"].title


def test_the_schedule_follows_every_control(panel: CoursePanel) -> None:
    panel.lessons.value = ("00", "01", "03")
    panel.session_minutes.value = 60
    assert panel.line.value.count("3 lessons, 115 minutes, 2 sessions.") == 1
    bars = panel.bars.figure.data[0]
    assert (list(bars.x), list(bars.base)) == ([15, 40, 60], [0, 15, 0])
    panel.session_minutes.value = 30
    assert "One session takes 60 minutes: a lesson is not cut in two." in panel.line.value
    assert "session 3, 60 minutes" in panel.table() and len(panel.static().data[0].x) == 3


def test_the_last_lesson_cannot_be_taken_away(panel: CoursePanel) -> None:
    panel.lessons.value = ("02",)
    panel.lessons.boxes["02"].value = False
    assert panel.lessons.value == ("02",) and panel.lessons.boxes["02"].value
    assert "lessons must be at least one of 00, " in panel.lessons.message.value
    with pytest.raises(ValueError, match="must be at least one of 00, .*got 99. Tick one"):
        panel.lessons.value = ("99",)


def test_build_writes_the_course_once_and_says_why_not_twice(panel: CoursePanel, tmp_path: Path) -> None:
    panel.title.value = "Two lessons"
    panel.lessons.value = ("00", "02")
    panel.students.value = 2
    panel.build_button.click()
    assert panel.card.text == "" and "two-lessons-students.zip" in panel.built.value
    assert (tmp_path / "two-lessons" / "students" / "s02.zip").is_file()
    panel.build_button.click()
    assert "must be new or empty" in panel.card.text
    panel.title.value = ""
    panel.build_button.click()
    assert "title must be a line of text" in panel.card.text


def test_the_file_it_shows_is_the_course_it_builds(panel: CoursePanel) -> None:
    panel.title.value = 'A "quoted" title: with \\ signs'
    panel.lessons.value = ("00", "08")
    given = yaml.safe_load(course_text(panel.given))
    assert given == panel.given
    assert make_course(given, LESSONS) == make_course(panel.given, LESSONS)


def test_the_end_of_a_session_is_drawn() -> None:
    figure = minutes_bars([("00 Start here", 0, 15), ("01 Memory", 15, 40)], 90)
    assert figure.layout.shapes[0].x0 == 90 and figure.layout.annotations[0].text == "end of session"


def test_the_guess_is_counted_from_the_exercises() -> None:
    index, words = teachers_question().answer()
    assert teachers_question().choices[index] == "about 4" and "counted just now" in words
