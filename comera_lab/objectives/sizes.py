"""How big a model is at its live ranks: exact counts, and the differentiable surrogate that gates can feel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.layers import TTModule, tt_layers


@dataclass(frozen=True)
class ModelSize:
    """Exact sizes of a model at its live ranks. `total` = `cores` + `dense`; bytes follow the parameter dtypes."""

    cores: int
    dense: int
    dense_twin: int
    tensorised_dense: int
    core_bytes: int
    dense_bytes: int
    removed: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.cores + self.dense

    @property
    def total_bytes(self) -> int:
        return self.core_bytes + self.dense_bytes

    @property
    def total_ratio(self) -> float:
        """Whole dense twin over whole model: what "43x to 80x" of the paper counts."""
        return self.dense_twin / self.total

    @property
    def tensorised_ratio(self) -> float:
        """Tensorised weights alone, dense over cores: what "361x" of the paper counts. Infinite when all are gone."""
        return self.tensorised_dense / self.cores if self.cores else math.inf

    def __str__(self) -> str:
        rows = [
            ("whole model", self.total, self.total_bytes, f"{self.total_ratio:.1f}x smaller than its dense twin"),
            (
                "cores alone",
                self.cores,
                self.core_bytes,
                f"{self.tensorised_ratio:.1f}x smaller than what they replace",
            ),
            ("dense part", self.dense, self.dense_bytes, "the same in both"),
        ]
        lines = [
            f"{name:<12}{count:>12,} parameters {size / 2**20:>9.2f} MiB  {note}" for name, count, size, note in rows
        ]
        return "\n".join([*lines, *(f"{name}: every rank is 0, only its bias is left" for name in self.removed)])


def model_size(model: nn.Module) -> ModelSize:
    """Count cores at their live ranks, every mode of every core included, and all other parameters once.

    Gates are not counted: `compact` folds them into the cores. A layer with a dead bond counts 0 elements and
    is listed in `removed`.
    """
    layers = tt_layers(model)
    inside = {id(parameter) for layer in layers.values() for parameter in (*layer.cores, *layer.gates)}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    dense = sum(parameter.numel() for parameter in rest)
    tensorised = sum(layer.shape.dense_params for layer in layers.values())
    return ModelSize(
        cores=sum(layer.live_params for layer in layers.values()),
        dense=dense,
        dense_twin=dense + tensorised,
        tensorised_dense=tensorised,
        core_bytes=sum(layer.live_params * layer.cores[0].element_size() for layer in layers.values()),
        dense_bytes=sum(parameter.nbytes for parameter in rest),
        removed=tuple(name for name, layer in layers.items() if not layer.live_params),
    )


def gated_layers(model: nn.Module) -> dict[str, TTModule]:
    """The tensor-train layers that have gates. Raises ValueError when there are none."""
    layers = {name: layer for name, layer in tt_layers(model).items() if len(layer.gates)}
    if not layers:
        raise ValueError(
            "a size objective needs tensor-train layers with gates, got a model without any. "
            "Call layer.add_gates() on each of tt_layers(model).values()."
        )
    return layers


def dense_elements(layers: dict[str, TTModule]) -> int:
    return sum(layer.shape.dense_params for layer in layers.values())


@dataclass(frozen=True)
class _Bonds:
    """All bonds of some layers in one row: per core the places of its two bonds, place 0 being every closing 1."""

    left: Tensor
    right: Tensor
    modes: Tensor
    layer_of_core: Tensor
    bond_of_entry: Tensor
    count: int

    @classmethod
    def of(cls, layers: Iterable[TTModule], like: Tensor) -> _Bonds:
        # Kept for the next step: the shapes change only when a model is cut.
        return cls._of(tuple((layer.shape.modes, layer.shape.ranks) for layer in layers), like.dtype, like.device)

    @classmethod
    @lru_cache(maxsize=16)
    def _of(cls, shapes: tuple[tuple[Sequence[int], Sequence[int]], ...], dtype: Any, device: torch.device) -> _Bonds:
        left: list[int] = []
        right: list[int] = []
        modes: list[int] = []
        owner: list[int] = []
        entries: list[int] = []
        count = 0
        for number, (sizes, ranks) in enumerate(shapes):
            inner = ranks[1:-1]
            places = [0, *range(count + 1, count + 1 + len(inner)), 0]
            left += places[:-1]
            right += places[1:]
            modes += sizes
            owner += [number] * len(sizes)
            for rank in inner:
                entries += [count] * rank
                count += 1
        return cls(
            torch.tensor(left, device=device),
            torch.tensor(right, device=device),
            torch.tensor(modes, dtype=dtype, device=device),
            torch.tensor(owner, device=device),
            torch.tensor(entries, device=device),
            count,
        )

    def elements(self, entries: Tensor) -> Tensor:
        """(cores,): left rank x mode x right rank, where a rank is the sum of what its `entries` count for."""
        ranks = entries.new_zeros(self.count).index_add(0, self.bond_of_entry, entries)
        ranks = torch.cat([ranks.new_ones(1), ranks])
        return ranks[self.left] * self.modes * ranks[self.right]


def live_elements(layers: dict[str, TTModule]) -> Tensor:
    """Core elements at live ranks, as a 0-d float tensor made without leaving the device."""
    live = torch.cat([gate.detach() != 0 for layer in layers.values() for gate in layer.effective_gates()]).float()
    bonds = _Bonds.of(layers.values(), live)
    elements = bonds.elements(live)
    dead = elements.new_zeros(len(layers)).index_add(0, bonds.layer_of_core, (elements == 0).float())
    total: Tensor = (elements * (dead == 0)[bonds.layer_of_core]).sum()
    return total


def size_surrogate(model: nn.Module) -> Tensor:
    """sum over cores of ||g_{k-1}||_1 s_k ||g_k||_1, over the dense size of the gated layers: 0-d, differentiable.

    While all gates are 1 it is the true share of the dense size. CoMERA (arXiv 2405.14377) puts the l1 norm in
    the place of the count; the normalisation gives its weight the unit of the loss. Straight-through gates pay
    for dead entries too, which keeps those small; thresholded ones do not. Raises ValueError without gates.
    """
    layers = gated_layers(model)
    gates = [
        gate
        for layer in layers.values()
        for gate in (layer.effective_gates() if layer.gate_kind == "threshold" else layer.gates)
    ]
    flat = torch.cat(gates).abs()
    share: Tensor = _Bonds.of(layers.values(), flat).elements(flat).sum() / dense_elements(layers)
    return share


def core_decay(model: nn.Module) -> Tensor:
    """sum ||G_k||_F^2 over all cores: gates and cores count only as products, so cores could grow as gates shrink."""
    squares = [core.square().sum() for layer in tt_layers(model).values() for core in layer.cores]
    return torch.stack(squares).sum()
