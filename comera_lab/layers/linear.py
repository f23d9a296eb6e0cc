"""Modules: Parameters, their start values, their text and their files. The mathematics is in `contraction`.

`TTLinear` stands where `nn.Linear` stood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.contraction import ContractionPlan, apply_cores, apply_cores_together, plan
from comera_lab.cores import (
    cores_to_matrix,
    from_tensorly,
    init_cores,
    matrix_to_cores,
    round_cores,
    to_tensorly,
)
from comera_lab.layers.base import TTModule
from comera_lab.runtime import require
from comera_lab.shapes import ShapeError, TTMShape, TTShape, ranks_for_budget

FILE_FORMAT = "comera_lab.TTLinear.1"


class TTLinear(TTModule):
    """y = x W^T + bias, W (out_features, in_features) held as a tensor train.

    x (..., in_features) -> (..., out_features). `rank` is one integer for every bond, or the full list with
    its closing 1s; ranks above the feasible bound are clipped and `self.shape.ranks` reports what is used.
    Modes are chosen by `order` (modes a side) or given; features that split badly are padded inside.
    Weights start Gaussian with the Glorot variance 2 / (in + out) of W, the bias uniform as in nn.Linear.
    `backend` as in `apply_cores`; the attribute may be set at any time.
    Raises ShapeError (a ValueError) for sizes that break a rule.
    """

    shape: TTShape
    bias: nn.Parameter | None
    backend: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int | Sequence[int] = 8,
        *,
        order: int = 3,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        shape = TTShape.for_features(in_features, out_features, rank, order, in_modes, out_modes)
        where = known_device(device)
        std = math.sqrt(2 / (shape.in_features + shape.out_features))
        cores = init_cores(shape, std, generator, where, dtype)
        bound = 1 / math.sqrt(shape.in_features)
        start = torch.empty(shape.out_features, device=where, dtype=dtype)
        self._fill(shape, cores, start.uniform_(-bound, bound, generator=generator) if bias else None)

    def _fill(self, shape: TTShape, cores: Iterable[Tensor], bias: Tensor | None) -> None:
        self._fill_cores(shape, cores)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))

    @classmethod
    def from_cores(cls, cores: Sequence[Tensor], shape: TTShape, bias: Tensor | None = None) -> TTLinear:
        """A layer with copies of these cores; their sizes must be those of `shape.core_shapes`."""
        sizes = [tuple(core.shape) for core in cores]
        if sizes != shape.core_shapes:
            raise ShapeError(
                f"cores must have the sizes {shape.core_shapes}, got {sizes}. Rebuild the shape or the cores."
            )
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._fill(shape, cores, bias)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rank: int | Sequence[int] | None = None,
        *,
        error: float | None = None,
        params: int | None = None,
        order: int = 3,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
    ) -> TTLinear:
        """TT-SVD of a trained layer, by exactly one of: rank, relative error of W, or core parameters at most.

        The error in W is at most sqrt(sum of squared dropped singular values over all unfoldings)
        (Oseledets 2011, theorem 2.2). The bias is copied; `linear` is left as it is.
        """
        if sum(choice is not None for choice in (rank, error, params)) != 1:
            raise ValueError(
                f"give exactly one of rank, error and params, got rank={rank}, error={error}, params={params}. "
                "For example error=0.01."
            )
        weight = linear.weight.detach()
        shape = TTShape.for_features(linear.in_features, linear.out_features, rank or 1, order, in_modes, out_modes)
        if params is not None:
            shape = shape.with_ranks(ranks_for_budget(shape.modes, params))
        cores = matrix_to_cores(weight, shape, error)
        shape = shape.with_ranks([1, *(core.shape[-1] for core in cores)])
        return cls.from_cores(cores, shape, linear.bias)

    @classmethod
    def from_tensorly(cls, tensor: Any, split: int | None = None, bias: Tensor | None = None) -> TTLinear:
        """From a tensorly TTTensor, the first `split` modes being inputs (default: half), or from a TTMatrix.

        A TTTensor keeps its cores. A TTMatrix (rows = outputs) pairs its modes otherwise, so it is converted
        through the dense matrix by an exact TT-SVD.
        """
        cores = from_tensorly(tensor)
        if cores[0].dim() == 3:
            modes = tuple(core.shape[1] for core in cores)
            split = len(modes) // 2 if split is None else split
            shape = TTShape(modes[:split], modes[split:], (1, *(core.shape[2] for core in cores)))
            return cls.from_cores(cores, shape, bias)
        table = TTMShape(
            tuple(core.shape[1] for core in cores),
            tuple(core.shape[2] for core in cores),
            (1, *(core.shape[3] for core in cores)),
        )
        full = TTShape(table.column_modes, table.row_modes, (1,) * (2 * len(cores) + 1))
        exact = matrix_to_cores(cores_to_matrix(cores, table), full.with_ranks(max(full.max_ranks)))
        exact = round_cores(exact, error=torch.finfo(exact[0].dtype).eps * len(exact))
        return cls.from_cores(exact, full.with_ranks([1, *(core.shape[2] for core in exact)]), bias)

    def to_tensorly(self) -> Any:
        """The gated cores as a tensorly TTTensor with modes in_modes + out_modes (a copy)."""
        return to_tensorly(self.gated_cores())

    def forward(self, x: Tensor) -> Tensor:
        return apply_cores(x, self.gated_cores(), self.shape, self.bias, backend=self.backend)

    def to_dense(self) -> Tensor:
        """W (out_features, in_features), the matrix that forward applies. Differentiable."""
        return cores_to_matrix(self.gated_cores(), self.shape)

    def to_linear(self) -> nn.Linear:
        """A dense nn.Linear with the same function, detached from this layer."""
        weight = self.to_dense().detach()
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear

    def plan(self, rows: int) -> ContractionPlan:
        """How a batch of `rows` rows is contracted, as a table that can be printed."""
        return plan(self.shape, rows)

    @property
    def in_features(self) -> int:
        return self.shape.in_features

    @property
    def out_features(self) -> int:
        return self.shape.out_features

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"TTLinear({shape.in_features} -> {shape.out_features}, modes {shape.in_modes} | {shape.out_modes}, "
            f"ranks {shape.ranks}, bias={self.bias is not None}, {shape.params:,} core parameters, "
            f"{shape.compression:.1f}x fewer than dense)"
        )

    def save(self, path: str | Path) -> None:
        """Write cores, gates, bias and shape as one safetensors file."""
        tensors = {f"core_{k}": core.detach().contiguous() for k, core in enumerate(self.cores)}
        tensors |= {f"gate_{k}": gate.detach().contiguous() for k, gate in enumerate(self.gates)}
        if self.bias is not None:
            tensors["bias"] = self.bias.detach().contiguous()
        shape = self.shape
        fields = (shape.in_modes, shape.out_modes, shape.ranks, shape.in_features, shape.out_features)
        about = {"format": FILE_FORMAT, "shape": json.dumps(fields)}
        about["gates"] = json.dumps([self.gate_kind, self.gate_threshold] if len(self.gates) else None)
        files = require("safetensors.torch", "saving layers")
        files.save_file(tensors, str(path), about)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> TTLinear:
        """Read what `save` wrote. Raises ValueError for a file of another kind, FileNotFoundError for none."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file at {path}. Give the path that TTLinear.save wrote.")
        files = require("safetensors", "loading layers")
        with files.safe_open(str(path), framework="pt", device=str(known_device(device))) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FILE_FORMAT:
                raise ValueError(
                    f"{path} must be a {FILE_FORMAT} file, got format {metadata.get('format')!r}. Use TTLinear.save."
                )
            in_modes, out_modes, ranks, in_features, out_features = json.loads(metadata["shape"])
            shape = TTShape(tuple(in_modes), tuple(out_modes), tuple(ranks), in_features, out_features)
            cores = [file.get_tensor(f"core_{k}") for k in range(len(shape.modes))]
            bias = file.get_tensor("bias") if "bias" in file.keys() else None  # noqa: SIM118 (not a dict)
            layer = cls.from_cores(cores, shape, bias)
            if kind_and_threshold := json.loads(metadata["gates"]):
                layer.add_gates(*kind_and_threshold)
                layer.gates = nn.ParameterList([file.get_tensor(f"gate_{k}") for k in range(len(shape.ranks) - 2)])
        return layer


def forward_together(x: Tensor, layers: Sequence[TTLinear]) -> list[Tensor]:
    """[layer(x) for layer in layers], reading x once where there are many rows (forward hooks are not run)."""
    backends = {layer.backend for layer in layers}
    if len(backends) > 1:
        return [layer(x) for layer in layers]
    maps = [(layer.gated_cores(), layer.shape, layer.bias) for layer in layers]
    return apply_cores_together(x, maps, *backends)


def known_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, got {device!r}. Use 'cpu' or 'cuda'.") from None
