"""COAP against twins: torch's AdamW and Adafactor, and Adam written out in projected coordinates."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from comera_lab.optimizers import COAPAdafactor, COAPAdamW, projection
from comera_lab.optimizers.projection import align_basis, refresh_basis, sketch_basis
from tests.coap_helpers import KINDS, SMALL, Small, same_state, step_with, train, weights
from tests.tolerances import RELATIVE, relative_error

HYPER = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def matrix(rows, cols, dtype=torch.float64):
    return nn.Parameter(torch.randn(rows, cols, dtype=dtype))


def gradients(steps, rows, cols, dtype=torch.float64):
    return [torch.randn(rows, cols, dtype=dtype) for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_without_rank_it_is_torch_adamw_bit_for_bit(dtype, foreach, maximize):
    one, two = Small().to(dtype), Small().to(dtype)
    settings = {**HYPER, "foreach": foreach, "maximize": maximize}
    train(one, torch.optim.AdamW(one.parameters(), **settings), 5)
    train(two, COAPAdamW(two.parameters(), rank=None, rank_ratio=None, **settings), 5)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_the_identity_basis_is_torch_adamw(shape, foreach, monkeypatch):
    monkeypatch.setattr(projection, "sketch_basis", lambda g, rank: torch.eye(g.shape[1], rank, dtype=g.dtype))
    one = matrix(*shape)
    two, three = nn.Parameter(one.detach().clone()), nn.Parameter(one.detach().clone())
    settings = {"rank_ratio": 1.0, "plain_up_to": 0, "update_interval": 1000, "stagger": False, "foreach": foreach}
    plain, coap = torch.optim.AdamW([one], **HYPER), COAPAdamW([two], **HYPER, **settings)
    mutant = COAPAdamW([three], **HYPER, **settings, scale=1.01)
    for gradient in gradients(7, *shape):
        for parameter, optimizer in ((one, plain), (two, coap), (three, mutant)):
            step_with(parameter, gradient, optimizer)
    assert relative_error(two, one) < RELATIVE[torch.float64]
    assert relative_error(three, one) > 1e-5


def naive_coap(weight, grads, rank, interval, factor, hyper):
    """COAP-AdamW on one matrix with rows >= cols, written out line by line."""
    first, second = hyper["betas"]
    mean = square = basis = None
    for step, gradient in enumerate(grads):
        if basis is None:
            basis = sketch_basis(gradient, rank)
            mean = square = torch.zeros(weight.shape[0], rank, dtype=weight.dtype)
        elif step % (interval * factor) == 0:
            basis = refresh_basis(gradient, basis)
        elif step % interval == 0:
            basis = align_basis(gradient, basis, mean)
        low = gradient @ basis
        mean = first * mean + (1 - first) * low
        square = second * square + (1 - second) * low**2
        corrected = mean / (1 - first ** (step + 1))
        root = (square / (1 - second ** (step + 1))).sqrt() + hyper["eps"]
        weight = weight * (1 - hyper["lr"] * hyper["weight_decay"]) - hyper["lr"] * corrected / root @ basis.T
    return weight


@pytest.mark.parametrize("tall", [True, False])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_matrices_follow_the_published_recursion(tall, foreach):
    weight, grads = matrix(24, 16), gradients(13, 24, 16)
    want = naive_coap(weight.detach(), grads, 4, 3, 2, HYPER)
    parameter = nn.Parameter(weight.detach().clone() if tall else weight.detach().T.contiguous())
    settings = {"rank": 4, "plain_up_to": 0, "update_interval": 3, "refresh_factor": 2, "stagger": False}
    optimizer = COAPAdamW([parameter], **HYPER, **settings, foreach=foreach)
    for gradient in grads:
        step_with(parameter, gradient if tall else gradient.T, optimizer)
    assert relative_error(parameter if tall else parameter.T, want) < 1e-10
    late = naive_coap(weight.detach(), grads, 4, 4, 2, HYPER)
    assert relative_error(late, want) > 1e-4, "a basis renewed at other steps would be seen"


@pytest.mark.parametrize("kind", KINDS)
def test_foreach_equals_one_at_a_time(kind):
    results = []
    for foreach in (True, False, None):
        model = nn.ModuleList(nn.Linear(24, 24) for _ in range(3)).double()
        start = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=start))
        optimizer = KINDS[kind](model.parameters(), foreach=foreach)
        for step in range(7):
            draw = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    limit = RELATIVE[torch.float64] * 10 if "8bit" not in kind else RELATIVE[torch.float32]
    assert relative_error(results[0], results[1]) < limit
    assert relative_error(results[2], results[1]) < limit


def test_adafactor_without_rank_is_torch_adafactor():
    one, two = Small().double(), Small().double()
    with torch.no_grad():
        two.conv.weight.copy_(one.conv.weight)
    train(one, torch.optim.Adafactor(one.parameters(), lr=1e-2, eps=(1e-15, 1e-3), weight_decay=0.1), 8)
    settings = {"rank_ratio": None, "scale_parameter": True, "weight_decay": 0.1}
    train(two, COAPAdafactor(two.parameters(), lr=1e-2, **settings), 8)
    got, want = (torch.cat([w.flatten() for w in weights(model)]) for model in (two, one))
    assert relative_error(got, want) < 1e-9


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactor_in_a_basis_follows_its_recursion(beta1):
    """Pitfalls of the public code: no first moment crashes, and some branches never keep their moments."""
    weight, grads = matrix(24, 16), gradients(9, 24, 16)
    parameter = nn.Parameter(weight.detach().clone())
    optimizer = COAPAdafactor(
        [parameter], 1e-2, beta1, rank=4, plain_up_to=0, update_interval=3, refresh_factor=2, stagger=False
    )
    want, basis, mean = weight.detach(), None, torch.zeros(24, 4, dtype=torch.float64)
    rows, cols = torch.zeros(24, 1, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    for step, gradient in enumerate(grads):
        step_with(parameter, gradient, optimizer)
        if basis is None:
            basis = sketch_basis(gradient, 4)
        elif step % 3 == 0:
            basis = (
                refresh_basis(gradient, basis)
                if step % 6 == 0
                else align_basis(gradient, basis, None if beta1 is None else mean)
            )
        low = gradient @ basis
        forget = 1 - (step + 1) ** -0.8
        rows = forget * rows + (1 - forget) * low.square().mean(1, keepdim=True)
        cols = forget * cols + (1 - forget) * low.square().mean(0, keepdim=True)
        update = low / (rows * cols / rows.mean()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        if beta1 is not None:
            mean = update = beta1 * mean + (1 - beta1) * update
        want = want - 1e-2 * update @ basis.T
    assert relative_error(parameter, want) < 1e-9
    assert ("exp_avg" in optimizer.state[parameter]) == (beta1 is not None)


def test_projected_tensors_are_chosen_by_shape_and_size():
    shapes = {
        "matrix": (128, 96),
        "small": (64, 64),
        "vector": (20_000,),
        "conv": (64, 32, 3, 3),
        "point": (256, 64, 1, 1),
    }
    shapes |= {"conv1d": (64, 64, 5), "conv3d": (16, 16, 4, 4, 4), "scalar": ()}
    report = COAPAdamW([(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]).report()
    ranks = {row.name: (row.rank, row.side) for row in report.rows}
    assert ranks == {
        "matrix": ((24,), "columns"), "point": ((16,), "columns"), "conv": ((32, 16), "channels"),
        **dict.fromkeys(("small", "vector", "conv1d", "conv3d", "scalar"), (None, None)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_report_counts_every_byte_before_and_after_the_first_step(kind):
    model = Small()
    optimizer = KINDS[kind](model.named_parameters())
    before = optimizer.report()
    train(model, optimizer, 1)
    after = optimizer.report()
    assert before == after
    state = [value for one in optimizer.state.values() for value in one.values()]
    assert after.bytes == sum(value.nbytes for value in state)
    with torch.device("meta"):
        planned = KINDS[kind](Small().named_parameters()).report()
    assert planned == after
    text = str(after)
    assert "conv.weight" in text
    assert "16 x 4 x 3 x 3" in text
    assert f"{after.bytes / 2**20:.2f} MiB" in text
    assert all(not isinstance(value, int | float) for value in state)


@pytest.mark.parametrize("transfer", [True, False])
def test_moments_are_carried_over_at_a_new_basis_on_request(transfer):
    """With the basis turned within its span, a transferred mean lifts to the same direction."""
    parameter = matrix(24, 16)
    optimizer = COAPAdamW([parameter], **SMALL, transfer_moments=transfer)
    low_rank = torch.randn(24, 4, dtype=torch.float64) @ torch.randn(4, 16, dtype=torch.float64)
    for _ in range(10):
        step_with(parameter, low_rank, optimizer)
    state = optimizer.state[parameter]
    with torch.no_grad():
        turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
        state["basis"].copy_(state["basis"] @ turn)
        state["exp_avg"].copy_(state["exp_avg"] @ turn)
    before = state["exp_avg"] @ state["basis"].T
    optimizer.param_groups[0]["refresh"] = "svd"
    step_with(parameter, low_rank, optimizer)
    kept = (state["exp_avg"] - 0.1 * low_rank @ state["basis"]) / 0.9 @ state["basis"].T
    assert (relative_error(kept, before) < 1e-6) == transfer


def test_refreshes_are_spread_over_the_steps():
    """With stagger few bases change at a step; without, all at once."""
    for stagger in (True, False):
        parameters = [nn.Parameter(torch.randn(16, 16)) for _ in range(20)]
        optimizer = COAPAdamW(parameters, rank=4, plain_up_to=0, update_interval=20, refresh_factor=2, stagger=stagger)
        changes = []
        for _ in range(41):
            before = {p: optimizer.state[p].get("basis", torch.zeros(0)).clone() for p in parameters}
            for parameter in parameters:
                parameter.grad = torch.randn(16, 16)
            optimizer.step()
            changes.append(sum(not torch.equal(before[p], optimizer.state[p]["basis"]) for p in parameters))
        assert changes[0] == 20
        assert sum(changes[1:]) == 40
        assert max(changes[1:]) <= 3 if stagger else changes[20] == changes[40] == 20


@pytest.mark.parametrize("alignment", ["scale-free", "paper", None])
@pytest.mark.parametrize("refresh", ["warm", "svd"])
def test_every_way_to_keep_a_basis_trains(alignment, refresh):
    model = Small()
    start = train(copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0), 1)
    optimizer = COAPAdamW(model.parameters(), lr=1e-2, **{**SMALL, "rank": 8}, alignment=alignment, refresh=refresh)
    losses = [train(model, optimizer, 1) for _ in range(25)]
    assert losses[-1] < 0.3 * start
    assert all(math.isfinite(loss) for loss in losses)


def test_8_bit_state_follows_32_bits():
    """Within 5 % in the loss after 50 steps, with codes where the moments reach 4,096 values."""
    runs = {}
    for bits in (32, 8):
        model = Small()
        optimizer = COAPAdamW(model.named_parameters(), lr=3e-3, **{**SMALL, "rank": 32}, bits=bits)
        runs[bits] = sum([train(model, optimizer, 1, start=step % 4) for step in range(50)][-4:]) / 4
        state = optimizer.state[model.linear.weight]
        assert ("exp_avg_sq_codes" in state) == (bits == 8)
        assert "exp_avg" in optimizer.state[model.conv.weight], "small moments stay in float32"
    assert runs[32] < 0.8, "both have learned"
    assert runs[8] == pytest.approx(runs[32], rel=0.05)


def test_state_of_a_half_precision_weight_is_float32_or_what_is_asked_for():
    model = Small().bfloat16()
    for dtype, want in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        optimizer = COAPAdamW(model.parameters(), **SMALL, state_dtype=dtype)
        train(model, optimizer, 2)
        state = optimizer.state[model.linear.weight]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == want
        assert state["basis"].dtype == torch.bfloat16
        assert optimizer.state[model.linear.bias]["exp_avg"].dtype == torch.bfloat16, "as in torch.optim"


@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_depend_on_torch_s_generator(kind):
    """Every rank of a distributed run makes the same bases."""
    results = []
    for seed in (1, 2):
        model = Small()
        torch.manual_seed(seed)
        optimizer = KINDS[kind](model.parameters())
        train(model, optimizer, 6)
        results.append(optimizer.state_dict())
    assert same_state(*results)
