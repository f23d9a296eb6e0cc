"""A training step taken down once and replayed: equal to the eager one, with schedules, refreshes and objectives."""

from __future__ import annotations

import copy

import pytest
import torch
from fake_graph import FakeCapture
from interpreter import in_interpreter
from tolerances import GRAPH, GRAPH_CODED, RELATIVE, relative_error
from torch import nn

from comera_lab.experiments.graphs import CudaCapture, GraphedStep
from comera_lab.layers import TTLinear, tt_layers
from comera_lab.objectives import EarlyStage, stages
from comera_lab.optimizers import make_optimizer
from comera_lab.optimizers.device_step import DeviceStep
from comera_lab.shapes import ShapeError

STEPS = 50


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Objectives read the loss on a CPU, to refuse a lost one at once; on a GPU they never do."""
    monkeypatch.setattr(stages, "_finite", lambda loss: loss)


class Net(nn.Module):
    def __init__(self, tt: bool):
        super().__init__()
        make = torch.Generator().manual_seed(1)
        self.first = TTLinear(24, 40, 6, generator=make) if tt else nn.Linear(24, 40)
        self.second = nn.Linear(40, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 5)
        for layer in tt_layers(self).values():
            layer.add_gates()

    def forward(self, x):
        return self.last(self.norm(self.second(self.first(x).tanh()).relu()))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def batches(count):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        x = torch.randn(16, 24, generator=generator, dtype=torch.float64)
        yield x, (x[:, :5] + 0.3 * x[:, 5:10]).argmax(1)


def rate(step):
    return 0.01 * min(1.0, (step + 1) / 10) * (1 - step / 80)


SETTINGS = {
    "adamw": {},
    "coap": {"rank_ratio": 4.0, "update_interval": 5, "refresh_factor": 3, "plain_up_to": 300, "scale": 0.7},
    "coap moving moments": {"rank": 6, "update_interval": 4, "refresh_factor": 2, "plain_up_to": 300,
                            "transfer_moments": True, "stagger": False},
    "coap-8bit": {"rank": 8, "update_interval": 5, "plain_up_to": 300},
    "galore": {"rank": 6, "update_interval": 10, "plain_up_to": 300},
}  # fmt: skip


def trained(name, tt, graphed, wrong_rate=False):
    """Parameters and losses after STEPS steps; the schedule sets "lr" before each."""
    torch.manual_seed(0)
    model = Net(tt).double()
    optimizer = make_optimizer(name.partition(" ")[0], model.parameters(), 0.01, weight_decay=0.05, **SETTINGS[name])
    objective = EarlyStage(0.01) if tt else None
    step = GraphedStep(model, loss_of, optimizer, objective=objective, capture=FakeCapture()) if graphed else None
    losses = []
    for number, batch in enumerate(batches(STEPS)):
        if not (wrong_rate and number > 10):
            optimizer.param_groups[0]["lr"] = rate(number)
        if step is not None:
            losses.append(float(step.step(*batch)))
            continue
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        torch.autograd.backward(loss if objective is None else objective(loss, model))
        optimizer.step()
        losses.append(float(loss.detach()))
    return list(model.parameters()), torch.tensor(losses), optimizer, step


@pytest.mark.parametrize("tt", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_fifty_replayed_steps_equal_eager_ones(name, tt):
    want, want_losses, eager, _ = trained(name, tt, graphed=False)
    got, got_losses, optimizer, step = trained(name, tt, graphed=True)
    assert step.captured
    if name != "adamw":
        assert step.renewed >= 4
    limit = GRAPH_CODED if "8bit" in name else GRAPH
    assert relative_error(got_losses, want_losses) < limit
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) < limit
    for ours, theirs in zip(got, want, strict=True):
        assert optimizer.state[ours]["step"] == eager.state[theirs]["step"] == STEPS
    assert want_losses[-5:].mean() < 0.8 * want_losses[:5].mean(), "a training in which nothing moves proves nothing"


def test_a_schedule_that_is_not_followed_is_noticed():
    want, *_ = trained("adamw", False, graphed=False)
    got, *_ = trained("adamw", False, graphed=True, wrong_rate=True)
    assert max(relative_error(a, b) for a, b in zip(got, want, strict=True)) > 100 * GRAPH


def test_torch_own_step_in_a_graph_is_noticed():
    """I02: with the host's bias corrections baked in, replays drift: why DeviceStep exists."""
    torch.manual_seed(0)
    model = Net(False).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    step = GraphedStep(model, loss_of, optimizer, capture=FakeCapture())
    data = list(batches(12))
    for batch in data[:4]:
        step.step(*batch)
    twin, other = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match="host reads a tensor"):
        FakeCapture().record(optimizer.step)
    assert len(other.state) == len(list(twin.parameters()))


def test_a_checkpoint_of_a_graphed_run_continues_eagerly():
    _, _, optimizer, step = trained("coap", False, graphed=True)
    model, data = step.model, list(batches(3))
    twin = Net(False).double()
    twin.load_state_dict(model.state_dict())
    other = make_optimizer("coap", twin.parameters(), 0.01, weight_decay=0.05, **SETTINGS["coap"])
    other.load_state_dict(optimizer.state_dict())
    for batch in data:
        step.step(*batch)
        other.zero_grad()
        loss_of(twin, *batch).backward()
        other.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_error(ours, theirs) < GRAPH


def test_the_host_is_not_asked_while_a_graph_is_captured():
    class Peeking(Net):
        def forward(self, x):
            return super().forward(x) * (1.0 if float(x.detach().sum()) > -1e9 else 2.0)

    model = Peeking(False).double()
    step = GraphedStep(model, loss_of, torch.optim.AdamW(model.parameters()), eager_steps=2, capture=FakeCapture())
    data = list(batches(3))
    for batch in data[:2]:
        step.step(*batch)
    with pytest.raises(RuntimeError, match="host reads a tensor"):
        step.step(*data[2])


def test_what_a_graph_cannot_take_is_refused():
    model = Net(False).double()
    (x, y), *_ = batches(1)
    with pytest.raises(ValueError, match="eager_steps must be at least 2"):
        GraphedStep(model, loss_of, torch.optim.AdamW(model.parameters()), eager_steps=1, capture=FakeCapture())
    step = GraphedStep(model, loss_of, torch.optim.AdamW(model.parameters()), capture=FakeCapture())
    step.step(x, y)
    with pytest.raises(ShapeError, match=r"batches like the first one, .* got \[\(\(8, 24\)"):
        step.step(x[:8], y[:8])
    with pytest.raises(ValueError, match="takes AdamW or COAPAdamW, got SGD"):
        DeviceStep(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="has a gradient but no state"):
        DeviceStep(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="cannot honour amsgrad=True"):
        DeviceStep(torch.optim.AdamW(model.parameters(), amsgrad=True))
    model.zero_grad()
    with pytest.raises(ValueError, match="must have made a step"):
        DeviceStep(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="backend='triton' cannot run this"):
        trained_once = make_optimizer("coap", model.parameters(), 0.01, **SETTINGS["coap"])
        loss_of(model, x, y).backward()
        trained_once.step()
        DeviceStep(trained_once, backend="triton")


def test_cuda_graphs_without_cuda_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="need a CUDA device, got none"):
        CudaCapture()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 8])
@in_interpreter
def test_the_kernels_make_the_same_update(bits):
    """Matrices of both orientations, stacked by shape, beside a plain vector; one basis renewed in between."""
    ours, theirs = [], []
    for parameters, backend in ((ours, "triton"), (theirs, "torch")):
        generator = torch.Generator().manual_seed(4)
        shapes = [(80, 60), (80, 60), (60, 80), (7,)]
        parameters += [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = make_optimizer(
            "coap",
            parameters,
            0.05,
            weight_decay=0.1,
            rank=52 if bits == 8 else 9,
            rank_ratio=None,
            plain_up_to=100,
            bits=bits,
            update_interval=2,
            refresh_factor=1,
            scale=0.6,
        )
        update = None
        for _ in range(4):
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.copy_(gradient)
            if update is None:
                optimizer.step()
                update = DeviceStep(optimizer, backend)
                continue
            update.renew()
            update.write_scalars()
            update.run()
            update.count()
        assert bool(update._stacks) == (backend == "triton")
        assert ("exp_avg_codes" in optimizer.state[parameters[0]]) == (bits == 8)
    for got, want in zip(ours, theirs, strict=True):
        assert relative_error(got, want) < (GRAPH_CODED if bits == 8 else RELATIVE[torch.float32])
