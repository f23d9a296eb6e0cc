"""Where a dense table no longer fits a memory limit and a TT-matrix still does: both really train under the limit.

Each try is a process of its own with a cap on its data segment (RLIMIT_DATA, Linux), which makes three steps of a
small DLRM with one large table under AdamW and reports its largest resident size, or is refused memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from comera_lab.experiments.recorder import BenchRow, Recorder
from comera_lab.memory import mib
from comera_lab.models.dlrm import DLRM, DLRMConfig, Kind
from comera_lab.shapes import positive_int

LIMIT_MIB = 2048
ROWS = (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 10_000_000)
_STEPS = 3
_BATCH = 2048
_SECONDS = 300
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "not enough memory",
    "Resource temporarily unavailable",
)


class CappedTry(NamedTuple):
    """Whether the steps could be made; largest resident size of the process (MiB) if so, else the reason it gave."""

    fits: bool
    peak_mib: float | None
    reason: str


def try_under_cap(kind: Kind, rows: int, limit_mib: int = LIMIT_MIB) -> CappedTry:
    """Three training steps with one table of `rows` rows and width 64, in a new process that may hold `limit_mib`.

    Raises RuntimeError where the process fails for anything but memory, OSError where the system has no such cap.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"RLIMIT_DATA caps a process on Linux, got {sys.platform}. Run this in a Linux container.")
    command = [sys.executable, "-m", "comera_lab.experiments.capped", kind, str(rows), str(limit_mib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return CappedTry(True, json.loads(done.stdout)["peak_mib"], "")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if not any(phrase in done.stderr for phrase in _NO_MEMORY):
        raise RuntimeError(f"a try must end in steps or for want of memory, got exit {done.returncode}: {last}")
    return CappedTry(False, None, last[:160])


def capped_study(out_path: str | Path, rows: Iterable[int] = ROWS, limit_mib: int = LIMIT_MIB) -> list[BenchRow]:
    """Try both kinds at every size under the limit and append a row for each: the peak, or 0 and the reason."""
    command = 'python -c "from comera_lab.experiments.capped import capped_study; capped_study(PATH)"'
    found = []
    with Recorder(out_path, {"limit_mib": limit_mib, "batch": _BATCH}, seed=0, command=command) as recorder:
        for count in rows:
            kinds: tuple[Kind, ...] = ("dense", "tt")
            for kind in kinds:
                outcome = try_under_cap(kind, count, limit_mib)
                row = BenchRow(
                    op="dlrm_capped",
                    provider=kind,
                    mode=f"largest resident size under {limit_mib} MiB" if outcome.fits else "does not fit",
                    value=outcome.peak_mib or 0.0,
                    unit="MiB",
                    sizes={"rows": count, "columns": 64, "batch": _BATCH, "limit_mib": limit_mib},
                    dtype="float32",
                    note=outcome.reason,
                )
                recorder.add(row)
                found.append(row)
    return found


def _train(kind: Kind, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    model = DLRM(DLRMConfig(table_rows=(rows, 1000), numbers=2, kind=kind), generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(_STEPS):
        columns = [torch.randint(0, high, (_BATCH,), generator=draw) for high in (1440, 600, rows, 1000)]
        y = torch.randint(0, 2, (_BATCH,), generator=draw)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(torch.stack(columns, dim=1).int()), y))
        optimizer.step()


def _main(kind: str, rows: str, limit_mib: str) -> None:
    import resource  # not on Windows

    torch.set_num_threads(1)
    limit = positive_int(int(limit_mib), "limit_mib") << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if kind not in ("dense", "tt"):
        raise ValueError(f"kind must be 'dense' or 'tt', got {kind!r}.")
    _train("dense" if kind == "dense" else "tt", int(rows))
    # VmHWM, not ru_maxrss: the latter starts from the size of the process that forked this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps({"peak_mib": mib(1024 * peak_kib)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
