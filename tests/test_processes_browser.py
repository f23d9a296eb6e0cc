"""Lesson 15 in a real browser: plan a model, train with two processes, stop one run, choose another number."""

from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "solutions" / "15_beyond_one_machine.ipynb"
PANEL = ".t-panel-processes"
NUMBERS, BARS, STATUS = f"{PANEL} .t-process-numbers", f"{PANEL} .t-process-bars", f"{PANEL} .t-status"


def choose(lab, control, label):
    lab.page.locator(f"{PANEL} .t-{control} select").first.select_option(label=label)


def test_a_learner_trains_with_two_processes_and_stops_a_run(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        lab.traces(BARS)
        lab.click(f"{PANEL} .t-start")
        lab.until("both bars", lambda: "measured, process 1" in str(lab.traces(BARS)[0]["y"]), 120)
        assert "after 20 steps (measured here)" in lab.text(NUMBERS)
        choose(lab, "processes_optimizer", "coap")
        lab.until("a new prediction", lambda: "Nothing has been trained yet" in lab.text(NUMBERS))
        lab.type(f"{PANEL} .t-processes_steps-entry", "200")
        lab.click(f"{PANEL} .t-start")
        lab.until("running", lambda: lab.text(STATUS).startswith(("starting", "running")))
        lab.click(f"{PANEL} .t-stop")
        lab.until("stopped", lambda: "stopped at step" in lab.text(STATUS))
        assert [text for text in lab.faults() if "No such comm" not in text] == []
