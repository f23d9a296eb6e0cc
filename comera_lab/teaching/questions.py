"""The guess-first question of every lesson. Answers are computed when they are asked for, never written down."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from comera_lab.layers import TTLinear
from comera_lab.memory import POOLS, StateSettings, predict, state_bytes
from comera_lab.models.mlp import MLP
from comera_lab.objectives import model_size
from comera_lab.shapes import TTMShape, TTShape, max_ranks

if TYPE_CHECKING:
    from comera_lab.panels.predict import Predict

REFRESH_SIZE, REFRESH_RANK = 512, 64
RACE_WIDTH, RACE_RANK, RACE_ROWS, RACE_REPEATS = 128, 8, 256, 15


def _rank_doubled() -> tuple[int, str]:
    small, large = (TTShape.for_features(784, 512, rank=rank).params for rank in (8, 16))
    ratio = large / small
    index = min(range(4), key=lambda choice: abs(ratio - (1, 2, 3.5, 16)[choice]))
    return index, (
        f"From {small:,} to {large:,} numbers: {ratio:.1f} times (predicted, from the shapes). "
        "A core between two bonds has the rank on both sides and grows with its square; an outer core has it once."
    )


def _batch_doubled() -> tuple[int, str]:
    once, twice = (predict(MLP((784, 512, 512, 10)), (batch, 784)).as_dict() for batch in (64, 128))
    grown = [pool for pool in POOLS if twice[pool] > 1.5 * once[pool]]
    assert len(grown) == 1
    factor = twice[grown[0]] / once[grown[0]]
    return POOLS.index(grown[0]), (
        f"Batch 64 to 128: {grown[0]} grow by {factor:.2f} times, the other three do not move (predicted). "
        "Weights, gradients and moments belong to the model; activations belong to the examples."
    )


def _digits_energy() -> tuple[int, str]:
    from comera_lab.panels.lanes import digits_28
    from comera_lab.panels.spectrum import ROWS, Svd, noise_matrix

    digits, noise = Svd.of("digits", digits_28().train_x[:ROWS]), Svd.of("noise", noise_matrix(seed=0))
    rank, noise_rank = digits.rank_for(90), noise.rank_for(90)
    share = rank / ROWS
    index = min(range(4), key=lambda choice: abs(share - (0.73, 0.33, 0.15, 0.03)[choice]))
    return index, (
        f"Rank {rank} of {ROWS} holds 90 % of the energy of the digits ({share:.0%}); noise needs {noise_rank} "
        "(computed just now). Images resemble each other, noise resembles nothing."
    )


def _bottleneck() -> tuple[int, str]:
    modes = TTShape.for_features(784, 512).modes
    ranks = max_ranks(modes)
    return 1, (
        f"Modes {modes} allow ranks up to {ranks}. Near the ends few indices lie on one side, "
        f"so the bond cannot carry more; the largest, {max(ranks)}, is at the middle."
    )


def _small_race() -> tuple[int, str]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RACE_ROWS, RACE_WIDTH, generator=generator).requires_grad_()
    dense = nn.Linear(RACE_WIDTH, RACE_WIDTH)
    train = TTLinear(RACE_WIDTH, RACE_WIDTH, rank=RACE_RANK, generator=generator)
    from comera_lab.panels.crossing import one_pass_ms

    samples = [[one_pass_ms(layer, x, x.detach()) for layer in (dense, train)] for _ in range(RACE_REPEATS)]
    dense_ms, train_ms = (median(column) for column in zip(*samples[3:], strict=True))
    ratio = train_ms / dense_ms
    index = 0 if ratio < 0.8 else 1 if ratio <= 1.25 else 2
    why = (
        "This machine starts small calls unusually fast.",
        "On this machine the two are even at this width.",
        "Several small calls cost more than one: most of the time goes into starting them.",
    )
    return index, (
        f"Dense {dense_ms:.2f} ms, tensor train {train_ms:.2f} ms a pass, measured here just now. "
        f"{why[index]} Width changes that: watch the panel."
    )


def _dearest_bond() -> tuple[int, str]:
    shape = TTShape.for_features(784, 512, rank=16)
    ranks, modes = shape.ranks, shape.modes
    freed = [ranks[k] * modes[k] + modes[k + 1] * ranks[k + 2] for k in range(len(modes) - 1)]
    place = freed.index(max(freed))
    index = 0 if place == 0 else 2 if place == len(freed) - 1 else 1
    return index, (
        f"One entry of bonds 1 to {len(freed)} frees {', '.join(map(str, freed))} numbers (predicted, from the shape). "
        "A slice of both neighbouring cores goes with it, and in the middle both are wide: there the price presses "
        "hardest. The rows of the strip show price against use, and the middle is useful, too."
    )


def _half_the_cores() -> tuple[int, str]:
    size = model_size(MLP(kind="tt", rank=16))
    share = (size.cores / 2 + size.dense) / size.total
    index = min(range(3), key=lambda choice: abs(share - (0.5, 0.66, 0.9)[choice]))
    return index, (
        f"{size.cores:,} core parameters become {size.cores // 2:,}, the {size.dense:,} of classifier and biases stay: "
        f"{share:.0%} of the model is left (predicted, by counting). The dense part cannot be cut."
    )


def _table_ratio() -> tuple[int, str]:
    small, large = (TTMShape.for_table(rows, 64, 16) for rows in (10_000, 10_000_000))
    growth = large.params / small.params
    index = min(range(4), key=lambda choice: abs(math.log(growth / (1, 10, 32, 1000)[choice])))
    return index, (
        f"The dense table grows {large.rows // small.rows:,} times, the cores {growth:.0f} times: {small.params:,} to "
        f"{large.params:,} numbers (predicted, from the shapes). Three cores share the rows: each row mode grows with "
        "the third root of their number."
    )


def _largest_part() -> tuple[int, str]:
    from comera_lab.models.encoder import EncoderConfig, PairEncoder
    from comera_lab.panels.pictures import encoder_parts

    with torch.device("meta"):
        dense, trains = (encoder_parts(PairEncoder(EncoderConfig.released(kind))) for kind in ("dense", "tt"))
    largest = max(trains, key=lambda part: trains[part])
    before = max(dense, key=lambda part: dense[part])
    counts = ", ".join(f"{part} {count:,}" for part, count in trains.items())
    return list(trains).index(largest), (
        f"{largest}: dense it was {before}. As tensor trains: {counts} (predicted, counted on meta tensors). A train "
        "grows with its modes and ranks, not with its matrix: the larger the matrix, the more it saves."
    )


def _stale_basis() -> tuple[int, str]:
    from comera_lab.optimizers.projection import captured_energy, svd_basis
    from comera_lab.panels.projection_run import digits_tape

    gradients = digits_tape().gradients
    basis = svd_basis(gradients[0], rank=8)
    first, later = (100 * float(captured_energy(gradients[step], basis)) for step in (0, 50))
    index = min(range(3), key=lambda choice: abs(later - (95, 50, 15)[choice]))
    return index, (
        f"{first:.1f} % of the first gradient, {later:.0f} % of the one 50 steps later (computed just now). A basis "
        "ages, and the first gradient of a training is a poor guide to the rest. Chance alone would keep 3 %."
    )


def _svd_or_refresh() -> tuple[int, str]:
    from comera_lab.optimizers.projection import refresh_basis, svd_basis

    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(REFRESH_SIZE, REFRESH_SIZE, generator=generator)
    basis = svd_basis(gradient, REFRESH_RANK)
    times: dict[str, list[float]] = {"svd": [], "refresh": []}
    for _ in range(5):
        for kind, make in (("svd", lambda: svd_basis(gradient, REFRESH_RANK)),
                           ("refresh", lambda: refresh_basis(gradient, basis))):  # fmt: skip
            began = time.perf_counter()
            make()
            times[kind].append(1e3 * (time.perf_counter() - began))
    svd_ms, refresh_ms = median(times["svd"]), median(times["refresh"])
    ratio = svd_ms / refresh_ms
    return (0 if ratio < 2 else 1 if ratio <= 10 else 2), (
        f"Full SVD {svd_ms:.1f} ms, warm refresh {refresh_ms:.2f} ms: {ratio:.0f} times, measured here just now. "
        "The SVD finds all directions from nothing; the refresh corrects the few that are kept."
    )


def _kernel_ratio() -> tuple[int, str]:
    whole = 2 * 512 * 512 * 9
    kept = state_bytes((512, 512, 3, 3), "coap", settings=StateSettings(rank_ratio=4.0)).published // 4
    times = whole / kept
    return min(range(3), key=lambda choice: abs(times - (4, 3.3, 2)[choice])), (
        f"AdamW keeps {whole:,} numbers, COAP {kept:,}: {times:.2f} times fewer (predicted). The core is "
        "four times smaller, and two bases come on top; a window of 3 x 3 shares their cost among nine."
    )


def _pools_of_a_decoder() -> tuple[int, str]:
    from comera_lab.experiments.language_model import language_config

    ids = torch.zeros(8, 128, dtype=torch.int32)
    with torch.device("meta"):
        model = language_config("code-small").model.build()
    pools = predict(model, (ids, ids)).as_dict()
    sizes = ", ".join(f"{name} {count / 2**20:.1f}" for name, count in pools.items())
    return POOLS.index(max(pools, key=lambda pool: pools[pool])), (
        f"MiB: {sizes} (predicted). What a step keeps for its backward pass grows with the batch, the other "
        "three with the model. The larger the model, the more they weigh."
    )


def _larger_tiles() -> tuple[int, str]:
    from comera_lab.kernels.puzzles import PUZZLES, run_model

    puzzle = PUZZLES["tiled product"]
    generator = torch.Generator().manual_seed(0)
    small, large = (run_model(puzzle.kernel, puzzle.call(16, block, generator)).reads for block in (4, 8))
    share = large / small
    return min(range(4), key=lambda choice: abs(share - (1, 0.5, 0.25, 0.125)[choice])), (
        f"From {small:,} to {large:,} elements read (counted just now). A tile twice as wide and high makes four times "
        "as many results from twice as many inputs: each element is read half as often."
    )


def _smallest_step() -> tuple[int, str]:
    from comera_lab.panels.budget_run import BudgetSettings

    def mib(model: str, optimizer: str) -> float:
        return BudgetSettings(
            model=model, optimizer=optimizer, rank=8, target_ratio=0.3, rank_ratio=4.0, steps=1, seconds=1.0
        ).predicted_mib

    before = mib("dense", "adamw")
    after = [mib("dense", "adamw-8bit"), mib("dense", "coap"), mib("tensor trains", "adamw")]
    return after.index(min(after)), (
        f"From {before:.2f} MiB to {after[0]:.2f}, {after[1]:.2f} and {after[2]:.2f} (predicted). An optimizer can "
        "save at most its own pool; weights and gradients stay. Tensor trains shrink three pools of four, and then the "
        "activations rule."
    )


def guess(lesson: str) -> Predict:
    """The question card of a lesson, for example guess("00")."""
    from comera_lab.panels.predict import Predict, Question
    from comera_lab.teaching.questions_13 import gpu_question
    from comera_lab.teaching.questions_15 import processes_question
    from comera_lab.teaching.teachers import teachers_question

    questions = {
        "00": Question(
            text="The rank goes from 8 to 16. What happens to the number of weights in the cores?",
            choices=("it stays the same", "it doubles", "it grows three to four times", "it grows sixteen times"),
            then="Now drag the rank slider above from 8 to 16 and read the number of weights.",
            answer=_rank_doubled,
        ),
        "01": Question(
            text="The batch doubles. Which pool of memory doubles with it?",
            choices=POOLS,
            then="Now drag the batch slider above and watch the four pools.",
            answer=_batch_doubled,
        ),
        "02": Question(
            text="The panel opens with white noise. Now 256 images of digits instead: how much of the full rank "
            "holds 90 % of their energy?",
            choices=("as much as for noise", "about a third", "about a seventh", "less than a twentieth"),
            then="Now choose the digits matrix above, press Load matrix and read the rank.",
            answer=_digits_energy,
        ),
        "03": Question(
            text="A 784 x 512 weight as a train of six cores. Which bond can carry the largest rank?",
            choices=("the first one", "the one in the middle", "the last one", "all the same"),
            then="Now push every bond of the panel above as far as it goes.",
            answer=_bottleneck,
        ),
        "04": Question(
            text=f"One small layer, {RACE_WIDTH} to {RACE_WIDTH}, {RACE_ROWS} rows, rank {RACE_RANK}. "
            "It has far fewer weights as a tensor train. Is it also faster?",
            choices=("yes, clearly faster", "about the same", "no, clearly slower"),
            then="Now choose width 128 in the panel below and press Time both.",
            answer=_small_race,
        ),
        "05": Question(
            text="All bonds of the 784 x 512 layer have rank 16 or what they can carry. One entry of one bond is "
            "closed. Where does that free most numbers?",
            choices=("at the first bond", "near the middle", "at the last bond"),
            then="Now press Start above and watch which rows of the strip fade first.",
            answer=_dearest_bond,
        ),
        "06": Question(
            text="The cores of the rank-16 network are cut to half. How much of the whole model is left?",
            choices=("half of it", "about two thirds", "nearly all of it"),
            then="Now set the target above to 0.5, press Start, and watch both lines of the size chart.",
            answer=_half_the_cores,
        ),
        "07": Question(
            text="A table of 64 columns grows from 10,000 to 10,000,000 rows. Its TT-matrix has three cores of rank "
            "16. How much do the cores grow?",
            choices=("hardly", "about ten times", "about thirty times", "a thousand times"),
            then="Now drag the rows above from 4 to 7 and read the tiles.",
            answer=_table_ratio,
        ),
        "08": Question(
            text="In the paper's dense transformer the two feed-forward matrices of each block are the largest part. "
            "And when all large matrices are tensor trains of rank 30?",
            choices=("the word table", "attention", "feed-forward", "what stays dense"),
            then="Now go down to the two bars below, which count both models.",
            answer=_largest_part,
        ),
        "09": Question(
            text="A basis of 8 directions of 256 is made from the first gradient of a training, and kept. How much of "
            "the gradient's energy lies inside it 50 steps later?",
            choices=("nearly all of it", "about half", "less than a quarter"),
            then="Now set the update interval above to 60, press Start, and look at the first 60 steps.",
            answer=_stale_basis,
        ),
        "10": Question(
            text=f"A gradient of {REFRESH_SIZE} x {REFRESH_SIZE}, a basis of rank {REFRESH_RANK}. How much longer does "
            "a full SVD take than a refresh from the old basis?",
            choices=("about as long", "a few times as long", "more than ten times as long"),
            then="Now compare the slowest steps of galore and coap in the table above.",
            answer=_svd_or_refresh,
        ),
        "11": Question(
            text="A kernel of 512 x 512 x 3 x 3 with rank ratio 4. How many times fewer numbers than AdamW does COAP "
            "keep for it, bases included?",
            choices=("four times", "a little over three times", "two times"),
            then="Now move the rank ratio above and compare the predicted MiB with those of adamw.",
            answer=_kernel_ratio,
        ),
        "12": Question(
            text="A product of matrices is made in tiles of 4 x 4, each by a program of its own. Now 8 x 8. What "
            "happens to the elements that are read in all?",
            choices=("the same are read", "half of them", "a quarter of them", "an eighth of them"),
            then="Now choose the tiled product above, size 16, and change the block from 4 to 8.",
            answer=_larger_tiles,
        ),
        "13": gpu_question(),
        "15": processes_question(),
        "14": Question(
            text="A step of the decoder above, 8 blocks of 128 tokens, AdamW. Which pool holds the most bytes?",
            choices=("weights", "grads", "optimizer", "activations"),
            then="Now train with adamw, then with comera + coap, and compare the four pools in the table.",
            answer=_pools_of_a_decoder,
        ),
        "16": Question(
            text="Two hidden layers of 512, dense, AdamW. Which one change takes most MiB off a training step: moments "
            "of one byte, COAP with a quarter of the directions, or tensor trains of rank 8?",
            choices=("moments of one byte", "COAP", "tensor trains"),
            then="Now choose each of them in the panel above and read the predicted MiB.",
            answer=_smallest_step,
        ),
        "T0": teachers_question(),
    }
    if lesson not in questions:
        raise ValueError(
            f"lesson must be one of {', '.join(questions)}, got {lesson!r}. Give the two digits of a lesson."
        )
    return Predict(questions[lesson])
