"""A small denoising diffusion model: U-Net, noise schedule, and a sampler that repeats itself.

DDPM (Ho, Jain and Abbeel 2020, arXiv 2006.11239): an image x_0 in [-1, 1] is mixed with noise,
x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e, and the network learns to tell e from x_t and t. a_t, the share of the signal's
energy that is left, falls from 1 to 0 over the levels t (a-bar in the paper). Sampling walks back, here without fresh
noise (DDIM, Song and others 2020, arXiv 2010.02502, equation 12 with sigma = 0): fewer steps, and the start decides.

Left out: attention, which the released DDPM has at 16x16, and the learned variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.shapes import ShapeError

GROUPS = 8  # channels are normalised in this many groups
_COSINE_OFFSET = 0.008  # Nichol and Dhariwal 2021, arXiv 2102.09672, equation 17
_SMALLEST_KEEP = 0.001  # no single level drops more of the signal than 1 - this
_LINEAR_BETAS = (1e-4, 0.02)  # DDPM, section 4, for 1,000 levels


@dataclass(frozen=True)
class NoiseSchedule:
    """`signal` (levels,): the share a_t of the signal's energy left at level t, falling, float32 on the CPU."""

    signal: Tensor

    @classmethod
    def make(cls, kind: Literal["cosine", "linear"] = "cosine", levels: int = 200) -> NoiseSchedule:
        """ "cosine" (arXiv 2102.09672) or DDPM's "linear", stretched to `levels` levels."""
        if levels < 2:
            raise ValueError(f"levels must be at least 2, got {levels}. 200 is enough for small images.")
        if kind == "cosine":
            at = (torch.arange(levels + 1, dtype=torch.float64) / levels + _COSINE_OFFSET) / (1 + _COSINE_OFFSET)
            left = torch.cos(at * math.pi / 2).square()
            keep = (left[1:] / left[:-1]).clamp_min(_SMALLEST_KEEP)
        elif kind == "linear":
            first, last = (1000 / levels * beta for beta in _LINEAR_BETAS)
            keep = (1 - torch.linspace(first, last, levels, dtype=torch.float64)).clamp_min(_SMALLEST_KEEP)
        else:
            raise ValueError(f'kind must be "cosine" or "linear", got {kind!r}.')
        return cls(keep.cumprod(0).float())

    @property
    def levels(self) -> int:
        return len(self.signal)

    def mix(self, images: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """x_t (batch, 1, side, side) from x_0 and noise of that shape and `level` (batch,)."""
        signal = self.signal.to(images)[level].reshape(-1, 1, 1, 1)
        return signal.sqrt() * images + (1 - signal).sqrt() * noise


class UNet(nn.Module):
    """(batch, 1, side, side) noisy images and (batch,) levels -> the noise in them, of the same shape.

    One residual block a level on the way down and up, one in the middle; `side` must be divisible by 2 to the number
    of levels less one, and `channels` by 8. 3x3 kernels throughout, 1x1 where a block changes its width.
    """

    def __init__(self, channels: tuple[int, ...] = (32, 64), *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not channels or any(width < GROUPS or width % GROUPS for width in channels):
            raise ShapeError(f"channels must be multiples of {GROUPS}, got {channels}. (32, 64) suits 8x8 images.")
        self.channels = tuple(channels)
        self.time_features = 4 * channels[0]
        self.time = nn.Sequential(
            nn.Linear(channels[0], self.time_features), nn.SiLU(), nn.Linear(self.time_features, self.time_features)
        )
        self.first = nn.Conv2d(1, channels[0], 3, padding=1)
        befores = (channels[0], *channels[:-1])
        self.down = nn.ModuleList(_Block(b, c, self.time_features) for b, c in zip(befores, channels, strict=True))
        self.smaller = nn.ModuleList(nn.Conv2d(c, c, 3, stride=2, padding=1) for c in channels[:-1])
        self.middle = _Block(channels[-1], channels[-1], self.time_features)
        self.up = nn.ModuleList(
            _Block(2 * c, b, self.time_features) for b, c in reversed(list(zip(befores, channels, strict=True)))
        )
        self.larger = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for c in reversed(channels[:-1]))
        self.norm = nn.GroupNorm(GROUPS, channels[0])
        self.last = nn.Conv2d(channels[0], 1, 3, padding=1)
        _initialise(self, generator)

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        scale = 2 ** (len(self.channels) - 1)
        if images.ndim != 4 or images.shape[1] != 1 or images.shape[2] % scale or images.shape[3] % scale:
            raise ShapeError(
                f"images must be (batch, 1, side, side) with sides divisible by {scale}, got {tuple(images.shape)}. "
                "Pad them, or use fewer channels entries."
            )
        time = self.time(level_features(level, self.channels[0]).to(images.dtype))  # (batch, time_features)
        x = self.first(images)
        kept = []
        for index, block in enumerate(self.down):
            x = block(x, time)  # (batch, channels[index], side / 2^index, ...)
            kept.append(x)
            if index < len(self.smaller):
                x = self.smaller[index](x)
        x = self.middle(x, time)
        for index, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], dim=1), time)
            if index < len(self.larger):
                x = self.larger[index](functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        noise: Tensor = self.last(functional.silu(self.norm(x)))
        return noise

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


class _Block(nn.Module):
    """Residual block (batch, before, s, s) -> (batch, after, s, s); the level shifts every channel."""

    def __init__(self, before: int, after: int, time_features: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, before), nn.Conv2d(before, after, 3, padding=1)
        self.shift = nn.Linear(time_features, after)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x))) + self.shift(functional.silu(time))[:, :, None, None]
        h = self.conv2(functional.silu(self.norm2(h)))
        out: Tensor = self.skip(x) + h
        return out


def level_features(level: Tensor, features: int) -> Tensor:
    """(batch,) -> (batch, features): sines and cosines at wavelengths from 2 pi to 10,000 (transformer positions)."""
    half = features // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, device=level.device) / half)
    angles = level[:, None].float() * rates  # (batch, features / 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def noise_loss(
    model: Callable[[Tensor, Tensor], Tensor], schedule: NoiseSchedule, images: Tensor, generator: torch.Generator
) -> Tensor:
    """Mean squared error of the told noise, at a level drawn for every image (DDPM, algorithm 1). 1 is knowing nothing.

    Level and noise come from `generator`, a CPU generator: the same draws on every device.
    """
    level = torch.randint(schedule.levels, (len(images),), generator=generator).to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images)
    return functional.mse_loss(model(schedule.mix(images, noise, level), level), noise)


@torch.no_grad()
def sample(
    model: nn.Module, schedule: NoiseSchedule, count: int, side: int, generator: torch.Generator, *, steps: int = 25
) -> Tensor:
    """`count` images (count, 1, side, side) in [-1, 1], from noise by `steps` evenly spaced levels.

    The CPU `generator` draws the start and nothing else: the same generator state gives the same images.
    """
    if not 1 <= steps <= schedule.levels:
        raise ValueError(f"steps must be from 1 to the schedule's {schedule.levels} levels, got {steps}.")
    parameter = next(model.parameters())
    x = torch.randn(count, 1, side, side, generator=generator).to(parameter)
    path = torch.linspace(schedule.levels - 1, 0, steps).round().long().tolist()
    was_training = model.training
    model.eval()
    try:
        for index, at in enumerate(path):
            signal = float(schedule.signal[at])
            following = float(schedule.signal[path[index + 1]]) if index + 1 < len(path) else 1.0
            noise = model(x, torch.full((count,), at, device=x.device))
            clean = ((x - math.sqrt(1 - signal) * noise) / math.sqrt(signal)).clamp(-1, 1)
            noise = (x - math.sqrt(signal) * clean) / math.sqrt(1 - signal)
            x = math.sqrt(following) * clean + math.sqrt(1 - following) * noise
    finally:
        model.train(was_training)
    return x


@torch.no_grad()
def _initialise(model: nn.Module, generator: torch.Generator | None) -> None:
    """torch's own start, drawn from `generator`; the last convolution is zero, so that training starts at loss 1."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            for parameter in (module.weight, module.bias):
                if parameter is not None:
                    parameter.uniform_(-bound, bound, generator=generator)
    if isinstance(model, UNet):
        for parameter in model.last.parameters():
            parameter.zero_()
