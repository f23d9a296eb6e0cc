"""Panels in a real Jupyter kernel: buttons pressed through the comm channel, interrupts, traffic on the wire."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from comera_lab.panels.live import REFRESHES_PER_SECOND

ROOT = Path(__file__).parents[1]
MESSAGES_PER_SECOND = 10


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def kernel():
    environment = {**os.environ, "COMERA_LAB_FIGURES": "live", "PYTHONPATH": str(ROOT)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment, cwd=str(ROOT))
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


class Kernel:
    """A kernel with the few things that a notebook does to it."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client
        self.run("import threading, time\nimport comera_lab.panels as lab\nfrom comera_lab.panels import LabState")

    def run(self, code, timeout=60):
        """Execute a cell; its text output, or an AssertionError with the kernel's error."""
        outputs = self.outputs(code, timeout)
        errors = [o["content"] for o in outputs if o["msg_type"] == "error"]
        assert not errors, errors
        return "".join(o["content"]["text"] for o in outputs if o["msg_type"] == "stream").strip()

    def outputs(self, code, timeout=60):
        while True:
            seen = []
            reply = self.client.execute_interactive(code, timeout=timeout, output_hook=seen.append, allow_stdin=False)
            # for a moment after an error a kernel refuses what was already sent, as Run All wants it
            if reply["content"]["status"] != "aborted":
                return seen

    def click(self, model_id):
        content = {"comm_id": model_id, "data": {"method": "custom", "content": {"event": "click"}}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def messages(self, seconds):
        """iopub messages that arrive within so many seconds."""
        found, deadline = [], time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                found.append(self.client.get_iopub_msg(timeout=left))
            except Exception as error:  # the queue's Empty, whatever module it comes from
                assert type(error).__name__ == "Empty", error
        return found


def test_J02_buttons_pressed_through_the_comm_channel(kernel):
    ids = kernel.run("p = lab.StartPanel(LabState(), steps=10_000)\nprint(p.bar.start.model_id, p.bar.stop.model_id)")
    start, stop = ids.split()
    kernel.click(start)
    until(lambda: kernel.run("print(p.lane is not None and len(p.lane.steps) > 5)") == "True")
    kernel.click(stop)
    assert kernel.run("print(p.runner.join(1.0), p.runner.state, len(p.lane.steps) > 5)") == "True stopped True"


def test_J02_the_cell_that_starts_returns_at_once(kernel):
    assert float(kernel.run("t = time.time()\np.run()\nprint(time.time() - t)\np.stop(wait=True)")) < 0.5


def test_J06_the_kernel_interrupt_ends_a_run_that_is_waited_for(kernel):
    kernel.run("p = lab.StartPanel(LabState(), steps=1_000_000)")
    asked = kernel.client.execute("p.run(wait=True)")
    time.sleep(1.5)
    kernel.manager.interrupt_kernel()
    pressed = time.monotonic()
    while True:
        reply = kernel.client.get_shell_msg(timeout=10)
        if reply["parent_header"].get("msg_id") == asked:
            break
    assert time.monotonic() - pressed < 2.0
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    kernel.run("n = len(p.lane.steps)\np.resume()\ntime.sleep(.3)\np.stop(wait=True)")
    assert kernel.run("print(len(p.lane.steps) > n)") == "True"


def test_J06_a_background_run_outlives_the_interrupt_and_ends_with_its_panel(kernel):
    kernel.run("n = threading.active_count()\np.run()\ntime.sleep(.2)")
    kernel.manager.interrupt_kernel()
    time.sleep(0.3)
    assert kernel.run("print(p.runner.state)") == "running"
    kernel.run("p = lab.StartPanel(LabState())\ntime.sleep(1.5)")
    names = kernel.run("print([t.name for t in threading.enumerate() if t.name.startswith('comera-lab')])")
    assert names == "[]"


def test_K02_a_training_run_sends_at_most_ten_messages_a_second(kernel):
    start = kernel.run("p = lab.RacePanel(LabState(width=64, seconds=30.0))\nprint(p.bar.start.model_id)")
    kernel.messages(0.3)
    kernel.click(start)
    until(lambda: kernel.run("print(len(p.lanes) == 2 and len(p.lanes[1].steps) > 20)") == "True")
    before = int(kernel.run("print(p.curves.refreshes)"))
    model = kernel.run("print(p.curves.widget.model_id)")
    heard = [m for m in kernel.messages(3.0) if m["msg_type"] == "comm_msg"]
    refreshes = int(kernel.run("print(p.curves.refreshes)")) - before
    kernel.run("p.stop(wait=True)")
    assert refreshes >= 3
    assert len(heard) <= MESSAGES_PER_SECOND * 3.0
    charts = [m for m in heard if m["content"]["comm_id"] == model]
    assert len(charts) <= refreshes


def test_K04_ten_updates_in_a_cell_are_one_output(kernel):
    outputs = kernel.outputs(
        "p = lab.StartPanel(LabState())\ndisplay(p)\n"
        "for k in range(1, 11):\n    p.rank.value = k\n    time.sleep(.05)"
    )
    shown = [o for o in outputs if o["msg_type"] in ("display_data", "execute_result", "stream", "error")]
    assert [o["msg_type"] for o in shown] == ["display_data"]
    assert "application/vnd.jupyter.widget-view+json" in shown[0]["content"]["data"]


def test_the_plotly_bundle_travels_once(kernel):
    assert kernel.run("from comera_lab.panels.live import _bundles\nprint(len(_bundles))") == "1"
    size = int(kernel.run("print(len(str(p.cores.widget.get_state())))"))
    assert size < 40_000, "a figure carries its own data and a few lines of JavaScript, not a chart library"
    assert REFRESHES_PER_SECOND <= 8
