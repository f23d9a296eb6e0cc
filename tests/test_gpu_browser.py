"""Lesson 13 in a real browser: drag a layer under the roof, measure this CPU, replay its recording."""

from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "13_real_gpu_runs.ipynb"
ROOF, TRACE = ".t-panel-roofline", ".t-panel-trace"


def choose(lab, where, label):
    lab.page.locator(f"{where} select").first.select_option(label=label)


def test_a_learner_finds_what_limits_a_layer_and_replays_a_recording(tmp_path):
    with headless_browser() as browser, LabDriver(browser, LESSON, tmp_path) as lab:
        lab.run_all()
        lab.traces(f"{ROOF} .t-roofline")
        lab.until("the flat roof", lambda: "arithmetic limits the dense" in lab.text(f"{ROOF} .t-line"))
        lab.type(f"{ROOF} .t-in_features-entry", "768")
        lab.type(f"{ROOF} .t-out_features-entry", "768")
        lab.until("its floors", lambda: "768 → 768" in lab.text(f"{ROOF} .t-line"))
        lab.drag(f"{ROOF} .t-rank", 0.9)
        lab.until("a large rank", lambda: "rank 64," not in lab.text(f"{ROOF} .t-line"))
        choose(lab, f"{ROOF} .t-device", "NVIDIA A100 SXM 80 GB")
        lab.until("the other roof", lambda: "NVIDIA A100 data sheet" in lab.text(f"{ROOF} .t-source"))
        lab.click(f"{ROOF} .t-start")
        lab.until("this machine", lambda: "measured here" in lab.text(f"{ROOF} .t-source"), 60)

        assert "No run on a GPU is recorded yet" in lab.text(f"{TRACE} .t-notes")
        assert "Computed from the ceilings" in lab.text(f"{TRACE} .t-label")
        choose(lab, f"{TRACE} .t-recording", "bench_cpu.jsonl")
        lab.until("its label", lambda: "(cpu), 20" in lab.text(f"{TRACE} .t-label"))
        choose(lab, f"{TRACE} .t-operation", "encoder_step")
        lab.until("its bars", lambda: list(lab.traces(f"{TRACE} .t-bars")[0]["y"])[:2] == ["dense", "tt"])
        assert "(recorded)" in lab.text(f"{TRACE} .t-line")
        assert [text for text in lab.faults() if "No such comm" not in text] == []
