"""PlannerPanel: each control at its first, usual and last value; text, picture and numbers say the same."""

from __future__ import annotations

import time

import pytest

import comera_lab.panels as lab
from comera_lab.memory import METHODS, POOLS, capacity
from comera_lab.panels.planner import BATCHES, MODELS, ROWS, SEQUENCES
from comera_lab.panels.state import LabState

GIB = 2**30


@pytest.fixture
def panel():
    made = lab.PlannerPanel(LabState(), model="llama-130m")
    yield made
    made.close()


def settle(panel) -> None:
    """Draw now: in a notebook the throttle does it a moment later."""
    panel._draw.cancel()
    panel._replan()


def assert_agrees(panel) -> None:
    """The bars, the text and the plan are one."""
    rows = panel.plan.rows
    for trace in panel.bars.figure.data:
        assert list(trace.y) == [row.label for row in rows]
        assert list(trace.x) == pytest.approx([getattr(row.pools, trace.name) / GIB for row in rows])
    assert [trace.name for trace in panel.bars.figure.data] == list(POOLS)
    for row in rows:
        assert f"{row.label} {row.pools.total / GIB:,.2f} GiB" in panel.line.value
    assert panel.table() == panel.plan.table() and panel.card.text == ""


def test_it_starts_with_every_method_and_the_lines_of_cards(panel):
    assert_agrees(panel)
    assert [row.method for row in panel.plan.rows] == list(METHODS)
    panel.model.value = "llama-1b"
    settle(panel)
    drawn = [shape.x0 for shape in panel.bars.figure.layout.shapes]
    assert drawn[0] == pytest.approx(capacity("RTX 3060") / GIB)
    assert panel.bars.figure.layout.annotations[0].text == "12 GB"
    assert all(at <= panel.bars.figure.layout.xaxis.range[1] for at in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODELS[0], "codebert", "dlrm"])
def test_every_kind_of_model_can_be_chosen(panel, model):
    panel.model.value = model
    settle(panel)
    assert panel.plan.title.startswith(model)
    assert_agrees(panel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "least", "most"),
    [
        ("sequence", str(SEQUENCES[0]), "1024"),
        ("batch", str(BATCHES[0]), str(BATCHES[-1])),
        ("precision", "bf16", "bf16 + fp32 master"),
    ],
)
def test_ends_of_the_sizes(panel, control, least, most):
    totals = []
    for value in (least, getattr(panel, control).value, most):
        getattr(panel, control).value = value
        settle(panel)
        assert_agrees(panel)
        totals.append(panel.plan.rows[0].pools.total)
    assert totals == sorted(totals) and totals[0] < totals[-1]


def test_switches_shrink_their_own_pool_only(panel):
    usual = panel.plan.rows[0].pools
    panel.checkpointing.value = "on"
    settle(panel)
    saved = panel.plan.rows[0].pools
    assert saved.activations < usual.activations / 3
    assert (saved.weights, saved.grads, saved.optimizer) == (usual.weights, usual.grads, usual.optimizer)
    panel.layerwise.value = "on"
    settle(panel)
    assert panel.plan.rows[0].pools.grads < saved.grads / 3
    assert panel.plan.rows[0].pools.activations == saved.activations
    assert_agrees(panel)


def test_methods_are_ticked(panel):
    panel.methods.boxes["CoMERA"].value = False
    settle(panel)
    assert "comera" not in [row.method for row in panel.plan.rows]
    panel.methods.value = ("AdamW", "COAP 8-bit")
    settle(panel)
    assert_agrees(panel)
    assert len(panel.bars.figure.data[0].x) == 2
    with pytest.raises(ValueError, match="methods must be AdamW and at least one of"):
        panel.methods.value = ("COAP",)
    assert panel.methods.value == ("AdamW", "COAP 8-bit")


def test_J01_a_burst_of_choices_ends_at_the_last_one(panel, monkeypatch):
    planned, plan_now = [], panel._planned
    monkeypatch.setattr(panel, "_planned", lambda: planned.append(panel.batch.value) or plan_now())
    for batch in (*BATCHES, "2"):
        panel.batch.value = str(batch)
    deadline = time.monotonic() + 30
    while "2 x 256 tokens" not in panel.line.value:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert planned[-1] == "2" and len(planned) <= 4
    assert_agrees(panel)


@pytest.mark.slow
def test_another_model_offers_its_own_sizes(panel):
    panel.sequence.value = "1024"
    panel.checkpointing.value = "on"
    panel.model.value = "codebert"
    assert panel.sequence.options[-1] == "512" == panel.sequence.value and panel.checkpointing.value == "on"
    panel.model.value = "dlrm"
    assert panel.sequence.options == ("none",) and panel.checkpointing.options == ("off",)
    assert panel.batch.options == tuple(map(str, ROWS)) and panel.batch.value == "10000"
    settle(panel)
    assert_agrees(panel)
    panel.model.value = "llama-7b"
    assert panel.sequence.options[-1] == "2048" and panel.sequence.value == "256" and panel.batch.value == "16"
    for control, wrong in ((panel.batch, "3"), (panel.sequence, "4096"), (panel.model, "gpt"), (panel.layerwise, "so")):
        with pytest.raises(ValueError, match="must be one of"):
            control.value = wrong


@pytest.mark.slow
def test_the_static_twin_has_a_slider_over_batches(panel):
    figure = panel.static()
    steps = figure.layout.sliders[0].steps
    assert [step.label for step in steps] == ["2", "16", "128"] and figure.layout.sliders[0].active == 1
    longest = [sum(row[0] for row in step.args[0]["x"]) for step in steps]
    assert longest == sorted(longest) and longest[0] < longest[-1]
    assert steps[-1].args[1]["shapes"]  # the lines of cards
