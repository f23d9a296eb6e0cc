from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import tt_shapes
from tensorly.decomposition import tensor_train, tensor_train_matrix
from test_cores import tails
from tolerances import AUTOCAST, RELATIVE, relative_error
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import comera_lab
from comera_lab.cores import cores_to_matrix, init_cores
from comera_lab.layers import TTLinear, tensorize, tt_layers
from comera_lab.shapes import ShapeError, TTShape

SINGLE = RELATIVE[torch.float32]


@given(tt_shapes(), st.sampled_from([(), (1,), (0,), (5,), (2, 1), (2, 3, 4)]))
def test_F01_batch_of_one_none_or_many_axes(shape, lead):
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(shape.out_features, generator=generator, dtype=torch.float64)
    layer = TTLinear.from_cores(init_cores(shape, 1.0, generator, dtype=torch.float64), shape, bias)
    x = torch.randn(*lead, shape.in_features, generator=generator, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    assert out.shape == (*lead, shape.out_features)
    want = nn.functional.linear(x, layer.to_dense(), layer.bias)
    assert relative_error(out, want) < RELATIVE[torch.float64]
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(parameter.grad is not None for parameter in layer.parameters())
    if 0 in lead:
        assert all(not parameter.grad.any() for parameter in layer.parameters())


def test_F01_sizes_of_one():
    for in_features, out_features in [(1, 1), (1, 7), (7, 1)]:
        layer = TTLinear(in_features, out_features, 3)
        x = torch.randn(4, in_features)
        assert relative_error(layer(x), nn.functional.linear(x, layer.to_dense(), layer.bias)) < SINGLE


def test_F02_wrong_last_dimension():
    layer = TTLinear(512, 8, 4)
    assert layer(torch.zeros(8, 8, 8, 512)).shape == (8, 8, 8, 8)
    for size in [(8, 512, 1, 1), (8, 256)]:
        with pytest.raises(ValueError, match=rf"512, got a tensor of shape .*{size[-1]}\)"):
            layer(torch.zeros(size))


@pytest.mark.parametrize("rank", [10**6, 8])
def test_F04_import_from_dense(rank):
    torch.manual_seed(0)
    linear = nn.Linear(96, 60)
    before = copy.deepcopy(linear.state_dict())
    layer = TTLinear.from_linear(linear, rank)
    shape = layer.shape
    full = linear.weight.detach().t().reshape(shape.modes)
    bound = tails(full, shape.ranks) + 1e-5 * float(linear.weight.detach().norm())
    assert float(torch.linalg.norm(layer.to_dense() - linear.weight).detach()) <= bound
    assert torch.equal(layer.bias, linear.bias)
    assert layer.bias is not linear.bias
    assert all(torch.equal(linear.state_dict()[key], value) for key, value in before.items())
    assert TTLinear.from_linear(nn.Linear(6, 4, bias=False), 2).bias is None


@pytest.mark.parametrize("error", [0.5, 0.1, 1e-3])
def test_from_linear_by_error_keeps_the_promise_and_by_params_the_budget(error):
    torch.manual_seed(0)
    linear = nn.Linear(96, 60)
    layer = TTLinear.from_linear(linear, error=error)
    assert relative_error(layer.to_dense(), linear.weight) <= error + SINGLE
    assert 0.8 * 2_000 < TTLinear.from_linear(linear, params=2_000).shape.params <= 2_000
    with pytest.raises(ValueError, match="exactly one of rank, error and params, got rank=3, error=0.1"):
        TTLinear.from_linear(linear, 3, error=0.1)


def test_F09_rank_above_the_feasible_bound():
    for shape in [TTShape.for_features(64, 64, 16, order=3), TTShape.for_features(8, 8, 16, 3, (2, 2, 2), (2, 2, 2))]:
        assert all(rank <= limit for rank, limit in zip(shape.ranks, shape.max_ranks, strict=True))
    layer = TTLinear(8, 8, 16, in_modes=(2, 2, 2), out_modes=(2, 2, 2))
    assert layer.shape.ranks == (1, 2, 4, 8, 4, 2, 1)
    x = torch.randn(5, 8, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert relative_error(out, nn.functional.linear(x, layer.to_dense(), layer.bias)) < SINGLE
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_F12_every_entry_point_works_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    layer = TTLinear(30, 20, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3, 30)).square().sum().backward()
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in layer.parameters())


def test_F03_layer_applies_the_matrix_it_shows():
    weight = torch.arange(60, dtype=torch.float64).reshape(10, 6)
    linear = nn.Linear(6, 10, bias=False, dtype=torch.float64)
    linear.weight.data.copy_(weight)
    layer = TTLinear.from_linear(linear, 10**6, in_modes=(2, 3), out_modes=(5, 2))
    assert torch.equal(layer.to_dense().round(), weight)
    assert relative_error(layer(torch.eye(6, dtype=torch.float64)), weight.t()) < RELATIVE[torch.float64]


def test_S06_configuration_forms():
    made = [
        TTLinear(24, 36, rank, order=2, generator=torch.Generator().manual_seed(0)) for rank in (4, [1, 4, 4, 4, 1])
    ]
    assert made[0].shape == made[1].shape
    assert all(torch.equal(a, b) for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True))
    bare = TTLinear(24, 36, bias=False)
    assert bare.bias is None
    assert all("bias" not in name for name in [*bare.state_dict(), *dict(bare.named_parameters())])


def test_S05_device_in_constructors():
    assert {parameter.device.type for parameter in TTLinear(24, 36, device="meta").parameters()} == {"meta"}
    layer = TTLinear(24, 36, device="cpu").to(torch.float64)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}
    assert layer(torch.zeros(1, 24, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="device must be one that torch knows, got 'gpu'. Use 'cpu'"):
        TTLinear(24, 36, device="gpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0, "out_features": 3}, "in_features must be an integer of at least 1, got 0"),
        ({"in_features": 3, "out_features": -1}, "out_features must be an integer of at least 1, got -1"),
        ({"in_features": 6, "out_features": 4, "rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"in_features": 6, "out_features": 4, "in_modes": (2, 2)}, "multiply out to 4, but in_features is 6"),
        ({"in_features": 6, "out_features": 4, "rank": [1, 2, 1]}, "6 modes need 7 ranks, got 3"),
    ],
)
def test_bad_construction_names_rule_and_value(arguments, message):
    with pytest.raises(ShapeError, match=message):
        TTLinear(**arguments)


def test_C06_deep_copy_and_pickle_of_a_used_layer():
    layer = TTLinear(30, 20, 4)
    x = torch.randn(3, 30)
    pending = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), pending)
    with torch.no_grad():
        twin.cores[0].zero_()
    assert torch.equal(layer(x), pending)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    fresh = TTLinear(30, 20, 4)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(x), pending)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), pending)
    assert not [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 600])
def test_I03_autocast_behaves_like_a_linear(dtype, rows):
    torch.manual_seed(0)
    layer = TTLinear(120, 90, 8)
    linear = layer.to_linear()
    x = torch.randn(rows, 120)
    for inside in (True, False):
        for batch in (x, x.to(dtype)):
            layer.zero_grad()
            with torch.autocast("cpu", dtype):
                out, want = layer(batch), linear(batch)
                if inside:
                    out.float().square().sum().backward()
            if not inside:
                out.float().square().sum().backward()
            assert out.dtype == want.dtype == dtype
            assert relative_error(out, want) <= AUTOCAST
            assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    layer.cores.requires_grad_(False)
    with torch.autocast("cpu", dtype):
        layer(x).float().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_I04_torch_compile_of_the_layer_without_graph_breaks(training):
    torch._dynamo.reset()
    layer = TTLinear(30, 20, 4).train(training)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (4, 5, 1, 0, 600):
        x = torch.randn(rows, 30, requires_grad=True)
        results = []
        for function in (layer, compiled):
            layer.zero_grad()
            x.grad = None
            out = function(x)
            out.square().sum().backward()
            results.append([out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
        for ours, theirs in zip(*results, strict=True):
            assert relative_error(ours, theirs) < 1e-5
    assert counter.frame_count <= 4


def test_double_backward_through_the_layer():
    layer = TTLinear(12, 10, 3, dtype=torch.float64)
    x = torch.randn(300, 12, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    ours = [parameter.grad.clone() for parameter in layer.cores]
    layer.zero_grad()
    x.grad = None
    out = nn.functional.linear(x, layer.to_dense(), layer.bias)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    for mine, core in zip(ours, layer.cores, strict=True):
        assert relative_error(mine, core.grad) < RELATIVE[torch.float64]


@given(tt_shapes(), st.booleans())
def test_save_and_load_give_the_same_layer(tmp_path_factory, shape, bias):
    path = tmp_path_factory.mktemp("layer") / "layer.safetensors"
    offset = torch.randn(shape.out_features) if bias else None
    layer = TTLinear.from_cores(init_cores(shape, 1.0), shape, offset)
    layer.save(path)
    again = TTLinear.load(path)
    assert again.shape == layer.shape
    assert again.state_dict().keys() == layer.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), layer.parameters(), strict=True))


def test_load_refuses_other_files(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="no file at .*nothing"):
        TTLinear.load(tmp_path / "nothing")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="must be a comera_lab.TTLinear.1 file, got format None"):
        TTLinear.load(tmp_path / "other")


def test_from_cores_checks_sizes():
    shape = TTShape.for_features(6, 4, 2)
    with pytest.raises(ShapeError, match="cores must have the sizes"):
        TTLinear.from_cores(init_cores(shape.with_ranks(1), 1.0), shape)


def test_tensorly_tensors_come_in_and_go_out():
    import tensorly

    layer = TTLinear(24, 36, 4, order=2)
    back = TTLinear.from_tensorly(layer.to_tensorly(), split=2)
    assert torch.equal(back.to_dense(), layer.to_dense())
    uneven = TTLinear.from_tensorly(tensor_train(torch.randn(3, 4, 5).numpy(), [1, 2, 3, 1]), split=1)
    assert (uneven.in_features, uneven.out_features) == (3, 20)
    matrix = tensor_train_matrix(torch.randn(4, 6, 3, 2, dtype=torch.float64).numpy(), rank=[1, 3, 1])
    linear = TTLinear.from_tensorly(matrix)
    want = torch.tensor(tensorly.tt_matrix.tt_matrix_to_matrix(matrix))
    assert (linear.in_features, linear.out_features) == (6, 24)
    assert relative_error(linear.to_dense(), want) < RELATIVE[torch.float64]


class TestTensorize:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(96, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 2))

    def test_full_accuracy_by_error_changes_outputs_by_no_more(self):
        model = self.model()
        low = TTLinear(96, 60, 2, generator=torch.Generator().manual_seed(0)).to_linear()
        model[0] = low
        x = torch.randn(5, 96)
        want = model(x)
        assert tensorize(model, error=1e-5, include=["0"]) is model
        assert list(tt_layers(model)) == ["0"]
        assert model[0].shape.params < model[0].shape.dense_params
        assert relative_error(model(x), want) < 1e-4

    def test_names_select_and_small_layers_stay_dense(self):
        model = tensorize(self.model(), rank=4, exclude=["0"], init="random")
        assert list(tt_layers(model)) == ["2"]
        assert type(model[4]) is nn.Linear

    def test_a_shared_module_is_replaced_once_in_both_places(self):
        shared = nn.Linear(60, 60)
        model = tensorize(nn.ModuleDict({"a": shared, "b": shared}), rank=4)
        assert model["a"] is model["b"]
        assert isinstance(model["a"], TTLinear)

    def test_a_bare_linear_is_returned_as_a_layer(self):
        assert isinstance(tensorize(nn.Linear(60, 60), rank=4), TTLinear)

    def test_nothing_silent(self):
        with pytest.raises(ValueError, match="no nn.Linear matches include=.*The model has: 0, 2, 4"):
            tensorize(self.model(), include=["encoder.*"])
        with pytest.raises(ValueError, match="no layer would get smaller at rank=1000"):
            tensorize(self.model(), rank=1000)
        with pytest.raises(ValueError, match="init must be 'svd' or 'random', got 'zeros'"):
            tensorize(self.model(), init="zeros")
        with pytest.raises(ValueError, match="init='random' needs a rank"):
            tensorize(self.model(), init="random", error=0.1)
        tied = nn.ModuleDict({"table": nn.Embedding(60, 60), "head": nn.Linear(60, 60, bias=False)})
        tied["head"].weight = tied["table"].weight
        with pytest.raises(ValueError, match=r"'head' is tied to \['table', 'head'\].*exclude=\['head'\]"):
            tensorize(tied, rank=4)
        assert type(tied["head"]) is nn.Linear

    def test_training_mode_and_dtype_follow(self):
        model = tensorize(self.model().double().eval(), rank=4)
        assert not model[0].training
        assert model[0].cores[0].dtype == torch.float64


def test_layer_learns():
    torch.manual_seed(0)
    teacher = TTLinear(24, 30, 2, generator=torch.Generator().manual_seed(5))
    student = TTLinear(24, 30, 4, generator=torch.Generator().manual_seed(6))
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    x = torch.randn(256, 24)
    want = teacher(x).detach()
    first = float(nn.functional.mse_loss(student(x), want).detach())
    for _ in range(300):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(student(x), want)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.02 * first


def test_repr_says_modes_ranks_and_saving():
    assert repr(TTLinear(768, 768, 30)) == (
        "TTLinear(768 -> 768, modes (12, 8, 8) | (8, 8, 12), ranks (1, 12, 30, 30, 30, 12, 1), bias=True, "
        "20,448 core parameters, 28.8x fewer than dense)"
    )


def test_start_values_keep_the_glorot_spread():
    layer = TTLinear(768, 3072, 30, generator=torch.Generator().manual_seed(0))
    assert float(layer.to_dense().detach().std()) == pytest.approx(math.sqrt(2 / (768 + 3072)), rel=0.2)


def test_public_names_are_sorted_and_complete():
    assert comera_lab.__all__ == sorted(comera_lab.__all__)
    for name in comera_lab.__all__:
        assert getattr(comera_lab, name).__doc__, name


def test_to_linear_is_detached_and_equal():
    layer = TTLinear(30, 20, 4)
    linear = layer.to_linear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.randn(4, 30)
        assert relative_error(linear(x), layer(x)) < SINGLE
    assert torch.equal(linear.weight, cores_to_matrix(list(layer.cores), layer.shape))
    linear.weight.data.zero_()
    assert layer.to_dense().any()
