"""The panel of notebook T0, tied to the course builder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comera_lab.panels.course import CourseKit, LessonLine
from comera_lab.panels.course import CoursePanel as _CoursePanel
from comera_lab.panels.state import LabState
from comera_lab.teaching.course import make_course
from comera_lab.teaching.course_build import build_course
from comera_lab.teaching.lessons import lessons
from comera_lab.teaching.plan import in_sessions
from comera_lab.teaching.routes import ROUTES


class CoursePanel(_CoursePanel):
    """The builder with the lessons of this checkout. `folder` is where Build writes; default: beside the notebook."""

    def __init__(self, folder: Path | str = ".", state: LabState | None = None) -> None:
        known = lessons()

        def sessions(numbers: Sequence[str], session_minutes: int) -> list[list[str]]:
            found = in_sessions([known[number] for number in numbers], session_minutes)
            return [[lesson.number for lesson in session] for session in found]

        def build(given: dict[str, Any]) -> str:
            course = make_course(given, known)
            return str(build_course(course, Path(folder) / course.slug))

        lines = [LessonLine(lesson.number, lesson.title, lesson.minutes) for lesson in known.values()]
        routes = {route.title: tuple(sorted(set(route.numbers))) for route in ROUTES.values()}
        super().__init__(CourseKit(lines, routes, sessions, course_text, build), state)


def course_text(given: dict[str, Any]) -> str:
    """A course file with these entries; plain enough to need no YAML package."""
    lines = []
    for key, value in given.items():
        if isinstance(value, list):
            quoted = ", ".join(f'"{item}"' for item in value)
            lines.append(f"{key}: [{quoted}]")
        elif isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'{key}: "{escaped}"')
        else:
            lines.append(f"{key}: {value}")
    return "\n".join(lines) + "\n"
