"""Where one kernel makes a whole projected Adam step, from the gradient to the weight: which matrices, and the call.

Imports triton only when a kernel is launched.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comera_lab.kernels import DTYPES
from comera_lab.kernels.matrix_group import MatrixGroup, adam_scalars
from comera_lab.optimizers.quantized import signed_map, unsigned_map
from comera_lab.optimizers.stacks import Slot
from comera_lab.optimizers.subspaces import MATRIX

FIRST, SECOND = MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight and its gradient, (rows, cols) views of the parameter's, and the optimizer state: "basis", moments."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Any]

    @property
    def coded(self) -> bool:
        """Whether the moments are 8-bit codes."""
        return f"{FIRST}_codes" in self.state


def why_not(matrix: Matrix) -> str | None:
    """Why the kernel cannot take this matrix, or None."""
    moments = torch.uint8 if matrix.coded else matrix.state[FIRST].dtype
    dtypes = {matrix.weight.dtype, matrix.state["basis"].dtype}
    if not dtypes <= set(DTYPES) or moments not in (torch.float32, torch.uint8):
        return f"the kernel takes weights and bases of {DTYPES} with fp32 or 8-bit moments, got {dtypes} and {moments}"
    if matrix.gradient.dtype != matrix.weight.dtype:
        return f"the kernel takes gradients of the weights' dtype, got {matrix.gradient.dtype}"
    return None if matrix.weight.numel() < 2**31 else f"a matrix of {matrix.weight.numel():,} elements is too large"


def likeness(matrix: Matrix) -> object:
    """Equal for matrices that one launch can step."""
    parts = (matrix.weight, matrix.gradient, matrix.state["basis"])
    return matrix.coded, tuple((tuple(part.shape), part.stride(), part.dtype, part.device) for part in parts)


def grouped(matrices: Sequence[Matrix]) -> MatrixGroup:
    """What the kernel takes, for matrices that are alike."""
    coded, device = matrices[0].coded, matrices[0].weight.device
    first, second = ([m.state[f"{name}_codes" if coded else name] for m in matrices] for name in MOMENTS)
    scales = [[m.state[f"{name}_scales"] for m in matrices] for name in MOMENTS] if coded else None
    return MatrixGroup(
        weights=[m.weight for m in matrices],
        gradients=[m.gradient for m in matrices],
        bases=[m.state["basis"] for m in matrices],
        exp_avgs=first,
        exp_avg_sqs=second,
        scales=None if scales is None else (scales[0], scales[1]),
        maps=(signed_map().to(device), unsigned_map().to(device)) if coded else None,
    )


def launch(group: MatrixGroup, scalars: Tensor) -> None:
    """The step itself, in place; `scalars` as of matrix_group.adam_scalars, on the device."""
    importlib.import_module("comera_lab.kernels.projected_adam").projected_adam(group, scalars)


def matrix_of(slot: Slot) -> Matrix:
    """A slot as the kernel sees it."""
    return Matrix(MATRIX.view(slot.weight), slot.gradient, slot.state)


def step_whole(group: dict[str, Any], slots: Iterable[Slot]) -> None:
    """One step of every slot of `group`, which `why_not` has nothing against, step counters included."""
    alike: dict[object, list[Slot]] = {}
    for slot in slots:
        alike.setdefault((slot.steps_done, likeness(matrix_of(slot))), []).append(slot)
    for same in alike.values():
        numbers = adam_scalars(
            same[0].steps_done + 1,
            float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            scale=group["scale"],
        )
        matrices = [matrix_of(slot) for slot in same]
        launch(grouped(matrices), torch.tensor(numbers, dtype=torch.float32, device=matrices[0].weight.device))
        for slot in same:
            slot.state["step"] += 1
