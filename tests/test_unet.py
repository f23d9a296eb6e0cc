"""The small DDPM: schedule, U-Net, sampler, its trainer, and the distance that judges its samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from comera_lab.experiments.checkpoints import CheckpointError
from comera_lab.experiments.datasets import digits
from comera_lab.experiments.diffusion import DiffusionConfig, DiffusionTrainer, image_grid
from comera_lab.experiments.frechet import digit_judge, frechet_distance
from comera_lab.experiments.recorder import DiffusionRow, Recorder, read_rows
from comera_lab.experiments.runs import TrainingError
from comera_lab.models.unet import NoiseSchedule, UNet, level_features, noise_loss, sample
from comera_lab.shapes import ShapeError
from tests.tolerances import RELATIVE, relative_error


def _draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("levels", [50, 200, 1000])
def test_a_schedule_falls_from_nearly_all_signal_to_nearly_none(kind: str, levels: int) -> None:
    signal = NoiseSchedule.make(kind, levels).signal
    assert len(signal) == levels and (signal.diff() < 0).all()
    assert signal[0] > 0.99 and 0 < signal[-1] < 1e-3


def test_the_linear_schedule_of_1000_levels_is_that_of_ddpm() -> None:
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    assert relative_error(NoiseSchedule.make("linear", 1000).signal, (1 - betas).cumprod(0)) < RELATIVE[torch.float32]


def test_mixing_keeps_the_energy_of_unit_images() -> None:
    schedule = NoiseSchedule.make()
    generator = _draws()
    images, noise = (torch.randn(400, 1, 8, 8, generator=generator) for _ in range(2))
    for level in (0, 100, 199):
        mixed = schedule.mix(images, noise, torch.full((400,), level))
        assert float(mixed.var()) == pytest.approx(1, abs=0.03)
    assert relative_error(schedule.mix(images, noise, torch.zeros(400, dtype=torch.int64)), images) < 0.02


@pytest.mark.parametrize(("channels", "side"), [((16, 32), 8), ((16, 16, 32), 16), ((8,), 5)])
def test_the_unet_keeps_the_shape_and_starts_by_knowing_nothing(channels: tuple[int, ...], side: int) -> None:
    model = UNet(channels, generator=_draws())
    images = torch.randn(3, 1, side, side)
    assert torch.equal(model(images, torch.tensor([0, 5, 9])), torch.zeros_like(images))
    loss = noise_loss(model, NoiseSchedule.make(), images, _draws(1))
    assert float(loss.detach()) == pytest.approx(1, abs=0.35)


def test_every_parameter_of_the_unet_gets_a_gradient_and_the_level_matters() -> None:
    model = UNet((16, 32), generator=_draws())
    nn.init.normal_(model.last.weight)
    images = torch.randn(2, 1, 8, 8)
    model(images, torch.tensor([3, 100])).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    early, late = (model(images, torch.full((2,), level)) for level in (3, 100))
    assert relative_error(early, late) > 0.01
    assert model.parameter_count() == sum(p.numel() for p in model.parameters())


def test_one_seed_gives_one_unet_and_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    first, second = UNet((8, 16), generator=_draws(3)), UNet((8, 16), generator=_draws(3))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(before, torch.get_rng_state())  # torch's own layers draw once before they are overwritten


def test_levels_have_distinct_features() -> None:
    features = level_features(torch.arange(200), 32)
    distances = torch.cdist(features, features) + 10 * torch.eye(200)
    assert features.shape == (200, 32) and distances.min() > 0.1


class _Oracle(nn.Module):
    """Knows that all clean images are `clean`, so it tells the noise exactly."""

    def __init__(self, schedule: NoiseSchedule, clean: torch.Tensor) -> None:
        super().__init__()
        self.schedule, self.clean = schedule, clean
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        signal = self.schedule.signal[level].reshape(-1, 1, 1, 1)
        return (x - signal.sqrt() * self.clean) / (1 - signal).sqrt()


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_a_perfect_model_samples_the_clean_image_in_any_number_of_steps(kind: str, steps: int) -> None:
    schedule = NoiseSchedule.make(kind, 100)
    clean = torch.rand(1, 1, 8, 8, generator=_draws()) * 1.8 - 0.9
    images = sample(_Oracle(schedule, clean), schedule, 3, 8, _draws(1), steps=steps)
    assert relative_error(images, clean.expand_as(images)) < 1e-3  # half of it is the start, nearly without signal


def test_sampling_repeats_itself_and_keeps_the_mode_of_the_model() -> None:
    model, schedule = UNet((8, 16), generator=_draws()), NoiseSchedule.make()
    nn.init.normal_(model.last.weight, std=0.1)
    one, two, other = (sample(model, schedule, 2, 8, _draws(seed), steps=5) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert model.training and one.abs().max() <= 1


def test_frechet_distance_is_known_for_normal_distributions_on_the_axes() -> None:
    mean_a, mean_b = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    a, b = torch.diag(torch.tensor([4.0, 9.0])), torch.diag(torch.tensor([1.0, 25.0]))
    assert frechet_distance(mean_a, a, mean_b, b) == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 5) ** 2)
    assert frechet_distance(mean_a, a, mean_a, a) == pytest.approx(0, abs=1e-9)
    turn = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64)).Q
    turned = [turn @ m.double() @ turn.T for m in (a, b)]
    got = frechet_distance(turn @ mean_a.double(), turned[0], turn @ mean_b.double(), turned[1])
    assert got == pytest.approx(1 + 4 + 1 + 4)


@pytest.mark.slow
def test_the_judge_can_read_and_ranks_real_blurred_and_noise() -> None:
    judge, data = digit_judge(), digits(8)
    assert judge.accuracy > 0.97
    order = torch.randperm(len(data.train_x), generator=_draws())
    halves = [judge.distance(data.train_x[order[i : i + 500]]) for i in (0, 500)]
    noise = torch.rand(data.test_x.shape, generator=_draws())
    spoiled = [judge.distance((1 - share) * data.test_x + share * noise) for share in (0.0, 0.15, 0.3, 0.5)]
    assert spoiled == sorted(spoiled) and spoiled[-1] > 5 * judge.real
    assert max(*halves, judge.real) < 4
    assert judge.noise > 20 * judge.real
    one_digit = judge.distance(data.train_x[data.train_y == 3])  # real images of one kind: no variety
    assert one_digit > 10 * judge.real
    assert (judge.labels(data.test_x) == data.test_y).float().mean() == pytest.approx(judge.accuracy)
    with pytest.raises(ShapeError, match=r"at least 2 of 64 numbers, got \(3, 60\)"):
        judge.distance(torch.zeros(3, 60))
    with pytest.raises(ValueError, match="has diverged"):
        judge.distance(torch.full((3, 64), math.nan))


def _trainer(steps: int = 8, **settings) -> DiffusionTrainer:
    model = UNet((8, 16), generator=_draws())
    return DiffusionTrainer(model, DiffusionConfig(steps=steps, batch_size=16, samples=20, **settings))


@pytest.mark.slow
def test_training_makes_samples_better(tmp_path) -> None:
    trainer = _trainer(150, learning_rate=5e-3, evaluate_every=75)
    judge = digit_judge()
    before = judge.distance(trainer.sampled(20))
    while not trainer.done or trainer.evaluation_due:
        trainer.evaluate() if trainer.evaluation_due else trainer.step()
    first, last = trainer.evaluations
    assert (first.step, last.step) == (75, 150) and last.test_loss_mse < first.test_loss_mse < 0.6
    assert last.frechet < before
    with Recorder(tmp_path / "run.jsonl", trainer.config) as recorder:
        recorder.add(last)
    assert DiffusionRow(**{k: v for k, v in read_rows(tmp_path / "run.jsonl")[1].items() if k != "kind"}) == last


@pytest.mark.parametrize("cut", [1, 4])
def test_a_resumed_run_is_bitwise_the_run_without_a_break(cut: int, tmp_path) -> None:
    whole, first, second = _trainer(), _trainer(), _trainer()
    for _ in range(8):
        whole.step()
    for _ in range(cut):
        first.step()
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    while not second.done:
        second.step()
    assert [s.loss_mse for s in second.steps] == [s.loss_mse for s in whole.steps]
    assert torch.equal(second.sampled(2), whole.sampled(2))


def test_a_loss_that_is_not_finite_changes_nothing_and_the_batch_comes_again() -> None:
    trainer, twin = _trainer(), _trainer()
    for each in (trainer, twin):
        each.step()
    good = trainer.model.first.weight.detach().clone()
    trainer.model.first.weight.data[0, 0, 0, 0] = math.nan
    with pytest.raises(TrainingError, match="the loss of step 2 is nan, so this step was not made"):
        trainer.step()
    trainer.model.first.weight.data.copy_(good)
    assert trainer.step().loss_mse == twin.step().loss_mse


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    config = DiffusionConfig(steps=100, warmup=10, learning_rate=1.0)
    rates = [config.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[10] == 1 and rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_grid_of_images_has_every_pixel_in_its_place() -> None:
    images = torch.rand(5, 64, generator=_draws())
    grid = image_grid(images, 3)
    assert grid.shape == (19, 28) and not grid[:, [0, 9, 18, 27]].any() and not grid[[0, 9, 18]].any()
    assert np.array_equal(grid[10:18, 10:18], images[4].reshape(8, 8).numpy())
    assert not grid[10:18, 19:27].any()


def test_bad_input_is_refused(tmp_path) -> None:
    schedule, model = NoiseSchedule.make(levels=20), UNet((8, 16))
    refusals = [
        (lambda: NoiseSchedule.make("square"), ValueError, 'kind must be "cosine" or "linear"'),
        (lambda: NoiseSchedule.make(levels=1), ValueError, "levels must be at least 2, got 1"),
        (lambda: UNet((12,)), ShapeError, r"multiples of 8, got \(12,\)"),
        (lambda: model(torch.zeros(1, 1, 7, 7), torch.tensor([0])), ShapeError, r"divisible by 2, got \(1, 1, 7, 7\)"),
        (lambda: sample(model, schedule, 1, 8, _draws(), steps=21), ValueError, "from 1 to the schedule's 20 levels"),
        (lambda: DiffusionConfig(steps=0), ValueError, "steps must be a whole number of at least 1, got 0"),
        (lambda: DiffusionConfig(learning_rate=-1), ValueError, "learning_rate must be above 0"),
        (lambda: frechet_distance(torch.zeros(2), torch.eye(3), torch.zeros(2), torch.eye(2)), ShapeError, "from the"),
    ]
    for act, error, match in refusals:
        with pytest.raises(error, match=match):
            act()


def test_a_checkpoint_of_another_run_is_refused_and_nothing_changes(tmp_path) -> None:
    trainer, other = _trainer(), _trainer(learning_rate=1e-4)
    trainer.step()
    trainer.save(tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"learning_rate=0.002, got learning_rate=0.0001"):
        other.load(tmp_path / "run.pt")
    assert other.steps_done == 0
    torch.save({"no": 1}, tmp_path / "no.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of a DiffusionTrainer"):
        other.load(tmp_path / "no.pt")
    for _ in range(7):
        trainer.step()
    with pytest.raises(ValueError, match="the run is over after 8 steps"):
        trainer.step()
