"""The plan of a course as a Markdown page: sessions, minutes, exercises, deadlines, what is preset and locked."""

from __future__ import annotations

from collections.abc import Sequence

from comera_lab.teaching.course import Course, Part
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.instructor import minutes_of
from comera_lab.teaching.lessons import Lesson


def in_sessions(lessons: Sequence[Lesson], session_minutes: int) -> list[list[Lesson]]:
    """Lessons in sessions of at most `session_minutes`; a lesson that is longer has one of its own."""
    found: list[list[Lesson]] = []
    left = 0
    for lesson in lessons:
        if lesson.minutes > left:
            found.append([])
            left = session_minutes
        found[-1].append(lesson)
        left -= lesson.minutes
    return found


def sessions(course: Course) -> list[list[Part]]:
    """The parts of a course, session by session."""
    parts = iter(course.parts)
    found = in_sessions([part.lesson for part in course.parts], course.session_minutes)
    return [[next(parts) for _ in session] for session in found]


def total_minutes(course: Course) -> int:
    """What the lessons say, added up."""
    return sum(part.lesson.minutes for part in course.parts)


def plan_text(course: Course) -> str:
    """The plan. Minutes are those that each lesson names in its first cell."""
    count = len(course.parts)
    lines = [f"# {course.title}", "", f"{count} lesson{'s' if count != 1 else ''}, {total_minutes(course)} minutes."]
    for number, session in enumerate(sessions(course), start=1):
        minutes = sum(part.lesson.minutes for part in session)
        lines += ["", f"## Session {number}: {minutes} minutes", "", "| from | to | lesson | deadline | solutions |",
                  "|---:|---:|---|---|---|"]  # fmt: skip
        clock = 0
        for part in session:
            lines.append(
                f"| {clock} | {clock + part.lesson.minutes} | {part.lesson.number} {part.lesson.title} "
                f"| {_when(part)} | {part.solutions} |"
            )
            clock += part.lesson.minutes
    lines += ["", "## Exercises", ""]
    for part in course.parts:
        lines.append(f"- **{part.lesson.number} {part.lesson.title}**{_settings(part)}")
        lines += [f"  - {key} {EXERCISES[key].title}, {minutes_of(key)} min" for key in part.lesson.exercises]
    if course.students:
        lines += ["", "## Seeds", "", "| student | seed |", "|---|---:|"]
        lines += [f"| {student} | {course.seed_of(student)} |" for student in course.students]
    return "\n".join(lines) + "\n"


def _when(part: Part) -> str:
    return part.deadline.isoformat(" ", "minutes") if part.deadline else "none"


def _settings(part: Part) -> str:
    words = [f"{name} = {value}{' locked' if name in part.locked else ''}" for name, value in part.presets.items()]
    words += [f"{name} locked" for name in part.locked if name not in part.presets]
    return f" ({', '.join(words)})" if words else ""
