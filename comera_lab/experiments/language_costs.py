"""What a pre-training costs on this machine: time and bytes of a real step, as it begins and as it ends, by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from comera_lab.experiments.language_model import (
    LanguageConfig,
    LanguageTrainer,
    language_optimizer,
    prepare,
    rank_trainer,
)
from comera_lab.experiments.provenance import commit
from comera_lab.experiments.rank_training import RankTrainer
from comera_lab.experiments.tokens import TokenData, TokenStreams
from comera_lab.layers import compact, tt_layers
from comera_lab.memory import measure, mib

PARTS = ("cores", "gates", "dense, projected", "dense, plain")


def memory_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Numbers and bytes of all parameters by part after a step, as text: CoMERA's share and COAP's in one table.

    Bytes are those of the tensors that are there: parameters, their gradients, what the optimizer keeps for them.
    """
    layers = tt_layers(model).values()
    cores = {id(core) for layer in layers for core in layer.cores}
    gates = {id(gate) for layer in layers for gate in layer.gates}
    rows = {part: [0, 0, 0, 0] for part in PARTS}
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        key = id(parameter)
        part = PARTS[0 if key in cores else 1 if key in gates else 2 if "basis" in state else 3]
        kept = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        grad = 0 if parameter.grad is None else parameter.grad.nbytes
        for place, count in enumerate((parameter.numel(), parameter.nbytes, grad, kept)):
            rows[part][place] += count
    lines = [f"{'part':<18}{'numbers':>11}{'weights MiB':>13}{'grads MiB':>11}{'optimizer MiB':>15}"]
    total = [sum(row[place] for row in rows.values()) for place in range(4)]
    for part, row in [*((part, row) for part, row in rows.items() if row[0]), ("all", total)]:
        lines.append(f"{part:<18}{row[0]:>11,}{mib(row[1]):>13.3f}{mib(row[2]):>11.3f}{mib(row[3]):>15.3f}")
    return "\n".join([*lines, "(measured here, the tensors after a step)"])


def trainer_of(config: LanguageConfig, data: TokenData) -> LanguageTrainer | RankTrainer:
    """A new model of `config` and its trainer."""
    model = config.model.build(torch.Generator().manual_seed(config.training.seed))
    if config.ranks is not None:
        return rank_trainer(config, model, data)
    return LanguageTrainer(model, data, config.training, optimizer=language_optimizer(model, config.training))


def costs(
    configs: Sequence[LanguageConfig],
    ranks: Sequence[Mapping[str, Sequence[int]]],
    streams: TokenStreams | None,
    timed_steps: int,
) -> list[dict[str, Any]]:
    """The fields of a row that time and bytes decide, for each config as it begins and with its last ranks."""
    data = prepare(configs[0], streams)[1]
    trainers: list[LanguageTrainer | RankTrainer] = []
    for config, last in zip(configs, ranks, strict=True):
        # as it begins: far from any cut
        config = replace(config, training=replace(config.training, steps=100 * (timed_steps + 2)))
        trainers += [trainer_of(config, data), _as_it_ended(config, last, data)]
    times: list[list[float]] = [[] for _ in trainers]
    for _ in range(timed_steps + 1):
        for taken, trainer in zip(times, trainers, strict=True):
            taken.append(trainer.step().step_time_ms)
    pools = [_pools(trainer) for trainer in trainers]
    fields = []
    for number, config in enumerate(configs):
        begun, ended = 2 * number, 2 * number + 1
        step_ms = median(times[begun][1:])
        fields.append({
            "pools_before_mib": pools[begun],
            "pools_after_mib": pools[ended],
            "step_time_ms": step_ms,
            "step_time_after_ms": median(times[ended][1:]),
            "tokens_per_s": 1e3 * config.training.batch_size * config.tokens / step_ms,
            "cost_commit": commit(),
        })  # fmt: skip
    return fields


def _as_it_ended(config: LanguageConfig, ranks: Mapping[str, Sequence[int]], data: TokenData) -> LanguageTrainer:
    """A trainer of a model with these ranks, gates held as after the last cut; no size has a price any more."""
    model = config.model.build(torch.Generator().manual_seed(config.training.seed))
    _cut(model, ranks)
    return LanguageTrainer(model, data, config.training, optimizer=language_optimizer(model, config.training))


@torch.no_grad()
def _cut(model: nn.Module, ranks: Mapping[str, Sequence[int]]) -> None:
    layers = tt_layers(model)
    for name, layer in layers.items():
        layer.add_gates()
        for gate, rank in zip(layer.gates, ranks[name][1:-1], strict=True):
            gate[rank:] = 0.0
    if layers:
        compact(model)
    for layer in layers.values():
        layer.gates.requires_grad_(False)


def _pools(trainer: LanguageTrainer | RankTrainer) -> dict[str, float]:
    inner = trainer.trainer if isinstance(trainer, RankTrainer) else trainer
    found = measure(trainer.step, inner.model, inner.optimizer).pools
    return {name: mib(count) for name, count in found.as_dict().items()}
