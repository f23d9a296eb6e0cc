"""A lesson as one page: small, complete, asking nobody for anything, and alive in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from playwright.sync_api import sync_playwright

from comera_lab.__main__ import main
from comera_lab.panels import page
from comera_lab.teaching import static_page
from comera_lab.teaching.static_page import ALPHABET, MAX_BYTES, encode85, export_page, page_text, run_lesson

ROOT = Path(__file__).resolve().parents[1]


def decode85(text: str) -> bytes:
    words = []
    for place in range(0, len(text), 5):
        number = 0
        for character in text[place : place + 5]:
            number = 85 * number + ALPHABET.index(character)
        words.append(number)
    return struct.pack(f">{len(words)}I", *words)


@pytest.fixture
def lesson(monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """An executed notebook with two figures, as panels leave them on a page."""
    monkeypatch.setattr(page, "_loaded", [])
    cells = [
        nbformat.v4.new_markdown_cell(
            "# 02 Low <i>rank</i>\n\n[03](03_x.ipynb) [04](04_y.ipynb) ![a knife](images/x.png)"
        )
    ]
    for colour in ("red", "blue"):
        figure = go.Figure(go.Scatter(y=[1, 2, 3], line={"color": colour}))
        bundle = page.page_bundle(figure, f"three numbers < in {colour}")
        cells.append(nbformat.v4.new_code_cell("x = 1", outputs=[nbformat.v4.new_output("execute_result", bundle)]))
    cells.append(
        nbformat.v4.new_code_cell("print(1)", outputs=[nbformat.v4.new_output("stream", text="\x1b[31m<1>\x1b[0m")])
    )
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 1001])
def test_the_code_of_the_data_can_be_read_back_and_means_nothing_to_html(length: int) -> None:
    data = bytes((7 * k * k + 255 * (k == 0)) % 256 for k in range(length))
    assert decode85(encode85(data))[:length] == data
    assert len(set(ALPHABET)) == 85 and not set(ALPHABET) & set("<>&\"'`\\ \n")


def test_a_page_holds_the_library_once_every_figure_and_every_number_as_text(lesson: nbformat.NotebookNode) -> None:
    text = page_text(lesson, "02_demo", {"03_x"})
    packed = re.search(r'id="data">(.*?)</script>', text)
    assert packed is not None
    scripts = json.loads(zlib.decompressobj().decompress(decode85(packed[1])))
    assert [len(source) > 1_000_000 for source in scripts] == [True, False, False]
    assert "plotly.js" in scripts[0][:200] and all("Plotly.newPlot" in source for source in scripts[1:])
    assert text.count('class="plotly-graph-div"') == 2
    assert "three numbers &lt; in red" in text and "<pre>&lt;1&gt;</pre>" in text
    assert '<a href="03_x.html">03</a> 04 <em>a knife</em>' in text
    assert "<title>02 Low rank</title>" in text
    assert len(text.encode()) < MAX_BYTES


def test_a_page_names_no_other_address(lesson: nbformat.NotebookNode) -> None:
    text = page_text(lesson, "02_demo")
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)
    assert "@import" not in text and "url(" not in text


def _notebook(path: Path, code: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), path)
    return path


def test_what_cannot_be_exported_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match="a lesson must exist, got .*none.ipynb"):
        run_lesson(tmp_path / "none.ipynb")
    (tmp_path / "text.ipynb").write_text("no notebook")
    with pytest.raises(ValueError, match="a lesson must be a notebook, got text.ipynb"):
        run_lesson(tmp_path / "text.ipynb")
    assert main(["export", "--html", str(tmp_path / "text.ipynb"), "--out", str(tmp_path)]) == 2
    assert "a lesson must be a notebook, got text.ipynb" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "text.ipynb")])
    assert "--html" in capsys.readouterr().err


def test_a_page_that_is_too_large_is_not_written(
    tmp_path: Path, lesson: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson.cells[-1].outputs[0].text = "x" * MAX_BYTES
    monkeypatch.setattr(static_page, "run_lesson", lambda notebook: lesson)
    with pytest.raises(ValueError, match="a page must be smaller than 2,000,000 bytes, got .* of 02.ipynb"):
        export_page(tmp_path / "02.ipynb", tmp_path / "02.html")
    assert not (tmp_path / "02.html").exists()


@pytest.mark.slow
def test_a_failing_cell_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = _notebook(tmp_path / "bad.ipynb", "1 / 0")
    assert main(["export", "--html", str(notebook), "--out", str(tmp_path)]) == 1
    assert "a cell of bad.ipynb failed: ZeroDivisionError: division by zero" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.browser
def test_an_exported_lesson_is_drawn_from_a_file_without_any_request(tmp_path: Path) -> None:
    lesson = ROOT / "notebooks" / "solutions" / "00_start_here.ipynb"
    assert main(["export", "--html", str(lesson), "--out", str(tmp_path)]) == 0
    path = tmp_path / "00_start_here.html"
    assert path.stat().st_size < MAX_BYTES
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_context(offline=True).new_page()
        asked, errors = [], []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(path.as_uri())
        figure = tab.locator(".plotly-graph-div").first
        figure.locator(".main-svg").first.wait_for(timeout=60_000)
        before = figure.evaluate("div => div.layout.sliders[0].active")
        steps = figure.locator(".slider-rail-touch-rect")
        steps.scroll_into_view_if_needed()
        box = steps.bounding_box()
        assert box is not None
        tab.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
        tab.wait_for_function(
            "before => document.querySelector('.plotly-graph-div').layout.sliders[0].active !== before", arg=before
        )
        assert tab.locator("#note").count() == 0
        assert asked == [path.as_uri()] and errors == []
        browser.close()
