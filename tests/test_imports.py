"""Who may import whom, what `import comera_lab` needs, and what happens where an optional package is missing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import comera_lab

PACKAGE = Path(comera_lab.__file__).parent
# A room imports from rooms on its left. `runtime` knows nothing of the kit, so everybody may ask it.
ROOMS = (
    "runtime", "shapes", "cores", "kernels", "contraction", "layers", "objectives", "optimizers", "adapters",
    "memory", "models", "experiments", "panels", "teaching", "commands", "__main__",
)  # fmt: skip
# What a module may import at its top besides the standard library and the kit itself
CORE = {"torch", "numpy"}
PERMITTED = {"panels": {"ipywidgets", "plotly", "traitlets", "anywidget"}, "kernels": {"triton"}}
# Modules whose task is the device itself
DEVICE_MODULES = {"runtime", "kernels", "memory", "experiments/bench.py"}
OPTIONAL = (
    "IPython", "anywidget", "ipywidgets", "jupyterlab", "jupytext", "nbformat", "plotly", "psutil",
    "safetensors", "scipy", "sklearn", "tensorly", "traitlets", "triton",
)  # fmt: skip


# the checker


def faults(package: Path) -> list[str]:
    """One line per broken rule in the modules below `package`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        room = name.partition("/")[0].removesuffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{name}:{line}: {fault}" for line, fault in _import_faults(tree, room)]
        if room not in DEVICE_MODULES and name not in DEVICE_MODULES:
            found += [f"{name}:{line}: {fault}" for line, fault in _device_faults(tree)]
    return found


def _import_faults(tree: ast.Module, room: str) -> Iterator[tuple[int, str]]:
    top = set(_top_statements(tree.body))
    if room != "__init__" and room not in ROOMS:
        yield 1, f"{room} has no place in the order of rooms"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "relative import"
                continue
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "comera_lab" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "comera_lab":
                other = rest.partition(".")[0]
                if room != "__init__" and other != "__version__" and not _left_of(other, room):
                    yield node.lineno, f"{room} imports {name}"
            elif node in top and first not in CORE | PERMITTED.get(room, set()) | sys.stdlib_module_names:
                yield node.lineno, f"{first} imported at the top"


def _left_of(other: str, room: str) -> bool:
    return other in ROOMS and ROOMS.index(other) <= ROOMS.index(room)


def _top_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import: not those in functions, nor those for the type checker alone."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _top_statements(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _top_statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_statements(handler.body)


def _device_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """A device name may be compared with or be a key; anything else puts a tensor on a device nobody chose."""
    harmless = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            harmless |= {id(part) for part in ast.walk(node)}
        elif isinstance(node, ast.Subscript):
            harmless |= {id(part) for part in ast.walk(node.slice)}
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_name and re.fullmatch(r"cuda(:\d+)?", node.value) and id(node) not in harmless:
            yield node.lineno, f"hard-coded device {node.value!r}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield node.lineno, "hard-coded device in .cuda()"


def test_S05_modules_keep_to_the_order_of_rooms_and_name_no_device() -> None:
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("shapes.py", "from comera_lab.cores import to_dense", "shapes imports comera_lab.cores"),
        ("runtime/machine.py", "from comera_lab import shapes", "runtime imports comera_lab.shapes"),
        ("cores.py", "def f():\n    import comera_lab.panels", "cores imports comera_lab.panels"),
        ("layers.py", "from comera_lab import TTLinear", "layers imports comera_lab.TTLinear"),
        ("helpers.py", "import os", "helpers has no place in the order of rooms"),
        ("panels/shape.py", "from .state import LabState", "relative import"),
        ("layers.py", "import safetensors.torch", "safetensors imported at the top"),
        ("cores.py", "try:\n    import tensorly\nexcept ImportError:\n    pass", "tensorly imported at the top"),
        ("memory.py", "class A:\n    import plotly", "plotly imported at the top"),
        ("panels/shape.py", "import sklearn", "sklearn imported at the top"),
        ("layers.py", "x.to('cuda')", "hard-coded device 'cuda'"),
        ("layers.py", "def f(device='cuda:0'): pass", "hard-coded device 'cuda:0'"),
        ("models/mlp.py", "model.cuda()", "hard-coded device in .cuda()"),
    ],
)
def test_the_checker_sees_each_fault(tmp_path: Path, path: str, text: str, fault: str) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    (found,) = faults(tmp_path)
    assert found.endswith(fault)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cores.py", "import math\nimport torch\nfrom comera_lab.shapes import TTShape\nimport numpy as np"),
        ("cores.py", "def f():\n    import tensorly\n    from comera_lab.runtime import require"),
        ("cores.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tensorly"),
        ("panels/shape.py", "import ipywidgets, plotly\nfrom comera_lab.panels.state import LabState"),
        ("layers.py", "if x.device.type == 'cuda' or x.device.type in ('cpu', 'cuda'): states['cuda'] = 1"),
        ("runtime/machine.py", "kinds = ['cuda']\nfrom comera_lab import __version__"),
        ("__init__.py", "from comera_lab.layers import TTLinear"),
    ],
)
def test_the_checker_lets_good_modules_pass(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    assert faults(tmp_path) == []


# missing packages

# Put before a program: the packages named on the command line are as if never installed.
HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = set(sys.argv.pop().split(","))
distributions = {"scikit_learn" if name == "sklearn" else name.lower() for name in hidden}
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)
    @staticmethod
    def find_distributions(context):
        found = PathFinder.find_distributions(context)
        return (d for d in found if d.metadata["Name"].lower().replace("-", "_") not in distributions)
sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(program: str, hidden: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::ImportWarning", "-c", program, *([hidden] if hidden else [])]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, env={**variables, **environment}, capture_output=True, text=True, check=False)


def test_S01_core_works_without_any_optional_package() -> None:
    """Train a TT layer, predict its bytes, ask the doctor; every door names its package and the extra."""
    program = """
import torch, comera_lab
from comera_lab import memory, runtime
layer = comera_lab.TTLinear(12, 8, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(3, 12)).square().sum().backward(); optimizer.step()
conv = torch.nn.Conv2d(1, 2, 3)
assert memory.predict(layer, (3, 12)).weights == 4 * sum(p.numel() for p in layer.parameters())
assert memory.predict(conv, (1, 1, 8, 8)).total > 0
assert runtime.triton_status().kind == "absent", runtime.triton_status()
assert not hidden & {name.partition(".")[0] for name in sys.modules}
from comera_lab.__main__ import main
assert main(["doctor"]) == 0
def door(package, call):
    try:
        call()
    except ImportError as error:
        assert package in str(error) and 'Install it with: pip install "comera_lab[' in str(error), error
    else:
        raise AssertionError(package)
from comera_lab.experiments.datasets import digits
door("tensorly", lambda: comera_lab.to_tensorly([torch.ones(1, 2, 1)]))
door("safetensors", lambda: layer.save("never_written.safetensors"))
door("scikit-learn", digits)
door("ipywidgets", lambda: __import__("comera_lab.panels"))
"""
    done = run(HIDE + program, ",".join(OPTIONAL))
    assert done.returncode == 0, done.stderr
    assert "triton     absent" in done.stdout
    assert "plotly missing" in done.stdout


def test_S01_core_imports_without_any_one_of_them() -> None:
    program = """
import importlib
for name in sorted(hidden):
    only = {name}
    hidden.clear(); hidden.update(only)
    for loaded in [m for m in sys.modules if m.partition(".")[0] in {"comera_lab", name}]:
        del sys.modules[loaded]
    comera_lab = importlib.import_module("comera_lab")
    report = importlib.import_module("comera_lab.runtime").doctor()
    comera_lab.TTLinear(4, 4, 2)
    print(name, report.triton.kind)
"""
    done = run(HIDE + program, ",".join(OPTIONAL))
    assert done.returncode == 0, done.stderr
    told = dict(line.split() for line in done.stdout.splitlines())
    assert set(told) == set(OPTIONAL)
    assert told["triton"] == "absent"


def test_H01_every_module_imports_quietly_without_a_gpu() -> None:
    program = """
import importlib, pkgutil, sys, time
started = time.process_time()
import comera_lab
names = [m.name for m in pkgutil.walk_packages(comera_lab.__path__, "comera_lab.") if "__main__" not in m.name]
for name in names:
    importlib.import_module(name)
print(len(names), time.process_time() - started)
"""
    done = run(program, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    count, seconds = done.stdout.split()
    assert int(count) > 20
    assert float(seconds) < 10


def test_H02_doctor_reports_a_broken_triton_and_nothing_else_breaks(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise OSError('libtriton.so: wrong architecture')")
    program = """
import torch, comera_lab
from comera_lab.__main__ import main
comera_lab.TTLinear(6, 6, 2)(torch.ones(2, 6)).sum().backward()
raise SystemExit(main(["doctor"]))
"""
    done = run(program, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "triton     broken: import triton failed with OSError: libtriton.so: wrong architecture" in done.stdout
    assert "Traceback" not in done.stderr


def test_H02_K01_only_torch_and_numpy_are_required() -> None:
    requirements = metadata.requires("comera_lab") or []
    always = {re.split(r"[^\w-]", text)[0] for text in requirements if "extra ==" not in text}
    assert always == CORE
    for text in requirements:
        if text.startswith("triton"):
            assert "platform_system" in text, "no wheel exists for macOS and Windows"
    assert any(re.match(r"anywidget.*extra == .notebook.", text) for text in requirements)
    assert any(re.match(r"ipywidgets.*>=8.*extra == .notebook.", text) for text in requirements)


def test_import_changes_nothing_in_the_process() -> None:
    program = """
import os, torch
state, threads, before = torch.get_rng_state(), torch.get_num_threads(), dict(os.environ)
import comera_lab
from comera_lab import runtime
assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
assert before == dict(os.environ) and not runtime.allocator_status().tuned
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
