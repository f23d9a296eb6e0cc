"""The pair classifier: published sizes, twins that agree, padding that stays out, gradients everywhere."""

from __future__ import annotations

import pytest
import torch
from tolerances import RELATIVE, relative_error
from torch import nn

from comera_lab.layers import TTEmbedding, TTLinear, tt_layers
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from comera_lab.objectives import model_size
from comera_lab.shapes import ShapeError


def _config(**settings: object) -> EncoderConfig:
    tiny = {"width": 8, "hidden": 16, "heads": 2, "positions": 12, "vocabulary": 30, "rank": 3, "word_rank": 4}
    return EncoderConfig(**{**tiny, **settings})  # type: ignore[arg-type]


def _model(**settings: object) -> PairEncoder:
    return PairEncoder(_config(**settings), generator=torch.Generator().manual_seed(0)).eval()


def _ids(head: str, rows: int = 5, tokens: int = 7) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    size = (rows, tokens) if head == "cross" else (rows, 2, tokens)
    ids = torch.randint(3, 30, size, generator=draw)
    ids[..., 3] = 2
    ids[0, ..., 5:] = 0
    return ids


# Published sizes


def test_released_dense_model_has_66_957_315_parameters() -> None:
    with torch.device("meta"):
        model = PairEncoder(EncoderConfig.released("dense"))
    assert model.parameter_count() == 66_957_315


def test_released_tensorised_model_has_1_490_157_parameters_of_which_4_362_are_gates() -> None:
    with torch.device("meta"):
        model = PairEncoder(EncoderConfig.released())
        layers = tt_layers(model)
        size = model_size(model)
        for layer in layers.values():
            layer.add_gates()
    assert model.parameter_count() == 1_490_157
    assert sum(gate.numel() for layer in layers.values() for gate in layer.gates) == 4_362
    assert (size.cores, size.dense) == (1_026_528, 459_267)
    assert (size.tensorised_dense, size.dense_twin) == (66_498_048, 66_957_315)
    shapes = {name: layer.shape for name, layer in layers.items()}
    assert len(shapes) == 1 + 6 * 6 + 1
    assert shapes["blocks.0.query"].params == shapes["pooler"].params == 20_448
    assert shapes["blocks.5.widen"].ranks == (1, 12, 30, 30, 30, 16, 1)
    assert shapes["blocks.5.widen"].params == shapes["blocks.5.narrow"].params == 28_960
    assert shapes["words"].params == 167_808 and shapes["words"].ranks == (1, 32, 32, 32, 1)


# Values and gradients


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("head", ["cross", "siamese"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_forward_and_backward_are_finite(kind: str, head: str, dropout: float) -> None:
    model = _model(kind=kind, head=head, dropout=dropout).train()
    loss = nn.functional.cross_entropy(model(_ids(head)), torch.tensor([0, 1, 2, 0, 1]))
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    unused = {"segments.weight", "blocks.0.key.bias", "blocks.1.key.bias"}  # a key's bias shifts all scores alike
    still = {name for name, parameter in model.named_parameters() if not parameter.grad.abs().max() > 1e-9}
    assert still <= unused


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("head", ["cross", "siamese"])
def test_padding_does_not_leak(kind: str, head: str) -> None:
    model, ids = _model(kind=kind, head=head).double(), _ids(head)
    alone = model(ids[:1, ..., :5])                # its row without the padding, and without longer neighbours
    padded = nn.functional.pad(ids, (0, 5))
    assert relative_error(model(padded)[:1], alone) < RELATIVE[torch.float64]
    texts = padded.reshape(-1, 12)
    hidden = model.encode(texts, texts != 0)       # nothing cut off here: the mask alone keeps padding out
    short = ids.reshape(-1, 7)
    assert relative_error(hidden[0, :5], model.encode(short, short != 0)[0, :5]) < RELATIVE[torch.float64]
    assert relative_error(model.encode(texts, texts >= 0)[0, :5], hidden[0, :5]) > RELATIVE[torch.float64]


def test_a_text_of_padding_alone_is_finite() -> None:
    model = _model()
    assert torch.isfinite(model(torch.zeros(2, 2, 4, dtype=torch.int64))).all()


@pytest.mark.parametrize("head", ["cross", "siamese"])
def test_dense_twin_equals_tensorised_model_at_full_rank(head: str) -> None:
    dense = _model(kind="dense", head=head).double()
    twin = _model(kind="tt", head=head).double()
    for name, layer in tt_layers(twin).items():
        parent, _, child = name.rpartition(".")
        source = dense.get_submodule(name)
        exact: nn.Module
        if isinstance(layer, TTEmbedding):
            assert isinstance(source, nn.Embedding)
            exact = TTEmbedding.from_embedding(source, 10**6)
        else:
            assert isinstance(layer, TTLinear) and isinstance(source, nn.Linear)
            exact = TTLinear.from_linear(source, 10**6)
        setattr(twin.get_submodule(parent), child, exact)
    twin.load_state_dict({k: v for k, v in dense.state_dict().items() if k in twin.state_dict()}, strict=False)
    ids = _ids(head)
    assert relative_error(twin(ids), dense(ids)) < RELATIVE[torch.float64]
    with torch.no_grad():
        next(iter(tt_layers(twin).values())).cores[0].mul_(1.01)
    assert relative_error(twin(ids), dense(ids)) > RELATIVE[torch.float64]


def test_twins_share_their_dense_start() -> None:
    dense, tensorised = _model(kind="dense"), _model(kind="tt")
    for name in ("positions", "segments", "classifier"):
        assert torch.equal(dense.get_submodule(name).weight, tensorised.get_submodule(name).weight)


def test_start_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    _model()
    _model(kind="dense")
    assert torch.equal(before, torch.get_rng_state())


def test_siamese_sides_share_one_encoder_and_order_matters() -> None:
    model, ids = _model(), _ids("siamese")
    assert relative_error(model(ids.flip(1)), model(ids)) > RELATIVE[torch.float32]
    same = torch.stack([ids[:, 0], ids[:, 0]], dim=1)
    assert torch.equal(model(same), model(same.flip(1)))


def test_second_segment_starts_behind_the_separator() -> None:
    model, ids = _model(head="cross"), _ids("cross")
    with torch.no_grad():
        model.segments.weight[1] += 1.0
    moved = model.encode(ids, ids != 0)
    separate = ids.clone()
    separate[:, 3] = 4
    with torch.no_grad():
        model.segments.weight[1] += 1.0
    assert not torch.equal(model.encode(ids, ids != 0), moved), "texts with a separator read the second segment"
    assert torch.equal(model(separate), _model(head="cross")(separate)), "texts without one do not"


@pytest.mark.parametrize(
    ("head", "size", "message"),
    [
        ("siamese", (3, 5), r"\(rows, 2, tokens\) with 1 to 12 tokens for a siamese head, got \(3, 5\)"),
        ("siamese", (3, 3, 5), r"got \(3, 3, 5\)"),
        ("cross", (3, 2, 5), r"\(rows, tokens\) with 1 to 12 tokens for a cross head"),
        ("cross", (3, 13), r"got \(3, 13\)"),
        ("cross", (3, 0), r"got \(3, 0\)"),
    ],
)
def test_ids_of_another_shape_are_refused(head: str, size: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        _model(head=head)(torch.ones(size, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_ids_outside_the_vocabulary_are_refused(kind: str) -> None:
    with pytest.raises(IndexError):
        _model(kind=kind)(torch.full((1, 2, 3), 30))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sparse"}, 'kind must be "dense" or "tt"'),
        ({"head": "both"}, 'head must be "cross" or "siamese"'),
        ({"heads": 3}, "width must be a multiple of heads, got 8 and 3"),
        ({"layers": 0}, "layers must be a whole number above 0"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
    ],
)
def test_config_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**settings)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_small_presets_run_and_are_smaller_than_their_twins(width: int) -> None:
    model = PairEncoder(EncoderConfig.small(width=width), generator=torch.Generator().manual_seed(0))
    assert model(torch.randint(0, 8000, (2, 2, 6))).shape == (2, 3)
    dense = PairEncoder(EncoderConfig.small("dense", width=width), generator=torch.Generator().manual_seed(0))
    assert model.parameter_count() < dense.parameter_count() / 3
    assert model_size(model).dense_twin == dense.parameter_count()
