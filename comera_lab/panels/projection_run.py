"""Real gradients of a network in training, on a tape, and a basis that follows them: nothing here draws."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comera_lab.experiments.train import TrainConfig, Trainer
from comera_lab.memory import StateSettings, optimizer_bytes
from comera_lab.models.mlp import MLP
from comera_lab.optimizers.projection import (
    align_basis,
    captured_energy,
    oriented,
    project,
    random_basis,
    refresh_basis,
    sketch_basis,
    subspace_angle_degrees,
    svd_basis,
)
from comera_lab.panels.lanes import digits_28
from comera_lab.panels.live import History
from comera_lab.panels.state import PROJECTION_METHODS

FEATURES = (784, 256, 256, 10)
COLS = FEATURES[1]
BATCH, LEARNING_RATE = 64, 1e-3
TAPE_STEPS = 240
BEST_EVERY = 4  # steps of the tape from one full decomposition to the next
BETA1 = 0.9  # of the first moment that the alignment step looks at, as in AdamW
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RANDOM, FULL_SVD, REFRESH, ALIGNED, PUBLISHED = PROJECTION_METHODS
# whose bytes are counted: the rule in comera_lab.memory
OPTIMIZER_OF = {RANDOM: "flora", FULL_SVD: "galore", REFRESH: "coap", ALIGNED: "coap", PUBLISHED: "coap"}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tape:
    """`gradients` (steps, rows, cols) of the second hidden layer. `best` (points, cols): the energy share that the best
    basis of each rank keeps, at each of `best_steps` (points,)."""

    gradients: Tensor
    best_steps: Array
    best: Array


class TapeRecorder:
    """Trains 784 → 256 → 256 → 10 on the digits with AdamW; `advance` makes a step and keeps its gradient."""

    def __init__(self, seed: int = 0) -> None:
        model = MLP(FEATURES, generator=torch.Generator().manual_seed(seed))
        config = TrainConfig(
            steps=TAPE_STEPS, batch_size=BATCH, learning_rate=LEARNING_RATE, evaluate_every=0, seed=seed
        )
        self._weight = model.hidden[1].get_parameter("weight")
        self._trainer = Trainer(model, digits_28(), config)
        self._gradients = torch.empty(TAPE_STEPS, COLS, COLS)
        self._best: dict[int, Array] = {}

    @property
    def steps_done(self) -> int:
        return self._trainer.steps_done

    @property
    def finished(self) -> bool:
        return self._trainer.done

    def advance(self) -> None:
        step = self.steps_done
        self._trainer.step()
        assert self._weight.grad is not None
        gradient = self._gradients[step]
        gradient.copy_(oriented(self._weight.grad))
        if step % BEST_EVERY == 0:
            squares = torch.linalg.eigvalsh((gradient.mT @ gradient).double()).flip(0).clamp_min(0).cumsum(0)
            self._best[step + 1] = (squares / squares[-1]).numpy()

    def tape(self) -> Tape:
        return Tape(self._gradients, np.array(list(self._best), dtype=float), np.array(list(self._best.values())))


_tapes: dict[int, Tape] = {}


def tape_in_steps(seed: int = 0) -> Iterator[int]:
    """Record the tape of a seed, unless this process has it; yields the steps made so far."""
    if seed not in _tapes:
        recorder = TapeRecorder(seed)
        while not recorder.finished:
            recorder.advance()
            yield recorder.steps_done
        _tapes[seed] = recorder.tape()


def digits_tape(seed: int = 0) -> Tape:
    """The tape of a seed, recorded once per process: two or three seconds."""
    for _ in tape_in_steps(seed):
        pass
    return _tapes[seed]


@dataclass(frozen=True, kw_only=True)
class ProjectionSettings:
    """What the learner chose: the traits of LabState that the projection panel reads."""

    projection_method: str
    projection_rank: int
    update_interval: int
    refresh_factor: int
    gradient_precision: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.gradient_precision]

    def words(self) -> str:
        text = f"{self.projection_method}, rank {self.projection_rank}, every {self.update_interval} steps"
        if OPTIMIZER_OF[self.projection_method] == "coap":
            text += f", refresh at every {_ordinal(self.refresh_factor)} of them"
        return f"{text}, {self.gradient_precision}"

    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer of this method keeps for the whole network, predicted from its shapes."""
        return network_bytes(OPTIMIZER_OF[self.projection_method], self.projection_rank, self.dtype)


def network_bytes(optimizer: str, rank: int, dtype: torch.dtype = torch.float32) -> int:
    """Predicted bytes of an optimizer's state for the network on the tape, hidden weights projected to `rank`."""
    pairs = list(pairwise(FEATURES))
    shapes = [*((n_out, n_in) for n_in, n_out in pairs), *((n_out,) for _, n_out in pairs)]
    return optimizer_bytes(shapes, optimizer, dtype, StateSettings(rank=rank)).total


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number, "th")
    return f"{number}{ending}"


@dataclass(frozen=True)
class Update:
    """One change of the basis: `kind` is "random", "svd", "refresh" or "alignment", `angle` to the basis before it.

    `moved` is False where the new basis is bit for bit the old one.
    """

    step: int
    kind: str
    angle_degrees: float
    moved: bool
    time_ms: float


class Replay:
    """A basis that follows the gradients of a tape by one method; `advance` takes the next gradient.

    The first basis is that of the first gradient (a random one for the random method); it is no update.
    """

    def __init__(self, settings: ProjectionSettings, tape: Tape) -> None:
        self.settings, self.tape = settings, tape
        self.energy = History("steps", "energy_percent")
        self.updates: list[Update] = []
        self._generator = torch.Generator().manual_seed(0)
        self._basis: Tensor | None = None
        self._momentum: Tensor | None = None

    @property
    def finished(self) -> bool:
        return len(self.energy) == len(self.tape.gradients)

    @property
    def fraction(self) -> float:
        return len(self.energy) / len(self.tape.gradients)

    def advance(self) -> None:
        step = len(self.energy)
        exact = self.tape.gradients[step]
        gradient = exact.to(self.settings.dtype)
        basis = self._moved_basis(step, gradient)
        low = project(gradient, basis)
        self._momentum = (1 - BETA1) * low if self._momentum is None else BETA1 * self._momentum + (1 - BETA1) * low
        share = float(captured_energy(exact, basis.float()))
        self.energy.add(step + 1, 100 * share)

    def _moved_basis(self, step: int, gradient: Tensor) -> Tensor:
        old = self._basis
        if old is None:
            self._basis = self._first_basis(gradient)
            for kind in {kind for number in (1, self.settings.refresh_factor) if (kind := self._kind(number))}:
                self._new_basis(kind, gradient, self._basis)  # off the record: the first call of a routine is slower
            return self._basis
        if step % self.settings.update_interval:
            return old
        kind = self._kind(step // self.settings.update_interval)
        if kind is None:
            return old
        began = time.perf_counter()
        new = self._new_basis(kind, gradient, old)
        elapsed_ms = 1e3 * (time.perf_counter() - began)
        moved = not torch.equal(old, new)
        angle = float(subspace_angle_degrees(old, new)) if moved else 0.0
        self.updates.append(Update(step + 1, kind, angle, moved, elapsed_ms))
        self._basis = new
        return new

    def _first_basis(self, gradient: Tensor) -> Tensor:
        rank = self.settings.projection_rank
        if self.settings.projection_method == RANDOM:
            return self._random(gradient)
        if self.settings.projection_method == FULL_SVD:
            return svd_basis(gradient, rank)
        return sketch_basis(gradient, rank)

    def _kind(self, number: int) -> str | None:
        """What happens at the basis update of this number, from 1; None where the method skips it."""
        method = self.settings.projection_method
        if method in (RANDOM, FULL_SVD):
            return "random" if method == RANDOM else "svd"
        if number % self.settings.refresh_factor == 0:
            return "refresh"
        return None if method == REFRESH else "alignment"

    def _new_basis(self, kind: str, gradient: Tensor, old: Tensor) -> Tensor:
        if kind == "random":
            return self._random(gradient)
        if kind == "svd":
            return svd_basis(gradient, self.settings.projection_rank)
        if kind == "refresh":
            return refresh_basis(gradient, old)
        published = self.settings.projection_method == PUBLISHED
        return align_basis(gradient, old, self._momentum, kind="paper" if published else "scale-free")

    def _random(self, gradient: Tensor) -> Tensor:
        rank = self.settings.projection_rank
        return random_basis(gradient.shape[-1], rank, self._generator, dtype=gradient.dtype)

    # what came of it

    @property
    def mean_percent(self) -> float:
        return float(self.energy["energy_percent"].mean())

    @property
    def best_percent(self) -> Array:
        """What the best basis of this rank keeps, at each of the tape's `best_steps`."""
        return 100 * self.tape.best[:, self.settings.projection_rank - 1]

    def of_kind(self, kind: str) -> list[Update]:
        return [update for update in self.updates if update.kind == kind]

    def times_ms(self) -> Iterator[tuple[str, float]]:
        """(kind of update, median ms measured here) of each kind that occurred."""
        for kind in dict.fromkeys(update.kind for update in self.updates):
            yield kind, median(update.time_ms for update in self.of_kind(kind))

    def until(self, share: float) -> tuple[Array, Array, list[Update]]:
        """(steps, energy in percent, updates) of that share of the tape."""
        last = share * len(self.tape.gradients)
        steps = self.energy["steps"]
        seen = steps <= last
        return steps[seen], self.energy["energy_percent"][seen], [u for u in self.updates if u.step <= last]
