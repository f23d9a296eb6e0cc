"""Whole models with cores in them as one safetensors file, and back into a fresh dense model of the same kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from comera_lab.layers.base import TTModule
from comera_lab.layers.embedding import TTEmbedding, TTEmbeddingBag
from comera_lab.layers.linear import TTLinear
from comera_lab.layers.tied import TiedHead
from comera_lab.runtime import require
from comera_lab.shapes import TTMShape, TTShape

MODEL_FORMAT = "comera_lab.model.1"
MODEL_FILE = "model.safetensors"


def save_model(model: nn.Module, folder: str | Path) -> Path:
    """Write `model.safetensors` into `folder`: every tensor once, and the shapes of all layers of cores.

    Modules of cores that stand in several places are noted as one. Returns the path.
    """
    files = require("safetensors.torch", "saving models")
    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and key in first:
            same[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().contiguous()
    path = Path(folder) / MODEL_FILE
    about = {"format": MODEL_FORMAT, "layers": json.dumps(_described(model)), "same": json.dumps(same)}
    files.save_file(tensors, str(path), about)
    return path


def load_model(model: nn.Module, folder: str | Path) -> nn.Module:
    """Put what `save_model` wrote into `model`, a fresh one of the same kind, dense or not; it is changed in place.

    Its layers are replaced by those of the file. Raises FileNotFoundError without a file, ValueError for a file of
    another kind or another model; the model then is as it was.
    """
    path = Path(folder) / MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}. Give the folder that save_model wrote to.")
    files = require("safetensors", "loading models")
    with files.safe_open(str(path), framework="pt") as file:
        about = file.metadata() or {}
        if about.get("format") != MODEL_FORMAT:
            raise ValueError(
                f"{path} must be a {MODEL_FORMAT} file, got format {about.get('format')!r}. Use save_model."
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    tensors |= {name: tensors[other] for name, other in json.loads(about["same"]).items()}
    described = json.loads(about["layers"])
    missing = [name for name in described if not _has(model, name)]
    if missing:
        raise ValueError(f"{path} has layers that this model has not: {', '.join(missing)}. Build the same model.")
    before = {name: model.get_submodule(name) for name in described}
    _put_all(model, _built(described, model, tensors))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != got:
        _put_all(model, before)
        differ = sorted(set(wanted.items()) ^ set(got.items()))
        raise ValueError(f"{path} is of another model: {differ[0][0]} differs. Build the same model.")
    model.load_state_dict(tensors)
    return model


def _described(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Name -> what it takes to make the layer; a second name of the same module says {"as": first name}."""
    names: dict[nn.Module, str] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, TTModule | TiedHead):
            continue
        if module in names:
            described[name] = {"as": names[module]}
            continue
        names[module] = name
        described[name] = {"kind": type(module).__name__, **_DESCRIBE[type(module)](module)}
        if isinstance(module, TTModule) and len(module.gates):
            described[name]["gates"] = [module.gate_kind, module.gate_threshold]
    for layer in described.values():
        if layer.get("kind") == "TiedHead":
            layer["table"] = names[layer["table"]]
    return described


def _linear(layer: TTLinear) -> dict[str, Any]:
    shape = layer.shape
    fields = (shape.in_modes, shape.out_modes, shape.ranks, shape.in_features, shape.out_features)
    return {"shape": fields, "bias": layer.bias is not None}


def _embedding(layer: TTEmbedding) -> dict[str, Any]:
    shape = layer.shape
    return {"shape": (shape.row_modes, shape.column_modes, shape.ranks, shape.rows, shape.columns),
            "padding_idx": layer.padding_idx}  # fmt: skip


def _bag(layer: TTEmbeddingBag) -> dict[str, Any]:
    return {**_embedding(layer), "mode": layer.mode, "include_last_offset": layer.include_last_offset}


_DESCRIBE: dict[type, Callable[[Any], dict[str, Any]]] = {
    TTLinear: _linear,
    TTEmbedding: _embedding,
    TTEmbeddingBag: _bag,
    TiedHead: lambda head: {"table": head.table, "bias": head.bias is not None},
}


def _built(described: dict[str, dict[str, Any]], model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, nn.Module]:
    """Empty layers by name, tables before the heads that read them."""
    layers: dict[str, nn.Module] = {}
    for name, about in sorted(described.items(), key=lambda item: ("table" in item[1]) + 2 * ("as" in item[1])):
        if "as" in about:
            layers[name] = layers[about["as"]]
        elif about["kind"] == "TiedHead":
            table = layers[about["table"]]
            assert isinstance(table, TTEmbedding)
            # a bias that another module has too stays shared with it
            old = model.get_submodule(name)._parameters.get("bias")
            layers[name] = TiedHead(table, old if about["bias"] else None)
        else:
            layers[name] = _layer(about, tensors[f"{name}.cores.0"])
        layers[name].train(model.get_submodule(name).training)
    return layers


def _layer(about: dict[str, Any], like: Tensor) -> TTModule:
    first, second, ranks, rows, columns = about["shape"]
    layer: TTModule
    if about["kind"] == "TTLinear":
        shape = TTShape(tuple(first), tuple(second), tuple(ranks), rows, columns)
        bias = like.new_empty(columns) if about["bias"] else None
        layer = TTLinear.from_cores([like.new_empty(size) for size in shape.core_shapes], shape, bias)
    else:
        table = TTMShape(tuple(first), tuple(second), tuple(ranks), rows, columns)
        cores = [like.new_empty(size) for size in table.core_shapes]
        layer = TTEmbedding.__new__(TTEmbedding if about["kind"] == "TTEmbedding" else TTEmbeddingBag)
        nn.Module.__init__(layer)
        layer._fill(table, cores, about["padding_idx"])
        if isinstance(layer, TTEmbeddingBag):
            layer._fill_bag(about["mode"], about["include_last_offset"])
    if "gates" in about:
        layer.add_gates(*about["gates"])
    return layer


def _has(model: nn.Module, name: str) -> bool:
    return name in dict(model.named_modules(remove_duplicate=False))


def _put_all(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
