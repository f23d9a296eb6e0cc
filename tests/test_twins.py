"""What readers without a kernel see of a panel: a picture with words, folded under it, in both editions."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from comera_lab.teaching.build import build_lesson
from comera_lab.teaching.twins import ALT, draw_pictures, picture_cell

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "notebooks" / "source").glob("*.py"))
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_lesson_has_a_picture_with_words_in_both_editions(source: Path) -> None:
    editions = build_lesson(source)
    for notebook, prefix in ((editions.student, "images/"), (editions.solution, "../images/")):
        cells = notebook["cells"]
        place = next(index for index, cell in enumerate(cells) if cell["id"].endswith("-picture"))
        assert cells[place - 1]["cell_type"] == "code" and "Panel()" in "".join(cells[place - 1]["source"])
        text = "".join(cells[place]["source"])
        found = re.search(r"!\[([^\]]{60,})\]\(([^)]+)\)", text)
        assert found is not None and found[2] == f"{prefix}{source.stem[:2]}_panel.png"
        assert " ".join(found[1].split()) == ALT[source.stem[:2]]
    picture = ROOT / "notebooks" / "images" / f"{source.stem[:2]}_panel.png"
    assert picture.read_bytes()[:8] == PNG and picture.stat().st_size < 150_000


def test_a_lesson_without_a_picture_gets_no_cell(tmp_path: Path) -> None:
    source = tmp_path / "source" / "02_demo.py"
    source.parent.mkdir()
    source.write_text("# %%\nx = 1\n")
    assert picture_cell(source) is None
    assert len(build_lesson(source).student["cells"]) == 1


@pytest.mark.slow
@pytest.mark.browser
def test_pictures_are_drawn_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "images").mkdir()
    for stem in ("T0_for_teachers", "03_tensor_trains_by_hand"):
        shutil.copy(ROOT / "notebooks" / "source" / f"{stem}.py", tmp_path / "source")
    for path in draw_pictures(tmp_path):
        assert path.read_bytes()[:8] == PNG and path.stat().st_size > 5_000
    assert len(list((tmp_path / "images").iterdir())) == 2
