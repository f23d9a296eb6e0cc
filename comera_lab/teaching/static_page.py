"""A lesson as one self-contained page: text, code, results and figures with their sliders, without kernel or network.

plotly.js is 4.8 MB, which is most of what a page would weigh. It goes in once, deflated (the browser inflates it with
DecompressionStream: Chrome 80, Firefox 113, Safari 16.4 or newer) and written in 85 harmless characters, five for four
bytes; the data of all figures goes with it. Where a browser cannot, the numbers stand there as text.
"""

from __future__ import annotations

import html
import json
import os
import re
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from comera_lab.runtime import require

# Printable ASCII but those that mean something in HTML or in a JavaScript string: < > & " ' ` \
ALPHABET = "".join(chr(code) for code in range(33, 127) if chr(code) not in "<>&\"'`\\")[:85]
MAX_BYTES = 2_000_000
CELL_SECONDS = 300

_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PICTURE = re.compile(r"<img[^>]*?>")
_LINK = re.compile(r'<a href="([^"]+?)\.ipynb">(.*?)</a>', re.DOTALL)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, sans-serif; max-width: 1000px;
  margin: 0 auto; padding: 12px 20px 60px; }
h1, h2, h3 { line-height: 1.25; }
pre { font-size: 14px; line-height: 1.4; overflow-x: auto; padding: 8px 12px; border-radius: 4px;
  background: rgba(128,128,128,.12); }
.highlight { background: none !important; }
.anchor-link { display: none; }
.out pre { white-space: pre-wrap; background: none; border-left: 3px solid rgba(128,128,128,.4); border-radius: 0; }
.out { margin: 4px 0 14px; overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; }
.made { color: #767676; font-size: 14px; }
.plotly-graph-div { max-width: none; }
"""
_LOADER = """
const note = document.getElementById('note');
(async () => {
  const text = document.getElementById('data').textContent.trim(), code = new Uint8Array(128);
  [...%(alphabet)s].forEach((c, i) => { code[c.charCodeAt(0)] = i; });
  const bytes = new Uint8Array(text.length / 5 * 4);
  for (let i = 0, o = 0; i < text.length; i += 5) {
    let n = 0;
    for (let k = 0; k < 5; k++) n = n * 85 + code[text.charCodeAt(i + k)];
    bytes[o++] = n / 16777216 & 255; bytes[o++] = n >>> 16 & 255; bytes[o++] = n >>> 8 & 255; bytes[o++] = n & 255;
  }
  const stream = new Blob([bytes.subarray(0, %(length)d)]).stream().pipeThrough(new DecompressionStream('deflate'));
  const scripts = JSON.parse(await new Response(stream).text());
  window.PlotlyConfig = {MathJaxConfig: 'local'};
  for (const source of scripts) {
    const script = document.createElement('script');
    script.textContent = source;
    document.body.appendChild(script);
  }
  note.remove();
})().catch(error => { note.textContent = 'This browser cannot draw the figures; their numbers are below. ' + error; });
"""


def export_page(notebook: Path, out: Path, neighbours: Collection[str] = ()) -> int:
    """Run a lesson and write it as a page; returns the size in bytes.

    `neighbours` are stems of lessons exported into the same folder: links to them lead there, links to others become
    text. ValueError where the file is no notebook or the page would be too large, RuntimeError where a cell fails.
    """
    page = page_text(run_lesson(notebook), notebook.stem, neighbours)
    size = len(page.encode())
    if size > MAX_BYTES:
        raise ValueError(f"a page must be smaller than {MAX_BYTES:,} bytes, got {size:,} of {notebook.name}. "
                         "Print less in it, or draw fewer points.")  # fmt: skip
    out.write_text(page, encoding="utf-8")
    return size


def run_lesson(notebook: Path) -> Any:
    """The notebook, executed in its folder as nobody sits at it: panels give their static twins."""
    nbformat, nbclient = require("nbformat", "pages"), require("nbclient", "pages")
    if not notebook.is_file():
        raise FileNotFoundError(f"a lesson must exist, got {notebook}. Lessons are in the folder notebooks.")
    try:
        lesson = nbformat.read(notebook, 4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError):
        raise ValueError(
            f"a lesson must be a notebook, got {notebook.name}. Give a file that ends in .ipynb."
        ) from None
    folder = {"metadata": {"path": str(notebook.resolve().parent)}}
    client = nbclient.NotebookClient(lesson, timeout=CELL_SECONDS, kernel_name="python3", resources=folder)
    try:
        client.execute(env={**os.environ, "COMERA_LAB_FIGURES": ""})
    except nbclient.exceptions.CellExecutionError as error:
        raise RuntimeError(f"a cell of {notebook.name} failed: {error.ename}: {error.evalue}") from error
    return lesson


def page_text(lesson: Any, stem: str, neighbours: Collection[str] = ()) -> str:
    """An executed notebook as HTML that asks for nothing else."""
    require("nbconvert", "pages")
    from nbconvert.filters import Highlight2HTML, markdown2html_mistune
    from pygments.formatters import HtmlFormatter

    highlight = Highlight2HTML(pygments_lexer="python")
    scripts: list[str] = []
    parts = []
    for cell in lesson.cells:
        if cell.cell_type == "markdown":
            parts.append(_links(_pictures(markdown2html_mistune(cell.source)), neighbours))
        elif cell.cell_type == "code":
            parts.append(highlight(cell.source))
            parts += [f'<div class="out">{_output(output, scripts)}</div>' for output in cell.outputs]
    title = re.search(r"<h1[^>]*>(.*?)(<a |</h1>)", parts[0])
    name = re.sub(r"<[^>]+>", "", title[1]) if title else stem
    packed = zlib.compress(json.dumps(_order(scripts)).encode(), 9) if scripts else b""
    loader = _LOADER % {"alphabet": json.dumps(ALPHABET), "length": len(packed)}
    ending = (f'<script type="application/octet-stream" id="data">{encode85(packed)}</script>\n'
              f"<script>{loader}</script>" if scripts else "")  # fmt: skip
    colours = [HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark")]
    style = f"{_STYLE}{colours[0]} @media (prefers-color-scheme: dark) {{ {colours[1]} }}"
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{name}</title>",
        f"<style>{style}</style></head><body>",
        '<p class="made">A page of a lesson: nothing runs here, figures and their sliders work without a network.</p>',
        '<p class="made" id="note">Unpacking the figures ...</p>' if scripts else "", *parts, ending, "</body></html>",
    ])  # fmt: skip


def encode85(data: bytes) -> str:
    """Five characters of `ALPHABET` for four bytes, filled up with zeros."""
    words = struct.unpack(f">{-(-len(data) // 4)}I", data + bytes(-len(data) % 4))
    pairs = [high + low for high in ALPHABET for low in ALPHABET]
    text = []
    for word in words:
        rest, low = divmod(word, 7225)
        high, middle = divmod(rest, 7225)
        text.append(ALPHABET[high] + pairs[middle] + pairs[low])
    return "".join(text)


def _output(output: Any, scripts: list[str]) -> str:
    if output.output_type == "stream":
        return f"<pre>{html.escape(_ANSI.sub('', output.text))}</pre>"
    if output.output_type == "error":
        return f"<pre>{html.escape(_ANSI.sub('', chr(10).join(output.traceback)))}</pre>"
    data = output.get("data", {})
    if "text/html" not in data:
        return f"<pre>{html.escape(data.get('text/plain', ''))}</pre>"
    scripts += _SCRIPT.findall(data["text/html"])
    return _SCRIPT.sub("", data["text/html"])


def _order(scripts: list[str]) -> list[str]:
    """plotly.js first, then the figures; settings of the page are the loader's."""
    library = [source for source in scripts if len(source) > 1_000_000][:1]
    return library + [source for source in scripts if "Plotly.newPlot" in source and len(source) <= 1_000_000]


def _pictures(text: str) -> str:
    """Pictures of panels become their words: the panel itself stands beside them."""
    return _PICTURE.sub(lambda tag: "<em>" + (re.search(r'alt="([^"]*)"', tag[0]) or [tag[0], ""])[1] + "</em>", text)


def _links(text: str, neighbours: Collection[str]) -> str:
    def one(link: re.Match[str]) -> str:
        stem = link[1].rpartition("/")[2]
        return f'<a href="{stem}.html">{link[2]}</a>' if stem in neighbours else link[2]

    return _LINK.sub(one, text)
