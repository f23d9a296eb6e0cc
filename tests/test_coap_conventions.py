"""torch.optim's conventions: groups, closures, hooks, schedules, scaler, checkpoints, copies, refusals."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.train import TrainConfig, fit
from comera_lab.optimizers import (
    OPTIMIZER_NAMES,
    COAPAdafactor,
    COAPAdamW,
    make_optimizer,
    projection_groups,
    step_in_backward,
)
from comera_lab.shapes import ShapeError
from tests.coap_helpers import KINDS, SMALL, Small, same_state, step_with, train, weights


def saved(optimizer):
    """The optimizer's state as `torch.load` gives it back from a file that may hold tensors alone."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def twin_runs(kind, cut, total=13, dtype=torch.float32):
    """An unbroken run and one that was cut, saved, and went on with fresh objects."""
    whole, first = Small().to(dtype), Small().to(dtype)
    one, two = KINDS[kind](whole.parameters()), KINDS[kind](first.parameters())
    train(whole, one, total)
    train(first, two, cut)
    second = Small(seed=9).to(dtype)
    second.load_state_dict(first.state_dict())
    three = KINDS[kind](second.parameters())
    three.load_state_dict(saved(two))
    train(second, three, total - cut, start=cut)
    return whole, second, one, three


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [4, 5, 6, 10, 11])
def test_a_run_cut_before_at_and_after_a_renewal_goes_on_bit_for_bit(kind, cut):
    """Bases change at steps 5 (aligned) and 10 (refreshed) of 13."""
    whole, second, one, three = twin_runs(kind, cut)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    assert same_state(one.state_dict(), three.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_C02_C03_state_keeps_codes_and_takes_the_dtype_of_the_loading_model(kind):
    model = Small()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, 6)
    for dtype in (torch.float64, torch.bfloat16):
        other = Small().to(dtype)
        loaded = KINDS[kind](other.parameters())
        loaded.load_state_dict(saved(optimizer))
        for (parameter, state), old in zip(loaded.state.items(), optimizer.state.values(), strict=True):
            assert state.keys() == old.keys()
            for key, value in state.items():
                assert key == "step" or value.device == parameter.device
                if key.endswith("_codes"):
                    assert torch.equal(value, old[key])
                elif key.endswith("_scales"):
                    assert value.dtype == torch.float32
                elif key == "basis":
                    assert value.dtype == dtype
        before = {k: {key: v.dtype for key, v in s.items()} for k, s in loaded.state_dict()["state"].items()}
        train(other, loaded, 5, start=6)
        after = {k: {key: v.dtype for key, v in s.items()} for k, s in loaded.state_dict()["state"].items()}
        assert after == before
        assert all(parameter.isfinite().all() for parameter in other.parameters())


@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_C03_state_dtypes_survive_save_and_load(dtype, state_dtype):
    runs = []
    for cut in (None, 6):
        model = Small().to(dtype)
        optimizer = COAPAdamW(model.parameters(), **SMALL, state_dtype=state_dtype)
        if cut:
            train(model, optimizer, cut)
            used = optimizer.report().bytes
            fresh = COAPAdamW(model.parameters(), **SMALL, state_dtype=state_dtype)
            fresh.load_state_dict(saved(optimizer))
            assert fresh.report().bytes == used
            assert same_state(fresh.state_dict(), optimizer.state_dict())
            optimizer = fresh
        train(model, optimizer, 12 - (cut or 0), start=cut or 0)
        runs.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_C01_next_refresh_comes_when_it_would_have_come():
    """Saved at step 7 with an interval of 5: the basis changes at step 10, not at 12."""
    _, second, _, optimizer = twin_runs("adamw", 7, total=7)
    changed = []
    for step in range(7, 13):
        before = optimizer.state[second.linear.weight]["basis"].clone()
        train(second, optimizer, 1, start=step)
        if not torch.equal(before, optimizer.state[second.linear.weight]["basis"]):
            changed.append(step)
    assert changed == [10]


@pytest.mark.parametrize("kind", KINDS)
def test_C04_state_dict_at_any_moment_round_trips(kind):
    model = Small()
    optimizer = KINDS[kind](model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for steps in (0, 1, 6):
        train(model, optimizer, steps)
        state = optimizer.state_dict()
        assert [n for group in state["param_groups"] for n in group["params"]] == list(range(6))
        other = KINDS[kind](model.parameters())
        other.load_state_dict(saved(optimizer))
        assert same_state(other.state_dict(), state)
        settings = [{k: v for k, v in g.items() if k != "initial_lr"} for g in other.state_dict()["param_groups"]]
        assert settings == [{k: v for k, v in g.items() if k != "initial_lr"} for g in state["param_groups"]]


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_C05_copies_and_pickles_step_alone(steps, copier):
    model = Small()
    optimizer = COAPAdamW(model.parameters(), **SMALL)
    train(model, optimizer, steps)
    other_model, other = copier((model, optimizer))
    kept_weights, kept_state = weights(model), copy.deepcopy(optimizer.state_dict())
    train(other_model, other, 5, start=steps)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), kept_weights, strict=True))
    assert same_state(optimizer.state_dict(), kept_state)
    train(model, optimizer, 5, start=steps)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other_model), strict=True))


def test_loading_never_shares_tensors_between_two_optimizers():
    model = Small()
    one, two = (COAPAdamW(model.parameters(), **SMALL) for _ in range(2))
    train(model, one, 2)
    two.load_state_dict(one.state_dict())
    for parameter, state in one.state.items():
        for key, value in state.items():
            assert value.data_ptr() != two.state[parameter][key].data_ptr()


def test_state_of_another_shape_is_refused_and_nothing_changes():
    small, large = nn.Linear(16, 24), nn.Linear(16, 32)
    one, two = COAPAdamW(small.parameters(), **SMALL), COAPAdamW(large.parameters(), **SMALL)
    for model, optimizer in ((small, one), (large, two)):
        step_with(model.weight, torch.randn_like(model.weight), optimizer)
    before = copy.deepcopy(two.state_dict())
    with pytest.raises(
        ShapeError, match=r"state 'exp_avg' of parameter 0 must have the shape \(32, 4\).*got \(24, 4\)"
    ):
        two.load_state_dict(one.state_dict())
    broken = copy.deepcopy(two.state_dict())
    broken["state"][0]["basis"] = torch.zeros(5, 4)
    with pytest.raises(ShapeError, match=r"state 'basis' of parameter 0 must have the shape \(16, 4\)"):
        two.load_state_dict(broken)
    assert same_state(two.state_dict(), before)


def test_D08_a_group_added_late_has_its_own_settings_and_schedule():
    first, late = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(128, 64))
    optimizer = COAPAdamW([first], **SMALL)
    for _ in range(7):
        step_with(first, torch.randn(64, 32), optimizer)
    optimizer.add_param_group({"params": [late], "rank": 7, "lr": 0.0})
    changed = []
    for step in range(7):
        before = optimizer.state[late].get("basis", torch.zeros(0)).clone()
        late.grad = torch.randn(128, 64)
        step_with(first, torch.randn(64, 32), optimizer)
        if not torch.equal(before, optimizer.state[late]["basis"]):
            changed.append(step)
    assert changed == [0, 5]
    assert optimizer.state[late]["basis"].shape == (64, 7)
    again = COAPAdamW([{"params": [first]}, {"params": [late]}], **SMALL)
    again.load_state_dict(saved(optimizer))
    assert again.param_groups[1]["rank"] == 7
    with pytest.raises(ValueError, match="different number of parameter groups"):
        COAPAdamW([first], **SMALL).load_state_dict(optimizer.state_dict())


def test_S03_the_caller_s_groups_stay_as_they_are():
    weight, other = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16))
    groups = [{"params": [weight], "lr": 5e-3}, {"params": (p for p in [other]), "rank": 2}]
    kept = [dict(group) for group in groups]
    one = COAPAdamW(groups[:1], **SMALL)
    two = COAPAdamW(groups[:1], **SMALL)
    assert groups == kept
    assert one.param_groups == two.param_groups
    both = COAPAdamW(groups, **SMALL)
    assert [group["lr"] for group in both.param_groups] == [5e-3, 1e-3]
    assert [row.rank for row in both.report().rows] == [(4,), (2,)]
    named = COAPAdamW([("w", weight), ("b", other)], **SMALL)
    assert [row.name for row in named.report().rows] == ["w", "b"]


def test_B04_settings_are_not_changed_by_construction():
    settings = {"rank": 4, "update_interval": 7, "scale": 0.5, "plain_up_to": 0}
    kept = dict(settings)
    builds = [make_optimizer("coap", Small().parameters(), 1e-3, **settings) for _ in range(2)]
    assert settings == kept
    mine = [{k: v for k, v in build.param_groups[0].items() if k != "params"} for build in builds]
    assert mine[0] == mine[1]


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_name_makes_an_optimizer_that_trains(name):
    model = Small()
    settings = {"plain_up_to": 0} if name not in ("adamw", "adafactor", "adamw-8bit") else {}
    optimizer = make_optimizer(name, model.named_parameters(), 1e-2, weight_decay=0.01, **settings)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    losses = [train(model, optimizer, 1) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adafactor"):
        make_optimizer("adam", model.parameters(), 1e-2)
    with pytest.raises(TypeError):
        make_optimizer(name, model.parameters(), 1e-2, rnak=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coap-8bit", "coap-adafactor", "galore", "flora"])
def test_a_trained_run_resumes_bit_for_bit_by_its_config(name, tmp_path):
    x, y = torch.randn(60, 64), torch.randint(0, 5, (60,))
    data = Dataset.from_tensors("noise", x, y, classes=5)
    settings = {"rank": 40, "plain_up_to": 0}
    runs = []
    for cut in (None, 6):
        model = nn.Sequential(nn.Linear(64, 112, bias=False), nn.Tanh(), nn.Linear(112, 5))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        for steps in (12,) if cut is None else (cut, 12):
            config = TrainConfig(steps=steps, batch_size=16, optimizer=name, optimizer_settings=settings, seed=3)
            fit(model, data, config, checkpoint=tmp_path / f"{cut}.pt", resume=steps == 12)
        runs.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    other = TrainConfig(steps=20, batch_size=16, optimizer=name, optimizer_settings={**settings, "rank": 8}, seed=3)
    with pytest.raises(ValueError, match="optimizer_settings="):
        fit(model, data, other, checkpoint=tmp_path / "6.pt", resume=True)


def test_closures_hooks_and_zero_grad_work_as_in_torch():
    model, calls = Small(), []
    optimizer = COAPAdamW(model.parameters(), **SMALL)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, 4, 4)).square().mean()
        loss.backward()
        calls.append("closure")
        return loss

    loss = optimizer.step(closure)
    assert float(loss.detach()) > 0
    assert calls == ["before", "closure", "after"]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.step() is None


@pytest.mark.parametrize("kind", KINDS)
def test_maximize_climbs_by_what_minimising_the_negative_descends(kind):
    one, two = nn.Parameter(torch.randn(144, 64)), None
    two = nn.Parameter(one.detach().clone())
    up, down = KINDS[kind]([one], maximize=True), KINDS[kind]([two])
    for _ in range(7):
        gradient = torch.randn(144, 64)
        step_with(one, gradient, up)
        step_with(two, -gradient, down)
    assert torch.equal(one, two)


def test_D04_the_rate_that_is_applied_is_that_of_the_schedule():
    parameters = [nn.Parameter(torch.zeros(24, 16, dtype=torch.float64)) for _ in range(2)]
    optimizer = COAPAdamW([{"params": [p], "scale": s} for p, s in zip(parameters, (1.0, 0.5), strict=True)],
                          lr=1e-3, **SMALL, eps=0.0)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    gradient = torch.randn(24, 4, dtype=torch.float64) @ torch.randn(4, 16, dtype=torch.float64)
    for step in range(13):
        before = [parameter.detach().clone() for parameter in parameters]
        assert scheduler.get_last_lr() == [min(1.0, step / 10) * 1e-3] * 2
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizer.step()
        for parameter, old, scale in zip(parameters, before, (1.0, 0.5), strict=True):
            basis = optimizer.state[parameter]["basis"]
            moved = ((old - parameter) @ basis).abs()
            # a constant gradient makes every coordinate move by the rate, as long as the basis does not turn
            if step < 5:
                assert (moved - scale * scheduler.get_last_lr()[0]).abs().max() < 1e-12
        scheduler.step()


def test_D03_accumulated_gradients_equal_one_batch_and_layerwise_mode_refuses_them():
    runs = []
    for parts in (1, 4):
        model = Small().double()
        optimizer = COAPAdamW(model.parameters(), lr=1e-3, **SMALL)
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(32, 4, 4, 4, generator=draw, dtype=torch.float64)
            y = torch.randint(0, 5, (32,), generator=draw)
            optimizer.zero_grad()
            for part in range(parts):
                rows = slice(part * 32 // parts, (part + 1) * 32 // parts)
                (nn.functional.cross_entropy(model(x[rows]), y[rows]) / parts).backward()
            optimizer.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {5}
        runs.append(weights(model))
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*runs, strict=True))
    hooks = step_in_backward(optimizer)
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="layer-wise updates take one backward per step, got a second one"):
        model(x).square().mean().backward()
    optimizer.step()
    model(x).square().mean().backward()
    hooks.remove()
    optimizer.step()
    model(x).square().mean().backward()
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_D04_layerwise_updates_equal_normal_ones_with_a_schedule(kind):
    runs = []
    for layerwise in (False, True):
        model = Small()
        optimizer = KINDS[kind](model.parameters())
        if layerwise:
            step_in_backward(optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        for step in range(7):
            train(model, optimizer, 1, start=step)
            assert not layerwise or all(parameter.grad is None for parameter in model.parameters())
            scheduler.step()
        runs.append(weights(model))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*runs, strict=True))


def test_D06_clipping_under_a_loss_scaler_equals_a_run_without_it():
    runs = []
    for scaled in (True, False):
        model = Small()
        optimizer = COAPAdamW(model.parameters(), lr=1e-3, **SMALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=scaled)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 4, 4, 4, generator=torch.Generator().manual_seed(step))
            scaler.scale(10 * model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        runs.append(weights(model))
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*runs, strict=True))


def test_D07_a_step_that_the_scaler_skips_leaves_no_trace():
    """Inf at the fifth of ten steps, when a basis is due: nine steps are made and the basis changes at the next."""
    runs = []
    for bad in (True, False):
        weight = nn.Parameter(torch.full((24, 16), 0.1))
        optimizer = COAPAdamW([weight], **SMALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
        for step in range(10):
            if step == 5 and not bad:
                continue
            optimizer.zero_grad()
            x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
            scaler.scale((weight * (x * float("inf") if step == 5 else x)).sum()).backward()
            basis = optimizer.state[weight]["basis"].clone() if step else None
            scaler.step(optimizer)
            scaler.update()
            if step in (5, 6):
                changed = not torch.equal(basis, optimizer.state[weight]["basis"])
                assert changed == (step == 6)
        assert int(optimizer.state[weight]["step"]) == 9
        runs.append((weight.detach(), *optimizer.state[weight].values()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_tied_parameters_are_stepped_once_and_frozen_ones_never():
    embedding, head = nn.Embedding(32, 24), nn.Linear(24, 32, bias=False)
    head.weight = embedding.weight
    frozen = nn.Parameter(torch.randn(24, 24), requires_grad=False)
    kept = frozen.detach().clone()
    model = nn.Sequential(embedding, head)
    optimizer = COAPAdamW([*model.named_parameters(), ("frozen", frozen)], weight_decay=0.1, **SMALL)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.arange(10)).square().mean().backward()
        optimizer.step()
    assert [row.name for row in optimizer.report().rows] == ["0.weight", "frozen"]
    assert int(optimizer.state[embedding.weight]["step"]) == 6
    assert torch.equal(frozen, kept)
    assert frozen not in optimizer.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be None or a whole number of at least 1, got 0"),
        ({"rank": -2}, "got -2"),
        ({"rank_ratio": 0.5}, "rank_ratio must be None or at least 1, got 0.5"),
        ({"update_interval": 0}, "update_interval must be a whole number of at least 1, got 0"),
        ({"refresh_factor": 1.5}, "refresh_factor must be a whole number of at least 1, got 1.5"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"alignment": "none"}, "alignment must be 'scale-free', 'paper' or None, got 'none'"),
        ({"refresh": "hooi"}, "refresh must be 'warm' or 'svd', got 'hooi'"),
        ({"bits": 4}, "bits must be 32 or 8, got 4"),
        ({"state_dtype": torch.int8}, "state_dtype must be None or a floating dtype, got torch.int8"),
        ({"plain_up_to": -1}, "plain_up_to must be a whole number of at least 0, got -1"),
        ({"foreach": 1}, "foreach must be True, False or None, got 1"),
    ],
)
def test_settings_out_of_range_are_refused_in_words(settings, message):
    weight = nn.Parameter(torch.randn(24, 16))
    with pytest.raises(ValueError, match=message):
        COAPAdamW([weight], **{**SMALL, **settings})
    optimizer = COAPAdamW([weight], **SMALL)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(24, 16))], **settings})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("beta1", [1.0, -0.1])
def test_adafactor_settings_out_of_range_are_refused(beta1):
    with pytest.raises(ValueError, match=r"beta1 must be None or in \[0, 1\)"):
        COAPAdafactor([nn.Parameter(torch.randn(24, 16))], beta1=beta1, **SMALL)


def test_E07_options_are_honoured_or_refused_never_ignored():
    weight = nn.Parameter(torch.randn(24, 16))
    for unknown in ("amsgrad", "fused", "differentiable", "capturable", "optim_bits"):
        for make in (COAPAdamW, COAPAdafactor):
            with pytest.raises(TypeError, match=unknown):
                make([weight], **SMALL, **{unknown: True})
            with pytest.raises(ValueError, match=f"a parameter group may set .*, got '{unknown}'"):
                make([{"params": [weight], unknown: True}], **SMALL)


def test_parameters_that_cannot_be_stepped_are_refused_by_name():
    good = nn.Parameter(torch.randn(24, 16))
    for name, bad, message in (
        ("phase", nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)), "got 'phase' of torch.complex64"),
        ("codes", torch.zeros(4, 4, dtype=torch.int64), "got 'codes' of torch.int64"),
        ("table", torch.randn(4, 4).to_sparse(), "parameters must be dense, got 'table'"),
    ):
        with pytest.raises(ValueError, match=message):
            COAPAdamW([("good", good), (name, bad)], **SMALL)
    embedding = nn.Embedding(16, 8, sparse=True)
    optimizer = COAPAdamW([("good", good), ("words", embedding.weight)], **SMALL)
    good.grad = torch.randn(24, 16)
    embedding(torch.arange(3)).sum().backward()
    kept = good.detach().clone()
    with pytest.raises(ValueError, match="gradients must be dense, got a sparse one for words"):
        optimizer.step()
    assert torch.equal(good, kept)
    assert not optimizer.state


def test_B01_a_request_that_meets_no_parameter_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.raises(ValueError, match="none of 4 parameters is projected: the largest has 64 elements"):
        COAPAdamW(model.parameters(), rank=4)
    with pytest.raises(ValueError, match=r"match must meet the name of a matrix or convolution, got \('attn',\)"):
        projection_groups(model, ("attn",))
    with pytest.raises(ValueError, match="match must be a sequence of name parts"):
        projection_groups(model, "0")
    report = COAPAdamW(model.named_parameters(), rank=2, plain_up_to=0).report()
    plain = sum(2 * parameter.nbytes + 4 for parameter in model.parameters())
    assert report.bytes < plain
    assert {(row.name, row.shape, row.rank, row.side) for row in report.rows if row.rank} == {
        ("0.weight", (8, 8), (2,), "columns")
    }


def test_B02_the_report_says_how_much_is_projected():
    blocks = [nn.ModuleDict({"attn": nn.Linear(16, 16), "norm": nn.LayerNorm(16), "other": nn.Linear(16, 4)})
              for _ in range(32)]  # fmt: skip
    model = nn.ModuleList(blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = projection_groups(model, ("attn", "norm"), rank=4)
        report = COAPAdamW(groups, plain_up_to=0).report()
    projected = sum(block["attn"].weight.numel() for block in blocks)
    share = projected / sum(parameter.numel() for parameter in model.parameters())
    assert report.share == pytest.approx(share)
    assert f"32 of {len(list(model.parameters()))} parameters, {share:.1%} of the elements projected" in str(report)
