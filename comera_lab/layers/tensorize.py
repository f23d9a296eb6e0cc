"""Replace the Linears of a model by tensor-train layers, and find those layers again."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera_lab.layers.base import TTModule
from comera_lab.layers.linear import TTLinear


def tt_layers(model: nn.Module) -> dict[str, TTModule]:
    """Every TTLinear and TTEmbedding of the model by its qualified name, shared ones once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TTModule)}


def tensorize(
    model: nn.Module,
    rank: int | None = None,
    *,
    error: float | None = None,
    order: int = 3,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    init: str = "svd",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Replace the nn.Linear modules of `model`, in place, and return it (or the new root layer).

    Names are matched against shell patterns ("encoder.*"): included and not excluded. `init="svd"` starts
    from the dense weights (by `rank` or `error`), "random" from fresh cores (by `rank`). Layers that would
    not get smaller stay dense. A module used in several places is replaced by one layer in all of them.
    Raises ValueError when nothing matches or nothing gets smaller, and for a weight tied to another module.
    """
    if init not in ("svd", "random"):
        raise ValueError(f"init must be 'svd' or 'random', got {init!r}. Use 'svd' to start from trained weights.")
    if init == "random" and rank is None:
        raise ValueError("init='random' needs a rank, got rank=None. Give rank=8, or use init='svd'.")
    if rank is None and error is None:
        rank = 8
    chosen = _matching(model, include, exclude)
    replacements: dict[nn.Module, TTLinear] = {}
    for linear in dict.fromkeys(chosen.values()):
        if init == "svd":
            layer = TTLinear.from_linear(linear, rank, error=error, order=order)
        else:
            layer = TTLinear(
                linear.in_features,
                linear.out_features,
                rank or 1,
                order=order,
                bias=linear.bias is not None,
                device=linear.weight.device,
                dtype=linear.weight.dtype,
                generator=generator,
            )
        if layer.shape.params < layer.shape.dense_params:
            replacements[linear] = layer.train(linear.training)
    if not replacements:
        raise ValueError(
            f"no layer would get smaller at rank={rank}, error={error}: {', '.join(chosen)}. "
            "Lower the rank, allow a larger error, or pick larger layers."
        )
    if model in replacements:
        return replacements[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return model


def _matching(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, nn.Linear]:
    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    chosen = {name: module for name, module in linears.items() if matches(name, include) and not matches(name, exclude)}
    if not chosen:
        raise ValueError(
            f"no nn.Linear matches include={list(include)}, exclude={list(exclude)}. "
            f"The model has: {', '.join(linears) or 'no nn.Linear at all'}."
        )
    owners: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(name)
    for name, module in chosen.items():
        if len(owners[module.weight]) > 1:
            raise ValueError(
                f"the weight of {name!r} is tied to {owners[module.weight]}; replacing it would untie them. "
                f"Leave it dense with exclude=[{name!r}]."
            )
    return chosen
