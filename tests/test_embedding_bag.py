"""TTEmbeddingBag against nn.EmbeddingBag holding the same table, in float64, with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.contraction import lookup
from comera_lab.layers import TTEmbeddingBag, compact
from comera_lab.shapes import ShapeError

EXACT = RELATIVE[torch.float64]


def bags(rows=23, columns=6, rank=3, **options):
    return TTEmbeddingBag(
        rows, columns, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0), **options
    )


def dense_twin(bag):
    """The answer of nn.EmbeddingBag whose weight is a function of the cores, so that gradients reach them."""

    def forward(ids, offsets=None, per_sample_weights=None):
        return nn.functional.embedding_bag(
            ids,
            bag.to_dense(),
            offsets,
            mode=bag.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=bag.include_last_offset,
            padding_idx=bag.padding_idx,
        )

    return forward


def assert_equal_to_torch(bag, ids, offsets=None, weights=None):
    results = []
    for function in (bag, dense_twin(bag)):
        inputs = list(bag.cores) + ([] if weights is None else [weights])
        out = function(ids, offsets, weights)
        pull = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
        results.append([out, *torch.autograd.grad(out, inputs, pull)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < EXACT


@st.composite
def flat_bags(draw):
    """ids (N,) and offsets (B,), empty bags anywhere."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    ids = draw(st.lists(st.integers(0, 22), min_size=sum(sizes), max_size=sum(sizes)))
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets), sum(sizes)


@settings(max_examples=25)
@given(
    flat_bags(),
    st.sampled_from(["sum", "mean"]),
    st.sampled_from([None, 4]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
)
def test_flat_bags_equal_torch_for_any_offsets(given_bags, mode, padding_idx, last, weighted, order):
    ids, offsets, total = given_bags
    if last:
        offsets = torch.cat([offsets, torch.tensor([total])])
    weights = None
    if weighted and mode == "sum":
        weights = torch.cos(torch.arange(len(ids), dtype=torch.float64)).requires_grad_()
    bag = bags(mode=mode, padding_idx=padding_idx, include_last_offset=last, order=order)
    assert_equal_to_torch(bag, ids, offsets, weights)
    assert torch.equal(bag(ids.int(), offsets.int(), weights), bag(ids, offsets, weights))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_rectangular_bags_equal_torch(mode, padding_idx):
    bag = bags(mode=mode, padding_idx=padding_idx)
    ids = torch.tensor([[3, 3, 3], [0, 3, 22], [5, 5, 7]])
    assert_equal_to_torch(bag, ids)
    if mode == "sum":
        assert_equal_to_torch(bag, ids, weights=torch.rand(3, 3, dtype=torch.float64).requires_grad_())


def test_bags_without_ids_are_zeros_with_zero_gradients():
    bag = bags(mode="sum")
    nothing = torch.zeros(0, dtype=torch.int64)
    for out in (bag(nothing, torch.tensor([0, 0])), bag(nothing.reshape(2, 0))):
        assert out.shape == (2, 6)
        assert not out.any()
        assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), list(bag.cores)))
    assert bag(nothing.reshape(0, 3)).shape == (0, 6)
    assert bag(nothing, nothing).shape == (0, 6)


def test_a_bag_of_padding_alone_is_zero_and_trains_nothing():
    bag = bags(mode="mean", padding_idx=2)
    out = bag(torch.tensor([2, 2, 2]), torch.tensor([0]))
    assert not out.any()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), list(bag.cores)))


@pytest.mark.parametrize("ids", [[3, 3, 3, 0], [1, 1, 1, 3], [5] * 10_000])
def test_F06_repeated_ids_in_bags_add_their_gradients_the_same_each_time(ids):
    bag = bags(mode="sum", order=2)
    ids = torch.tensor(ids)
    assert_equal_to_torch(bag, ids, torch.tensor([0, 1]))
    grads = [torch.autograd.grad(bag(ids, torch.tensor([0, 2])).square().sum(), list(bag.cores)) for _ in range(5)]
    assert all(torch.equal(one, again) for other in grads for one, again in zip(grads[0], other, strict=True))


def test_a_mutant_that_loses_repeats_is_found(monkeypatch):
    def lossy(total, at, rows):
        total[at] = rows

    monkeypatch.setattr(lookup, "_add_rows", lossy)
    with pytest.raises(AssertionError):
        assert_equal_to_torch(bags(mode="sum"), torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0]))


def test_memory_follows_different_ids_and_bags_not_ids():
    bag = TTEmbeddingBag(10**6, 64, 16, mode="sum")
    ids = torch.arange(50).repeat(400)
    largest = 0

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                largest = max(largest, out.numel())
            return out

    with Spy():
        out = bag(ids, torch.arange(0, len(ids), 100))
    assert out.shape == (200, 64)
    assert largest <= max(200 * 64, *(core.numel() for core in bag.cores)) < len(ids) * 64 / 10


def test_F04_from_a_trained_bag():
    torch.manual_seed(0)
    dense = nn.EmbeddingBag(40, 8, mode="sum", include_last_offset=True, padding_idx=1)
    before = copy.deepcopy(dense.weight)
    bag = TTEmbeddingBag.from_embedding(dense.eval(), 10**6)
    ids, offsets = torch.tensor([1, 0, 39, 39, 1]), torch.tensor([0, 2, 2, 5])
    assert relative_error(bag(ids, offsets), dense(ids, offsets)) < 1e-5
    assert (bag.mode, bag.include_last_offset, bag.padding_idx, bag.training) == ("sum", True, 1, False)
    assert torch.equal(dense.weight, before)
    assert TTEmbeddingBag.from_embedding(nn.Embedding(40, 8), params=300).mode == "mean"
    with pytest.raises(ValueError, match="mode must be 'sum' or 'mean', got 'max'"):
        TTEmbeddingBag.from_embedding(nn.EmbeddingBag(40, 8, mode="max"), 4)


def test_gates_and_compact_keep_what_a_bag_says():
    bag = bags(rank=4, mode="mean")
    bag.add_gates()
    with torch.no_grad():
        bag.gates[0][1] = 0
        bag.gates[1][0] = 0.5
    ids, offsets = torch.tensor([0, 7, 22, 7]), torch.tensor([0, 3])
    assert_equal_to_torch(bag, ids, offsets)
    before, elements = bag(ids, offsets), bag.shape.params
    compact(bag)
    assert bag.shape.params < elements
    assert relative_error(bag(ids, offsets), before) < EXACT


def test_a_step_of_any_optimizer_trains_and_state_is_as_small_as_the_cores():
    bag = TTEmbeddingBag(1009, 16, 4, mode="sum")
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.1)
    ids = torch.randint(0, 1009, (64, 3), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (bag(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    assert held <= bag.shape.params + len(bag.cores)


N = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("options", "arguments", "kind", "message"),
    [
        ({}, (N,), ValueError, r"ids \(N,\) need offsets"),
        ({}, (N.reshape(2, 2), torch.tensor([0])), ValueError, r"ids \(B, N\) are B bags already"),
        ({}, (N.reshape(1, 2, 2),), ShapeError, r"got \(1, 2, 2\)"),
        ({}, (N, torch.tensor([0, 3, 2])), ValueError, r"begin with 0 and never fall, got \[0, 3, 2\]"),
        ({}, (N, torch.tensor([1, 2])), ValueError, r"begin with 0 and never fall, got \[1, 2\]"),
        ({}, (N, torch.tensor([0, 5])), ValueError, r"offsets must lie in \[0, 4\], got 5"),
        ({}, (N, torch.zeros(0, dtype=torch.int64)), ValueError, "begin with 0, got none for 4 ids"),
        ({}, (N, torch.tensor([0.0, 2.0])), ValueError, r"offsets must be \(B,\) int32 or int64, got \(2,\) torch.flo"),
        ({"include_last_offset": True}, (N, torch.tensor([0, 3])), ValueError, "end with the number of ids, 4, got 3"),
        ({"include_last_offset": True}, (N[:0], N[:0]), ValueError, "at least one offset, got none"),
        (
            {"mode": "mean"},
            (N, N[:1], torch.ones(4)),
            ValueError,
            "per_sample_weights need mode='sum', got mode='mean'",
        ),
        ({}, (N, N[:1], torch.ones(3, dtype=torch.float64)), ShapeError, r"one weight for each id, \(4,\), got \(3,\)"),
        ({}, (N, N[:1], torch.ones(4)), ValueError, "dtype of the table, torch.float64, got torch.float32"),
        ({}, (N - 1, N[:1]), IndexError, r"ids must lie in \[0, 23\), got -1"),
        ({}, (N + 20, N[:1]), IndexError, r"ids must lie in \[0, 23\), got 23"),
        ({}, (N.double(), N[:1]), TypeError, "ids must be int32 or int64, got torch.float64"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(options, arguments, kind, message):
    bag = bags(**{"mode": "sum", **options})
    before = copy.deepcopy(bag.state_dict())
    with pytest.raises(kind, match=message):
        bag(*arguments)
    assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())
    assert all(core.grad is None for core in bag.cores)


def test_bad_construction_is_refused():
    with pytest.raises(ValueError, match="mode must be 'sum' or 'mean', got 'max'"):
        TTEmbeddingBag(10, 4, mode="max")
    with pytest.raises(ShapeError, match="exactly one of rank and params, got rank=3, params=99"):
        TTEmbeddingBag(10, 4, 3, params=99)
