"""The fused TT linear kernel in triton's interpreter: equal to its naive twin at odd sizes, in every dtype."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreter import in_interpreter, nan_filled, within_guards
from tolerances import RELATIVE, relative_error

from comera_lab.kernels import tt_linear as kernel
from comera_lab.kernels.cases import Tile
from comera_lab.shapes import ShapeError

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
NAMES = ("out", "grad of x", "grad of left", "grad of right", "grad of bias")


def problem(rows, in_features, out_features, rank, dtype, bias=True):
    generator = torch.Generator().manual_seed(rows + 10 * in_features + 100 * out_features + rank)
    sizes = [(rows, in_features), (in_features, rank), (rank, out_features), *([(out_features,)] if bias else [])]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def values_and_gradients(function, inputs, dtype=torch.float32, **options):
    """The output, and the gradients for an incoming one that is rounded to `dtype`."""
    out = function(*inputs, **options)
    incoming = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape).to(dtype).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, incoming)]


def assert_equal_to_naive(inputs, module=kernel, **options):
    """Against float64 on the same rounded inputs, in memory that holds NaN until it is written."""
    dtype = inputs[0].dtype
    with nan_filled():
        got = values_and_gradients(module.tt_linear, inputs, dtype, **options)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    want = values_and_gradients(kernel.naive_tt_linear, doubles, dtype)
    for name, ours, theirs in zip(NAMES, got, want, strict=False):
        assert ours.shape == theirs.shape, name
        assert ours.dtype == dtype, name
        error = relative_error(ours, theirs)
        assert error < RELATIVE[dtype], f"{name}: relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (17, 33, 1, 3), (1, 70, 67, 16), (35, 97, 71, 33), (20, 40, 48, 128)])
@in_interpreter
def test_H09_kernel_equals_naive_at_odd_sizes(sizes, dtype):
    assert_equal_to_naive(problem(*sizes, dtype))
    assert_equal_to_naive(problem(*sizes, dtype, bias=False))


@pytest.mark.parametrize("dtype", DTYPES)
@in_interpreter
def test_no_rows_give_no_output_and_zero_gradients(dtype):
    inputs = problem(0, 9, 7, 3, dtype)
    with nan_filled():
        out, *grads = values_and_gradients(kernel.tt_linear, inputs)
    assert out.shape == (0, 7)
    for grad, tensor in zip(grads, inputs, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")]
)
@in_interpreter
def test_every_candidate_tile_is_right(dtype, precision):
    """More rows than the largest tile, several blocks and shares of columns."""
    inputs = problem(131, 70, 67, 5, dtype)
    tiles = kernel.candidates(5, dtype, precision)
    assert len(tiles) >= 2
    for tile in tiles:
        assert_equal_to_naive(inputs, precision=precision, tile=tile)


@in_interpreter
def test_H09_nothing_is_written_outside_the_output():
    inputs = problem(19, 35, 67, 5, torch.float32)
    with within_guards() as untouched:
        values_and_gradients(kernel.tt_linear, inputs)
    assert len(untouched()) >= 5, "out, x A, dx, g and the sums"
    assert all(untouched())


@pytest.mark.parametrize("view", ["sum", "transposed", "every second column", "every second row"])
@in_interpreter
def test_H04_any_layout_of_the_gradient(view):
    views = {
        "sum": lambda y: y.sum(),
        "transposed": lambda y: (y.t() * torch.arange(19.0)).sum(),
        "every second column": lambda y: (y[:, ::2] ** 2).sum(),
        "every second row": lambda y: (y[::2] ** 2).sum(),
    }
    inputs = problem(19, 35, 33, 5, torch.float32)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    got = torch.autograd.grad(views[view](kernel.tt_linear(*inputs)), inputs)
    want = torch.autograd.grad(views[view](kernel.naive_tt_linear(*doubles)), doubles)
    for name, ours, theirs in zip(NAMES[1:], got, want, strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float32], name


@in_interpreter
def test_H04_inputs_may_be_slices_and_expanded():
    wide = torch.randn(40, 90, generator=torch.Generator().manual_seed(0))
    _, left, right, bias = problem(1, 35, 33, 5, torch.float32)
    flipped = right.detach().t().contiguous().t().requires_grad_()
    for x in (wide[:, 10:45], wide[::2, :35], wide[:, 20:90:2], wide.t()[:, :35], wide[:1, :35].expand(9, 35)):
        x = x.detach().requires_grad_()
        assert not x.is_contiguous()
        assert_equal_to_naive([x, left, flipped, bias])


@in_interpreter
def test_H05_inputs_stay_and_the_graph_can_be_used_twice():
    inputs = problem(19, 19, 19, 5, torch.float32)
    before = [tensor.detach().clone() for tensor in inputs]
    x = inputs[0]
    y = kernel.tt_linear(*inputs)
    incoming = torch.ones_like(y)
    first = torch.autograd.grad(y, inputs, incoming, retain_graph=True)
    second = torch.autograd.grad(y, inputs, incoming)
    assert all(map(torch.equal, first, second))
    assert torch.equal(incoming, torch.ones_like(y))
    assert all(map(torch.equal, inputs, before))
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    twice = (kernel.tt_linear(*inputs) * x).sum() + kernel.tt_linear(*inputs).sum()
    truth = (kernel.naive_tt_linear(*doubles) * doubles[0]).sum() + kernel.naive_tt_linear(*doubles).sum()
    for ours, theirs in zip(torch.autograd.grad(twice, inputs), torch.autograd.grad(truth, doubles), strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float32]
    (grad,) = torch.autograd.grad(kernel.tt_linear(*inputs).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@in_interpreter
def test_H06_values_do_not_depend_on_grad_mode():
    inputs = problem(19, 35, 33, 5, torch.float32)
    want = kernel.tt_linear(*inputs).detach()
    plain = [tensor.detach() for tensor in inputs]
    assert torch.equal(kernel.tt_linear(*plain), want)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), nan_filled():
            assert torch.equal(kernel.tt_linear(*inputs), want)


@in_interpreter
def test_frozen_inputs_get_no_gradient_and_the_others_the_same():
    full = values_and_gradients(kernel.tt_linear, problem(5, 9, 7, 3, torch.float32))[1:]
    for wanted in range(1, 15):
        inputs = problem(5, 9, 7, 3, torch.float32)
        for place, tensor in enumerate(inputs):
            tensor.requires_grad_(bool(wanted >> place & 1))
        out = kernel.tt_linear(*inputs)
        weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape).float()
        out.backward(weights)
        for name, tensor, grad in zip(NAMES[1:], inputs, full, strict=True):
            assert (tensor.grad is not None) == tensor.requires_grad
            if tensor.grad is not None:
                assert relative_error(tensor.grad, grad) < RELATIVE[torch.float32], f"{name}, wanted {wanted:b}"


@in_interpreter
def test_tune_takes_the_fastest_tile_from_then_on():
    inputs = [tensor.detach() for tensor in problem(19, 35, 33, 5, torch.float32)]
    want = kernel.tt_linear(*inputs)
    times = iter([3.0, 1.0, 2.0])
    calls = []

    def measure(call):
        calls.append(call())
        return next(times)

    picked = kernel.tune(*inputs, measure=measure)
    assert picked == kernel.candidates(5, torch.float32)[1]
    assert len(calls) == len(kernel.candidates(5, torch.float32))
    assert all(relative_error(out, want) < RELATIVE[torch.float32] for out in calls)
    seen = []
    launch = kernel._rows_kernel
    kernel._rows_kernel = {(2, 1): lambda *args, **options: seen.append(options["BLOCK_ROWS"])}
    try:
        kernel._tuned[(19, 35, 33, 16, "ieee")] = Tile(10, 64, 4, 2)
        kernel.tt_linear(*inputs)
    finally:
        kernel._rows_kernel = launch
        kernel._tuned.clear()
    assert seen == [10]


def mutant(old, new, folder):
    """The kernel file with one place changed, as a module."""
    source = Path(kernel.__file__).read_text()
    assert source.count(old) >= 1, old
    file = Path(folder) / "mutant.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@in_interpreter
def test_one_percent_is_noticed_in_every_dtype(dtype, tmp_path):
    """Less, not more: the interpreter cuts bf16 towards zero where a GPU rounds, so errors there lean down."""
    broken = mutant("tl.store(out_at, out.to(", "tl.store(out_at, (0.99 * out).to(", tmp_path)
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal_to_naive(problem(17, 33, 20, 3, dtype), broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row_ok, rank_ok = row < rows, rank < width", "row_ok, rank_ok = row < rows - 1, rank < width"),
        ("ok = column < in_features", "ok = column < in_features - 1"),
        ("ok = column < out_features", "ok = column < out_features - 1"),
        ("range(0, in_features, BLOCK_COLUMNS)", "range(0, in_features - BLOCK_COLUMNS, BLOCK_COLUMNS)"),
        ("first = tl.program_id(1) * share", "first = tl.program_id(1) * (share + 1)"),
        ("KEEP_INNER and tl.program_id(1) == 0", "KEEP_INNER and tl.program_id(1) == 9"),
        ("out += tl.load(bias_ptr", "out -= tl.load(bias_ptr"),
        ("first = part * share", "first = part * share + 1"),
        ("row_ok = row < rows\n", "row_ok = row < rows - 1\n"),
        ("place = part * columns + column", "place = column"),
        ("return total.sum(0)", "return total[0]"),
        ("sums.sum(0)\n", "sums[0]\n"),
        ("functional.pad(right, (0, 0, 0, wider))", "functional.pad(right, (0, 0, wider, 0))"),
    ],
)
@in_interpreter
def test_broken_kernels_are_noticed(old, new, tmp_path):
    """Blocks of 16 rows, several shares and splits. A mask that reads too much makes no NaN: see the guards."""
    broken = mutant(old, new, tmp_path)
    broken.PROGRAMS = 9
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal_to_naive(problem(35, 40, 70, 9, torch.float32), broken)


def test_sizes_dtypes_and_devices_without_a_kernel_are_refused():
    x, left, right, bias = problem(4, 6, 5, 3, torch.float32)
    for wrong in ((x, right, left, bias), (x, left, right, bias[:4]), (x[0], left, right, bias), (x, left, right[:2])):
        with pytest.raises(ShapeError, match="sizes must chain"):
            kernel.tt_linear(*wrong)
    with pytest.raises(ValueError, match="one dtype of"):
        kernel.tt_linear(x.double(), left.double(), right.double())
    with pytest.raises(ValueError, match="one dtype of"):
        kernel.tt_linear(x.half(), left, right)
    with pytest.raises(ValueError, match="several devices"):
        kernel.tt_linear(x, left.to("meta"), right)
    with pytest.raises(ValueError, match="ranks up to 128, got 129"):
        kernel.tt_linear(x, torch.ones(6, 129), torch.ones(129, 5))
    with pytest.raises(ValueError, match="precision must be None, 'ieee' or 'tf32', got 'fp64'"):
        kernel.tt_linear(x, left, right, precision="fp64")


def test_cases_cover_every_tile_and_dtype_once():
    cases = list(kernel.compile_cases())
    assert len({case.name for case in cases}) == len(cases)
    blocks = {(case.constants["BLOCK_ROWS"], case.constants["BLOCK_COLUMNS"], case.num_warps) for case in cases}
    assert blocks == {(tile.rows, tile.columns, tile.warps) for tile in kernel.TILES}
    for case in cases:
        assert set(case.kernel.arg_names) == set(case.signature) | set(case.constants)


@pytest.mark.slow
def test_the_widest_tile_compiles_to_wgmma_and_wide_copies():
    (case,) = [c for c in kernel.compile_cases() if c.name.startswith("tt_linear rows bf16 ieee 128x64x4 rank 64")]
    ptx = case.compile(90).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.cg.shared.global" in ptx, "16 bytes a thread"
    assert "st.global.v4" in ptx
