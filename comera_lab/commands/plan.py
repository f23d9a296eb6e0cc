"""`comera-lab plan`: what a training step of a model would take, method by method, and which GPUs hold it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    plan = commands.add_parser("plan", help="predict the memory of training a large model, and which GPUs hold it")
    plan.add_argument(
        "model", help="llama-9m .. llama-7b, codebert, dlrm, or the config.json of a Hugging Face language model"
    )
    plan.add_argument("--sequence", type=int, help="tokens of one text (default: the model's usual)")
    plan.add_argument("--batch", type=int, help="texts, or rows, in a step (default: the model's usual)")
    plan.add_argument("--precision", default="bf16", help="fp32, bf16, 'bf16 + fp32 master' (default: bf16)")
    plan.add_argument("--checkpointing", action="store_true", help="keep the inputs of blocks only, compute them again")
    plan.add_argument("--layerwise", action="store_true", help="update each weight as soon as its gradient is there")
    plan.add_argument("--rank-ratio", type=float, default=4.0, help="of galore and coap (default: 4)")
    size = plan.add_mutually_exclusive_group()
    size.add_argument("--compression", type=float, help="of the whole model by CoMERA (default: 4.23, as published)")
    size.add_argument("--tt-rank", type=int, help="rank of CoMERA's cores, in the place of a compression")
    plan.add_argument("--methods", nargs="+", metavar="METHOD", help="some of those printed (default: all)")
    plan.add_argument("--json", action="store_true", help="print JSON instead of text")
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from comera_lab.memory import METHODS, PlanSettings
    from comera_lab.models.planned import COMPRESSION, planned_model

    settings = PlanSettings(
        precision=options.precision,
        checkpointing=options.checkpointing,
        layerwise=options.layerwise,
        rank_ratio=options.rank_ratio,
    )
    path = Path(options.model)
    if path.suffix == ".json" or path.is_dir():
        from comera_lab.models.huggingface import planned_from_config

        model = planned_from_config(path)
    else:
        model = planned_model(options.model)
    made = model.plan(
        settings,
        sequence=options.sequence,
        batch=options.batch,
        rank=options.tt_rank,
        compression=COMPRESSION if options.compression is None else options.compression,
        methods=tuple(options.methods or METHODS),
    )
    print(json.dumps(made.as_dict(), indent=2) if options.json else made.table())
    return 0
