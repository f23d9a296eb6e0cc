"""Lesson 06 in a real browser: train to a target, cut in the middle, and click a dot to get its settings back."""

import re
from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "06_hitting_a_compression_target.ipynb"
STATUS, NUMBERS = ".t-panel-ranks .t-status", ".t-panel-ranks .t-numbers"


def test_a_learner_trains_cuts_and_returns_to_a_dot(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        for name, text in (("early_steps", "400"), ("late_steps", "60"), ("gate_rate", "0.1"), ("gamma", "150")):
            lab.type(f".t-{name}-entry", text)
        lab.until("the slider to follow", lambda: lab.value(".t-gamma") == 150)
        lab.click(".t-panel-ranks .t-start")
        lab.until("some ranks to close", lambda: re.search(r"cores\s+13,188\s+(?!13,188)\d", lab.text(NUMBERS)), 60)
        lab.click(".t-panel-ranks .t-stop")
        lab.until("the run to stop", lambda: "stopped" in lab.text(STATUS))
        lab.click(".t-compact")
        lab.until("the costs of a step", lambda: "after the cut (measured here)" in lab.text(NUMBERS))
        lab.click(".t-panel-ranks .t-resume")
        lab.until("the end", lambda: "finished after 460 steps" in lab.text(STATUS), 60)
        met = re.compile(r"Target met: [\d,]+ of 3,956 core parameters")
        lab.until("the verdict", lambda: met.search(lab.text(".t-panel-ranks .t-verdict")))
        lab.until("a dot", lambda: lab.traces(".t-pareto")[1]["x"])

        lab.type(".t-gamma-entry", "20")
        lab.until("the slider to follow", lambda: lab.value(".t-gamma") == 20)
        dot = lab.page.locator(".t-pareto .trace.scatter").nth(1).locator("path.point").first
        dot.scroll_into_view_if_needed()
        box = dot.bounding_box()
        lab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        lab.until("the settings of the dot", lambda: lab.value(".t-gamma") == 150)
        lab.until("the line under the dots", lambda: "run 1 loaded: target 0.3" in lab.text(".t-pareto-line"))
        assert [text for text in lab.faults() if "No such comm" not in text] == []

