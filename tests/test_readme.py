"""Every number of the README comes from a recorded row; every picture it shows exists and has a text of its own."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from comera_lab import compact
from comera_lab.experiments.recorder import read_rows, split_runs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "data" / "results"


def digits_line():
    runs = split_runs(read_rows(RESULTS / "digits_mlp_cpu.jsonl"))
    found = {}
    for run in runs:
        found.setdefault(run[-1]["rank"], []).append(run[-1])
    dense, train = found[None], found[16]
    return (
        f"A network 784-512-512-10 reads digits with {100 * mean(r['accuracy'] for r in train):.1f} % accuracy from "
        f"{train[0]['parameters']:,} parameters at rank 16; its dense twin needs {dense[0]['parameters']:,} for "
        f"{100 * mean(r['accuracy'] for r in dense):.1f} % (means of {len(train)} seeds)."
    )


def bench(op, provider, mode, **sizes):
    rows = [row for row in read_rows(RESULTS / "bench_cpu.jsonl") if row["kind"] == "bench"]
    (found,) = [
        row
        for row in rows
        if (row["op"], row["provider"], row["mode"]) == (op, provider, mode)
        and all(row["sizes"][name] == value for name, value in sizes.items())
    ]
    return found["value"]


def speed_line():
    wide, cold = (
        bench("tt_linear", "tt over dense", f"forward+backward{state}", rows=4096) for state in ("", ", cold")
    )
    return (
        f"A wide layer, 768 → 3072 at rank 30 and 4,096 rows, runs forward and backward {wide:.1f}× faster than "
        f"`nn.Linear` once each has run ten times in a row, {cold:.1f}× right after other work, and its cores are "
        "81.5× smaller."
    )


def crossing_line():
    small, large = (bench("tt_linear_width", "tt over dense", "forward+backward", in_features=w) for w in (64, 2048))
    return (
        f"Small layers are slower: 64 → 64 at rank 8 and 256 rows takes {1 / small:.1f}× as long as `nn.Linear`, "
        f"2048 → 2048 is {large:.1f}× faster. Lesson 04 lets you find the crossing on your machine."
    )


def test_results_are_those_of_the_recorded_rows():
    flat = re.sub(r"\s+", " ", README)
    for line in (digits_line(), speed_line(), crossing_line()):
        assert line in flat, line
    info = read_rows(RESULTS / "bench_cpu.jsonl")[0]
    assert f"recorded on {info['device']}, {info['threads']} threads, torch {info['torch']}" in flat


def test_pictures_exist_and_have_a_text_of_their_own():
    pictures = re.findall(r"!\[([^\]]*)\]\((notebooks/[^)]+)\)", README)
    assert 2 <= len(pictures) <= 3
    for text, path in pictures:
        assert (ROOT / path).is_file()
        assert len(text.split()) >= 12, text
    assert len({text for text, _ in pictures}) == len(pictures)


def test_the_lesson_table_lists_every_lesson():
    for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert f"(notebooks/{lesson.name})" in README, lesson.name


def test_two_commands_and_the_badge():
    assert "make lab" in README
    assert "make test" in README
    assert "urlpath=lab/tree/notebooks/00_start_here.ipynb" in README


def test_the_code_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    batches = [(torch.randn(32, 784), torch.randint(10, (32,))) for _ in range(3)]
    exec(compile(code, "README.md", "exec"), {"model": model, "batches": batches})
    assert (tmp_path / "small").is_dir()
    assert "half-chains" in capsys.readouterr().out
    before, after = re.search(r"before=(\d+), after=(\d+)", str(compact(model))).groups()
    assert before == after  # nothing dead was left
