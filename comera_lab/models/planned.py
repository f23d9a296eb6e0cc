"""Models that the planner knows by name, built on the meta device: their twins on cores, inputs and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comera_lab.layers import as_linear, tt_layers
from comera_lab.memory import METHODS, PRECISIONS, Footprint, Inputs, Plan, PlanSettings, footprint, plan
from comera_lab.models.decoder import DECODERS, DecoderConfig
from comera_lab.models.dlrm import DLRMConfig
from comera_lab.models.masked import CODEBERT, MaskedConfig
from comera_lab.shapes import ShapeError, TTMShape, TTShape

# Of the whole model: what CoMERA (arXiv 2405.14377, abstract) reports for CodeBERT, its only language model.
COMPRESSION = 4.23
# Tables of fewer rows (positions, segments) stay dense.
TABLE_ROWS = 1000


@dataclass(frozen=True)
class PlannedModel:
    """A model by name. `build` makes the dense one (rank None) or its twin, with `blocks` blocks, on any device.

    `longest` is the longest sequence, None where there is none to choose; `blocks` None where none repeat. `rank` is
    fixed where the paper gives one, else it follows from the compression.
    """

    name: str
    build: Callable[[int | None, int | None], nn.Module]
    inputs: Callable[[int, int], Inputs]
    loss: Callable[[Any], Tensor]
    blocks: int | None
    longest: int | None
    sequence: int
    batch: int
    rank: int | None = None

    def plan(
        self,
        settings: PlanSettings,
        *,
        sequence: int | None = None,
        batch: int | None = None,
        rank: int | None = None,
        compression: float = COMPRESSION,
        methods: tuple[str, ...] = tuple(METHODS),
    ) -> Plan:
        """Pools of the methods. Raises ShapeError for a sequence or a batch out of range."""
        sequence, batch = sequence or self.sequence, batch or self.batch
        if self.longest is not None and not 1 <= sequence <= self.longest:
            raise ShapeError(
                f"sequence must lie in [1, {self.longest:,}], the positions of {self.name}, got {sequence:,}. "
                "Shorten it."
            )
        if batch < 1:
            raise ShapeError(f"batch must be at least 1, got {batch}. Give a number of rows.")
        rank = rank or self.rank or self.rank_for(compression)
        dense, compressed = (
            self._footprint(chosen, sequence, batch, settings.precision, settings.checkpointing)
            for chosen in (None, rank)
        )
        tokens = f"{batch:,} x {sequence:,} tokens" if self.longest is not None else f"{batch:,} rows"
        saved = dense.parameters / compressed.parameters
        title = f"{self.name}: {dense.parameters:,} parameters, {saved:.2f}x fewer at rank {rank}; a step of {tokens}"
        return plan(title, dense, compressed, settings, methods)

    @lru_cache(maxsize=64)  # noqa: B019 (a handful of models, for the life of the process)
    def _footprint(self, rank: int | None, sequence: int, batch: int, precision: str, checkpointing: bool) -> Footprint:
        def traced(blocks: int | None) -> Footprint:
            return footprint(
                self._on_meta(rank, blocks),
                self.inputs(batch, sequence),
                dtype=PRECISIONS[precision].dtype,
                loss=self.loss,
                checkpointing=checkpointing,
            )

        if self.blocks is None or self.blocks <= 3:
            return traced(self.blocks)
        return traced(2).stretched(traced(3), self.blocks - 2)

    @lru_cache(maxsize=16)  # noqa: B019
    def _on_meta(self, rank: int | None, blocks: int | None) -> nn.Module:
        with torch.device("meta"):
            model = self.build(rank, blocks)
            for layer in tt_layers(model).values():
                layer.add_gates()
        return model

    @lru_cache(maxsize=16)  # noqa: B019
    def rank_for(self, compression: float) -> int:
        """The largest rank at which the whole model is at least `compression` times smaller, gates aside."""
        if self.blocks is None or self.blocks <= 3:
            counts = [(1, self._on_meta(None, self.blocks))]
        else:
            counts = [(3 - self.blocks, self._on_meta(None, 2)), (self.blocks - 2, self._on_meta(None, 3))]

        def size(rank: int | None) -> int:
            return sum(times * count_with_cores(model, rank) for times, model in counts)

        low, high, dense = 0, 4096, size(None)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if size(middle) * compression <= dense else (low, middle - 1)
        if not low:
            raise ValueError(
                f"compression must be at most {dense / size(1):.1f} for {self.name}, got {compression}: its head "
                "stays dense. Ask for less, or give a rank."
            )
        return low


def count_with_cores(model: nn.Module, rank: int | None) -> int:
    """Parameters of a dense model whose layers and large tables were cores of this rank; heads stay dense."""
    modules = dict.fromkeys(model.modules())
    tables = [module for module in modules if isinstance(module, nn.Embedding)]
    count = sum(parameter.numel() for parameter in model.parameters())
    if rank is None:
        return count
    heads = {table.weight.shape for table in tables}
    for module in modules:
        if isinstance(module, nn.Embedding) and module.num_embeddings >= TABLE_ROWS:
            count += (
                TTMShape.for_table(module.num_embeddings, module.embedding_dim, rank).params - module.weight.numel()
            )
        elif (linear := as_linear(module)) is not None and linear.weight.shape not in heads:
            count += _linear_params(linear.in_features, linear.out_features, rank) - linear.weight.numel()
    return count


@lru_cache(maxsize=4096)
def _linear_params(in_features: int, out_features: int, rank: int) -> int:
    return TTShape.for_features(in_features, out_features, rank).params


@lru_cache(maxsize=4096)
def _table_params(rows: int, columns: int, rank: int) -> int:
    return TTMShape.for_table(rows, columns, rank).params


def planned_model(name: str) -> PlannedModel:
    """A model of `PLANNED`. Raises ValueError, listing the names, for another."""
    if name not in PLANNED:
        raise ValueError(f"model must be one of {', '.join(PLANNED)}, got {name!r}. Pick one of them.")
    return PLANNED[name]


def token_inputs(batch: int, sequence: int) -> Inputs:
    """Ids and targets (batch, sequence) on the meta device."""
    ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    return ids, ids.clone()


def _own_loss(loss: Any) -> Tensor:
    assert isinstance(loss, Tensor)
    return loss


def _language(name: str, config: DecoderConfig | MaskedConfig, sequence: int, batch: int) -> PlannedModel:
    def build(rank: int | None, blocks: int | None) -> nn.Module:
        changed: Any = {"layers": blocks or config.layers}
        if rank is not None:
            changed |= {"kind": "tt", "rank": rank, "word_rank": rank}
        return dataclasses.replace(config, **changed).build()

    longest = min(config.positions, 512) if isinstance(config, MaskedConfig) else config.positions
    return PlannedModel(name, build, token_inputs, _own_loss, config.layers, longest, sequence, batch)


def _click_loss(logits: Any) -> Tensor:
    targets = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits.float(), targets)


def _recommender() -> PlannedModel:
    criteo = DLRMConfig.criteo("dense")

    def build(rank: int | None, blocks: int | None) -> nn.Module:
        from comera_lab.models.dlrm import DLRM

        return DLRM(criteo if rank is None else dataclasses.replace(DLRMConfig.criteo("tt"), rank=rank))

    def inputs(batch: int, sequence: int) -> Inputs:
        return (torch.empty(batch, criteo.numbers + len(criteo.table_rows), dtype=torch.int32, device="meta"),)

    # Batch 10,000 and rank 16: the smallest batch of CoMERA's DLRM figure, and the rank of its authors' code.
    return PlannedModel("dlrm", build, inputs, _click_loss, None, None, 1, 10_000, DLRMConfig.criteo("tt").rank)


# 256 tokens, as GaLore and COAP train LLaMA; the batch is this kit's choice.
PLANNED = {name: _language(name, config, 256, 16) for name, config in DECODERS.items()}
PLANNED |= {"codebert": _language("codebert", CODEBERT, 512, 16), "dlrm": _recommender()}
