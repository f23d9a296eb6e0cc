"""Memory of real GPUs, and whether a training step fits."""

from __future__ import annotations

# Gigabytes as NVIDIA's and AMD's data sheets print them: RTX 3060, 3090, 4090 and 5090 specification pages; data
# sheets "NVIDIA T4", "L4", "L40S", "V100", "A100 80GB" (both sizes), "H100" (SXM5), "H200", "B200" in "DGX B200"
# (1,440 GB in eight); "AMD Instinct MI300X".
GPUS: dict[str, int] = {
    "RTX 3060": 12,
    "T4": 16,
    "RTX 3090": 24,
    "RTX 4090": 24,
    "L4": 24,
    "RTX 5090": 32,
    "V100": 32,
    "A100 40GB": 40,
    "L40S": 48,
    "A100 80GB": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "MI300X": 192,
}
GB = 10**9
# For what is in no pool: the context of the driver, workspaces of kernels, gaps between tensors. GaLore (arXiv
# 2403.03507) measured LLaMA-1B on one text of 256 tokens, Table 11: its peaks of 8-bit Adam, of 8-bit GaLore and of
# layer-wise AdamW lie 0.6 to 0.8 GB above the pools planned here. (Its AdamW that is not layer-wise lies 2.1 above:
# torch's step over all parameters at once makes copies; the fused one makes none.)
OVERHEAD = 8 * GB // 10


def capacity(gpu: str) -> int:
    """Bytes of a GPU, one of `GPUS`, that the four pools may fill: what the maker prints, less `OVERHEAD`.

    Raises ValueError for another name.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}. Pick one of them.")
    return GPUS[gpu] * GB - OVERHEAD


def fits_on(count: int) -> tuple[str, ...]:
    """The GPUs of the list that hold this many bytes, smallest first."""
    return tuple(gpu for gpu in GPUS if count <= capacity(gpu))
