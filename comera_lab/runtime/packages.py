"""Optional packages: one door, one message; versions; whether the notebook widgets fit together."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# import name -> name on the package index, where the two differ
DISTRIBUTIONS = {"sklearn": "scikit-learn", "IPython": "ipython", "pyarrow.parquet": "pyarrow", "yaml": "PyYAML",
                 "otter": "otter-grader"}  # fmt: skip
# Tools that only another extra brings; everything else comes with `lab`.
TEST_ONLY = frozenset({"jupytext", "nbclient", "nbconvert", "playwright", "psutil"})
DATA_ONLY = frozenset({"datasets", "pyarrow"})
COURSE_ONLY = frozenset({"PyYAML", "nbgrader", "otter-grader"})
HUGGINGFACE_ONLY = frozenset({"transformers", "accelerate"})
REPORTED = (
    "comera_lab", "jupyterlab", "ipykernel", "ipywidgets", "jupyterlab_widgets", "anywidget", "plotly",
    "nbformat", "tensorly", "scikit-learn", "safetensors", "triton",
)  # fmt: skip


def require(package: str, purpose: str) -> ModuleType:
    """The imported optional package, or an ImportError of one line that names it and the install command."""
    if util.find_spec(package.partition(".")[0]) is None:
        name = DISTRIBUTIONS.get(package, package)
        extras = {"data": DATA_ONLY, "course": COURSE_ONLY, "huggingface": HUGGINGFACE_ONLY, "test": TEST_ONLY}
        extra = next((extra for extra, names in extras.items() if name in names), "lab")
        raise ImportError(f'{name} is needed for {purpose}. Install it with: pip install "comera_lab[{extra}]"')
    return importlib.import_module(package)


def _numbers(version: str) -> tuple[int, ...]:
    """Leading release numbers: "0.2.0rc1+cpu" -> (0, 2, 0), closing zeros dropped for comparison."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ValueError(f'a version must start with a number, got {version!r}. Write it as "0.1".')
    parts = [int(part) for part in match[0].split(".")]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def older(version: str, minimum: str) -> bool:
    """Whether `version` comes before `minimum`, by release numbers."""
    return _numbers(version) < _numbers(minimum)


def check_version(minimum: str) -> None:
    """Raise ImportError if the installed comera_lab is older than `minimum`; for a lesson's first cell."""
    package = importlib.import_module("comera_lab")
    if older(package.__version__, minimum):
        raise ImportError(
            f"This lesson needs comera_lab {minimum} or newer, but {package.__version__} is installed at "
            f"{Path(str(package.__file__)).parent}. "
            'Update it with: pip install --upgrade "comera_lab[lab]"  and restart the kernel.'
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """Version of every package the kit can use, None where it is not installed. Imports none of them."""
    return {name: _version(name) for name in REPORTED}


class Verdict(NamedTuple):
    """A judgement in words."""

    ok: bool
    text: str


# major version of ipywidgets -> major version of its JupyterLab half, from the two projects' release notes
_LAB_HALF = {7: 1, 8: 3}
_WIDGET_CURE = 'pip install --upgrade "comera_lab[lab]", then restart JupyterLab and reload the page'


def check_versions(versions: Mapping[str, str | None] | None = None) -> Verdict:
    """Whether sliders and live figures can show, from the versions in the kernel's environment, with the cure.

    JupyterLab needs the front-end half of the widgets (jupyterlab_widgets, anywidget) in its own environment;
    when Lab runs from another one than the kernel, only the versions can say so.
    """
    versions = installed_versions() if versions is None else versions
    widgets, lab_half = versions.get("ipywidgets"), versions.get("jupyterlab_widgets")
    shown = f"ipywidgets {widgets or 'missing'}, jupyterlab_widgets {lab_half or 'missing'}"
    if widgets is None:
        return Verdict(False, f"{shown}: no sliders in notebooks. Cure: {_WIDGET_CURE}.")
    major = _numbers(widgets)[0]
    if major not in _LAB_HALF or major < 8:
        return Verdict(False, f"{shown}: the panels need ipywidgets 8. Cure: {_WIDGET_CURE}.")
    if lab_half is not None and _numbers(lab_half)[0] != _LAB_HALF[major]:
        return Verdict(
            False,
            f"{shown}: these do not match, widgets stay blank; ipywidgets {major} needs jupyterlab_widgets "
            f"{_LAB_HALF[major]}. Cure: {_WIDGET_CURE}.",
        )
    if versions.get("plotly") is not None and versions.get("anywidget") is None:
        return Verdict(False, f"{shown}, anywidget missing: figures stay still pictures. Cure: {_WIDGET_CURE}.")
    if versions.get("jupyterlab") is None and "JPY_PARENT_PID" in os.environ:
        return Verdict(
            True,
            f"{shown}. JupyterLab runs from another environment than this kernel: if widgets stay blank, run there: "
            f'pip install "jupyterlab_widgets>={_LAB_HALF[major]},<{_LAB_HALF[major] + 1}" anywidget',
        )
    return Verdict(True, f"{shown}: these match.")
