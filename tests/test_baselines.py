"""The rivals of COAP: GaLore (matrices, and a Tucker version that does refresh) and Flora do what their papers say."""

from __future__ import annotations

import copy
import io
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from comera_lab.optimizers.baselines import GaLoreAdamW
from comera_lab.optimizers.flora import Flora, adafactor_direction, random_projection
from comera_lab.optimizers.projection import subspace_angle_degrees
from comera_lab.optimizers.tucker import hosvd_bases
from comera_lab.shapes import ShapeError
from tests.tolerances import RELATIVE, relative_error

CLOSE = RELATIVE[torch.float32]


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.Flatten(), nn.Linear(24 * 16, 20), nn.LayerNorm(20), nn.Linear(20, 4))


def _gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        _gradients(model, step)
        optimizer.step()


def _reloaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _flora(model: nn.Module, **settings) -> Flora:
    return Flora(model.named_parameters(), **{"lr": 0.01, "rank": 4, "plain_up_to": 100, **settings})


# GaLore


def _galore(model: nn.Module, **settings) -> GaLoreAdamW:
    return GaLoreAdamW(model.named_parameters(), **{"lr": 0.01, "rank": 4, "plain_up_to": 100, **settings})


class _NaiveAdam:
    """Adam on whatever `low` is, as the paper writes it: bias-corrected, returns the direction."""

    def __init__(self) -> None:
        self.step, self.mean, self.square = 0, 0.0, 0.0

    def __call__(self, low: Tensor) -> Tensor:
        self.step += 1
        self.mean = 0.9 * self.mean + 0.1 * low
        self.square = 0.999 * self.square + 0.001 * low**2
        return (self.mean / (1 - 0.9**self.step)) / ((self.square / (1 - 0.999**self.step)).sqrt() + 1e-8)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (12, 30, 1, 1)])
def test_galore_is_algorithm_2_of_its_paper(shape: tuple[int, ...]) -> None:
    """Naive twin: P from the full SVD on the smaller side every T steps, Adam on the projection, lifted back."""
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    optimizer = GaLoreAdamW([weight], lr=0.1, weight_decay=0.1, rank=3, update_interval=2, plain_up_to=0)
    want, adam, basis = weight.detach().clone().flatten(1), _NaiveAdam(), torch.empty(0)
    for step in range(5):
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1 + step), dtype=torch.float64)
        gradient = weight.grad.flatten(1)
        optimizer.step()
        left = gradient.shape[0] < gradient.shape[1]
        if step % 2 == 0:
            u, _, vh = torch.linalg.svd(gradient)
            new = u[:, :3] if left else vh[:3].T
            signs = torch.sign((new * optimizer.state[weight]["basis"]).sum(0))  # singular vectors have free signs
            basis = new * signs
        direction = adam(basis.T @ gradient if left else gradient @ basis)
        want = 0.99 * want - 0.1 * 0.25 * (basis @ direction if left else direction @ basis.T)
    assert relative_error(weight, want.reshape(shape)) < RELATIVE[torch.float64]


def test_galore_on_convolutions_goes_through_adam_and_does_refresh() -> None:
    """Naive twin by einsum; the two faults of the public code are mutants that must differ."""
    weight = nn.Parameter(torch.randn(16, 10, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    optimizer = GaLoreAdamW([weight], lr=0.1, rank_ratio=4, update_interval=2, plain_up_to=0)
    want = {name: weight.detach().clone() for name in ("right", "never refreshed", "raw gradient")}
    adam, stale_adam, bases, first = _NaiveAdam(), _NaiveAdam(), (), ()
    for step in range(4):
        weight.grad = torch.randn(16, 10, 3, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        gradient = weight.grad.clone()
        if step % 2 == 0:
            bases = hosvd_bases(gradient, (8, 5))
            first = first or bases
        optimizer.step()

        def small(u: Tensor, v: Tensor, of: Tensor = gradient) -> Tensor:
            return torch.einsum("oikl,or,is->rskl", of, u, v)

        def large(low: Tensor, u: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("rskl,or,is->oikl", low, u, v)

        want["right"] -= 0.025 * large(adam(small(*bases)), *bases)
        want["never refreshed"] -= 0.025 * large(stale_adam(small(*first)), *first)
        want["raw gradient"] -= 0.025 * large(small(*bases), *bases)
    errors = {name: relative_error(weight, value) for name, value in want.items()}
    assert errors["right"] < RELATIVE[torch.float64]
    assert errors["never refreshed"] > 1e-3 and errors["raw gradient"] > 1e-3
    angle = subspace_angle_degrees(optimizer.state[weight]["basis_out"], first[0])
    assert angle > 10


def test_A02_galore_takes_a_zero_gradient_on_a_convolution() -> None:
    weight = nn.Parameter(torch.randn(16, 8, 3, 3))
    start = weight.detach().clone()
    optimizer = GaLoreAdamW([weight], rank_ratio=2, update_interval=5, plain_up_to=0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, start)
    for step in range(10):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert torch.isfinite(weight).all() and not torch.equal(weight, start)


@pytest.mark.parametrize("cut", [3, 4, 5])
def test_galore_resumes_bitwise_before_at_and_after_a_refresh(cut: int) -> None:
    whole = _net()
    model = copy.deepcopy(whole)
    _run(whole, _galore(whole, update_interval=4), range(7))
    optimizer = _galore(model, update_interval=4)
    _run(model, optimizer, range(cut))
    saved = _reloaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = _net(seed=1)
    resumed.load_state_dict(saved["model"])
    again = _galore(resumed, update_interval=4)
    again.load_state_dict(saved["optimizer"])
    _run(resumed, again, range(cut, 7))
    for got, want in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)


def test_galore_without_a_rank_is_torchs_adamw() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    _run(model, GaLoreAdamW(model.parameters(), lr=0.01, rank_ratio=None, weight_decay=0.1), range(3))
    _run(twin, torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1), range(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


# Flora


def test_flora_without_projection_is_torchs_adafactor() -> None:
    """torch's own has no first moment and scales the rate down with time: undone by the rate given to ours."""
    model = _net()
    twin = copy.deepcopy(model)
    ours = Flora(model.parameters(), lr=1.0, beta1=None, rank_ratio=None, floor=1e-3)
    theirs = torch.optim.Adafactor(twin.parameters(), lr=1.0, weight_decay=0.0, eps=(1e-30, 1e-3))
    for step in range(4):
        ours.param_groups[0]["lr"] = min(1.0, 1 / math.sqrt(step + 1))
        _run(model, ours, range(step, step + 1))
        _run(twin, theirs, range(step, step + 1))
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_error(got, want) < 10 * CLOSE


def test_flora_is_the_formula_of_its_paper_through_a_resampling() -> None:
    """Naive twin of a wide matrix: everything at full size, the projection as a plain matrix product."""
    weight = nn.Parameter(torch.randn(6, 40, generator=torch.Generator().manual_seed(0)))
    settings = {"rank": 3, "plain_up_to": 0, "resample_interval": 2, "scale_parameter": False}
    optimizer = Flora([weight], lr=0.1, beta1=0.8, **settings)
    seeds, want, moment, adafactor = [], weight.detach().clone(), None, {}
    for step in range(1, 6):
        weight.grad = torch.randn(6, 40, generator=torch.Generator().manual_seed(step))
        gradient = weight.grad.clone()
        optimizer.step()
        seeds.append(optimizer.state[weight]["seed"])
        if not adafactor:
            adafactor = {"row_mean_sq": torch.zeros(6, 1), "col_mean_sq": torch.zeros(1, 40)}
        adafactor["step"] = step
        update = adafactor_direction(gradient, adafactor, optimizer.param_groups[0])
        left = random_projection(6, 3, seeds[-1], torch.device("cpu")).T  # (rank, rows)
        if moment is None:
            moment = torch.zeros(3, 40)
        elif seeds[-1] != seeds[-2]:
            moment = left @ random_projection(6, 3, seeds[-2], torch.device("cpu")) @ moment
        moment = 0.8 * moment + 0.2 * left @ update
        want -= 0.1 * (0.2 * update + 0.8 * left.T @ moment)
    assert [a == b for a, b in pairwise(seeds)] == [True, False, True, False]
    assert relative_error(weight, want) < 10 * CLOSE


def test_flora_projects_without_bias() -> None:
    vector = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    bases = [random_projection(30, 6, seed, torch.device("cpu")) for seed in range(2000)]
    mean = sum(vector @ basis @ basis.T for basis in bases) / len(bases)
    assert relative_error(mean, vector) < 0.08  # one draw is off by sqrt(31 / 6), so 2,000 by 0.05
    assert not torch.equal(bases[0], bases[1])


def test_flora_keeps_no_basis_and_gives_every_parameter_its_own_seed() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    optimizer = Flora(model.parameters(), rank=4, plain_up_to=100)
    _run(model, optimizer, range(1))
    first, second = (optimizer.state[layer.weight] for layer in model)
    assert first["seed"] != second["seed"]
    assert {key for key, value in first.items() if isinstance(value, Tensor)} == {
        "step", "row_mean_sq", "col_mean_sq", "exp_avg"
    }  # fmt: skip
    assert first["exp_avg"].shape == second["exp_avg"].shape == (64, 4)


@pytest.mark.parametrize("cut", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flora_resumes_bitwise_before_at_and_after_a_resampling(cut: int, dtype: torch.dtype) -> None:
    whole = _net().to(dtype)
    model = copy.deepcopy(whole)
    settings = {"resample_interval": 3}
    _run(whole, _flora(whole, **settings), range(6))
    optimizer = _flora(model, **settings)
    _run(model, optimizer, range(cut))
    saved = _reloaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = _net(seed=1).to(dtype)
    resumed.load_state_dict(saved["model"])
    again = _flora(resumed, **settings)
    again.load_state_dict(saved["optimizer"])
    assert all(v.dtype == torch.float32 for s in again.state.values() for v in s.values() if isinstance(v, Tensor))
    _run(resumed, again, range(cut, 6))
    for got, want in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)


def test_flora_reports_what_it_will_keep_and_then_keeps() -> None:
    model = _net()
    optimizer = _flora(model)
    before = optimizer.report()
    _run(model, optimizer, range(2))
    assert optimizer.report() == before
    assert [(row.name, row.rank, row.side) for row in before.rows if row.rank] == [
        ("0.weight", (4,), "rows"), ("2.weight", (4,), "rows")
    ]  # fmt: skip
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert before.bytes == sum(tensor.nbytes for tensor in tensors)
    assert "of the elements projected" in str(before)


def test_E05_flora_survives_zero_gradients() -> None:
    for shape in ((16, 8), (6, 5, 3, 3), (7,)):
        weight = nn.Parameter(torch.randn(shape))
        start = weight.detach().clone()
        optimizer = Flora([weight, nn.Parameter(torch.zeros(9, 9))], rank=2, plain_up_to=20)
        for step in range(8):
            weight.grad = torch.zeros(shape) if step < 3 else torch.randn(shape)
            if step > 5 and len(shape) > 1:
                weight.grad[0], weight.grad[:, 1] = 0, 0
            optimizer.step()
            assert torch.isfinite(weight).all() and torch.equal(weight, start) == (step < 3)


def test_flora_takes_groups_closures_maximize_and_decay() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    groups = [{"params": [model[2].weight], "rank": 2}, {"params": [model[4].weight], "rank": None, "rank_ratio": None}]
    kept = copy.copy(groups[0])
    optimizer = Flora(groups, lr=0.1, plain_up_to=50, weight_decay=0.1)
    assert groups[0].keys() == kept.keys()
    assert [row.rank for row in optimizer.report().rows] == [(2,), None]
    _gradients(model, 0)
    assert optimizer.step(lambda: 3.0) == 3.0
    up = Flora([twin[2].weight], lr=0.1, rank=2, plain_up_to=50, weight_decay=0.1, maximize=True)
    _gradients(twin, 0)
    twin[2].weight.grad.neg_()
    up.step()
    assert torch.equal(twin[2].weight, model[2].weight)


# refusals


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rank": 0}, "rank must be None or a whole number of at least 1, got 0"),
        ({"rank_ratio": 0.5}, "rank_ratio must be None or at least 1, got 0.5"),
        ({"resample_interval": 0}, "resample_interval must be a whole number of at least 1, got 0"),
        ({"clip": 0.0}, "clip must be above 0, got 0.0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"plain_up_to": 10**9}, "none of . parameters is projected"),
    ],
)
def test_flora_refuses_settings_out_of_range(settings, match) -> None:
    with pytest.raises(ValueError, match=match):
        _flora(_net(), **settings)


def test_A01_flora_names_a_nonfinite_gradient_and_touches_nothing() -> None:
    model = _net()
    before = copy.deepcopy(model.state_dict())
    optimizer = _flora(model)
    _gradients(model, 0)
    model[2].weight.grad[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"must be finite, got non-finite values \(NaN or Inf\) for 2.weight"):
        optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_flora_refuses_state_of_another_shape_and_keeps_its_own() -> None:
    model = _net()
    optimizer = _flora(model)
    _run(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][2]["exp_avg"] = torch.zeros(3, 4)
    before = optimizer.state[model[2].weight]["exp_avg"].clone()
    with pytest.raises(ShapeError, match=r"'exp_avg' of 2.weight must have the shape \(384, 4\).*got \(3, 4\)"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[model[2].weight]["exp_avg"], before)


def test_flora_refuses_what_it_cannot_step() -> None:
    with pytest.raises(ValueError, match=r"real floating-point tensors, got parameter 0 of torch.complex64"):
        Flora([nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))], rank_ratio=None)
    embedding = nn.Embedding(50, 8, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradients must be dense, got a sparse one for weight"):
        Flora(embedding.named_parameters(), rank_ratio=None).step()
