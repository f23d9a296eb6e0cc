"""An eager COAP step by the kernel, in Triton's interpreter, beside the same step in torch; and where it stays away."""

from __future__ import annotations

import pytest
import torch
from interpreter import in_interpreter
from tolerances import GRAPH, GRAPH_CODED, RELATIVE, relative_error
from torch import nn

from comera_lab.kernels import matrix_group
from comera_lab.optimizers import COAPAdamW, GaLoreAdamW, fused

SHAPES = ((40, 24), (40, 24), (20, 50), (7,), (30, 16, 1, 1))


def trained(backend, dtype=torch.float32, steps=7, kind=COAPAdamW, spoil=False, wide=False, **settings):
    """Parameters and state after some steps on given gradients: refreshes, alignment steps and a rate that falls."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return torch.randn(shape, generator=generator).to(dtype)

    # 8-bit codes begin at 4,096 moments
    parameters = [nn.Parameter(draw(shape)) for shape in (((260, 20), (260, 20)) if wide else SHAPES)]
    settings = {"rank": 4, "update_interval": 3, "plain_up_to": 100, "scale": 0.7} | settings
    optimizer = kind(parameters, lr=0.05, weight_decay=0.1, eps=1e-3, **settings)
    optimizer.backend = backend
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        for parameter in parameters:
            parameter.grad = draw(parameter.shape)
        optimizer.step()
        if spoil:
            parameters[0].data.mul_(1.01)
    return optimizer, parameters


def worst(one, other):
    return max(relative_error(a.detach(), b.detach()) for a, b in zip(one[1], other[1], strict=True))


def counted(monkeypatch):
    """How many matrices each launch of the kernel stepped."""
    stacks, right = [], fused.launch
    monkeypatch.setattr(
        fused, "launch", lambda group, scalars: (stacks.append(len(group.weights)), right(group, scalars))
    )
    return stacks


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"alignment": None, "refresh": "svd", "stagger": False}, marks=pytest.mark.slow),
        pytest.param({"transfer_moments": True}, marks=pytest.mark.slow),
        pytest.param({"maximize": True}, marks=pytest.mark.slow),
        pytest.param({"bits": 8, "rank": 16, "wide": True}, marks=pytest.mark.slow),
    ],
    ids=["coap", "svd", "moving moments", "maximize", "8-bit"],
)
@in_interpreter
def test_the_kernel_makes_the_step_that_torch_makes(settings):
    with pytest.MonkeyPatch.context() as patch:
        stacks = counted(patch)
        kernel = trained("triton", **settings)
        launches = len(stacks)
        torch_only = trained("torch", **settings)
    assert launches and len(stacks) == launches, "the torch path launches nothing"
    assert max(stacks) == 2, "matrices of one shape share a launch"
    assert worst(kernel, torch_only) < (GRAPH_CODED if "bits" in settings else GRAPH)
    assert worst(trained("torch", spoil=True, **settings), torch_only) > 1e-2, "the measure sees a 1 % error"
    for (_, mine), (_, theirs) in zip(kernel[0].state.items(), torch_only[0].state.items(), strict=True):
        assert mine.keys() == theirs.keys() and int(mine["step"]) == int(theirs["step"]) == 7


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@in_interpreter
def test_half_precision_makes_one_step_alike(dtype):
    """One: the interpreter rounds bf16 towards zero, and seven such steps add up."""
    one, other = trained("triton", dtype, steps=2), trained("torch", dtype, steps=2)
    assert 0 < worst(one, other) < RELATIVE[dtype]


@pytest.mark.slow
@in_interpreter
def test_galore_takes_the_kernel_too():
    settings = {"kind": GaLoreAdamW, "update_interval": 3}
    assert worst(trained("triton", **settings), trained("torch", **settings)) < GRAPH


def test_on_a_cpu_nothing_changes_unless_it_is_asked_for(monkeypatch):
    stacks = counted(monkeypatch)
    monkeypatch.setattr(fused, "why_not", lambda matrix: pytest.fail("asked for a CPU matrix"))
    left, torch_only = trained(None), trained("torch")
    assert stacks == [] and worst(left, torch_only) == 0.0


@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({}, torch.float32, "the tensors are on the CPU"),
        ({"stochastic_rounding": True}, torch.bfloat16, "stochastic_rounding is on"),
        ({"state_dtype": torch.bfloat16}, torch.bfloat16, "fp32 or 8-bit moments"),
        ({}, torch.float64, "the kernel takes weights and bases of"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why_and_changes_nothing(settings, dtype, reason):
    optimizer, parameters = trained("torch", dtype, steps=1, **settings)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.backend = "triton"
    with pytest.raises(ValueError, match=f"backend='triton' cannot run this: .*{reason}"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    optimizer.backend = "cuda"
    with pytest.raises(ValueError, match="backend must be None, 'torch' or 'triton', got 'cuda'"):
        optimizer.step()


def test_a_lost_gradient_is_named_before_the_kernel_touches_anything(monkeypatch):
    """As if the kernel could run: the launch is the naive twin."""
    monkeypatch.setattr("comera_lab.optimizers.coap.takes_triton", lambda backend, device, reason: reason is None)
    monkeypatch.setattr(fused, "launch", matrix_group.naive_projected_adam)
    optimizer, parameters = trained("triton", steps=3)
    assert worst((optimizer, parameters), trained("torch", steps=3)) < GRAPH
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[1].grad[3, 2] = float("nan")
    with pytest.raises(ValueError, match="parameter 1"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
