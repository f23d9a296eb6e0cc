"""Notebook T0: put a course together with check boxes, see its schedule, build it."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ipywidgets as widgets
import plotly.graph_objects as go

from comera_lab.panels.board import minutes_bars
from comera_lab.panels.panel import Panel
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, Control, NumberControl, heading, say, sentence, text_widget

SOLUTIONS = ("never", "always")
OWN = "my own choice"


class LessonLine(NamedTuple):
    """A lesson that can be picked."""

    number: str
    title: str
    minutes: int


class CourseKit(NamedTuple):
    """What the panel asks of the course builder.

    `routes` maps a name to numbers of lessons; `sessions(numbers, session_minutes)` gives the numbers of each session;
    `text(given)` is a course file; `build(given)` writes the course and returns what it wrote, or raises ValueError.
    """

    lessons: Sequence[LessonLine]
    routes: Mapping[str, Sequence[str]]
    sessions: Callable[[Sequence[str], int], list[list[str]]]
    text: Callable[[dict[str, Any]], str]
    build: Callable[[dict[str, Any]], str]


class LessonsControl(Control):
    """A check box for each lesson; `value` is the tuple of numbers that are ticked, at least one, in their order."""

    def __init__(self, name: str, label: str, value: Sequence[str], lessons: Sequence[LessonLine], help: str) -> None:
        super().__init__(name, label, tuple(value), f"t-{name}")
        self.boxes = {}
        for lesson in lessons:
            tip = f"Lesson {lesson.number}, {lesson.title}, takes {lesson.minutes} minutes."
            words = f"{lesson.number} {lesson.title} ({lesson.minutes} min)"
            box = widgets.Checkbox(value=lesson.number in value, description=words, indent=False, tooltip=tip)
            box.layout.width = "auto"
            box.add_class(f"t-{name}-{lesson.number}")
            box.observe(self._ticked, names="value")
            self.boxes[lesson.number] = box
        self.label.tooltip = help
        columns = "repeat(auto-fill, minmax(365px, 1fr))"
        grid = widgets.GridBox(list(self.boxes.values()), layout={"grid_template_columns": columns, "width": "100%"})
        self.widget = widgets.VBox([self.label, grid, self.message])

    def check(self, new: Any) -> tuple[str, ...]:
        wanted = set(new) if isinstance(new, Iterable) and not isinstance(new, str) else {new}
        if not wanted or not wanted <= set(self.boxes):
            raise ValueError(f"{self.label.value} must be at least one of {', '.join(self.boxes)}, got "
                             f"{', '.join(map(str, wanted)) or 'none'}. Tick one.")  # fmt: skip
        return tuple(number for number in self.boxes if number in wanted)

    def _ticked(self, change: Any) -> None:
        if not self._busy:
            self.offer(tuple(number for number, box in self.boxes.items() if box.value))

    def _editors(self) -> Sequence[Any]:
        return tuple(self.boxes.values())

    def _show(self) -> None:
        for number, box in self.boxes.items():
            box.value = number in self._value


class CoursePanel(Panel):
    """A course of check boxes, its schedule and its files.

    Controls: `title`, `route`, `lessons`, `session_minutes`, `students`, `solutions`, `build_button`. Figure: `bars`.
    `given` is the course as a mapping, the same as in a course file.
    """

    kind = "course"

    def __init__(self, kit: CourseKit, state: LabState | None = None) -> None:
        super().__init__(state)
        self.kit = kit
        first = next(iter(kit.routes))
        self._lines = {lesson.number: lesson for lesson in kit.lessons}
        self._make_controls(first)
        self.bars = self._live(self._picture(), "t-schedule", "The lessons of every session, minute by minute.")
        self.line, self.file, self.built = (
            text_widget(" ", "t-line"),
            text_widget(" ", "t-file"),
            text_widget("", "t-built"),
        )
        self.build_button = widgets.Button(
            description="Build", icon="archive", button_style="success",
            tooltip="Writes the plan, the zips and the instructor edition into a new folder beside this notebook.",
        )  # fmt: skip
        self.build_button.add_class("t-build")
        self.build_button.on_click(self._guarded(lambda button: self.build()))
        row = widgets.HBox([self.build_button])
        row.add_class("comera-buttons")
        self.route.on_change(self._guarded(self._take_route))
        self.lessons.on_change(self._guarded(lambda lessons: self._draw()))
        for control in (self.session_minutes, self.students, self.solutions):
            control.on_change(self._guarded(lambda value: self._draw()))
        self.title.observe(self._guarded(lambda change: self._draw()), names="value")
        self._draw()
        self._compose(
            heading("Put a course together", "Pick lessons, see the schedule, press Build. Minutes are those that each "
                    "lesson names."),
            self._title_row, self.route.widget, self.lessons.widget, self.session_minutes.widget,
            self.students.widget, self.solutions.widget, self.bars.widget, self.line, row, self.card.widget,
            self.built, self.file,
        )  # fmt: skip

    def _make_controls(self, first: str) -> None:
        self.title = widgets.Text(
            value="Our course", continuous_update=False, tooltip="The name of the course; its files are named after it."
        )
        self.title.add_class("t-title")
        label = widgets.Label("title")
        label.add_class("comera-label")
        self._title_row = widgets.HBox([label, self.title])
        self._title_row.add_class("comera-row")
        self.route = ChoiceControl(
            "route", "route", first, (*self.kit.routes, OWN), "A ready choice of lessons; change it below as you like."
        )
        self.lessons = LessonsControl(
            "lessons", "lessons", self.kit.routes[first], self.kit.lessons, "The lessons of the course, in order."
        )
        self.session_minutes = NumberControl(
            "session_minutes",
            "session",
            90,
            15,
            480,
            "How long one meeting of the class lasts.",
            step=15,
            unit="minutes",
        )
        self.students = NumberControl(
            "students", "students", 12, 0, 500, "How many students; each gets a seed and a zip of their own."
        )
        self.solutions = ChoiceControl(
            "solutions", "solutions", SOLUTIONS[0], SOLUTIONS, "Whether the students' zip holds the solutions."
        )

    @property
    def given(self) -> dict[str, Any]:
        return {
            "title": self.title.value.strip(), "lessons": list(self.lessons.value),
            "session_minutes": self.session_minutes.value, "students": self.students.value,
            "solutions": self.solutions.value,
        }  # fmt: skip

    def build(self) -> str:
        """Write the course, as the Build button does; returns what was written."""
        text = self.kit.build(self.given)
        say(self.built, f"<pre>{html.escape(text)}</pre>")
        return text

    def table(self) -> str:
        lines = []
        for place, session in enumerate(self._sessions(), start=1):
            lines.append(f"session {place}, {sum(self._lines[number].minutes for number in session)} minutes")
            lines += [
                f"  {self._lines[n].number} {self._lines[n].title}, {self._lines[n].minutes} min" for n in session
            ]
        return "\n".join([*lines, self._words()])

    def static(self) -> go.Figure:
        return self._picture()

    def _take_route(self, name: str) -> None:
        if name != OWN:
            self.lessons.value = self.kit.routes[name]

    def _sessions(self) -> list[list[str]]:
        return self.kit.sessions(self.lessons.value, self.session_minutes.value)

    def _picture(self) -> go.Figure:
        rows = []
        for session in self._sessions():
            clock = 0
            for number in session:
                lesson = self._lines[number]
                rows.append((f"{number} {lesson.title}", clock, lesson.minutes))
                clock += lesson.minutes
        return minutes_bars(rows, self.session_minutes.value)

    def _draw(self) -> None:
        self.bars.replace(self._picture(), self._words())
        say(self.line, sentence(self._words()))
        text = html.escape(self.kit.text(self.given))
        say(self.file, f"<details><summary>The same course as a file, for comera-lab course build</summary>"
            f"<pre>{text}</pre></details>")  # fmt: skip
        route = next((name for name, numbers in self.kit.routes.items() if tuple(numbers) == self.lessons.value), OWN)
        if self.route.value != route:
            self.route.value = route

    def _words(self) -> str:
        total = sum(self._lines[number].minutes for number in self.lessons.value)
        sessions = self._sessions()
        longest = max(sum(self._lines[number].minutes for number in session) for session in sessions)
        counts = [f"{count} {what}{'s' if count != 1 else ''}" for count, what in (
            (len(self.lessons.value), "lesson"), (total, "minute"), (len(sessions), "session"))]  # fmt: skip
        text = f"{', '.join(counts)}."
        if longest > self.session_minutes.value:
            text += f" One session takes {longest} minutes: a lesson is not cut in two."
        return text
