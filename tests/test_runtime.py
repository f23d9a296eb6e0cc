"""The machine as seen through fake trees, fake platforms and the real process."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import comera_lab
from comera_lab.runtime import (
    AllocatorStatus,
    check_version,
    check_versions,
    cores_allowed,
    cpu_quota,
    doctor,
    limit_threads,
    machine,
    memory_limit_bytes,
    packages,
    physical_memory_bytes,
    pick_device,
    report,
    require,
    seed_everything,
    triton_status,
    tune_cpu_allocator,
)

MIB = 2**20
GOOD_WIDGETS = {
    "ipywidgets": "8.1.9",
    "jupyterlab_widgets": "3.0.17",
    "anywidget": "0.11.0",
    "plotly": "7.1.0",
    "jupyterlab": "4.6.6",
}
Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Write `path -> text` under a root with 8 GiB of memory and return the root."""

    def build(files: dict[str, str]) -> Path:
        for path, text in {"proc/meminfo": "MemTotal:    8388608 kB\nMemFree: 1 kB\n", **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return build


@pytest.fixture
def fresh_allocator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A glibc that only writes down its calls, 16 GiB of memory and no limit; the list of calls."""
    calls: list[tuple[int, ...]] = []

    def malloc(size: int) -> int:
        calls.append((size,))
        return 4096

    def madvise(start: int, size: int, advice: int) -> int:
        calls.append((start, size, advice))
        return 0

    def free(block: int) -> None:
        calls.append((block,))

    def mallopt(parameter: int, value: int) -> int:
        calls.append((parameter, value))
        return 1

    monkeypatch.setattr(machine, "_allocator", AllocatorStatus(False, "untouched"))
    libc = types.SimpleNamespace(mallopt=mallopt, malloc=malloc, madvise=madvise, free=free)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(machine, "physical_memory_bytes", lambda: 16 * 1024 * MIB)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: None)
    monkeypatch.delenv("COMERA_LAB_ALLOCATOR", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return calls


# limits


def test_memory_limit_v2_is_the_smallest_of_the_groups_above(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{2048 * MIB}\n",
        }
    )
    assert memory_limit_bytes(root) == 2048 * MIB


def test_memory_limit_v1_inside_a_container_that_sees_the_hosts_path(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert memory_limit_bytes(root) == 512 * MIB
    assert cpu_quota(root) == 1.5


def test_v1_controllers_mounted_alone_are_found_too(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    assert cpu_quota(root) == 3


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["no groups", "no files", "v2 without limits", "v1 without limits"],
)
def test_no_limit_is_none(tree: Tree, files: dict[str, str]) -> None:
    root = tree(files)
    assert (memory_limit_bytes(root), cpu_quota(root)) == (None, None)


def test_address_space_limit_counts(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(RLIMIT_AS=9, RLIM_INFINITY=-1, getrlimit=lambda kind: (1536 * MIB, -1))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "resource", fake)
    assert memory_limit_bytes(tree({})) == 1536 * MIB


def test_physical_memory_is_read_in_bytes_and_unknown_is_none(tree: Tree, tmp_path: Path) -> None:
    assert physical_memory_bytes(tmp_path / "empty") is None
    assert physical_memory_bytes(tree({})) == 8192 * MIB
    real = physical_memory_bytes()
    assert real is None or real > 256 * MIB


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("150000", 1), ("200000", 2), ("99900000", 4)])
def test_cores_allowed_is_the_smaller_of_affinity_and_quota(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    root = tree({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
    assert cores_allowed(root) == cores


def test_cores_allowed_without_affinity_as_on_macos(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert cores_allowed(tree({})) == 10


def test_limit_threads_caps_torch_and_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "cores_allowed", lambda: 2)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert limit_threads() == torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert limit_threads() == torch.get_num_threads() == 1
        assert limit_threads(2) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_limit_threads_refuses_zero() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        limit_threads(0)


def test_pick_device_names_what_is_here() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device().type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match=r"device must be one of .*cpu on this machine, got 'tpu'"):
        pick_device("tpu")
    with pytest.raises(ValueError, match="got 'cpu:9'"):
        pick_device("cpu:9")


# allocator


def test_allocator_keeps_freed_pages_and_is_set_once(fresh_allocator: list[tuple[int, ...]]) -> None:
    assert tune_cpu_allocator().tuned
    assert tune_cpu_allocator() == machine.allocator_status()
    # malloc.h: M_MMAP_MAX -4, M_TRIM_THRESHOLD -1, M_TOP_PAD -2; mman.h: MADV_HUGEPAGE 14, for whole pages of 2 MiB
    assert fresh_allocator[:3] == [(-4, 0), (-1, 2**31 - 1), (-2, 64 * MIB)]
    assert fresh_allocator[3:] == [(2048 * MIB,), (2 * MIB, 2046 * MIB, 14), (4096,)]
    assert "huge pages" in machine.allocator_status().reason


@pytest.mark.parametrize(("block", "answer"), [(None, 0), (4096, -1)], ids=["no address space", "refused"])
def test_allocator_is_tuned_without_huge_pages_too(
    fresh_allocator: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, block: int | None, answer: int
) -> None:
    libc = ctypes.CDLL(None)
    monkeypatch.setattr(libc, "malloc", lambda size: block)
    monkeypatch.setattr(libc, "madvise", lambda *_: answer)
    assert tune_cpu_allocator().tuned
    assert "small pages" in machine.allocator_status().reason


def _switch_off(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("COMERA_LAB_ALLOCATOR", "off")


def _macos(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "platform", "darwin")
    patch.setattr(platform, "system", lambda: "Darwin")


def _windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "platform", "win32")
    patch.setattr(platform, "system", lambda: "Windows")


def _musl(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(platform, "libc_ver", lambda: ("", ""))


def _tight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "memory_limit_bytes", lambda: 2048 * MIB)


def _preloaded(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_switch_off, "COMERA_LAB_ALLOCATOR=off"),
        (_macos, "Darwin without glibc"),
        (_windows, "Windows without glibc"),
        (_musl, "without glibc"),
        (_tight, "only 2,048 MiB"),
        (_preloaded, "libjemalloc"),
    ],
)
def test_allocator_is_left_alone(
    fresh_allocator: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    change(monkeypatch)
    status = tune_cpu_allocator()
    assert not status.tuned
    assert reason in status.reason
    assert fresh_allocator == []
    assert reason in doctor().text()


def test_allocator_reports_a_refusal(fresh_allocator: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=lambda *_: 0))
    assert tune_cpu_allocator() == (False, "glibc refused mallopt parameters [-4, -1, -2]")


def test_tuned_glibc_takes_freed_memory_again_without_new_page_faults() -> None:
    """40 MiB are 10,240 pages: a new tensor costs about as many faults by default, none once the heap settled."""
    code = (
        "import resource, torch; from comera_lab.runtime import machine;"
        "machine.memory_limit_bytes = lambda: None; machine.physical_memory_bytes = lambda: None;"
        "print(machine.tune_cpu_allocator().tuned); torch.set_num_threads(1);"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(40): torch.ones(10 * 2**20)\n"
        "start = faults()\n"
        "for _ in range(10): torch.ones(10 * 2**20)\n"
        "print(faults() - start)"
    )

    def run(switch: str) -> tuple[str, int]:
        environment = {**os.environ, "COMERA_LAB_ALLOCATOR": switch}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        tuned, faults = done.stdout.split()
        return tuned, int(faults)

    if platform.libc_ver()[0] != "glibc":
        assert not tune_cpu_allocator().tuned
        return
    default, tuned = run("off"), run("on")
    assert (default[0], tuned[0]) == ("False", "True")
    assert tuned[1] * 10 < default[1], f"page faults: {default[1]} by default, {tuned[1]} tuned"


# seeds


def test_seed_everything_repeats_every_generator() -> None:
    def draw() -> list[float]:
        generator = seed_everything(7)
        return [
            random.random(),
            float(numpy.random.rand()),  # noqa: NPY002
            float(torch.rand(())),
            float(torch.rand((), generator=generator)),
        ]

    assert draw() == draw()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"got {seed}"):
        seed_everything(seed)


# packages


def test_require_returns_the_module() -> None:
    assert require("json", "reading") is json


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("plotly", 'plotly is needed for figures. Install it with: pip install "comera_lab[lab]"'),
        ("sklearn", 'scikit-learn is needed for figures. Install it with: pip install "comera_lab[lab]"'),
        ("jupytext", 'jupytext is needed for figures. Install it with: pip install "comera_lab[test]"'),
    ],
)
def test_S01_a_missing_package_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, package: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        require(package, "figures")
    assert str(caught.value) == message


def test_require_does_not_call_a_broken_package_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('libfoo.so is gone')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"libfoo\.so is gone"):
        require("broken_package", "figures")


@pytest.mark.parametrize(
    ("installed", "minimum", "good"),
    [
        ("0.1.0", "0.1", True),
        ("0.1", "0.1.0", True),
        ("0.10.0", "0.9", True),
        ("1.0.0+local", "1.0", True),
        ("0.1.0", "0.1.1", False),
        ("0.9.3", "0.10", False),
    ],
)
def test_L07_old_package_gives_a_readable_message(
    monkeypatch: pytest.MonkeyPatch, installed: str, minimum: str, good: bool
) -> None:
    monkeypatch.setattr(comera_lab, "__version__", installed)
    if good:
        check_version(minimum)
        return
    with pytest.raises(ImportError, match=f"needs comera_lab {minimum} or newer, but {installed} is installed") as e:
        check_version(minimum)
    assert 'pip install --upgrade "comera_lab[lab]"' in str(e.value)


def test_check_version_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="got 'newest'"):
        check_version("newest")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ipywidgets": "7.8.5", "jupyterlab_widgets": "3.0.17"}, "need ipywidgets 8"),
        ({"ipywidgets": "8.1.9", "jupyterlab_widgets": "1.1.11"}, "do not match"),
        ({"ipywidgets": None, "jupyterlab_widgets": None}, "no sliders"),
    ],
    ids=["old kernel", "old lab", "none"],
)
def test_K08_unmatched_widgets_get_versions_verdict_and_cure(change: dict[str, str | None], said: str) -> None:
    verdict = check_versions({**GOOD_WIDGETS, **change})
    assert not verdict.ok
    for text in (said, f"ipywidgets {change['ipywidgets'] or 'missing'}", 'pip install --upgrade "comera_lab[lab]"'):
        assert text in verdict.text


def test_K08_matched_widgets_are_good_and_a_lab_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert check_versions(GOOD_WIDGETS) == (True, "ipywidgets 8.1.9, jupyterlab_widgets 3.0.17: these match.")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    verdict = check_versions({**GOOD_WIDGETS, "jupyterlab": None})
    assert verdict.ok
    assert "another environment" in verdict.text
    assert 'pip install "jupyterlab_widgets>=3,<4" anywidget' in verdict.text


def test_K01_missing_anywidget_gives_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**dict.fromkeys(packages.REPORTED), **GOOD_WIDGETS, "anywidget": None}
    monkeypatch.setattr(packages, "installed_versions", lambda: versions)
    told = doctor()
    assert [text for text in told.problems + told.advice if "anywidget" in text] == [check_versions(versions).text]
    assert "figures stay still pictures" in check_versions(versions).text


# triton


def _fake_triton(monkeypatch: pytest.MonkeyPatch, function_class: str, target: object = None) -> None:
    """Modules that look like an imported triton whose own functions are of `function_class`."""

    def get_current_target() -> object:
        if isinstance(target, Exception):
            raise target
        return target

    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_target=get_current_target))
    parts: dict[str, dict[str, object]] = {
        "triton": {"__spec__": importlib.util.spec_from_loader("triton", None)},
        "triton.language": {},
        "triton.language.standard": {"sum": type(function_class, (), {})()},
        "triton.runtime": {"driver": driver},
    }
    for name, attributes in parts.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def test_H02_absent_triton_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    status = triton_status()
    assert status.kind == "absent"
    assert "no official build for Darwin" in status.reason


@pytest.mark.parametrize("error", ["ImportError('libtriton.so: cannot open')", "OSError('bad ELF')", "KeyError(3)"])
def test_broken_triton_is_a_status_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    kind, reason = triton_status()
    assert kind == "broken"
    assert error.partition("(")[0] in reason
    assert any("triton" in text for text in doctor().problems)
    assert not doctor().ok


@pytest.mark.parametrize(
    ("environment", "function_class", "kind", "said"),
    [
        ("1", "InterpretedFunction", "interpreter", "TRITON_INTERPRET=1"),
        ("1", "JITFunction", "broken", "set after triton was imported"),
        ("0", "InterpretedFunction", "broken", "taken back after triton was imported"),
        ("0", "JITFunction", "no-gpu", "no GPU"),
    ],
)
def test_H01_triton_without_gpu(
    monkeypatch: pytest.MonkeyPatch, environment: str, function_class: str, kind: str, said: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _fake_triton(monkeypatch, function_class, RuntimeError("0 active drivers"))
    status = triton_status()
    assert status.kind == kind
    assert said in status.reason


def test_triton_with_gpu_compiles_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _fake_triton(monkeypatch, "JITFunction", types.SimpleNamespace(backend="cuda", arch=90))
    assert triton_status() == ("compile", "compiles for cuda 90")
    _fake_triton(monkeypatch, "JITFunction", RuntimeError("Failed to find C compiler"))
    status = triton_status()
    assert status.kind == "broken"
    assert "Failed to find C compiler" in status.reason


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import os; os.environ['TRITON_INTERPRET'] = '1'", "interpreter"),
        ("import triton, os; os.environ['TRITON_INTERPRET'] = '1'", "broken"),
    ],
    ids=["set before the import", "set after the import"],
)
def test_real_triton_tells_an_interpreter_that_came_too_late(code: str, kind: str) -> None:
    if importlib.util.find_spec("triton") is None:  # a platform without triton has one answer
        code, kind = "", "absent"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = f"{code}\nfrom comera_lab.runtime import triton_status; print(triton_status().kind)"
    done = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kind


# the report


def test_doctor_text_card_and_json_tell_the_same() -> None:
    told = doctor()
    card = told._repr_html_()
    for value in (torch.__version__, numpy.__version__, told.triton.kind, str(told.cores_visible)):
        assert value in told.text()
        assert value in card
    read = json.loads(json.dumps(told.as_dict()))
    assert read["ok"] is told.ok
    assert read["triton"]["reason"] == told.triton.reason
    assert str(told) == told.text()


def test_card_takes_the_themes_colours_and_escapes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "triton_status", lambda: report.TritonStatus("broken", "<script>alert(1)</script>"))
    told = doctor()
    card = told._repr_html_()
    assert "<script>" not in card
    assert "&lt;script&gt;" in card
    for variable in ("--jp-layout-color1", "--jp-ui-font-color1", "--jp-border-color1"):
        assert f"var({variable}, " in card, "each theme variable needs a fallback for other front ends"
    assert "✗" in told.headline
    assert "repair" in told.text()


def test_doctor_warns_of_small_memory_many_threads_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 1024 * MIB)
    monkeypatch.setattr(machine, "cores_allowed", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    told = doctor()
    assert any("8 threads on 1 allowed" in text for text in told.advice)
    assert any("Only 1,024 MiB" in text for text in told.advice)
    assert told.problems == ["torch 2.11 or newer is needed, this is 2.4.1+cpu."]
    assert "limited to 1,024 MiB" in told.text()
