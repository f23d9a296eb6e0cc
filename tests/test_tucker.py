"""Tucker-2 of convolution gradients; tensorly's HOOI is the reference twin."""

from __future__ import annotations

import pytest
import torch

from comera_lab.optimizers import tucker
from comera_lab.shapes import ShapeError
from tests.tolerances import RELATIVE, relative_error


def kernel_gradient(out=64, into=32, window=(3, 3), dtype=torch.float64):
    """Channel directions of falling strength, in a random orientation."""
    strong = torch.randn(out, into, *window, dtype=dtype)
    strong *= torch.logspace(0, -2, out, dtype=dtype)[:, None, None, None]
    strong *= torch.logspace(0, -1, into, dtype=dtype)[None, :, None, None]
    turns = [torch.linalg.qr(torch.randn(n, n, dtype=dtype)).Q for n in (out, into)]
    return tucker.lift(strong, (turns[0], turns[1]))


@pytest.fixture
def hooi():
    import tensorly as tl
    from tensorly.decomposition import partial_tucker

    before = tl.get_backend()
    tl.set_backend("pytorch")
    yield lambda tensor, ranks: partial_tucker(tensor, rank=list(ranks), modes=[0, 1])[0]
    tl.set_backend(before)


def test_warm_refreshes_reach_the_energy_of_hooi(hooi):
    gradient, ranks = kernel_gradient(), (16, 12)
    core, _ = hooi(gradient, ranks)
    best = float(core.square().sum() / gradient.square().sum())
    first = tucker.hosvd_bases(gradient, ranks)
    assert float(tucker.captured_energy(gradient, first)) > 0.99 * best
    cold = tuple(torch.linalg.qr(torch.randn(n, r, dtype=torch.float64)).Q for n, r in ((64, 16), (32, 12)))
    captured = []
    for _ in range(6):
        cold = tucker.refresh_bases(gradient, cold)
        captured.append(float(tucker.captured_energy(gradient, cold)))
    assert captured == sorted(captured)
    assert 0.99 * best < captured[-1] <= best * (1 + 1e-9)


def test_full_channel_ranks_give_the_gradient_back():
    for shape in ((64, 3, 7, 7), (16, 1, 3, 3), (8, 4, 3, 1)):
        gradient = torch.randn(shape)
        bases = tucker.hosvd_bases(gradient, shape[:2])
        assert relative_error(tucker.lift(tucker.project(gradient, bases), bases), gradient) < 1e-5


def test_projection_equals_einsum():
    gradient = torch.randn(10, 6, 3, 2, dtype=torch.float64)
    bases = tucker.hosvd_bases(gradient, (4, 3))
    core = tucker.project(gradient, bases)
    assert relative_error(core, torch.einsum("oihw,or,is->rshw", gradient, *bases)) < RELATIVE[torch.float64]
    full = tucker.lift(core, bases)
    assert relative_error(full, torch.einsum("rshw,or,is->oihw", core, *bases)) < RELATIVE[torch.float64]
    swapped = torch.einsum("oihw,or,is->rshw", gradient.transpose(2, 3), *bases).transpose(2, 3)
    assert relative_error(swapped, core) < RELATIVE[torch.float64]
    assert relative_error(1.01 * core, core) > 1e-3


def test_alignment_moves_both_bases_towards_the_gradient():
    gradient = kernel_gradient(24, 16, dtype=torch.float32)
    bases = tuple(torch.linalg.qr(torch.randn(n, r)).Q for n, r in ((24, 6), (16, 5)))
    start = float(tucker.captured_energy(gradient, bases))
    for _ in range(20):
        new = tucker.align_bases(gradient, bases, tucker.project(gradient, bases))
        assert all((one != two).any() for one, two in zip(new, bases, strict=True))
        bases = new
    assert float(tucker.captured_energy(gradient, bases)) > start + 0.02
    for basis in bases:
        assert (basis.T @ basis - torch.eye(basis.shape[1])).abs().max() < 1e-5


def test_moments_go_over_to_other_bases():
    old = tuple(torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (6, 5))
    new = tuple(torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (6, 5))
    full = torch.randn(6, 5, 3, 3, dtype=torch.float64)
    mean, square = tucker.transfer_moments(tucker.project(full, old), torch.ones_like(full), old, new)
    assert relative_error(mean, tucker.project(full, new)) < RELATIVE[torch.float64]
    assert relative_error(square, torch.ones_like(full)) < RELATIVE[torch.float64]


@pytest.mark.parametrize("ranks", [16, (16, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_A08_ranks_as_one_number_or_two_on_the_input_s_device_and_dtype(ranks, dtype):
    gradient = torch.randn(72, 27, 3, 3).to(dtype)
    used = tucker.tucker_ranks(gradient.shape, ranks, None)
    assert used == ((16, 16) if ranks == 16 else (16, 27))
    bases = tucker.hosvd_bases(gradient, used)
    assert [basis.shape for basis in bases] == [(72, used[0]), (27, used[1])]
    assert all(basis.dtype == dtype and basis.device == gradient.device for basis in bases)
    with_pair = tucker.hosvd_bases(gradient, tucker.tucker_ranks(gradient.shape, (16, 16), None))
    with_one = tucker.hosvd_bases(gradient, tucker.tucker_ranks(gradient.shape, 16, None))
    energies = [float(tucker.captured_energy(gradient.float(), b)) for b in (with_pair, with_one)]
    assert energies[0] == energies[1]


def test_ranks_go_by_the_root_of_the_ratio():
    assert tucker.tucker_ranks((64, 3, 7, 7), None, 2.0) == (45, 2)
    assert tucker.tucker_ranks((16, 1, 3, 3), None, 2.0) == (11, 1)
    assert tucker.tucker_ranks((16, 1, 3, 3), None, None) is None
    with pytest.raises(ValueError, match="rank_ratio must be at least 1, got 0.5"):
        tucker.tucker_ranks((4, 4, 3, 3), None, 0.5)
    with pytest.raises(ValueError, match=r"rank must be one number or \(rank_out, rank_in\), got \(1, 2, 3\)"):
        tucker.tucker_ranks((4, 4, 3, 3), (1, 2, 3), None)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"gradient must be \(out, in, \*window\), got \(4, 3\)"):
        tucker.hosvd_bases(torch.randn(4, 3), (2, 2))
    with pytest.raises(ShapeError, match="rank_in must lie in 1 .. in channels = 3, got 4"):
        tucker.hosvd_bases(torch.randn(4, 3, 2, 2), (2, 4))
    with pytest.raises(ShapeError, match="gradient must hold values"):
        tucker.hosvd_bases(torch.randn(4, 3, 0, 2), (2, 2))
