"""Optimizer state counted from shapes: the sizes that COAP published, its predictions, and real optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from comera_lab.memory import (
    LLAMA,
    PUBLISHED,
    StateBytes,
    StateSettings,
    llama_shapes,
    low_rank,
    mib,
    optimizer_bytes,
    predict,
    state_bytes,
    unet_shapes,
)
from comera_lab.memory.published import count_llama, count_unet
from comera_lab.optimizers import make_optimizer
from comera_lab.shapes import ShapeError

PRINTED_MIB = 0.01  # the published table has two decimals; one of its figures is off by 0.0057 of a MiB


@pytest.mark.parametrize("size", PUBLISHED, ids=lambda size: size.model)
def test_the_published_sizes_follow_from_shapes_alone(size) -> None:
    assert mib(size.count().published) == pytest.approx(size.mib, abs=PRINTED_MIB)


def test_published_sizes_are_the_five_of_the_table() -> None:
    assert [size.mib for size in PUBLISHED] == [213.99, 522.77, 3704.91, 1988.34, 5380.51]


@pytest.mark.parametrize(
    ("name", "rank", "bf16", "eight_bit"),
    [("60M", 128, 156.2, 81.6), ("130M", 256, 327.1, 179.3), ("350M", 256, 622.6, 353.3),
     ("1B", 1024, 3476, 2074), ("7B", 512, 4985, 2941)],
)  # fmt: skip
def test_further_sizes_of_llama(name: str, rank: int, bf16: float, eight_bit: float) -> None:
    tolerance = 0.05 if bf16 < 1000 else 0.5
    assert mib(count_llama(name, rank).published) == pytest.approx(bf16, abs=tolerance)
    assert mib(count_llama(name, rank, bits=8).published) == pytest.approx(eight_bit, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "optimizer", "ratio", "want"),
    [("ddpm-cifar10-32", "adamw", None, 272.72), ("ddpm-celebahq-256", "adamw", None, 867.26),
     ("controlnet-sdxl", "adamw", None, 9544.48), ("controlnet-sdxl", "coap-adafactor", 4, 1874.22),
     ("controlnet-sdxl", "coap-adafactor", 8, 953.46), ("ddpm-celebahq-256", "coap", 1.5, 685.11)],
)  # fmt: skip
def test_other_sizes_of_the_unets(name: str, optimizer: str, ratio: float | None, want: float) -> None:
    counted = optimizer_bytes(unet_shapes(name), optimizer) if ratio is None else count_unet(name, ratio, optimizer)
    assert mib(counted.published) == pytest.approx(want, abs=PRINTED_MIB)


def test_adafactor_with_a_first_moment_is_the_base_of_the_controlnet_figure() -> None:
    shapes = unet_shapes("controlnet-sdxl")
    first_moments = 4 * sum(math.prod(s) for s in shapes)
    factors = optimizer_bytes(shapes, "adafactor")
    assert mib(first_moments + factors.published) == pytest.approx(5176.07, abs=PRINTED_MIB)


@pytest.mark.parametrize(("name", "millions"), [("1B", 1339.1), ("7B", 6738.4)])
def test_llama_shapes_have_the_parameters_of_the_models(name: str, millions: float) -> None:
    matrices, rest = llama_shapes(name)
    assert sum(map(math.prod, matrices + rest)) / 1e6 == pytest.approx(millions, abs=0.05)
    assert len(matrices) == 7 * LLAMA[name][2]


def test_llama_7b_is_planned_on_meta_tensors() -> None:
    matrices, rest = llama_shapes("7B")
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in matrices + rest]
    assert optimizer_bytes(tensors, "adamw").published == 4 * sum(map(torch.numel, tensors))
    assert optimizer_bytes(tensors, "sgd") == StateBytes()


@pytest.mark.parametrize(
    ("shape", "state", "basis"),
    [((640, 32), (640, 16), 32 * 16), ((32, 640), (640, 16), 32 * 16),
     ((64, 32, 3, 3), (45, 22, 3, 3), 64 * 45 + 32 * 22), ((256, 128, 1, 1), (256, 64), 128 * 64)],
)  # fmt: skip
def test_low_rank_spaces_of_matrices_and_convolutions(shape, state, basis) -> None:
    space = low_rank(shape, StateSettings(rank_ratio=2))
    assert space is not None and (space.shape, space.basis_elements) == (state, basis)


def test_the_published_rule_projects_the_out_side_of_a_1x1_convolution() -> None:
    space = low_rank((256, 128, 1, 1), StateSettings(rank_ratio=2, pointwise="out"))
    assert space is not None and (space.shape, space.basis_elements) == ((128, 128, 1, 1), 256 * 128)


@pytest.mark.parametrize("shape", [(), (64,), (32, 32, 3, 3), (96, 96), (40, 50, 60), (2, 3, 40, 50, 6)])
def test_other_parameters_stay_as_they_are(shape) -> None:
    settings = StateSettings(rank_ratio=2)
    assert low_rank(shape, settings) is None
    assert state_bytes(shape, "coap", settings=settings) == state_bytes(shape, "adamw")


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counted_equals_the_tensors_of_torchs_own_optimizers(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 6), nn.LayerNorm(6)).to(dtype)
    make: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    optimizer = make[name](model.parameters())
    assert _real_bytes(model, optimizer) == optimizer_bytes(model.parameters(), name).total


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.Conv2d(40, 64, 3), nn.Conv2d(64, 160, 1), nn.Conv2d(160, 64, 1), nn.GroupNorm(8, 64),
        nn.Linear(64, 300), nn.Linear(300, 64), nn.Linear(8, 12),
    )  # fmt: skip


KIT = ("adamw-8bit", "coap", "coap-8bit", "coap-adafactor", "galore", "flora")


@pytest.mark.parametrize("name", KIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"rank_ratio": 2.0}, {"rank_ratio": 4.0, "plain_up_to": 1000}, {"rank": 24}])
def test_counted_equals_the_tensors_of_the_kits_optimizers(name: str, dtype: torch.dtype, settings: dict) -> None:
    """Every buffer of the real state after a step, to the byte, and what the optimizer reports before it."""
    model = _conv_net().to(dtype)
    counted = optimizer_bytes(model.parameters(), name, settings=StateSettings(**settings))
    given = {} if name == "adamw-8bit" else {**settings, **({"beta1": 0.9} if "factor" in name else {})}
    optimizer = make_optimizer(name, model.parameters(), 1e-3, **given)
    assert optimizer.report().bytes == counted.total
    assert _real_bytes(model, optimizer) == counted.total
    assert (counted.scales > 0) == name.endswith("8bit") and (counted.bases > 0) == (
        name not in ("flora", "adamw-8bit")
    )


@pytest.mark.parametrize("first_moment", [True, False])
def test_a_first_moment_is_counted_where_there_is_one(first_moment: bool) -> None:
    model = _conv_net()
    for name, settings in (("coap-adafactor", {"alignment": None}), ("flora", {})):
        counted = optimizer_bytes(
            model.parameters(), name, settings=StateSettings(rank_ratio=4.0, first_moment=first_moment)
        )
        beta1 = 0.9 if first_moment else None
        rank_ratio = None if name == "flora" and not first_moment else 4.0
        optimizer = make_optimizer(name, model.parameters(), 1e-3, beta1=beta1, rank_ratio=rank_ratio, **settings)
        assert _real_bytes(model, optimizer) == counted.total


def _real_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor in the state after one step."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_predict_takes_the_projected_optimizers() -> None:
    model = nn.Linear(512, 256, bias=False)
    pools = predict(model, (8, 512), "coap", settings=StateSettings(rank_ratio=4))
    assert pools.optimizer == 4 * (2 * 512 * 64 + 256 * 64) + 4
    assert predict(model, (8, 512), "coap", settings=StateSettings(rank=64)).optimizer == pools.optimizer


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: state_bytes((4, 4), "adam"), ValueError, r"must be one of .*coap.*got 'adam'"),
        (lambda: state_bytes((4, -1), "adamw"), ShapeError, r"sizes of at least 0, got \(4, -1\)"),
        (lambda: state_bytes((4, 4), "coap"), ValueError, r"coap needs a rank or a rank_ratio.*rank_ratio=4"),
        (lambda: StateSettings(rank=0), ValueError, r"rank must be at least 1, got 0"),
        (lambda: StateSettings(rank_ratio=0.5), ValueError, r"rank_ratio must be at least 1, got 0.5"),
        (lambda: llama_shapes("2B"), ValueError, r"one of 60M, .*got '2B'"),
        (lambda: unet_shapes("sd"), ValueError, r"one of ddpm-cifar10-32, .*got 'sd'"),
    ],
)
def test_bad_input_is_refused(make, error, match) -> None:
    with pytest.raises(error, match=match):
        make()
