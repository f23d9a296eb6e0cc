"""Ways through the lessons for the time that one has. Minutes of lessons come from the lessons themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from comera_lab.teaching.lessons import Lesson


@dataclass(frozen=True)
class Pause:
    """Time without a lesson: a break, a discussion."""

    minutes: int
    what: str


@dataclass(frozen=True)
class Route:
    """`parts` are numbers of lessons and pauses, in order; `None` between two parts ends a session."""

    name: str
    title: str
    for_whom: str
    parts: tuple[str | Pause | None, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The lessons of the route."""
        return tuple(part for part in self.parts if isinstance(part, str))

    def minutes(self, lessons: Mapping[str, Lesson]) -> int:
        """All of it: lessons and pauses."""
        return sum(minutes for _, minutes in self.lines(lessons))

    def lines(self, lessons: Mapping[str, Lesson]) -> list[tuple[str, int]]:
        """(what, minutes) of every part."""
        return [line for session in self.sessions(lessons) for line in session]

    def sessions(self, lessons: Mapping[str, Lesson]) -> list[list[tuple[str, int]]]:
        """The lines, one list per session."""
        found: list[list[tuple[str, int]]] = [[]]
        for part in self.parts:
            if part is None:
                found.append([])
            elif isinstance(part, Pause):
                found[-1].append((part.what, part.minutes))
            else:
                lesson = lessons[part]
                found[-1].append((f"{lesson.number} {lesson.title}", lesson.minutes))
        return found


TALK = Pause(15, "questions, and what surprised you")
BREAK = Pause(10, "break")

ROUTES: dict[str, Route] = {
    route.name: route
    for route in (
        Route("90-minutes", "90 minutes", "a first look, from the slider to a trained layer",
              ("00", "04", TALK)),
        Route("half-day", "Half a day", "where memory goes, and the one idea that shrinks weights",
              ("00", "01", "02", BREAK, "03", "04", TALK)),
        Route("memory", "Memory track", "people who run out of memory: all four pools, and what shrinks each",
              ("00", "01", "02", None, "04", "06", None, "09", "10", None, "11", "15", TALK)),
        Route("kernels", "Kernel track", "people who write GPU code: from the contraction to its tiles",
              ("00", "03", "04", None, "12", "13", TALK)),
        Route("two-weeks", "Two-week course", "everything, in ten sessions",
              ("00", "01", "02", None, "03", "04", None, "05", "06", None, "07", None, "08", None, "09", "10", None,
               "11", None, "12", "13", None, "14", None, "15", "16", TALK)),
    )
}  # fmt: skip


def route_text(route: Route, lessons: Mapping[str, Lesson]) -> str:
    """The route in lines of text, minutes at the right and their sum under them."""
    lines = [f"{route.title} ({route.name}): {route.for_whom}"]
    sessions = route.sessions(lessons)
    for number, session in enumerate(sessions, start=1):
        if len(sessions) > 1:
            lines.append(f"  session {number}, {sum(minutes for _, minutes in session)} min")
        lines += [f"    {what:<52}{minutes:>4} min" for what, minutes in session]
    return "\n".join([*lines, f"    {'in all':<52}{route.minutes(lessons):>4} min"])
