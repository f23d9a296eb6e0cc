"""The TTM look-up kernel in triton's interpreter: equal to its naive twin, repeated ids included."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreter import in_interpreter, nan_filled, within_guards
from tolerances import RELATIVE, relative_error

from comera_lab.kernels import tt_lookup as kernel
from comera_lab.shapes import ShapeError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = ("out", "grad of left", "grad of right")


def problem(sizes, dtype):
    """Halves (A, columns_left, rank) and (B, rank, columns_right) and ids, half of them the same; some rows unused."""
    rows_left, columns_left, rank, rows_right, columns_right, ids = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    left = torch.randn(rows_left, columns_left, rank, generator=generator).to(dtype).requires_grad_()
    right = torch.randn(rows_right, rank, columns_right, generator=generator).to(dtype).requires_grad_()
    a = torch.randint(0, max(1, rows_left - 1), (ids,), generator=generator)
    b = torch.randint(0, max(1, rows_right - 1), (ids,), generator=generator)
    a[: ids // 2] = a[:1]
    b[: ids // 2] = b[:1]
    return left, right, a, b


def values_and_gradients(function, left, right, a, b, columns, dtype):
    out = function(left, right, a, b, columns)
    incoming = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape).to(dtype).to(out.dtype)
    return [out, *torch.autograd.grad(out, (left, right), incoming)]


def assert_equal_to_naive(sizes, dtype, columns=None, module=kernel):
    """Against float64 on the same rounded halves, in memory that holds NaN until it is written."""
    left, right, a, b = problem(sizes, dtype)
    with nan_filled():
        got = values_and_gradients(module.tt_lookup, left, right, a, b, columns, dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (left, right)]
    want = values_and_gradients(kernel.naive_tt_lookup, *doubles, a, b, columns, dtype)
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        assert ours.shape == theirs.shape, name
        assert ours.dtype == dtype, name
        error = relative_error(ours, theirs)
        assert error < RELATIVE[dtype], f"{name}: relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 1, 1), (5, 3, 7, 4, 5, 9), (3, 17, 33, 2, 67, 4), (2, 33, 16, 3, 16, 5), (4, 4, 128, 3, 6, 3)],
)
@in_interpreter
def test_H09_kernel_equals_naive_at_odd_sizes(sizes, dtype):
    assert_equal_to_naive(sizes, dtype)


@pytest.mark.parametrize("columns", [1, 9, 14])
@in_interpreter
def test_padding_columns_are_not_written(columns):
    assert_equal_to_naive((5, 3, 7, 4, 5, 9), torch.float32, columns)


@in_interpreter
def test_no_ids_give_no_rows_and_zero_gradients():
    left, right, a, b = problem((5, 3, 7, 4, 5, 0), torch.float32)
    with nan_filled():
        out, *grads = values_and_gradients(kernel.tt_lookup, left, right, a, b, None, torch.float32)
    assert out.shape == (0, 15)
    assert torch.equal(grads[0], torch.zeros_like(left))
    assert torch.equal(grads[1], torch.zeros_like(right))


@in_interpreter
def test_H07_many_equal_ids_are_summed_in_shares():
    """Seven ids and more of one row, two to eight shares a row, and the same bits again."""
    sizes = (3, 3, 5, 2, 4, 15)
    split = kernel.IDS_PER_SHARE
    try:
        for kernel.IDS_PER_SHARE in (7, 2, 1):
            assert_equal_to_naive(sizes, torch.float32)
            left, right, a, b = problem(sizes, torch.float32)
            runs = [values_and_gradients(kernel.tt_lookup, left, right, a, b, None, torch.float32) for _ in range(2)]
            assert all(map(torch.equal, *runs))
    finally:
        kernel.IDS_PER_SHARE = split


@in_interpreter
def test_H04_H05_layouts_and_inputs_are_left_alone():
    left, right, a, b = problem((5, 3, 7, 4, 5, 18), torch.float32)
    right = right.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    inputs = (left, right, a[::2], b[::2])
    before = [tensor.detach().clone() for tensor in inputs]
    out = kernel.tt_lookup(*inputs)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (left, right)]
    truth = kernel.naive_tt_lookup(*doubles, a[::2], b[::2])
    for view in (lambda y: y.sum(), lambda y: (y.t() * torch.arange(9.0)).sum(), lambda y: (y[::2, ::2] ** 2).sum()):
        got = torch.autograd.grad(view(out), (left, right), retain_graph=True)
        want = torch.autograd.grad(view(truth), doubles, retain_graph=True)
        for name, ours, theirs in zip(NAMES[1:], got, want, strict=True):
            assert relative_error(ours, theirs) < RELATIVE[torch.float32], name
    assert all(map(torch.equal, inputs, before))
    with torch.no_grad():
        assert torch.equal(kernel.tt_lookup(*inputs), out)
    (grad,) = torch.autograd.grad(kernel.tt_lookup(*inputs).square().sum(), left, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@in_interpreter
def test_a_frozen_half_gets_no_gradient():
    left, right, a, b = problem((5, 3, 7, 4, 5, 9), torch.float32)
    both = torch.autograd.grad(kernel.tt_lookup(left, right, a, b).sum(), (left, right))
    kernel.tt_lookup(left, right.detach(), a, b).sum().backward()
    kernel.tt_lookup(left.detach(), right, a, b).sum().backward()
    assert torch.equal(left.grad, both[0])
    assert torch.equal(right.grad, both[1])


@in_interpreter
def test_H09_nothing_is_written_outside_the_output():
    left, right, a, b = problem((5, 3, 7, 4, 5, 9), torch.float32)
    with within_guards() as untouched:
        values_and_gradients(kernel.tt_lookup, left, right, a, b, 14, torch.float32)
    assert len(untouched()) >= 3, "out and the sums of both halves"
    assert all(untouched())


def mutant(old, new, folder):
    source = Path(kernel.__file__).read_text()
    assert source.count(old) >= 1, old
    file = Path(folder) / "mutant.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i_ok, j_ok, rank_ok = i < columns_left", "i_ok, j_ok, rank_ok = i < columns_left - 1"),
        ("rank_ok = i < columns_left, j < columns_right", "rank_ok = i < columns_left, j < columns_right - 1"),
        ("out_ok, rank_ok = out < outer, rank < width", "out_ok, rank_ok = out < outer, rank < width - 1"),
        ("(column < columns)\n    tl.store", "(column < columns - 1)\n    tl.store"),
        ("begin += part * share", "begin += part * (share - 1)"),
        ("(end - begin + SHARES - 1) // SHARES", "(end - begin) // (2 * SHARES)"),
        ("order_ptr + begin + pair // inner", "order_ptr + begin + 0 * pair"),
        ("other = tl.load(other_ptr + item", "other = tl.load(other_ptr + start + 0 * item"),
        ("k = pair % inner", "k = pair % (inner - 1)"),
        ("return total.sum(0)", "return total[0]"),
        ("(1, outer, width, 1)", "(1, inner, width, 1)"),
        ("torch.sort(mine, stable=True)", "mine.sort()[0], torch.arange(len(mine))"),
        ("out.to(out_ptr", "(0.99 * out).to(out_ptr"),
    ],
)
@in_interpreter
def test_broken_kernels_are_noticed(old, new, tmp_path):
    broken = mutant(old, new, tmp_path)
    broken.IDS_PER_SHARE = 5
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal_to_naive((5, 3, 7, 4, 5, 11), torch.float32, 14, broken)


def test_sizes_dtypes_and_devices_without_a_kernel_are_refused():
    left, right, a, b = problem((5, 3, 7, 4, 5, 9), torch.float32)
    for wrong in ((left, right[:, :6], a, b), (left[0], right, a, b), (left, right, a, b[:3]), (left, right, a, b, 16)):
        with pytest.raises(ShapeError, match="sizes must fit"):
            kernel.tt_lookup(*wrong)
    with pytest.raises(ValueError, match="rows must be int64, got torch.int32"):
        kernel.tt_lookup(left, right, a.int(), b)
    with pytest.raises(ValueError, match="one dtype of"):
        kernel.tt_lookup(left.double(), right.double(), a, b)
    with pytest.raises(ValueError, match=r"2\*\*31 elements or more"):
        kernel.tt_lookup(left, right, a[:1].expand(2**28), b[:1].expand(2**28))


def test_cases_cover_every_tile_and_dtype_once():
    cases = list(kernel.compile_cases())
    assert len({case.name for case in cases}) == len(cases)
    assert {case.num_warps for case in cases} == {tile.warps for tile in kernel.TILES}
    for case in cases:
        assert set(case.kernel.arg_names) == set(case.signature) | set(case.constants)
