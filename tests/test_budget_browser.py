"""Lesson 16 in a real browser: explore, stop, register, three seeds for a claim, a report, and work that stays."""

import json
from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "16_capstone.ipynb"
PANEL = ".t-panel-budget"
START, PLAN, STATUS, POINTS = (f"{PANEL} .t-{name}" for name in ("start", "plan", "status", "points"))
ANSWERS = {
    "choice": "COAP on a dense network, because it fits and reads best.",
    "price": "Seven times the memory that tensor trains would have taken.",
    "doubt": "Forty steps are few; longer runs may change the order.",
}
IDLE = "window.lab.panel().sessionContext.session.kernel.status === 'idle'"


def choose(lab, name, option):
    lab.page.locator(f"{PANEL} .t-{name} select").first.select_option(label=option)


def test_a_learner_trains_within_a_budget_claims_and_reports(tmp_path, monkeypatch):
    work = tmp_path / "work.json"
    monkeypatch.setenv("COMERA_LAB_PROGRESS", str(work))
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        lab.until("the points of the lesson", lambda: lab.text(POINTS).count("a claim") == 2)
        choose(lab, "budget_optimizer", "coap")
        lab.until("a reason", lambda: "Cannot be trained" in lab.text(PLAN) and "nothing to project" in lab.text(PLAN))
        lab.click(START)
        lab.until("the refusal", lambda: "Choose adamw" in lab.text(f"{PANEL} .t-error"))
        choose(lab, "budget_model", "dense")
        lab.type(f"{PANEL} .t-budget_seconds-entry", "60")
        lab.type(f"{PANEL} .t-budget_steps-entry", "2000")
        lab.until("the plan", lambda: "2000 steps in 60 s" in lab.text(PLAN) and "within 8 MiB" in lab.text(PLAN))
        lab.click(START)
        lab.until("a curve", lambda: any(trace["x"] for trace in lab.traces(f"{PANEL} .t-curves")), 60)
        lab.click(f"{PANEL} .t-stop")
        lab.until("the run to stop", lambda: "stopped at step" in lab.text(STATUS))
        assert lab.text(START).strip() == "Explore", "half a run cannot be registered"

        lab.type(f"{PANEL} .t-budget_steps-entry", "40")
        lab.until("the plan", lambda: "40 steps" in lab.text(PLAN))
        lab.click(START)
        lab.until("the button", lambda: lab.text(START).strip() == "Register", 60)
        lab.click(START)
        lab.until("an open dot", lambda: "point 3" in lab.text(POINTS) and "an anecdote" in lab.text(POINTS))
        lab.until("it in the plot", lambda: [len(t["x"]) for t in lab.traces(f"{PANEL} .t-dots")][1:] == [2, 1, 0])
        lab.click(f"{PANEL} .t-seeds")
        lab.until("two more seeds", lambda: lab.text(START).strip() == "Register", 60)
        lab.click(START)
        lab.until("a claim", lambda: lab.text(POINTS).count("a claim") == 3)
        lab.until("it in the plot", lambda: [len(t["x"]) for t in lab.traces(f"{PANEL} .t-dots")][1:] == [3, 0, 0])

        for name, text in ANSWERS.items():
            box = lab.page.locator(f"{PANEL} .t-{name} textarea").first
            box.fill(text)
            box.blur()
        lab.until("it to be saved", lambda: "on this machine alone" in lab.text(f"{PANEL} .t-note"))
        lab.click(f"{PANEL} .t-export")
        lab.until("the files", lambda: "Written: comera_lab_report.md" in lab.text(f"{PANEL} .t-note"))
        report = json.loads((tmp_path / "root" / "comera_lab_report.json").read_text())
        assert report["answers"] == ANSWERS and report["defended"] == "point 3"
        assert "Right" in lab.kernel('print(check("16.4", lab.budget_report(), seconds=120))')

        with lab.page.expect_download() as download:
            lab.page.locator(".t-saved a.comera-download").first.click()
        assert json.loads(Path(download.value.path()).read_text()) == json.loads(work.read_text())
        assert [text for text in lab.faults() if "No such comm" not in text] == []

        lab.page.evaluate("window.lab.panel().sessionContext.session.kernel.restart()")
        lab.until("an idle kernel", lambda: lab.page.evaluate(IDLE), 60)
        back = lab.kernel("import comera_lab.panels as lab; panel = lab.BudgetPanel(); print(panel.table())")
        assert "point 3" in back
        assert lab.kernel("print(panel.state.answers['doubt'])").strip() == ANSWERS["doubt"]
        assert "16.4  Right" in lab.kernel('from comera_lab.teaching import progress; print(progress("16"))')
