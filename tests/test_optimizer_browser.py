"""Lesson 10 in a real browser: tick an optimizer, race, find the verdict locked, and unlock it with three seeds."""

from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "10_coap.ipynb"
PANEL = ".t-panel-optimizers"
STATUS, NUMBERS, VERDICT = f"{PANEL} .t-status", f"{PANEL} .t-numbers", f"{PANEL} .t-verdict"


def test_a_learner_races_optimizers_and_needs_three_seeds_for_a_verdict(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        lab.page.locator(f"{PANEL} .t-lanes-galore input").uncheck()
        lab.page.locator(f"{PANEL} .t-lanes-coap-8bit input").check()
        lab.until("the ticked ones in the table", lambda: "coap-8bit" in lab.text(NUMBERS))
        assert "galore" not in lab.text(NUMBERS)
        lab.type(f"{PANEL} .t-optimizer_steps-entry", "400")
        lab.until("the slider to follow", lambda: lab.value(f"{PANEL} .t-optimizer_steps") == 400)
        lab.click(f"{PANEL} .t-start")
        lab.until("a curve", lambda: any(trace["x"] for trace in lab.traces(f"{PANEL} .t-curves")), 60)
        lab.click(f"{PANEL} .t-stop")
        lab.until("the race to stop", lambda: "stopped at step" in lab.text(STATUS))
        lab.until("the lock", lambda: "One seed is an anecdote" in lab.text(VERDICT))
        kept = max(len(trace["x"]) for trace in lab.traces(f"{PANEL} .t-curves"))
        assert kept > 0, "results stay"

        lab.type(f"{PANEL} .t-optimizer_steps-entry", "40")
        lab.until("the slider to follow", lambda: lab.value(f"{PANEL} .t-optimizer_steps") == 40)
        lab.click(f"{PANEL} .t-seeds")
        lab.until("three seeds", lambda: "finished after 360 steps of all lanes" in lab.text(STATUS), 60)
        lab.until("the verdict", lambda: lab.text(VERDICT).count("of AdamW's bytes (measured here)") == 2)
        assert "anecdote" not in lab.text(VERDICT)
        lab.page.locator(f"{PANEL} .t-race_axis select").first.select_option(label="bytes")
        lab.until("a point for each lane", lambda: _points(lab) == [1, 1, 1])
        assert [text for text in lab.faults() if "No such comm" not in text] == []


def _points(lab):
    """Points of every lane's line of losses that is drawn."""
    return [len(trace["x"]) for trace in lab.traces(f"{PANEL} .t-curves")[1::4] if trace["x"]]
