"""One source per lesson, two editions of it.

`notebooks/source/NN_name.py` is a plain Python file in jupytext's percent format. From it come
`notebooks/NN_name.ipynb` (student edition: answers replaced by three dots) and
`notebooks/solutions/NN_name.ipynb` (answers filled in). Both are committed; `check_drift` says what is stale.

Marks in a source:

    # %% [markdown]                            a text cell: every line starts with "#"
    # %%                                       a code cell
    # %% tags=["exercise:03.1"]                a code cell with an exercise; it must call check("03.1", ...)
    # %% [markdown] tags=["solution"]          a cell of the solution edition only

    times_smaller = dense / small  # solution  one line: the student reads `times_smaller = ...`

    # solution                                 several lines: with a `return` at their end the student reads
    kept = U[:, :rank] * S[:rank]              `return ...`, else one `name = ...` per name assigned
    return kept @ Vh[:rank]
    # end

Other tags (`slow`, `gpu`) are passed on. A mark that is misspelt, unclosed or out of place is refused with its
file and line. The output is deterministic: cell ids come from the text, and there are no outputs and no widget
state in it.
"""

import ast
import hashlib
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.twins import picture_cell

_HEADER = re.compile(r'^# %%(?P<kind> \[markdown\])?(?: tags=(?P<tags>\[("[\w:.\-]+"(, )?)*\]))?$')
_TRAILING = re.compile(r"^(?P<indent>\s*)(?P<name>\w+) = .*\S  # solution$")
_LOOKS_LIKE_A_MARK = re.compile(r"#\s*(end\s*$|solution\b|solutions\b)", re.IGNORECASE)
_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class SourceError(ValueError):
    """A lesson source with a mark that cannot be understood; names the file and the line."""


@dataclass(frozen=True)
class Cell:
    """One cell of a source: where it starts, what it is, and its lines without the header."""

    line: int
    markdown: bool
    tags: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def exercise_id(self) -> str | None:
        """The exercise of the cell, from its tag."""
        return next((tag.removeprefix("exercise:") for tag in self.tags if tag.startswith("exercise:")), None)


@dataclass(frozen=True)
class Editions:
    """The two notebooks of one source, as nbformat 4.5 dictionaries."""

    student: dict[str, Any]
    solution: dict[str, Any]


def build_all(root: Path | str | None = None) -> list[Path]:
    """Write both editions of every lesson; returns the files that changed."""
    changed = []
    for path, text in _generated(notebooks_folder(root)):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def check_drift(root: Path | str | None = None) -> list[str]:
    """One sentence per notebook that its source would not give today; empty when all is well."""
    folder = notebooks_folder(root)
    expected = dict(_generated(folder))
    problems = []
    for path, text in expected.items():
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            problems.append(f"{name} is missing. Run: comera-lab notebooks build")
        elif path.read_text(encoding="utf-8") != text:
            problems.append(f"{name} differs from its source. Edit the source, then run: comera-lab notebooks build")
    for path in sorted([*folder.glob("*.ipynb"), *folder.glob("solutions/*.ipynb")]):
        if path not in expected:
            name = path.relative_to(folder).as_posix()
            problems.append(f"{name} has no source in notebooks/source. Delete it, or add its source.")
    return problems


def notebooks_folder(root: Path | str | None = None) -> Path:
    """The folder `notebooks` of a checkout: under `root`, else under the working directory or this file's.

    An installed package holds the sources alone.
    """
    package = Path(__file__).resolve().parents[1]
    roots = [Path(root)] if root is not None else [Path.cwd(), package.parent, package]
    for candidate in roots:
        if (candidate / "notebooks" / "source").is_dir():
            return candidate / "notebooks"
    looked = " and ".join(str(candidate / "notebooks" / "source") for candidate in roots)
    raise FileNotFoundError(f"No lesson sources: looked for {looked}. Run this inside a checkout of comera_lab.")


def _generated(folder: Path) -> Iterator[tuple[Path, str]]:
    for source in sorted((folder / "source").glob("*.py")):
        editions = build_lesson(source)
        yield folder / f"{source.stem}.ipynb", _to_text(editions.student)
        yield folder / "solutions" / f"{source.stem}.ipynb", _to_text(editions.solution)


def build_lesson(source: Path) -> Editions:
    """Both editions of one source file. SourceError on a malformed mark."""
    cells = read_cells(source)
    ids = _cell_ids(source.stem, cells)
    student, solution = [], []
    seen: set[str] = set()
    for cell, cell_id in zip(cells, ids, strict=True):
        if cell.exercise_id is not None and cell.exercise_id in seen:
            raise _error(source, cell.line, f"exercise {cell.exercise_id} is already in this lesson")
        seen.add(cell.exercise_id or "")
        filled, stubbed = _two_versions(source, cell)
        solution.append(_notebook_cell(cell, cell_id, filled))
        if "solution" not in cell.tags:
            student.append(_notebook_cell(cell, cell_id, stubbed))
    _add_picture(source, student, "")
    _add_picture(source, solution, "../")
    return Editions(_notebook(student), _notebook(_announce_solutions(solution)))


def read_cells(source: Path) -> list[Cell]:
    """The cells of a percent-format file, each with its line number."""
    cells: list[Cell] = []
    header: re.Match[str] | None = None
    start, body = 0, list[str]()

    def close() -> None:
        if header is not None:
            cells.append(_cell(source, start, header, body))

    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith(("# %%", "#%%")):
            close()
            header, start, body = _HEADER.match(line), number, []
            if header is None:
                raise _error(source, number, f'cannot read the cell mark {line!r}. Use: # %% [markdown] tags=["name"]')
        elif header is None and line.strip():
            raise _error(source, number, "text before the first cell mark (# %%)")
        else:
            body.append(line)
    close()
    return cells


def _cell(source: Path, start: int, header: re.Match[str], body: list[str]) -> Cell:
    tags = tuple(json.loads(header["tags"] or "[]"))
    markdown = header["kind"] is not None
    first = next((index for index, line in enumerate(body) if line.strip()), len(body))
    last = max((index for index, line in enumerate(body) if line.strip()), default=-1)
    lines = body[first : last + 1]
    start_of_text = start + 1 + first
    if not lines:
        raise _error(source, start, "an empty cell")
    if markdown:
        for offset, line in enumerate(lines):
            if line and not (line == "#" or line.startswith("# ")):
                raise _error(source, start_of_text + offset, 'a line of a text cell must start with "# "')
        lines = [line[2:] for line in lines]
    return Cell(start_of_text, markdown, tags, tuple(lines))


@dataclass(frozen=True)
class Piece:
    """Some lines of a code cell: what the solution edition reads, and what the student edition reads."""

    filled: tuple[str, ...]
    stubbed: tuple[str, ...]

    @property
    def is_answer(self) -> bool:
        """Whether this is a marked solution."""
        return self.filled != self.stubbed


def pieces(source: Path, cell: Cell) -> list[Piece]:
    """A cell in pieces, marked solutions apart; the marks themselves are in none. SourceError on a malformed one."""
    if cell.markdown:
        return [Piece(cell.lines, cell.lines)]
    found: list[Piece] = []
    region: list[str] | None = None
    opened = 0
    for number, line in enumerate(cell.lines, start=cell.line):
        text = line.strip()
        if text == "# solution":
            if region is not None:
                raise _error(source, number, f"a second # solution before the # end of line {opened}")
            region, opened = [], number
        elif text == "# end":
            if region is None:
                raise _error(source, number, "# end without a # solution before it")
            found.append(Piece(tuple(region), tuple(_stub(source, opened, region))))
            region = None
        elif region is not None:
            region.append(line)
        elif match := _TRAILING.match(line):
            found.append(Piece((line.removesuffix("  # solution"),), (f"{match['indent']}{match['name']} = ...",)))
        elif _LOOKS_LIKE_A_MARK.search(line):
            raise _error(
                source, number, f'cannot read the mark in {text!r}. Use "# solution", "# end" or "x = 1  # solution"'
            )
        else:
            found.append(Piece((line,), (line,)))
    if region is not None:
        raise _error(source, opened, "# solution without an # end in the same cell")
    _require_marks_and_check(source, cell, sum(piece.is_answer for piece in found))
    return found


def _two_versions(source: Path, cell: Cell) -> tuple[list[str], list[str]]:
    """(lines with the answer, lines with three dots)."""
    parts = pieces(source, cell)
    return [line for part in parts for line in part.filled], [line for part in parts for line in part.stubbed]


def _require_marks_and_check(source: Path, cell: Cell, marks: int) -> None:
    exercise_id = cell.exercise_id
    if exercise_id is None:
        if marks:
            raise _error(source, cell.line, 'a solution outside an exercise. Tag the cell: tags=["exercise:03.1"]')
        return
    if exercise_id not in EXERCISES:
        raise _error(source, cell.line, f"exercise {exercise_id} is not registered in comera_lab.teaching.exercises")
    if not marks:
        raise _error(source, cell.line, f"exercise {exercise_id} has no # solution")
    if f'check("{exercise_id}", ' not in "\n".join(cell.lines):
        raise _error(source, cell.line, f'exercise {exercise_id} does not call check("{exercise_id}", ...)')


def _stub(source: Path, opened: int, region: list[str]) -> list[str]:
    """What the student reads in place of `region`: `return ...`, or one `name = ...` per assigned name."""
    if not any(line.strip() for line in region):
        raise _error(source, opened, "an empty solution")
    indent = next(line for line in region if line.strip())
    indent = indent[: len(indent) - len(indent.lstrip())]
    code = textwrap.indent(textwrap.dedent("\n".join(region)), "    ")
    try:
        function = ast.parse(f"def solution():\n{code}").body[0]
    except SyntaxError as problem:
        raise _error(source, opened + (problem.lineno or 2) - 1, f"the solution is not Python: {problem.msg}") from None
    assert isinstance(function, ast.FunctionDef)
    if isinstance(function.body[-1], ast.Return):
        return [f"{indent}return ..."]
    names = [
        target.id
        for statement in function.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    return [f"{indent}{name} = ..." for name in dict.fromkeys(names)] or [f"{indent}..."]


def _cell_ids(stem: str, cells: list[Cell]) -> list[str]:
    """Ids from the text of the cells: editing one cell changes one id, and twins get a counter."""
    counts: dict[str, int] = {}
    ids = []
    for cell in cells:
        digest = hashlib.sha256("\n".join([str(cell.markdown), *cell.lines]).encode()).hexdigest()[:10]
        counts[digest] = counts.get(digest, 0) + 1
        ids.append(f"{stem[:2]}-{digest}" + (f"-{counts[digest]}" if counts[digest] > 1 else ""))
    return ids


def _add_picture(source: Path, cells: list[dict[str, Any]], prefix: str) -> None:
    """Put the picture of the panel, if there is one, under the first code cell, which shows the panel."""
    text = picture_cell(source, prefix)
    place = next((index for index, cell in enumerate(cells) if cell["cell_type"] == "code"), None)
    if text is not None and place is not None:
        lines = tuple(text.split("\n"))
        cell = _notebook_cell(Cell(0, True, (), lines), f"{source.stem[:2]}-picture", list(lines))
        cells.insert(place + 1, cell)


def _announce_solutions(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say under the title that this edition has the answers."""
    if cells and cells[0]["cell_type"] == "markdown":
        title, *rest = cells[0]["source"]
        note = "*Solution edition: every answer is filled in.*"
        cells[0]["source"] = [title.rstrip("\n") + "\n", "\n", note + ("\n" if rest else ""), *rest]
    return cells


def _notebook_cell(cell: Cell, cell_id: str, lines: list[str]) -> dict[str, Any]:
    source = [line + "\n" for line in lines[:-1]] + lines[-1:]
    metadata = {"tags": list(cell.tags)} if cell.tags else {}
    if cell.markdown:
        return {"cell_type": "markdown", "id": cell_id, "metadata": metadata, "source": source}
    return {
        "cell_type": "code", "execution_count": None, "id": cell_id, "metadata": metadata, "outputs": [],
        "source": source,
    }  # fmt: skip


def _notebook(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {"cells": cells, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}


def _to_text(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _error(source: Path, line: int, problem: str) -> SourceError:
    return SourceError(f"{source.name}, line {line}: {problem}")
