"""Lesson 07 in a real browser: drag a table beyond what can be built, time a small one, train three recommenders."""

import re
from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "07_embedding_tables.ipynb"
TABLE, FLIGHTS = ".t-panel-embedding", ".t-panel-recommender"


def test_a_learner_sizes_a_table_times_it_and_trains_recommenders(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        assert lab.drag(".t-exponent", 1.0) == 9
        lab.until("the sizes", lambda: "dense table (computed, not built)" in lab.text(".t-table-tiles"))
        lab.until("the line", lambda: "1,000,000,000 rows × 64" in lab.text(".t-table-line"))
        lab.type(".t-exponent-entry", "4")
        lab.until("the slider to follow", lambda: lab.value(".t-exponent") == 4)
        lab.click(f"{TABLE} .t-start")
        lab.until("the times", lambda: "Measured here for 4,096 ids" in lab.text(".t-table-line"), 30)
        lab.until("both points", lambda: [len(lab.traces(".t-table")[k]["x"]) for k in (1, 3)] == [1, 1])

        lab.type(".t-flight_steps-entry", "16")
        lab.until("the slider to follow", lambda: lab.value(".t-flight_steps") == 16)
        lab.click(f"{FLIGHTS} .t-start")
        lab.until("the end", lambda: "finished after 48 steps of all lanes" in lab.text(f"{FLIGHTS} .t-status"), 90)
        words = re.compile(r"Dev AUC after equal steps: dense 0\.\d{4}; \d+× smaller, hashed 0\.\d{4} and tensor train")
        lab.until("the verdict", lambda: words.search(lab.text(".t-flight-verdict")))
        assert all(trace["x"] for trace in lab.traces(".t-flights"))
        assert [text for text in lab.faults() if "No such comm" not in text] == []
