"""One live pre-training on code, with what its panel shows of it: losses, one text that grows, bytes by pool."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import torch

from comera_lab.experiments.completion import complete
from comera_lab.experiments.language_model import (
    LanguageConfig,
    LanguageTrainer,
    RankPlan,
    language_config,
    language_optimizer,
    prepare,
    rank_trainer,
)
from comera_lab.experiments.ngrams import Marks, marks
from comera_lab.experiments.rank_training import RankTrainer
from comera_lab.experiments.recorder import StepRow
from comera_lab.experiments.tokens import TokenData, TokenStreams
from comera_lab.memory import Pools, measure
from comera_lab.models.decoder import Decoder
from comera_lab.objectives import model_size
from comera_lab.panels.live import History

METHODS = ("adamw", "coap", "comera", "comera + coap")
# Best of rates that double, as in data/results/lm_code_cpu.jsonl
RATES = {"adamw": 1.25e-3, "coap": 5e-3, "comera": 2.5e-3, "comera + coap": 1.25e-3}
BATCH, VALIDATION_BLOCKS = 8, 64
TESTS = 8  # evaluations in one training, the end included
AVERAGED = 10  # steps that make one point of a curve
WRITTEN, WARMTH = (
    40,
    0.6,
)  # tokens of the text that is shown while training; the likeliest alone would go round in circles
START_PROMPT = "import os\n\ndef "


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """What the learner chose."""

    method: str
    steps: int
    seed: int = 0

    @property
    def config(self) -> LanguageConfig:
        """The pre-training: "code-small" or its tensorised twin, which ends 4.23 times smaller."""
        tensorised, projected = self.method.startswith("comera"), self.method.endswith("coap")
        base = language_config("code-small-comera" if tensorised else "code-small")
        coap = language_config("code-small-coap").training
        training = replace(
            coap if projected else base.training,
            steps=self.steps,
            batch_size=BATCH,
            learning_rate=RATES[self.method],
            seed=self.seed,
            evaluate_every=max(1, self.steps // TESTS),
        )
        ranks = RankPlan() if tensorised else None
        return replace(base, training=training, validation_blocks=VALIDATION_BLOCKS, ranks=ranks)

    def words(self) -> str:
        return f"{self.method}, {self.steps} steps"


@cache
def code_data() -> tuple[TokenStreams, TokenData, Marks]:
    """The corpus of the panel, its blocks, and what counting alone reaches on them: some seconds the first time."""
    streams, data = prepare(CodeSettings(method="adamw", steps=TESTS).config)
    return streams, data, marks(streams, data)


class CodeRun:
    """`advance` makes one step, or one evaluation with a line of text; after the last step the cut to 4.23x.

    `pools` are measured in the second step (before it an optimizer has no state), and after the cut again.
    """

    def __init__(self, settings: CodeSettings, prompt: str) -> None:
        self.settings, self.prompt = settings, prompt
        self.streams, data, self.marks = code_data()
        config = settings.config
        model = config.model.build(torch.Generator().manual_seed(settings.seed))
        assert isinstance(model, Decoder)
        self.model = model
        self._data, self._config = data, config
        self._ranks = rank_trainer(config, model, data) if config.ranks is not None else None
        self._plain = None if self._ranks else LanguageTrainer(
            model, data, config.training, optimizer=language_optimizer(model, config.training)
        )  # fmt: skip
        self.pools: Pools | None = None
        self.pools_after: Pools | None = None
        self.losses = History("step", "loss_nats", "step_time_ms")
        self.tests = History("step", "loss_nats", "accuracy")
        self.texts: list[tuple[int, str]] = [(0, self._written())]
        self.finished = False

    @property
    def trainer(self) -> LanguageTrainer | RankTrainer:
        found = self._ranks or self._plain
        assert found is not None
        return found

    @property
    def fraction(self) -> float:
        return self.trainer.steps_done / self.settings.steps

    @property
    def tokens_per_s(self) -> float:
        times = self.losses["step_time_ms"][1:]
        return 1e3 * BATCH * self._config.tokens / float(median(times)) if len(times) else 0.0

    @property
    def parameters(self) -> int:
        """Numbers in the model at its live ranks."""
        return model_size(self.model).total

    @property
    def compression(self) -> float:
        """The dense model over this one."""
        return model_size(self.model).total_ratio

    def advance(self) -> None:
        trainer = self.trainer
        if trainer.done:
            if self._ranks is not None:
                self._ranks.finish()
                self.pools_after = self._pools_of_the_cut_model()
            self._test()
            self.finished = True
        elif trainer.evaluation_due:
            self._test()
        else:
            row = self._step()
            self.losses.add(row.step, row.loss_nats, row.step_time_ms)

    def _step(self) -> StepRow:
        if self.trainer.steps_done != 1:
            return self.trainer.step()
        rows: list[StepRow] = []
        inner = self._ranks.trainer if self._ranks is not None else self._plain
        assert inner is not None
        self.pools = measure(lambda: rows.append(self.trainer.step()), self.model, inner.optimizer).pools
        return rows[0]

    def _pools_of_the_cut_model(self) -> Pools:
        """Bytes of a step that goes on from the cut model, in its twin: the model itself stays as it ended."""
        twin = copy.deepcopy(self.model)
        training = replace(self._config.training, steps=3, learning_rate=1e-9)
        trainer = LanguageTrainer(twin, self._data, training, optimizer=language_optimizer(twin, training))
        trainer.step()
        return measure(trainer.step, twin, trainer.optimizer).pools

    def _test(self) -> None:
        row = self.trainer.evaluate()
        self.tests.add(row.step, row.loss_nats, row.accuracy)
        self.texts.append((row.step, self._written()))

    def _written(self) -> str:
        return complete(self.model, self.streams.tokenizer, self.prompt, tokens=WRITTEN, temperature=WARMTH)

    def summary(self) -> dict[str, object]:
        """Settings and results as plain numbers."""
        tested = len(self.tests) > 0
        return {
            "method": self.settings.method,
            "steps": self.trainer.steps_done,
            "learning_rate": RATES[self.settings.method],
            "parameters": self.parameters,
            "compression": self.compression,
            "loss_nats": float(self.tests["loss_nats"][-1]) if tested else None,
            "tokens_per_s": self.tokens_per_s,
            "pools_bytes": None if self.pools is None else self.pools.as_dict(),
            "pools_after_bytes": None if self.pools_after is None else self.pools_after.as_dict(),
        }
