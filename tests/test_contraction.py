from __future__ import annotations

import itertools
import re
import time

import pytest
import torch
import torch.utils.flop_counter
from hypothesis import given
from hypothesis import strategies as st
from strategies import tt_shapes
from tolerances import RELATIVE, relative_error

from comera_lab.contraction import (
    apply_cores,
    apply_cores_together,
    half_chain_cuts,
    many_rows,
    naive_apply_cores,
    plan,
)
from comera_lab.contraction import linear as contraction
from comera_lab.cores import init_cores
from comera_lab.shapes import ShapeError, TTShape

WIDE = TTShape.for_features(768, 3072, 30)


def every_order(shape):
    """All cuts except the one that would form the dense weight."""
    count = len(shape.modes)
    for inner in itertools.chain.from_iterable(itertools.combinations(range(1, count), k) for k in range(1, count)):
        yield (0, *inner, count)


def problem(shape, rows, dtype=torch.float64, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    cores = [core.to(dtype).requires_grad_() for core in init_cores(shape, 0.5, generator)]
    x = torch.randn(rows, shape.in_features, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(shape.out_features, generator=generator).to(dtype).requires_grad_() if bias else None
    return x, cores, offset


def value_and_gradients(function, shape, x, cores, bias, **options):
    out = function(x, cores, shape, bias, **options)
    inputs = [tensor for tensor in (x, bias, *cores) if tensor is not None]
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, weights)]


def assert_equal_to_naive(shape, rows, *, bias=True, limit=RELATIVE[torch.float64], **options):
    x, cores, offset = problem(shape, rows, bias=bias)
    got = value_and_gradients(apply_cores, shape, x, cores, offset, **options)
    want = value_and_gradients(naive_apply_cores, shape, x, cores, offset)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < limit


@given(tt_shapes(), st.integers(1, 5), st.booleans())
def test_planned_order_equals_naive_for_any_shape(shape, rows, bias):
    assert_equal_to_naive(shape, rows, bias=bias)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("rows", [3, 300])
def test_every_order_equals_naive_with_gradients(order, rows):
    shape = TTShape.for_features(30, 22, 4, order)
    for cuts in every_order(shape):
        assert_equal_to_naive(shape, rows, cuts=cuts)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 7, 8, 30])
def test_products_of_odd_sizes_equal_naive(bias, rank):
    shape = TTShape.for_features(97, 1009, rank)
    assert_equal_to_naive(shape, 333, bias=bias, cuts=half_chain_cuts(shape))


@pytest.mark.parametrize("rows", [1024, 1031])
@pytest.mark.parametrize("rank", [4, 15])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_many_rows_equal_naive_and_their_mutants_do_not(rows, rank, bias, monkeypatch):
    shape = TTShape.for_features(24, 36, rank)
    assert_equal_to_naive(shape, rows, bias=bias, cuts=half_chain_cuts(shape))
    for name in ("_over_rows", "_by_rows"):
        with monkeypatch.context() as patch:
            right = getattr(many_rows, name)
            patch.setattr(many_rows, name, lambda left, other, right=right: right(left, other) * 1.01)
            with pytest.raises(AssertionError):
                assert_equal_to_naive(shape, rows, bias=bias, cuts=half_chain_cuts(shape))


def test_ranks_are_padded_only_where_few_zeros_are_added():
    widths = (1, 7, 9, 15, 16, 30, 31, 33, 61)
    assert [many_rows._padded(width) for width in widths] == [1, 7, 9, 16, 16, 32, 32, 33, 64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 600, 1024])
def test_each_dtype_stays_within_its_tolerance_and_a_wrong_core_does_not(dtype, rows):
    shape = TTShape.for_features(120, 90, 8)
    x, cores, bias = problem(shape, rows, dtype)
    exact = naive_apply_cores(x.double(), [core.double() for core in cores], shape, bias.double())
    assert relative_error(apply_cores(x, cores, shape, bias), exact) < RELATIVE[dtype]
    mutant = [cores[0] * 1.03, *cores[1:]] if dtype == torch.bfloat16 else [cores[0] * 1.01, *cores[1:]]
    assert relative_error(apply_cores(x, mutant, shape, bias), exact) > RELATIVE[dtype]


@pytest.mark.parametrize("mutation", ["bias lost", "core scaled", "core transposed"])
def test_mutants_of_the_half_chains_are_caught(mutation, monkeypatch):
    shape = TTShape((4, 4), (4, 4), (1, 4, 4, 4, 1))
    chain = contraction.chain
    broken = {
        "core scaled": lambda cores: chain([cores[0] * 1.01, *cores[1:]]),
        "core transposed": lambda cores: chain([c.transpose(0, 2) if len(c) == c.shape[2] else c for c in cores]),
    }
    if mutation == "bias lost":
        cat = torch.concat
        monkeypatch.setattr(torch, "cat", lambda parts, dim=0: cat([*parts[:1], *(p * 0 for p in parts[1:])], dim))
    else:
        monkeypatch.setattr(contraction, "chain", broken[mutation])
    with pytest.raises(AssertionError):
        assert_equal_to_naive(shape, 300, cuts=half_chain_cuts(shape))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [2, 257, 1024])
def test_gradients_and_second_gradients_pass_gradcheck(order, rows):
    shape = TTShape.for_features(6, 4, 2, order)
    x, cores, bias = problem(shape, rows)

    def function(x, bias, *cores):
        return apply_cores(x, cores, shape, bias)[:3]

    assert torch.autograd.gradcheck(function, (x, bias, *cores), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, bias, *cores), fast_mode=True)


def test_frozen_inputs_get_no_gradient_and_the_rest_stay_right():
    shape = TTShape.for_features(40, 30, 5)
    for frozen in range(8):
        x, cores, bias = problem(shape, 300)
        inputs = [x, bias, *cores]
        inputs[frozen].requires_grad_(False)
        apply_cores(x, cores, shape, bias).square().sum().backward()
        got = [tensor.grad for tensor in inputs]
        assert got[frozen] is None
        for tensor in inputs:
            tensor.grad = None
        naive_apply_cores(x, cores, shape, bias).square().sum().backward()
        for ours, tensor in zip(got, inputs, strict=True):
            assert ours is tensor.grad or relative_error(ours, tensor.grad) < RELATIVE[torch.float64]


@pytest.mark.parametrize("make", ["expanded", "transposed", "strided", "summed"])
def test_H04_layouts_in_backward(make):
    shape = TTShape.for_features(40, 30, 5)
    results = []
    for function in (apply_cores, naive_apply_cores):
        x, cores, bias = problem(shape, 600)
        inputs = {"expanded": x[:1].expand(600, -1), "transposed": x.t().contiguous().t(), "strided": x[::2]}
        out = function(inputs.get(make, x), cores, shape, bias)
        {"transposed": out.t(), "strided": out[:, ::2]}.get(make, out).sum().backward()
        results.append([out, x.grad, bias.grad, *(core.grad for core in cores)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float64]


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True)])
def test_maps_that_share_their_input_equal_their_naive_twins(rows, biases):
    shapes = [TTShape.for_features(40, out, rank, order=2) for out, rank in ((30, 5), (24, 3), (30, 8))]
    problems = [
        problem(shape, rows, seed=k, bias=bias) for k, (shape, bias) in enumerate(zip(shapes, biases, strict=True))
    ]
    x = problems[0][0]
    maps = [(cores, shape, bias) for shape, (_, cores, bias) in zip(shapes, problems, strict=True)]
    inputs = [x, *(tensor for cores, _, bias in maps for tensor in (*cores, bias) if tensor is not None)]
    results = []
    for outs in (apply_cores_together(x, maps), [naive_apply_cores(x, *each) for each in maps]):
        total = sum(torch.sin(out).sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(total, inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float64]


def test_maps_that_share_their_input_read_it_once():
    shape = TTShape.for_features(64, 64, 4)
    x, cores, bias = problem(shape, 600)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        apply_cores_together(x, [(cores, shape, bias)] * 3)
    products = counter.get_flop_counts()["Global"]
    assert products[torch.ops.aten.bmm] == 2 * 600 * 64 * 3 * (4 + 1)


def test_H05_inputs_are_never_written():
    shape = TTShape.for_features(40, 30, 5)
    x, cores, bias = problem(shape, 300)
    before = x.detach().clone()
    out = apply_cores(x, cores, shape, bias)
    weights = torch.randn_like(out)
    kept = weights.clone()
    first = torch.autograd.grad(out, [x, *cores], weights, retain_graph=True)
    second = torch.autograd.grad(out, [x, *cores], weights)
    assert torch.equal(x, before)
    assert torch.equal(weights, kept)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_H06_forward_without_grad_is_the_same():
    shape = TTShape.for_features(40, 30, 5)
    x, cores, bias = problem(shape, 300)
    with_grad = apply_cores(x, cores, shape, bias)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(apply_cores(x, cores, shape, bias), with_grad)


def test_the_dense_weight_is_never_formed():
    """No tensor as large as W appears in forward or backward, at few and at many rows."""
    shape = TTShape.for_features(512, 512, 8)
    for rows in (1, 8, 128, 300):
        x, cores, bias = problem(shape, rows, torch.float32)
        largest = 0

        class Spy(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                for tensor in out if isinstance(out, tuple | list) else [out]:
                    if isinstance(tensor, torch.Tensor):
                        largest = max(largest, tensor.numel())
                return out

        with Spy():
            apply_cores(x, cores, shape, bias).sum().backward()
        assert 0 < largest < shape.dense_params, rows


def test_peak_extra_memory_is_x_y_xA_and_the_half_chains():
    """Saved for backward in a many-row call: x, x A, and the two half-chains; no more."""
    rows = 1024
    x, cores, bias = problem(WIDE, rows, torch.float32)
    saved: dict[int, int] = {}
    own = {core.untyped_storage().data_ptr() for core in cores}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        apply_cores(x, cores, WIDE, bias)
    rank = 32
    half_chains = rank * (WIDE.in_features + WIDE.out_features)
    chain_parts = 2 * WIDE.middle_rank * (WIDE.in_features + WIDE.out_features)
    allowed = 4 * (rows * WIDE.in_features + rows * rank + half_chains + chain_parts)
    assert sum(saved.values()) <= allowed


class TestPlan:
    def test_few_rows_go_core_by_core_and_many_rows_through_half_chains(self):
        assert plan(WIDE, 4096).name == "half-chains"
        assert plan(WIDE, 1).name != "half-chains"

    @given(tt_shapes(), st.integers(1, 10_000))
    def test_the_chosen_order_is_the_cheapest_of_all_unless_half_chains_are_near(self, shape, rows):
        chosen = plan(shape, rows).chosen
        costs = {cuts: contraction._order(shape, rows, cuts).cost for cuts in every_order(shape)}
        halves, least = half_chain_cuts(shape), min(costs.values())
        near = costs[halves] < contraction.CLEARLY_CHEAPER * least
        assert chosen.cost == costs[chosen.cuts] == (costs[halves] if near else least)
        assert (chosen.cuts == halves) == near

    def test_flops_are_those_of_the_executed_products(self):
        from torch.utils.flop_counter import FlopCounterMode

        shape = TTShape.for_features(24, 30, 4)
        for rows in (1, 7, 64):
            x, cores, _ = problem(shape, rows)
            for cuts in every_order(shape):
                with FlopCounterMode(display=False) as counter:
                    apply_cores(x, cores, shape, cuts=cuts)
                assert counter.get_total_flops() == contraction._order(shape, rows, cuts).flops

    def test_table_shows_the_choice_its_rivals_and_the_saving(self):
        text = str(plan(WIDE, 4096))
        assert re.search(r"\* half-chains +950,945,280 ", text)
        assert "dense weight (never)" in text
        assert "20.3x fewer FLOPs than nn.Linear (19,327,352,832)" in text

    def test_rows_must_be_positive(self):
        with pytest.raises(ShapeError, match="rows must be an integer of at least 1, got 0"):
            plan(WIDE, 0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(8, 512, 1, 1), r"in_features=6, got a tensor of shape \(8, 512, 1, 1\)"),
        (torch.zeros(()), r"in_features=6, got a tensor of shape \(\)"),
        (torch.zeros(2, 6, dtype=torch.int64), r"must be floating point, got torch.int64. Convert it with x.float\(\)"),
        (torch.zeros(2, 6, dtype=torch.float16), "share a dtype outside autocast, got torch.float16 and torch.float32"),
    ],
)
def test_bad_inputs_name_rule_value_and_remedy(x, message):
    shape = TTShape.for_features(6, 4, 2)
    with pytest.raises(ValueError, match=message):
        apply_cores(x, init_cores(shape, 1.0), shape)


@pytest.mark.slow
@pytest.mark.parametrize(("features", "rank", "rows"), [((16, 10), 4, 4), ((4096, 4096), 8, 64)])
def test_M02_the_automatic_choice_is_near_the_better_path(features, rank, rows):
    """Against the half-chains and the dense weight, forward and backward: least times, the best of five tries."""
    shape = TTShape.for_features(*features, rank)
    x, cores, bias = problem(shape, rows, torch.float32)
    pull = torch.ones(rows, features[1])
    paths = {
        "chosen": lambda: apply_cores(x, cores, shape, bias),
        "half-chains": lambda: apply_cores(x, cores, shape, bias, cuts=half_chain_cuts(shape)),
        "dense": lambda: naive_apply_cores(x, cores, shape, bias),
    }
    ratios = []
    for _ in range(5):
        seconds = {name: [] for name in paths}
        for _ in range(7):
            for name, path in paths.items():
                start = time.perf_counter()
                torch.autograd.grad(path(), [x, bias, *cores], pull)
                seconds[name].append(time.perf_counter() - start)
        chosen, halves, dense = (min(seconds[name]) for name in paths)
        ratios.append(chosen / min(halves, dense))
    assert min(ratios) <= 1.3, f"chosen / better path: {ratios}"
