"""Training that chooses its ranks: an early stage prices size, a late stage steers to a target, a last cut meets it.

`RankTrainer` drives the one `Trainer`: same batches, clock, refusals and rows; what it adds is the objective of
the stage, gates in an optimizer group of their own, the ranks as they go, and the cuts.

Two things differ from the published training (CoMERA, arXiv 2405.14377); `cut_every=0` undoes the first. Adam moves
every gate by about its rate, whatever the pressure is worth, so the published late stage closes many entries in the
same few steps or none: here the late stage also brings the size down a straight line to the target, every
`cut_every` steps, by closing the entries that a few training batches miss least; two thirds in it compacts the model
and recovers at its target, gates held. And size is priced only while the model is above its line or target. On
digits(28) (784-512-512-10, rank 16, 300 + 300 steps, seed 0, target 0.5) the last cut takes the accuracy from 0.967 to
0.753 as published; with the line there is nothing left to cut at the end, and it is 0.979.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera_lab.experiments.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.rank_config import RankConfig, core_limit
from comera_lab.experiments.recorder import EvalRow, RankRow, Recorder, StepRow
from comera_lab.experiments.trainer import Trainer
from comera_lab.layers import CompactReport, TTModule, compact, resize, shapes_with_ranks, tt_layers
from comera_lab.objectives import BudgetReport, EarlyStage, LateStage, ModelSize, meet_target, model_size
from comera_lab.objectives.sizes import gated_layers, live_elements

__all__ = ["FinishReport", "RankConfig", "RankTrainer", "Stage"]

Stage = Literal["early", "late", "done"]
_SCORING_BATCHES = 4
_RAMP_SHARE = 2 / 3  # of the late stage; the rest is for recovering at the target
_CLOSE_ENOUGH = 0.01  # below the target, at the end of the line
_NO_CEILING = 10**9
# Settings that a resumed run may change: they decide what is written down, not what is computed.
_MAY_CHANGE = ("evaluate_every", "rank_rows_every")


@dataclass(frozen=True)
class FinishReport:
    """What `finish` did: `budget` is None without a target, or where the size was below it already."""

    budget: BudgetReport | None
    compact: CompactReport
    size: ModelSize
    limit: int | None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FinishReport:
        """The report that `dataclasses.asdict` took apart."""
        budget = None if values["budget"] is None else BudgetReport(**values["budget"])
        return cls(budget, CompactReport(**values["compact"]), ModelSize(**values["size"]), values["limit"])


class RankTrainer:
    """Trains `model` in place on `data`; its tensor-train layers get gates where they have none.

    Step until `done`, then `finish()`. `history` starts with the ranks before training and gets a RankRow every
    `config.rank_rows_every` steps and at every cut. `limit` is the number of core elements that the target
    allows. `make_optimizer` gets the model with its gates and is AdamW unless given. Raises ValueError, changing
    nothing, for a model without tensor-train layers, for gates of another kind, and for a target that leaves no
    room for cores.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        config: RankConfig,
        recorder: Recorder | None = None,
        *,
        make_optimizer: Callable[[nn.Module, RankConfig], torch.optim.Optimizer] | None = None,
        trainer_type: type[Trainer] = Trainer,
    ) -> None:
        layers = tt_layers(model)
        self.model, self.config, self.recorder = model, config, recorder
        self.limit = core_limit(model, config)
        for name, layer in layers.items():
            if len(layer.gates) and layer.gate_kind != config.gate_kind:
                raise ValueError(
                    f"{name!r} has gates of kind {layer.gate_kind!r}, got gate_kind={config.gate_kind!r}. "
                    "Use the kind it was trained with."
                )
        for layer in layers.values():
            if not len(layer.gates):
                layer.add_gates(config.gate_kind, config.gate_threshold)
        self._early = EarlyStage(config.gamma, config.beta)
        self._late = (
            None if self.limit is None else LateStage(target_params=self.limit, part="tensorised", beta=config.beta)
        )
        self._settled = EarlyStage(0.0, config.beta)
        self._late_start: int | None = None
        # Size is priced only while the model is above this many core elements: the target, or the line to it.
        self._allowed = self.limit
        optimizer = (_optimizer if make_optimizer is None else make_optimizer)(model, config)
        self.trainer = trainer_type(
            model, data, config.training(), recorder, optimizer=optimizer, objective=self._objective
        )
        self.finished: FinishReport | None = None
        self.history: list[RankRow] = [self._rank_row()]

    @property
    def stage(self) -> Stage:
        """What the next step works on."""
        if self.done:
            return "done"
        return "early" if self.trainer.steps_done < self.config.early_steps else "late"

    @property
    def done(self) -> bool:
        """Whether there are no steps left to make."""
        return self.finished is not None or self.trainer.done

    @property
    def evaluation_due(self) -> bool:
        return self.trainer.evaluation_due

    @property
    def rows(self) -> list[StepRow | EvalRow]:
        return self.trainer.rows

    @property
    def steps_done(self) -> int:
        return self.trainer.steps_done

    @property
    def elapsed_s(self) -> float:
        """Training time alone."""
        return self.trainer.elapsed_s

    def step(self) -> StepRow:
        """One update. Raises as `Trainer.step`, the model being that of the step before; ValueError when done."""
        if self.finished is not None:
            raise ValueError(f"the run was finished after {self.steps_done} steps. Start a new RankTrainer.")
        self._record_start()
        late = self.stage == "late"
        row = self.trainer.step()
        self._hold_floors()
        closed = late and self._close_to_line()
        every = self.config.compact_every
        if every and self.steps_done % every == 0:
            self.compact()
        elif closed or self.steps_done % self.config.rank_rows_every == 0:
            self._note_ranks()
        return row

    def evaluate(self) -> EvalRow:
        """Loss and accuracy on the test side, at the live ranks."""
        return self.trainer.evaluate()

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Live ranks of every tensor-train layer, closing 1s included."""
        return {name: layer.live_ranks for name, layer in tt_layers(self.model).items()}

    def size(self) -> ModelSize:
        """Exact sizes at the live ranks."""
        return model_size(self.model)

    def compact(self) -> CompactReport:
        """Cut what is closed by now out of cores and optimizer, and go on with the smaller model."""
        report = compact(self.model, self.trainer.optimizer)
        self._note_ranks()
        return report

    def finish(self) -> FinishReport:
        """Meet the target exactly, cut, and end the run. A second call returns the same report.

        Above the target, `meet_target` closes the entries that a few training batches miss least; the result is
        as close below the target as single entries allow. Raises ValueError, changing nothing, where the floors
        of the ranks need more than the target allows.
        """
        if self.finished is not None:
            return self.finished
        self._record_start()
        budget = None
        if self.limit is not None and self.size().cores > self.limit:
            budget = self._meet(self.limit)
        report = compact(self.model, self.trainer.optimizer)
        self.finished = FinishReport(budget, report, self.size(), self.limit)
        self._note_ranks()
        return self.finished

    def save(self, path: str | Path) -> None:
        """Write a checkpoint as `Trainer.save` does, with the ranks that the model was cut to and the stage's state."""
        late = self._late
        ranks = {
            "config": dataclasses.asdict(self.config),
            "ranks": {name: list(layer.shape.ranks) for name, layer in tt_layers(self.model).items()},
            "gates_train": {name: layer.gates[0].requires_grad for name, layer in _gated(self.model).items()},
            "limit": self.limit,
            "allowed": self._allowed,
            "late_start": self._late_start,
            "calls": [stage.calls for stage in (self._early, self._settled)],
            "late": None if late is None else [late.limit, late.smooth_loss, late.best_loss],
            "history": [dataclasses.asdict(row) for row in self.history],
            "finished": None if self.finished is None else dataclasses.asdict(self.finished),
        }
        write_checkpoint(Path(path), self.trainer.state() | {"rank_training": ranks})

    def load(self, path: str | Path) -> None:
        """Go on as if there had been no break: bitwise the same on the same CPU, before a cut and after it.

        The model may have other ranks than were saved: it gets those of the checkpoint. Raises CheckpointError for an
        unreadable file and ValueError, before anything is changed, for one of another run.
        """
        state = read_checkpoint(Path(path), self.trainer.device)
        saved = state.get("rank_training")
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path} is not a checkpoint of a RankTrainer. Give another file.")
        for name, value in dataclasses.asdict(self.config).items():
            if name not in _MAY_CHANGE and saved["config"].get(name) != value:
                raise ValueError(
                    f"{path} belongs to a run with {name}={saved['config'].get(name)!r}, got {name}={value!r}. "
                    "Use the same value, or start a new run."
                )
        self.trainer.refuse_other_run(state, Path(path), shapes_with_ranks(self.model, saved["ranks"]))
        resize(self.model, saved["ranks"], self.trainer.optimizer)
        for name, layer in _gated(self.model).items():
            layer.gates.requires_grad_(saved["gates_train"][name])
        self.trainer.restore(state)
        self.limit, self._allowed, self._late_start = saved["limit"], saved["allowed"], saved["late_start"]
        self._early.calls, self._settled.calls = saved["calls"]
        if self._late is not None:
            self._late.limit, self._late.smooth_loss, self._late.best_loss = saved["late"]
        self.history = [RankRow(**row) for row in saved["history"]]
        self.finished = None if saved["finished"] is None else FinishReport.from_dict(saved["finished"])

    def _meet(self, limit: int) -> BudgetReport:
        floors = {"*": (self.config.min_rank, _NO_CEILING)}
        was_training = self.model.training
        self.model.eval()
        try:
            return meet_target(self.model, limit, loss_of=self._scoring_losses, bounds=floors)
        finally:
            self.model.train(was_training)

    def _close_to_line(self) -> bool:
        """In the late stage, after a step: whether entries were closed to follow the line to the target."""
        assert self.limit is not None
        if self._late_start is None:
            self._late_start = max(self.history[-1].cores, self.limit)
        made = self.steps_done - self.config.early_steps
        every, end = self.config.cut_every, int(_RAMP_SHARE * self.config.late_steps)
        if not every or made > end:
            return False
        self._allowed = self._late_start + int((self.limit - self._late_start) * made / end)
        if made % every and made != end:
            return False
        if self.size().cores > self._allowed:
            self._meet(self._allowed)
        if made == end:
            self._settle(self.limit)
        return True

    @torch.no_grad()
    def _settle(self, limit: int) -> None:
        """Open the entries nearest to life while they fit, cut the rest, and hold the gates while the cores recover."""
        layers = list(_gated(self.model).values())
        closed = [
            (layer.gate_threshold - abs(float(gate[i])), layer, gate, int(i))
            for layer in layers
            for gate, effective in zip(layer.gates, layer.effective_gates(), strict=True)
            for i in (effective == 0).nonzero().flatten()
        ]
        for _, layer, gate, i in sorted(closed, key=lambda entry: entry[0]):
            if self.size().cores >= (1 - _CLOSE_ENOUGH) * limit:
                break
            before = gate[i].item()
            gate[i] = 2 * layer.gate_threshold
            if self.size().cores > limit:
                gate[i] = before
        compact(self.model, self.trainer.optimizer)
        for layer in layers:
            layer.gates.requires_grad_(False)

    def _objective(self, loss: Tensor, model: nn.Module) -> Tensor:
        if self._allowed is not None and float(live_elements(gated_layers(model))) <= self._allowed:
            return self._settled(loss, model)
        if self.stage == "late" and self._late is not None:
            return self._late(loss, model)
        return self._early(loss, model)

    def _scoring_losses(self) -> Iterator[Tensor]:
        data, size = self.trainer.data, self.config.batch_size
        draw = torch.Generator().manual_seed(self.config.seed)
        chosen = torch.randperm(len(data.train_y), generator=draw)[: size * _SCORING_BATCHES]
        for first in range(0, len(chosen), size):
            yield self.trainer.loss_of(chosen[first : first + size].to(data.train_y.device))

    @torch.no_grad()
    def _hold_floors(self) -> None:
        """Keep the largest `min_rank` entries of every bond just above the threshold."""
        for layer in _gated(self.model).values() if self.config.min_rank else ():
            for gate in layer.gates:
                floor, edge = min(self.config.min_rank, len(gate)), layer.gate_threshold
                value = gate if layer.gate_kind == "threshold" else gate.abs()
                if int((value > edge).sum()) < floor:
                    top = value.topk(floor).indices
                    gate[top] = torch.where(value[top] > edge, gate[top], 2 * edge)

    def _rank_row(self) -> RankRow:
        size = self.size()
        return RankRow(
            step=self.steps_done,
            stage=self.stage,
            cores=size.cores,
            total=size.total,
            ranks={name: list(ranks) for name, ranks in self.ranks().items()},
            elapsed_s=self.elapsed_s,
        )

    def _note_ranks(self) -> None:
        self.history.append(self._rank_row())
        if self.recorder is not None:
            self.recorder.add(self.history[-1])

    def _record_start(self) -> None:
        # Not when the trainer is made: a resumed run starts with other ranks.
        if self.recorder is not None and not self.steps_done and len(self.history) == 1:
            self.recorder.add(self.history[0])


def _gated(model: nn.Module) -> dict[str, TTModule]:
    return {name: layer for name, layer in tt_layers(model).items() if len(layer.gates)}


def _optimizer(model: nn.Module, config: RankConfig) -> torch.optim.Optimizer:
    layers = tt_layers(model).values()
    cores = [core for layer in layers for core in layer.cores if core.requires_grad]
    gates = [gate for layer in layers for gate in layer.gates]
    taken = {id(parameter) for parameter in (*cores, *gates)}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups = [
        {"params": cores, "lr": config.rate},
        {"params": gates, "lr": config.gate_rate},
        {"params": rest, "lr": config.rate},
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in (*cores, *gates, *rest))
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, fused=fused)
