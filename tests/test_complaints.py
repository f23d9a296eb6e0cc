"""The page `tests/COMPLAINTS.md`: each collected complaint of users of such kits, and the tests that keep it away."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "COMPLAINTS.md"
# How many complaints each group of the collection has
GROUPS = dict(zip("ABCDEFGHIJKLMS", (8, 4, 7, 8, 8, 12, 4, 9, 5, 7, 8, 7, 4, 6), strict=True))
LINE = re.compile(r"^\| ([A-Z]\d\d) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def named_by_id() -> dict[str, list[str]]:
    """Id -> `file::function` of every test whose name starts with that id."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (name := re.match(r"test_((?:[A-Z]\d\d_)+)", node.name)):
                for complaint in name[1].strip("_").split("_"):
                    found.setdefault(complaint, []).append(f"{path.name}::{node.name}")
    return found


def written(page: str, tests: dict[str, list[str]]) -> str:
    """The page with its last column made again."""
    return LINE.sub(
        lambda line: f"| {line[1]} | {line[2]} | {'<br>'.join(f'`{name}`' for name in tests.get(line[1], []))} |", page
    )


def test_every_complaint_has_its_test_and_the_page_names_it() -> None:
    page, tests = PAGE.read_text(encoding="utf-8"), named_by_id()
    listed = [line[1] for line in LINE.finditer(page)]
    assert listed == [f"{group}{number:02}" for group, count in GROUPS.items() for number in range(1, count + 1)]
    assert set(tests) == set(listed)
    assert page == written(page, tests), "run `python tests/test_complaints.py` and commit the page"


def test_a_complaint_without_a_test_is_noticed() -> None:
    page, tests = PAGE.read_text(encoding="utf-8"), named_by_id()
    del tests["A01"]
    assert page != written(page, tests)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), named_by_id()), encoding="utf-8")
