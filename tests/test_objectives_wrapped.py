"""Every objective: gradient against differences, nothing touched by asking, the same under DDP and torch.compile."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tolerances import DIFFERENCES, RELATIVE, relative_error
from torch import Tensor, nn

from comera_lab.experiments.datasets import digits
from comera_lab.experiments.rank_training import RankConfig, RankTrainer
from comera_lab.layers import GateKind, TTEmbedding, TTLinear, compact, tt_layers
from comera_lab.models.mlp import MLP
from comera_lab.objectives import EarlyStage, LateStage, core_decay, meet_target, model_size, size_surrogate
from comera_lab.objectives.budget import _taylor_worth
from comera_lab.objectives.sizes import gated_layers, live_elements

IDS = torch.arange(0, 60, 7)
Objective = Callable[[Tensor, nn.Module], Tensor]

OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "early": lambda: EarlyStage(0.7, 1e-2),
    "late, far from its size": lambda: LateStage(target_ratio=0.3, part="tensorised", beta=1e-2),
    "late, at its size": lambda: LateStage(target_ratio=1.0, part="tensorised", target_loss=0.01),
    "core decay": lambda: lambda loss, model: loss + 0.1 * core_decay(model),
    "surrogate": lambda: lambda loss, model: loss + size_surrogate(model),
}


def _model(kind: GateKind = "straight-through", seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        TTEmbedding(60, 24, 5, order=2, generator=generator),
        TTLinear(24, 36, 5, order=2, generator=generator),
        nn.GELU(),
        nn.Linear(36, 3),
    )
    for layer in tt_layers(model).values():
        layer.add_gates(kind)
        with torch.no_grad():
            for gate in layer.gates:
                gate.uniform_(0.3, 1.0, generator=generator)
            layer.gates[0][1] = 1e-3  # one dead entry in every layer
    with torch.no_grad():
        for parameter in model[3].parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    return model


def _loss(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(ids).square().mean() + 0.5


# Gradients


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["straight-through", "threshold"])
def test_gradient_of_each_objective_is_that_of_its_value(name: str, kind: GateKind) -> None:
    model = _model(kind).double()
    objective = OBJECTIVES[name]()
    if isinstance(objective, LateStage):
        objective.start(model)

    def value() -> Tensor:
        return copy.deepcopy(objective)(_loss(model), model)

    # A straight-through entry that is closed has, by design, a gradient where its value has none: left out.
    shown = {
        f"{prefix}.gates.{k}": gate != 0
        for prefix, layer in tt_layers(model).items()
        for k, gate in enumerate(layer.effective_gates())
    }
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(value(), list(parameters.values()))
    draw = torch.Generator().manual_seed(1)
    for (key, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        along = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * shown.get(key, 1)
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.add_(step * along)
                ends.append(float(value()))
                parameter.sub_(step * along)
        wanted = (ends[0] - ends[1]) / 2e-6
        assert float((gradient * along).sum()) == pytest.approx(wanted, rel=DIFFERENCES, abs=DIFFERENCES), key


def test_core_decay_pulls_at_cores_alone() -> None:
    model = _model()
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(core_decay(model), list(parameters.values()), allow_unused=True)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert gradient is None if "cores" not in name else torch.equal(gradient, 2 * parameter.detach())


def test_worth_of_an_entry_is_its_squared_gradient_times_gate_summed_over_batches() -> None:
    model = _model().double()
    batches = (IDS[:4], IDS[4:])
    worth = _taylor_worth(gated_layers(model), lambda: [_loss(model, batch) for batch in batches])
    for (name, k), got in worth.items():
        gate = tt_layers(model)[name].gates[k]
        naive = torch.zeros_like(got)
        for batch in batches:
            model.zero_grad()
            _loss(model, batch).backward()
            assert gate.grad is not None
            naive += (gate.detach() * gate.grad) ** 2
        assert relative_error(got, naive) < RELATIVE[torch.float64]


# Asking changes nothing


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("training", [True, False])
def test_objectives_and_queries_touch_nothing(name: str, training: bool) -> None:
    model = _model().train(training)
    objective = OBJECTIVES[name]()
    before = copy.deepcopy(model.state_dict())
    versions = [(id(p), p._version, p.data_ptr()) for p in model.parameters()]
    random = torch.get_rng_state()
    loss = _loss(model)
    objective(loss, model)
    with torch.no_grad():
        objective(_loss(model), model)
    model_size(model), live_elements(gated_layers(model)), [layer.live_ranks for layer in tt_layers(model).values()]
    list(_taylor_worth(gated_layers(model), lambda: [_loss(model)]))
    assert [(id(p), p._version, p.data_ptr()) for p in model.parameters()] == versions, "not even written and restored"
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training == training and torch.equal(random, torch.get_rng_state())


def test_meet_target_writes_gates_alone_and_leaves_no_gradient() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    meet_target(model, model_size(model).cores // 2, loss_of=lambda: [_loss(model)])
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("gates" in name for name in changed)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("make", [lambda: EarlyStage(0.7), lambda: LateStage(target_ratio=0.5)])
def test_refused_loss_leaves_schedule_and_target_where_they_were(make: Callable[[], Objective]) -> None:
    model, objective = _model(), make()
    before = copy.deepcopy(objective)
    with pytest.raises(ValueError, match="task loss must be finite, got nan"):
        objective(torch.tensor(torch.nan), model)
    assert objective == before


def test_target_for_a_model_of_dead_gates_is_refused() -> None:
    model = _model()
    with torch.no_grad():
        for layer in tt_layers(model).values():
            layer.gates[0].zero_()
    for part in ("model", "tensorised"):
        late = LateStage(target_ratio=0.5, part=part)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="gate entries are all dead"):
            late(_loss(model), model)
        assert late.limit is None


# torch.compile

# While it traces, dynamo makes warnings about its own doings, hides them from people, and cannot hide them from a
# filter that raises.
compiles = pytest.mark.filterwarnings("ignore")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_compiled_model_trains_as_the_plain_one(name: str) -> None:
    plain, inner = _model(), _model()
    compiled = torch.compile(inner, backend="aot_eager")
    for model in (plain, compiled):
        objective = OBJECTIVES[name]()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            objective(_loss(model), model).backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), inner.parameters(), strict=True):
        assert relative_error(other, one) < 10 * RELATIVE[torch.float32]
    ranks = [[layer.live_ranks for layer in tt_layers(model).values()] for model in (plain, compiled)]
    assert ranks[0] == ranks[1]
    assert model_size(compiled) == model_size(plain)


@compiles
@pytest.mark.slow
def test_compiled_model_is_cut_and_goes_on() -> None:
    model = _model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(compiled.parameters(), lr=1e-3)
    _loss(compiled).backward()
    optimizer.step()
    report = meet_target(compiled, model_size(compiled).cores // 2, loss_of=lambda: [_loss(compiled)])
    want = compiled(IDS).detach()
    assert compact(compiled, optimizer).after == report.after
    assert relative_error(compiled(IDS), want) < RELATIVE[torch.float32]
    assert relative_error(compiled(IDS), model(IDS)) < RELATIVE[torch.float32]
    optimizer.zero_grad()
    EarlyStage(1.0)(_loss(compiled), compiled).backward()
    optimizer.step()
    assert relative_error(compiled(IDS), want) > RELATIVE[torch.float32]


# Two processes

_WORKER = """
    import sys
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    from comera_lab.layers import compact, tt_layers
    from comera_lab.objectives import EarlyStage, LateStage, core_decay, meet_target, model_size
    from test_objectives_wrapped import _loss, _model, IDS

    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mine = IDS[rank::2][:4]
    found = {}
    stages = {
        "early": lambda: EarlyStage(0.7, 1e-2),
        "late": lambda: LateStage(target_ratio=0.5, part="tensorised"),
        "decay": lambda: lambda loss, model: loss + 0.1 * core_decay(model),
    }
    for name, make in stages.items():
        inner = _model(seed=rank)  # DDP starts both from rank 0
        model, objective = DistributedDataParallel(inner), make()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        for _ in range(12):
            optimizer.zero_grad()
            objective(_loss(model, mine), model).backward()
            optimizer.step()
        found[name] = [inner.state_dict(), [layer.live_ranks for layer in tt_layers(model).values()]]
    report = meet_target(model, model_size(model).cores // 2, loss_of=lambda: [_loss(inner, mine)])
    try:
        compact(model, optimizer)
    except ValueError as error:
        assert "wrap it again" in str(error), error
    else:
        raise AssertionError("a wrapped model was cut")
    compact(inner, optimizer)
    again = DistributedDataParallel(inner)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(again, mine).backward()
        optimizer.step()
    ranks = [layer.live_ranks for layer in tt_layers(inner).values()]
    found["cut"] = [inner.state_dict(), ranks, report.after]
    torch.save(found, f"{folder}/rank{rank}.pt")
    distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_I05_ranks_and_gates_are_equal_on_both_processes_through_training_and_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_WORKER)]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=Path(__file__).parent, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors.decode()
    finally:
        for worker in workers:  # where one has failed, the other waits for it for ever
            worker.kill()
            worker.communicate()
    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, values in one.items():
        assert values[1:] == other[name][1:], name
        assert all(torch.equal(value, other[name][0][key]) for key, value in values[0].items()), name
    # Not what one process alone would have become: the other's half of the ids counted.
    alone = _model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=2e-2)
    objective = EarlyStage(0.7, 1e-2)
    for _ in range(12):
        optimizer.zero_grad()
        objective(_loss(alone, IDS[0::2][:4]), alone).backward()
        optimizer.step()
    assert not torch.equal(alone.state_dict()["1.gates.0"], one["early"][0]["1.gates.0"])


@pytest.mark.slow
def test_rank_training_refuses_a_ddp_model(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(MLP((64, 48, 10), kind="tt", rank=6))
        with pytest.raises(ValueError, match="which DistributedDataParallel cannot follow"):
            RankTrainer(model, digits(8), RankConfig())
    finally:
        torch.distributed.destroy_process_group()
    assert not any(len(layer.gates) for layer in tt_layers(model).values())
