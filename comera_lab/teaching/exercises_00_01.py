"""Exercises of lessons 00 (start here) and 01 (where training memory goes)."""

from itertools import pairwise
from typing import Any

import torch

from comera_lab.shapes import TTShape
from comera_lab.teaching.exercise import Exercise, Mistake

FIRST_LAYER = TTShape.for_features(784, 512, rank=8)
FLOAT32_BYTES = 4
OPTIMIZER_BYTES = {"sgd": 0, "momentum": 4, "adamw": 8}


def core_size(left: int, mode: int, right: int) -> int:
    """Numbers in a core (left, mode, right)."""
    return left * mode * right


def optimizer_bytes(params: int, optimizer: str) -> int:
    """Bytes of optimizer state in float32."""
    return params * OPTIMIZER_BYTES[optimizer]


def kept_numbers(batch: int, features: tuple[int, ...]) -> int:
    """Numbers an MLP with GELU keeps for backward: the input of every Linear and of every GELU."""
    return batch * (sum(features[:-1]) + sum(features[1:-1]))


def _optimizer_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    draw = int(torch.randint(1_000, 9_000, (), generator=generator))
    return [(draw, "adamw"), (draw, "momentum"), (draw, "sgd"), (1, "adamw")]


def _kept_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    batch = int(torch.randint(2, 90, (), generator=generator))
    return [(batch, (784, 512, 512, 10)), (1, (64, 32, 10)), (batch, (20, 10))]


EXERCISES = (
    Exercise(
        id="00.1",
        title="How many times smaller?",
        wants="one number: how many times smaller the tensor-train layer is",
        reference=FIRST_LAYER.compression,
        right="The dense layer has that many parameters for each parameter of the tensor train. "
        "The dense matrix is stored nowhere: forward works on the cores.",
        hints=(
            "Times smaller is a ratio of two counts. Which of the two is the larger?",
            "A layer with 100 numbers replaced by one with 20 is 5 times smaller.",
            "`times_smaller = dense / small`",
        ),
        mistakes=(
            Mistake(
                name="upside down",
                answer=FIRST_LAYER.params / FIRST_LAYER.dense_params,
                message="The ratio is upside down: this is the share that is left. Times smaller is large / small.",
            ),
            Mistake(
                name="per cent saved",
                answer=100 * (1 - FIRST_LAYER.params / FIRST_LAYER.dense_params),
                message="This is the percentage saved. Times smaller is a plain ratio: large / small.",
            ),
            Mistake(
                name="difference",
                answer=FIRST_LAYER.dense_params - FIRST_LAYER.params,
                message="This is how many numbers are saved, a difference. Times smaller is a ratio: divide.",
            ),
        ),
    ),
    Exercise(
        id="00.2",
        title="How many MiB?",
        wants="one number: the MiB that the cores take in float32",
        reference=FIRST_LAYER.params * FLOAT32_BYTES / 2**20,
        right="Numbers times 4 bytes, over 1,048,576. The panel's last tile says the same.",
        hints=(
            "First bytes, then MiB. How many bytes has one float32 number?",
            "A float32 number has 4 bytes; a MiB has 2**20 bytes.",
            "`mib = small * 4 / 2**20`",
        ),
        mistakes=(
            Mistake(
                name="bytes",
                answer=FIRST_LAYER.params * FLOAT32_BYTES,
                message="These are bytes. A MiB has 2**20 = 1,048,576 of them.",
            ),
            Mistake(
                name="numbers per MiB",
                answer=FIRST_LAYER.params / 2**20,
                message="This counts every number as one byte. A float32 number has 4.",
            ),
            Mistake(
                name="KiB",
                answer=FIRST_LAYER.params * FLOAT32_BYTES / 2**10,
                message="These are KiB. Divide by 1,024 once more.",
            ),
            Mistake(
                name="the dense table",
                answer=FIRST_LAYER.dense_params * FLOAT32_BYTES / 2**20,
                message="This is the dense table. The question is about the cores.",
            ),
        ),
    ),
    Exercise(
        id="00.3",
        title="The size of one core",
        wants="a function core_size(left, mode, right): how many numbers a core holds",
        reference=core_size,
        cases=lambda generator: [(1, 14, 8), (8, 8, 8), (8, 8, 1), (3, 5, 7)],
        right="A core is a small block: left rank times mode times right rank. The train is their sum.",
        hints=(
            "Look at the boxes in the panel: the first one says 1·14·8.",
            "A block of 2 by 3 by 4 holds as many numbers as 2 * 3 * 4.",
            "`return left * mode * right`",
        ),
        mistakes=(
            Mistake(
                name="adds",
                answer=lambda left, mode, right: left + mode + right,
                message="This adds the three sides. A block holds their product.",
            ),
            Mistake(
                name="forgets the mode",
                answer=lambda left, mode, right: left * right,
                message="The mode is missing: a core has one matrix of left x right for each of its values.",
            ),
            Mistake(
                name="forgets a rank",
                answer=lambda left, mode, right: left * mode,
                message="One rank is missing. A core has two neighbours, and a rank for each of them.",
            ),
        ),
    ),
    Exercise(
        id="01.1",
        title="Bytes per parameter with AdamW",
        wants="one number: bytes per parameter for weights, gradients and AdamW state together, in float32",
        reference=16,
        right="4 for the weight, 4 for its gradient, 8 for AdamW's two moments: four times the weights.",
        hints=(
            "For each parameter, list the numbers that are kept between two steps, and the gradient.",
            "AdamW keeps a running mean of the gradient and a running mean of its square.",
            "weight + gradient + first moment + second moment, each one float32 of 4 bytes.",
        ),
        mistakes=(
            Mistake(
                name="weights only",
                answer=4,
                message="That is the weight alone. Gradient and AdamW's state come on top.",
            ),
            Mistake(
                name="no optimizer state",
                answer=8,
                message="That is weight and gradient, or AdamW's state alone. Training needs all of them at once.",
            ),
            Mistake(
                name="one moment",
                answer=12,
                message="That counts one moment. AdamW keeps two: the mean of the gradient and the mean of its square.",
            ),
            Mistake(
                name="float64",
                answer=32,
                message="That is float64, 8 bytes a number. A float32 number has 4.",
            ),
            Mistake(name="bits", answer=128, message="These are bits. A byte has eight of them."),
        ),
    ),
    Exercise(
        id="01.2",
        title="Bytes an optimizer keeps",
        wants='a function optimizer_bytes(params, optimizer) for "sgd", "momentum" and "adamw", in float32',
        reference=optimizer_bytes,
        cases=_optimizer_cases,
        right="Plain SGD remembers nothing, momentum one number per parameter, AdamW two.",
        hints=(
            "How many numbers per parameter does each optimizer carry from one step to the next?",
            "None for sgd, one for momentum, two for adamw; a float32 number has 4 bytes.",
            'A dictionary does it: `per_param = {"sgd": 0, "momentum": 4, "adamw": 8}`',
        ),
        mistakes=(
            Mistake(
                name="counts the weights too",
                answer=lambda params, optimizer: params * (OPTIMIZER_BYTES[optimizer] + FLOAT32_BYTES),
                message="The weights are in there too. Count only what the optimizer itself remembers.",
            ),
            Mistake(
                name="counts weights and gradients too",
                answer=lambda params, optimizer: params * (OPTIMIZER_BYTES[optimizer] + 2 * FLOAT32_BYTES),
                message="Weights and gradients are in there too. Count only what the optimizer itself remembers.",
            ),
            Mistake(
                name="numbers, not bytes",
                answer=lambda params, optimizer: params * OPTIMIZER_BYTES[optimizer] // FLOAT32_BYTES,
                message="These are numbers, not bytes: a float32 number has 4 bytes.",
            ),
            Mistake(
                name="one moment for AdamW",
                answer=lambda params, optimizer: params * (0 if optimizer == "sgd" else 4),
                message="AdamW keeps two moments per parameter, momentum only one.",
            ),
        ),
    ),
    Exercise(
        id="01.3",
        title="bf16 with a float32 master copy",
        wants="one number: bytes per parameter with bf16 weight and gradient, float32 master copy and AdamW state",
        reference=16,
        right="2 + 2 + 4 + 8: the same sixteen bytes. bf16 halves activations and speeds up the products; "
        "with a master copy it saves nothing on weights and optimizer.",
        hints=(
            "A bf16 number has 2 bytes. Which of the parts are bf16 here?",
            "There are five numbers per parameter: weight, gradient, master weight, two moments.",
            "2 (weight) + 2 (gradient) + 4 (master) + 4 + 4 (moments)",
        ),
        mistakes=(
            Mistake(
                name="forgot the master copy",
                answer=12,
                message="The float32 master copy is missing: tiny updates vanish in bf16, so a float32 twin is kept.",
            ),
            Mistake(
                name="everything in bf16",
                answer=8,
                message="That has everything in bf16. Here master copy and moments stay in float32.",
            ),
            Mistake(
                name="float32 gradient",
                answer=18,
                message="The gradient has the dtype of the weight: bf16, 2 bytes.",
            ),
        ),
    ),
    Exercise(
        id="01.4",
        title="Numbers kept for backward",
        wants="a function kept_numbers(batch, features): how many numbers an MLP with GELU keeps for backward",
        reference=kept_numbers,
        cases=_kept_cases,
        right="Every Linear keeps its input, every GELU keeps its input, and all of it grows with the batch.",
        hints=(
            "Walk through the network and ask each layer: what must you remember to compute a gradient later?",
            "A Linear needs its input; a GELU needs its input. The last layer has no GELU after it.",
            "`batch * (sum(features[:-1]) + sum(features[1:-1]))`",
        ),
        mistakes=(
            Mistake(
                name="forgot the batch",
                answer=lambda batch, features: sum(features[:-1]) + sum(features[1:-1]),
                message="That is for one example. Every example of the batch keeps its own.",
            ),
            Mistake(
                name="forgot the GELU",
                answer=lambda batch, features: batch * sum(features[:-1]),
                message="The inputs of the Linears are there, those of the GELUs are missing.",
            ),
            Mistake(
                name="counts the last output",
                answer=lambda batch, features: batch * (sum(features) + sum(features[1:-1])),
                message="The output of the last layer is in there: no layer of the network needs it later.",
            ),
            Mistake(
                name="counts every output once",
                answer=lambda batch, features: batch * sum(features),
                message="That adds up one width per layer. A hidden layer keeps two tensors: before GELU and after it.",
            ),
            Mistake(
                name="counts the weights",
                answer=lambda batch, features: sum(a * b for a, b in pairwise(features)),
                message="Those are the weights. Activations are what flows: batch times width.",
            ),
        ),
    ),
)
