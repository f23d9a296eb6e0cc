"""A course from one YAML file: what is refused and how, what is built, and that its notebooks do what they say."""

from __future__ import annotations

import json
import zipfile
from datetime import datetime
from pathlib import Path

import pytest

from comera_lab.__main__ import main
from comera_lab.panels.spectrum import SpectrumPanel
from comera_lab.panels.state import LabState, lab_state
from comera_lab.teaching.course import Course, CourseError, make_course, read_course, sliders
from comera_lab.teaching.course_build import build_course
from comera_lab.teaching.course_cell import start_course
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.instructor import instructor_edition, minutes_of
from comera_lab.teaching.lessons import lessons, read_lesson
from comera_lab.teaching.notes import NOTES
from comera_lab.teaching.plan import plan_text, sessions, total_minutes
from comera_lab.teaching.routes import ROUTES, route_text

ROOT = Path(__file__).resolve().parents[1]
LESSONS = lessons(ROOT)
YAML = """\
title: Low rank in a morning
lessons:
  - 00
  - lesson: 02
    presets: {energy_percent: 95}
    locked: [energy_percent]
    deadline: 2027-01-15
    solutions: always
students: 2
seed: 7
session_minutes: 45
"""


def _course(**changes: object) -> Course:
    return make_course({"title": "T", "lessons": ["00", "02"], **changes}, LESSONS)


# the file


def test_a_course_file_is_read_with_lessons_as_yaml_sees_them(tmp_path: Path) -> None:
    file = tmp_path / "course.yml"
    file.write_text(YAML)
    course = read_course(file, ROOT)
    first, second = course.parts
    assert (first.lesson.number, second.lesson.number) == ("00", "02")
    assert dict(second.presets) == {"energy_percent": 95.0} and second.locked == ("energy_percent",)
    assert second.deadline == datetime(2027, 1, 15, 23, 59)
    assert (first.solutions, second.solutions) == ("never", "always")
    assert course.students == ("s01", "s02") and course.slug == "low-rank-in-a-morning"


def test_settings_at_the_top_hold_for_every_lesson_that_has_none_of_its_own() -> None:
    course = _course(
        presets={"rank": 4}, deadline="2027-02-01T18:30", solutions="after-deadline",
        lessons=["08", {"lesson": 9, "presets": {"rank_ratio": 2}, "solutions": "never"}],
    )  # fmt: skip
    assert [part.lesson.number for part in course.parts] == ["08", "09"]
    assert [dict(part.presets) for part in course.parts] == [{"rank": 4}, {"rank": 4, "rank_ratio": 2.0}]
    assert [part.solutions for part in course.parts] == ["after-deadline", "never"]
    assert {part.deadline for part in course.parts} == {datetime(2027, 2, 1, 18, 30)}


def test_a_route_stands_for_its_lessons() -> None:
    course = make_course({"title": "T", "route": "half-day"}, LESSONS)
    assert tuple(part.lesson.number for part in course.parts) == ROUTES["half-day"].numbers


def test_each_student_has_a_seed_of_their_own_that_never_changes() -> None:
    one, two = _course(students=["ada", "bob"]), _course(students=["bob", "ada"])
    assert one.seed_of("ada") == two.seed_of("ada") != one.seed_of("bob")
    assert _course(seed=1).seed_of("ada") != one.seed_of("ada")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"title": ""}, "title must be a line of text, got ''. Write `title:"),
        ({"lessons": []}, r"lessons must be a list of at least one lesson, got '\[\]'"),
        ({"lessons": [99]}, r"lessons\[1\] must be a lesson of the kit, got '99'. Choose from 00, 01"),
        ({"lessons": ["00", "00"]}, "a lesson must be in a course once, got '00 twice'. Remove one"),
        ({"lessons": ["T0"]}, "must be a lesson of the kit, got 'T0'"),
        ({"route": "half-day"}, "must have `lessons` or a `route`, got 'both'. Keep one"),
        ({"colour": 1}, "a key of a course must be a known one, got 'colour'. Keys are title, route"),
        ({"presets": {"rnk": 4}}, "presets must be of the known names, got 'rnk'. Choose from .* rank,"),
        ({"presets": {"rank": 9999}}, "presets: rank must be a whole number from 1 to 512, got 9999. Choose"),
        ({"presets": {"seed": 4}}, "presets must be of the known names, got 'seed'"),
        ({"locked": ["rnk"]}, "locked must be of the known names, got 'rnk'"),
        ({"locked": "rank"}, "locked must be a list, got 'rank'. Write"),
        ({"deadline": "soon"}, "deadline must be a date, got 'soon'. Write 2027-01-15"),
        ({"deadline": "2027-13-01"}, "deadline must be a date, got '2027-13-01'"),
        (
            {"solutions": "later"},
            "solutions must be of the known names, got 'later'. Choose from never, after-deadline",
        ),
        ({"solutions": "after-deadline"}, "solutions after-deadline need a deadline for lesson 00, got 'none'"),
        ({"students": -1}, "students must be a whole number from 0 to 500, got '-1'"),
        ({"students": ["../x"]}, "a student must be a short name of letters, digits, . _ -, got '../x'"),
        ({"students": ["a", "a"]}, "students must differ, got 'a, a'"),
        ({"seed": "x"}, "seed must be a whole number from 0 to 2,147,483,647, got 'x'"),
        ({"session_minutes": True}, "session_minutes must be a whole number from 15 to 480, got 'True'"),
        ({"grading": ["moodle"]}, "grading must be of the known names, got 'moodle'. Choose from otter, nbgrader"),
    ],
)
def test_a_bad_entry_is_one_line_with_rule_got_and_remedy(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(CourseError, match=problem) as caught:
        _course(**changes)
    assert len(caught.value.problems) <= 2 and all("\n" not in line for line in caught.value.problems)


def test_all_problems_are_told_at_once_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yml"
    file.write_text("title: T\nlessons: [99]\nseed: x\n")
    assert main(["course", "build", str(file), "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("comera-lab: bad.yml: ") for line in lines] == [True, True]
    assert not (tmp_path / "out").exists()
    file.write_text("title: [\n")
    assert main(["course", "plan", str(file)]) == 2
    assert "bad.yml, line 2: must be YAML, got: " in capsys.readouterr().err
    assert main(["course", "plan", str(tmp_path / "none.yml")]) == 2
    assert "a course file must exist, got " in capsys.readouterr().err


# plan and routes


def test_the_plan_adds_up_and_fits_lessons_into_sessions() -> None:
    course = _course(lessons=["00", "01", "02", "03"], session_minutes=60)
    assert total_minutes(course) == sum(LESSONS[n].minutes for n in ("00", "01", "02", "03"))
    assert [[part.lesson.number for part in session] for session in sessions(course)] == [["00", "01"], ["02"], ["03"]]
    text = plan_text(course)
    assert f"4 lessons, {total_minutes(course)} minutes." in text and "## Session 3: 60 minutes" in text
    assert "02.1 Cut a matrix down to rank r" in text


def test_minutes_of_every_route_are_those_of_its_lessons() -> None:
    for route in ROUTES.values():
        pauses = sum(part.minutes for part in route.parts if part is not None and not isinstance(part, str))
        said = sum(read_lesson(LESSONS[number].source).minutes for number in route.numbers)
        assert route.minutes(LESSONS) == said + pauses
        last = route_text(route, LESSONS).splitlines()[-1]
        assert last.split()[-2:] == [str(said + pauses), "min"]
    assert ROUTES["90-minutes"].minutes(LESSONS) == 90
    assert ROUTES["half-day"].minutes(LESSONS) == 4 * 60
    assert ROUTES["two-weeks"].numbers == tuple(LESSONS) and len(ROUTES["two-weeks"].sessions(LESSONS)) == 10


def test_the_time_of_a_lesson_is_the_whole_phrase(tmp_path: Path) -> None:
    source = tmp_path / "77_demo.py"
    for phrase, minutes in (("about an hour", 60), ("about an hour and a half", 90), ("a quarter of an hour", 15)):
        source.write_text(f"# %% [markdown]\n# # 77 Demo\n#\n# You need {phrase}. Afterwards\n")
        assert read_lesson(source).minutes == minutes


def test_a_lesson_without_its_time_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "77_demo.py"
    source.write_text("# %% [markdown]\n# # 77 Demo\n#\n# You need a week.\n")
    with pytest.raises(ValueError, match='must say its time, "You need about forty minutes", got .* in 77_demo.py'):
        read_lesson(source)


def test_every_exercise_has_a_note_and_exercises_leave_time_for_the_rest() -> None:
    assert {key for lesson in LESSONS.values() for key in lesson.exercises} <= set(NOTES) <= set(EXERCISES)
    for lesson in LESSONS.values():
        assert sum(map(minutes_of, lesson.exercises)) <= 0.8 * lesson.minutes, lesson.number


# what is built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("course")
    (folder / "course.yml").write_text(YAML)
    assert main(["course", "build", str(folder / "course.yml"), "--out", str(folder / "out")]) == 0
    return folder / "out"


def _names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def _code(path: Path, name: str) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        cells = json.loads(archive.read(name))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_zip_for_students_has_lessons_kit_and_only_open_solutions(built: Path) -> None:
    names = _names(built / "low-rank-in-a-morning-students.zip")
    assert {"lessons/00_start_here.ipynb", "lessons/02_low_rank.ipynb", "README.txt"} <= names
    assert "lessons/solutions/02_low_rank.ipynb" in names and "lessons/solutions/00_start_here.ipynb" not in names
    assert {"kit/comera_lab/__init__.py", "kit/data/flights.npz", "kit/binder/constraints.txt"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("lessons/instructor")]


def test_every_student_has_a_zip_with_their_seed_and_the_same_settings(built: Path) -> None:
    course = read_course(built.parent / "course.yml", ROOT)
    seeds = set()
    for student in ("s01", "s02"):
        first = _code(built / "students" / f"{student}.zip", "lessons/02_low_rank.ipynb")[0]
        assert f"seed={course.seed_of(student)}," in first
        assert "presets={'energy_percent': 95.0}" in first and "locked=['energy_percent']" in first
        seeds.add(course.seed_of(student))
    assert len(seeds) == 2


def test_the_zip_for_the_teacher_has_notes_after_each_exercise(built: Path) -> None:
    path = built / "low-rank-in-a-morning-teacher.zip"
    assert {"class_board.ipynb", "plan.md", "lessons/solutions/00_start_here.ipynb"} <= _names(path)
    notes = [
        cell for cell in instructor_edition(LESSONS["02"])["cells"] if "teacher" in cell["metadata"].get("tags", ())
    ]
    texts = ["".join(cell["source"]) for cell in notes]
    assert len(texts) == 1 + len(LESSONS["02"].exercises)
    assert "40 minutes" in texts[0] and "panel, bet, text and recap" in texts[0]
    for text in texts[1:]:
        assert all(part in text for part in ("*Aim.*", "*Common wrong answers", "*On the board.*", " minutes**"))


def test_the_same_course_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    build_course(read_course(built.parent / "course.yml", ROOT), tmp_path / "again", ROOT)
    # the students' zip holds the working tree as it is; its lessons are those of a single student
    for path in (path for path in built.rglob("*") if path.is_file() and "-students" not in path.name):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(built)).read_bytes(), path.name


def test_a_folder_in_use_is_left_alone(built: Path) -> None:
    with pytest.raises(CourseError, match="must be new or empty, got .* Name another"):
        build_course(_course(), built, ROOT)


# what the course's cell does


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> LabState:
    monkeypatch.setattr("comera_lab.panels.state._shared", [])
    return lab_state()


def test_the_cell_sets_and_locks_sliders_and_says_so(fresh_state: LabState, capsys: pytest.CaptureFixture[str]) -> None:
    start_course("Morning", seed=5, presets={"energy_percent": 95.0}, locked=["energy_percent"])
    assert "Set by your teacher: energy_percent = 95.0 (locked). Your seed is 5." in capsys.readouterr().out
    assert fresh_state.seed == 5
    panel = SpectrumPanel()
    assert panel.energy.value == 95.0 and not panel.energy.enabled
    assert "set by your teacher" in panel.energy.note.value
    panel.energy.enabled = True  # as a run does when it ends
    assert panel.energy.slider.disabled and panel.energy.entry.disabled


def test_what_is_not_locked_can_be_moved(fresh_state: LabState) -> None:
    start_course("Morning", seed=5, presets={"rank": 4})
    panel = SpectrumPanel()
    assert panel.energy.enabled and panel.energy.value == 90.0


def test_sliders_are_the_choices_of_the_state() -> None:
    assert {"rank", "energy_percent", "optimizer"} <= set(sliders())
    assert not {"seed", "runs", "locked", "shape"} & set(sliders())
