"""A picture of every lesson's first panel, for readers without a kernel: GitHub, nbviewer, a phone.

`comera-lab notebooks pictures` draws `notebooks/images/NN_panel.png` from the panels' static twins; the builder puts
each under its panel, folded, with these words for people who cannot see it.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

from comera_lab.runtime import require

ALT: dict[str, str] = {
    "00": "Six boxes in a row joined by bonds, the cores of a tensor train of rank 8, with their modes under them; a "
          "slider for the rank.",
    "01": "One bar of the memory of a training step in four parts: weights, grads, optimizer and activations; a slider "
          "for the batch size.",
    "02": "Left, the singular values of a matrix falling from kept to cut away; right, the matrix, what is kept and "
          "what is lost; a slider for the energy kept.",
    "03": "The cores of a tensor train as boxes joined by bonds, each with its three sizes; a slider for the rank of "
          "every bond.",
    "04": "Two curves of loss and of test accuracy over training seconds: a dense network and its tensor-train twin; a "
          "slider for the seconds.",
    "05": "Left, a strip for every bond that grows paler as ranks close during training; right, the number of weights "
          "falling to its target, and test accuracy.",
    "06": "The ranks of every bond during a training that has to meet a size: the number of weights falls to the "
          "dashed target; test accuracy below it.",
    "07": "Memory of an embedding table and of its tensor-train twin as the number of rows grows: a steep line and a "
          "nearly flat one.",
    "08": "The ranks of every bond during training, the number of weights, and test accuracy; the panel starts with "
          "digits and can be switched to pairs of texts.",
    "09": "Bars of the memory that optimizers keep, adamw, galore, flora and coap; a slider for the rank.",
    "10": "Bars of the memory that optimizers keep: adamw the longest, coap in 8 bits the shortest; a slider for the "
          "rank ratio.",
    "11": "Bars of the memory of optimizers for a diffusion model of convolutions; a slider for the rank ratio.",
    "12": "Rows of cells, the memory of a kernel; the cells that one program reads are coloured; a slider steps "
          "through its reads and writes.",
    "13": "A roofline: attainable speed against arithmetic for each byte moved, with points for dense, half-chain and "
          "fused products; a slider for the width.",
    "14": "Bars of the optimizer memory of a code model, adamw against coap; a slider for the size of the model.",
    "15": "Bars of the memory of one training step of a large model, method by method, against the memory of GPUs.",
    "16": "Bars of the memory of one training step for models and optimizers to choose from; a slider for the rank.",
    "T0": "The lessons of a course as bars, minute by minute, against the end of the session.",
}  # fmt: skip

# Their twins are empty until they have run.
_RUN_FIRST = ("RacePanel", "RankTrainingPanel")


def picture_cell(source: Path, prefix: str = "") -> str | None:
    """The text cell with the picture of a lesson, None where there is none."""
    number = source.stem[:2]
    name = f"images/{number}_panel.png"
    if number not in ALT or not (source.parent.parent / name).is_file():
        return None
    alt = "\n".join(_wrapped(ALT[number]))
    return (f"<details><summary>No kernel? The panel above looks like this.</summary>\n\n"
            f"![{alt}]({prefix}{name})\n\n</details>")  # fmt: skip


def draw_pictures(folder: Path) -> list[Path]:
    """Draw the picture of every lesson in the notebooks folder `folder`, in a browser without a network."""
    api = require("playwright.sync_api", "pictures of panels")
    figures: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for source in sorted((folder / "source").glob("*.py")):
        kind = re.search(r"^lab\.(\w+Panel)\(\)$", source.read_text(encoding="utf-8"), re.MULTILINE)
        if kind is None or source.stem[:2] not in ALT:
            continue
        if kind[1] not in drawn:
            drawn[kind[1]] = _static(kind[1])
        figures[source.stem[:2]] = drawn[kind[1]]
    page = "".join(
        f'<div id="t{number}" style="display:inline-block;padding:6px">'
        + figure.to_html(full_html=False, include_plotlyjs=place == 0, config={"displayModeBar": False})
        + "</div><br>"
        for place, (number, figure) in enumerate(figures.items())
    )
    written = []
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_context(offline=True).new_page()
        tab.set_viewport_size({"width": 1100, "height": 900})
        tab.set_content(f'<meta charset="utf-8"><body style="background:white">{page}')
        tab.locator(".main-svg").last.wait_for(timeout=60_000)
        for number in figures:
            written.append(folder / "images" / f"{number}_panel.png")
            tab.locator(f"#t{number}").screenshot(path=str(written[-1]))
        browser.close()
    return written


def _static(kind: str) -> Any:
    import comera_lab.panels as lab
    from comera_lab.teaching.course_panel import CoursePanel

    panel: Any = CoursePanel() if kind == "CoursePanel" else getattr(lab, kind)()
    if kind in _RUN_FIRST:
        panel.run(wait=True)
    return panel.static()


def _wrapped(text: str) -> list[str]:
    """Lines short enough for a notebook's source; the last one leaves room for the address."""
    lines = textwrap.wrap(text, 88)
    return [*lines[:-1], *textwrap.wrap(lines[-1], 70)]
