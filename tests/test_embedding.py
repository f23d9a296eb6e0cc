from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.contraction import lookup, lookup_rows, naive_lookup_rows
from comera_lab.cores import init_cores
from comera_lab.layers import TTEmbedding
from comera_lab.shapes import ShapeError, TTMShape, clip_ranks

EXACT = RELATIVE[torch.float64]


@st.composite
def tables(draw):
    order = draw(st.integers(1, 4))
    rows = tuple(draw(st.lists(st.integers(1, 4), min_size=order, max_size=order)))
    columns = tuple(draw(st.lists(st.integers(1, 3), min_size=order, max_size=order)))
    full = TTMShape(rows, columns, (1,) * (order + 1))
    used = (
        draw(st.integers(max(1, full.rows - 2), full.rows)),
        draw(st.integers(max(1, full.columns - 1), full.columns)),
    )
    return TTMShape(rows, columns, clip_ranks(draw(st.integers(1, 4)), full.modes), *used)


def assert_equal_to_naive(ids, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cores = [core.requires_grad_() for core in init_cores(shape, 1.0, generator, dtype=torch.float64)]
    results = []
    for function in (lookup_rows, naive_lookup_rows):
        out = function(ids, cores, shape)
        weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
        results.append([out, *torch.autograd.grad(out, cores, weights)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < EXACT


@given(tables(), st.sampled_from([(), (0,), (1,), (7,), (3, 2), (40,)]), st.integers(0, 2))
def test_lookup_equals_the_dense_table_for_any_shape_and_ids(shape, size, seed):
    ids = torch.randint(0, shape.rows, size, generator=torch.Generator().manual_seed(seed))
    assert_equal_to_naive(ids, shape, seed)
    assert_equal_to_naive(ids.int(), shape, seed)


@pytest.mark.parametrize("whole", [0, 10**9])
def test_both_ways_to_build_a_half_agree_and_their_mutants_do_not(whole, monkeypatch):
    monkeypatch.setattr(lookup, "WHOLE_HALF", whole)
    shape = TTMShape((3, 4, 5, 2), (2, 1, 3, 2), clip_ranks(4, (6, 4, 15, 4)), rows=113)
    ids = torch.tensor([0, 112, 57, 57, 3, 100])
    assert_equal_to_naive(ids, shape)
    name = "_whole_half" if whole else "_some_half"
    right = getattr(lookup, name)
    monkeypatch.setattr(lookup, name, lambda *given: right(*given) * 1.01)
    with pytest.raises(AssertionError):
        assert_equal_to_naive(ids, shape)


@pytest.mark.parametrize("ids", [[3, 3, 3, 0], [[1, 1], [1, 3]], [5] * 10_000])
def test_F06_repeated_ids_add_their_gradients(ids):
    shape = TTMShape((3, 4), (2, 2), (1, 4, 1), rows=11)
    assert_equal_to_naive(torch.tensor(ids), shape)


def test_each_different_half_index_is_contracted_once(monkeypatch):
    shape = TTMShape((50, 40), (4, 4), (1, 8, 1))
    seen = []
    right = lookup._some_half
    monkeypatch.setattr(lookup, "WHOLE_HALF", 0)
    monkeypatch.setattr(lookup, "_some_half", lambda wanted, *rest: (seen.append(len(wanted)), right(wanted, *rest))[1])
    ids = torch.tensor([0, 1, 40, 41, 0, 1, 40, 41] * 100)
    lookup_rows(ids, init_cores(shape, 1.0), shape)
    assert seen == [2, 2]


def test_the_table_is_never_built():
    layer = TTEmbedding(10**9, 64, 8, order=4)
    assert layer.shape.params < 200_000
    largest = 0

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Spy():
        out = layer(torch.tensor([0, 999_999_999, 5]))
    assert out.shape == (3, 64)
    assert largest < 10**6


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_start_values_and_zero_padding_row(order):
    layer = TTEmbedding(300, 24, 8, order=order, padding_idx=7, generator=torch.Generator().manual_seed(0))
    assert not layer(torch.tensor([7])).any()
    assert not layer.to_dense()[7].any()
    assert 0.6 < float(layer.to_dense().detach().std()) < 1.5
    layer(torch.tensor([7, 7])).sum().backward()
    assert all(not core.grad.any() for core in layer.cores)
    ids = torch.tensor([[7, 3], [299, 7]])
    assert relative_error(layer(ids), nn.functional.embedding(ids, layer.to_dense())) < RELATIVE[torch.float32]


def test_F03_F04_from_embedding_keeps_rows_and_error():
    torch.manual_seed(0)
    table = nn.Embedding(100, 64, padding_idx=0)
    before = copy.deepcopy(table.weight)
    exact = TTEmbedding.from_embedding(table, 10**6)
    assert exact.padding_idx == 0
    ids = torch.arange(100)
    assert relative_error(exact(ids), table(ids)) < 1e-5
    rough = TTEmbedding.from_embedding(table, error=0.3)
    assert relative_error(rough.to_dense(), table.weight) <= 0.3
    assert rough.shape.params < exact.shape.params
    assert torch.equal(table.weight, before)


def test_F09_rank_above_the_feasible_bound():
    layer = TTEmbedding(8, 8, 16, row_modes=(2, 2, 2), column_modes=(2, 2, 2))
    assert layer.shape.ranks == (1, 4, 4, 1)
    out = layer(torch.arange(8))
    out.sum().backward()
    assert relative_error(out, layer.to_dense()) < RELATIVE[torch.float32]
    assert all(torch.isfinite(core.grad).all() for core in layer.cores)


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        ([-1], IndexError, r"ids must lie in \[0, 12\), got -1"),
        ([0, 12], IndexError, r"ids must lie in \[0, 12\), got 12"),
        ([0.0], TypeError, "ids must be int32 or int64, got torch.float32"),
    ],
)
def test_bad_ids_are_refused(ids, kind, message):
    with pytest.raises(kind, match=message):
        TTEmbedding(12, 8, 2)(torch.tensor(ids))


def test_bad_construction_is_refused():
    with pytest.raises(ShapeError, match=r"padding_idx must lie in \[0, 12\), got 12"):
        TTEmbedding(12, 8, 2, padding_idx=12)
    with pytest.raises(ShapeError, match="rows must be an integer of at least 1, got -3"):
        TTEmbedding(-3, 8, 2, row_modes=(2, 2), column_modes=(2, 4))
    with pytest.raises(ValueError, match="exactly one of rank, error and params, got rank=None, error=None, params=None"):
        TTEmbedding.from_embedding(nn.Embedding(12, 8))


def test_C06_deep_copy_of_a_used_table():
    layer = TTEmbedding(12, 8, 2)
    ids = torch.tensor([1, 5])
    pending = layer(ids)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(ids), pending)
    with torch.no_grad():
        twin.cores[0].zero_()
    assert torch.equal(layer(ids), pending)
