"""Replace the matrices of a model by tensor trains and its tables by TT-matrices, and find those layers again."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera_lab.layers.base import TTModule
from comera_lab.layers.embedding import TTEmbedding
from comera_lab.layers.linear import TTLinear
from comera_lab.layers.tied import TiedHead

_START_STD = 0.02  # of a table that holds no numbers to take it from


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
    embeddings: Sequence[str] = (),
    init: str = "svd",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Replace the nn.Linear modules of `model`, in place, and return it (or the new root layer).

    Names are matched against shell patterns ("encoder.*"): included and not excluded. The Conv1D of GPT-2, a linear
    layer whose weight is stored transposed, counts as one. nn.Embedding modules are replaced where a pattern of
    `embeddings` matches; a head that is tied to such a table becomes a `TiedHead`, so that the tie is kept.

    `init="svd"` starts from the dense weights (by `rank` or `error`), "random" from fresh cores (by `rank`), tables
    with the spread they had. Layers that would not get smaller stay dense. A module used in several places is replaced
    by one layer in all of them. Raises ValueError when nothing matches or nothing gets smaller, for a weight that is
    tied otherwise, and for an embedding with max_norm.
    """
    if init not in ("svd", "random"):
        raise ValueError(f"init must be 'svd' or 'random', got {init!r}. Use 'svd' to start from trained weights.")
    if init == "random" and rank is None:
        raise ValueError("init='random' needs a rank, got rank=None. Give rank=8, or use init='svd'.")
    if rank is None and error is None:
        rank = 8
    owners = _owners(model)
    tables = _chosen_tables(model, embeddings, exclude)
    heads = _tied_heads(model, tables, owners)
    chosen = _chosen_linears(model, include, exclude, owners, set(heads))
    if not chosen and not tables:
        raise ValueError(
            f"no nn.Linear matches include={list(include)}, exclude={list(exclude)}. "
            f"The model has: {', '.join(_linears(model)) or 'no nn.Linear at all'}."
        )
    replacements: dict[nn.Module, nn.Module] = {}
    for module in dict.fromkeys([*tables.values(), *chosen.values()]):
        layer = _layer(module, rank if init == "random" else None, rank, error, order, generator)
        if layer.shape.params < layer.shape.dense_params:
            replacements[module] = layer.train(module.training)
    for head, table in heads.items():
        if table in replacements:
            replacement = replacements[table]
            assert isinstance(replacement, TTEmbedding)
            replacements[head] = TiedHead(replacement, head.bias).train(head.training)
    if not replacements:
        raise ValueError(
            f"no layer would get smaller at rank={rank}, error={error}: {', '.join([*tables, *chosen])}. "
            "Lower the rank, allow a larger error, or pick larger layers."
        )
    return _replaced(model, replacements)


def as_linear(module: nn.Module) -> nn.Linear | None:
    """The module as an nn.Linear that shares its numbers, None if it is none. GPT-2's Conv1D keeps (in, out)."""
    if type(module) is nn.Linear:
        return module
    weight = module._parameters.get("weight")
    if type(module).__name__ != "Conv1D" or not hasattr(module, "nf") or weight is None or weight.ndim != 2:
        return None
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias="bias" in module._parameters, device="meta")
    linear.weight = nn.Parameter(weight.detach().T)
    linear.bias = module._parameters.get("bias")  # type: ignore[assignment]
    return linear


def _layer(
    module: nn.Module,
    fresh: int | None,
    rank: int | None,
    error: float | None,
    order: int,
    generator: torch.Generator | None,
) -> TTLinear | TTEmbedding:
    if isinstance(module, nn.Embedding):
        if fresh is None:
            return TTEmbedding.from_embedding(module, rank, error=error, order=order)
        weight = module.weight
        return TTEmbedding(
            module.num_embeddings,
            module.embedding_dim,
            fresh,
            order=order,
            padding_idx=module.padding_idx,
            std=_START_STD if weight.is_meta else float(weight.detach().float().std()) or _START_STD,
            device=weight.device,
            dtype=weight.dtype,
            generator=generator,
        )
    linear = as_linear(module)
    assert linear is not None
    if fresh is None:
        return TTLinear.from_linear(linear, rank, error=error, order=order)
    return TTLinear(
        linear.in_features,
        linear.out_features,
        fresh,
        order=order,
        bias=linear.bias is not None,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
        generator=generator,
    )


def _replaced(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    if model in replacements:
        return replacements[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return model


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if as_linear(module) is not None}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _owners(model: nn.Module) -> dict[Tensor, dict[str, nn.Module]]:
    """Parameter -> the modules that hold it, by name."""
    owners: dict[Tensor, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, {})[name] = module
    return owners


def _chosen_tables(model: nn.Module, patterns: Sequence[str], exclude: Sequence[str]) -> dict[str, nn.Embedding]:
    tables = {name: module for name, module in model.named_modules() if type(module) is nn.Embedding}
    chosen = {name: table for name, table in tables.items() if _matches(name, patterns) and not _matches(name, exclude)}
    if patterns and not chosen:
        raise ValueError(
            f"no nn.Embedding matches embeddings={list(patterns)}, exclude={list(exclude)}. "
            f"The model has: {', '.join(tables) or 'no nn.Embedding at all'}."
        )
    for name, table in chosen.items():
        if table.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={table.max_norm}, and a table of cores has no rows to rescale. "
                f"Leave it dense with exclude=[{name!r}]."
            )
    return chosen


def _tied_heads(
    model: nn.Module, tables: dict[str, nn.Embedding], owners: dict[Tensor, dict[str, nn.Module]]
) -> dict[nn.Linear, nn.Embedding]:
    """The linear layers that share the weight of a chosen table."""
    heads = {}
    for name, table in tables.items():
        for other, module in owners[table.weight].items():
            if module is table:
                continue
            if type(module) is not nn.Linear:
                raise ValueError(
                    f"the table {name!r} is tied to {other!r}, a {type(module).__name__}; only a tie to an nn.Linear "
                    f"can be kept. Leave it dense with exclude=[{name!r}]."
                )
            heads[module] = table
    return heads


def _chosen_linears(
    model: nn.Module,
    include: Sequence[str],
    exclude: Sequence[str],
    owners: dict[Tensor, dict[str, nn.Module]],
    heads: set[nn.Linear],
) -> dict[str, nn.Module]:
    chosen = {
        name: module
        for name, module in _linears(model).items()
        if _matches(name, include) and not _matches(name, exclude) and module not in heads
    }
    for name, module in chosen.items():
        held = list(owners[module.weight])  # type: ignore[index]
        if len(held) > 1:
            raise ValueError(
                f"the weight of {name!r} is tied to {held}; replacing it would untie them. "
                f"Leave it dense with exclude=[{name!r}], or name its table in embeddings=[..], which keeps the tie."
            )
    return chosen
