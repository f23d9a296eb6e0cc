"""Put a plotly figure on the page and keep it up to date: one small message per refresh.

plotly's own FigureWidget sends its 5 MB front end again with every figure and 5 messages for each change. Here one
hidden widget carries plotly.js once per notebook; a `LiveFigure` is an ordinary go.Figure plus one synchronised
dict that the browser draws with Plotly.react. It follows the width of its cell and the colours of the page.
Where anywidget is missing or the page is not JupyterLab, the same class shows the figure as plain plotly output.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import numpy.typing as npt
import plotly
import plotly.graph_objects as go
import traitlets

# 4 charts and 4 texts a second: under the 10 messages a second that a slow browser or Binder link keeps up with.
REFRESHES_PER_SECOND = 4.0
DRAGS_PER_SECOND = 8.0
MAX_POINTS = 500

# anywidget gives a widget 2 s to begin. Evaluating plotly.js can take longer on a busy machine, so the bundle only
# offers to load it, and the first figure asks; 100 ms later all figures of a cell have begun.
_BUNDLE_JS = """
function load(source) {
  const shield = "const module = undefined, exports = undefined, define = undefined;\\n";
  const url = URL.createObjectURL(new Blob([shield, source], { type: "text/javascript" }));
  return import(url).then(() => { URL.revokeObjectURL(url); return globalThis.comeraPlotlyLib = globalThis.Plotly; });
}
export default {
  initialize({ model }) {
    let loading = null;
    globalThis.comeraPlotly = () => loading ??= globalThis.comeraPlotlyLib
      ? Promise.resolve(globalThis.comeraPlotlyLib)
      : new Promise(resolve => setTimeout(resolve, 100)).then(() => load(model.get("source")));
  }
};
"""

_FIGURE_JS = """
async function plotly() {
  for (let i = 0; i < 1200 && !globalThis.comeraPlotly; i++) await new Promise(r => setTimeout(r, 25));
  if (!globalThis.comeraPlotly) throw new Error("the chart library did not arrive; run the cell again");
  return globalThis.comeraPlotly();
}
async function render({ model, el }) {
  el.classList.add("comera-figure");
  el.setAttribute("role", "img");
  const height = () => ((model.get("figure").layout || {}).height || 300) + "px";
  el.style.height = height();
  let alive = true, drawing = false, again = false, listening = false, clicks = 0, Plotly = null;
  async function draw() {
    if (drawing || !Plotly) { again = true; return; }
    drawing = true;
    try {
      do {
        again = false;
        const figure = model.get("figure");
        el.style.height = height();
        el.setAttribute("aria-label", model.get("description"));
        if (el.clientWidth > 0)
          await Plotly.react(el, figure.data, { ...figure.layout, autosize: true, width: el.clientWidth },
                             { displayModeBar: false, displaylogo: false, doubleClick: "reset", scrollZoom: false });
        if (el.on && !listening) {
          listening = true;
          el.on("plotly_click", event => {
            const { curveNumber, pointNumber } = event.points[0];
            model.set("clicked", { trace: curveNumber, point: pointNumber, count: ++clicks });
            model.save_changes();
          });
        }
      } while (again && alive);
    } finally { drawing = false; }
  }
  model.on("change:figure", draw);
  const watcher = new ResizeObserver(() => { if (Plotly && el._fullLayout?.width !== el.clientWidth) draw(); });
  watcher.observe(el);
  plotly().then(found => { Plotly = found; if (alive) draw(); },
                error => { el.textContent = "No chart: " + error.message; });
  return () => { alive = false; watcher.disconnect(); if (Plotly) Plotly.purge(el); };
}
export default { render };
"""

_FIGURE_CSS = """
.comera-figure { width: 100%; min-width: 280px; }
.comera-figure .main-svg text:not(.hoverlayer text, .bars text) {
  fill: var(--jp-content-font-color1, #767676) !important;
}
"""


@cache
def figure_mode() -> tuple[str, str]:
    """("live" | "plain", why): how figures are shown in this process.

    COMERA_LAB_FIGURES=live or plain decides; otherwise plain where anywidget is missing, ipywidgets is older than
    8, or the front end is Colab or VS Code, which fetch third-party widgets from the internet.
    """
    forced = os.environ.get("COMERA_LAB_FIGURES", "")
    if forced in ("live", "plain"):
        return forced, f"COMERA_LAB_FIGURES={forced}"
    if forced:
        raise ValueError(f'COMERA_LAB_FIGURES must be "live" or "plain", got {forced!r}. Unset it to choose by itself.')
    if find_spec("anywidget") is None:
        return "plain", 'anywidget is missing. For charts that move, install it with: pip install "comera_lab[lab]"'
    if int(ipywidgets.__version__.split(".")[0]) < 8:
        return "plain", f"ipywidgets {ipywidgets.__version__} is older than 8. Update with: pip install -U ipywidgets"
    if "google.colab" in sys.modules or "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ:
        return "plain", "this front end loads third-party widgets from the internet"
    return "live", "anywidget is installed"


@cache
def _widget_classes() -> tuple[Any, Any]:
    """(bundle class, figure class), made at the first live figure because anywidget is optional."""
    anywidget = import_module("anywidget")
    plotly_js = (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")

    class PlotlyBundle(anywidget.AnyWidget):  # type: ignore[name-defined]
        _esm = _BUNDLE_JS
        source = traitlets.Unicode(plotly_js).tag(sync=True)

    class FigureView(anywidget.AnyWidget):  # type: ignore[name-defined]
        _esm = _FIGURE_JS
        _css = _FIGURE_CSS
        figure = traitlets.Dict().tag(sync=True)
        description = traitlets.Unicode("").tag(sync=True)
        clicked = traitlets.Dict().tag(sync=True)

    return PlotlyBundle, FigureView


_bundles: list[Any] = []


class LiveFigure:
    """A go.Figure on the page. Change it inside `with live.edit() as figure:`; one message goes out at the end.

    `figure` is the plain go.Figure, `widget` what to put into a box, `mode` "live" or "plain". `edit` holds the
    figure's lock: a slider callback and the training thread may both use it. `description` is read out by
    screen readers.
    """

    def __init__(self, figure: go.Figure, css_class: str, description: str) -> None:
        self.figure = figure
        self.mode = figure_mode()[0]
        self.lock = threading.RLock()
        self.refreshes = 0
        if self.mode == "live":
            bundle_class, view_class = _widget_classes()
            if not _bundles:
                _bundles.append(bundle_class())  # never shown, never closed
            self.widget = view_class(figure=self._as_json(), description=description)
        else:
            self.widget = ipywidgets.Output()
            self._show_plain()
        self.widget.add_class(css_class)

    @contextmanager
    def edit(self, description: str | None = None) -> Iterator[go.Figure]:
        with self.lock:
            yield self.figure
            self.refreshes += 1
            if self.mode == "live":
                with self.widget.hold_sync():
                    if description is not None:
                        self.widget.description = description
                    self.widget.figure = self._as_json()
            else:
                self._show_plain()

    def replace(self, figure: go.Figure, description: str | None = None) -> None:
        """Show `figure` from now on, in the same place."""
        with self.lock:
            self.figure = figure
            with self.edit(description):
                pass

    def on_click(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener(trace, point)` when a point is clicked; plain figures tell of no clicks."""
        if self.mode == "live":
            self.widget.observe(
                lambda change: listener(int(change["new"]["trace"]), int(change["new"]["point"])), names="clicked"
            )

    def close(self) -> None:
        self.widget.close()

    def _as_json(self) -> dict[str, Any]:
        whole: dict[str, Any] = self.figure.to_dict()
        return {"data": whole["data"], "layout": whole["layout"]}

    def _show_plain(self) -> None:
        bundle = {"application/vnd.plotly.v1+json": {**self._as_json(), "config": {"displayModeBar": False}}}
        output = {"output_type": "display_data", "data": bundle, "metadata": {}}
        self.widget.outputs = (output,)


class Throttle:
    """Calls `draw` at most `per_second` times and never twice at once; of a burst of calls the last is never lost.

    A call that comes too early, or while `draw` is still at work, is made up for by a timer: the picture always
    ends at the last value.
    """

    def __init__(self, draw: Callable[[], None], per_second: float = DRAGS_PER_SECOND) -> None:
        self._draw, self._period_s = draw, 1.0 / per_second
        self._lock = threading.Lock()
        self._ready_at = 0.0
        self._drawing = self._missed = self._cancelled = False
        self._timer: threading.Timer | None = None

    def __call__(self) -> None:
        with self._lock:
            if self._drawing or self._timer is not None:
                self._missed = True
                return
            wait_s = self._ready_at - time.monotonic()
            if wait_s > 0:
                self._wait(wait_s)
                return
            self._drawing = True
        self._run()

    def cancel(self) -> None:
        """Draw no more."""
        with self._lock:
            self._cancelled = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wait(self, wait_s: float) -> None:
        self._missed = False
        if not self._cancelled:
            self._timer = threading.Timer(wait_s, self._late)
            self._timer.daemon = True
            self._timer.start()

    def _late(self) -> None:
        with self._lock:
            if self._cancelled:
                return
            self._timer, self._drawing, self._missed = None, True, False
        self._run()

    def _run(self) -> None:
        try:
            self._draw()
        finally:
            with self._lock:
                self._drawing = False
                self._ready_at = time.monotonic() + self._period_s
                if self._missed:
                    self._wait(self._period_s)


class Pace:
    """`due()` is True at most `per_second` times a second: for a loop that draws while it works."""

    def __init__(self, per_second: float = REFRESHES_PER_SECOND) -> None:
        self._period_s = 1.0 / per_second
        self._next = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._period_s
        return True


class History:
    """A growing table of numbers, kept whole; a figure gets at most MAX_POINTS of its rows."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._values = np.empty((256, len(columns)))
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, *values: float) -> None:
        if self._rows == len(self._values):
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._values[self._rows] = values
        self._rows += 1

    def __getitem__(self, column: str) -> npt.NDArray[np.float64]:
        """The whole column, as a view."""
        return self._values[: self._rows, self._columns.index(column)]

    def sample(self, column: str, limit: int = MAX_POINTS) -> npt.NDArray[np.float64]:
        """At most `limit` evenly spaced entries of a column; the first and the last are always among them."""
        if self._rows <= limit:
            return self[column].copy()
        picked = np.linspace(0, self._rows - 1, limit).round().astype(np.int64)
        return np.asarray(self[column][picked])
