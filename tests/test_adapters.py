"""LoRA, ReLoRA and LTE do what their papers say."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from comera_lab.adapters import (
    LTE,
    LoRA,
    add_lora,
    add_lte,
    lte_backward,
    merge_heads,
    remove_adapters,
    restart,
    restart_factor,
)
from comera_lab.shapes import ShapeError
from tests.tolerances import RELATIVE, relative_error

EXACT = RELATIVE[torch.float64]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def _batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator).double(), torch.randn(rows, 5, generator=generator).double()


def _train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
    x, y = _batch()
    for _ in range(steps):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def test_lora_starts_as_the_identity_and_its_update_has_a_rank_of_r_at_most() -> None:
    model = _net()
    x, _ = _batch()
    before, frozen = model(x), model[0].weight.detach().clone()
    adapters = add_lora(model, 3, generator=torch.Generator().manual_seed(2))
    assert torch.equal(model(x), before)
    _train(model, 30, torch.optim.AdamW(_trainable(model), lr=0.02))
    update = model[0].weight.detach() - frozen
    assert torch.linalg.matrix_rank(update) == 3
    assert torch.equal(model[0].parametrizations.weight.original, frozen)
    assert list(adapters) == ["0", "2"] and adapters["0"].down.shape == (3, 8)


def test_lora_is_the_formula_of_its_paper() -> None:
    model = _net()
    frozen = model[0].weight.detach().clone()
    adapter = add_lora(model, 2, alpha=5.0)["0"]
    with torch.no_grad():
        adapter.up.normal_()
    want = frozen + 5.0 / 2 * adapter.up @ adapter.down
    assert relative_error(model[0].weight, want) < EXACT


def test_with_a_and_b_both_zero_nothing_is_learned_until_a_restart_draws_a_anew() -> None:
    model = _net()
    adapter = add_lora(model, 2)["0"]
    with torch.no_grad():
        adapter.down.zero_()
    start = model[0].weight.detach().clone()
    _train(model, 5, torch.optim.AdamW(_trainable(model), lr=0.1, weight_decay=0.0))
    assert not adapter.up.any() and not adapter.down.any() and torch.equal(model[0].weight, start)
    restart(model)
    _train(model, 1, torch.optim.AdamW(_trainable(model), lr=0.1))
    assert adapter.up.any()


def test_relora_merges_without_changing_the_function_and_starts_again() -> None:
    model = _net()
    x, _ = _batch()
    first = model[0].weight.detach().clone()
    adapter = add_lora(model, 2, generator=torch.Generator().manual_seed(2))["0"]
    optimizer = torch.optim.AdamW(_trainable(model), lr=0.05)
    _train(model, 10, optimizer)
    before, old_down, update = model(x).detach(), adapter.down.detach().clone(), adapter.update().detach()
    restart(model, optimizer, generator=torch.Generator().manual_seed(3))
    assert relative_error(model(x), before) < EXACT
    assert relative_error(model[0].parametrizations.weight.original, first + update) < EXACT
    assert not adapter.up.any() and adapter.down.any() and not torch.equal(adapter.down, old_down)
    assert not optimizer.state[adapter.up]["exp_avg"].any() and optimizer.state[model[0].bias]["exp_avg"].any()
    _train(model, 10, optimizer)
    assert torch.linalg.matrix_rank(model[0].weight.detach() - first) == 4  # what one LoRA of rank 2 cannot reach


def test_a_restart_keeps_the_largest_moments() -> None:
    model = _net()
    adapter = add_lora(model, 4)["0"]
    optimizer = torch.optim.AdamW(_trainable(model), lr=0.05)
    _train(model, 3, optimizer)
    moment = optimizer.state[adapter.down]["exp_avg"]
    old = moment.clone()
    restart(model, optimizer, keep=0.25)
    kept = moment != 0
    assert kept.sum() == 8 and torch.equal(moment[kept], old[kept])
    assert old[kept].abs().min() >= old[~kept].abs().max()


def test_the_rate_of_relora_warms_up_after_each_restart_and_meets_the_cosine() -> None:
    factors = [restart_factor(step, every=50, warmup=10, total=200) for step in range(201)]
    assert factors[0] == factors[50] == factors[100] == 0
    assert factors[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 10 / 200)) / 2)
    assert factors[55] == pytest.approx(0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * 55 / 200)) / 2))
    assert factors[199] == pytest.approx(0.1, abs=1e-3)


def _multi_head_lora(model: nn.Module, adapters: dict[str, LTE], lr: float, steps: int) -> None:
    """The naive twin: frozen weight + mean over heads of s B A, all heads in one forward, SGD."""
    x, y = _batch()
    names = list(adapters)
    layers = dict(model.named_modules())
    frozen = {name: layers[name].parametrizations.weight.original.clone() for name in names}
    up = {name: adapters[name].up.detach().clone().requires_grad_() for name in names}
    down = {name: adapters[name].down.detach().clone().requires_grad_() for name in names}
    for _ in range(steps):
        weights = {f"{n}.weight": frozen[n] + adapters[n].scale * (up[n] @ down[n]).mean(0) for n in names}
        plain = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()
        biases = {f"{n}.bias": layers[n].bias.detach() for n in names}
        loss = functional.mse_loss(torch.func.functional_call(plain, {**weights, **biases}, (x,)), y)
        leaves = [*up.values(), *down.values()]
        gradients = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf -= lr * gradient
    with torch.no_grad():
        for name in names:
            layers[name].parametrizations.weight.original.copy_(
                frozen[name] + adapters[name].scale * (up[name] @ down[name]).mean(0)
            )


def _lte_run(merge_every: int, steps: int = 6, heads: int = 3) -> tuple[nn.Module, nn.Module, dict[str, LTE]]:
    model = _net()
    for layer in (model[0], model[2]):
        layer.bias.requires_grad_(False)
    adapters = add_lte(model, 2, heads=heads, alpha=2.0, generator=torch.Generator().manual_seed(4))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(_trainable(model), lr=0.05)
    x, y = _batch()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        lte_backward(model, [lambda: functional.mse_loss(model(x), y)] * heads)
        optimizer.step()
        if step % merge_every == 0:
            merge_heads(model)
    return model, twin, adapters


def test_lte_that_merges_every_step_equals_multi_head_lora() -> None:
    model, twin, _ = _lte_run(merge_every=1)
    twin_adapters = {name: layer.parametrizations.weight[0] for name, layer in twin.named_children() if name != "1"}
    # one loss over the mean of the heads gives each a third of the gradient that it gets from a loss of its own
    _multi_head_lora(twin, twin_adapters, lr=3 * 0.05, steps=6)
    for index in (0, 2):
        got = model[index].parametrizations.weight.original
        assert relative_error(got, twin[index].parametrizations.weight.original) < EXACT


def test_lte_that_merges_rarely_is_another_method() -> None:
    often, _, _ = _lte_run(merge_every=1)
    rarely, _, _ = _lte_run(merge_every=3)
    assert relative_error(rarely[0].weight, often[0].weight) > 1e3 * EXACT


def test_lte_heads_learn_from_their_own_shards_only() -> None:
    model = _net()
    adapter = add_lte(model, 2, heads=2, match=lambda name, layer: name == "0")["0"]
    x, y = _batch()
    lte_backward(model, [lambda: functional.mse_loss(model(x[:6]), y[:6]), lambda: 0.0 * model(x[6:]).sum()])
    assert adapter.up.grad is not None and adapter.up.grad[0].any() and not adapter.up.grad[1].any()
    shared = model[2].bias.grad.clone()
    model.zero_grad()
    functional.mse_loss(model(x[:6]), y[:6]).backward()
    assert relative_error(shared, model[2].bias.grad / 2) < EXACT


def test_an_lte_merge_without_reset_keeps_heads_and_function() -> None:
    model, _, adapters = _lte_run(merge_every=100, steps=4)
    x, _ = _batch()
    before, up = model(x).detach(), adapters["0"].up.detach().clone()
    merge_heads(model)
    assert relative_error(model(x), before) < EXACT and torch.equal(adapters["0"].up, up) and up.any()
    assert adapters["0"].update().abs().max() == 0
    down = adapters["0"].down[0]
    assert relative_error(adapters["0"].merged_down[0], down) == 0


def test_lte_rows_start_orthogonal() -> None:
    adapter = LTE(torch.zeros(5, 8, dtype=torch.float64), 3, heads=2, generator=torch.Generator().manual_seed(0))
    gram = adapter.down[0] @ adapter.down[0].T
    assert relative_error(gram, torch.eye(3, dtype=torch.float64) * 8 / 3) < EXACT


@pytest.mark.parametrize("kind", ["lora", "lte"])
def test_removing_adapters_leaves_plain_layers_with_the_same_function(kind: str) -> None:
    model = _net()
    names = [name for name, _ in model.named_parameters()]
    if kind == "lora":
        add_lora(model, 2)
    else:
        add_lte(model, 2, heads=2)
    optimizer = torch.optim.SGD(_trainable(model), lr=0.1)
    x, _ = _batch()
    _train(model, 3, optimizer)
    before = model(x).detach()
    remove_adapters(model)
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert not parametrize.is_parametrized(model[0]) and all(p.requires_grad for p in model.parameters())
    assert relative_error(model(x), before) < EXACT


def test_adapters_survive_a_checkpoint(tmp_path) -> None:
    model, twin, _ = _lte_run(merge_every=2, steps=5)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    twin.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    assert torch.equal(twin(_batch()[0]), model(_batch()[0]))


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda model: add_lora(model, 9), ShapeError, r"from 1 to 8 for a weight of shape \(12, 8\), got 9"),
        (lambda model: add_lora(model, 0), ShapeError, r"got 0. Choose a smaller rank"),
        (lambda model: add_lora(model, 2, alpha=0), ValueError, r"alpha must be above 0"),
        (lambda model: add_lora(model, 2, match=lambda *_: False), ValueError, r"at least one nn.Linear, got none"),
        (lambda model: add_lte(model, 2, heads=0), ValueError, r"heads must be at least 1, got 0"),
        (lambda model: (add_lora(model, 2), add_lora(model, 2)), ValueError, r"0.weight has a parametrization"),
        (lambda model: merge_heads(model), ValueError, r"must have LTE adapters, got none"),
        (lambda model: restart(model), ValueError, r"must have LoRA adapters, got none"),
        (lambda model: remove_adapters(model), ValueError, r"must have adapters, got none"),
        (lambda model: (add_lora(model, 2), restart(model, keep=2)), ValueError, r"share from 0 to 1, got 2"),
        (lambda model: restart_factor(1, every=10, warmup=10, total=100), ValueError, r"under every=10, got 10"),
        (
            lambda model: (add_lte(model, 2, heads=2), lte_backward(model, [lambda: model(_batch()[0]).sum()])),
            ShapeError,
            r"one shard for each of 2 heads, got 1",
        ),
    ],
)
def test_bad_input_is_refused(act, error, match) -> None:
    with pytest.raises(error, match=match):
        act(_net())


def test_a_refused_rank_leaves_the_model_as_it_was() -> None:
    model = _net()
    with pytest.raises(ShapeError):
        add_lora(model, 6)  # fits the first layer, not the second
    assert not parametrize.is_parametrized(model[0]) and len(_trainable(model)) == 4
    assert isinstance(LoRA(model[0].weight, 8), nn.Module)
