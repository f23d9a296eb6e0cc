from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.contraction import lookup, lookup_rows, naive_lookup_rows
from comera_lab.cores import init_cores
from comera_lab.experiments.bench_embeddings import per_id_rows
from comera_lab.layers import TTEmbedding, compact
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


@pytest.mark.parametrize(("count", "pairs"), [(119, 0), (119, 10**9), (300, 0)], ids=["few", "pairs", "whole table"])
def test_one_product_for_all_pairs_agrees_and_its_mutants_do_not(count, pairs, monkeypatch):
    shape = TTMShape((5, 6, 4), (2, 3, 2), clip_ranks(3, (10, 18, 8)), rows=117, columns=11)
    monkeypatch.setattr(lookup, "ALL_PAIRS", pairs)
    ids = torch.randint(0, 117, (count,), generator=torch.Generator().manual_seed(0))
    assert_equal_to_naive(ids, shape)
    product = "pair_rows" if pairs == 0 and count < 120 else "_all_pairs"
    for name in (product, "_take"):
        with monkeypatch.context() as patch:
            right = getattr(lookup, name)
            patch.setattr(lookup, name, lambda *given, right=right: right(*given) * 1.01)
            with pytest.raises(AssertionError):
                assert_equal_to_naive(ids, shape)


def test_gradients_may_come_as_slices_of_a_stack():
    shape = TTMShape((5, 6), (2, 3), clip_ranks(3, (10, 18)))
    cores = [core.requires_grad_() for core in init_cores(shape, 1.0, dtype=torch.float64)]
    ids = torch.tensor([3, 29, 3, 0] * 20)
    weights = torch.randn(80, 5, 6, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(function(ids, cores, shape), cores, weights[:, 2])
        for function in (lookup_rows, naive_lookup_rows)
    )
    for mine, exact in zip(ours, theirs, strict=True):
        assert relative_error(mine, exact) < EXACT


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
    with pytest.raises(
        ValueError, match="exactly one of rank, error and params, got rank=None, error=None, params=None"
    ):
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


def test_F03_a_table_given_row_by_row_comes_back_in_order():
    table = nn.Embedding(12, 8, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.arange(96).reshape(12, 8))
    layer = TTEmbedding.from_embedding(table, 10**6)
    for i in range(12):
        assert relative_error(layer(torch.tensor(i)), table.weight[i]) < EXACT


def test_F04_truncation_error_stays_below_the_dropped_singular_values():
    torch.manual_seed(0)
    table = nn.Embedding(1000, 64, dtype=torch.float64)
    layer = TTEmbedding.from_embedding(table, 8)
    shape = layer.shape
    modes = [*shape.row_modes, *shape.column_modes]
    full = table.weight.detach().reshape(modes).permute(0, 3, 1, 4, 2, 5).reshape(shape.modes)
    dropped = 0.0
    for k in (1, 2):
        values = torch.linalg.svdvals(full.reshape(math.prod(shape.modes[:k]), -1))
        dropped += float(values[shape.ranks[k] :].square().sum())
    error = float((layer.to_dense() - table.weight).detach().norm())
    assert 0 < error <= math.sqrt(dropped) * (1 + EXACT)


def test_F05_compression_by_target_and_padding_reported():
    rows, columns, target = 8209, 192, 4
    layer = TTEmbedding(rows, columns, params=rows * columns // target)
    numel = sum(core.numel() for core in layer.cores)
    assert layer.shape.compression == rows * columns / numel
    assert 0.75 * target <= layer.shape.compression <= 1.25 * target
    padded = math.prod(layer.shape.row_modes) - rows
    assert layer.shape.padding[0] == padded <= rows // 10
    assert f"{padded} padded rows" in repr(layer)
    small = TTEmbedding.from_embedding(nn.Embedding(100, 16), params=500)
    assert small.shape.params <= 500
    with pytest.raises(ShapeError, match="rank 1 already needs .* got a budget of 10"):
        TTEmbedding(rows, columns, params=10)


@pytest.mark.parametrize("rows", [2, 13, 1009, 30_522])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_padding_is_never_reached_and_never_trained(rows, order):
    layer = TTEmbedding(rows, 12, 3, order=order)
    assert layer.num_embeddings == rows
    with pytest.raises(IndexError, match=f"got {rows}"):
        layer(torch.tensor([0, rows]))
    layer(torch.tensor([0, rows - 1])).square().sum().backward()
    # digits of the first core that only padded rows have
    beyond = (rows - 1) // math.prod(layer.shape.row_modes[1:]) + 1
    assert not layer.cores[0].grad[:, beyond:].any()
    assert layer.to_dense().shape == (rows, 12)


def test_rows_are_exported_without_the_table(tmp_path, monkeypatch):
    layer = TTEmbedding(1009, 10, 4, padding_idx=5)
    want = layer.to_dense().detach()
    monkeypatch.setattr(TTEmbedding, "to_dense", None)
    chunks = list(layer.row_chunks(100))
    assert [len(chunk) for chunk in chunks] == [100] * 10 + [9]
    assert not any(chunk.requires_grad for chunk in chunks)
    assert relative_error(torch.cat(chunks), want) < RELATIVE[torch.float32]
    layer.export_npy(tmp_path / "table.npy", rows=64)
    table = np.load(tmp_path / "table.npy")
    assert table.dtype == np.float32
    assert relative_error(torch.from_numpy(table), want) < RELATIVE[torch.float32]
    layer.bfloat16().export_npy(tmp_path / "short.npy")
    assert np.load(tmp_path / "short.npy").dtype == np.float32


def test_gathered_halves_are_not_kept_for_the_backward_pass(monkeypatch):
    """Different rows of a whole step: the rows themselves and their places, half-tables and the result."""
    layer = TTEmbedding(30_522, 768, 32, row_modes=(16, 20, 10, 10), column_modes=(4, 4, 8, 6))
    ids = torch.randint(0, 30_522, (2000,), generator=torch.Generator().manual_seed(0))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rows = layer(ids)
    halves = 4 * (320 * 16 * 32 + 100 * 48 * 32)
    assert sum(kept.values()) < 4 * layer.shape.params + 2 * halves + 8 * 8 * len(ids)
    gathered = 4 * len(torch.unique(ids)) * (16 * 32 + 32 * 48)
    assert gathered > 5 * sum(kept.values())
    assert rows.shape == (2000, 768)


def test_blocks_of_any_size_give_the_same(monkeypatch):
    shape = TTMShape((5, 6, 4), (2, 3, 2), clip_ranks(3, (10, 18, 8)))
    monkeypatch.setattr(lookup, "ALL_PAIRS", 0)
    ids = torch.randint(0, 120, (119,), generator=torch.Generator().manual_seed(0))
    for elements in (1, 200, 2**30):
        monkeypatch.setattr(lookup, "BLOCK_ELEMENTS", elements)
        assert_equal_to_naive(ids, shape)


def test_per_id_baseline_of_the_bench_is_right():
    shape = TTMShape((3, 4, 2), (2, 1, 3), clip_ranks(4, (6, 4, 6)), rows=23, columns=5)
    cores = init_cores(shape, 1.0, torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([0, 22, 22, 7])
    assert relative_error(per_id_rows(ids, cores, shape), naive_lookup_rows(ids, cores, shape)) < EXACT


def test_I03_rows_keep_the_dtype_of_the_table_under_autocast():
    layer = TTEmbedding(100, 16, 4)
    ids = torch.tensor([3, 99, 3])
    with torch.autocast("cpu", torch.bfloat16):
        rows = layer(ids)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, layer(ids))


@pytest.mark.parametrize("kind", ["straight-through", "threshold"])
def test_compact_keeps_rows_and_goes_on_training(kind):
    layer = TTEmbedding(1009, 12, 6, generator=torch.Generator().manual_seed(0))
    layer.add_gates(kind)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    ids = torch.arange(0, 1009, 7)
    layer(ids).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        layer.gates[0][2:4] = 0
        layer.gates[1][0] = 0
    before, dense = layer(ids).detach(), layer.shape.params
    compact(layer, optimizer)
    assert layer.shape.ranks == (1, 4, 5, 1)
    assert layer.shape.params < dense
    assert relative_error(layer(ids), before) < RELATIVE[torch.float32]
    optimizer.zero_grad()
    loss = layer(ids).square().mean()
    loss.backward()
    optimizer.step()
    assert float(layer(ids).detach().square().mean()) < float(loss.detach())


def test_S05_the_device_and_dtype_of_the_constructor_are_used():
    layer = TTEmbedding(10**9, 64, 8, order=4, device="meta", dtype=torch.float64)
    assert {(core.device.type, core.dtype) for core in layer.cores} == {("meta", torch.float64)}
