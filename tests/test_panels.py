"""Every control of every panel at its ends and beyond, the text and static twins, and what panels share."""

from __future__ import annotations

import html
import threading
import time

import ipywidgets
import plotly.graph_objects as go
import pytest
from traitlets import TraitError

import comera_lab.panels as lab
from comera_lab.panels.panel import Panel
from comera_lab.panels.runner import Progress
from comera_lab.panels.shape import bond_reasons
from comera_lab.panels.state import LabState
from comera_lab.shapes import ShapeError, TTShape

NUMBERS = {
    "embedding": ("exponent", "rank"),
    "recommender": ("rank", "steps"),
    "start": ("rank",),
    "shape": ("in_features", "out_features", "every", "bonds.2"),
    "memory": ("width", "depth", "batch_size"),
    "spectrum": ("energy",),
    "race": ("width", "rank", "seconds"),
    "ranks": ("target_ratio", "max_rank", "gamma", "gate_rate", "early_steps", "late_steps"),
    "projection": ("projection_rank", "update_interval", "refresh_factor"),
    "optimizers": ("rank_ratio", "update_interval", "refresh_factor", "optimizer_steps"),
    "diffusion": ("rank_ratio", "diffusion_steps"),
    "code": ("steps",),
    "budget": ("budget_mib", "budget_seconds", "rank", "target_ratio", "rank_ratio", "budget_steps"),
}
CHOICES = {
    "embedding": ("columns",),
    "recommender": ("split", "ids", "rates"),
    "memory": ("precision", "optimizer"),
    "spectrum": ("source",),
    "race": ("axis",),
    "ranks": ("size_part", "gate_kind"),
    "projection": ("projection_method", "gradient_precision"),
    "optimizers": ("axis",),
    "diffusion": ("diffusion_optimizer",),
    "code": ("method",),
    "budget": ("budget_model", "budget_optimizer", "budget_rate", "axis"),
}
KINDS = {
    "embedding": lab.EmbeddingPanel,
    "recommender": lab.RecommenderPanel,
    "start": lab.StartPanel,
    "shape": lab.ShapePanel,
    "memory": lab.MemoryPanel,
    "spectrum": lab.SpectrumPanel,
    "race": lab.RacePanel,
    "ranks": lab.RankTrainingPanel,
    "projection": lab.ProjectionPanel,
    "optimizers": lab.OptimizerRacePanel,
    "diffusion": lab.DiffusionPanel,
    "code": lab.CodeModelPanel,
    "budget": lab.BudgetPanel,
}
HAS_SLIDER = [(k, c) for k, controls in NUMBERS.items() for c in controls if not c.endswith("features")]


def pairs(table):
    return [(kind, control) for kind, controls in table.items() for control in controls]


def control_of(panel, name):
    head, _, number = name.partition(".")
    found = getattr(panel, head)
    return found[int(number)] if number else found


def make(kind, **values):
    return KINDS[kind](LabState(**values))


def text_of(panel):
    return panel.table()


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_is_made_quickly_and_starts_nothing(kind):
    make(kind)
    threads, began = threading.active_count(), time.thread_time()
    panel = make(kind)
    assert time.thread_time() - began < 1.0
    assert threading.active_count() <= threads + 1, "at most the timer of a late redraw"
    assert panel.runner.state == "idle"
    assert panel.card.text == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_shows_itself_and_has_both_twins(kind):
    panel = make(kind)
    bundle = panel._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.widget.model_id
    assert bundle["text/plain"] == panel.table()
    assert html.escape(panel.table()) in bundle["text/html"]
    static = panel.static()
    assert type(static) is go.Figure
    assert len(static.layout.sliders[0].steps) >= 4
    assert len(static.to_json()) < 400_000
    assert f"t-panel-{kind}" in panel.widget._dom_classes


@pytest.mark.parametrize(("kind", "name"), pairs(NUMBERS))
def test_a_number_at_minimum_default_and_maximum(kind, name):
    panel = make(kind)
    control = control_of(panel, name)
    default = control.value
    for value in (control.low, default, control.high):
        control.value = value
        assert (control.value, control.slider.value) == (value, value)
        assert float(control.entry.value) == value
        assert control.message.value == panel.card.text == ""
        assert text_of(panel)


@pytest.mark.parametrize(("kind", "name"), pairs(NUMBERS))
@pytest.mark.parametrize("typed", ["none", "too large", "too small"])
def test_an_illegal_typed_number_is_explained_and_changes_nothing(kind, name, typed):
    panel = make(kind)
    control = control_of(panel, name)
    before, traits = control.value, panel.state.trait_values()
    raw = {"none": "none", "too large": str(control.high + 1), "too small": str(control.low - 1)}[typed]
    control.entry.value = raw
    assert f"got {raw}" in html.unescape(control.message.value).replace("'", "")
    assert "must be" in control.message.value
    assert control.message.layout.display is None
    assert (control.value, control.slider.value) == (before, before)
    assert float(control.entry.value) == before
    assert panel.state.trait_values() == traits
    control.entry.value = str(control.low)
    assert control.message.value == "", "the sentence goes with the next legal value"


@pytest.mark.parametrize(("kind", "name"), pairs(NUMBERS))
def test_an_illegal_number_from_code_raises_and_is_shown(kind, name):
    control = control_of(make(kind), name)
    for bad in (control.high + 1, True):
        with pytest.raises(ValueError, match=r"must be a (whole )?number from .*, got"):
            control.value = bad
        assert "must be" in control.message.value
    if control.whole:
        with pytest.raises(ValueError, match="whole number"):
            control.value = control.low + 0.5


@pytest.mark.parametrize(("kind", "name"), pairs(CHOICES))
def test_every_choice_and_two_illegal_ones(kind, name):
    panel = make(kind)
    control = control_of(panel, name)
    for option in (*control.options, control.options[0]):
        control.dropdown.value = option
        assert control.value == option
        assert panel.card.text == ""
        assert text_of(panel)
    with pytest.raises(ValueError, match="must be one of"):
        control.value = "fp7"
    assert "fp7" in control.message.value
    with pytest.raises(TraitError):
        control.dropdown.value = "fp7"
    assert control.value == control.options[0]


@pytest.mark.parametrize(("kind", "name"), pairs(NUMBERS) + pairs(CHOICES))
def test_every_control_has_a_label_a_full_sentence_and_a_stable_hook(kind, name):
    control = control_of(make(kind), name)
    assert control.label.value
    editors = control._editors()
    for editor in editors:
        assert editor.tooltip.endswith(".") and len(editor.tooltip.split()) >= 5
    assert any(css.startswith("t-") for editor in editors for css in editor._dom_classes)


@pytest.mark.parametrize(("kind", "name"), HAS_SLIDER)
def test_J07_four_values_are_four_reactions(kind, name):
    control = control_of(make(kind), name)
    seen = []
    control.on_change(seen.append)
    step = control.slider.step
    values = [v for v in (control.low, control.low + step, control.low + 3 * step, control.high) if v != control.value]
    for value in values[:3]:
        control.slider.value = value
    control.entry.value = str(control.low + 2 * step)
    assert seen == [*values[:3], control.low + 2 * step]


@pytest.mark.parametrize("typed", ["", "4 7 7", "4 7 7 x", "2 2 2 2 7 7", "784.5", "-28 -28", "0 784"])
def test_J03_illegal_modes_are_explained(typed):
    panel = make("shape")
    panel.in_modes.entry.value = typed if typed else " "
    assert "input modes must" in panel.in_modes.message.value
    assert "Try 14 × 8 × 7" in panel.in_modes.message.value
    assert panel.state.shape.in_modes == (14, 8, 7)


@pytest.mark.parametrize(
    ("typed", "modes"), [("4 7 7 4", (4, 7, 7, 4)), ("28×28", (28, 28)), ("784", (784,)), ("(14, 8, 8)", (14, 8, 8))]
)
def test_J07_typed_and_chosen_modes_reach_the_shape(typed, modes):
    panel = make("shape")
    panel.in_modes.entry.value = typed
    assert panel.state.shape.in_modes == modes
    assert panel.in_modes.message.value == panel.card.text == ""
    assert len(panel.bonds) == len(modes) + 2
    panel.in_modes.dropdown.value = "28 × 28"
    assert panel.state.shape.in_modes == (28, 28)


def test_bonds_are_capped_at_their_true_maximum_with_the_reason():
    panel = make("shape")
    assert [bond.high for bond in panel.bonds] == list(panel.state.shape.max_ranks[1:-1])
    assert bond_reasons(panel.state.shape)[1] == "max 14·8 = 112 (left)"
    with pytest.raises(ValueError, match=r"from 1 to 14, got 15\. max 14 \(left\)"):
        panel.bonds[0].value = 15
    panel.every.value = 512
    assert panel.state.shape.ranks == panel.state.shape.max_ranks


def test_a_bond_of_one_is_disabled():
    panel = make("shape", shape=TTShape((1, 64), (64,), (1, 1, 8, 1)))
    assert [bond.enabled for bond in panel.bonds] == [False, True]


def test_state_is_shared_by_panels_and_moves_their_sliders():
    state = LabState()
    start, race = lab.StartPanel(state), lab.RacePanel(state)
    start.rank.slider.value = 5
    assert state.rank == race.rank.value == 5
    state.rank = 40
    assert race.rank.value == 40
    assert start.rank.value == 5
    assert "from 1 to 32, got 40" in start.rank.message.value
    assert lab.lab_state() is lab.lab_state()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rank", 0, "rank must be a whole number from 1 to 512, got 0"),
        ("rank", 2.5, "got 2.5"),
        ("width", True, "got True"),
        ("energy_percent", 101, "from 50 to 100, got 101"),
        ("seconds", float("nan"), "got nan"),
        ("precision", "fp8", "must be one of fp32, bf16"),
        ("optimizer", "adam", "must be one of sgd"),
        ("target_ratio", 0.0, "from 0.05 to 1, got 0.0"),
        ("gate_kind", "soft", "must be one of straight-through, threshold"),
    ],
)
def test_the_state_refuses_illegal_values(name, value, message):
    state = LabState()
    before = getattr(state, name)
    with pytest.raises(ValueError, match=message):
        setattr(state, name, value)
    assert getattr(state, name) == before


def test_a_whole_number_that_is_out_of_range_is_a_shape_error():
    with pytest.raises(ShapeError):
        LabState().rank = -1


def test_panels_export_is_sorted_and_complete():
    assert lab.__all__ == sorted(lab.__all__)
    assert all(hasattr(lab, name) for name in lab.__all__)
    assert {kind.__name__ for kind in KINDS.values()} <= set(lab.__all__)
    assert all(issubclass(kind, Panel) for kind in KINDS.values())
    assert ipywidgets.IntSlider.__module__.startswith("ipywidgets."), "the real ipywidgets"
    assert Progress(1, 0.5).payload is None
