"""What users of other kits complained about in widgets, threads and plots: each must not happen here.

These run in this process with real threads and real widgets; see test_panel_kernel.py for a real kernel.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import tomllib
from pathlib import Path

import ipywidgets
import pytest

import comera_lab.panels as lab
from comera_lab.panels import panel as panel_module
from comera_lab.panels.figures import training_curves
from comera_lab.panels.lanes import Lane, empty_curve
from comera_lab.panels.live import MAX_POINTS, History, LiveFigure, figure_mode
from comera_lab.panels.runner import Progress
from comera_lab.panels.state import LabState

ROOT = Path(__file__).parents[1]
PANELS = (lab.StartPanel, lab.ShapePanel, lab.MemoryPanel, lab.SpectrumPanel, lab.RacePanel,
          lab.RankTrainingPanel)  # fmt: skip
DRAGGED = {"start": "rank", "shape": "every", "memory": "width", "spectrum": "energy", "race": "width",
           "ranks": "gamma"}  # fmt: skip


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("comera-lab-")]


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def drag(control, moves=40, seconds=1.0):
    """`moves` positions of a slider within `seconds`; the CPU seconds that this thread spent on them."""
    spent = 0.0
    for k in range(1, moves + 1):
        began = time.thread_time()
        control.slider.value = control.low + (control.high - control.low) * k // (2 * moves)
        spent += time.thread_time() - began
        time.sleep(seconds / moves)
    return spent


# J: widgets, threads, interrupts


@pytest.mark.parametrize("kind", PANELS, ids=lambda kind: kind.kind)
def test_J01_a_dragged_slider_starts_no_work_and_draws_eight_times_a_second_at_most(kind):
    panel = kind(LabState())
    control = getattr(panel, DRAGGED[panel.kind])
    time.sleep(0.2)
    before = sum(figure.refreshes for figure in panel._figures)
    began = time.monotonic()
    drag(control)
    lasted = time.monotonic() - began
    assert not workers(), "costly work starts by a button only"
    assert sum(figure.refreshes for figure in panel._figures) - before <= 8 * lasted + 1


def test_J01_the_last_picture_belongs_to_the_last_value():
    panel = lab.StartPanel(LabState())
    drag(panel.rank, seconds=0.5)
    panel.rank.slider.value = 3
    until(lambda: "Rank 3:" in panel.cores.widget.description, 1.0)
    assert "1·14·3" in [note.text for note in panel.cores.figure.layout.annotations]


def test_J01_dragging_takes_less_than_a_fifth_of_a_core_from_training():
    panel = lab.StartPanel(LabState(), steps=100_000)
    panel.run()
    until(lambda: panel.lane is not None and len(panel.lane.steps) > 10)
    spent = drag(panel.rank)
    panel.stop(wait=True)
    assert spent < 0.2, "seconds of CPU in the callbacks during one second of dragging"


def test_J02_stop_ends_training_within_a_step_and_keeps_the_results():
    panel = lab.StartPanel(LabState(), steps=10_000)
    began = time.monotonic()
    panel.bar.start.click()
    assert time.monotonic() - began < 0.5
    until(lambda: panel.lane is not None and len(panel.lane.steps) > 20)
    panel.bar.stop.click()
    assert panel.runner.join(1.0)
    steps = len(panel.lane.steps)
    assert panel.runner.words == f"stopped at step {steps:,}"
    assert panel.runner.words in panel.bar.status.value
    assert panel.state.runs["start"]["steps"] == steps
    assert not panel.bar.start.disabled and panel.bar.stop.disabled and not panel.bar.resume.disabled


def test_J03_an_error_in_a_callback_is_a_card_and_the_controls_stay_usable(monkeypatch):
    panel = lab.StartPanel(LabState())
    monkeypatch.setattr("comera_lab.panels.start.tiles", lambda pairs: 1 / 0)
    panel.rank.slider.value = 5
    assert panel.card.text == "That did not work: ZeroDivisionError: division by zero"
    assert "<details>" in panel.card.widget.value and 'role="alert"' in panel.card.widget.value
    monkeypatch.undo()
    panel.rank.slider.value = 6
    assert panel.card.text == ""
    assert "Rank 6" in panel.line.value


def test_J03_an_error_in_a_late_redraw_is_a_card_too(monkeypatch):
    panel = lab.StartPanel(LabState())
    panel.rank.slider.value = 5
    monkeypatch.setattr("comera_lab.panels.start.draw_cores", lambda *arguments: 1 / 0)
    panel.rank.slider.value = 6
    until(lambda: "ZeroDivisionError" in panel.card.text, 2.0)


@pytest.mark.parametrize(("kind", "name", "typed"), [
    (lab.StartPanel, "rank", "0"), (lab.RacePanel, "seconds", "-1"), (lab.ShapePanel, "in_modes", " "),
])  # fmt: skip
def test_J03_illegal_input_gets_a_red_sentence(kind, name, typed):
    panel = kind(LabState())
    control = getattr(panel, name)
    control.entry.value = typed
    assert "must be" in control.message.value
    assert "comera-bad" in control.message._dom_classes
    assert not panel.bar.start.disabled


def test_J03_a_failed_run_is_a_card_and_the_next_start_works(monkeypatch):
    panel = lab.StartPanel(LabState(), steps=5)
    monkeypatch.setattr("comera_lab.panels.start.Lane", lambda *arguments: 1 / 0)
    panel.bar.start.click()
    panel.runner.join()
    assert panel.card.text == "The run failed: ZeroDivisionError: division by zero"
    assert "failed" in panel.bar.status.value and not panel.bar.start.disabled
    panel.rank.slider.value = 9
    assert panel.card.text, "the card of a run stays until the next run"
    monkeypatch.undo()
    assert panel.run(wait=True)
    assert panel.card.text == ""


@pytest.mark.parametrize("kind", PANELS, ids=lambda kind: kind.kind)
def test_J04_a_second_panel_replaces_the_first_and_handlers_run_once(kind):
    state = LabState()
    old = kind(state)
    panel = kind(state)
    assert old.closed
    assert len(old.widget.children) == 1, "the old place only says where the panel is now"
    control = getattr(panel, DRAGGED[panel.kind])
    seen = []
    control.on_change(seen.append)
    time.sleep(0.2)
    before = sum(figure.refreshes for figure in panel._figures), sum(figure.refreshes for figure in old._figures)
    control.slider.value = control.high - 3
    assert seen == [control.high - 3]
    after = sum(figure.refreshes for figure in panel._figures), sum(figure.refreshes for figure in old._figures)
    assert after[0] - before[0] <= 1
    assert after[1] == before[1]
    assert panel.card.text == ""


def test_J04_making_panels_again_and_again_leaves_no_widgets_behind():
    lab.StartPanel(LabState())
    gc.collect()
    before = len(ipywidgets.widgets.widget._instances)
    for _ in range(5):
        lab.StartPanel(LabState())
    gc.collect()
    after = len(ipywidgets.widgets.widget._instances)
    assert after - before <= 5 * 5, "an old panel keeps its place and the note there, with their layouts and styles"


def test_J05_two_clicks_train_once():
    panel = lab.StartPanel(LabState(), steps=60)
    panel.bar.start.click()
    time.sleep(0.05)
    assert panel.bar.start.disabled or not panel.runner.active
    panel.bar.start.click()
    assert len(workers()) <= 1
    panel.runner.join()
    assert len(panel.lane.steps) == 60
    assert not panel.bar.start.disabled


def test_J06_making_the_panel_again_ends_the_thread():
    threads = threading.active_count()
    lab.StartPanel(LabState(), steps=100_000).run()
    until(workers)
    panel = lab.StartPanel(LabState(), steps=3)
    until(lambda: not workers(), 2.0)
    until(lambda: threading.active_count() <= threads, 2.0)
    assert panel.run(wait=True)


# K: plots


@pytest.fixture
def fresh_mode(monkeypatch):
    monkeypatch.delenv("COMERA_LAB_FIGURES", raising=False)
    monkeypatch.setattr(panel_module, "_told", [])
    figure_mode.cache_clear()
    yield monkeypatch
    figure_mode.cache_clear()


def notices(panel):
    return [child.value for child in panel.widget.children if "plain figures" in getattr(child, "value", "")]


def test_K01_without_anywidget_charts_are_plain_figures_and_one_message_says_why(fresh_mode):
    fresh_mode.setitem(sys.modules, "anywidget", None)
    panel, other = lab.StartPanel(LabState(), steps=30), lab.MemoryPanel(LabState())
    assert panel.cores.mode == "plain"
    assert len(notices(panel)) == 1 and 'pip install "comera_lab[lab]"' in notices(panel)[0].replace("&quot;", '"')
    assert notices(other) == []
    (output,) = panel.cores.widget.outputs
    assert "application/vnd.plotly.v1+json" in output["data"]
    panel.rank.slider.value = 4
    until(lambda: "1·14·4" in str(panel.cores.widget.outputs), 2.0)
    assert len(panel.cores.widget.outputs) == 1
    assert panel.run(wait=True)
    assert panel.curves.widget.outputs[0]["data"]["application/vnd.plotly.v1+json"]["data"]


def test_K01_old_ipywidgets_and_other_front_ends_get_plain_figures(fresh_mode):
    fresh_mode.setattr(ipywidgets, "__version__", "7.8.5")
    assert figure_mode() == ("plain", "ipywidgets 7.8.5 is older than 8. Update with: pip install -U ipywidgets")
    fresh_mode.undo()
    figure_mode.cache_clear()
    fresh_mode.setenv("VSCODE_PID", "1")
    assert figure_mode()[0] == "plain"
    fresh_mode.setenv("COMERA_LAB_FIGURES", "live")
    figure_mode.cache_clear()
    assert figure_mode()[0] == "live"
    fresh_mode.setenv("COMERA_LAB_FIGURES", "moving")
    figure_mode.cache_clear()
    with pytest.raises(ValueError, match='must be "live" or "plain", got'):
        figure_mode()


def test_K01_the_extra_brings_the_widgets():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["notebook"]
    assert any(line.startswith("anywidget") for line in extras)
    assert any(line.startswith("ipywidgets>=8") for line in extras)


def test_K02_drawing_takes_less_than_a_tenth_of_training():
    panel = lab.RacePanel(LabState(width=64, seconds=3.0))
    spent = []
    take_in = panel._item

    def timed(progress: Progress) -> None:
        began = time.thread_time()
        take_in(progress)
        spent.append(time.thread_time() - began)

    panel._item = timed
    began = time.thread_time(), time.monotonic()
    assert panel.run(wait=True)
    steps = sum(len(lane.steps) for lane in panel.lanes)
    assert steps > 200
    assert sum(spent) < 0.1 * (time.monotonic() - began[1])


def test_K03_a_figure_of_100_000_points_is_no_larger_than_one_of_1_000():
    lane = Lane.__new__(Lane)
    lane.name = "long"
    lane.steps = History("steps", "seconds", "loss_nats", "step_time_ms")
    lane.evaluations = History("steps", "seconds", "accuracy_percent")
    figure = LiveFigure(training_curves([empty_curve("long")], "steps"), "t-long", "a long run")
    sizes = {}
    for step in range(100_000):
        lane.steps.add(step, step, 1.0, 1.0)
        lane.evaluations.add(step, step, 50.0)
        if step + 1 in (1_000, 10_000, 100_000):
            with figure.edit() as drawn:
                curve = lane.curve("steps")
                drawn.data[0].x, drawn.data[0].y = curve.x, curve.loss_nats
                drawn.data[1].x, drawn.data[1].y = curve.eval_x, curve.accuracy_percent
            sizes[step + 1] = len(str(figure.widget.figure))
    assert len(set(sizes.values())) == 1, sizes
    assert all(len(trace.x) <= MAX_POINTS for trace in figure.figure.data)
    assert len(lane.steps) == 100_000
