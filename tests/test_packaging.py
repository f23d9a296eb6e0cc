"""What is installed, what is pinned and what a wheel holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "binder" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
PINS = {canonicalize_name(name): version for name, version in PINS.items()}


def requirements(*extras):
    found = [*PROJECT["dependencies"]]
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == "comera_lab":
                found += [str(r) for r in requirements(*requirement.extras)[len(PROJECT["dependencies"]) :]]
            else:
                found.append(text)
    return [Requirement(text) for text in found]


def test_every_requirement_is_pinned_to_a_version_it_accepts():
    for requirement in requirements("test"):
        version = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_H02_triton_is_never_required_unconditionally():
    assert {requirement.name for requirement in requirements()} == {"torch", "numpy"}
    (triton,) = [requirement for requirement in requirements("lab") if requirement.name == "triton"]
    assert triton.marker.evaluate({"platform_system": "Linux", "platform_machine": "x86_64", "extra": "lab"})
    for system, machine in [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "ppc64le")]:
        assert not triton.marker.evaluate({"platform_system": system, "platform_machine": machine, "extra": "lab"})


def test_K01_K06_the_notebook_extra_pulls_all_a_figure_needs():
    names = {requirement.name: requirement for requirement in requirements("notebook")}
    assert {"anywidget", "ipywidgets", "nbformat", "plotly", "jupyterlab", "ipykernel"} <= names.keys()
    assert not names["ipywidgets"].specifier.contains("7.8.5")


def test_K08_pinned_widget_packages_belong_together():
    assert PINS["ipywidgets"].startswith("8.")
    assert PINS["jupyterlab-widgets"].startswith("3.")
    assert PINS["widgetsnbextension"].startswith("4.")
    assert PINS["jupyterlab"].startswith("4.")


def test_L01_the_binder_image_has_cpu_wheels_and_no_cuda():
    assert not [name for name in PINS if name.startswith(("nvidia", "cuda"))]
    environment = (ROOT / "binder" / "environment.yml").read_text()
    assert f"pytorch-cpu={PINS['torch']}" in environment
    assert re.search(r"python=3\.\d+", environment)
    build = (ROOT / "binder" / "postBuild").read_text()
    assert "--no-cache-dir -c binder/constraints.txt" in build
    for variable in ("OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"):
        assert variable in (ROOT / "binder" / "start").read_text()
    for script in ("postBuild", "start"):
        assert (ROOT / "binder" / script).stat().st_mode & 0o111


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        text=True,
    )
    return {path.suffix: path for path in folder.iterdir()}


@pytest.mark.slow
def test_S02_the_wheel_holds_every_module_and_imports_elsewhere(built, tmp_path):
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "comera_lab").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    outside = [path for path in (ROOT / "data", ROOT / "notebooks") for path in path.rglob("*")]
    data = {f"comera_lab/{path.relative_to(ROOT)}" for path in outside if path.is_file()}
    data = {name for name in data if "/." not in name}  # what an opened lesson leaves behind
    with zipfile.ZipFile(built[".whl"]) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("comera_lab/")}
        wheel.extractall(tmp_path)
    assert packed == source | data
    with tarfile.open(built[".gz"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert source <= names
    modules = [
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in packed if name.endswith(".py")
    ]
    code = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        f"for name in {sorted(modules)}:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__file__.startswith(sys.argv[1]), module.__file__\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_top_level_is_as_agreed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in tracked}
    assert top <= {
        "pyproject.toml", "comera_lab", "notebooks", "tests", "data", "binder", "README.md", "LICENSE", "Makefile",
        ".ci", ".github", ".gitignore",
    }  # fmt: skip


def test_files_stay_short_and_small():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "comera_lab").rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 350
    }
    assert not long
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in tracked if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 3_000_000]
