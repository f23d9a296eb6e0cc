"""A learner's journey through lessons 00 and 04 in a real browser, and the lessons on a machine like Binder's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lab_driver import LabDriver, headless_browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# The first five lessons are the ones that everybody opens; of the others Binder's 2 GiB leave room for 1.2.
BINDER_MIB, PEAK_MIB, LATER_PEAK_MIB = 2048, 1024, 1229
STOP_MS = 500

# JupyterLab asks every fresh kernel for widgets before ipywidgets is imported; nobody sees it.
HARMLESS = re.compile(r"No such comm")


def faults(lab):
    return [text for text in lab.faults() if not HARMLESS.search(text)]


@pytest.fixture(scope="module")
def browser():
    with headless_browser() as found:
        yield found


@pytest.fixture(scope="module", params=["00_start_here", "04_a_tt_layer_that_trains"])
def lab(request, browser, tmp_path_factory):
    """One browser for each lesson; the tests below go through it from top to bottom."""
    with LabDriver(browser, NOTEBOOKS / f"{request.param}.ipynb", tmp_path_factory.mktemp("lab")) as driver:
        driver.kind = "start" if request.param.startswith("00") else "race"
        driver.run_all()
        yield driver
        assert not faults(driver)


def panel(lab):
    return f".t-panel-{lab.kind}"


def newest_x(lab):
    return max((trace["x"][-1] for trace in lab.traces(f"{panel(lab)} .t-curves") if trace["x"]), default=0)


def status(lab):
    return lab.text(f"{panel(lab)} .t-status")


def test_the_slider_follows_mouse_and_keyboard_and_the_picture_follows_the_slider(lab):
    slider = f"{panel(lab)} .t-rank"
    picture = ".t-cores" if lab.kind == "start" else None
    before = lab.painted(picture) if picture else None
    dragged = lab.drag(slider, 0.5)
    assert dragged > 8
    assert lab.press(slider, "ArrowLeft", 2) == dragged - 2
    if picture:
        lab.until("the cores to be drawn again", lambda: lab.painted(picture) != before)
        lab.until("the text to follow", lambda: f"Rank {dragged - 2:.0f}:" in lab.text(".t-line"))


def test_a_typed_value_moves_the_slider_and_an_illegal_one_is_explained(lab):
    entry, slider = f"{panel(lab)} .t-rank-entry", f"{panel(lab)} .t-rank"
    lab.type(entry, "12")
    lab.until("the slider to follow", lambda: lab.value(slider) == 12)
    lab.type(entry, "none")
    message = f"{panel(lab)} .t-rank-message"
    lab.until("a sentence", lambda: "must be a whole number from 1 to" in lab.text(message))
    assert lab.value(slider) == 12
    lab.type(entry, "4")
    lab.until("the sentence to go", lambda: not lab.text(message).strip())


def test_training_draws_stop_answers_and_resume_goes_on(lab):
    if lab.kind == "race":
        lab.type(f"{panel(lab)} .t-seconds-entry", "30")
    lab.click(f"{panel(lab)} .t-start")
    lab.until("the curve to grow", lambda: newest_x(lab) > 0, 30)
    early = newest_x(lab)
    drawn = lab.painted(f"{panel(lab)} .t-curves")
    lab.until("more of it", lambda: newest_x(lab) > early, 30)
    lab.until("it on the screen", lambda: lab.painted(f"{panel(lab)} .t-curves") != drawn)
    assert lab.page.locator(f"{panel(lab)} .t-start").first.is_disabled()
    answer_ms = lab.answer_ms(f"{panel(lab)} .t-stop", f"{panel(lab)} .t-status", "stopped at step")
    print(f"Stop answered in {answer_ms:.0f} ms")
    assert answer_ms < STOP_MS
    stopped = newest_x(lab)
    words = status(lab)
    lab.page.wait_for_timeout(700)
    assert newest_x(lab) == stopped
    assert status(lab) == words
    lab.click(f"{panel(lab)} .t-resume")
    lab.until("the curve to go on", lambda: newest_x(lab) > stopped, 20)
    lab.click(f"{panel(lab)} .t-stop")
    lab.until("stopped again", lambda: "stopped at step" in status(lab), 5)


def test_the_numbers_shown_are_those_of_the_recorded_rows(lab):
    """Counts, loss, accuracy and step time on the page against the rows of the trainers in the kernel."""
    rows = json.loads(
        lab.kernel(
            "import gc, json, statistics\n"
            "from comera_lab.panels.lanes import Lane\n"
            "from comera_lab.experiments.recorder import StepRow, EvalRow\n"
            f"from comera_lab.panels import {lab.kind.capitalize()}Panel as Kind\n"
            "panel = next(o for o in gc.get_objects() if type(o) is Kind and o.runner.state == 'stopped')\n"
            "lanes = panel.lanes if hasattr(panel, 'lanes') else [panel.lane]\n"
            "out = []\n"
            "for lane in lanes:\n"
            "    steps = [r for r in lane.trainer.rows if isinstance(r, StepRow)]\n"
            "    tests = [r for r in lane.trainer.rows if isinstance(r, EvalRow)]\n"
            "    out.append(dict(steps=len(steps), loss=sum(r.loss_nats for r in steps[-10:]) / len(steps[-10:]),\n"
            "        accuracy=tests[-1].accuracy if tests else None, \n"
            "        ms=statistics.median(r.step_time_ms for r in steps[3:]),\n"
            "        parameters=lane.model.parameter_count()))\n"
            "print(json.dumps(out))\n"
        )
    )
    if lab.kind == "start":
        (row,) = rows
        text = lab.text(f"{panel(lab)} .t-summary")
        assert f"test accuracy {100 * row['accuracy']:.1f} %" in text
        assert f"training loss {row['loss']:.2g} nats" in text
        assert f"{row['ms']:.1f} ms a step" in text
        assert f"stopped at step {row['steps']:,}" in status(lab)
        return
    cells = [line.inner_text().split("\t") for line in lab.page.locator(f"{panel(lab)} .t-numbers tr").all()[1:]]
    for row, shown in zip(rows, cells, strict=True):
        name, rate, parameters, _, ms, steps, loss, accuracy = (cell.strip() for cell in shown)
        assert (name, rate) in (("dense", "0.001"), ("tensor train", "0.01"))
        assert parameters == f"{row['parameters']:,}"
        assert (ms, steps) == (f"{row['ms']:.2f}", f"{row['steps']:,}")
        assert (loss, accuracy) == (f"{row['loss']:.2g}", f"{100 * row['accuracy']:.1f} %")


def test_a_second_run_of_every_cell_leaves_one_live_panel(lab):
    lab.run_all()
    slider = f"{panel(lab)} .t-rank"
    before = lab.value(slider)
    assert lab.press(slider, "ArrowRight") == before + 1


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_L02_each_lesson_fits_a_small_machine(name, browser, tmp_path, capsys):
    """2 GiB and one core, as on Binder: everything runs, trains where there is a run bar, peaks below 1 GiB or 1.2."""
    notebook = NOTEBOOKS / f"{name}.ipynb"
    with LabDriver(browser, notebook, tmp_path, limit_mib=BINDER_MIB, cores={0}) as lab:
        lab.run_all()
        start = lab.page.locator(".t-start:not([disabled])")
        if start.count():
            start.first.click()
            lab.page.wait_for_timeout(4000)
            stop = lab.page.locator(".t-stop:not([disabled])")
            if stop.count():
                stop.first.click()
                lab.until("the run to end", lambda: "stopped" in lab.text(".t-status"), 10)
        assert not faults(lab)
        with capsys.disabled():
            print(f"\n  {name}: peak " + ", ".join(f"{who} {mib:.0f} MiB" for who, mib in lab.peak_mib.items()))
        assert lab.peak_mib["server + kernel"] < (PEAK_MIB if name < "05" else LATER_PEAK_MIB)
