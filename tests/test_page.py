"""Lessons as pages: what a panel leaves behind where nobody sits at the kernel, and the pictures beside the text."""

from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

from comera_lab.panels import CrossingPanel, image_row, page


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to be in a kernel; the value says whether somebody could answer an input()."""

    def pretend(somebody: bool) -> None:
        shell = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=somebody))
        monkeypatch.setitem(page.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    monkeypatch.setattr(page, "_loaded", [])
    monkeypatch.delenv("COMERA_LAB_FIGURES", raising=False)
    return pretend


def test_outside_a_kernel_and_before_a_person_widgets_are_shown(kernel: Any) -> None:
    kernel(True)
    assert not page.nobody_here()
    panel = CrossingPanel()
    bundle = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "needs a running kernel" in bundle["text/html"]
    panel.close()


def test_K05_without_a_person_a_panel_is_a_figure_and_its_numbers(kernel: Any) -> None:
    kernel(False)
    panel = CrossingPanel()
    bundle = panel._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "plotly-graph-div" in bundle["text/html"] and "nothing timed yet" in bundle["text/html"]
    panel.close()


def test_the_chart_library_goes_in_once(kernel: Any) -> None:
    first, second = (len(page.figure_html(go.Figure())) for _ in range(2))
    assert first > 1_000_000 > 20_000 > second


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_the_environment_keeps_the_widgets(kernel: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    kernel(False)
    monkeypatch.setenv("COMERA_LAB_FIGURES", mode)
    assert not page.nobody_here()


def test_images_stand_side_by_side_under_their_names() -> None:
    figure = image_row({"one": torch.zeros(16), "two": torch.ones(4, 4)}, side=4)
    assert [note.text for note in figure.layout.annotations] == ["one", "two"]
    assert [len(trace.z) for trace in figure.data] == [4, 4]
    assert {(trace.zmin, trace.zmax) for trace in figure.data} == {(0, 1)}
    assert figure.layout.paper_bgcolor is None  # the template's: transparent
