"""Low-rank adapters beside a frozen weight: LoRA, ReLoRA and LTE, the rivals of projected gradients.

All three are parametrizations of `weight` of an nn.Linear: the layer keeps its type and its forward, and
`layer.weight` is the sum of the frozen weight and the update. With `down` A (rank, in), `up` B (out, rank) and
scale s = alpha / rank:

    LoRA      W = W0 + s B A                                       Hu and others 2021, arXiv 2106.09685
    ReLoRA    LoRA; every so often W0 <- W0 + s B A and a new A, B  Lialin and others 2023, arXiv 2307.05695
    LTE       head h trains on W0 + s (B_h A_h - what of it was merged); a merge adds the mean of all heads to W0
              and leaves A_h, B_h as they are                      Huh and others 2024, arXiv 2402.16828

Left out: dropout on the way into A, which a parametrization of the weight cannot see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from comera_lab.shapes import ShapeError

Match = Callable[[str, nn.Linear], bool]


class LoRA(nn.Module):
    """weight (out, in) -> weight + alpha / rank * up @ down. It starts as the identity: `up` is zero, `down` is not.

    Were both zero, both gradients would be zero for ever. Raises ShapeError for a rank outside 1..min(out, in).
    """

    def __init__(
        self, weight: Tensor, rank: int, *, alpha: float = 32.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        _check(weight, rank, alpha)
        self.rank, self.scale = rank, alpha / rank
        self.down = nn.Parameter(_kaiming(weight, rank, generator))
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def update(self) -> Tensor:
        """(out, in), of rank `rank` at most."""
        return self.scale * self.up @ self.down

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.update()

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}"


class LTE(nn.Module):
    """weight (out, in) -> weight + the update of one head, or the mean over all heads while `head` is None.

    `down` (heads, rank, in) has orthogonal rows times sqrt(in / rank), `up` (heads, out, rank) is zero. The buffers
    `merged_down` and `merged_up` are what was merged last: without a reset, that part is in the weight already.
    """

    merged_down: Tensor
    merged_up: Tensor

    def __init__(
        self,
        weight: Tensor,
        rank: int,
        *,
        heads: int,
        alpha: float = 32.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check(weight, rank, alpha)
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}. One head with rare merges is LoRA.")
        self.rank, self.heads, self.scale = rank, heads, alpha / rank
        self.head: int | None = None
        self.down = nn.Parameter(torch.stack([_orthogonal(weight, rank, generator) for _ in range(heads)]))
        self.up = nn.Parameter(weight.new_zeros(heads, weight.shape[0], rank))
        self.register_buffer("merged_down", self.down.detach().clone())
        self.register_buffer("merged_up", self.up.detach().clone())

    def update(self) -> Tensor:
        """(out, in): what the selected head, or the mean of all, adds to what has been merged."""
        if self.head is not None:
            head = self.head
            return self.scale * (self.up[head] @ self.down[head] - self.merged_up[head] @ self.merged_down[head])
        difference = self.up @ self.down - self.merged_up @ self.merged_down  # (heads, out, in)
        return self.scale * difference.mean(0)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.update()

    def extra_repr(self) -> str:
        return f"rank={self.rank}, heads={self.heads}, scale={self.scale:g}"


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float = 32.0,
    match: Match | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, LoRA]:
    """Put a LoRA on every nn.Linear that `match(name, layer)` picks, all by default, and freeze their weights.

    Everything else trains on as before. Returns name -> adapter. ValueError where nothing matches, or where a weight
    has a parametrization.
    """
    return _add(model, lambda weight: LoRA(weight, rank, alpha=alpha, generator=generator), match)


def add_lte(
    model: nn.Module,
    rank: int,
    *,
    heads: int,
    alpha: float = 32.0,
    match: Match | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, LTE]:
    """Put an `LTE` with `heads` heads on every nn.Linear that `match` picks; otherwise as `add_lora`."""
    return _add(model, lambda weight: LTE(weight, rank, heads=heads, alpha=alpha, generator=generator), match)


def lte_backward(model: nn.Module, shard_losses: Sequence[Callable[[], Tensor]]) -> list[float]:
    """Backward pass of every head on its own shard of the batch: `shard_losses[h]()` is the loss of head h.

    Returns the losses. Gradients add up in `.grad`: each head's slice gets its own, other parameters the mean.
    """
    adapters = [adapter for _, adapter in _adapted(model, LTE)]
    for adapter in adapters:
        if len(shard_losses) != adapter.heads:
            raise ShapeError(
                f"there must be one shard for each of {adapter.heads} heads, got {len(shard_losses)}. "
                "Cut the batch into as many parts as there are heads."
            )
    private = {id(parameter) for adapter in adapters for parameter in adapter.parameters()}
    shared = [p for p in model.parameters() if p.requires_grad and id(p) not in private]
    before = [None if p.grad is None else p.grad.clone() for p in shared]
    losses = []
    try:
        for head, loss_of_shard in enumerate(shard_losses):
            for adapter in adapters:
                adapter.head = head
            loss = loss_of_shard()
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
    finally:
        for adapter in adapters:
            adapter.head = None
    for parameter, old in zip(shared, before, strict=True):
        if parameter.grad is not None:
            parameter.grad -= 0 if old is None else old
            parameter.grad /= len(shard_losses)
            parameter.grad += 0 if old is None else old
    return losses


@torch.no_grad()
def merge_heads(model: nn.Module) -> None:
    """LTE's merge: the mean update of the heads since the last merge goes into each frozen weight."""
    for layer, adapter in _adapted(model, LTE):
        _original(layer).add_(adapter.update())
        adapter.merged_down.copy_(adapter.down)
        adapter.merged_up.copy_(adapter.up)


@torch.no_grad()
def restart(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: float = 0.0,
    generator: torch.Generator | None = None,
) -> None:
    """ReLoRA's restart: every LoRA update goes into its frozen weight, `down` is drawn anew and `up` is zero.

    Of the optimizer's moments of `down` and `up` the share `keep` with the largest magnitudes stays (the paper keeps
    0.1 to 10 %), the rest becomes zero. The function that the model computes does not change.
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep must be a share from 0 to 1, got {keep}. The paper keeps 0.001 to 0.1.")
    for layer, adapter in _adapted(model, LoRA):
        weight = _original(layer)
        weight.add_(adapter.update())
        adapter.down.copy_(_kaiming(weight, adapter.rank, generator))
        adapter.up.zero_()
        if optimizer is not None:
            _prune_moments(optimizer, (adapter.down, adapter.up), keep)


def restart_factor(step: int, *, every: int, warmup: int, total: int, floor: float = 0.1) -> float:
    """Learning-rate factor of ReLoRA, for LambdaLR: a cosine over `total` steps, with a warm-up from 0 after each
    restart (every `every` steps) that ends on the cosine."""
    if not 0 <= warmup < every:
        raise ValueError(f"warmup must be from 0 to under every={every}, got {warmup}. Warm up in part of a cycle.")
    cosine = floor + (1 - floor) * (1 + math.cos(math.pi * min(step / total, 1.0))) / 2
    since = step % every
    return cosine * since / warmup if since < warmup else cosine


@torch.no_grad()
def remove_adapters(model: nn.Module) -> None:
    """Make plain layers again whose weights, trainable, hold the updates. ValueError where there is no adapter."""
    layers = [layer for layer, _ in _pairs(model, LoRA)] + [layer for layer, _ in _pairs(model, LTE)]
    if not layers:
        raise ValueError("the model must have adapters, got none. Add them first.")
    for layer in layers:
        _original(layer).requires_grad_(True)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


_Adapter = TypeVar("_Adapter", LoRA, LTE)


def _add(model: nn.Module, make: Callable[[Tensor], _Adapter], match: Match | None) -> dict[str, _Adapter]:
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and (match is None or match(name, layer))
    }
    if not layers:
        raise ValueError("match must pick at least one nn.Linear, got none. Print model.named_modules() for the names.")
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"{name}.weight has a parametrization, got a second. Call remove_adapters(model) first.")
    adapters = {name: make(layer.weight) for name, layer in layers.items()}  # all checks before any layer is touched
    for name, layer in layers.items():
        layer.weight.requires_grad_(False)
        parametrize.register_parametrization(layer, "weight", adapters[name])
    return adapters


def _adapted(model: nn.Module, kind: type[_Adapter]) -> list[tuple[nn.Linear, _Adapter]]:
    found = _pairs(model, kind)
    if not found:
        raise ValueError(f"the model must have {kind.__name__} adapters, got none. Add them first.")
    return found


def _pairs(model: nn.Module, kind: type[_Adapter]) -> list[tuple[nn.Linear, _Adapter]]:
    return [
        (layer, layer.parametrizations.weight[0])  # type: ignore[union-attr, index]
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
        and parametrize.is_parametrized(layer, "weight")
        and isinstance(layer.parametrizations.weight[0], kind)  # type: ignore[union-attr, index]
    ]


def _original(layer: nn.Linear) -> Tensor:
    weight: Tensor = layer.parametrizations.weight.original  # type: ignore[union-attr, assignment]
    return weight


def _kaiming(weight: Tensor, rank: int, generator: torch.Generator | None) -> Tensor:
    """(rank, in), uniform with variance 1 / (3 in), as nn.Linear draws its own weight."""
    bound = 1 / math.sqrt(weight.shape[1])
    draw = torch.rand(rank, weight.shape[1], generator=generator, dtype=torch.float64)
    start: Tensor = (2 * draw - 1) * bound
    return start.to(weight)


def _orthogonal(weight: Tensor, rank: int, generator: torch.Generator | None) -> Tensor:
    draw = torch.randn(weight.shape[1], rank, generator=generator, dtype=torch.float64)
    rows = torch.linalg.qr(draw).Q.T  # (rank, in)
    start: Tensor = rows * math.sqrt(weight.shape[1] / rank)
    return start.to(weight)


def _prune_moments(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], keep: float) -> None:
    for parameter in parameters:
        for moment in optimizer.state.get(parameter, {}).values():
            if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                _keep_largest(moment, keep)


def _keep_largest(moment: Tensor, keep: float) -> None:
    kept = round(keep * moment.numel())
    if kept == 0:
        moment.zero_()
    elif kept < moment.numel():
        smallest = torch.topk(moment.abs().flatten(), moment.numel() - kept, largest=False).indices
        moment.view(-1)[smallest] = 0


def _check(weight: Tensor, rank: int, alpha: float) -> None:
    limit = min(weight.shape)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= limit:
        raise ShapeError(
            f"rank must be a whole number from 1 to {limit} for a weight of shape {tuple(weight.shape)}, "
            f"got {rank!r}. Choose a smaller rank, or leave this layer out with match=."
        )
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be above 0, got {alpha!r}. 32 is usual.")
