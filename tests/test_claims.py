"""The page `data/CLAIMS.md`: published headlines beside what this kit recorded or counts. Its numbers are made here."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from comera_lab.experiments.recorder import read_rows
from comera_lab.layers import tt_layers
from comera_lab.memory import PUBLISHED
from comera_lab.models.encoder import EncoderConfig, PairEncoder
from tests.test_readme import RESULTS, bench

PAGE = RESULTS.parent / "CLAIMS.md"
START = "| claim | published | here | rows | verdict |\n|---|---|---|---|---|\n"


def averages(name: str, kind: str, value: str, **fixed: Any) -> tuple[float, int]:
    """Mean of `value` over the seeds of the rows with these fields, and how many there are."""
    rows = [row for row in read_rows(RESULTS / name) if row["kind"] == kind]
    found = [row[value] for row in rows if all(row[key] == wanted for key, wanted in fixed.items())]
    return mean(found), len(found)


def sizes() -> str:
    with torch.device("meta"):
        dense, train = (PairEncoder(EncoderConfig.released(kind)) for kind in ("dense", "tt"))
        for layer in tt_layers(train).values():
            layer.add_gates()
    before, after = dense.parameter_count(), train.parameter_count()
    return f"{before:,} parameters become {after:,}, {before / after:.0f}x, before any rank is learned"


def pairs() -> str:
    (dense, seeds), (late, late_seeds) = (
        averages("pairs_rank_cpu.jsonl", "rank_result", "test_accuracy", model=model, target_ratio=ratio, steps=3000)
        for model, ratio in (("dense", None), ("late", 0.5))
    )
    ratio, _ = averages(
        "pairs_rank_cpu.jsonl", "rank_result", "total_ratio", model="late", target_ratio=0.5, steps=3000
    )
    size, _ = averages("pairs_rank_cpu.jsonl", "rank_result", "total_mib", model="dense", steps=3000)
    return (
        f"a small encoder ({size:.1f} MiB dense) on WordNet pairs: {100 * dense:.1f} % dense ({seeds} seeds), "
        f"{100 * late:.1f} % with late stage 0.5 at {ratio:.1f}x ({late_seeds} seeds)"
    )


def recommender() -> str:
    def auc(**fixed: Any) -> float:
        return averages("dlrm_flights_cpu.jsonl", "recommender", "auc", **fixed)[0]

    ratio, seeds = averages("dlrm_flights_cpu.jsonl", "recommender", "total_ratio", model="tt", rank=16)
    peaks = {
        row["provider"]: row["value"]
        for row in read_rows(RESULTS / "dlrm_flights_cpu.jsonl")
        if row["kind"] == "bench" and row["mode"] == "peak of all pools" and row["sizes"] == {"batch": 10_000}
    }
    return (
        f"flights, {seeds} seeds: {ratio:.0f}x at AUC {auc(model='tt', rank=16):.3f} against {auc(model='dense'):.3f} "
        f"dense; peak of a step {peaks['dense'] / peaks['tt 16']:.1f}x lower at batch 10,000"
    )


def lookup() -> str:
    time, space = (
        bench("tt_lookup", "tt over per id", mode, ids=4096)
        for mode in ("forward+backward", "peak of forward+backward")
    )
    return f"{time:.1f}x faster, {space:.0f}x less memory than a contraction per id, 4,096 ids"


def encoder_step() -> str:
    return f"{bench('encoder_step', 'tt over dense', 'training step', rows=1024):.1f}x on 2 CPU cores, batch 8 x 128"


def published_sizes() -> str:
    worst = max(abs(line.count().published / 2**20 - line.mib) for line in PUBLISHED)
    return (
        f"{len(PUBLISHED)} printed sizes counted again on shapes alone, none off by more than {worst:.3f} MiB (block "
        "scales of 8-bit state left out, as printed)"
    )


def quality() -> str:
    (adamw, seeds), (coap, _) = (
        averages(
            "coap_ablation_cpu.jsonl", "optimizer_result", "accuracy", arm="comparison", optimizer=name, dtype="float32"
        )
        for name in ("adamw", "coap")
    )
    return (
        f"digits, {seeds} seeds, tuned rates: {100 * coap:.1f} % with COAP at ratio 4, {100 * adamw:.1f} % with AdamW"
    )


def language(method: str) -> tuple[float, int]:
    return averages("lm_code_cpu.jsonl", "language_result", "loss_nats", method=method)


def code_model() -> str:
    (dense, seeds), (late, _) = language("adamw"), language("comera-late")
    return f"a decoder of 1.07 M parameters, 500 steps, {seeds} seeds: {late:.2f} nats at 4.23x, {dense:.2f} dense"


def perplexity() -> str:
    (adamw, seeds), (coap, _), (galore, _) = (language(method) for method in ("adamw", "coap", "galore"))
    return f"the same decoder, {seeds} seeds, ratio 4: COAP {coap:.2f} nats, GaLore {galore:.2f}, AdamW {adamw:.2f}"


def optimizer_time() -> str:
    over = bench("training_step", "coap over adamw fused", "step", parameters=12_648_448)
    return f"a training step takes {over:.2f}x AdamW's on 2 CPU cores (proxy of a decoder, 12.6 M parameters)"


def refresh() -> str:
    return (
        f"{bench('basis', 'warm refresh over full svd', 'refresh', rows=2048):.0f}x a full SVD at 2048 x 2048, rank 512"
    )


def diffusion() -> str:
    (adamw, seeds), (coap, _) = (
        averages("ddpm_digits_cpu.jsonl", "diffusion_result", "test_loss_mse", optimizer=name)
        for name in ("adamw", "coap")
    )
    return f"DDPM on digits, {seeds} seeds: noise error {100 * (coap / adamw - 1):.1f} % above AdamW's at ratio 4"


CLAIMS = (
    ("CoMERA: 43x to 361x smaller", "six encoders, MNLI; 43x to 80x of the model, 361x of the TT layers alone", sizes,
     "counted", "agrees: two denominators, see lesson 08"),
    ("CoMERA: accuracy kept", "MNLI, late stage 0.5", pairs, "pairs_rank_cpu.jsonl",
     "disagrees on this much smaller model"),
    ("CoMERA: 2-3x faster an epoch", "GPU with CUDA graphs", encoder_step, "bench_cpu.jsonl", "not run on a GPU here"),
    ("CoMERA: DLRM 99x smaller, 7x less peak memory", "accuracy kept", recommender, "dlrm_flights_cpu.jsonl",
     "in part: the memory falls, at 60x some AUC is lost"),
    ("CoMERA: look-ups 4-5x faster, 2-3x less memory", "against TTM look-ups without the optimisation", lookup,
     "bench_cpu.jsonl", "agrees"),
    ("CoMERA: 2x faster, 9x less memory than GaLore", "batch 1, RTX 3090", lambda: "-", "-", "not run here"),
    ("CoMERA: CodeBERT 4.23x smaller, 2x faster", "pre-training, loss kept", code_model, "lm_code_cpu.jsonl",
     "the size agrees, the loss does not in so short a run; speed not run on a GPU here"),
    ("COAP: optimizer memory", "LLaMA-1B -61 %, five sizes in MiB", published_sizes, "counted", "agrees"),
    ("COAP: AdamW's quality", "LLaMA-1B on C4, same perplexity", quality, "coap_ablation_cpu.jsonl",
     "agrees on digits"),
    ("COAP: AdamW's quality", "LLaMA-1B on C4, same perplexity", perplexity, "lm_code_cpu.jsonl",
     "disagrees on this small and short run; not run at that size"),
    ("COAP: +2 % time", "LLaMA-1B, 8 GPUs", optimizer_time, "bench_cpu.jsonl", "disagrees on a CPU"),
    ("COAP: cheap refresh instead of GaLore's SVD", "GaLore at least 4x slower to train", refresh, "bench_cpu.jsonl",
     "agrees"),
    ("COAP: convolutions by Tucker-2", "DDPM, FID like AdamW's", diffusion, "ddpm_digits_cpu.jsonl", "near, on digits"),
)  # fmt: skip


def table() -> str:
    lines = [
        f"| {claim} | {published} | {here()} | {rows} | {verdict} |" for claim, published, here, rows, verdict in CLAIMS
    ]
    return START + "\n".join(lines) + "\n"


def test_the_ledger_of_claims_is_made_from_the_rows() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run `python -m tests.test_claims` and commit the page"


def test_rows_that_the_ledger_names_exist() -> None:
    for name in re.findall(r"\w+\.jsonl", PAGE.read_text(encoding="utf-8")):
        assert (RESULTS / name).is_file(), name


def _write(page: Path) -> None:
    before = page.read_text(encoding="utf-8")
    head, _, rest = before.partition(START)
    page.write_text(head + table() + re.sub(r"^(\|.*\n)*", "", rest), encoding="utf-8")


if __name__ == "__main__":
    _write(PAGE)
