"""What graders run: other inputs, looser terms, limits; and both graders grading four submissions of a lesson."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from comera_lab.teaching.build import build_lesson
from comera_lab.teaching.checks import Terms, check, judge
from comera_lab.teaching.compare import RELATIVE_TOLERANCE
from comera_lab.teaching.course import make_course
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.exercises_02 import truncation_error
from comera_lab.teaching.grading import LOOSER, NotPassed, answer_of, limit_cells, require_right
from comera_lab.teaching.lessons import lessons

ROOT = Path(__file__).resolve().parents[1]
LESSONS = lessons(ROOT)
LESSON = LESSONS["00"]


def test_a_right_answer_passes_on_any_seed_and_a_wrong_one_says_why() -> None:
    for seed in (0, 1, 4711):
        require_right("02.2", truncation_error, seed=seed, looser=LOOSER)
    with pytest.raises(NotPassed, match=r"02.2 \(value\): These|02.2 \(value\): The"):
        require_right("02.2", lambda S, rank: float(S[rank:].sum()), seed=1)
    with pytest.raises(NotPassed, match=r"00.3 \(stub\)"):
        require_right("00.3", ...)
    with pytest.raises(ValueError, match="exercise_id must be one of 00.1, .*, got '99.9'"):
        require_right("99.9", 1)


def test_other_seeds_are_other_inputs() -> None:
    seen: list[list[float]] = []

    def spy(S: torch.Tensor, rank: int) -> float:
        seen[-1] += S.tolist()
        return truncation_error(S, rank)

    for seed in (0, 1, 1):
        seen.append([])
        require_right("02.2", spy, seed=seed)
    assert seen[0] != seen[1] == seen[2]


def test_an_answer_learnt_by_heart_passes_the_announced_test_and_fails_the_hidden_one() -> None:
    table = {}

    def learn(S: torch.Tensor, rank: int) -> float:
        table[tuple(S.tolist()), rank] = truncation_error(S, rank)
        return table[tuple(S.tolist()), rank]

    require_right("02.2", learn)
    recall = lambda S, rank: table.get((tuple(S.tolist()), rank), 0.0)  # noqa: E731
    require_right("02.2", recall)
    with pytest.raises(NotPassed, match="02.2"):
        require_right("02.2", recall, seed=1, looser=LOOSER)


def test_hidden_thresholds_are_a_fifth_looser_and_no_more() -> None:
    assert 1.1 <= LOOSER <= 1.2
    off = lambda factor: lambda S, rank: truncation_error(S, rank) * (1 + factor * RELATIVE_TOLERANCE)  # noqa: E731
    exercise = EXERCISES["02.2"]
    loose = Terms(tolerance=LOOSER * RELATIVE_TOLERANCE)
    assert [judge(exercise, off(factor)).passed for factor in (0.9, 1.1)] == [True, False]
    assert [judge(exercise, off(factor), terms=loose).passed for factor in (1.1, 1.3)] == [True, False]
    assert not check("02.2", off(1.1)).passed, "learners are judged on the announced threshold"


def _never(*_: object) -> None:
    while True:
        pass


def test_a_loop_that_never_ends_is_not_passed() -> None:
    with pytest.raises(NotPassed, match=r"00.3 \(time\): No answer after 0.3 seconds"):
        require_right("00.3", _never, seconds=0.3)


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.mark.filterwarnings("default")  # of IPython, about its history file
def test_a_cell_that_never_ends_is_ended_and_the_next_one_runs(shell: InteractiveShell) -> None:
    limit_cells(0.3)
    result = shell.run_cell("while True:\n    pass")
    assert "longer than 0.3 seconds" in str(result.error_in_exec)
    assert shell.run_cell("after = 1").success and shell.user_ns["after"] == 1


def test_the_answer_is_what_a_cell_hands_to_check() -> None:
    assert answer_of(["x = 1", 'check("00.1", x + 1)'], "00.1") == "x + 1"
    with pytest.raises(ValueError, match='must call check\\("00.2", answer\\), and does not'):
        answer_of(['check("00.1", x)'], "00.2")


# the graders themselves

GOOD, WRONG, HANGING = "return left * mode * right", "return left + mode + right", "while True: pass"
ALL, TWO, NONE = {"00.1", "00.2", "00.3"}, {"00.1", "00.2"}, set[str]()
EXPECTED = {"right": ALL, "wrong": TWO, "empty": NONE, "hanging": TWO}


def _submissions(right: str, empty: str) -> dict[str, str]:
    assert GOOD in right and GOOD not in empty
    return {"right": right, "wrong": right.replace(GOOD, WRONG), "empty": empty,
            "hanging": right.replace(GOOD, HANGING)}  # fmt: skip


def _exercise(name: str) -> str:
    return ".".join(name.split("_")[-2:]).lstrip("q")


def _stubs_agree(notebook: Path, checked: str) -> None:
    """The students of a grader read what students of the kit read."""
    theirs = [
        cell.source for cell in nbformat.read(notebook, 4).cells if "check(" in cell.source and "= ..." in cell.source
    ]
    ours = ["".join(cell["source"]) for cell in build_lesson(LESSON.source).student["cells"]]
    for text in theirs:
        assert text.replace("\n...\n", "\n") in ours, checked


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the grader's own libraries
def test_otter_grades_right_wrong_empty_and_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otter.api import grade_submission

    from comera_lab.teaching.export_otter import write_otter

    folder = write_otter(LESSON, tmp_path, seed=4711, seconds=1.0)
    (student,) = folder.glob("dist/student/*.ipynb")
    (solved,) = folder.glob("dist/autograder/*.ipynb")
    (autograder,) = folder.glob("dist/autograder/*.zip")
    _stubs_agree(student, "otter")
    assert "# HIDDEN" not in student.read_text() and "seed=course_seed" not in "".join(
        path.read_text() for path in folder.glob("dist/student/**/*") if path.is_file()
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMERA_LAB_FIGURES", "plain")  # a grader needs no static twins
    for name, text in _submissions(solved.read_text(), student.read_text()).items():
        (tmp_path / f"{name}.ipynb").write_text(text)
        graded = grade_submission(str(tmp_path / f"{name}.ipynb"), str(autograder), quiet=True)
        cases = {key: [case.passed for case in result.test_case_results] for key, result in graded.results.items()}
        assert {len(passed) for passed in cases.values()} == {2}, "an announced and a hidden test"
        assert {_exercise(key) for key, passed in cases.items() if all(passed)} == EXPECTED[name], name
        assert graded.total == len(EXPECTED[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the grader's own libraries
def test_nbgrader_grades_right_wrong_empty_and_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from comera_lab.teaching.export_nbgrader import open_course, write_nbgrader

    course = make_course(
        {"title": "T", "lessons": ["00"], "students": list(EXPECTED), "deadline": "2027-01-15"}, LESSONS
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMERA_LAB_FIGURES", "plain")  # a grader needs no static twins
    folder, release = write_nbgrader(course, tmp_path / "course", seconds=1.0)
    source = folder / "source" / LESSON.stem / release.name
    _stubs_agree(release, "nbgrader")
    assert "HIDDEN" in source.read_text() and "HIDDEN" not in release.read_text() and "seed=" not in release.read_text()
    api = open_course(folder)
    for name, text in _submissions(source.read_text(), release.read_text()).items():
        path = folder / "submitted" / name / LESSON.stem / release.name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert api.autograde(LESSON.stem, name)["success"]
        with api.gradebook as gradebook:
            graded = gradebook.find_submission_notebook(LESSON.stem, LESSON.stem, name)
            passed = {_exercise(grade.name) for grade in graded.grades if grade.auto_score == 1}
            assert (passed, graded.score, graded.max_score) == (EXPECTED[name], len(EXPECTED[name]), 3), name
    with api.gradebook as gradebook:
        assert str(gradebook.find_assignment(LESSON.stem).duedate) == "2027-01-15 23:59:00"


def test_exports_of_every_lesson_are_well_formed() -> None:
    from comera_lab.teaching import export_nbgrader, export_otter

    for lesson in LESSONS.values():
        otter: list[dict[str, Any]] = list(export_otter._cells(lesson, 1, 5.0))
        nbgrader: list[dict[str, Any]] = list(export_nbgrader._cells(lesson, 1, 5.0))
        for cells in (otter, nbgrader):
            for cell in cells:
                if cell["cell_type"] == "code":
                    compile("".join(cell["source"]), lesson.stem, "exec")
        assert sum("BEGIN QUESTION" in "".join(cell["source"]) for cell in otter) == len(lesson.exercises)
        tests = [cell for cell in nbgrader if cell["metadata"].get("nbgrader", {}).get("grade")]
        assert len(tests) == len(lesson.exercises)
        assert json.dumps(nbgrader).count("### BEGIN SOLUTION") == json.dumps(nbgrader).count("### END SOLUTION")
