"""Models of transformers with cores in them: one test per family on tiny configurations, offline, and its Trainer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import REBUILT, relative_error
from torch import Tensor, nn

from comera_lab.__main__ import main
from comera_lab.layers import TiedHead, TTEmbedding, TTLinear, as_linear, tensorize, tt_layers
from comera_lab.memory import GAP_LIMIT, footprint, measure
from comera_lab.models.huggingface import load_pretrained, planned_from_config, save_pretrained
from comera_lab.optimizers import COAPAdamW

pytestmark = pytest.mark.slow  # importing transformers takes seconds

SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 64}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RANK = 3


def build(family: str) -> Any:
    """A tiny model; positions, norms and biases as its library starts them."""
    import transformers as hf

    torch.manual_seed(0)
    if family == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**SIZES, **QUIET))
    if family == "roberta":
        return hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES, **QUIET))
    if family == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0,
                          eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )  # fmt: skip
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=family == "llama, tied")
    )


FAMILIES = {  # family -> (words, how many linear layers become cores)
    "bert": ("*word_embeddings", 13),
    "roberta": ("*word_embeddings", 13),
    "llama": ("*embed_tokens", 14),
    "llama, tied": ("*embed_tokens", 14),
    "gpt2": ("*wte", 8),
}
EXCLUDE = {"llama": ["lm_head"]}
IDS = torch.randint(5, 300, (2, 16), generator=torch.Generator().manual_seed(0))


def give_low_rank(model: nn.Module, words: str, exclude: list[str]) -> None:
    """Every matrix and the word table become products of cores of rank `RANK`, so that a TT-SVD loses nothing."""
    table = next(m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and name.endswith(words[1:]))
    with torch.no_grad():
        for name, module in model.named_modules():
            linear = as_linear(module)
            if linear is None or name in exclude or module._parameters["weight"] is table.weight:
                continue
            linear.weight.copy_(TTLinear(linear.in_features, linear.out_features, RANK).to_dense())
        table.weight.copy_(TTEmbedding(*table.weight.shape, RANK, std=0.1).to_dense())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(input_ids=IDS).logits
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_svd_keeps_the_function_of_every_family(family: str) -> None:
    words, linears = FAMILIES[family]
    model, exclude = build(family).eval(), EXCLUDE.get(family, [])
    give_low_rank(model, words, exclude)
    want, dense, padding = logits(model), copy.deepcopy(model), model.get_input_embeddings().padding_idx
    assert tensorize(model, RANK, embeddings=[words], exclude=exclude) is model
    layers = list(tt_layers(model).values())
    assert sum(isinstance(layer, TTLinear) for layer in layers) == linears
    assert sum(isinstance(layer, TTEmbedding) for layer in layers) == 1
    assert sum(p.numel() for p in model.parameters()) < 0.6 * sum(p.numel() for p in dense.parameters())
    got = logits(model)
    if padding is not None:  # the row of padding reads as zeros in a table of cores: its score is the bias
        got, want = (scores[..., torch.arange(300) != padding] for scores in (got, want))
    assert relative_error(got, want) < REBUILT


@pytest.mark.parametrize("family", FAMILIES)
def test_ties_are_kept_and_every_core_learns(family: str) -> None:
    words, _ = FAMILIES[family]
    model = tensorize(build(family), 4, embeddings=[words], exclude=EXCLUDE.get(family, []), init="random")
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(table, TTEmbedding)
    assert isinstance(head, TiedHead) == (family != "llama")
    if isinstance(head, TiedHead):
        assert head.table is table
        assert not [name for name, _ in model.named_parameters() if name.endswith(("decoder.weight", "lm_head.weight"))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    assert all(core.grad is not None and core.grad.any() for layer in tt_layers(model).values() for core in layer.cores)


@pytest.mark.parametrize("family", ["bert", "llama, tied", "gpt2"])
def test_a_tie_that_would_be_cut_is_refused(family: str) -> None:
    model = build(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"is tied to .* which keeps the tie"):
        tensorize(model, 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_names_choose_what_becomes_cores() -> None:
    model = tensorize(build("gpt2"), 4, include=["*.mlp.*"], exclude=["transformer.h.0.*"])
    assert list(tt_layers(model)) == ["transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj"]
    with pytest.raises(ValueError, match=r"no nn.Embedding matches embeddings=\['words'\].*transformer.wte"):
        tensorize(model, 4, embeddings=["words"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_offline(family: str, tmp_path: Path) -> None:
    words, _ = FAMILIES[family]
    model = tensorize(build(family).eval(), 4, embeddings=[words], exclude=EXCLUDE.get(family, []))
    first = next(iter(tt_layers(model).values()))
    first.add_gates()
    with torch.no_grad():
        first.gates[0][0] = 0.5
    save_pretrained(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) and torch.equal(logits(loaded), logits(model))
    assert [str(layer) for layer in tt_layers(loaded).values()] == [str(layer) for layer in tt_layers(model).values()]
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_what_is_no_model_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*config.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="must be the config.json of a transformers model"):
        load_pretrained(tmp_path)
    save_pretrained(tensorize(build("bert"), 4, embeddings=["*word_embeddings"]), tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"layers that this model has not: bert.encoder.layer.1"):
        load_pretrained(tmp_path / "bert")


# the Trainer of transformers


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.randint(300, (16,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids}


def trained(folder: Path, bits: int, resume: Path | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Six steps with a checkpoint after the third; the basis is refreshed before and after it."""
    import transformers as hf

    model = tensorize(build("gpt2"), 6, include=["*.mlp.*"], embeddings=["*wte"])
    optimizer = COAPAdamW(
        model.named_parameters(), lr=1e-2, rank_ratio=4.0, update_interval=2, refresh_factor=2, plain_up_to=0, bits=bits
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arguments = hf.TrainingArguments(
        str(folder), max_steps=6, save_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, disable_tqdm=True, logging_strategy="no", report_to=[], seed=0, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=Texts(), optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model, optimizer


@pytest.mark.parametrize("bits", [32, 8])
def test_C01_coap_resumes_under_the_trainer_bit_by_bit(bits: int, tmp_path: Path) -> None:
    whole, optimizer = trained(tmp_path / "whole", bits)
    stored = tmp_path / "whole" / "checkpoint-3"
    state = torch.load(stored / "optimizer.pt", weights_only=True)
    assert all(entry["step"] == 3 for entry in state["state"].values())
    resumed, again = trained(tmp_path / "resumed", bits, stored)
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert optimizer.param_groups[0]["lr"] == again.param_groups[0]["lr"] == pytest.approx(1e-2 / 7)
    assert any("basis" in key or "basis_out" in key for key in next(iter(again.state.values())))


# planned from a configuration


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_a_footprint_equals_a_real_step(family: str) -> None:
    model = build(family)
    predicted = footprint(model, (IDS,), loss=lambda made: made.logits.logsumexp(-1).mean())
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(IDS).logits.logsumexp(-1).mean().backward()
        optimizer.step()

    measured = measure(step, model, optimizer).pools
    assert measured.weights == predicted.weights
    assert measured.grads == sum(one.bytes for one in predicted.trained)
    assert measured.activations == pytest.approx(predicted.activations, rel=GAP_LIMIT)


def test_a_configuration_is_planned_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers as hf

    hf.GPT2Config().save_pretrained(tmp_path)
    model = planned_from_config(tmp_path)
    assert model.blocks == 12 and model.longest == 1024
    assert main(["plan", str(tmp_path / "config.json"), "--checkpointing", "--methods", "adamw", "comera"]) == 0
    printed = capsys.readouterr().out
    assert "GPT2LMHeadModel of config.json: 124,439,808 parameters, 4.2" in printed
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    assert main(["plan", str(tmp_path)]) == 2
    assert "must name its architecture or be that of a language model" in capsys.readouterr().err
