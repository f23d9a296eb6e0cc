"""The code-model panel and its completion box: what a training shows, what it records, and when the box is closed."""

from __future__ import annotations

import pytest

import comera_lab.panels as lab
from comera_lab.experiments.corpus import corpus_of
from comera_lab.experiments.ngrams import marks
from comera_lab.experiments.tokens import CodeTokenizer, encoded
from comera_lab.memory import mib
from comera_lab.panels import code_run
from comera_lab.panels.code_run import METHODS
from comera_lab.panels.state import LabState

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _few_texts():
    """The real corpus takes seconds to read; the decoder stays the real one."""
    words = [
        f"{start}{end}" for start in ("alpha", "beta", "gamma", "delta") for end in ("", "_map", "_sum", "s", "_of")
    ]
    texts = {
        f"m{k}.py": "\n".join(
            f"def {words[(k * j) % 20]}_{words[(k + 3 * j) % 20]}_{k}({words[j % 20]}, other={j}):\n"
            f"    {words[(j * j) % 20]} = {words[j % 20]}.{words[(7 * j + k) % 20]}(other)\n    return {k} + {j * k}"
            for j in range(30)
        )
        for k in range(60)
    }
    corpus = corpus_of(texts, "made", "made here")
    streams = encoded(corpus, CodeTokenizer.learn(corpus.train, 1024))
    data = streams.blocks(128, validation_blocks=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_run, "code_data", lambda: (streams, data, marks(streams, data)))
        patch.setattr("comera_lab.panels.code_model.code_data", lambda: None)
        patch.setattr(code_run, "BATCH", 2)
        patch.setattr(code_run, "TESTS", 2)
        patch.setattr(code_run, "WRITTEN", 4)
        patch.setattr("comera_lab.panels.completion_box.TOKENS", 8)
        yield


@pytest.fixture(scope="module")
def finished():
    """Two short trainings, adamw and then comera + coap; read only but for the box."""
    panel = lab.CodeModelPanel(LabState())
    panel.steps.value = 20
    assert panel.run(wait=True)
    panel.method.value = "comera + coap"
    assert panel.run(wait=True)
    return panel


def test_the_table_has_losses_and_measured_pools_of_both(finished):
    text = finished.table()
    adamw, both = (finished.trained[name] for name in ("adamw", "comera + coap"))
    assert adamw.pools_after is None and both.pools_after is not None
    assert f"{mib(adamw.pools.optimizer):.2f}" in text
    assert f"{mib(both.pools.optimizer):.2f} → {mib(both.pools_after.optimizer):.2f}" in text
    assert both.pools_after.weights < both.pools.weights < adamw.pools.weights
    assert "4.23x" in text and "1.00x" in text and f"{float(adamw.tests['loss_nats'][-1]):.3f}" in text
    for words in ("measured here", "One seed each", "After step 20"):
        assert words in text
    assert "measured here" in finished.verdict.value
    assert finished.runner.words == "finished after 20 steps"


def test_lines_end_at_the_last_step_and_marks_are_drawn(finished):
    figure = finished.curves.figure
    marked = figure.data[1::2]
    assert [line.name for line in marked] == list(METHODS)
    assert [len(line.x) > 0 for line in marked] == [True, False, False, True]
    assert [line.showlegend for line in marked] == [True, False, False, True]
    assert marked[0].x[-1] == 20 and [len(line.x) for line in figure.data[::2]] == [2, 0, 0, 2]
    assert [note.text for note in figure.layout.annotations] == [
        "all tokens alike", "how often each token comes", "what follows each token"
    ]  # fmt: skip
    heights = [note.y for note in figure.layout.annotations]
    assert heights == list(finished.last.marks) and heights == sorted(heights, reverse=True)


def test_a_text_grows_from_the_prompt_at_every_test(finished):
    steps = [step for step, _ in finished.last.texts]
    assert steps[0] == 0 and steps[-1] == 20 and len(steps) == len(finished.last.tests) + 1
    assert "import os" in finished.growing.value and "After step 20 it writes" in finished.growing.value


def test_a_finished_training_is_recorded_as_plain_numbers(finished):
    first, second = finished.state.runs["code"]["runs"]
    assert (first["method"], second["method"]) == ("adamw", "comera + coap")
    assert second["compression"] == pytest.approx(4.23, rel=0.02) and second["pools_after_bytes"]["weights"] > 0
    for summary in (first, second):
        assert summary["steps"] == 20 and summary["loss_nats"] > 0 and type(summary["tokens_per_s"]) is float


def test_the_box_completes_and_says_what_may_come_next(finished):
    finished.box.entry.value = "def <b>alpha</b>"
    answer = finished.box.complete()
    assert answer == finished.box.complete(), "the likeliest each time"
    assert "comera + coap, 20 steps, writes" in finished.box.output.value
    assert "&lt;b&gt;alpha&lt;/b&gt;" in finished.box.output.value, "text of a learner is text"
    assert finished.box.candidates.value.count("<code>") == 5
    finished.box.temperature.value = 1.5
    assert finished.box.complete() != answer
    finished.box.entry.value = "x" * 3000
    finished.box.button.click()
    assert "at most 2,000 characters, got 3,000" in finished.card.text
    finished.box.entry.value = "class "
    finished.box.button.click()
    assert finished.card.text == ""


def test_the_static_figure_has_the_training_in_it(finished):
    frames = finished.static().layout.sliders[0].steps
    assert [step.label for step in frames] == ["0", "5", "10", "15", "20"]
    assert "LLaMA" in lab.CodeModelPanel(LabState()).static().layout.sliders[0].currentvalue.prefix


def test_the_box_is_closed_without_a_model_and_while_one_trains():
    panel = lab.CodeModelPanel(LabState())
    panel.box.button.click()
    assert "There is no model yet. Press Train first" in panel.card.text
    panel.steps.value = 30
    seen = []

    def in_the_middle(progress):
        if progress.step == 5:
            seen.append(panel.box.button.disabled)
            with pytest.raises(ValueError, match="The model is in training"):
                panel.box.complete()
            panel.stop()

    panel.runner._on_item = in_the_middle
    panel.run(wait=True)
    assert seen == [True] and not panel.box.button.disabled
    assert panel.runner.state == "stopped" and panel.last.trainer.steps_done == 5 and panel.box.complete() is not None
    panel.runner._on_item = panel._guarded_item
    panel.resume(wait=True)
    assert panel.last.finished and panel.last.trainer.steps_done == 30
    panel.steps.value = 20
    assert "The last training was: adamw, 30 steps" in panel.verdict.value
