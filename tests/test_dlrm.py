from __future__ import annotations

import pytest
import torch
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.layers import TTEmbedding, tt_layers
from comera_lab.models.dlrm import CRITEO_ROWS, DLRM, DLRMConfig, HashedTable
from comera_lab.objectives import model_size
from comera_lab.shapes import ShapeError

SMALL = {"table_rows": (40, 300, 5), "numbers": 2, "dim": 8, "bottom": (6,), "top": (7,), "rank": 3, "threshold": 100}


def batch(rows=9, seed=0):
    draw = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-2, 500, (rows,), generator=draw) for _ in range(2)]
    columns += [torch.randint(0, size, (rows,), generator=draw) for size in SMALL["table_rows"]]
    return torch.stack(columns, dim=1).int()


def slow_logit(model, row):
    """One row by the definition: vectors, the dot product of each pair, top MLP."""
    numbers = torch.log(1 + row[:2].clamp_min(0).to(torch.float64))
    vectors = [model.bottom(numbers)]
    for table, k in zip(model.tables, row[2:], strict=True):
        if isinstance(table, HashedTable):
            vectors.append(table(k))
        else:
            vectors.append(table.to_dense()[k] if isinstance(table, TTEmbedding) else table.weight[k])
    dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
    return model.top(torch.cat([vectors[0], torch.stack(dots)]))


@pytest.mark.parametrize("kind", ["dense", "tt", "hash"])
def test_forward_and_gradients_are_those_of_the_definition(kind):
    model = DLRM(DLRMConfig(kind=kind, **SMALL), generator=torch.Generator().manual_seed(0)).double()
    x = batch()
    results = []
    for logits in (model(x)[:, 1], torch.cat([slow_logit(model, row) for row in x])):
        pull = torch.sin(torch.arange(len(x), dtype=torch.float64))
        results.append([logits, *torch.autograd.grad(logits, list(model.parameters()), pull)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float64]
    with torch.no_grad():
        next(model.tables.parameters()).mul_(1.01)
    assert relative_error(model(x)[:, 1], results[1][0]) > 1e-9


def test_two_logits_make_the_published_loss():
    model = DLRM(DLRMConfig(**SMALL))
    logits, y = model(batch()).detach(), torch.arange(9) % 2
    assert logits.shape == (9, 2)
    assert not logits[:, 0].any()
    published = nn.functional.binary_cross_entropy_with_logits(logits[:, 1], y.float())
    assert float(nn.functional.cross_entropy(logits, y)) == pytest.approx(float(published), rel=1e-6)


def test_tables_are_chosen_by_size():
    kinds = {kind: [type(t) for t in DLRM(DLRMConfig(kind=kind, **SMALL)).tables] for kind in ("dense", "tt", "hash")}
    assert kinds["dense"] == [nn.Embedding] * 3
    assert kinds["tt"] == [nn.Embedding, TTEmbedding, nn.Embedding]
    assert kinds["hash"] == [nn.Embedding, HashedTable, nn.Embedding]
    everything = DLRM(DLRMConfig(**{**SMALL, "threshold": 1}))
    assert len(tt_layers(everything)) == 3


def test_hashing_pays_for_the_same_bytes_and_spreads_its_ids():
    tt, hashed = (DLRM(DLRMConfig(kind=kind, **SMALL)) for kind in ("tt", "hash"))
    kept = hashed.tables[1].table
    assert 0 <= tt.tables[1].shape.params - kept.weight.numel() < SMALL["dim"]
    big = HashedTable(10_000, nn.Embedding(50, 1))
    with torch.no_grad():
        big.table.weight[:, 0] = torch.arange(50)
    counts = big(torch.arange(10_000)).detach().flatten().long().bincount(minlength=50)
    # 200 on average
    assert 100 < int(counts.min()) <= int(counts.max()) < 300


def test_tables_start_with_the_published_spread():
    config = DLRMConfig(table_rows=(3000, 3000), numbers=1, dim=16, rank=8, threshold=1)
    tt = DLRM(config, generator=torch.Generator().manual_seed(0))
    dense = DLRM(DLRMConfig(table_rows=(3000,), numbers=1, dim=16, kind="dense"))
    want = (3 * 3000) ** -0.5
    assert float(dense.tables[0].weight.detach().std()) == pytest.approx(want, rel=0.05)
    assert 0.6 * want < float(tt.tables[0].to_dense().detach().std()) < 1.5 * want


def test_criteo_preset_has_the_published_tables_and_counts():
    """Layout of the authors' public code: five tables as rank-16 TT-matrices, the other 21 dense, width 128."""
    sizes = {}
    for kind in ("dense", "tt", "hash"):
        with torch.device("meta"):
            model = DLRM(DLRMConfig.criteo(kind))
        sizes[kind] = model_size(model)
        if kind == "tt":
            names = list(tt_layers(model))
            shapes = [layer.shape for layer in tt_layers(model).values()]
    assert names == [f"tables.{k}" for k in (2, 3, 11, 15, 20)]
    assert [shape.row_modes for shape in shapes] == [
        (200, 220, 250), (125, 130, 136), (200, 200, 209), (166, 175, 188), (200, 200, 200)
    ]  # fmt: skip
    assert {shape.column_modes for shape in shapes} == {(4, 4, 8)}
    assert {shape.ranks for shape in shapes} == {(1, 16, 16, 1)}
    assert sum(CRITEO_ROWS) == 33_762_577
    assert sizes["dense"].total == 33_762_577 * 128 + sizes["tt"].total - sizes["tt"].cores - 569_296 * 128
    # sum over the five of 16 (4 v1 + 16 4 v2 + 8 v3)
    assert sizes["tt"].cores == sum(16 * (4 * a + 64 * b + 8 * c) for a, b, c in (s.row_modes for s in shapes))
    assert sizes["tt"].total == 74_614_465
    assert sizes["tt"].total_ratio == pytest.approx(57.9, abs=0.05)
    assert sizes["tt"].total - sizes["hash"].total < 5 * 128
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 256 + 256 + 256 * 128 + 128
    pairs = 27 * 26 // 2
    top = (128 + pairs) * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert sizes["tt"].dense == bottom + top + 569_296 * 128


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kind": "sparse"}, ValueError, "kind must be 'dense', 'tt' or 'hash', got 'sparse'"),
        ({"table_rows": ()}, ShapeError, "table_rows must not be empty"),
        ({"table_rows": (4, 0)}, ShapeError, r"table_rows\[1\] must be an integer of at least 1, got 0"),
        ({"numbers": 0}, ShapeError, "numbers must be an integer of at least 1, got 0"),
    ],
)
def test_bad_configurations_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        DLRMConfig(**{**SMALL, **options})


def test_bad_rows_are_refused():
    model = DLRM(DLRMConfig(**SMALL))
    with pytest.raises(ShapeError, match=r"x must be \(rows, 5\), got \(9, 4\)"):
        model(batch()[:, :4])
    with pytest.raises(TypeError, match="x must hold integers, ids among them, got torch.float32"):
        model(batch().float())
    wrong = batch()
    wrong[0, 3] = 300
    with pytest.raises(IndexError, match=r"ids must lie in \[0, 300\), got 300"):
        model(wrong)
