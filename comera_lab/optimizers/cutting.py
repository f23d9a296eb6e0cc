"""Optimizer state of a parameter that loses rows, columns or channels: cut with it, so that training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers.projection import transfer_moments
from comera_lab.optimizers.quantized import new_moment, read_moment, write_moment
from comera_lab.optimizers.subspaces import MATRIX, Subspace, bases_of, subspace_of


def cut_state(
    state: Mapping[str, Any], shape: tuple[int, ...], kept: Mapping[int, Tensor], *, bits: int
) -> dict[str, Any]:
    """State for a parameter of `shape` of which, along each dimension d in `kept`, only the entries kept[d] stay.

    Whole moments are cut. A basis is cut and made orthonormal again, no wider than what is left of its side, and
    the moments are carried over to it. Codes are read, cut and written anew. Where another side of a matrix becomes
    the smaller one there is no basis to go on with: the state is then empty, as before the first step.
    """
    size = {dim: len(kept[dim]) if dim in kept else length for dim, length in enumerate(shape)}
    subspace = subspace_of(state)
    if subspace is MATRIX and (shape[0] >= shape[1]) != (size[0] >= size[1]):
        return {}
    axes = _axes(shape, subspace)
    low = shape
    cut: dict[str, Any] = {key: value.clone() for key, value in state.items() if key == "step"}
    old: dict[int, Tensor] = {}
    new: dict[int, Tensor] = {}
    if subspace is not None:
        bases = bases_of(state, subspace)
        low = subspace.low_shape(shape, tuple(basis.shape[1] for basis in bases))
        projected = [axes[-1]] if subspace is MATRIX else list(axes[:2])
        for key, dim, basis in zip(subspace.keys, projected, bases, strict=True):
            cut[key] = basis.clone()
            if dim in kept:
                old[dim] = basis.index_select(0, kept[dim])
                new[dim] = torch.linalg.qr(old[dim].to(torch.promote_types(basis.dtype, torch.float32))).Q
                cut[key] = new[dim].to(basis.dtype)
        kept = {dim: index for dim, index in kept.items() if dim not in projected}
    for name in _moments(state, subspace):
        direct = state.get(name)
        value = read_moment(dict(state), name, low if direct is None else direct.shape)
        for axis, dim in enumerate(axes):
            if value.shape[axis] == 1 and low[axis] != 1:
                continue  # a mean over this axis: nothing to cut
            if dim in kept:
                value = value.index_select(axis, kept[dim])
            elif dim in old:
                turned = value.movedim(axis, -1)
                moved = transfer_moments(turned, turned, old[dim], new[dim])[name.endswith("_sq")]
                assert moved is not None
                value = moved.movedim(-1, axis)
        _store(cut, name, value.contiguous(), bits if direct is None else 32)
    return cut


def _store(state: dict[str, Any], name: str, value: Tensor, bits: int) -> None:
    new_moment(state, name, tuple(value.shape), bits=bits, dtype=value.dtype, device=value.device)
    write_moment(state, name, value)


def _axes(shape: tuple[int, ...], subspace: Subspace | None) -> list[int]:
    """For each axis of the moments, the dimension of the parameter that it belongs to."""
    if subspace is not MATRIX:
        return list(range(len(shape)))
    return [0, 1] if shape[0] >= shape[1] else [1, 0]


def _moments(state: Mapping[str, Any], subspace: Subspace | None) -> list[str]:
    others = {"step", *(subspace.keys if subspace is not None else ())}
    names = [key for key in state if key not in others and not key.endswith("_scales")]
    return [name.removesuffix("_codes") for name in names]
