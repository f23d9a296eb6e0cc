"""The door to the kernels: what can run here, why not, and which calls take one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from interpreter import in_interpreter
from tolerances import AUTOCAST, RELATIVE, relative_error

import comera_lab
from comera_lab import TTEmbedding, TTLinear, kernels
from comera_lab.contraction import (
    apply_cores,
    apply_cores_together,
    fused,
    lookup_rows,
    naive_apply_cores,
    naive_lookup_rows,
)
from comera_lab.kernels import KernelStatus, available, takes_triton, unsupported
from comera_lab.layers import forward_together
from comera_lab.shapes import TTShape

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env={**variables, **environment}, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _fresh_verdicts():
    kernels._probe_fault.cache_clear()
    kernels._warn_once.cache_clear()
    yield
    kernels._probe_fault.cache_clear()
    kernels._warn_once.cache_clear()


# what triton can do

STUBS = {
    "an empty stub": ("", "No module named 'triton.language'"),
    "raises at import": ("raise OSError('libtriton.so: wrong architecture')", "libtriton.so: wrong architecture"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stub", STUBS)
def test_H02_a_broken_triton_is_one_warning_and_an_error_when_strict(stub: str, tmp_path: Path) -> None:
    text, reason = STUBS[stub]
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(text)
    program = """
import warnings, sys, torch, comera_lab
from comera_lab import kernels
assert "triton" not in sys.modules
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    kinds = {kernels.available().kind for _ in range(3)}
    comera_lab.TTLinear(6, 6, 2)(torch.ones(2, 6)).sum().backward()
print(kinds, len(told), told[0].category.__name__, told[0].message)
for call in (lambda: kernels.available(strict=True), lambda: kernels.takes_triton("triton", torch.device("cpu"), None)):
    try:
        call()
    except (ImportError, ValueError) as error:
        print(type(error).__name__, error)
"""
    done = run(program, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, strict, named = done.stdout.splitlines()
    assert first.startswith("{'broken'} 1 RuntimeWarning triton kernels cannot run, torch code is used:")
    assert strict.startswith("ImportError triton kernels cannot run: ")
    assert named.startswith("ValueError backend='triton' cannot run this: ")
    for line in (first, strict, named):
        assert reason in line


def test_H02_absent_triton_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(RuntimeWarning, match="triton is not installed") as told:
        assert available().kind == available().kind == "absent"
    assert len(told) == 1
    with pytest.raises(ImportError, match="triton is not installed"):
        available(strict=True)


@pytest.mark.parametrize(
    ("wrote", "reason"),
    [
        (RuntimeError("ptxas: not found"), "launching a triton kernel failed with RuntimeError: ptxas: not found"),
        (0, "a triton kernel that writes 3 wrote 0"),
    ],
)
def test_a_triton_that_fails_at_the_call_is_broken(wrote: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(device: torch.device) -> object:
        assert device.type == "cuda"
        if isinstance(wrote, Exception):
            raise wrote
        return wrote

    probe = types.SimpleNamespace(wrote=launch, COUNT=3)
    monkeypatch.setattr(kernels, "triton_status", lambda: KernelStatus("compile", "compiles for cuda 90"))
    monkeypatch.setitem(sys.modules, "comera_lab.kernels.probe", probe)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="torch code is used") as told:
        assert available() == ("broken", reason)
        assert not takes_triton(None, GPU, None)
    assert len(told) == 1
    with pytest.raises(ValueError, match="cannot run this: (launching a|a triton kernel)"):
        takes_triton("triton", GPU, None)


def test_H01_an_interpreter_chosen_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:  # a platform without triton has one answer
        assert available().kind == "absent"
        return
    importlib.import_module("triton.language.standard")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.warns(RuntimeWarning, match="TRITON_INTERPRET was set after triton was imported"):
        assert available().kind == "broken"


@in_interpreter
def test_the_probe_runs_in_the_interpreter() -> None:
    assert available() == available(strict=True)
    assert available().kind == "interpreter"
    assert takes_triton("triton", CPU, None)
    assert not takes_triton(None, CPU, None), "nobody wants the interpreter unasked"


def test_H01_H08_import_and_a_cpu_step_touch_no_triton_and_no_home() -> None:
    program = """
import sys, torch, comera_lab
from comera_lab import kernels
layer, table = comera_lab.TTLinear(6, 6, 2), comera_lab.TTEmbedding(9, 4, 2)
(layer(torch.ones(2, 6)).sum() + table(torch.tensor([1, 2])).sum()).backward()
assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
"""
    done = run(program, HOME="/proc/nowhere", TRITON_CACHE_DIR="/proc/nowhere/cache", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# which calls take a kernel


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str = "compile", capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(kernels, "available", lambda: KernelStatus(kind, "compiles for cuda 90"))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_none_takes_triton_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert takes_triton(None, GPU, None)
    assert takes_triton("triton", GPU, None)
    assert not takes_triton("torch", GPU, None)
    assert not takes_triton(None, CPU, None)
    assert not takes_triton(None, GPU, "the rank is too large")
    with pytest.raises(ValueError, match="the rank is too large"):
        takes_triton("triton", GPU, "the rank is too large")
    with pytest.raises(ValueError, match="on the CPU and there is"):
        takes_triton("triton", CPU, None)
    with pytest.raises(ValueError, match="the tensors are on meta"):
        takes_triton("triton", torch.device("meta"), None)
    with pytest.raises(ValueError, match="backend must be None, 'torch' or 'triton', got 'cuda'"):
        takes_triton("cuda", GPU, None)


def test_gpus_without_the_counted_instructions_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability=(7, 5))
    assert not takes_triton(None, GPU, None)
    with pytest.raises(ValueError, match=r"need compute capability \(8, 0\), this GPU has \(7, 5\)"):
        takes_triton("triton", GPU, None)
    pretend(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="laid out for NVIDIA"):
        takes_triton("triton", GPU, None)


def test_H03_unsupported_names_rank_dtype_and_devices() -> None:
    x = torch.ones(2)
    assert unsupported(128, x, x) is None
    assert unsupported(129, x) == "the kernels take ranks up to 128, got 129"
    assert "got ['torch.float64']" in str(unsupported(3, x.double()))
    assert unsupported(3, x.double(), dtype=torch.bfloat16) is None
    assert "['torch.float16', 'torch.float32']" in str(unsupported(3, x, x.half()))
    assert unsupported(3, x, x.to("meta")) == "the tensors are on several devices: ['cpu', 'meta']"


def test_named_backends_that_cannot_run_here_raise_before_anything_is_computed() -> None:
    layer, table = TTLinear(6, 6, 2, backend="triton"), TTEmbedding(9, 4, 2, backend="triton")
    x, ids = torch.ones(2, 6), torch.tensor([1, 2])
    for call in (lambda: layer(x), lambda: table(ids), lambda: forward_together(x, [layer, layer])):
        with pytest.raises(ValueError, match="backend='triton' cannot run this: the tensors are on the CPU"):
            call()
    layer.backend = table.backend = "torch"
    want, rows = layer(x), table(ids)
    layer.backend = table.backend = None
    assert torch.equal(layer(x), want)
    assert torch.equal(table(ids), rows)
    with pytest.raises(ValueError, match="got 'tritno'"):
        apply_cores(x, list(layer.cores), layer.shape, backend="tritno")


# calls that take a kernel, in the interpreter


def assert_gradients_equal(got: torch.Tensor, want: torch.Tensor, cores, truths, dtype=torch.float32) -> None:
    assert relative_error(got, want) < RELATIVE[dtype]
    ours, theirs = torch.autograd.grad(got.sin().sum(), cores), torch.autograd.grad(want.sin().sum(), truths)
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other) < RELATIVE[dtype]


@in_interpreter
def test_a_tt_layer_on_triton_equals_the_dense_matrix() -> None:
    layer = TTLinear(30, 22, 4, backend="triton", generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(1))
    cores, bias = [core.detach().double().requires_grad_() for core in layer.cores], layer.bias.detach().double()
    want = naive_apply_cores(x.double(), cores, layer.shape, bias)
    assert layer(x).shape == (2, 5, 22)
    assert_gradients_equal(layer(x), want, list(layer.cores), cores)
    both = forward_together(x, [layer, layer])
    assert all(torch.equal(out, layer(x)) for out in both)
    layer.backend = "torch"
    assert relative_error(layer(x), want) < RELATIVE[torch.float32]
    assert len(apply_cores_together(x, [(list(layer.cores), layer.shape, layer.bias)] * 2, "triton")) == 2
    layer.add_gates()
    with torch.no_grad():
        layer.gates[1][0] = 0
    plain = layer(x)
    layer.backend = "triton"
    assert relative_error(layer(x), plain) < RELATIVE[torch.float32]


@in_interpreter
def test_forced_cuts_wide_ranks_and_float64_have_no_kernel() -> None:
    shape = TTShape.for_features(30, 22, 4)
    layer = TTLinear(30, 22, 4)
    cores, x = list(layer.cores), torch.ones(2, 30)
    with pytest.raises(ValueError, match="cuts force another order"):
        apply_cores(x, cores, shape, None, (0, 1, 6), backend="triton")
    with pytest.raises(ValueError, match="one dtype of"):
        apply_cores(x.double(), [core.double() for core in cores], shape, backend="triton")
    wide = TTLinear(144, 144, 144, order=1, backend="triton")
    with pytest.raises(ValueError, match="ranks up to 128, got 144"):
        wide(torch.ones(2, 144))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@in_interpreter
def test_I03_autocast_runs_the_kernel_in_the_half_type(dtype: torch.dtype) -> None:
    layer = TTLinear(30, 22, 4, backend="triton", generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    want = layer(x)
    with torch.autocast("cpu", dtype):
        got = layer(x)
        same = layer(x.to(dtype))
    assert got.dtype == same.dtype == dtype
    assert relative_error(got, want) < AUTOCAST
    assert relative_error(same, want) < AUTOCAST
    got.sum().backward()
    assert all(core.grad.dtype == torch.float32 for core in layer.cores)


@pytest.mark.parametrize("order", [2, 3])
@in_interpreter
def test_a_table_on_triton_equals_the_dense_table(order: int) -> None:
    table = TTEmbedding(37, 10, 3, order=order, padding_idx=2, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 36, 5], [0, 2, 5]])
    want = table(ids)
    grads = torch.autograd.grad(want.sin().sum(), list(table.cores))
    table.backend = "triton"
    got = table(ids.int())
    assert relative_error(got, want) < RELATIVE[torch.float32]
    for mine, other in zip(torch.autograd.grad(got.sin().sum(), list(table.cores)), grads, strict=True):
        assert relative_error(mine, other) < RELATIVE[torch.float32]
    assert (
        relative_error(
            lookup_rows(ids, list(table.cores), table.shape, "triton"),
            naive_lookup_rows(ids, list(table.cores), table.shape),
        )
        < RELATIVE[torch.float32]
    )
    assert table(ids[:0]).shape == (0, 3, 10)
    table(ids[:0]).sum().backward()
    assert all(torch.equal(core.grad, torch.zeros_like(core)) for core in table.cores)
    with pytest.raises(IndexError, match=r"ids must lie in \[0, 37\), got 37"):
        table(torch.tensor([37]))
    with pytest.raises(TypeError, match="ids must be int32 or int64"):
        table(ids.short())


@in_interpreter
def test_tables_without_halves_or_with_huge_ones_have_no_kernel() -> None:
    flat = TTEmbedding(7, 5, 3, order=1, backend="triton")
    with pytest.raises(ValueError, match="one core has no halves"):
        flat(torch.tensor([1]))
    table, limit = TTEmbedding(9, 4, 2, order=2, backend="triton"), fused.HALF_ELEMENTS
    fused.HALF_ELEMENTS = 11
    try:
        with pytest.raises(ValueError, match="a half-table of 12 elements is too large to build whole"):
            table(torch.tensor([1]))
    finally:
        fused.HALF_ELEMENTS = limit


def test_I04_torch_compile_keeps_to_torch_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked on the question that traced code asks; the layers' own test compiles for real."""
    pretend(monkeypatch)
    layer, table = TTLinear(30, 22, 4), TTEmbedding(9, 4, 2)
    weights = list(layer.cores)
    there = types.SimpleNamespace(is_cuda=True, device=GPU, is_meta=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fused.linear_is_fused(there, weights, 4, None, True)  # type: ignore[arg-type]
    assert not fused.lookup_is_fused(there, list(table.cores), table.shape, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch.compile is tracing"):
        fused.linear_is_fused(there, weights, 4, "triton", True)  # type: ignore[arg-type]


def test_the_api_names_what_it_exports() -> None:
    assert kernels.__all__ == sorted(kernels.__all__)
    assert all(hasattr(kernels, name) for name in kernels.__all__)
    assert "kernels" not in comera_lab.__all__
