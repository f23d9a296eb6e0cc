from __future__ import annotations

import copy
import math

import pytest
import torch
from tolerances import relative_error
from torch import nn

from comera_lab.cores import effective_gate
from comera_lab.layers import TTEmbedding, TTLinear, compact, fold_gates, tt_layers
from comera_lab.objectives import (
    EarlyStage,
    LateStage,
    core_decay,
    linear_ramp,
    meet_target,
    model_size,
    size_surrogate,
)

KINDS = ("straight-through", "threshold")


def gated_model(kind="straight-through", seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        TTEmbedding(60, 24, 6, order=2, generator=generator),
        TTLinear(24, 36, 6, order=2, generator=generator),
        nn.GELU(),
        TTLinear(36, 24, 6, order=2, generator=generator),
        nn.Linear(24, 3),
    ).to(dtype)
    for layer in tt_layers(model).values():
        layer.add_gates(kind)
    return model


def close_entries(model, entries):
    """Set gate entries {(layer, bond): indices} to zero."""
    with torch.no_grad():
        for (name, bond), indices in entries.items():
            tt_layers(model)[name].gates[bond][list(indices)] = 0.0


IDS = torch.arange(0, 60, 7)


class TestGates:
    @pytest.mark.parametrize("kind", KINDS)
    def test_gates_of_ones_change_nothing_and_queries_change_no_parameter(self, kind):
        model = gated_model(kind)
        bare = copy.deepcopy(model)
        for layer in tt_layers(bare).values():
            layer.gates = nn.ParameterList()
        assert torch.equal(model(IDS), bare(IDS))
        before = copy.deepcopy(model.state_dict())
        pointers = [parameter.data_ptr() for parameter in model.parameters()]
        model(IDS).sum().backward()
        model_size(model), size_surrogate(model), [layer.live_ranks for layer in tt_layers(model).values()]
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers

    def test_a_hard_threshold_is_a_one_way_door_and_straight_through_is_not(self):
        gate = torch.tensor([0.5, 0.005, -0.5, 0.0], requires_grad=True)
        hard = effective_gate(gate, "threshold", 0.01)
        assert hard.tolist() == [0.5, 0.0, 0.0, 0.0]
        assert torch.autograd.grad(hard.sum(), gate)[0].tolist() == [1.0, 0.0, 0.0, 0.0]
        soft = effective_gate(gate, "straight-through", 0.01)
        assert soft.tolist() == [0.5, 0.0, -0.5, 0.0]
        assert torch.autograd.grad(soft.sum(), gate)[0].tolist() == [1.0] * 4

    def test_bad_settings_are_refused(self):
        with pytest.raises(ValueError, match="gate must be one of straight-through, threshold, got 'soft'"):
            TTLinear(6, 4).add_gates("soft")
        with pytest.raises(ValueError, match=r"threshold must lie in \(0, 1\), got 1"):
            TTLinear(6, 4).add_gates(threshold=1)


class TestSizes:
    def test_every_mode_of_every_core_and_the_dense_rest_are_counted(self):
        model = gated_model()
        size = model_size(model)
        cores = sum(core.numel() for layer in tt_layers(model).values() for core in layer.cores)
        dense = sum(p.numel() for p in model[4].parameters()) + 36 + 24
        assert (size.cores, size.dense, size.total) == (cores, dense, cores + dense)
        assert size.dense_twin == dense + 60 * 24 + 24 * 36 * 2
        assert size.core_bytes == 4 * cores
        assert size.total_ratio == pytest.approx(size.dense_twin / size.total)

    def test_closed_entries_leave_the_count_and_a_dead_bond_removes_its_layer(self):
        model = gated_model()
        close_entries(model, {("1", 0): [0, 1]})
        layer = model[1]
        r = layer.live_ranks
        assert r[1] == layer.shape.ranks[1] - 2
        expected = sum(r[k] * mode * r[k + 1] for k, mode in enumerate(layer.shape.modes))
        others = sum(core.numel() for k in (0, 3) for core in model[k].cores)
        assert model_size(model).cores == expected + others
        close_entries(model, {("1", 0): range(layer.shape.ranks[1])})
        size = model_size(model)
        assert (size.cores, size.removed) == (others, ("1",))
        assert "1: every rank is 0" in str(size)

    @pytest.mark.parametrize("kind", KINDS)
    def test_surrogate_equals_the_true_share_at_ones_and_has_the_right_gradient(self, kind):
        model = gated_model(kind, dtype=torch.float64)
        dense = sum(layer.shape.dense_params for layer in tt_layers(model).values())
        assert float(size_surrogate(model).detach()) == pytest.approx(model_size(model).cores / dense)
        gates = [gate for layer in tt_layers(model).values() for gate in layer.gates]
        grads = torch.autograd.grad(size_surrogate(model), gates)
        for gate, grad in zip(gates, grads, strict=True):
            with torch.no_grad():
                gate[0] += 1e-6
                high = float(size_surrogate(model))
                gate[0] -= 2e-6
                low = float(size_surrogate(model))
                gate[0] += 1e-6
            assert float(grad[0]) == pytest.approx((high - low) / 2e-6, rel=1e-5)

    def test_models_without_gates_are_refused(self):
        with pytest.raises(ValueError, match="needs tensor-train layers with gates"):
            size_surrogate(nn.Linear(3, 3))
        with pytest.raises(ValueError, match="needs tensor-train layers with gates"):
            EarlyStage()(torch.tensor(1.0), nn.Sequential(TTLinear(6, 4)))


def assert_pure(objective, model):
    """Calling an objective reads the model and nothing else; its gradient agrees with differences."""
    before = copy.deepcopy(model.state_dict())
    loss = model(IDS).square().mean()
    objective(loss, model).backward()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(p.grad is not None for p in model.parameters())


class TestStages:
    def test_early_stage_adds_the_price_of_size_and_of_large_cores(self):
        model = gated_model(dtype=torch.float64)
        loss = torch.tensor(2.0, dtype=torch.float64)
        value = EarlyStage(0.5, 0.01)(loss, model)
        want = 2 + 0.5 * float(size_surrogate(model).detach()) + 0.01 * float(core_decay(model).detach())
        assert float(value.detach()) == pytest.approx(want)

    def test_schedules_are_followed_call_by_call(self):
        model = gated_model()
        stage = EarlyStage(linear_ramp(0.0, 1.0, 4))
        surrogate = float(size_surrogate(model).detach())
        prices = [float(stage(torch.tensor(0.0), model).detach()) / surrogate for _ in range(6)]
        assert prices == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])

    @pytest.mark.parametrize("objective", [EarlyStage(0.3, 1e-3), LateStage(target_ratio=0.5)])
    def test_objectives_read_the_model_only(self, objective):
        assert_pure(objective, gated_model())

    @pytest.mark.parametrize("objective", [EarlyStage(0.3, 1e-3), LateStage(target_ratio=0.5, target_loss=0.1)])
    def test_objectives_work_on_wrapped_and_compiled_models(self, objective):
        model = gated_model()
        twin = copy.deepcopy(model)
        plain = objective(model[1](torch.ones(2, 24)).square().mean(), model)
        again = copy.deepcopy(objective)
        object.__setattr__(again, "calls", 0) if isinstance(again, EarlyStage) else None
        wrapped = nn.ModuleDict({"module": twin})
        compiled = torch.compile(twin[1], backend="eager")
        assert float(again(compiled(torch.ones(2, 24)).square().mean(), wrapped).detach()) == pytest.approx(
            float(plain.detach())
        )

    def test_late_stage_works_on_the_larger_relative_gap(self):
        model = gated_model()
        far = LateStage(target_ratio=0.3, part="tensorised", target_loss=1.0, rho=0.0)
        pushed = far(torch.tensor(1.01), model)
        assert pushed.requires_grad
        lossy = LateStage(target_ratio=0.9, part="tensorised", target_loss=0.1, rho=0.0)
        loss = torch.tensor(1.0, requires_grad=True)
        focus = lossy(loss, model)
        assert float(focus.detach()) == 1.0
        met = LateStage(target_ratio=1.0, part="tensorised", target_loss=None, rho=0.0)
        assert float(met(torch.tensor(0.7), model).detach()) == pytest.approx(0.7)

    def test_targets_mean_what_they_say(self):
        model = gated_model()
        size = model_size(model)
        half = LateStage(target_ratio=0.5)
        assert half.start(model) + size.dense == int(0.5 * size.total)
        assert LateStage(target_ratio=0.5, part="tensorised").start(model) == size.cores // 2
        assert LateStage(target_params=size.dense + 400).start(model) == 400
        assert LateStage(target_bytes=size.dense_bytes + 4 * 300).start(model) == 300

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give exactly one of target_ratio, target_params, target_bytes, got none"),
            ({"target_ratio": 0.5, "target_params": 9}, "give exactly one of .*got"),
            ({"target_ratio": 0.0}, r"target_ratio must lie in \(0, 1\], got 0.0"),
            ({"target_ratio": 1.5}, r"target_ratio must lie in \(0, 1\], got 1.5"),
            ({"target_ratio": 0.5, "part": "cores"}, "part must be 'model' or 'tensorised', got 'cores'"),
            ({"target_ratio": 0.5, "rho": -1.0}, "rho must be a finite number of at least 0, got -1.0"),
        ],
    )
    def test_bad_targets_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            LateStage(**arguments)

    def test_G03_impossible_targets_name_the_floor_and_change_nothing(self):
        model = gated_model()
        size = model_size(model)
        with pytest.raises(ValueError, match=f"the dense part, which cannot be cut, is {size.dense:,} parameters"):
            LateStage(target_params=size.dense)(torch.tensor(1.0), model)
        with pytest.raises(ValueError, match="the target must lie below the dense size"):
            LateStage(target_params=10**9).start(model)
        with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
            linear_ramp(0, 1, 0)
        with pytest.raises(ValueError, match="gamma must be a finite number of at least 0, got -1"):
            EarlyStage(-1)

    @pytest.mark.parametrize("stage", [EarlyStage(), LateStage(target_ratio=0.5)])
    def test_a_loss_that_is_not_a_number_is_refused(self, stage):
        with pytest.raises(ValueError, match="task loss must be finite, got nan"):
            stage(torch.tensor(math.nan), gated_model())


class TestBudget:
    @pytest.mark.parametrize("ratio", [0.9, 0.5, 0.25])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_G04_the_target_is_met_within_two_per_cent_and_never_exceeded(self, ratio, seed):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(TTLinear(256, 256, 16, generator=generator), TTLinear(256, 128, 16, generator=generator))
        for layer in tt_layers(model).values():
            layer.add_gates()
            with torch.no_grad():
                for gate in layer.gates:
                    gate.uniform_(0.1, 1.0, generator=generator)
        limit = int(ratio * model_size(model).cores)
        report = meet_target(model, limit)
        assert model_size(model).cores == report.after
        assert 0.98 * limit <= report.after <= limit
        assert not report.removed

    def test_entries_that_carry_least_go_first(self):
        model = nn.Sequential(TTLinear(64, 64, 4, order=2))
        model[0].add_gates()
        with torch.no_grad():
            model[0].gates[1].copy_(torch.tensor([1.0, 1e-1, 1.0, 2e-2]))
        freed = 8 * 4 * 2
        meet_target(model, model_size(model).cores - freed)
        assert (model[0].gates[1] != 0).tolist() == [True, True, True, False]

    def test_losses_of_batches_decide_when_given(self):
        torch.manual_seed(0)
        model = nn.Sequential(TTLinear(64, 64, 4, order=2, bias=False))
        model[0].add_gates()
        with torch.no_grad():
            model[0].cores[2][2] = 0.0
            model[0].cores[1][:, :, 2] *= 100

        def losses():
            yield model(torch.randn(32, 64)).square().mean()

        meet_target(model, model_size(model).cores - 8 * 4 * 2, loss_of=losses)
        assert not model[0].gates[1][2]

    def test_bounds_keep_floors_cut_to_ceilings_and_let_layers_go(self):
        model = gated_model()
        meet_target(model, model_size(model).cores, bounds={"1": (1, 3)})
        assert max(model[1].live_ranks) <= 3
        floor = meet_target(model, 300, bounds={"0": (2, 99), "*": (0, 99)})
        assert min(model[0].live_ranks[1:-1]) >= 2
        assert floor.after <= 300
        gone = meet_target(model, model[0].live_params, bounds={"0": (2, 99), "*": (0, 99)})
        assert set(gone.removed) == {"1", "3"}
        assert torch.isfinite(model(IDS)).all()

    def test_impossible_budgets_change_nothing(self):
        model = gated_model()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="the floors of the ranks alone need"):
            meet_target(model, 5)
        with pytest.raises(ValueError, match=r"bounds of '\*' must be 0 <= floor <= ceiling, got \(5, 2\)"):
            meet_target(model, 500, bounds={"*": (5, 2)})
        with pytest.raises(ValueError, match="scores of gate entries must be finite"):
            meet_target(model, 500, loss_of=lambda: [model(IDS).sum() * math.nan])
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())

    def test_all_gates_dead_is_named(self):
        model = gated_model()
        with torch.no_grad():
            for layer in tt_layers(model).values():
                for gate in layer.gates:
                    gate.zero_()
        with pytest.raises(ValueError, match="every gate entry is dead"):
            meet_target(model, 500)

    def test_ties_are_broken_the_same_way_every_time(self):
        results = []
        for _ in range(2):
            model = gated_model()
            meet_target(model, 500)
            results.append([layer.live_ranks for layer in tt_layers(model).values()])
        assert results[0] == results[1]


class TestCompact:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
    def test_outputs_state_and_training_go_on_with_smaller_tensors(self, kind, make):
        model = gated_model(kind, dtype=torch.float64)
        optimizer = make(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(IDS).square().mean().backward()
            optimizer.step()
        entries = {("0", 0): [1, 4], ("1", 1): [0, 2, 3], ("3", 2): [5]}
        close_entries(model, entries)
        kept = copy.deepcopy((model, optimizer.state_dict()))
        want = model(IDS)
        bytes_before = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
        report = compact(model, optimizer)
        assert relative_error(model(IDS), want) < 1e-12
        assert report.after == model_size(model).cores < report.before
        assert sum(core.numel() for layer in tt_layers(model).values() for core in layer.cores) == report.after
        if optimizer.state:
            now = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
            assert now < bytes_before
        # A twin that keeps the closed entries, pinned to zero, takes the same steps.
        twin, state = kept
        other = make(twin.parameters(), lr=1e-3)
        other.load_state_dict(state)
        for _ in range(2):
            for one, opt in ((model, optimizer), (twin, other)):
                opt.zero_grad()
                one(IDS).square().mean().backward()
                opt.step()
            close_entries(twin, entries)
        assert relative_error(model(IDS), twin(IDS)) < 1e-9

    def test_G02_a_dead_layer_becomes_its_bias_and_survives_save_and_load(self, tmp_path):
        layer = TTLinear(24, 36, 4)
        layer.add_gates()
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            layer.gates[2].zero_()
        assert layer.live_params == 0
        report = compact(layer, optimizer)
        assert report.removed == ("",)
        x = torch.randn(3, 24)
        assert torch.equal(layer(x), layer.bias.expand(3, 36))
        assert not layer.to_dense().any()
        layer(x).sum().backward()
        optimizer.step()
        layer.save(tmp_path / "layer")
        assert torch.equal(TTLinear.load(tmp_path / "layer")(x), layer(x))

    def test_C07_a_checkpoint_with_reduced_ranks_loads_or_names_both(self, tmp_path):
        layer = TTLinear(24, 36, 4)
        layer.add_gates()
        with torch.no_grad():
            layer.gates[1][2] = 0
        compact(layer)
        x = torch.randn(3, 24)
        layer.save(tmp_path / "layer")
        again = TTLinear.load(tmp_path / "layer")
        assert again.shape.ranks == layer.shape.ranks
        assert relative_error(again(x), layer(x)) < 1e-6
        fresh = TTLinear(24, 36, 4)
        fresh.add_gates()
        for strict in (True, False):
            with pytest.raises(RuntimeError, match="size mismatch"):
                fresh.load_state_dict(layer.state_dict(), strict=strict)

    def test_wrong_optimizers_are_refused_and_nothing_changes(self):
        model = gated_model()
        close_entries(model, {("1", 0): [0]})
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="the optimizer must hold the cores and gates"):
            compact(model, torch.optim.AdamW(nn.Linear(2, 2).parameters()))
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.state[model[1].cores[0]]["basis"] = torch.zeros(5, 2)
        with pytest.raises(ValueError, match=r"state 'basis' of '1' must have the shape .* got \(5, 2\)"):
            compact(model, optimizer)
        with pytest.raises(ValueError, match="compact needs tensor-train layers with gates"):
            compact(nn.Linear(2, 2))
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())

    def test_folding_gates_keeps_the_function(self):
        model = gated_model(dtype=torch.float64)
        with torch.no_grad():
            model[1].gates[0].uniform_(0.2, 1)
        want = model(IDS)
        for layer in tt_layers(model).values():
            fold_gates(layer)
        assert relative_error(model(IDS), want) < 1e-12
        assert not [name for name, _ in model.named_parameters() if "gates" in name]


@pytest.mark.parametrize("start", ["identity", "zero", "equal columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_F11_size_losses_have_finite_gradients_and_descend(start, kind):
    weight = {"identity": torch.eye(4), "zero": torch.zeros(4, 4), "equal columns": torch.ones(4, 4)}[start]
    linear = nn.Linear(4, 4, bias=False)
    linear.weight.data.copy_(weight)
    layer = TTLinear.from_linear(linear, 4, order=2)
    layer.add_gates(kind)
    losses = []
    for _ in range(2):
        loss = EarlyStage(1.0, 0.1)(layer(torch.eye(4)).square().mean(), layer)
        losses.append(float(loss.detach()))
        grads = torch.autograd.grad(loss, list(layer.parameters()))
        assert all(torch.isfinite(grad).all() for grad in grads)
        with torch.no_grad():
            for parameter, grad in zip(layer.parameters(), grads, strict=True):
                parameter -= 1e-3 * grad
    assert losses[1] < losses[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_G01_ranks_fall_to_what_the_task_needs(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    teacher = TTLinear(64, 64, [1, 2, 2, 2, 1], order=2, bias=False, generator=generator)
    x = torch.randn(1024, 64, generator=generator)
    with torch.no_grad():
        teacher.cores[0].div_(teacher(x).std())
    errors = {}
    for gamma, beta in ((0.0, 0.0), (10.0, 1e-2)):
        student = TTLinear(64, 64, 8, order=2, bias=False, generator=torch.Generator().manual_seed(seed + 10))
        student.add_gates(kind, threshold=0.1)
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
        history = []
        for step in range(500):
            rows = torch.randint(0, 1024, (128,), generator=generator)
            loss = nn.functional.mse_loss(student(x[rows]), teacher(x[rows]).detach())
            optimizer.zero_grad()
            (EarlyStage(gamma, beta)(loss, student) if step < 400 else loss).backward()
            optimizer.step()
            if step % 100 == 0:
                history.append(student.live_ranks)
        held_out = torch.randn(512, 64, generator=torch.Generator().manual_seed(99))
        errors[gamma] = float(nn.functional.mse_loss(student(held_out), teacher(held_out)).detach())
    assert max(student.live_ranks) <= 3
    assert history[0] == (1, 8, 8, 8, 1)
    assert errors[10.0] <= 1.1 * errors[0.0]
