"""Parameters of which each process holds a part: the DTensors of FSDP2 (`fully_shard`), split along one dimension.

A matrix keeps its moments where its rows are (the longer side), and its basis whole on every process. Where the split
is along the rows, a step needs no messages but one flag, and a renewal adds up (cols, rank) over the processes. Where
it is along the columns, the gradient is split anew before, and the update after: two messages of the size of the
matrix in every step. `fully_shard(..., shard_placement_fn=longest_side)` avoids them.
Other tensors are updated element by element, each process its part, as torch.optim does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers import projection
from comera_lab.optimizers.projection import Alignment
from comera_lab.optimizers.subspaces import MATRIX, Bases, Matrix, Refresh, Subspace


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor. Told by what it has: importing its class takes longer than the kit."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """The part of a DTensor that this process holds, on the same storage; any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """A DTensor put together from all processes, each of which must ask; any other tensor as it is."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def longest_side(shape: tuple[int, ...], processes: int) -> int:
    """The dimension to split a parameter along: the longest. Beyond the first, FSDP2 asks for equal parts, else 0."""
    longest = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
    return longest if longest and shape[longest] % processes == 0 else 0


class ShardedMatrix(Matrix):
    """`MATRIX` for one parameter of which every process has a part. All processes must call its methods in one order.

    `view` takes what this process has of the gradient, split along the rows (`rows_of`), or of the parameter.
    """

    def __init__(self, parameter: Any) -> None:
        self._mesh, self._shape = parameter.device_mesh, tuple(parameter.shape)
        self._split = parameter.placements[0].dim
        self._long = 0 if self._shape[0] >= self._shape[1] else 1

    def total(self, part: Tensor) -> Tensor:
        """The sum of `part` over the processes, bit for bit the same on each."""
        added = part.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(added, group=self._mesh.get_group())
        return added

    def rows_of(self, gradient: Any) -> Tensor:
        """What this process has of a gradient, split along its rows."""
        return local(gradient if self._split == self._long else gradient.redistribute(placements=self._along(True)))

    def is_zero(self, gradient: Tensor) -> bool:
        return not bool(self.total(torch.count_nonzero(gradient)))

    def low_shape(self, shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
        rows, count, number = shape[self._long], self._mesh.size(), self._mesh.get_local_rank()
        each = -(-rows // count)
        return max(0, min(each, rows - number * each)), ranks[0]

    def view(self, tensor: Tensor) -> Tensor:
        matrix = tensor[..., 0, 0] if tensor.ndim == 4 else tensor
        return matrix if self._long == 0 else matrix.mT

    def first(self, gradient: Tensor, ranks: tuple[int, ...], refresh: Refresh) -> Bases:
        make = projection.gram_basis if refresh == "svd" else projection.sketch_basis
        return (make(gradient, ranks[0], total=self.total),)

    def refreshed(self, gradient: Tensor, bases: Bases, refresh: Refresh) -> Bases:
        if refresh == "svd":
            return (projection.gram_basis(gradient, bases[0].shape[1], self.total),)
        return (projection.refresh_basis(gradient, bases[0], self.total),)

    def aligned(self, gradient: Tensor, bases: Bases, momentum: Tensor | None, kind: Alignment) -> Bases:
        return (projection.align_basis(gradient, bases[0], momentum, kind=kind, total=self.total),)

    def lift(self, low: Tensor, bases: Bases) -> Tensor:
        change = projection.lift(low, bases[0])
        if self._split == self._long:
            return change
        from torch.distributed.tensor import DTensor

        turned = change if self._long == 0 else change.mT.contiguous()
        size = torch.Size(self._shape[:2])
        there = DTensor.from_local(turned, self._mesh, self._along(True), shape=size, stride=(size[1], 1))
        return self.view(local(there.redistribute(placements=self._along(False))))

    def _along(self, rows: bool) -> list[Any]:
        from torch.distributed.tensor import Shard

        return [Shard(self._long if rows else self._split)]


def agreement(parameters: Iterable[Tensor]) -> Callable[[bool], bool] | None:
    """Whether any process says yes, as a question that all processes ask together; None where nothing is split."""
    split: Any = next((parameter for parameter in parameters if is_sharded(parameter)), None)
    if split is None:
        return None

    def any_says(yes: bool) -> bool:
        voice = torch.tensor(float(yes), device=local(split).device)
        torch.distributed.all_reduce(voice, group=split.device_mesh.get_group())
        return bool(voice)

    return any_says


def as_parts(parameter: Any, parts: dict[str, Tensor], subspace: Subspace | None) -> dict[str, Tensor]:
    """Moments of this process as the DTensors that optimizer states hold: split by rows, or as the parameter is."""
    if not is_sharded(parameter):
        return parts
    from torch.distributed.tensor import DTensor, Shard

    along, size = parameter.placements, parameter.shape
    if subspace is not None:
        along = [Shard(0)]
        size = torch.Size((max(size[:2]), next(iter(parts.values())).shape[1]))
    stride = torch.empty(size, device="meta").stride()
    mesh = parameter.device_mesh
    return {name: DTensor.from_local(p, mesh, along, shape=size, stride=stride) for name, p in parts.items()}


def subspace_on(subspace: Subspace | None, parameter: Tensor) -> Subspace | None:
    """`subspace` for a parameter as it lies: spread over processes where that is a DTensor.

    Raises ValueError for a convolution's two bases, and for DTensors that are not split along one dimension.
    """
    if not is_sharded(parameter) or subspace is None:
        return subspace
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    if len(placements) != 1 or not placements[0].is_shard():
        raise ValueError(
            f"a projected parameter must be split along one dimension by one group of processes, got {placements}. "
            "Use fully_shard with a mesh of one dimension."
        )
    if subspace is not MATRIX:
        raise ValueError(
            f"a convolution of shape {tuple(parameter.shape)} has two bases and must be whole to be projected, got a "
            "part of it. Use DDP, or give its group rank=None and rank_ratio=None."
        )
    return ShardedMatrix(parameter)


def spread_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Whole optimizer state of one parameter -> what this process keeps of it. No messages: each has the whole."""
    if not is_sharded(parameter):
        return dict(state)
    from torch.distributed.tensor import Shard, distribute_tensor

    place: Any = parameter
    kept = dict(state)
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        if isinstance(state.get(key), Tensor):
            along = [Shard(0)] if MATRIX.keys[0] in state else place.placements
            kept[key] = distribute_tensor(state[key], place.device_mesh, along, src_data_rank=None)
    return kept
