"""`comera-lab train CONFIG`: a language model from the command line, its bar, its rows, its refusals."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from comera_lab.__main__ import main
from comera_lab.commands.train_language import progress_bar
from comera_lab.experiments import language_model
from comera_lab.experiments.language_model import RankPlan, language_config
from comera_lab.experiments.recorder import EvalRow, StepRow, read_rows
from comera_lab.models.decoder import DecoderConfig


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder of programs, and tiny configurations under two names."""
    monkeypatch.setenv("COMERA_LAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "code"
    folder.mkdir()
    for k in range(60):
        (folder / f"m{k}.py").write_text(f"def name_{k}(value):\n    return value + {k}\n" * (k % 5 + 2))
    base = language_config("code-small")
    model = DecoderConfig(layers=1, width=32, hidden=48, heads=2, vocabulary=300, positions=16)
    training = replace(base.training, steps=6, batch_size=4, evaluate_every=3)
    tiny = replace(base, model=model, training=training, tokens=16, validation_blocks=8)
    tt = replace(tiny, model=replace(model, kind="tt", rank=8, word_rank=8), ranks=RankPlan(compression=2.2))
    monkeypatch.setattr(language_model, "LANGUAGE_CONFIGS", {"tiny": tiny, "tiny-comera": tt})
    return folder


def test_a_run_prints_its_loss_and_perplexity_and_goes_on_after_a_stop(corpus, tmp_path, capsys):
    out = tmp_path / "run.jsonl"
    assert main(["train", "tiny", "--corpus", str(corpus), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tokens to train" in text and "6 steps of 4 x 16 tokens" in text and "perplexity" in text
    assert "done after 6 steps" in text and text.count("step") < 6, "nothing for every step"
    assert (
        main(
            [
                "train",
                "tiny",
                "--corpus",
                str(corpus),
                "--out",
                str(out),
                "--resume",
                "--steps",
                "8",
            ]
        )
        == 0
    )
    assert "done after 8 steps" in capsys.readouterr().out
    rows = read_rows(out)
    assert [row["step"] for row in rows if row["kind"] == "step"] == [*range(1, 9)]
    assert rows[0]["config"]["model_name"] == "tiny" and rows[0]["config"]["training"]["steps"] == 6


def test_the_command_line_changes_a_configuration(corpus, capsys):
    command = [
        "train",
        "tiny",
        "--corpus",
        str(corpus),
        "--steps",
        "2",
        "--optimizer",
        "coap",
        "--rank-ratio",
        "2",
    ]
    assert main(command) == 0
    assert "2 steps of 4 x 16 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_learned_ranks_end_at_their_compression(corpus, capsys):
    assert main(["train", "tiny-comera", "--corpus", str(corpus), "--steps", "12"]) == 0
    assert "2.20x smaller than the dense model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["large"], "configuration must be one of tiny, tiny-comera, got 'large'"),
        (["tiny", "--corpus", "nowhere"], "nowhere must be a folder with Python files, found none"),
        (["tiny", "--resume", "--out", "OUT"], "found no checkpoint"),
    ],
)
def test_bad_input_gives_one_line(corpus, tmp_path, capsys, command, message):
    command = [str(tmp_path / "x.jsonl") if word == "OUT" else word for word in command]
    assert main(["train", *command]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_bar_tells_tokens_per_second_time_to_go_and_losses(corpus):
    config = language_config("tiny")
    screen, said = io.StringIO(), []
    with progress_bar(config.training, config.tokens, said.append, screen) as on_row:
        for step in (1, 2, 3):
            on_row(StepRow(step=step, loss_nats=5.0 - step, step_time_ms=1.0, elapsed_s=0.1))
        on_row(EvalRow(step=3, loss_nats=3.21, accuracy=0.1, elapsed_s=0.1))
        for step in (4, 5, 6):
            on_row(StepRow(step=step, loss_nats=1.0, step_time_ms=1.0, elapsed_s=0.1))
    last = screen.getvalue().split("\r")[-1]
    assert len(said) == 1
    assert "384/384" in last and "token/s" in last and "validation=3.210" in last and "loss=1.000" in last
