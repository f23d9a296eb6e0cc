"""A course as its teacher wants it: one YAML file, read and checked.

    title: Low rank in a morning
    lessons:                      # or  route: half-day
      - "00"
      - lesson: "02"
        presets: {energy_percent: 95}     # where sliders start
        locked: [energy_percent]          # sliders that students cannot move
        deadline: 2027-01-15
    solutions: after-deadline     # never, after-deadline (handed out by the teacher) or always
    students: 12                  # a number, or a list of short names: each gets a seed
    seed: 7
    session_minutes: 90
    grading: [otter, nbgrader]

`presets`, `locked`, `deadline` and `solutions` may stand at the top, for every lesson, and under one lesson, for it
alone. Everything but `title` and `lessons` (or `route`) may be left out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from comera_lab.runtime import require
from comera_lab.teaching.lessons import Lesson, lessons
from comera_lab.teaching.routes import ROUTES

SOLUTIONS = ("never", "after-deadline", "always")
GRADERS = ("otter", "nbgrader")
_PER_LESSON = ("presets", "locked", "deadline", "solutions")
_KEYS = ("title", "route", "lessons", *_PER_LESSON, "students", "seed", "session_minutes", "grading")
_STUDENT = re.compile(r"[A-Za-z0-9][\w.-]{0,39}", re.ASCII)
END_OF_DAY = time(23, 59)


class CourseError(ValueError):
    """A course file that cannot be built; `problems` has one line for each thing to mend."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One lesson of a course, with what the teacher set for it."""

    lesson: Lesson
    presets: Mapping[str, Any] = field(default_factory=dict)
    locked: tuple[str, ...] = ()
    deadline: datetime | None = None
    solutions: str = "never"


@dataclass(frozen=True, kw_only=True)
class Course:
    """A checked course. `seed` is the teacher's; every student has one of their own."""

    title: str
    parts: tuple[Part, ...]
    students: tuple[str, ...] = ()
    seed: int = 0
    session_minutes: int = 90
    grading: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The title as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:40] or "course"

    def seed_of(self, student: str) -> int:
        """The seed of one student: the same in every build, different for every student."""
        return zlib.crc32(f"{self.title}:{self.seed}:{student}".encode()) % 2**31


def read_course(path: Path, root: Path | str | None = None) -> Course:
    """The course in a YAML file. CourseError with one line per problem; FileNotFoundError without the file."""
    yaml = require("yaml", "course files")
    if not path.is_file():
        raise FileNotFoundError(f"a course file must exist, got {path}. Write one; lesson T0 shows how.")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise CourseError([f"{path.name}{line}: must be YAML, got: {problem}. Compare with the example."]) from None
    try:
        return make_course(given, lessons(root))
    except CourseError as error:
        raise CourseError([f"{path.name}: {problem}" for problem in error.problems]) from None


def make_course(given: Any, known: Mapping[str, Lesson]) -> Course:
    """The course that a mapping of plain values describes. CourseError with one line per problem."""
    reader = _Reader(known)
    course = reader.course(given)
    if reader.problems:
        raise CourseError(reader.problems)
    return course


class _Reader:
    """Reads every key, and keeps a line for each one that cannot be used."""

    def __init__(self, known: Mapping[str, Lesson]) -> None:
        self.known = known
        self.problems: list[str] = []

    def refuse(self, rule: str, got: Any, remedy: str) -> None:
        self.problems.append(f"{rule}, got {str(got)!r:.80}. {remedy}")

    def course(self, given: Any) -> Course:
        if not isinstance(given, dict):
            self.refuse("a course must be a list of `key: value`", given, "Start with `title: ...`.")
            return Course(title="", parts=())
        self.keys("", given, _KEYS)
        title = given.get("title")
        if not isinstance(title, str) or not title.strip():
            self.refuse("title must be a line of text", title, "Write `title: Low rank in a morning`.")
        common = self.settings("", given)
        parts = tuple(self.part(f"lessons[{place}]", item, common) for place, item in enumerate(self.items(given), 1))
        self.once([part.lesson.number for part in parts if part])
        return Course(
            title=str(title).strip(),
            parts=tuple(part for part in parts if part),
            students=self.students(given.get("students", 0)),
            seed=self.whole("seed", given.get("seed", 0), 0, 2**31 - 1),
            session_minutes=self.whole("session_minutes", given.get("session_minutes", 90), 15, 480),
            grading=self.names("grading", given.get("grading", []), GRADERS),
        )

    def items(self, given: dict[str, Any]) -> list[Any]:
        """What stands under `lessons`, or the lessons of `route`."""
        if "route" in given and "lessons" in given:
            self.refuse("a course must have `lessons` or a `route`", "both", "Keep one of them.")
        if "route" in given:
            route = ROUTES.get(given["route"]) if isinstance(given["route"], str) else None
            if route is None:
                self.refuse("route must be one of " + ", ".join(ROUTES), given["route"], "Choose one.")
            return list(route.numbers) if route else []
        items = given.get("lessons")
        if not isinstance(items, list) or not items:
            self.refuse("lessons must be a list of at least one lesson", items, 'Write `lessons: ["00", "02"]`.')
            return []
        return items

    def part(self, where: str, item: Any, common: dict[str, Any]) -> Part | None:
        own = item if isinstance(item, dict) else {"lesson": item}
        self.keys(f"{where}.", own, ("lesson", *_PER_LESSON))
        number = own.get("lesson")
        # unquoted, 00 to 07 and 10 on are numbers to YAML
        number = f"{number:02d}" if isinstance(number, int) and not isinstance(number, bool) else number
        lesson = self.known.get(number) if isinstance(number, str) else None
        if lesson is None:
            self.refuse(f"{where} must be a lesson of the kit", number, f"Choose from {', '.join(self.known)}.")
        settings = self.settings(f"{where}.", own)
        merged = {**common, **settings, "presets": {**common.get("presets", {}), **settings.get("presets", {})}}
        if merged.get("solutions") == "after-deadline" and "deadline" not in merged:
            name = number if lesson else where
            self.refuse(f"solutions after-deadline need a deadline for lesson {name}", "none", "Add `deadline: ...`.")
        return Part(lesson=lesson, **merged) if lesson else None

    def settings(self, where: str, given: dict[str, Any]) -> dict[str, Any]:
        """Those of `_PER_LESSON` that are there, checked."""
        found: dict[str, Any] = {}
        if "presets" in given:
            found["presets"] = self.presets(f"{where}presets", given["presets"])
        if "locked" in given:
            found["locked"] = self.names(f"{where}locked", given["locked"], sliders())
        if "deadline" in given:
            found["deadline"] = self.deadline(f"{where}deadline", given["deadline"])
        if "solutions" in given:
            found["solutions"] = (self.names(f"{where}solutions", [given["solutions"]], SOLUTIONS) or ("never",))[0]
        return found

    def presets(self, where: str, given: Any) -> dict[str, Any]:
        from comera_lab.panels.state import LabState

        if not isinstance(given, dict):
            self.refuse(f"{where} must be a list of `slider: value`", given, "Write `presets: {rank: 4}`.")
            return {}
        found = {}
        for name in self.names(where, list(given), sliders()):
            try:
                found[name] = getattr(LabState(**{name: given[name]}), name)
            except ValueError as error:
                self.problems.append(f"{where}: {' '.join(str(error).split())}")
        return found

    def deadline(self, where: str, given: Any) -> datetime | None:
        try:
            # a datetime is a date too
            if isinstance(given, datetime):
                return given.replace(tzinfo=None)
            if isinstance(given, date):
                return datetime.combine(given, END_OF_DAY)
            when = datetime.fromisoformat(str(given).strip())
            return datetime.combine(when, END_OF_DAY) if len(str(given).strip()) <= 10 else when.replace(tzinfo=None)
        except ValueError:
            self.refuse(f"{where} must be a date", given, "Write 2027-01-15, or 2027-01-15T18:00 with a time.")
            return None

    def students(self, given: Any) -> tuple[str, ...]:
        if isinstance(given, list):
            names = tuple(str(name) for name in given)
            for name in names:
                if not _STUDENT.fullmatch(name):
                    self.refuse("a student must be a short name of letters, digits, . _ -", name, "No name is needed: "
                                "`students: 12` makes s01 to s12.")  # fmt: skip
            if len(set(names)) < len(names):
                self.refuse("students must differ", ", ".join(names), "Remove the second one.")
            return names
        count = self.whole("students", given, 0, 500)
        return tuple(f"s{number:02d}" for number in range(1, count + 1))

    def once(self, numbers: list[str]) -> None:
        for number in sorted({number for number in numbers if numbers.count(number) > 1}):
            self.refuse("a lesson must be in a course once", f"{number} twice", "Remove one of them.")

    def keys(self, where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in given:
            if key not in known:
                self.refuse(f"a key {'of ' + where[:-1] if where else 'of a course'} must be a known one", key,
                            f"Keys are {', '.join(known)}.")  # fmt: skip

    def names(self, where: str, given: Any, known: tuple[str, ...]) -> tuple[str, ...]:
        if not isinstance(given, list):
            self.refuse(f"{where} must be a list", given, f"Write [{known[0]}].")
            return ()
        for name in given:
            if name not in known:
                self.refuse(f"{where} must be of the known names", name, f"Choose from {', '.join(known)}.")
        return tuple(name for name in given if name in known)

    def whole(self, where: str, given: Any, low: int, high: int) -> int:
        if isinstance(given, int) and not isinstance(given, bool) and low <= given <= high:
            return given
        self.refuse(f"{where} must be a whole number from {low} to {high:,}", given, f"Write `{where}: {max(low, 1)}`.")
        return low


def sliders() -> tuple[str, ...]:
    """The names of everything a teacher may preset and lock: the choices in `LabState`, but the students' seed."""
    from comera_lab.panels.state import Choice, LabState, Number, Whole

    return tuple(sorted(name for name, trait in LabState.class_traits().items()
                        if isinstance(trait, Whole | Number | Choice) and name != "seed"))  # fmt: skip
