"""What the optimizer tests share: small settings that project every matrix, and gradients set by hand."""

from __future__ import annotations

import torch
from torch import nn

from comera_lab.optimizers import COAPAdafactor, COAPAdamW

# Small, busy and in step with a parameter's own counter, so that a test can say when a basis changes.
SMALL = {"rank": 4, "plain_up_to": 0, "update_interval": 5, "refresh_factor": 2, "stagger": False}

# Every kind of state that a checkpoint has to carry
KINDS = {
    "adamw": lambda params, **extra: COAPAdamW(params, lr=1e-2, **{**SMALL, **extra}),
    "adamw-8bit": lambda params, **extra: COAPAdamW(params, lr=1e-2, bits=8, **{**SMALL, "rank": 32, **extra}),
    "adafactor": lambda params, **extra: COAPAdafactor(params, lr=1e-2, **{**SMALL, **extra}),
    "adafactor-beta1-8bit": lambda params, **extra: COAPAdafactor(
        params, lr=1e-2, beta1=0.9, bits=8, **{**SMALL, "rank": 32, **extra}
    ),
}


class Small(nn.Module):
    """A convolution, a linear layer whose moments reach 4,096 elements at rank 32, and a bias."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(4, 16, 3)
            self.linear = nn.Linear(64, 144)
            self.head = nn.Linear(144, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.linear(self.conv(x).flatten(1))))


def train(model, optimizer, steps, start=0):
    """Steps on batches that depend on the step number alone; the last loss, NaN without a step."""
    loss = torch.tensor(float("nan"))
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, 4, 4, generator=draw).to(dtype)
        y = torch.randint(0, 5, (8,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def step_with(parameter, gradient, optimizer):
    """One step of the optimizer with this gradient."""
    parameter.grad = gradient.clone()
    optimizer.step()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def tensors_of(state):
    return {
        (number, key): value
        for number, one in state["state"].items()
        for key, value in one.items()
        if isinstance(value, torch.Tensor)
    }


def same_state(one, two):
    first, second = tensors_of(one), tensors_of(two)
    return first.keys() == second.keys() and all(
        value.dtype == second[key].dtype and torch.equal(value, second[key]) for key, value in first.items()
    )
