"""Pre-training: the loss that is reported, rates and masks, one optimizer for cores and the rest, marks and texts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from comera_lab.experiments import language_model as module
from comera_lab.experiments.completion import complete, next_tokens
from comera_lab.experiments.corpus import corpus_of
from comera_lab.experiments.language_costs import memory_table, trainer_of
from comera_lab.experiments.language_model import (
    LANGUAGE_CONFIGS,
    LanguageConfig,
    LanguageTrainer,
    RankPlan,
    evaluate,
    language_config,
    language_optimizer,
    perplexity,
    prepare,
    read_corpus,
    train_language_model,
)
from comera_lab.experiments.ngrams import marks
from comera_lab.experiments.recorder import EvalRow, StepRow
from comera_lab.experiments.runs import TrainConfig
from comera_lab.experiments.studies_ranks import rate_share
from comera_lab.experiments.tokens import END, CodeTokenizer, encoded
from comera_lab.experiments.train import fit
from comera_lab.layers import tt_layers
from comera_lab.models.decoder import DecoderConfig
from comera_lab.models.masked import MaskedConfig
from comera_lab.objectives import model_size
from comera_lab.objectives.token_loss import naive_token_loss
from comera_lab.shapes import ShapeError

COAP = {"rank_ratio": 4.0, "plain_up_to": 64, "update_interval": 2, "refresh_factor": 2}
DENSE = DecoderConfig(layers=1, width=32, hidden=48, heads=2, vocabulary=300, positions=16)
TT = replace(DENSE, kind="tt", rank=8, word_rank=8)
MASKED = MaskedConfig(layers=1, width=32, hidden=48, heads=2, vocabulary=300, positions=16)


@pytest.fixture(scope="module")
def streams():
    texts = {f"m{k}.py": f"def name_{k}(value):\n    return value + {k}\n" * (k % 5 + 2) for k in range(60)}
    corpus = corpus_of(texts, "made", "made here")
    return encoded(corpus, CodeTokenizer.learn(corpus.train, 300))


def config(model=DENSE, steps=6, optimizer="adamw", ranks=None, **changes):
    settings = COAP if optimizer != "adamw" else {}
    training = TrainConfig(
        steps=steps, batch_size=4, learning_rate=1e-2, optimizer=optimizer, optimizer_settings=settings,
        evaluate_every=3, **changes,
    )  # fmt: skip
    return LanguageConfig(model=model, training=training, tokens=16, validation_blocks=None, ranks=ranks)


# the reported loss


@pytest.mark.parametrize("model", [DENSE, TT, MASKED], ids=["dense", "tt", "masked"])
def test_an_evaluation_does_not_depend_on_its_batch_size(streams, model):
    _, data = prepare(config(model), streams)
    built = model.build(torch.Generator().manual_seed(0)).double()
    results = [evaluate(built, data, rows) for rows in (1, 5, 1000)]
    for loss, accuracy in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-12) and accuracy == results[0][1]
    asked = data.test_y[data.test_y >= 0]
    logits = built(data.test_x)[data.test_y >= 0]
    assert results[0][0] == pytest.approx(naive_token_loss(logits, torch.eye(300).double(), asked).item(), rel=1e-9)
    assert built.training


def test_a_mean_over_one_batch_too_many_is_found(streams, monkeypatch):
    """What public scripts report: N / (N + 1) of the mean over N batches."""
    _, data = prepare(config(), streams)
    built = DENSE.build(torch.Generator().manual_seed(0)).double()
    right, batches = evaluate(built, data, 5)[0], -(-len(data.test_x) // 5)
    scores = built.forward
    monkeypatch.setattr(
        built, "forward", lambda *a: scores(*a) * torch.tensor([batches / (batches + 1), 1, 1]).double()
    )
    assert evaluate(built, data, 5)[0] < (1 - 0.5 / (batches + 1)) * right


def test_perplexity_is_exp_of_the_loss():
    assert perplexity(math.log(50)) == pytest.approx(50) and perplexity(1e4) == math.inf
    assert perplexity(0.0) == 1.0


# training


@pytest.mark.parametrize("model", [DENSE, MASKED], ids=["decoder", "masked"])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_cut(streams, model, tmp_path):
    _, data = prepare(config(model), streams)

    def trainer():
        built = model.build(torch.Generator().manual_seed(0))
        training = config(model, optimizer="coap").training
        return LanguageTrainer(built, data, training, optimizer=language_optimizer(built, training))

    whole, cut, rest = trainer(), trainer(), trainer()
    for _ in range(3):
        cut.step()
    cut.save(tmp_path / "run.pt")
    rest.load(tmp_path / "run.pt")
    for one in (whole, rest):
        while not one.done:
            one.step()
    assert [row.loss_nats for row in whole.rows] == [row.loss_nats for row in rest.rows]
    for left, right in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.slow
def test_the_rate_rises_and_falls_for_every_group_at_its_own_height(streams):
    plan = RankPlan(compression=1.5, gate_rate=0.05)
    trainer = trainer_of(config(TT, steps=20, optimizer="coap", ranks=plan), prepare(config(TT), streams)[1])
    seen = []
    for step in range(20):
        trainer.step()
        rates = [group["lr"] for group in trainer.trainer.optimizer.param_groups]
        assert rates == pytest.approx([height * rate_share(step, 20) for height in (1e-2, 1e-2, 0.05)])
        seen.append(rates[0])
    assert max(seen) == 1e-2 > seen[-1] > 0 and seen[0] == 1e-2


def test_masks_change_with_step_and_seed_alone(streams):
    _, data = prepare(config(MASKED), streams)
    seen = {}
    for seed in (0, 1):
        built = MASKED.build(torch.Generator().manual_seed(0))
        trainer = LanguageTrainer(built, data, replace(config(MASKED).training, seed=seed))
        for steps_done in (0, 1, 0):
            trainer.steps_done = steps_done
            loss = float(trainer.loss_of(torch.arange(4)).detach())
            assert seen.setdefault((seed, steps_done), loss) == loss
    assert len(set(seen.values())) == 4


@pytest.mark.parametrize("optimizer", ["adamw", "coap", "coap-8bit", "galore"])
def test_cores_and_gates_are_under_adamw_and_the_rest_under_the_optimizer(streams, optimizer):
    built = TT.build(torch.Generator().manual_seed(0))
    for layer in tt_layers(built).values():
        layer.add_gates()
    settings = {k: v for k, v in COAP.items() if optimizer != "galore" or k != "refresh_factor"}
    training = replace(
        config().training, optimizer=optimizer, optimizer_settings={} if optimizer == "adamw" else settings
    )
    made = language_optimizer(built, training, gate_rate=0.05)
    _, data = prepare(config(TT), streams)
    LanguageTrainer(built, data, training, optimizer=made).step()
    gates = {id(gate) for layer in tt_layers(built).values() for gate in layer.gates}
    inside = gates | {id(core) for layer in tt_layers(built).values() for core in layer.cores}
    rates = {id(p): group["initial_lr"] for group in made.param_groups for p in group["params"]}
    for name, parameter in built.named_parameters():
        projected = optimizer != "adamw" and id(parameter) not in inside and parameter.numel() > 64
        assert ("basis" in made.state[parameter]) == projected, name
        assert rates[id(parameter)] == (0.05 if id(parameter) in gates else 1e-2)
    assert len(rates) == len(list(built.parameters()))


def test_one_table_counts_every_number_and_byte_once(streams):
    _, data = prepare(config(TT), streams)
    trainer = trainer_of(config(TT, optimizer="coap", ranks=RankPlan(compression=1.5)), data)
    trainer.step()
    table = memory_table(trainer.model, trainer.trainer.optimizer)
    parts = {line[:18].strip(): line[18:].split() for line in table.splitlines()[1:-1]}
    assert list(parts) == ["cores", "gates", "dense, projected", "dense, plain", "all"]
    assert int(parts["all"][0].replace(",", "")) == sum(p.numel() for p in trainer.model.parameters())
    assert float(parts["all"][3]) == pytest.approx(trainer.trainer.optimizer.report().bytes / 2**20, abs=6e-4)
    for column in (1, 2, 3):
        assert sum(float(parts[part][column]) for part in list(parts)[:-1]) == pytest.approx(
            float(parts["all"][column]), abs=2e-3
        )


@pytest.mark.parametrize("optimizer", ["adamw", "coap"])
@pytest.mark.slow
def test_a_run_that_learns_ranks_ends_at_its_compression(streams, optimizer):
    rows = []
    run = train_language_model(
        config(TT, steps=24, optimizer=optimizer, ranks=RankPlan(compression=2.2)), streams=streams, on_row=rows.append
    )
    size = model_size(run.model)
    assert run.finish is not None and size.total_ratio == pytest.approx(2.2, rel=0.02) and size.total_ratio >= 2.2
    assert size.total_ratio == size.dense_twin / sum(
        p.numel() for name, p in run.model.named_parameters() if "gates" not in name
    )
    assert isinstance(rows[-1], EvalRow) and rows[-1].step == 24 and run.result.stopped == "done"
    assert sum(isinstance(row, StepRow) for row in rows) == 24


@pytest.mark.slow
def test_training_learns_and_stops_when_told(streams):
    run = train_language_model(config(steps=60), streams=streams)
    tests = [row.loss_nats for row in run.result.rows if isinstance(row, EvalRow)]
    assert tests[-1] < 0.6 * tests[0]
    calls = iter([False] * 4 + [True])
    assert train_language_model(config(), streams=streams, should_stop=lambda: next(calls)).result.stopped == "stopped"
    ranks = config(TT, ranks=RankPlan(compression=1.5))
    stopped = train_language_model(ranks, streams=streams, should_stop=lambda: True)
    assert stopped.finish is None and stopped.result.steps == 0 and stopped.result.stopped == "stopped"


def test_fit_takes_the_language_trainer(streams, tmp_path):
    first = config(steps=6)
    train_language_model(first, streams=streams, checkpoint=tmp_path / "run.pt")
    longer = replace(first, training=replace(first.training, steps=8))
    run = train_language_model(longer, streams=streams, checkpoint=tmp_path / "run.pt", resume=True)
    assert run.result.steps == 8
    _, data = prepare(first, streams)
    built = DENSE.build()
    assert fit(built, data, first.training, trainer_type=LanguageTrainer).stopped == "done"


# marks and texts


def test_marks_are_counted_by_hand():
    corpus = corpus_of({f"n{k}.py": "abc" * (40 + k) for k in range(30)}, "made", "here")
    made = encoded(corpus, CodeTokenizer.learn(corpus.train, 259))
    found = marks(made, made.blocks(4))
    assert found.uniform == pytest.approx(math.log(259))
    assert found.bigram < 0.3 < 1.0 < found.unigram < found.uniform
    counts = torch.bincount(torch.from_numpy(made.train), minlength=259) + 1.0
    share = counts / counts.sum()
    wanted = -share[made.blocks(4).test_y.long()].log().mean()
    assert found.unigram == pytest.approx(wanted.item(), rel=1e-5)
    with pytest.raises(ValueError, match="marks are for next tokens, got masked data"):
        marks(made, made.blocks(8, masked=True))


@pytest.mark.slow
def test_a_model_writes_what_it_has_learned(streams):
    run = train_language_model(config(steps=150), streams=streams)
    model, tokenizer = run.model, run.streams.tokenizer
    assert complete(model, tokenizer, "def name_", tokens=30) == complete(model, tokenizer, "def name_", tokens=30)
    assert "(value):\n    return value" in complete(model, tokenizer, "def name_7", tokens=40)
    drawn = {complete(model, tokenizer, "def ", tokens=20, temperature=2.0, seed=seed) for seed in range(4)}
    assert len(drawn) > 1
    best = next_tokens(model, tokenizer, "    return", top=3)
    assert best[0].text == " value" and best[0].probability > 0.9 >= best[1].probability
    assert isinstance(complete(model, tokenizer, "x" * 200, tokens=3), str), "longer than the positions"
    assert isinstance(complete(model, tokenizer, "", tokens=3), str) and model.training
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        complete(model, tokenizer, "x", temperature=-1)
    model.words.weight.data[:] = 0
    model.head.weight.data[:] = 0
    model.head.weight.data[END] = 1
    model.norm.weight.data[:] = 1
    assert len(complete(model, tokenizer, "x", tokens=5)) <= 5 * 8


# configurations and refusals


def test_named_configurations_fit_together():
    for name, found in LANGUAGE_CONFIGS.items():
        assert language_config(name) is found
        with torch.device("meta"):
            model = found.model.build()
        assert model.parameter_count() < 1.2e6
        if found.ranks is not None:
            size = model_size(model)
            assert size.total_ratio < 4.23 < size.dense_twin / size.dense, "room to cut, and room for cores"


def test_bad_input_is_refused_in_one_line(streams, tmp_path):
    with pytest.raises(ValueError, match="configuration must be one of code-small, .*got 'code-large'"):
        language_config("code-large")
    with pytest.raises(ShapeError, match="model and tokenizer must have one vocabulary, got 301 and 300"):
        prepare(config(replace(DENSE, vocabulary=301)), streams)
    with pytest.raises(ShapeError, match="tokens must fit the positions of the model, got 17 and 16"):
        replace(config(), tokens=17)
    with pytest.raises(ValueError, match='learned by a model of kind "tt"'):
        config(DENSE, ranks=RankPlan())
    with pytest.raises(ValueError, match=r"compression must be above 1, got 0.5"):
        train_language_model(config(TT, ranks=RankPlan(compression=0.5)), streams=streams)
    with pytest.raises(ValueError, match="takes no checkpoint here"):
        train_language_model(config(TT, ranks=RankPlan()), streams=streams, checkpoint=tmp_path / "x.pt")
    with pytest.raises(ValueError, match="learns no ranks, got ranks=None"):
        module.rank_trainer(config(), DENSE.build(), streams.blocks(16))
    with pytest.raises(FileNotFoundError, match="must be a folder with Python files, found none"):
        read_corpus(str(tmp_path))
