"""Really cut what training has closed: smaller cores, smaller optimizer state, the same function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comera_lab.cores import apply_gates
from comera_lab.layers.base import TTModule
from comera_lab.layers.tensorize import tt_layers


@dataclass(frozen=True)
class CompactReport:
    """Core elements before and after, and the layers that were left with a rank-1 zero train: bias or zeros only."""

    before: int
    after: int
    removed: tuple[str, ...]


def compact(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> CompactReport:
    """Slice dead ranks out of all cores, in place, and out of the optimizer's state with them.

    Outputs stay the same: what is cut was multiplied by 0. Cores and gates become new, smaller Parameters; the
    optimizer gets them in the place of the old ones, every state tensor of a core's or gate's own shape is sliced
    alike, so training goes on as if nothing had happened. An optimizer with a method `cut_state(parameter, kept)`
    cuts projected and 8-bit state itself. Gates stay and may close further. A layer with a dead bond keeps a rank-1
    train of zeros. `optimizer` None is for inference.

    Raises ValueError, changing nothing, when there are no gates, when the optimizer holds none of the cores,
    or when it keeps state of another shape for one of them and cannot cut it.
    """
    layers = {name: layer for name, layer in tt_layers(model).items() if len(layer.gates)}
    if not layers:
        raise ValueError(
            "compact needs tensor-train layers with gates, got none. Call layer.add_gates() before training."
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "compact must get the inner model, got one wrapped in DistributedDataParallel, which would go on with "
            "the old cores. Call compact(model.module, optimizer) in every process, then wrap it again."
        )
    if optimizer is not None:
        _check_optimizer(layers, optimizer)
    before = sum(layer.shape.params for layer in layers.values())
    removed = []
    for name, layer in layers.items():
        ranks = layer.live_ranks
        if not all(ranks):
            removed.append(name)
        if ranks != layer.shape.ranks:
            _cut(layer, optimizer)
    return CompactReport(before, sum(layer.shape.params for layer in layers.values()), tuple(removed))


def _cut(layer: TTModule, optimizer: torch.optim.Optimizer | None) -> None:
    with torch.no_grad():
        keep = [(gate != 0).nonzero().flatten() for gate in layer.effective_gates()]
    dead = not all(len(kept) for kept in keep)
    if dead:
        keep = [kept.new_zeros(1) for kept in keep]
    ends = [torch.arange(1, device=keep[0].device), *keep, torch.arange(1, device=keep[0].device)]

    for k in range(len(layer.cores)):
        layer.cores[k] = _replace(layer.cores[k], {0: ends[k], layer.cores[k].ndim - 1: ends[k + 1]}, optimizer)
    for k in range(len(layer.gates)):
        layer.gates[k] = _replace(layer.gates[k], {0: keep[k]}, optimizer)
    if dead:
        with torch.no_grad():
            layer.cores[0].zero_()
    layer.shape = layer.shape.with_ranks((1, *(len(kept) for kept in keep), 1))


def _replace(old: nn.Parameter, kept: Mapping[int, Tensor], optimizer: torch.optim.Optimizer | None) -> nn.Parameter:
    """A Parameter of the entries kept[d] along each dimension d, in the optimizer's groups and state too."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, index in kept.items():
            tensor = tensor.index_select(dim, index)
        return tensor.contiguous()

    new = nn.Parameter(cut(old.detach()), requires_grad=old.requires_grad)
    if old.grad is not None:
        new.grad = cut(old.grad)
    if optimizer is None:
        return new
    if old in optimizer.state:
        cut_state = getattr(optimizer, "cut_state", None)
        state = optimizer.state[old] if cut_state is None else cut_state(old, kept)
        del optimizer.state[old]
        optimizer.state[new] = {
            key: cut(value) if cut_state is None and torch.is_tensor(value) and value.shape == old.shape else value
            for key, value in state.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    return new


def _check_optimizer(layers: dict[str, TTModule], optimizer: torch.optim.Optimizer) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, layer in layers.items():
        for parameter in (*layer.cores, *layer.gates):
            if parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"the optimizer must hold the cores and gates of the model, got one without those of {name!r}. "
                    "Pass the optimizer that trains this model, or none for inference."
                )
            if hasattr(optimizer, "cut_state"):
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.numel() > 1 and value.shape != parameter.shape:
                    raise ValueError(
                        f"state {key!r} of {name!r} must have the shape {tuple(parameter.shape)} of its parameter "
                        f"to be sliced, got {tuple(value.shape)}. Keep cores out of projected groups."
                    )


def fold_gates(layer: TTModule) -> None:
    """Multiply the gates of a layer into its cores and drop them; the function stays the same."""
    with torch.no_grad():
        for core, new in zip(layer.cores, apply_gates(list(layer.cores), layer.effective_gates()), strict=True):
            core.copy_(new)
    layer.gates = nn.ParameterList()
