"""The reference page agrees with the docstrings, and every public name has one."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from comera_lab.teaching import reference


def test_the_page_is_what_the_docstrings_say() -> None:
    """In a process of its own: other tests may have patched what the page shows."""
    code = "from comera_lab.teaching import reference; print(reference.reference_drift())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_drift_is_noticed_and_mended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "REFERENCE.md"
    monkeypatch.setattr(reference, "PAGE", page)
    assert "REFERENCE.md differs from the docstrings" in reference.reference_drift()[0]
    assert reference.write_reference() == [page]
    assert (reference.write_reference(), reference.reference_drift()) == ([], [])
    page.write_text(page.read_text(encoding="utf-8").replace("TTLinear", "TTLine"), encoding="utf-8")
    assert len(reference.reference_drift()) == 1


@pytest.mark.parametrize("room", reference.ROOMS)
def test_every_public_name_has_a_docstring(room: str) -> None:
    module = importlib.import_module(room)
    things = {name: getattr(module, name) for name in module.__all__}
    bare = [name for name, thing in things.items() if inspect.isroutine(thing) and not inspect.getdoc(thing)]
    bare += [name for name, thing in things.items() if inspect.isclass(thing) and not thing.__doc__]
    assert bare == []


PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)|<img[^>]*>")


def test_every_picture_of_a_page_exists_and_has_a_text_that_describes_it() -> None:
    root = reference.NOTEBOOKS.parent
    pages = [root / "README.md", *sorted(reference.NOTEBOOKS.glob("source/*.py")), *sorted(root.glob("data/*.md"))]
    pictures = [(page, found) for page in pages for found in PICTURE.finditer(page.read_text(encoding="utf-8"))]
    assert pictures
    for page, found in pictures:
        if "badge" in found[0]:
            continue
        alt = found["alt"] or ""
        assert len(alt.split()) >= 6, f"{page.name}: {found[0]} needs a text that says what is to be seen"
        beside = page.parent if page.suffix == ".md" else reference.NOTEBOOKS
        assert (beside / found["path"]).is_file(), f"{page.name}: {found['path']} is missing"
