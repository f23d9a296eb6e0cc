"""Lesson 12 in a real browser: drag through a kernel, choose another, fill in a puzzle and watch it."""

from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "solutions" / "12_kernels_without_a_gpu.ipynb"
PANEL = ".t-panel-kernel-step"
WHERE, NUMBERS = f"{PANEL} .t-where", f"{PANEL} .t-numbers"


def choose(lab, control, label):
    lab.page.locator(f"{PANEL} .t-{control} select").first.select_option(label=label)


def test_a_learner_steps_through_kernels_and_watches_their_own(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        lab.traces(f"{PANEL} .t-memory")
        lab.press(f"{PANEL} .t-step", "ArrowRight", 2)
        lab.until("the store", lambda: "writes 4 elements of out" in lab.text(WHERE))
        lab.until("the written cells", lambda: lab.painted(f"{PANEL} .t-memory").count(">W<") == 4)
        lab.type(f"{PANEL} .t-program-entry", "3")
        lab.until("the masked lanes", lambda: "3 of 3 lie outside out" in lab.text(WHERE))
        choose(lab, "kernel", "tiled product")
        lab.until("other tensors", lambda: "w</tspan> 6 × 13" in lab.painted(f"{PANEL} .t-memory"))
        choose(lab, "kernel", "TT contraction")
        lab.drag(f"{PANEL} .t-program", 0.5)
        lab.type(f"{PANEL} .t-step-entry", "16")
        lab.until("the fused store", lambda: "writes" in lab.text(WHERE))
        choose(lab, "whose", "me, as checked last")
        lab.until("the learner's kernel", lambda: "mask=out_ok" in lab.text(WHERE))
        assert "agrees with torch (computed here)" in lab.text(NUMBERS)
        assert "runs here, too" in lab.text(f"{PANEL} .t-engine")
        assert [text for text in lab.faults() if "No such comm" not in text] == []
