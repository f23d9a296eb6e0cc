"""Give layers other ranks without values: what a checkpoint needs that was saved after a cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from comera_lab.layers.tensorize import tt_layers
from comera_lab.shapes import ShapeError


def shapes_with_ranks(model: nn.Module, ranks: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the state_dict that `model` would have at these ranks (closing 1s included). Nothing is changed.

    Raises ShapeError where `ranks` has other layers than the model, or ranks that its modes do not allow.
    """
    layers = tt_layers(model)
    if set(layers) != set(ranks):
        raise ShapeError(
            f"ranks must be given for the layers {', '.join(layers)}, got {', '.join(ranks)}. Use the same model."
        )
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        wanted = layer.shape.with_ranks(tuple(ranks[name]))
        shapes |= {f"{prefix}cores.{k}": size for k, size in enumerate(wanted.core_shapes)}
        shapes |= {f"{prefix}gates.{k}": (wanted.ranks[k + 1],) for k in range(len(layer.gates))}
    return shapes


def resize(model: nn.Module, ranks: Mapping[str, Sequence[int]], optimizer: torch.optim.Optimizer) -> None:
    """Cores and gates of these ranks, all zeros, in the place of the old ones, in model and optimizer.

    The optimizer loses its state for what was replaced: load both afterwards. Raises as `shapes_with_ranks`.
    """
    shapes_with_ranks(model, ranks)
    for name, layer in tt_layers(model).items():
        shape = layer.shape.with_ranks(tuple(ranks[name]))
        if shape != layer.shape:
            _replace_all(layer.cores, shape.core_shapes, optimizer)
            _replace_all(layer.gates, [(rank,) for rank in shape.ranks[1:-1]], optimizer)
            layer.shape = shape


def _replace_all(held: nn.ParameterList, sizes: Sequence[tuple[int, ...]], optimizer: torch.optim.Optimizer) -> None:
    for k, old in enumerate(list(held)):
        new = nn.Parameter(old.detach().new_zeros(sizes[k]), requires_grad=old.requires_grad)
        held[k] = new
        optimizer.state.pop(old, None)
        for group in optimizer.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
