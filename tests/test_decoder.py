"""The decoder and the masked encoder: published sizes, transformers' own numbers, twins, ties and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tolerances import RELATIVE, relative_error

from comera_lab.layers import TTEmbedding, TTLinear, tt_layers
from comera_lab.memory import LLAMA, llama_shapes, predict
from comera_lab.models.decoder import DECODERS, Decoder, DecoderConfig, decoder_config
from comera_lab.models.masked import CODEBERT, MaskedConfig
from comera_lab.objectives import model_size
from comera_lab.objectives.token_loss import IGNORE
from comera_lab.runtime import require
from comera_lab.shapes import ShapeError

SMALL = DecoderConfig(layers=2, width=16, hidden=24, heads=2, vocabulary=40, positions=12)
MASKED = MaskedConfig(layers=2, width=16, hidden=24, heads=2, vocabulary=40, positions=12)
SMALLS = {"decoder": SMALL, "masked": MASKED}


def built(config, seed=0, dtype=torch.float64):
    return config.build(torch.Generator().manual_seed(seed)).to(dtype)


def ids(rows=3, tokens=10, seed=0):
    return torch.randint(40, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# sizes, from meta tensors


# hand count: vocabulary x width twice, 4 width^2 + 3 width hidden a block, 2 layers + 1 norms
@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama-9m", 9.0), ("llama-60m", 58.1), ("llama-130m", 134.1), ("llama-350m", 368.0), ("llama-1b", 1339.1),
     ("llama-7b", 6738.4)],
)  # fmt: skip
def test_public_llama_sizes_are_rebuilt_without_allocating(name, millions):
    with torch.device("meta"):
        model = decoder_config(name).build()
    assert round(model.parameter_count() / 1e6, 1) == millions
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
def test_the_decoders_have_the_shapes_that_published_optimizer_sizes_rest_on():
    for name in LLAMA:
        with torch.device("meta"):
            model = decoder_config(f"llama-{name.lower()}").build()
        matrices, rest = llama_shapes(name)
        assert sorted(tuple(p.shape) for p in model.parameters()) == sorted([*matrices, *rest])


@pytest.mark.slow
def test_codebert_has_the_size_of_its_public_checkpoint():
    transformers = require("transformers", "comparing sizes")
    theirs = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    with torch.device("meta"):
        mine, other = CODEBERT.build(), transformers.RobertaForMaskedLM(theirs)
    assert mine.parameter_count() == sum(p.numel() for p in other.parameters()) == 124_697_433


# numbers, against transformers


@pytest.mark.slow
def test_a_decoder_computes_what_transformers_computes():
    transformers = require("transformers", "comparing numbers")
    theirs = (
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=40,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=12,
                rms_norm_eps=SMALL.norm_eps,
                tie_word_embeddings=False,
                attn_implementation="eager",
            )
        )
        .double()
        .eval()
    )
    mine = built(SMALL)
    words = {"attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
             "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
             "feed_forward.gate": "mlp.gate_proj", "feed_forward.up": "mlp.up_proj",
             "feed_forward.down": "mlp.down_proj", "norm_attention": "input_layernorm",
             "norm_forward": "post_attention_layernorm", "blocks": "model.layers", "words": "model.embed_tokens",
             "head": "lm_head"}  # fmt: skip
    state = {}
    for name, value in mine.state_dict().items():
        for old, new in words.items():
            name = name.replace(old, new)
        state["model.norm.weight" if name == "norm.weight" else name] = value
    theirs.load_state_dict(state)
    x = ids()
    # theirs turns by angles in float32
    assert relative_error(mine(x), theirs(x).logits) < RELATIVE[torch.float32]


@pytest.mark.parametrize("kind", SMALLS)
def test_the_loss_is_that_of_the_logits(kind):
    model, x, y = built(SMALLS[kind]), ids(), ids(seed=1)
    y[:, ::3] = IGNORE
    wanted = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE)
    assert relative_error(model(x, y), wanted) < RELATIVE[torch.float64]
    loss, hits, count = model(x, y, True).tolist()
    assert count == (y != IGNORE).sum() and loss / count == pytest.approx(wanted.item())
    assert hits == ((model(x).argmax(-1) == y) & (y != IGNORE)).sum()


def test_a_decoder_sees_the_past_alone_and_a_masked_model_both_sides():
    x = ids(1)
    changed = x.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 40
    for kind, config in SMALLS.items():
        moved = (built(config)(x) != built(config)(changed)).any(-1)[0]
        assert moved[6:].all() and moved[:6].any() == (kind == "masked")


def test_recomputing_blocks_changes_bytes_and_not_gradients():
    deep = dataclasses.replace(SMALL, layers=4)
    plain, again = built(deep), built(dataclasses.replace(deep, recompute=True))
    for model in (plain, again):
        model(ids(), ids(seed=1)).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    kept = [predict(model, (ids(), ids())).activations for model in (plain, again)]
    assert kept[1] < kept[0] / 2


# tensorised twins and ties


@pytest.mark.parametrize("kind", SMALLS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("word_rank", [None, 4])
def test_a_tensorised_twin_computes_what_its_dense_weights_do(kind, tied, word_rank):
    config = dataclasses.replace(SMALLS[kind], kind="tt", rank=6, word_rank=word_rank, tied=tied)
    train, dense = built(config), built(dataclasses.replace(config, kind="dense"))
    state = train.state_dict()
    for name, layer in tt_layers(train).items():
        state = {key: value for key, value in state.items() if not key.startswith(f"{name}.cores")}
        state[f"{name}.weight"] = layer.to_dense()
    dense.load_state_dict(state)
    assert relative_error(train(ids()), dense(ids())) < RELATIVE[torch.float64]
    layers = tt_layers(train)
    inside = sum(isinstance(layer, TTLinear) for layer in layers.values())
    assert inside == (14 if kind == "decoder" else 13)
    assert sum(isinstance(layer, TTEmbedding) for layer in layers.values()) == (word_rank is not None)


@pytest.mark.parametrize("kind", SMALLS)
@pytest.mark.parametrize("word_rank", [None, 4])
def test_M03_a_tied_table_is_one_set_of_numbers_counted_and_saved_once(kind, word_rank):
    config = dataclasses.replace(SMALLS[kind], kind="tt", rank=4, word_rank=word_rank, tied=True)
    tied = built(config)
    untied = built(dataclasses.replace(config, tied=False))
    assert untied.parameter_count() - tied.parameter_count() == 40 * 16
    assert tied.parameter_count() == model_size(tied).total == sum(p.numel() for p in tied.state_dict().values())
    # the gradient of the table comes from both of its uses
    x, y = ids(), ids(seed=1)
    table = list(tied.words.parameters())
    whole = torch.autograd.grad(tied(x, y), table)
    held = tied.head_weight().detach()
    tied.head_weight = lambda: held
    below = torch.autograd.grad(tied(x, y), table)
    assert all(relative_error(one, other) > 1e-3 for one, other in zip(whole, below, strict=True))


def test_both_twins_start_from_one_head():
    dense, train = (Decoder(dataclasses.replace(SMALL, kind=kind), generator=torch.Generator().manual_seed(3))
                    for kind in ("dense", "tt"))  # fmt: skip
    assert torch.equal(dense.head.weight, train.head.weight) and torch.equal(dense.words.weight, train.words.weight)


# refusals


def test_what_does_not_fit_is_refused_in_one_line():
    for kind, config in SMALLS.items():
        model = built(config)
        with pytest.raises(ShapeError, match=r"1 to 12 tokens, the positions of this model, got \(3, 13\)"):
            model(ids(tokens=13))
        with pytest.raises(ShapeError, match="rows, tokens"):
            model(ids()[0])
        with pytest.raises(IndexError):
            model(torch.full((1, 4), 40))
        with pytest.raises(ValueError, match='kind must be "dense" or "tt", got'):
            dataclasses.replace(config, kind="sparse")
        with pytest.raises(ShapeError, match="width must be a multiple"):
            dataclasses.replace(config, heads=3)
        for name in ("vocabulary", "layers", "positions"):
            with pytest.raises(ShapeError, match=f"{name} must be a whole number above 0, got 0"):
                dataclasses.replace(config, **{name: 0})
        assert kind
    with pytest.raises(ValueError, match="model must be one of llama-9m, .*got 'llama-2b'"):
        decoder_config("llama-2b")
    assert len(DECODERS) == 13
