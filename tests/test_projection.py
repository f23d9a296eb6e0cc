"""Bases against naive twins: singular vectors, autograd of the published loss, Adam written out in coordinates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from comera_lab.optimizers import projection
from comera_lab.optimizers.projection import (
    align_basis,
    captured_energy,
    lift,
    oriented,
    orthonormalize,
    project,
    projected_rank,
    random_basis,
    refresh_basis,
    sketch_basis,
    subspace_angle_degrees,
    svd_basis,
    transfer_moments,
)
from comera_lab.shapes import ShapeError
from tests.tolerances import RELATIVE, relative_error


def decaying(rows, cols, power, dtype=torch.float64):
    """A matrix with singular values k^-power."""
    left, right = (torch.linalg.qr(torch.randn(n, cols, dtype=dtype)).Q for n in (rows, cols))
    return left * torch.arange(1, cols + 1, dtype=dtype) ** -power @ right.T


def naive_loss(basis, gradient, momentum):
    reconstruction = functional.mse_loss(gradient @ basis @ basis.T, gradient)
    if momentum is None:
        return reconstruction
    return reconstruction * (1 - functional.cosine_similarity(momentum @ basis.T, gradient, dim=1).mean())


def is_orthonormal(basis, limit=1e-5):
    basis = basis.double()
    return float((basis.mT @ basis - torch.eye(basis.shape[-1], dtype=torch.float64)).abs().max()) <= limit


@pytest.mark.parametrize(
    ("shape", "rank", "ratio", "want"),
    [
        ((512, 2048), None, 4.0, 128),
        ((512, 2048), 64, 4.0, 64),
        ((8, 8), 64, None, 8),
        ((10, 512), None, 4.0, 2),
        ((3, 5), None, 100.0, 1),
        ((3, 5), None, None, None),
        ((768, 768), None, 1.5, 512),
    ],
)
def test_rank_is_that_asked_for_within_the_matrix(shape, rank, ratio, want):
    assert projected_rank(shape, rank, ratio) == want


@pytest.mark.parametrize(("rank", "ratio", "message"), [
    (0, None, "rank must be a whole number of at least 1, got 0"),
    (-3, 4.0, "got -3"),
    (True, None, "got True"),
    (2.5, None, "got 2.5"),
    (None, 0.5, "rank_ratio must be at least 1, got 0.5"),
    (None, math.nan, "got nan"),
])  # fmt: skip
def test_impossible_ranks_are_refused(rank, ratio, message):
    with pytest.raises(ValueError, match=message):
        projected_rank((8, 8), rank, ratio)


def test_svd_basis_is_the_best_of_all_bases():
    gradient = decaying(40, 24, 0.5)
    best = svd_basis(gradient, 5)
    values = torch.linalg.svdvals(gradient).square()
    assert is_orthonormal(best)
    torch.testing.assert_close(captured_energy(gradient, best), values[:5].sum() / values.sum())


@pytest.mark.parametrize("cols", [24, 200])
def test_sketch_comes_near_the_best_and_is_the_same_each_time(cols):
    gradient = decaying(300, cols, 0.5)
    basis = sketch_basis(gradient, 8)
    best = float(captured_energy(gradient, svd_basis(gradient, 8)))
    assert is_orthonormal(basis)
    assert 0.99 * best < float(captured_energy(gradient, basis)) <= best + 1e-12
    assert torch.equal(basis, sketch_basis(gradient, 8))
    low = project(gradient, basis).square().sum(0)
    assert (low.diff() <= 1e-9).all(), "ordered by energy"


def test_refresh_is_one_subspace_iteration_of_the_published_form():
    """QR of G P, then the right singular vectors of Q'G, span the same subspace."""
    gradient, old = decaying(60, 32, 0.5), random_basis(32, 6, dtype=torch.float64)
    q = torch.linalg.qr(gradient @ old).Q
    published = torch.linalg.svd(q.T @ gradient, full_matrices=False).Vh.T
    new = refresh_basis(gradient, old)
    assert is_orthonormal(new, 1e-10)
    assert float(subspace_angle_degrees(new, published)) < 1e-2
    wrong = refresh_basis(gradient, new)
    assert float(subspace_angle_degrees(wrong, published)) > 1, "the comparison sees one iteration too many"


def test_warm_refreshes_climb_to_the_optimum():
    gradient, basis = decaying(512, 256, 0.5, torch.float32), random_basis(256, 32)
    best = float(captured_energy(gradient, svd_basis(gradient, 32)))
    captured = []
    for _ in range(4):
        basis = refresh_basis(gradient, basis)
        captured.append(float(captured_energy(gradient, basis)) / best)
    assert captured == sorted(captured)
    assert captured[0] > 0.85
    assert captured[3] > 0.98


def test_refresh_keeps_what_the_gradient_says_nothing_about():
    basis = random_basis(32, 8)
    assert (refresh_basis(torch.zeros(64, 32), basis) - basis).abs().max() < 1e-6
    rank_two = torch.randn(64, 2) @ torch.randn(2, 32)
    new = refresh_basis(rank_two, basis)
    assert is_orthonormal(new)
    assert float(captured_energy(rank_two, new)) > 0.9999


def test_refreshed_columns_continue_the_old_ones():
    gradient = decaying(80, 40, 1.0)
    basis = svd_basis(gradient, 6)
    nearby = gradient + 0.01 * gradient.norm() / 60 * torch.randn_like(gradient)
    assert (refresh_basis(nearby, basis) * basis).sum(0).min() > 0.9


@pytest.mark.parametrize("with_momentum", [True, False])
@pytest.mark.parametrize("orthonormal", [True, False])
def test_paper_alignment_is_one_clipped_sgd_step_of_autograd(with_momentum, orthonormal):
    gradient = 3 * torch.randn(40, 24, dtype=torch.float64)
    basis = random_basis(24, 6, dtype=torch.float64)
    if not orthonormal:
        basis = basis + 0.05 * torch.randn_like(basis)
    momentum = torch.randn(40, 6, dtype=torch.float64) if with_momentum else None
    leaf = basis.clone().requires_grad_()
    (slope,) = torch.autograd.grad(naive_loss(leaf, gradient, momentum), leaf)
    want = basis - 0.1 * slope / slope.norm().clamp_min(1.0)
    got = align_basis(gradient, basis, momentum, kind="paper")
    assert relative_error(got - basis, want - basis) < RELATIVE[torch.float64] * 100
    unscaled = align_basis(gradient, basis, momentum, kind="paper", step=0.101)
    assert relative_error(unscaled - basis, want - basis) > 5e-3


def test_scale_free_alignment_is_the_same_step_on_the_normalised_loss():
    gradient, basis = torch.randn(40, 24, dtype=torch.float64), random_basis(24, 6, dtype=torch.float64)
    momentum = torch.randn(40, 6, dtype=torch.float64)
    leaf = basis.clone().requires_grad_()
    unit = gradient / gradient.square().mean().sqrt()
    (slope,) = torch.autograd.grad(naive_loss(leaf, unit, momentum), leaf)
    want = orthonormalize(basis - 0.1 * slope)
    assert relative_error(align_basis(gradient, basis, momentum), want) < RELATIVE[torch.float64] * 100


def test_published_alignment_stands_still_at_small_gradients_and_the_scale_free_one_does_not():
    """Pitfall of the public code: MSE has the unit of the squared gradient."""
    gradient, momentum = torch.randn(512, 256), torch.randn(512, 64)
    basis = random_basis(256, 64)
    moved = {}
    for scale in (1.0, 1e-4):
        for kind in ("paper", "scale-free"):
            new = align_basis(scale * gradient, basis.bfloat16(), scale * momentum, kind=kind)
            moved[kind, scale] = float((new != basis.bfloat16()).float().mean())
    assert moved["paper", 1e-4] == 0
    assert moved["paper", 1.0] > 0.1
    assert moved["scale-free", 1e-4] > 0.1
    assert abs(moved["scale-free", 1e-4] - moved["scale-free", 1.0]) < 0.01


def test_alignment_does_not_depend_on_the_orientation():
    gradient, momentum = torch.randn(24, 40, dtype=torch.float64), torch.randn(40, 6, dtype=torch.float64)
    basis = random_basis(24, 6, dtype=torch.float64)
    one = align_basis(oriented(gradient), basis, momentum)
    two = align_basis(oriented(gradient.T.contiguous()), basis, momentum)
    assert relative_error(one, two) < RELATIVE[torch.float64]


def test_alignment_moves_towards_the_gradient_and_stays_orthonormal():
    gradient, basis = decaying(60, 32, 1.0, torch.float32), random_basis(32, 6)
    start = float(captured_energy(gradient, basis))
    for _ in range(20):
        basis = align_basis(gradient, basis, project(gradient, basis))
    assert is_orthonormal(basis)
    assert float(captured_energy(gradient, basis)) > start + 0.05
    still = align_basis(torch.zeros(60, 32), basis, torch.zeros(60, 6))
    assert (still - basis).abs().max() < 1e-6


def test_batches_equal_one_by_one():
    gradients, momenta = torch.randn(3, 2, 30, 20), torch.randn(3, 2, 30, 5)
    bases = svd_basis(gradients, 5)
    calls = {
        "refresh": (refresh_basis(gradients, bases), lambda g, b, m: refresh_basis(g, b)),
        "align": (align_basis(gradients, bases, momenta), align_basis),
        "project": (project(gradients, bases), lambda g, b, m: project(g, b)),
        "lift": (lift(momenta, bases), lambda g, b, m: lift(m, b)),
        "energy": (captured_energy(gradients, bases), lambda g, b, m: captured_energy(g, b)),
        "sketch": (sketch_basis(gradients, 5), lambda g, b, m: sketch_basis(g, 5)),
    }
    for name, (together, alone) in calls.items():
        want = torch.stack(
            [
                alone(*one)
                for one in zip(gradients.flatten(0, 1), bases.flatten(0, 1), momenta.flatten(0, 1), strict=True)
            ]
        ).view_as(together)
        if name == "sketch":
            assert float(subspace_angle_degrees(together, want).max()) < 0.1
        else:
            assert relative_error(together, want) < 1e-5, name


def test_transferred_moments_are_those_of_the_new_coordinates():
    old = torch.eye(8, dtype=torch.float64)
    new = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    samples = torch.randn(4000, 3, 8, dtype=torch.float64) * torch.arange(1, 9)
    mean, square = samples.mean(0), samples.square().mean(0)
    moved, moved_square = transfer_moments(mean, square, old, new)
    rotated = samples @ new
    assert relative_error(moved, rotated.mean(0)) < 1e-10
    assert relative_error(moved_square, rotated.square().mean(0)) < 0.1
    same, same_square = transfer_moments(mean, square, old, old)
    assert torch.equal(same, mean)
    assert torch.equal(same_square, square)


def test_a_direction_outside_of_the_old_basis_starts_with_the_mean_square():
    old, new = torch.eye(6)[:, :2], torch.eye(6)[:, 1:3]
    moved, square = transfer_moments(torch.ones(3, 2), torch.tensor([[1.0, 3.0]]).expand(3, 2), old, new)
    assert torch.equal(moved, torch.tensor([[1.0, 0.0]]).expand(3, 2))
    assert torch.equal(square, torch.tensor([[3.0, 2.0]]).expand(3, 2))


def test_angles_are_right_near_0_and_at_90_degrees():
    first = torch.eye(5)[:, :2]
    for degrees in (0.0, 1e-4, 30.0, 90.0):
        angle = math.radians(degrees)
        turned = first.clone().double()
        turned[1, 1], turned[3, 1] = math.cos(angle), math.sin(angle)
        assert float(subspace_angle_degrees(first, turned)) == pytest.approx(degrees, abs=1e-6)


def test_orthonormalize_copes_with_dependent_columns_and_keeps_directions():
    columns = torch.randn(20, 4)
    made = orthonormalize(columns)
    assert (made[:, 0] * columns[:, 0]).sum() > 0
    assert is_orthonormal(orthonormalize(torch.cat([columns, columns[:, :1]], 1)))
    assert is_orthonormal(orthonormalize(torch.zeros(6, 3)))
    assert is_orthonormal(orthonormalize(columns * torch.tensor([1e-20, 1.0, 1e10, 1.0])))


def test_A03_a_decomposition_that_does_not_converge_falls_back_with_one_warning(monkeypatch):
    direction = torch.randn(512, 1)
    gradient = torch.cat([direction.expand(512, 60), torch.randn(512, 4)], 1) + 1e-7 * torch.randn(512, 64)
    values = torch.linalg.svdvals(gradient.double()).square()
    best = float(values[:16].sum() / values.sum())
    real = {name: getattr(torch.linalg, name) for name in ("svd", "eigh")}
    for name, make in (("svd", svd_basis), ("eigh", sketch_basis)):
        failures = []

        def once(*args, _name=name, _failures=failures, **keywords):
            if not _failures:
                _failures.append(_name)
                raise torch.linalg.LinAlgError("the algorithm failed to converge")
            return real[_name](*args, **keywords)

        monkeypatch.setattr(torch.linalg, name, once)
        with pytest.warns(RuntimeWarning, match="did not converge and was repeated in float64") as told:
            basis = make(gradient, 16)
        monkeypatch.undo()
        assert len(told) == 1
        assert is_orthonormal(basis)
        assert float(captured_energy(gradient.double(), basis.double())) >= 0.9999 * best
    assert is_orthonormal(refresh_basis(gradient, basis))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_E01_half_precision_goes_in_and_comes_out(dtype):
    gradient = (6e4 * torch.rand(256, 128)).to(dtype)
    for make in (svd_basis, sketch_basis):
        basis = make(gradient, 16)
        assert basis.dtype == dtype
        assert is_orthonormal(basis, 1e-2)
    low = project(gradient, basis)
    assert low.dtype == torch.float32
    assert low.isfinite().all()
    assert relative_error(low, gradient.float() @ basis.float()) < 1e-6
    for new in (refresh_basis(gradient, basis), align_basis(gradient, basis, low)):
        assert new.dtype == dtype
        assert is_orthonormal(new, 1e-2)


def test_shapes_that_do_not_fit_are_refused():
    gradient, basis = torch.randn(6, 4), torch.randn(4, 2)
    with pytest.raises(ShapeError, match=r"gradient must be \(rows, cols\) with rows >= cols, got \(4, 6\)"):
        svd_basis(gradient.T, 2)
    with pytest.raises(ShapeError, match="rank must lie in 1 .. cols = 4, got 5"):
        sketch_basis(gradient, 5)
    with pytest.raises(ShapeError, match=r"basis must be \(cols, rank\) with cols = 6"):
        project(gradient.T, basis)
    with pytest.raises(ShapeError, match=r"momentum must be \(rows, rank\) = \(6, 2\), got \(5, 2\)"):
        align_basis(gradient, basis, torch.randn(5, 2))
    with pytest.raises(ValueError, match="kind must be 'scale-free' or 'paper', got 'none'"):
        align_basis(gradient, basis, kind="none")
    with pytest.raises(ShapeError, match="must share their rank"):
        lift(torch.randn(6, 3), basis)
    with pytest.raises(ShapeError, match="must have the same cols"):
        subspace_angle_degrees(basis, torch.randn(5, 2))


def test_random_bases_follow_their_generator():
    one, two, three = (random_basis(30, 5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert float(subspace_angle_degrees(one, three)) > 10
    assert is_orthonormal(one)
    assert projection.random_basis(30, 5, batch=(2, 3)).shape == (2, 3, 30, 5)
