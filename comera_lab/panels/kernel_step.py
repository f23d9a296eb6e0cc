"""Lesson 12: a small kernel program by program, the addresses it reads and writes, its masks, and its score."""

from __future__ import annotations

import html

import ipywidgets as widgets
import plotly.graph_objects as go
import torch

from comera_lab.kernels.pointer_model import Trace, program_words
from comera_lab.kernels.puzzles import ANSWERS, PUZZLES, Call, interpreter_obstacle, run_interpreter, run_model
from comera_lab.panels.figures import with_slider
from comera_lab.panels.kernel_figures import FILLS, address_words, fill_memory_cells, memory_figure, positions
from comera_lab.panels.panel import Panel
from comera_lab.panels.state import LabState
from comera_lab.panels.widgets import ChoiceControl, NumberControl, heading, say, sentence, text_widget, tiles

KIT, MINE = "the kit", "me, as checked last"
BLOCKS = ("2", "4", "8", "16")
MAX_SIZE, FIRST_SIZE, FIRST_BLOCK = 16, 13, "4"
STATIC_POSITIONS = 13
_KEY = (("R", 3, "read now"), ("W", 4, "written now"), ("×", 2, "masked"), ("·", 1, "touched once before"),
        ("2", 1, "touched twice, and so on"))  # fmt: skip


class KernelStepPanel(Panel):
    """A kernel of lesson 12, run just now, one load or store at a time.

    Controls: `kernel`, `whose`, `size`, `block`, `program`, `step`. `trace` holds every access of the launch,
    `position` is the number of the one that is shown. Figure: `memory`. A kernel of the learner appears under `whose`
    once a check has run it.
    """

    kind = "kernel-step"

    def __init__(self, state: LabState | None = None) -> None:
        super().__init__(state)
        self._make_controls()
        self._launch()
        self.memory = self._live(memory_figure(self.trace, 0), "t-memory", "")
        self.where, self.numbers = text_widget(" ", "t-where"), text_widget(" ", "t-numbers")
        self.engine = text_widget(sentence(engine_words()), "t-engine")
        self._draw_soon = self._throttled(self._draw)
        self._fit_sliders()
        for control in (self.kernel, self.whose, self.size, self.block):
            control.on_change(self._guarded(lambda value: self._relaunch()))
        self.program.on_change(self._guarded(lambda value: self._program_changed()))
        self.step.on_change(self._guarded(lambda value: self._show()))
        self._show()
        left = widgets.VBox([control.widget for control in (self.kernel, self.whose, self.block)])
        right = widgets.VBox([control.widget for control in (self.size, self.program, self.step)])
        columns = widgets.HBox([left, right])
        columns.add_class("comera-columns")
        self._compose(
            heading(
                "What a kernel touches",
                "A kernel is a function that many programs run, each on its own piece. Drag the step: R is read, W is "
                "written, × is a lane that the mask holds back.",
            ),
            columns, self.where, self.memory.widget, text_widget(_key(), "t-key"), self.numbers, self.engine,
        )  # fmt: skip

    def _make_controls(self) -> None:
        self.kernel = ChoiceControl("kernel", "kernel", "masked add", tuple(PUZZLES), "Which of four kernels runs.")
        self.whose = ChoiceControl(
            "whose", "written by", KIT, (KIT, MINE), "The kit's own kernel, or yours once a check has run it."
        )
        self.size = NumberControl(
            "size", "size", FIRST_SIZE, 1, MAX_SIZE, "Elements of a vector, or rows and columns of the output."
        )
        self.block = ChoiceControl(
            "block", "block", FIRST_BLOCK, BLOCKS, "Lanes of a program along one side; powers of two, as Triton wants."
        )
        self.program = NumberControl("program", "program", 0, 0, 1, "Which program is shown, counted from 0.")
        self.step = NumberControl("step", "load or store", 1, 1, 2, "Which load or store of this program is shown.")

    @property
    def position(self) -> int:
        """The number of the access that is shown, among all of the launch."""
        return self._starts[int(self.program.value)] + int(self.step.value) - 1

    def table(self) -> str:
        columns = f"{'program':>9}  {'does':<6} {'tensor':<7}{'elements':>9}{'masked':>8}"
        trace = self.trace
        lines = [f"{self._name}: {trace.reads} reads, {trace.writes} writes", columns]
        for program, start in enumerate(self._starts):
            for access in trace.accesses[start : self._ends[program]]:
                does, masked = "writes" if access.writes else "reads", access.active.size - access.count
                lines.append(
                    f"{program_words(access.program):>9}  {does:<6} {access.tensor:<7}{access.count:>9}{masked:>8}"
                )
        rest = len(lines) - 26
        return "\n".join([*lines[:26], *([f"… {rest} more"] if rest > 0 else []), engine_words()])

    def static(self) -> go.Figure:
        """The launch with a slider over its loads and stores."""
        figures = [(str(k + 1), memory_figure(self.trace, k)) for k in positions(self.trace, STATIC_POSITIONS)]
        return with_slider(figures, "load or store ")

    def _launch(self) -> None:
        """Run the chosen kernel; on a fault everything stays as it was."""
        puzzle = PUZZLES[self.kernel.value]
        if self.whose.value == MINE and puzzle.name not in ANSWERS:
            self.whose.offer_options((KIT, MINE), KIT)
            self.whose.complain(f"No kernel of yours for the {puzzle.name} has been checked yet. Run its check first.")
        kernel = ANSWERS[puzzle.name] if self.whose.value == MINE else puzzle.kernel
        generator = torch.Generator().manual_seed(0)
        call = puzzle.call(int(self.size.value), int(self.block.value), generator)
        trace = run_model(kernel, call)
        if not trace.accesses:
            raise ValueError("this kernel loads and stores nothing. Fill it in, and run its check again.")
        self.call: Call = call
        self.trace: Trace = trace
        self._puzzle, self._name = puzzle, f"{puzzle.name} by {self.whose.value}, {call!r}"
        programs = [access.program for access in trace.accesses]
        self._starts = [k for k, program in enumerate(programs) if k == 0 or program != programs[k - 1]]
        self._ends = [*self._starts[1:], len(programs)]

    def _relaunch(self) -> None:
        self._launch()
        self._fit_sliders()
        self._show(whole=True)

    def _fit_sliders(self) -> None:
        self.program.limit(len(self._starts) - 1, f"of {len(self._starts)}", 0)
        self._fit_step()

    def _fit_step(self) -> None:
        k = int(self.program.value)
        count = self._ends[k] - self._starts[k]
        self.step.limit(count, f"of {count}", min(int(self.step.value), count))

    def _program_changed(self) -> None:
        self._fit_step()
        self._show()

    def _show(self, whole: bool = False) -> None:
        trace, access = self.trace, self.trace.accesses[self.position]
        words = _access_words(trace, self.position)
        size = trace.tensors[access.tensor].numel()
        say(
            self.where,
            f"{sentence(words)}<div class='comera-line'><code>{html.escape(access.line)}</code></div>"
            f"{sentence(address_words(access, size))}",
        )
        say(self.numbers, tiles(self._counts()) + sentence(self._verdict()))
        if whole:
            self.memory.replace(memory_figure(trace, self.position), words)
            self.state.record("kernel_step", {**self.call.scalars, "kernel": self._puzzle.name, "score": trace.score})
        else:
            self._draw_soon()

    def _draw(self) -> None:
        with self.memory.edit(_access_words(self.trace, self.position)) as figure:
            fill_memory_cells(figure, self.trace, self.position)

    def _counts(self) -> list[tuple[str, str]]:
        done = self.trace.accesses[: self.position + 1]
        reads, writes = (sum(a.count for a in done if a.writes == kind) for kind in (False, True))
        masked = sum(access.active.size - access.count for access in done)
        return [
            (f"{reads} of {self.trace.reads}", "elements read"),
            (f"{writes} of {self.trace.writes}", "elements written"),
            (f"{masked}", "lanes masked so far"),
            (f"{self.trace.score}", "score: reads + writes"),
        ]

    def _verdict(self) -> str:
        """How often each input is read, and whether the result is right."""
        names = [name for name in self.trace.tensors if name != self.call.output]
        often = [f"{name} {self._read(name) / self.trace.tensors[name].numel():.3g}×" for name in names]
        right = torch.allclose(self.trace.tensors[self.call.output], self._puzzle.expected(self.call), atol=1e-4)
        agrees = "agrees with" if right else "differs from"
        return f"On average each element is read: {', '.join(often)}. The result {agrees} torch (computed here)."

    def _read(self, name: str) -> int:
        return sum(a.count for a in self.trace.accesses if a.tensor == name and not a.writes)


def engine_words() -> str:
    """What ran the kernels that are shown, and whether Triton itself agrees."""
    ran = "Addresses were noted while the kernel's own source ran, just now, in the kit's pointer model."
    obstacle = interpreter_obstacle()
    if obstacle is not None:
        return f"{ran} Triton's interpreter cannot run here: {obstacle}."
    puzzle = PUZZLES["row sum"]
    call = puzzle.call(5, 4, torch.Generator().manual_seed(0))
    same = torch.allclose(run_interpreter(puzzle.kernel, call), puzzle.expected(call), atol=1e-5)
    return f"{ran} Triton's interpreter {'runs here, too' if same else 'runs here but computes a row sum wrongly'}."


def _access_words(trace: Trace, position: int) -> str:
    access = trace.accesses[position]
    masked = access.active.size - access.count
    held = f", {masked} of {access.active.size} lanes masked" if masked else ""
    verb, noun = "writes" if access.writes else "reads", "element" if access.count == 1 else "elements"
    return f"Program {program_words(access.program)} {verb} {access.count} {noun} of {access.tensor}{held}."


def _key() -> str:
    box = "display:inline-block;min-width:22px;text-align:center;border-radius:3px;margin:0 6px 0 0"
    parts = (
        f"<span style='white-space:nowrap;margin-right:18px'><span style='{box};background:{FILLS[fill]}'>{mark}</span>"
        f"{words}</span>"
        for mark, fill, words in _KEY
    )
    return f"<div class='comera-line'>{''.join(parts)}</div>"
