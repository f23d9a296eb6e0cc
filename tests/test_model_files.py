"""Tables and tied heads on cores, layers stored transposed, and whole models in one file; no other library needed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tolerances import RELATIVE, relative_error
from torch import Tensor, nn

from comera_lab.__main__ import main
from comera_lab.layers import (
    TiedHead,
    TTEmbedding,
    TTEmbeddingBag,
    TTLinear,
    load_model,
    save_model,
    tensorize,
    tt_layers,
)
from comera_lab.models.dlrm import DLRM, DLRMConfig

SINGLE = RELATIVE[torch.float32]


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Tied(nn.Module):
    """Words, one matrix used twice, and a head that is tied to the words."""

    def __init__(self, words: int = 120, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.first = nn.Linear(width, width)
        self.again = self.first
        self.head = nn.Linear(width, words)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(torch.relu(self.first(self.words(ids)))))


IDS = torch.arange(40).reshape(4, 10)


def test_a_layer_stored_transposed_keeps_its_function() -> None:
    model = nn.Sequential(Conv1D(36, 24))
    x = torch.randn(5, 24)
    with torch.no_grad():
        model[0].weight.copy_(TTLinear(24, 36, 3).to_dense().T)
    want = model(x)
    tensorize(model, rank=3)
    assert isinstance(model[0], TTLinear) and (model[0].in_features, model[0].out_features) == (24, 36)
    assert relative_error(model(x), want) < 10 * SINGLE


def test_a_tied_head_reads_the_cores_and_learns_them() -> None:
    model = Tied()
    with torch.no_grad():
        model.words.weight.copy_(TTEmbedding(120, 24, 3).to_dense())
    want = model(IDS)
    tensorize(model, rank=3, include=["nothing"], embeddings=["words"])
    assert isinstance(model.head, TiedHead) and model.head.table is model.words
    assert relative_error(model(IDS), want) < 10 * SINGLE
    assert sum(p.numel() for p in model.parameters()) == model.words.shape.params + 24 * 24 + 24 + 120
    assert not [name for name in model.state_dict() if name.startswith("head.") and name != "head.bias"]
    model.head(torch.randn(2, 24)).sum().backward()
    assert all(core.grad is not None and core.grad.any() for core in model.words.cores)


def test_C06_a_deep_copy_ties_its_head_to_its_own_table() -> None:
    model = tensorize(Tied(), rank=3, embeddings=["words"], exclude=["first", "again"])
    twin = copy.deepcopy(model)
    assert twin.head.table is twin.words is not model.words
    before = model(IDS)
    with torch.no_grad():
        twin.words.cores[0].zero_()
    assert torch.equal(model(IDS), before) and not torch.equal(twin(IDS), before)


def test_ties_that_cannot_be_kept_are_refused() -> None:
    model = Tied()
    with pytest.raises(ValueError, match=r"weight of 'head' is tied to \['words', 'head'\].*which keeps the tie"):
        tensorize(model, rank=3)
    model.other = nn.Embedding(120, 24)
    model.other.weight = model.words.weight
    with pytest.raises(ValueError, match="'words' is tied to 'other', a Embedding; only a tie to an nn.Linear"):
        tensorize(model, rank=3, embeddings=["words"])
    limited = nn.ModuleDict({"words": nn.Embedding(120, 24, max_norm=1.0)})
    with pytest.raises(ValueError, match=r"'words' has max_norm=1.0.*exclude=\['words'\]"):
        tensorize(limited, rank=3, embeddings=["*"])
    assert type(model.words) is nn.Embedding and type(model.first) is nn.Linear


def gated(model: nn.Module) -> nn.Module:
    for k, layer in enumerate(tt_layers(model).values()):
        layer.add_gates("threshold" if k else "straight-through", 0.02)
        with torch.no_grad():
            layer.gates[0].uniform_(0.5, 1.5)
    return model


def test_a_model_comes_back_with_ties_gates_and_shared_layers(tmp_path: Path) -> None:
    model = gated(tensorize(Tied(), rank=3, embeddings=["words"]))
    path = save_model(model, tmp_path / "new")
    assert path.stat().st_size < 4 * sum(p.numel() for p in model.parameters()) + 4096  # every tensor once
    loaded = load_model(Tied(), tmp_path / "new")
    assert loaded.first is loaded.again and loaded.head.table is loaded.words
    assert torch.equal(loaded(IDS), model(IDS))
    assert [(x.gate_kind, x.gate_threshold) for x in tt_layers(loaded).values()] == [
        (x.gate_kind, x.gate_threshold) for x in tt_layers(model).values()
    ]
    assert str(load_model(tensorize(Tied(), rank=2, embeddings=["words"]), tmp_path / "new")) == str(model)


def test_tables_and_bags_come_back(tmp_path: Path) -> None:
    model = nn.ModuleDict({"bag": TTEmbeddingBag(60, 12, 3, mode="sum", include_last_offset=True, padding_idx=2)})
    save_model(model, tmp_path)
    loaded = load_model(nn.ModuleDict({"bag": nn.EmbeddingBag(60, 12)}), tmp_path)
    assert repr(loaded["bag"]) == repr(model["bag"]) and loaded["bag"].padding_idx == 2
    assert (loaded["bag"].mode, loaded["bag"].include_last_offset) == ("sum", True)
    ids, offsets = torch.tensor([1, 2, 3, 59]), torch.tensor([0, 2, 4])
    assert torch.equal(loaded["bag"](ids, offsets), model["bag"](ids, offsets))
    config = DLRMConfig(table_rows=(300, 7), dim=8, rank=3, threshold=100)
    save_model(DLRM(config), tmp_path / "dlrm")
    assert len(tt_layers(load_model(DLRM(config), tmp_path / "dlrm"))) == 1


def test_files_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = tensorize(Tied(), rank=3, embeddings=["words"])
    save_model(model, tmp_path)
    smaller, other = Tied(60), nn.Sequential(nn.Linear(24, 24))
    before = {name: tensor.clone() for name, tensor in smaller.state_dict().items()}
    with pytest.raises(ValueError, match="is of another model: head.bias differs"):
        load_model(smaller, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in smaller.state_dict().items())
    assert smaller.head.weight is smaller.words.weight and type(smaller.head) is nn.Linear
    with pytest.raises(ValueError, match=r"layers that this model has not: words, first, again, head. Build the same"):
        load_model(other, tmp_path)
    save_file({"x": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="must be a comera_lab.model.1 file, got format None"):
        load_model(Tied(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file at .*nowhere"):
        load_model(Tied(), tmp_path / "nowhere")


def test_S01_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert main(["plan", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert (
        'transformers is needed for Hugging Face models. Install it with: pip install "comera_lab[huggingface]"' in said
    )
