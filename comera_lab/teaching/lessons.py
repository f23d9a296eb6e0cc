"""The lessons as their sources describe themselves: title, minutes, goals, exercises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from comera_lab.teaching.build import notebooks_folder, read_cells

# the longer phrase first: "an hour" begins "an hour and a half"
_WORDS = {"a quarter of an hour": 15, "half an hour": 30, "forty minutes": 40, "an hour and a half": 90, "an hour": 60}
_TIME = re.compile(r"You need (?:about )?(" + "|".join(_WORDS) + r")\b")
TEACHERS = "T0"  # the notebook for teachers is no lesson of a course


@dataclass(frozen=True)
class Lesson:
    """One lesson: `number` is its two digits, `minutes` what its first cell tells the learner."""

    number: str
    source: Path
    title: str
    minutes: int
    goals: tuple[str, ...]
    exercises: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The file name of its notebooks, without an ending."""
        return self.source.stem


def read_lesson(source: Path) -> Lesson:
    """A lesson from its source. ValueError where the first cell names no title or no time."""
    cells = read_cells(source)
    first = "\n".join(cells[0].lines) if cells else ""
    title = re.match(rf"# {source.stem[:2]} (.+)", first)
    time = _TIME.search(first)
    if title is None or time is None:
        missing = f'a title "# {source.stem[:2]} ..."' if title is None else 'its time, "You need about forty minutes"'
        raise ValueError(
            f"the first cell of a lesson must say {missing}, got {first[:60]!r} in {source.name}. "
            f"Times are: {', '.join(_WORDS)}."
        )
    goals = tuple(" ".join(goal.split()) for goal in re.findall(r"^\d\. (.+(?:\n   .+)*)", first, re.MULTILINE))
    exercises = tuple(cell.exercise_id for cell in cells if cell.exercise_id is not None)
    return Lesson(source.stem[:2], source, title[1].strip(), _WORDS[time[1]], goals, exercises)


def lessons(root: Path | str | None = None) -> dict[str, Lesson]:
    """Every lesson of the checkout by its number, in order; the notebook for teachers is not among them."""
    sources = sorted((notebooks_folder(root) / "source").glob("*.py"))
    found = [read_lesson(source) for source in sources if source.stem[:2] != TEACHERS]
    return {lesson.number: lesson for lesson in found}
