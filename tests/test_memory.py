"""Predicted bytes against real ones: to the byte for weights, grads and optimizer state, 5 % for activations."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from comera_lab.experiments.datasets import digits
from comera_lab.experiments.train import TrainConfig, Trainer
from comera_lab.layers import TTLinear, tensorize
from comera_lab.memory import (
    GAP_LIMIT,
    OPTIMIZERS,
    POOLS,
    PRECISIONS,
    Measured,
    MemoryReport,
    Pools,
    format_bytes,
    measure,
    mib,
    predict,
    process_rss_bytes,
    tensor_bytes,
)
from comera_lab.models.mlp import MLP
from comera_lab.optimizers import make_optimizer

MIB = 2**20
REAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw-8bit": lambda parameters: make_optimizer("adamw-8bit", parameters, 1e-3),
}


def class_loss(output: Tensor) -> Tensor:
    """Cross-entropy against class 0: the loss of a classifier, on any device."""
    return functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device=output.device))


def mlp(*features: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers: list[nn.Module] = []
    for here, there in itertools.pairwise(features):
        layers += [nn.Linear(here, there, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, groups=4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16 * 12 * 12, 10),
    )  # fmt: skip


def both(
    model: nn.Module,
    inputs: Tensor,
    optimizer: str = "adamw",
    loss: Callable[[Any], Tensor] = class_loss,
    steps: int = 1,
) -> tuple[Pools, Measured]:
    """The prediction before, and the measurement of one of `steps` real steps."""
    running = REAL[optimizer](model.parameters())

    def step() -> None:
        running.zero_grad()
        loss(model(inputs)).backward()
        running.step()

    predicted = predict(model, inputs, optimizer, loss=loss)
    for _ in range(steps - 1):
        step()
    return predicted, measure(step, model, running)


def assert_agree(predicted: Pools, measured: Pools) -> None:
    for pool in ("weights", "grads", "optimizer"):
        assert getattr(measured, pool) == getattr(predicted, pool), pool
    assert measured.activations == pytest.approx(predicted.activations, rel=GAP_LIMIT)


# predicted equals measured


@pytest.mark.parametrize("optimizer", list(REAL))
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: mlp(64, 96, 10), (32, 64)),
        (convnet, (4, 1, 28, 28)),
        (lambda: nn.Sequential(TTLinear(64, 96, 6), nn.GELU(), TTLinear(96, 10, 4, order=2)), (32, 64)),
        (lambda: TTLinear(64, 96, 6), (2048, 64)),
        (lambda: tensorize(mlp(60, 210, 10), 5), (3, 7, 60)),
    ],
    ids=["mlp", "conv", "tt", "tt in row blocks", "tensorized, leading batch"],
)
def test_predicted_equals_measured(
    build: Callable[[], nn.Module], inputs: tuple[int, ...], optimizer: str, steps: int
) -> None:
    loss = class_loss if len(inputs) != 3 else torch.sum
    predicted, measured = both(build(), torch.randn(inputs), optimizer, loss, steps)
    assert_agree(predicted, measured.pools)
    assert measured.device == "cpu"


@given(
    features=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    batch=st.integers(1, 33),
    optimizer=st.sampled_from(list(REAL)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_predicted_equals_measured_for_any_mlp(
    features: list[int], batch: int, optimizer: str, dtype: torch.dtype
) -> None:
    predicted, measured = both(mlp(*features, dtype=dtype), torch.randn(batch, features[0], dtype=dtype), optimizer)
    assert_agree(predicted, measured.pools)


@pytest.mark.parametrize("optimizer", list(REAL))
@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_predicted_equals_a_real_step_of_the_trainer(kind: Literal["dense", "tt"], optimizer: str) -> None:
    model = MLP((64, 48, 48, 10), kind, rank=4)
    trainer = Trainer(model, digits(8), TrainConfig(steps=5, batch_size=32, optimizer=optimizer))
    trainer.step()
    measured = measure(trainer.step, model, trainer.optimizer)
    assert_agree(predict(model, (32, 64), optimizer, loss=class_loss), measured.pools)


def test_closed_form_of_an_mlp_by_hand() -> None:
    """784-512-10 with AdamW and batch 64: every number from pencil and paper."""
    params = 784 * 512 + 512 + 512 * 10 + 10
    saved = 64 * 784 + 2 * 64 * 512  # the batch, the input of GELU, the input of the last layer
    predicted = predict(mlp(784, 512, 10), (64, 784))
    assert predicted == Pools(4 * params, 4 * params, 8 * params + 4 * 4, 4 * saved)
    assert predicted.total == sum(predicted.as_dict().values())
    assert tuple(predicted.as_dict()) == POOLS


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"), [("sgd", 0), ("momentum", 2), ("adamw", 4), ("adamw-8bit", None)]
)
def test_bf16_halves_every_pool_and_a_master_copy_pays_it_back(optimizer: str, bytes_per_parameter: int | None) -> None:
    model = nn.Linear(512, 256, bias=False)
    params, counter = 512 * 256, 4 if "adamw" in optimizer else 0
    bf16, with_master = PRECISIONS["bf16"], PRECISIONS["bf16 + fp32 master"]
    plain = predict(model, (8, 512), optimizer, dtype=bf16.dtype, master=bf16.master)
    master = predict(model, (8, 512), optimizer, dtype=with_master.dtype, master=with_master.master)
    assert (plain.weights, plain.grads, plain.activations) == (2 * params, 2 * params, 2 * 8 * 512)
    assert (master.weights, master.grads, master.activations) == (2 * params, 2 * params, 2 * 8 * 512)
    if bytes_per_parameter is None:  # one byte a moment and element, one fp32 scale a moment and 256 elements
        assert plain.optimizer == 2 * params + 2 * 4 * params // 256 + counter
        assert master.optimizer == plain.optimizer + 4 * params
    else:
        assert plain.optimizer == bytes_per_parameter * params + counter
        assert master.optimizer == (4 + 2 * bytes_per_parameter) * params + counter


def test_predicted_master_copy_equals_a_real_one() -> None:
    model = mlp(16, 8, 4, dtype=torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    inputs = torch.randn(5, 16, dtype=torch.bfloat16)

    def step() -> None:
        class_loss(model(inputs)).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()

    predicted = predict(model, (5, 16), "adamw", master=True, loss=class_loss)
    assert_agree(predicted, measure(step, model, optimizer).pools)


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 70_001])
def test_8bit_state_is_fp32_under_4096_elements(numel: int) -> None:
    blocks = math.ceil(numel / 256)
    want = 8 * numel + 4 if numel < 4096 else 2 * numel + 8 * blocks + 4
    assert OPTIMIZERS["adamw-8bit"](numel, 4) == want


def test_step_counter_follows_the_default_dtype_as_in_torch() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        predicted, measured = both(nn.Linear(3, 2), torch.randn(4, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_agree(predicted, measured.pools)
    assert predicted.optimizer == 2 * 8 * (3 * 2 + 2) + 2 * 8


# what counts, and what does not


class Tied(nn.Module):
    """One TT layer used twice, and a head tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 1024)
        self.layer = TTLinear(1024, 1024, 16, in_modes=(4, 8, 32), out_modes=(32, 8, 4))
        self.again = self.layer
        self.head = nn.Linear(1024, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.layer(self.embedding(ids))))  # type: ignore[no-any-return]


def test_M03_tied_parameters_count_once() -> None:
    model = Tied()
    params = sum(parameter.numel() for parameter in set(model.parameters()))
    assert params == 50 * 1024 + 1024 + sum(core.numel() for core in model.layer.cores)
    predicted, measured = both(model, torch.arange(20))
    assert predicted.weights == predicted.grads == 4 * params
    assert_agree(predicted, measured.pools)


def test_frozen_and_unused_parameters_have_no_grads_and_no_state() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))  # type: ignore[no-any-return]

    predicted, measured = both(Half(), torch.randn(4, 8))
    assert predicted.grads == 4 * (8 * 8 + 8)
    assert predicted.weights == 3 * predicted.grads
    assert_agree(predicted, measured.pools)


def test_buffers_are_weights_and_saved_buffers_are_no_activations() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))
            self.register_buffer("scale", torch.ones(1000), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight * self.scale  # type: ignore[operator, no-any-return]

    predicted, measured = both(Scaled(), torch.randn(2, 1000), loss=torch.sum)
    assert (predicted.weights, predicted.activations) == (8000, 0)
    assert_agree(predicted, measured.pools)


def test_one_storage_saved_by_many_counts_once() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 100))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            return (y * y.view(-1).view_as(y)).exp() + y.t().t() ** 3

    predicted, measured = both(Squares(), torch.randn(4, 100), loss=torch.sum)
    assert predicted.activations == 3 * 4 * 400  # x, y, exp(y * y)
    assert_agree(predicted, measured.pools)


def test_a_batch_sliced_out_of_a_data_set_counts_as_the_batch() -> None:
    model, data = nn.Linear(20, 1, bias=False), torch.randn(1000, 20)
    _, measured = both(model, data[40:50], loss=torch.sum)
    assert measured.pools.activations == 4 * 10 * 20


def test_activations_that_are_released_leave_the_count() -> None:
    """Two halves of a step, one after the other: the peak is one half."""
    model, inputs = mlp(32, 64, 4), torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        for half in inputs.chunk(2):
            class_loss(model(half)).backward()
        optimizer.step()

    measured = measure(step, model, optimizer)
    assert measured.pools.activations == predict(model, (8, 32), "sgd", loss=class_loss).activations


def test_checkpointing_lowers_both_numbers_alike() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp(16, 128, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, inputs = Checkpointed(), torch.randn(8, 16)
    predicted, measured = both(model, inputs, loss=torch.sum)
    assert_agree(predicted, measured.pools)
    plain = predict(nn.Sequential(*copy.deepcopy(model.blocks)), inputs)
    assert predicted.activations == 3 * 4 * 8 * 16 < plain.activations


def test_predicting_allocates_nothing_and_leaves_the_model_alone() -> None:
    """A 20 GiB model lives on meta; a real one keeps its tensors, its gradients and its mode."""
    large = nn.Sequential(*[nn.Linear(16384, 16384, device="meta") for _ in range(20)])
    params = 20 * (16384**2 + 16384)
    assert predict(large, (2, 16384)).total == 16 * params + 40 * 4 + 4 * 20 * 2 * 16384

    model = convnet().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    predict(model, (2, 1, 28, 28))
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_plain_tensor_attributes_and_integer_examples_work_on_meta() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.offsets = [torch.ones(3, dtype=torch.long)]

        def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
            return self.table(ids + self.offsets[0]) * weight

    predicted = predict(Shifted(), (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 1)), "sgd")
    assert predicted == Pools(160, 160, 0, 2 * 3 * 8 + 2 * 3 * 4)  # the ids and the weight, no result


def test_tensor_bytes_counts_spans_of_storages() -> None:
    base = torch.zeros(10, 10)
    assert tensor_bytes([]) == tensor_bytes([base[:0]]) == 0
    assert tensor_bytes([base[0], base[2]]) == 4 * 30
    assert tensor_bytes([base, base.t(), base[3:5]]) == 400
    assert tensor_bytes([torch.zeros(1).expand(1000)]) == 4
    assert tensor_bytes([base, base.clone()]) == 800


# a device with counters


def test_cuda_branch_reports_both_counters_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes of the two counters; the model only says that it lives on the first GPU."""
    calls: list[str] = []
    fake = SimpleNamespace(
        synchronize=lambda device: calls.append("synchronize"),
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        max_memory_allocated=lambda device: 3 * MIB,
        max_memory_reserved=lambda device: 20 * MIB,
    )
    for name, function in vars(fake).items():
        monkeypatch.setattr(torch.cuda, name, function)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        calls.append("step")
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    monkeypatch.setattr("comera_lab.memory.meter._device", lambda model: torch.device("cuda:0"))
    measured = measure(step, model, optimizer)
    assert calls == ["synchronize", "reset", "step", "synchronize"]
    assert (measured.allocated_peak_bytes, measured.reserved_peak_bytes) == (3 * MIB, 20 * MIB)
    table = MemoryReport.compare(predict(model, (1, 4), "sgd"), measured).table()
    assert "allocated peak, measured on cuda:0: 3.00 MiB" in table
    assert "reserved peak, measured on cuda:0: 20.00 MiB" in table


# the report


def test_M01_report_names_predicted_measured_and_process() -> None:
    predicted, measured = both(mlp(64, 96, 10), torch.randn(32, 64))
    table = MemoryReport.compare(predicted, measured).table()
    assert "predicted MiB" in table
    assert "measured here MiB" in table
    assert "whole process (RSS, with Python and torch), measured beside cpu" in table
    assert "optimizer includes AdamW's step counters" in table
    assert "allocated" not in table, "a CPU has no such counter"
    for pool in POOLS:
        assert f"{mib(getattr(predicted, pool)):,.4f}" in table
    assert "measured" not in MemoryReport(predicted).table()
    assert str(MemoryReport(predicted)) == MemoryReport(predicted).table()


def test_gap_above_5_percent_becomes_a_sentence() -> None:
    predicted = Pools(1000 * MIB, 1000 * MIB, 0, 200 * MIB)
    report = MemoryReport(predicted, Pools(1000 * MIB, 1049 * MIB, 8 * MIB, 100 * MIB))
    optimizer, activations = report.gaps()
    assert optimizer.startswith("optimizer: measured 8.00 MiB, predicted 0.00 MiB, more than predicted.")
    assert activations.startswith("activations: measured 100.00 MiB, predicted 200.00 MiB, 50% less than predicted.")
    assert activations in report.table()
    assert MemoryReport(predicted, predicted).gaps() == MemoryReport(predicted).gaps() == []


def test_gap_sentence_appears_for_a_real_difference() -> None:
    model = mlp(64, 96, 10)
    _, measured = both(model, torch.randn(32, 64), "momentum")
    gaps = MemoryReport.compare(predict(model, (64, 64), "adamw"), measured).gaps()
    assert [sentence.partition(":")[0] for sentence in gaps] == ["optimizer", "activations"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.00 MiB"), (4, "0.0000 MiB"), (1024, "0.0010 MiB"), (4_110_418, "3.92 MiB"), (2**31, "2,048.00 MiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_process_rss_covers_torch_and_is_none_where_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    here = process_rss_bytes()
    assert here is not None
    assert here > 50 * MIB
    assert here == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_rss_bytes() == pytest.approx(here, rel=0.2)
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert process_rss_bytes() is None


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam"}, r"optimizer must be one of sgd, momentum, adamw, .*, got 'adam'"),
        ({"dtype": torch.int8}, r"dtype must be a float type, got torch\.int8"),
        ({"inputs": ()}, r"inputs must be a shape of ints, .* got \(\)"),
        ({"inputs": (2, 4.0)}, r"inputs must be a shape of ints, .* got \(2, 4\.0\)"),
        ({"inputs": "2x4"}, r"inputs must be a shape of ints, .* got \('2', 'x', '4'\)"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(nn.Linear(4, 2), **{"inputs": (2, 4), **arguments})


def test_several_outputs_without_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one tensor, got tuple\. Pass loss="):
        predict(nn.LSTM(4, 2), (3, 5, 4))


def test_step_that_never_updates_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"step must call optimizer\.step\(\)"):
        measure(lambda: model(torch.ones(1, 4)).sum().backward(), model, torch.optim.SGD(model.parameters()))
