"""The optimizer sizes that COAP published, rebuilt from shapes alone: nothing is downloaded or allocated.

Sizes: examples/README.md of the public code of COAP (J. Xiao and others, CVPR 2025, arXiv 2412.00071). Settings:
its example scripts. LLaMA shapes follow from hidden size, FFN size and depth; those of the U-Nets are in
`published_shapes.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from comera_lab.memory.states import Shape, StateBytes, StateSettings, optimizer_bytes

# name -> (hidden, FFN, layers); vocabulary 32,000, head not tied, no biases
LLAMA = {
    "60M": (512, 1376, 8),
    "130M": (768, 2048, 12),
    "350M": (1024, 2736, 24),
    "1B": (2048, 5461, 24),
    "7B": (4096, 11008, 32),
}
_VOCABULARY = 32_000
UNETS = ("ddpm-cifar10-32", "ddpm-celebahq-256", "controlnet-sdxl")


def llama_shapes(name: str) -> tuple[list[Shape], list[Shape]]:
    """(attention and MLP matrices, everything else): COAP and GaLore project the first. Raises ValueError."""
    if name not in LLAMA:
        raise ValueError(f"name must be one of {', '.join(LLAMA)}, got {name!r}. Pick one of them.")
    hidden, ffn, layers = LLAMA[name]
    matrices: list[Shape] = [*[(hidden, hidden)] * 4, *[(ffn, hidden)] * 2, (hidden, ffn)]
    rest: list[Shape] = [*[(_VOCABULARY, hidden)] * 2, *[(hidden,)] * (2 * layers + 1)]
    return matrices * layers, rest


def unet_shapes(name: str) -> list[Shape]:
    """Every parameter of a diffusion U-Net (or of the ControlNet for SDXL). Raises ValueError for another name."""
    if name not in UNETS:
        raise ValueError(f"name must be one of {', '.join(UNETS)}, got {name!r}. Pick one of them.")
    table = json.loads((Path(__file__).parent / "published_shapes.json").read_text(encoding="utf-8"))
    return [tuple(shape) for *shape, count in table[name] for _ in range(count)]


@dataclass(frozen=True)
class PublishedSize:
    """One line of the published table: what was printed, in MiB, and how to count it."""

    model: str
    optimizer: str
    mib: float
    count: Callable[[], StateBytes]


def count_llama(name: str, rank: int, *, bits: int = 16) -> StateBytes:
    """COAP on a LLaMA in bf16 as its public code keeps it: with `bits` 8, every moment takes one byte."""
    matrices, rest = llama_shapes(name)
    projected, plain = ("coap", "adamw") if bits == 16 else ("coap-8bit", "adamw-8bit")
    settings = StateSettings(rank=rank, state_dtype=torch.bfloat16, quantize_from=0)
    return optimizer_bytes(matrices, projected, torch.bfloat16, settings) + optimizer_bytes(
        rest, plain, torch.bfloat16, settings
    )


def count_unet(name: str, ratio: float, optimizer: str = "coap") -> StateBytes:
    """COAP on a U-Net in fp32 as its public code keeps it."""
    return optimizer_bytes(unet_shapes(name), optimizer, settings=StateSettings(rank_ratio=ratio, pointwise="out"))


PUBLISHED = (
    PublishedSize("DDPM CIFAR-10", "COAP-AdamW, ratio 1.5", 213.99, lambda: count_unet("ddpm-cifar10-32", 1.5)),
    PublishedSize("DDPM CelebA-HQ", "COAP-AdamW, ratio 2", 522.77, lambda: count_unet("ddpm-celebahq-256", 2)),
    PublishedSize(
        "ControlNet-SDXL", "COAP-Adafactor, ratio 2", 3704.91,
        lambda: count_unet("controlnet-sdxl", 2, "coap-adafactor"),
    ),
    PublishedSize("LLaMA-1B", "COAP-AdamW, rank 512, bf16", 1988.34, lambda: count_llama("1B", 512)),
    PublishedSize("LLaMA-7B", "COAP-AdamW-8bit, rank 1024", 5380.51, lambda: count_llama("7B", 1024, bits=8)),
)  # fmt: skip
