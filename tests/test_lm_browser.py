"""Lesson 14 in a real browser: train a code model, stop it, ask it to complete, and read the four pools."""

from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "14_pretraining_a_code_model.ipynb"
PANEL = ".t-panel-code"
STATUS, NUMBERS, COMPLETION = f"{PANEL} .t-status", f"{PANEL} .t-numbers", f"{PANEL} .t-completion"


def test_a_learner_trains_a_code_model_stops_it_and_lets_it_complete(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        lab.click(f"{PANEL} .t-complete")
        lab.until("the reason", lambda: "There is no model yet" in lab.text(f"{PANEL} .t-error"))

        lab.type(f"{PANEL} .t-code_steps-entry", "40")
        lab.until("the slider to follow", lambda: lab.value(f"{PANEL} .t-code_steps") == 40)
        lab.page.locator(f"{PANEL} .t-code_method select").first.select_option(label="comera + coap")
        lab.click(f"{PANEL} .t-start")
        lab.until(
            "a test on the chart", lambda: any(trace["x"] for trace in lab.traces(f"{PANEL} .t-curves")[1::2]), 120
        )
        assert lab.page.locator(f"{PANEL} .t-complete").first.is_disabled()
        lab.click(f"{PANEL} .t-stop")
        lab.until("the training to stop", lambda: "stopped at step" in lab.text(STATUS), 60)
        lab.until("a text", lambda: "it writes" in lab.text(f"{PANEL} .t-growing"), 60)

        lab.page.locator(f"{PANEL} .t-prompt textarea").first.fill("class Reader:\n    def ")
        lab.click(f"{PANEL} .t-complete")
        lab.until("a completion", lambda: "class Reader:" in lab.text(COMPLETION), 60)
        assert lab.text(f"{PANEL} .t-candidates").count("%") == 5

        lab.click(f"{PANEL} .t-resume")
        lab.until("the end", lambda: "finished after 40 steps" in lab.text(STATUS), 120)
        lab.until("the pools", lambda: "4.23x" in lab.text(NUMBERS) and lab.text(NUMBERS).count("→") == 4, 60)
        assert [text for text in lab.faults() if "No such comm" not in text] == []
