"""Laws of the MLP: twins that differ in their hidden layers alone."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.layers import TTLinear, tt_layers
from comera_lab.models.mlp import MLP
from comera_lab.shapes import ShapeError


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_dense_twin_counts_every_weight_and_bias() -> None:
    features = (784, 512, 512, 10)
    assert MLP(features).parameter_count() == sum((n + 1) * m for n, m in pairwise(features)) == 669_706


@pytest.mark.parametrize("rank", [1, 2, 8, 16])
def test_tt_twin_counts_its_cores_biases_and_the_dense_classifier(rank: int) -> None:
    model = MLP(kind="tt", rank=rank)
    layers = tt_layers(model)
    assert sorted(layers) == ["hidden.0", "hidden.1"]
    assert type(model.classifier) is nn.Linear
    cores = sum(layer.shape.params for layer in layers.values())
    assert model.parameter_count() == cores + 512 + 512 + 513 * 10


def test_parameter_count_leaves_out_what_is_frozen() -> None:
    model = MLP((6, 8, 3))
    model.hidden.requires_grad_(False)
    assert model.parameter_count() == 9 * 3


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_same_seed_gives_the_same_weights_and_touches_no_global_stream(kind: str) -> None:
    torch.manual_seed(0)
    want = torch.rand(2)
    torch.manual_seed(0)
    one, two, other = (MLP((12, 8, 3), kind, rank=2, generator=_seeded(s)) for s in (1, 1, 2))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(2), want)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


def test_twins_of_one_seed_start_from_the_same_classifier() -> None:
    dense, tt = MLP(generator=_seeded()), MLP(kind="tt", generator=_seeded())
    assert torch.equal(dense.classifier.weight, tt.classifier.weight)
    assert torch.equal(dense.classifier.bias, tt.classifier.bias)


def test_dense_start_values_follow_torch_s_own_distribution() -> None:
    model = MLP((400, 300, 10), generator=_seeded())
    weight = model.hidden[0].weight
    assert weight.abs().max() <= 0.05                                    # 1 / sqrt(400)
    assert weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.01)


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (0,)])
def test_any_leading_shape_gives_logits_of_that_shape(kind: str, leading: tuple[int, ...]) -> None:
    assert MLP((12, 8, 3), kind, rank=2)(torch.rand(*leading, 12)).shape == (*leading, 3)  # type: ignore[arg-type]


def test_tt_twin_equals_the_dense_model_of_its_matrices() -> None:
    tt = MLP((30, 20, 7, 4), kind="tt", rank=3, order=2, generator=_seeded()).double()
    dense = MLP((30, 20, 7, 4)).double()
    dense.classifier.load_state_dict(tt.classifier.state_dict())
    for name, layer in tt_layers(tt).items():
        twin = dense.get_submodule(name)
        assert isinstance(twin, nn.Linear) and layer.bias is not None
        with torch.no_grad():
            twin.weight.copy_(layer.to_dense())
            twin.bias.copy_(layer.bias)
    x = torch.rand(9, 30, dtype=torch.float64, generator=_seeded(3))
    assert relative_error(tt(x), dense(x)) < RELATIVE[torch.float64]
    with torch.no_grad():
        layer.cores[0].mul_(1.01)
    assert relative_error(tt(x), dense(x)) > RELATIVE[torch.float64], "the comparison must see one changed core"


def test_a_model_of_one_layer_is_the_classifier_alone() -> None:
    model = MLP((12, 3), kind="tt")
    assert len(model.hidden) == 0 and model(torch.rand(2, 12)).shape == (2, 3)


def test_rank_may_be_a_list_and_order_sets_the_modes() -> None:
    model = MLP((64, 64, 10), kind="tt", rank=[1, 2, 3, 2, 1], order=2)
    layer = model.hidden[0]
    assert isinstance(layer, TTLinear)
    assert layer.shape.ranks == (1, 2, 3, 2, 1) and len(layer.shape.in_modes) == 2


def test_copies_are_independent_and_text_names_the_kind() -> None:
    model = MLP((12, 8, 3), kind="tt", rank=2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.classifier.weight.zero_()
    assert model.classifier.weight.abs().sum() > 0
    assert "features=(12, 8, 3), kind='tt', parameters=" in repr(model)


@pytest.mark.parametrize("features", [(10,), (), (10, 0, 3), (10, -1), (10, 2.5, 3), (10, True)])
def test_features_that_break_a_rule_are_refused(features: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="features must be at least two whole numbers above 0, got"):
        MLP(features)


def test_unknown_kind_and_rank_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be \"dense\" or \"tt\", got 'sparse'"):
        MLP(kind="sparse")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="rank"):
        MLP(kind="tt", rank=0)
