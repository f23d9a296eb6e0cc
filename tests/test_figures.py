"""Figures are functions of numbers: what is drawn, its scale, its legibility, and the twin without a kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from comera_lab.memory import POOLS
from comera_lab.panels import figures as module
from comera_lab.panels.figures import (
    BOND_PX,
    FLOOR,
    INK,
    POOL_STYLES,
    Curve,
    core_diagram,
    draw_cores,
    fill_memory,
    fill_spectrum,
    fill_training,
    memory_bars,
    spectrum_figure,
    training_curves,
    with_slider,
)
from comera_lab.panels.rank_figures import (
    COLUMNS,
    Dot,
    RankHistory,
    Upright,
    fill_pareto,
    fill_ranks,
    front,
    pareto_figure,
    rank_figure,
)
from comera_lab.shapes import TTShape

SHAPE = TTShape.for_features(784, 512, rank=[1, 4, 8, 16, 8, 4, 1])
# one layer of two bonds, cut at step 20: two rows of the history have that step
HISTORY = RankHistory(
    ("bond 1", "bond 2"), (4, 8), np.array([0.0, 10.0, 20.0, 20.0]),
    np.array([[4.0, 4.0, 3.0, 2.0], [8.0, 6.0, 6.0, 2.0]]), np.array([4.0, 3.0, 2.0, 1.0]),
    np.array([5.0, 4.0, 3.0, 2.0]), np.array([10.0, 20.0]), np.array([50.0, 90.0]), 1.5, "target: cores", 10, 20,
)  # fmt: skip
DOTS = [Dot("1", 0.1, 90.0, "run 1"), Dot("2", 0.2, 95.0, "run 2"), Dot("3", 0.3, 93.0, "run 3")]


def curve(name, points=5):
    x = np.arange(1, points + 1, dtype=float)
    return Curve(name, x, 1 / x, x[::2], 10 * x[::2])


def every_figure():
    values = np.geomspace(10, 0.1, 20)
    matrix = np.random.default_rng(0).normal(size=(30, 40))
    rows = {"predicted": dict.fromkeys(POOLS, 1.0), "measured here": dict.fromkeys(POOLS, 2.0)}
    return {
        "cores": core_diagram(SHAPE),
        "memory": memory_bars(rows),
        "training": training_curves([curve("dense"), curve("tensor train")], "steps"),
        "spectrum": spectrum_figure(values, 5, matrix, 0.5 * matrix),
        "ranks": rank_figure(HISTORY),
        "pareto": pareto_figure(DOTS, [Dot("dense", 2.5, 98.0, "dense")], [Upright("43×", 0.5)], "MiB", True),
    }


FIGURES = every_figure()


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_text_and_lines_are_legible_on_light_and_dark_pages(page):
    assert contrast(INK, page) >= 4.0
    for colour in (module.BLUE, module.VERMILLION, module.GREEN):
        assert contrast(colour, page) >= 3.0


def test_labels_inside_bars_are_legible_on_their_own_colour():
    names = {"white": "#ffffff", "black": "#000000"}
    assert all(contrast(colour, names[text]) >= 4.5 for colour, _, text in POOL_STYLES.values())


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_transparent_sized_and_free_of_tex(name):
    figure = FIGURES[name]
    layout = figure.layout.template.layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert layout.font.size >= 14
    assert figure.layout.height and figure.layout.width
    whole = figure.to_json()
    assert "$" not in whole
    fonts = [int(size) for size in re.findall(r'"size": ?(\d+)', json.dumps(json.loads(whole)["layout"]))]
    assert min(fonts) >= 12


def test_no_meaning_by_colour_alone():
    training = FIGURES["training"].data
    assert len({trace.line.dash for trace in training[::2]}) == 2
    assert len({trace.marker.symbol for trace in training[1::2]}) == 2
    assert len({trace.marker.pattern.shape for trace in FIGURES["memory"].data}) == len(POOLS)
    assert len({trace.marker.symbol for trace in FIGURES["spectrum"].data[:2]}) == 2
    lines = FIGURES["ranks"].data[1:4]
    assert len({(trace.line.dash, trace.line.width) for trace in lines}) == 3
    assert len({trace.marker.symbol for trace in FIGURES["pareto"].data[1:]}) == 2


def test_bonds_are_drawn_to_the_scale_of_their_rank():
    widths = [line.line.width for line in core_diagram(SHAPE, 16).layout.shapes if line.type == "line"]
    bonds = widths[: len(SHAPE.modes) - 1]
    assert bonds == [BOND_PX * rank / 16 for rank in SHAPE.ranks[1:-1]]


def test_a_core_box_says_its_shape_and_hover_says_how_many_numbers():
    figure = core_diagram(SHAPE)
    texts = [note.text for note in figure.layout.annotations]
    assert {"1·14·4", "4·8·8", "8·7·16", "16·8·8", "8·8·4", "4·8·1"} <= set(texts)
    assert "784 inputs = 14 × 8 × 7" in texts
    assert "8 × 7 × 16 = 896 numbers" in figure.data[0].text[2]


def test_padding_is_named():
    texts = [note.text for note in core_diagram(TTShape.for_features(1009, 64)).layout.annotations]
    assert any(text.endswith("− 5 padded") for text in texts)


def test_redrawing_equals_drawing_afresh():
    other = TTShape.for_features(64, 64, rank=2, order=2)
    figure = core_diagram(SHAPE)
    draw_cores(figure, other)
    assert figure.to_json() == core_diagram(other).to_json()
    bars = memory_bars({"predicted": dict.fromkeys(POOLS, 3.0)})
    rows = {"predicted": dict.fromkeys(POOLS, 1.0)}
    fill_memory(bars, rows)
    assert bars.to_json() == memory_bars(rows).to_json()
    curves = training_curves([curve("a", 3)], "steps")
    fill_training(curves, [curve("a", 9)])
    assert curves.to_json() == training_curves([curve("a", 9)], "steps").to_json()


def test_bar_labels_are_left_out_where_they_would_not_fit():
    rows = {"predicted": {"weights": 10.0, "grads": 10.0, "optimizer": 20.0, "activations": 0.1}}
    assert [trace.text for trace in memory_bars(rows).data] == [("10.00",), ("10.00",), ("20.00",), ("",)]


def test_spectrum_splits_at_the_rank_and_shows_the_residual_on_the_same_scale():
    values = np.array([4.0, 2.0, 1.0, 0.0])
    matrix = np.eye(4)
    figure = spectrum_figure(values, 2, matrix, np.diag([1.0, 1.0, 0.0, 0.0]))
    kept, cut, whole, part, lost = figure.data
    assert (list(kept.y), list(cut.x)) == ([4.0, 2.0], [3, 4])
    assert cut.y[-1] == FLOOR * 4.0, "zeros are drawn on the floor of the log axis"
    assert np.allclose(whole.z - part.z, lost.z)
    assert whole.zmax == part.zmax == lost.zmax == 1.0


def test_a_short_log_axis_is_labelled_and_a_long_one_by_decades():
    values = np.geomspace(20, 4, 30)
    matrix = np.ones((4, 4))
    figure = spectrum_figure(values, 5, matrix, matrix)
    assert {"5", "10", "20"} <= set(figure.layout.yaxis.ticktext)
    fill_spectrum(figure, np.geomspace(20, 1e-3, 30), 5, matrix, matrix)
    assert (figure.layout.yaxis.dtick, figure.layout.yaxis.tickvals) == (1, None)


def test_an_empty_training_figure_has_calm_axes_and_a_filled_one_its_own():
    nothing = np.empty(0)
    figure = training_curves([Curve("a", nothing, nothing, nothing, nothing)], "steps")
    assert figure.layout.xaxis.range == (0, 100)
    fill_training(figure, [curve("a")], "training seconds")
    assert figure.layout.xaxis.autorange is True
    assert figure.layout.xaxis.title.text == "training seconds"


def test_the_static_twin_carries_every_position_and_needs_no_kernel():
    shapes = [TTShape.for_features(784, 512, rank=rank) for rank in (1, 2, 4)]
    static = with_slider([(str(s.ranks[3]), core_diagram(s)) for s in shapes], "rank ", active=1)
    (slider,) = static.layout.sliders
    assert [step.label for step in slider.steps] == ["1", "2", "4"]
    assert slider.active == 1
    moved = slider.steps[2].args[1]
    assert "4·8·4" in [note["text"] for note in moved["annotations"]]
    assert json.loads(static.to_json())["layout"]["sliders"], "plain JSON, no numpy in the arguments"


def test_the_strip_shows_the_open_share_of_every_bond_and_says_the_rank():
    strip, _, cores, target, _ = rank_figure(HISTORY).data
    assert strip.z.tolist() == [[1.0, 1.0, 0.5], [1.0, 0.75, 0.25]], "of the two rows of step 20 the later one"
    assert len(strip.x) == strip.z.shape[1] + 1, "edges of cells"
    assert list(strip.text[1]) == ["8 of 8", "6 of 8", "2 of 8"]
    assert list(cores.y)[-2:] == [2.0, 1.0], "the lines keep both, so that a cut is a vertical drop"
    assert (list(target.x), list(target.y)) == ([10, 1.015 * 20], [1.5, 1.5])
    notes = [note.text for note in rank_figure(HISTORY).layout.annotations]
    assert {"<b>2</b> of 4", "<b>2</b> of 8"} <= set(notes)
    assert [line.x0 for line in rank_figure(HISTORY).layout.shapes] == [10, 10, 10]


def test_a_strip_redrawn_or_played_back_equals_one_drawn_afresh():
    figure = rank_figure(RankHistory(("bond 1", "bond 2"), (4, 8)))
    assert figure.data[0].z.tolist() == [[1.0], [1.0]], "before training every bond is open"
    fill_ranks(figure, HISTORY)
    assert figure.to_json() == rank_figure(HISTORY).to_json()
    early = HISTORY.until(0.5)
    assert (early.steps.tolist(), early.eval_steps.tolist(), early.live.shape) == ([0.0, 10.0], [10.0], (2, 2))
    assert HISTORY.until(1.0) is HISTORY


def test_a_long_history_is_thinned_to_the_pixels_of_the_strip():
    steps = np.arange(5_000.0)
    many = RankHistory(("bond 1",), (4,), steps, np.full((1, 5_000), 4.0), steps, steps, length=5_000)
    assert rank_figure(many).data[0].z.shape == (1, COLUMNS)


def test_the_front_holds_the_runs_that_no_other_beats():
    assert [dot.label for dot in front(DOTS, smaller_is_better=True)] == ["1", "2"]
    assert [dot.label for dot in front(DOTS, smaller_is_better=False)] == ["3", "2"]


def test_dots_are_redrawn_with_their_words_and_upright_lines():
    figure = pareto_figure([], [], [], "MiB", True)
    parts = DOTS, [], [Upright("published: 43×", 43.0)], "times smaller", False
    fill_pareto(figure, *parts)
    assert figure.to_json() == pareto_figure(*parts).to_json()
    assert list(figure.data[1].hovertext) == ["run 1", "run 2", "run 3"]
    assert figure.layout.annotations[0].text == "published: 43×"


def test_figures_need_neither_widgets_nor_training():
    code = (
        "import sys\n"
        "from importlib import util\n"
        "spec = util.spec_from_file_location('figures', sys.argv[1])\n"
        "module = util.module_from_spec(spec); sys.modules['figures'] = module; spec.loader.exec_module(module)\n"
        "assert 'ipywidgets' not in sys.modules and 'anywidget' not in sys.modules\n"
        "assert 'comera_lab.experiments' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(module.__file__))], check=True, timeout=120)
