"""Models of the transformers library: made from a configuration, saved and loaded with cores in them, planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from comera_lab.layers import load_model, save_model, tensorize
from comera_lab.models.planned import TABLE_ROWS, PlannedModel, token_inputs
from comera_lab.runtime import require

_WHY = "Hugging Face models"


def save_pretrained(model: Any, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, cores and gates included; nothing else is needed to load them."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(str(folder))
    save_model(model, folder)


def load_pretrained(folder: str | Path) -> Any:
    """The model that `save_pretrained` wrote, offline. Raises FileNotFoundError and ValueError as `load_model`."""
    config = read_config(Path(folder) / "config.json")
    return load_model(_model_class(config)(config), folder)


def read_config(path: str | Path) -> Any:
    """The configuration in a `config.json`, or in a folder with one. Raises FileNotFoundError or ValueError."""
    transformers = require("transformers", _WHY)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}. Give a model's name or the path of a config.json.")
    try:
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} must be the config.json of a transformers model: {error}") from error


def planned_from_config(path: str | Path) -> PlannedModel:
    """The planner's entry for a `config.json`: its architecture, or a language model, built on the meta device.

    Tables of at least `TABLE_ROWS` rows and all linear layers but the head become cores; a tied head stays tied.
    """
    config = read_config(path)
    cls = _model_class(config)
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1024

    def build(rank: int | None, blocks: int | None) -> nn.Module:
        changed = type(config)(**{**config.to_dict(), config.attribute_map.get(_LAYERS, _LAYERS): blocks})
        model = cls(changed)
        if rank is not None:
            tables = [
                n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.num_embeddings >= TABLE_ROWS
            ]
            sizes = {m.weight.shape for m in model.modules() if isinstance(m, nn.Embedding)}
            heads = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight.shape in sizes]
            tensorize(model, rank, exclude=heads, embeddings=tables, init="random")
        return _WithLoss(model)

    return PlannedModel(
        name=f"{cls.__name__} of {Path(path).name}",
        build=build,
        inputs=token_inputs,
        loss=_same,
        blocks=config.num_hidden_layers,
        longest=longest,
        sequence=min(256, longest),
        batch=16,
    )


_LAYERS = "num_hidden_layers"


class _WithLoss(nn.Module):
    """ids, labels (rows, tokens) -> the loss that the model makes itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def _same(loss: Tensor) -> Tensor:
    return loss


def _model_class(config: Any) -> Any:
    transformers = require("transformers", _WHY)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    if named and named[0] is not None:
        return named[0]
    for automatic in ("MODEL_FOR_MASKED_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"):
        mapping = getattr(transformers, automatic)
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"config must name its architecture or be that of a language model, got {type(config).__name__}. "
        'Add "architectures": ["BertForMaskedLM"], say.'
    )
