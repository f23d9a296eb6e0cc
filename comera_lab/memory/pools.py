"""Bytes in words: the four pools, and the report of predicted beside measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

POOLS = ("weights", "grads", "optimizer", "activations")
MIB = 2**20
# A gap that a reader should be told about in words.
GAP_LIMIT = 0.05
# 8-bit state as in bitsandbytes (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
# section 2): blocks of 256 elements, tensors under 4,096 elements stay in fp32.
QUANTIZED_BLOCK = 256
QUANTIZED_MIN_ELEMENTS = 4096


def mib(count: float) -> float:
    """Bytes -> MiB (2**20 bytes)."""
    return count / MIB


def format_bytes(count: float) -> str:
    """Bytes as text: "3.92 MiB"; under 0.1 MiB with four decimals, so that a small pool is not shown as 0."""
    return f"{mib(count):,.2f} MiB" if count == 0 or count >= MIB / 10 else f"{mib(count):.4f} MiB"


@dataclass(frozen=True)
class Pools:
    """Bytes per pool."""

    weights: int
    grads: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of the four pools, in bytes."""
        return self.weights + self.grads + self.optimizer + self.activations

    def as_dict(self) -> dict[str, int]:
        """Pool name -> bytes, in the order of `POOLS`."""
        return asdict(self)


class Precision(NamedTuple):
    """dtype of weights, grads and activations; `master` adds fp32 copies of the weights, moments in fp32."""

    dtype: torch.dtype
    master: bool


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(torch.float32, False),
    "bf16": Precision(torch.bfloat16, False),
    "bf16 + fp32 master": Precision(torch.bfloat16, True),
}


@dataclass(frozen=True)
class Measured:
    """One real training step on this machine, in bytes."""

    pools: Pools
    device: str
    # CUDA's own counters over the step; None where the device has none
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    # the whole process with Python and torch in it; None where the system does not tell
    rss_bytes: int | None
    notes: tuple[str, ...] = ()


# pool -> the usual reason of a gap
_LIKELY = {
    "weights": "A parameter or buffer was added or cast after the prediction.",
    "grads": "Some parameters received no gradient, or their dtype differs from the prediction.",
    "optimizer": "The running optimizer is not the predicted one, or it keeps more than its moments.",
    "activations": "The step saved other tensors than the prediction: another loss or batch, autocast, or dropout.",
}


@dataclass(frozen=True)
class MemoryReport:
    """Predicted beside measured: `.table()` for text, `.gaps()` for sentences about gaps above 5 %."""

    predicted: Pools
    measured: Pools | None = None
    device: str = "cpu"
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    rss_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def compare(cls, predicted: Pools, measured: Measured) -> MemoryReport:
        """A report from `predict(...)` and `measure(...)`."""
        return cls(
            predicted,
            measured.pools,
            measured.device,
            measured.allocated_peak_bytes,
            measured.reserved_peak_bytes,
            measured.rss_bytes,
            measured.notes,
        )

    def table(self) -> str:
        """Text table in MiB, one row per pool, then the process and device counters under their own names."""
        lines = [f"{'pool':<12}{'predicted MiB':>15}" + (f"{'measured here MiB':>19}" if self.measured else "")]
        predicted = self.predicted.as_dict() | {"total": self.predicted.total}
        measured = self.measured.as_dict() | {"total": self.measured.total} if self.measured else {}
        for name, count in predicted.items():
            cell = f"{mib(measured[name]):>19,.4f}" if measured else ""
            lines.append(f"{name:<12}{mib(count):>15,.4f}{cell}")
        counters = {
            "allocated peak, measured on": self.allocated_peak_bytes,
            "reserved peak, measured on": self.reserved_peak_bytes,
            "whole process (RSS, with Python and torch), measured beside": self.rss_bytes,
        }
        lines += [f"{name} {self.device}: {format_bytes(n)}" for name, n in counters.items() if n is not None]
        return "\n".join([*lines, *self.notes, *self.gaps()])

    def gaps(self) -> list[str]:
        """One sentence per pool whose measurement is more than 5 % away from its prediction."""
        if self.measured is None:
            return []
        sentences = []
        measured = self.measured.as_dict()
        for pool, predicted in self.predicted.as_dict().items():
            gap = measured[pool] - predicted
            if abs(gap) > GAP_LIMIT * predicted:
                share = f"{abs(gap) / predicted:.0%} " if predicted else ""
                sentences.append(
                    f"{pool}: measured {format_bytes(measured[pool])}, predicted {format_bytes(predicted)}, "
                    f"{share}{'more' if gap > 0 else 'less'} than predicted. {_LIKELY[pool]}"
                )
        return sentences

    def __str__(self) -> str:
        return self.table()
