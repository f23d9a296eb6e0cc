"""The planner: predicted pools of every method against real steps on models that do fit, and published sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comera_lab.__main__ import main
from comera_lab.layers import tt_layers
from comera_lab.memory import (
    GAP_LIMIT,
    GPUS,
    METHODS,
    POOLS,
    PRECISIONS,
    Footprint,
    Pools,
    capacity,
    fits_on,
    footprint,
    measure,
    mib,
    plan,
    predict,
    process_rss_bytes,
    repeated_blocks,
)
from comera_lab.memory.gpus import OVERHEAD
from comera_lab.memory.plan import PlanSettings, method_plan
from comera_lab.models.decoder import DecoderConfig
from comera_lab.models.masked import MaskedConfig
from comera_lab.models.planned import COMPRESSION, PLANNED, count_with_cores, planned_model
from comera_lab.optimizers import COAPAdamW, GaLoreAdamW, make_optimizer, step_in_backward
from comera_lab.shapes import ShapeError

SMALL = DecoderConfig(layers=3, width=128, hidden=344, heads=4, vocabulary=1200, positions=64, word_rank=6, rank=6)
IDS = torch.randint(1200, (4, 48), generator=torch.Generator().manual_seed(0))
RATIO = 4.0


def same(loss: Any) -> Tensor:
    assert isinstance(loss, Tensor)
    return loss


def small(compressed: bool, **changes: Any) -> nn.Module:
    model = DecoderConfig(**{**vars(SMALL), "kind": "tt" if compressed else "dense", **changes}).build()
    for layer in tt_layers(model).values():
        layer.add_gates()
    return model


def traced(model: nn.Module, **settings: Any) -> Footprint:
    return footprint(model, (IDS, IDS), loss=same, **settings)


def real_optimizer(method: str, model: nn.Module) -> torch.optim.Optimizer:
    """What a user would build: cores plain, tables plain unless COAP has the remainder."""
    rule = METHODS[method]
    cores = {id(p) for layer in tt_layers(model).values() for p in layer.parameters()}
    tables = {module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)}
    projected, plain, whole = [], [], []
    for parameter in model.parameters():
        if id(parameter) in cores:
            whole.append(parameter)
        elif parameter.shape in tables and rule.tables.startswith("adamw"):
            plain.append(parameter)
        else:
            projected.append(parameter)
    off = {"rank": None, "rank_ratio": None}
    if rule.matrices in ("adamw", "adamw-8bit"):
        return make_optimizer(rule.matrices, model.parameters(), 1e-3)
    groups = [{"params": projected}, {"params": plain, **off}, {"params": whole, **off}]
    groups = [group for group in groups if group["params"]]
    if rule.matrices == "galore":
        return GaLoreAdamW(groups, rank_ratio=RATIO)
    return COAPAdamW(groups, rank_ratio=RATIO, bits=8 if "8bit" in method else 32)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor = IDS) -> Callable[[], None]:
    def step() -> None:
        model(ids, ids).backward()
        optimizer.step()

    return step


def assert_close(predicted: Pools, measured: Pools) -> None:
    for pool in ("weights", "grads", "optimizer"):
        assert getattr(measured, pool) == getattr(predicted, pool), pool
    assert measured.activations == pytest.approx(predicted.activations, rel=GAP_LIMIT)


# predicted against measured


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_equals_a_real_step_of_a_small_decoder(method: str) -> None:
    model = small(METHODS[method].compressed)
    optimizer = real_optimizer(method, model)
    predicted = method_plan(method, traced(model), PlanSettings(precision="fp32", rank_ratio=RATIO)).pools
    assert_close(predicted, measure(step_of(model, optimizer), model, optimizer).pools)


def test_projected_moments_follow_the_precision() -> None:
    model = small(False).to(torch.bfloat16)
    groups = [{"params": [p for p in model.parameters() if p.shape != (1200, 128)]},
              {"params": [p for p in model.parameters() if p.shape == (1200, 128)], "rank_ratio": None}]  # fmt: skip
    optimizer = COAPAdamW(groups, rank_ratio=RATIO, state_dtype=torch.bfloat16)
    predicted = method_plan("coap", traced(model, dtype=torch.bfloat16), PlanSettings(rank_ratio=RATIO)).pools
    assert_close(predicted, measure(step_of(model, optimizer), model, optimizer).pools)


@pytest.mark.parametrize("compressed", [False, True])
def test_layerwise_grads_are_the_largest_one(compressed: bool) -> None:
    model = small(compressed)
    optimizer = COAPAdamW(model.parameters())
    alive: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: alive.append(sum(4 * q.numel() for q in model.parameters() if q.grad is not None))
        )
    step_in_backward(optimizer)
    step_of(model, optimizer)()
    settings = PlanSettings(precision="fp32", layerwise=True)
    assert method_plan("adamw", traced(model), settings).pools.grads == max(alive)


@pytest.mark.parametrize("compressed", [False, True])
def test_checkpointing_equals_a_step_that_recomputes_under_the_hooks(compressed: bool) -> None:
    """Re-entrant checkpoints recompute where the saved tensors are seen: the peak holds a whole block."""
    model = small(compressed, layers=4)
    predicted = traced(model, checkpointing=True).activations
    for block in repeated_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    optimizer = COAPAdamW(model.parameters())
    measured = measure(step_of(model, optimizer), model, optimizer).pools.activations
    assert measured == pytest.approx(predicted, rel=GAP_LIMIT)
    assert predicted < 0.5 * traced(small(compressed, layers=4)).activations


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_two_and_three_blocks_tell_the_footprint_of_seven(compressed: bool, checkpointing: bool) -> None:
    two, three, seven = (traced(small(compressed, layers=n), checkpointing=checkpointing) for n in (2, 3, 7))
    stretched = two.stretched(three, 5)
    assert (stretched.weights, stretched.activations) == (seven.weights, seven.activations)
    assert sorted(map(str, stretched.trained)) == sorted(map(str, seven.trained))


@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [
        (DecoderConfig(layers=2, width=64, hidden=96, heads=4, vocabulary=500, positions=64), 500),
        (DecoderConfig(layers=2, width=64, hidden=96, heads=4, vocabulary=500, positions=64, recompute=True), 500),
        (MaskedConfig(layers=2, width=64, hidden=128, vocabulary=500, positions=64, kind="tt", word_rank=4), 500),
        (MaskedConfig(layers=2, width=64, hidden=128, vocabulary=500, positions=64, dropout=0.1), 500),
    ],
    ids=["causal", "recomputed", "masked, cores", "dropout: the CPU has no fused kernel"],
)
def test_attention_is_predicted_as_the_cpu_computes_it(config: Any, vocabulary: int) -> None:
    """The plain kernel, which meta tensors would take, keeps all attention weights: 6 % more here."""
    model, ids = config.build(), torch.arange(3 * 40).reshape(3, 40) % vocabulary
    optimizer = torch.optim.AdamW(model.parameters())
    measured = measure(step_of(model, optimizer, ids), model, optimizer).pools
    assert measured.activations == pytest.approx(predict(model, (ids, ids), loss=same).activations, rel=0.01)


# large models


@pytest.mark.slow
def test_published_optimizer_sizes_come_out_of_the_plans() -> None:
    """COAP's table: LLaMA-1B 1988.34 MiB against AdamW's 5108; 7B in 8 bits 5380.51, there without block scales."""
    one = PLANNED["llama-1b"].plan(PlanSettings(), methods=("adamw", "coap"))
    assert mib(one.row("coap").pools.optimizer) == pytest.approx(1988.34, rel=1e-5)
    assert mib(one.row("adamw").pools.optimizer) == pytest.approx(5108, rel=1e-4)
    seven = PLANNED["llama-7b"].plan(PlanSettings(), methods=("coap-8bit",))
    assert mib(seven.row("coap-8bit").pools.optimizer) == pytest.approx(5380.51, rel=0.02)


def test_seven_billion_parameters_are_planned_without_memory() -> None:
    before = process_rss_bytes() or 0
    made = PLANNED["llama-7b"].plan(PlanSettings(checkpointing=True, layerwise=True))
    assert made.row("adamw").parameters == 6_738_415_616
    assert (process_rss_bytes() or 0) - before < 2**30 < made.row("adamw").pools.weights / 12
    assert made.row("adamw").pools.total > capacity("RTX 4090") >= made.row("coap-8bit").pools.total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-1b", "codebert"])
def test_the_rank_is_the_largest_that_reaches_the_compression(name: str) -> None:
    model = PLANNED[name]
    rank = model.rank_for(COMPRESSION)
    settings = PlanSettings()
    reached, missed = (model.plan(settings, rank=chosen, methods=("adamw", "comera")) for chosen in (rank, rank + 1))
    ratios = [made.row("adamw").parameters / made.row("comera").parameters for made in (reached, missed)]
    assert ratios[1] < COMPRESSION <= ratios[0] + 0.02  # gates are in the plan, not in the rank


def test_counting_cores_equals_building_them() -> None:
    dense, cores = (DecoderConfig(**{**vars(SMALL), "kind": kind}).build() for kind in ("dense", "tt"))
    assert count_with_cores(dense, 6) == sum(p.numel() for p in cores.parameters())
    assert count_with_cores(dense, None) == sum(p.numel() for p in dense.parameters())


def test_the_recommender_has_the_published_size_and_no_blocks() -> None:
    made = PLANNED["dlrm"].plan(PlanSettings())
    assert 4.2e9 < made.row("adamw").parameters < 4.4e9  # "4.2 billion parameters", CoMERA's introduction
    assert made.row("comera").pools.total < made.row("adamw").pools.total / 30
    with pytest.raises(ValueError, match="checkpointing needs repeated blocks"):
        PLANNED["dlrm"].plan(PlanSettings(checkpointing=True))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_scales_the_pools(precision: str) -> None:
    model = PLANNED["llama-130m"]
    fp32, other = (model.plan(PlanSettings(precision=p), methods=("adamw",)).rows[0].pools for p in ("fp32", precision))
    dtype, master = PRECISIONS[precision]
    assert other.weights * 4 == fp32.weights * dtype.itemsize
    counters = 4 * (2 * 12 + 1 + 7 * 12 + 2)
    per_weight = 12 if master else 2 * dtype.itemsize
    assert other.optimizer == per_weight * fp32.weights // 4 + counters


# GaLore (arXiv 2403.03507), Table 11: measured GB of LLaMA-1B on one text of 256 tokens; its 8-bit states are COAP's.
PEAKS = {
    ("adamw", True): 9.63, ("adamw-8bit", True): 6.93, ("coap-8bit", True): 5.63,
    ("adamw-8bit", False): 9.54, ("coap-8bit", False): 7.95,
}  # fmt: skip


@pytest.mark.parametrize(("method", "layerwise"), PEAKS)
def test_published_peaks_lie_above_the_pools_by_no_more_than_the_overhead(method: str, layerwise: bool) -> None:
    made = PLANNED["llama-1b"].plan(PlanSettings(layerwise=layerwise), sequence=256, batch=1, methods=(method,))
    above = 1e9 * PEAKS[method, layerwise] - made.rows[0].pools.total
    assert 0.5e9 < above < OVERHEAD + 0.01e9


# cards, words and refusals


def test_cards_are_sorted_and_hold_what_they_say() -> None:
    assert list(GPUS.values()) == sorted(GPUS.values())
    held = 24 * 10**9 - OVERHEAD
    assert fits_on(held)[0] == "RTX 3090" and "T4" not in fits_on(held)
    assert fits_on(held + 1)[0] == "RTX 5090"
    assert fits_on(10**12) == ()
    with pytest.raises(ValueError, match="gpu must be one of RTX 3060"):
        capacity("Voodoo 2")


@pytest.mark.slow
def test_a_plan_reads_as_text_and_as_json() -> None:
    made = PLANNED["codebert"].plan(PlanSettings(layerwise=True), batch=2, methods=("adamw", "coap-8bit"))
    text = made.table()
    assert "codebert: 124,697,433 parameters" in text and "2 x 512 tokens" in text
    assert "layer-wise updates on" in text and "predicted" in text and "RTX 3060 (12 GB)" in text
    row = made.as_dict()["methods"][1]
    assert row["method"] == "coap-8bit" and row["fits_on"][0] == "RTX 3060"
    assert sum(row[f"{pool}_bytes"] for pool in POOLS) == row["total_bytes"]
    huge = PLANNED["llama-7b"].plan(PlanSettings(), batch=4096, methods=("adamw",))
    assert "no single card" in huge.table()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PlanSettings(precision="int3"), "precision must be one of fp32"),
        (lambda: PlanSettings(rank_ratio=0.5), "rank_ratio must be at least 1"),
        (lambda: PLANNED["llama-1b"].plan(PlanSettings(), sequence=1025), r"sequence must lie in \[1, 1,024\]"),
        (lambda: PLANNED["llama-1b"].plan(PlanSettings(), batch=-1), "batch must be at least 1"),
        (lambda: PLANNED["llama-60m"].plan(PlanSettings()), "compression must be at most 3.5 for llama-60m"),
        (lambda: planned_model("llama-2t"), "model must be one of llama-9m"),
        (lambda: plan("", Footprint(0, 0, ()), Footprint(0, 0, ()), PlanSettings(), ("sgd",)), "methods must be among"),
        (lambda: PLANNED["codebert"].plan(PlanSettings()).row("sgd"), "method must be one of adamw"),
    ],
)
def test_wrong_requests_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, ShapeError) == ("must lie" in message or "batch" in message)


@pytest.mark.slow
def test_the_command_plans_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-130m", "--batch", "4", "--checkpointing", "--methods", "adamw", "coap", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in printed["methods"]] == ["adamw", "coap"] and printed["checkpointing"]
    assert main(["plan", "llama-130m", "--sequence", "64", "--tt-rank", "8", "--precision", "fp32"]) == 0
    assert "at rank 8; a step of 16 x 64 tokens" in capsys.readouterr().out
    for wrong, message in (
        (["gpt-9"], "model must be one of llama-9m"),
        (["llama-1b", "--sequence", "9999"], "sequence must lie in"),
        (["nowhere/config.json"], "no file nowhere/config.json"),
    ):
        assert main(["plan", *wrong]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
