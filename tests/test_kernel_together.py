"""q, k and v by one launch of the fused kernel, in Triton's interpreter, against three products of their own."""

from __future__ import annotations

import pytest
import torch
from interpreter import in_interpreter
from tolerances import GRAPH, relative_error

from comera_lab.contraction import apply_cores_together, naive_apply_cores
from comera_lab.layers import TTLinear, forward_together


def maps_of(rank, widths=(24, 24, 40), biased=(True, False, True)):
    generator = torch.Generator().manual_seed(rank)
    layers = [TTLinear(30, out, rank, bias=bias, generator=generator) for out, bias in zip(widths, biased, strict=True)]
    for layer in layers:
        if layer.bias is not None:
            layer.bias.data.normal_(generator=generator)
    return layers, torch.randn(5, 3, 30, generator=generator).requires_grad_()


def launches(patch):
    """Ranks of the launches from now on."""
    from comera_lab.kernels import tt_linear as kernel

    ranks, right = [], kernel.tt_linear

    def spy(x, left, *rest):
        ranks.append(left.shape[1])
        return right(x, left, *rest)

    patch.setattr(kernel, "tt_linear", spy)
    return ranks


@pytest.mark.parametrize("rank", [3, 5])
@in_interpreter
def test_one_launch_gives_the_values_and_gradients_of_three(rank):
    layers, x = maps_of(rank)
    for layer in layers:
        layer.backend = "triton"
    with pytest.MonkeyPatch.context() as patch:
        ranks = launches(patch)
        outs = forward_together(x, layers)
    assert ranks == [sum(layer.shape.middle_rank for layer in layers)]
    inputs = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    weights = [torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) for out in outs]
    got = [*outs, *torch.autograd.grad(outs, inputs, weights)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, truth = iter(exact[1:]), []
    for layer in layers:
        values = {name: next(found) for name, _ in layer.named_parameters()}
        cores = [values[name] for name in values if name.startswith("cores")]
        truth.append(naive_apply_cores(exact[0], cores, layer.shape, values.get("bias")))
    want = [*truth, *torch.autograd.grad(truth, exact, [weight.double() for weight in weights])]
    for mine, theirs in zip(got, want, strict=True):
        assert relative_error(mine.detach(), theirs.detach()) < GRAPH
    assert relative_error(1.01 * got[0].detach(), want[0].detach()) > 5e-3, "the measure sees a 1 % error"


@in_interpreter
def test_more_ranks_than_the_kernel_takes_go_one_by_one():
    generator = torch.Generator().manual_seed(0)
    layers = [TTLinear(144, 144, 60, generator=generator) for _ in range(3)]
    x = torch.randn(4, 144, generator=generator)
    maps = [(list(layer.cores), layer.shape, layer.bias) for layer in layers]
    with pytest.MonkeyPatch.context() as patch:
        ranks = launches(patch)
        outs = apply_cores_together(x, maps, "triton")
    assert ranks == [60, 60, 60]
    for out, (cores, shape, bias) in zip(outs, maps, strict=True):
        assert relative_error(out.detach(), naive_apply_cores(x, cores, shape, bias).detach()) < GRAPH
