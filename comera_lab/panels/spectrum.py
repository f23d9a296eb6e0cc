"""Lesson 02: the singular values of a real matrix, and what is left of it at a share of its energy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import torch
from torch import Tensor

from comera_lab.experiments.train import TrainConfig
from comera_lab.panels.figures import CORNER, FLOOR, fill_spectrum, spectrum_figure, with_slider
from comera_lab.panels.lanes import Lane, digits_28
from comera_lab.panels.panel import RunPanel
from comera_lab.panels.runner import Progress, Runner
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget, tiles

ROWS, COLUMNS = 256, 784
TRAINING_STEPS = 200
SOURCES = ("white noise", "digits matrix", "trained weight", "what training changed")
STATIC_ENERGIES = (50, 75, 90, 95, 99, 100)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Svd:
    """u (rows, k), values (k,), v (k, columns) of a matrix, and its name."""

    name: str
    matrix: Floats
    u: Floats
    values: Floats
    v: Floats

    @classmethod
    def of(cls, name: str, matrix: Tensor) -> Svd:
        u, values, v = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
        return cls(name, matrix.detach().double().numpy(), u.numpy(), values.numpy(), v.numpy())

    def rank_for(self, energy_percent: float) -> int:
        """Smallest rank that keeps this share of the energy, the sum of squared singular values."""
        share = np.cumsum(self.values**2) / np.sum(self.values**2)
        # 1e-12: the sum of all shares is 1 only up to rounding, and 100 % must not ask for more than all
        return min(int(np.searchsorted(share, energy_percent / 100 - 1e-12)) + 1, len(self.values))

    def cut(self, rank: int) -> Floats:
        """The best matrix of this rank (Eckart and Young 1936)."""
        return np.asarray((self.u[:, :rank] * self.values[:rank]) @ self.v[:rank])

    def error(self, rank: int) -> float:
        """Relative Frobenius error of `cut(rank)`: the tail of the spectrum."""
        return float(np.sqrt(np.sum(self.values[rank:] ** 2) / np.sum(self.values**2)))


def noise_matrix(seed: int) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class SpectrumPanel(RunPanel):
    """A 256 × 784 matrix under the knife. It opens with white noise; `run()` (the Load button) takes the real one.

    Controls: `energy` (50 to 100 %), `source` (one of SOURCES). Figure: `figure`. `svd` is what is shown.
    """

    kind = "spectrum"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self.svd = Svd.of(SOURCES[0], noise_matrix(self.state.seed))
        self.energy = NumberControl(
            "energy", "energy kept", self.state.energy_percent, 50.0, 100.0,
            "The share of the sum of squared singular values that the truncation must keep.", step=0.5, unit="%",
        )  # fmt: skip
        self.source = ChoiceControl(
            "source", "matrix", SOURCES[0], SOURCES,
            "Which 256 × 784 matrix is cut: pure noise, 256 digit images, or a layer trained on digits here.",
        )  # fmt: skip
        self.tiles, self.line = text_widget(" ", "t-tiles"), text_widget(" ", "t-line")
        self.figure = self._live(self._picture(self.svd.rank_for(self.energy.value)), "t-spectrum", "")
        bar = self._run_bar("Load matrix", "Loads the chosen matrix; a trained weight is trained for it, which takes "
                            "some seconds.", resume=False)  # fmt: skip
        bar.start.layout.width = "150px"
        self._draw = self._throttled(self._redraw)
        self._bind(self.energy, "energy_percent")
        self._watch("energy_percent", lambda change: self._energy_changed())
        self.source.on_change(self._guarded(lambda source: self._show_source()))
        self._energy_changed()
        self._show_source()
        self._compose(
            heading(
                "The SVD as a knife",
                "Choose how much energy to keep: the smallest rank that does so is cut out. Then load another matrix "
                "and compare.",
            ),
            self.source.widget, bar.widget, self.energy.widget, self.tiles, self.figure.widget, self.line,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        """The rank that keeps the chosen energy of the matrix that is shown."""
        return self.svd.rank_for(self.energy.value)

    def table(self) -> str:
        lines = [f"{self.svd.name}, {ROWS} x {COLUMNS}", f"{'energy %':>9}{'rank':>7}{'error %':>10}{'numbers':>10}"]
        for energy in sorted({*STATIC_ENERGIES, self.energy.value}):
            rank = self.svd.rank_for(energy)
            numbers = rank * (ROWS + COLUMNS)
            lines.append(f"{energy:>9g}{rank:>7}{100 * self.svd.error(rank):>10.2f}{numbers:>10,}")
        return "\n".join([*lines, f"the matrix itself holds {ROWS * COLUMNS:,} numbers"])

    def static(self) -> go.Figure:
        figures = [(f"{energy} %", self._picture(self.svd.rank_for(energy), corner=32)) for energy in STATIC_ENERGIES]
        return with_slider(figures, f"{self.svd.name}, energy kept ", active=STATIC_ENERGIES.index(90))

    def _energy_changed(self) -> None:
        self._show_numbers()
        self._draw()

    def _show_source(self) -> None:
        if not self.runner.active:
            shown, chosen = self.svd.name, self.source.value
            text = f"showing {shown}" if shown == chosen else f"showing {shown}; press Load matrix to see {chosen}"
            self.bar.status.value = sentence(text)

    def _middle(self, matrix: Floats, corner: int = CORNER) -> Floats:
        """A square from the middle: the rim of digit images is empty."""
        top, left = (ROWS - corner) // 2, (COLUMNS - corner) // 2
        return matrix[top : top + corner, left : left + corner]

    def _picture(self, rank: int, corner: int = CORNER) -> go.Figure:
        matrix, cut = self._middle(self.svd.matrix, corner), self._middle(self.svd.cut(rank), corner)
        return spectrum_figure(self.svd.values, rank, matrix, cut)

    def _redraw(self) -> None:
        svd, rank = self.svd, self.rank
        with self.figure.edit(self._words()) as figure:
            fill_spectrum(figure, svd.values, rank, self._middle(svd.matrix), self._middle(svd.cut(rank)))

    def _show_numbers(self) -> None:
        rank, whole = self.rank, ROWS * COLUMNS
        numbers = rank * (ROWS + COLUMNS)
        ratio = f"{whole / numbers:.1f}× smaller" if numbers <= whole else f"{numbers / whole:.1f}× larger"
        say(self.tiles, tiles([
            (f"{rank} of {len(self.svd.values)}", "rank"),
            (f"{100 * self.svd.error(rank):.1f} %", "relative error"),
            (f"{numbers:,}", f"numbers in {ROWS} × {rank} and {rank} × {COLUMNS}"),
            (ratio, f"than {whole:,}"),
        ]))  # fmt: skip
        say(self.line, sentence(self._words()))

    def _words(self) -> str:
        rank, name = self.rank, self.svd.name
        share = 100 * rank / len(self.svd.values)
        text = (
            f"{name[0].upper()}{name[1:]}: keeping {self.energy.value:g} % of the energy takes rank {rank}, "
            f"{share:.0f} % of the full rank, and leaves a relative error of {100 * self.svd.error(rank):.1f} %."
        )
        if rank * (ROWS + COLUMNS) > ROWS * COLUMNS:
            text += " Two thin matrices of this rank hold more numbers than the matrix itself: nothing is saved."
        empty = int(np.sum(self.svd.values < FLOOR * self.svd.values[0]))
        if empty:
            text += f" {empty} singular values are zero up to rounding; they are drawn on the lowest line."
        return text + f" The pictures show {CORNER} × {CORNER} numbers from the middle, all on one colour scale."

    def _job(self) -> Iterator[Progress]:
        source = self.source.value
        if source == "white noise":
            matrix = noise_matrix(self.state.seed)
        elif source == "digits matrix":
            matrix = digits_28().train_x[:ROWS]
        else:
            config = TrainConfig(steps=TRAINING_STEPS, evaluate_every=0, seed=self.state.seed)
            lane = Lane(source, (COLUMNS, ROWS, 10), "dense", 1, config)
            weight = next(lane.model.hidden.parameters())  # (256, 784), of the first layer
            before = weight.detach().clone()
            while not lane.finished:
                row = lane.advance()
                yield Progress(row.step, 0.95 * row.step / TRAINING_STEPS)
            matrix = weight - before if source == "what training changed" else weight
        yield Progress(TRAINING_STEPS, 1.0, Svd.of(source, matrix))

    def _item(self, progress: Progress) -> None:
        if isinstance(progress.payload, Svd):
            self.svd = progress.payload
            self._show_numbers()
            self._redraw()
            self.state.record("spectrum", {"source": self.svd.name, "singular_values": self.svd.values})

    def _changed(self, runner: Runner) -> None:
        super()._changed(runner)
        self._show_source()
