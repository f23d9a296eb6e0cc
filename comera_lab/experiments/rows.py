"""The kinds of row, and a row as one line of JSON: typed on the way out, checked on the way in."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from comera_lab.experiments.result_rows import LanguageResultRow, RankResultRow

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The first row of a run: enough to know what the numbers below it mean, and to make them again."""

    device: str
    driver: str | None
    threads: int
    torch: str
    triton: str | None
    commit: str | None
    command: str
    seed: int | None
    config: dict[str, Any]
    date: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One training step: the loss before the update, in nats. `gradient_norm` is None where unknown."""

    step: int
    loss_nats: float
    step_time_ms: float
    elapsed_s: float
    gradient_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """Loss (nats) and accuracy (0..1) on the test side after `step` steps; `elapsed_s` is training time."""

    step: int
    loss_nats: float
    accuracy: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class ResumeRow:
    """The run went on from a checkpoint: rows of the run before that lie after `step` are void."""

    step: int


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """How one training ended. Step times are quantiles over its steps, on the device named in the first row."""

    model: str
    rank: int | None
    parameters: int
    seed: int
    steps: int
    stopped: str
    accuracy: float
    loss_nats: float
    step_time_ms: float
    step_time_p20_ms: float
    step_time_p80_ms: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """Live ranks of every tensor-train layer after `step` steps, closing 1s included, and what they add up to.

    `cores` and `total` count parameters at live ranks, without and with the dense part. `stage` is "early",
    "late" or "done".
    """

    step: int
    stage: str
    cores: int
    total: int
    ranks: dict[str, Any]
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class DiffusionRow:
    """A diffusion model after `step` steps: mean squared error of the noise on the test side, where 1 is knowing
    nothing, and the Frechet distance of `samples` images from the training images; `elapsed_s` is training time."""

    step: int
    test_loss_mse: float
    frechet: float
    samples: int
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class DiffusionResultRow:
    """How one training of a diffusion study ended. `optimizer_bytes` are those of its state tensors after the run.

    `loss_mse` is the mean of the last 50 steps. `frechet_real` and `frechet_noise` are the distances of held-out real
    images and of noise. Times are of steps of all methods in turn, on a quiet machine: medians of the whole step and
    of the update alone, and the slowest update, in which bases are renewed.
    """

    optimizer: str
    rank_ratio: float | None
    learning_rate: float
    seed: int
    steps: int
    parameters: int
    loss_mse: float
    test_loss_mse: float
    frechet: float
    frechet_real: float
    frechet_noise: float
    optimizer_bytes: int
    step_time_ms: float
    update_time_ms: float
    slowest_update_time_ms: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class RecommenderRow:
    """How one recommender ended, on the test split. `learning_rate` and `epochs` were chosen on dev, best `dev_auc`.

    `normalised_entropy` is the cross-entropy over that of the base rate. `table_mib` counts all tables, small ones
    included; `total_ratio` is the dense model over this one, `tables_ratio` the same for tables. `calibration` holds
    [mean probability, share of yes, rows] for ten bins of equally many rows.
    """

    model: str
    rank: int | None
    target_ratio: float | None
    seed: int
    learning_rate: float
    epochs: int
    steps: int
    dev_auc: float
    auc: float
    normalised_entropy: float
    accuracy: float
    table_mib: float
    total_mib: float
    tables_ratio: float
    total_ratio: float
    calibration: list[Any]
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """What the compiler made of one kernel at one tile for sm_`capability`: read off the machine code, nothing was run.

    `registers` are per thread; `spill_bytes` are a thread's bytes of stack, `shared_bytes` a program's. Instructions
    are counted in the listing: `matrix_instructions` of the kind "wgmma" or "mma", loads from global memory (copies
    into shared memory included), and those of them that move 16 bytes a thread. `products` holds the operand types
    of the matrix products in the source, such as "bf16".
    """

    kernel: str
    capability: int
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    products: list[Any]
    matrix_kind: str | None
    matrix_instructions: int
    loads: int
    wide_loads: int
    wide_stores: int


@dataclass(frozen=True, kw_only=True)
class OptimizerResultRow:
    """How one training of an optimizer study ended. `arm` is "comparison" or "ablation", `settings` the optimizer's.

    `train_loss_nats` is the mean over the last fifth of the steps, before each update; the other two are of the
    held-out side, means of the last five evaluations, 20 steps apart. `state_mib` is what the optimizer keeps; the step
    time is a median.
    """

    arm: str
    optimizer: str
    settings: dict[str, Any]
    dtype: str
    learning_rate: float
    seed: int
    steps: int
    train_loss_nats: float
    loss_nats: float
    accuracy: float
    state_mib: float
    step_time_ms: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One measurement: `value` is a median in `unit`, p20 and p80 its quantiles over `repeats` calls."""

    op: str
    provider: str
    mode: str
    value: float
    unit: str
    p20: float | None = None
    p80: float | None = None
    repeats: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None
    note: str = ""


Row = (
    RunInfo
    | StepRow
    | EvalRow
    | ResumeRow
    | ResultRow
    | RankRow
    | RankResultRow
    | DiffusionRow
    | DiffusionResultRow
    | RecommenderRow
    | KernelRow
    | OptimizerResultRow
    | LanguageResultRow
    | BenchRow
)

_KINDS: dict[str, type[Row]] = {
    "run": RunInfo,
    "step": StepRow,
    "eval": EvalRow,
    "resume": ResumeRow,
    "result": ResultRow,
    "rank": RankRow,
    "rank_result": RankResultRow,
    "diffusion": DiffusionRow,
    "diffusion_result": DiffusionResultRow,
    "recommender": RecommenderRow,
    "kernel": KernelRow,
    "optimizer_result": OptimizerResultRow,
    "language_result": LanguageResultRow,
    "bench": BenchRow,
}
_NAMES = {row_type: kind for kind, row_type in _KINDS.items()}
_HINTS = {kind: get_type_hints(row_type) for kind, row_type in _KINDS.items()}


def as_dict(row: Row) -> dict[str, Any]:
    """The row as `read_rows` gives it: its fields and `kind`."""
    return {"kind": _NAMES[type(row)], **dataclasses.asdict(row)}


def to_line(row: Row) -> str:
    if type(row) not in _NAMES:
        raise ValueError(f"a row must be one of {sorted(t.__name__ for t in _NAMES)}, got {type(row).__name__}.")
    values = as_dict(row)
    nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        values.update(dict.fromkeys(nonfinite, None), nonfinite=nonfinite)
    checked_row(values, type(row).__name__)
    try:
        return json.dumps(values, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{type(row).__name__} must hold plain finite values: {error}.") from error


def checked_row(parsed: Any, where: str) -> dict[str, Any]:
    """The fields of one row with non-finite numbers put back, or a ValueError that says which field is wrong."""
    if not isinstance(parsed, dict) or parsed.get("kind") not in _KINDS:
        raise ValueError(f"{where} must be an object whose kind is one of {', '.join(_KINDS)}: got {parsed!r:.80}.")
    values: dict[str, Any] = dict(parsed)
    kind = values["kind"]
    version = values.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{where} has schema version {version}, this comera_lab reads version {SCHEMA_VERSION}. "
            "Read it with the version that wrote it."
        )
    values.update({name: float(text) for name, text in values.pop("nonfinite", {}).items()})
    hints = _HINTS[kind]
    if values.keys() - {"kind"} != hints.keys():
        missing, extra = hints.keys() - values.keys(), values.keys() - hints.keys() - {"kind"}
        raise ValueError(
            f"{where}: row of kind {kind} must have exactly its fields, but lacks {sorted(missing)} "
            f"and has unknown {sorted(extra)}."
        )
    for name, hint in hints.items():
        if not _fits(values[name], hint):
            wanted = _KINDS[kind].__annotations__[name]
            raise ValueError(f"{where}: {name} in a row of kind {kind} must be {wanted}, got {values[name]!r:.80}.")
    return values


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)
