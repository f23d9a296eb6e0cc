"""A lesson as a page: when nobody sits at the kernel, panels show their static twin, which needs no kernel.

`jupyter nbconvert --execute --to html` runs a lesson and saves a page. A widget on that page would stay blank without
the kernel, so each panel gives its figure with a slider that works in the browser alone, and its numbers as text.
plotly.js (5 MB) goes in once, with the first figure: the page needs no internet.
"""

from __future__ import annotations

import html
import os
import sys
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.io.base_renderers import MimetypeRenderer

_loaded: list[str] = []


def nobody_here() -> bool:
    """True when the kernel was started by nbconvert, nbclient or the like, which cannot type an answer.

    COMERA_LAB_FIGURES=live or plain (see `live`) keeps the widgets; so does Voila, whose reader moves them although
    its kernel cannot ask.
    """
    if os.environ.get("COMERA_LAB_FIGURES") or os.environ.get("SERVER_SOFTWARE", "").startswith("voila/"):
        return False
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    # ipykernel keeps the allow_stdin of the request: JupyterLab, VS Code and Colab send True, executors False
    return kernel is not None and not getattr(kernel, "_allow_stdin", True)


def figure_html(figure: go.Figure) -> str:
    """A div that draws `figure` without a kernel or the internet."""
    first = not _loaded
    _loaded.append("figure")
    return str(figure.to_html(full_html=False, include_plotlyjs=first, config={"displayModeBar": False}))


def page_bundle(figure: go.Figure | None, text: str) -> dict[str, Any]:
    """What a panel is on a page: the figure, and its text twin."""
    picture = "" if figure is None else figure_html(figure)
    return {"text/html": f"{picture}<pre>{html.escape(text)}</pre>", "text/plain": text}


class _PageRenderer(MimetypeRenderer):
    """plotly's way to add a form of output: here the HTML that a page keeps."""

    def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, str]:
        return {"text/html": figure_html(go.Figure(fig_dict, skip_invalid=True))}


def show_figures_on_pages() -> None:
    """Let a plain go.Figure at the end of a cell carry its own HTML as well when nobody is here."""
    if nobody_here():
        pio.renderers["comera_page"] = _PageRenderer()
        pio.renderers.default = "plotly_mimetype+comera_page"
