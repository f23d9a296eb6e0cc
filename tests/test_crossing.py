"""The crossing panel: every press of the button adds one honest pair of timings."""

from collections.abc import Iterator

import pytest
import torch

from comera_lab.panels.crossing import MAX_WIDTH, REPEATS, CrossingPanel


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_each_run_adds_a_width() -> None:
    panel = CrossingPanel()
    assert "nothing timed yet" in panel.table()
    for width in (128, 64):
        panel.width.value = width
        panel.run(wait=True)
    assert panel.widths() == [64, 128]
    assert list(panel.figure.figure.data[0].x) == [64, 128]
    dense, train = panel.timings[8, 64]
    assert 0 < dense < train  # the calls of a train cost more than one small product, on any machine
    assert len(panel._samples) == REPEATS
    assert "slower" in panel.line.value and "Measured here" in panel.line.value
    panel.close()


def test_another_rank_starts_another_picture() -> None:
    panel = CrossingPanel()
    panel.width.value = 64
    panel.run(wait=True)
    panel.rank.value = 4
    assert panel.widths() == [] and len(panel.figure.figure.data[0].x) == 0
    panel.rank.value = 8
    assert panel.widths() == [64] and len(panel.figure.figure.data[0].x) == 1
    panel.close()


def test_the_crossing_is_said_in_words() -> None:
    panel = CrossingPanel()
    panel.timings = {(8, 64): (0.1, 0.4), (8, 256): (0.9, 0.7), (8, 512): (3.3, 1.2), (16, 128): (1.0, 2.0)}
    panel.width.value = 512
    panel._draw()
    assert "2.8× faster" in panel.line.value
    assert "cross between width 64 and 256" in panel.line.value
    panel.close()


@pytest.mark.parametrize("value", [64, MAX_WIDTH, 256])
def test_the_controls_take_their_ends_and_refuse_the_rest(value: int) -> None:
    panel = CrossingPanel()
    panel.width.value = value
    assert panel.width.value == value
    for wrong in (0, MAX_WIDTH + 1, "wide"):
        with pytest.raises(ValueError, match="width must be a whole number from 64 to 2,048"):
            panel.width.value = wrong
    with pytest.raises(ValueError, match="rank must be"):
        panel.rank.value = 0
    panel.close()


def test_the_static_twin_has_a_slider_and_says_predicted() -> None:
    panel = CrossingPanel()
    figure = panel.static()
    assert len(figure.layout.sliders[0].steps) == 4
    assert "predicted" in figure.layout.yaxis.title.text
    panel.close()
