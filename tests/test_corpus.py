"""Texts and tokens for a language model: sides that share nothing, exact codes, a checked cache, published formats."""

from __future__ import annotations

import gzip
import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from comera_lab.experiments.corpus import c4, code_search_net, corpus_of, folder_corpus, standard_library
from comera_lab.experiments.tokens import (
    END,
    MASK,
    SPECIAL,
    CodeTokenizer,
    TokenData,
    encoded,
    masked_batch,
    token_streams,
)
from comera_lab.objectives.token_loss import IGNORE
from comera_lab.shapes import ShapeError

FILES = 60


@pytest.fixture(scope="module")
def corpus():
    texts = {
        f"m{k}.py": f"def name_{k}(value):\n    return value + {k}  # é <mask>\n" * (k % 5 + 1) for k in range(FILES)
    }
    return corpus_of(texts, "made", "made here")


@pytest.fixture(scope="module")
def streams(corpus):
    return encoded(corpus, CodeTokenizer.learn(corpus.train, 300))


# sides


def test_a_file_stays_on_its_side_and_equal_files_count_once():
    texts = {f"folder/m{k}.py": f"x = {k}" for k in range(200)}
    whole = corpus_of(texts, "made", "made here")
    assert 5 <= len(whole.validation) <= 40 and len(whole.train) + len(whole.validation) == 200
    more = corpus_of(texts | {f"copy/m{k}.py": f"x = {k}" for k in range(200)} | {"empty.py": " \n"}, "made", "here")
    assert not set(more.train) & set(more.validation)
    assert len(more.train) + len(more.validation) == 200
    assert corpus_of(dict(reversed(texts.items())), "made", "made here") == whole, "order of listing is nothing"
    assert corpus_of(texts, "made", "made here").digest == whole.digest != more.digest


def test_the_standard_library_is_read_in_place_without_tests():
    few = standard_library(files=60)
    assert few.train and few.validation and few.digest == standard_library(files=60).digest
    assert not set(few.train) & set(few.validation)
    assert "the standard library of Python 3" in str(few) and few.digest[:12] in str(few)


def test_a_folder_without_python_and_a_side_without_text_are_refused(tmp_path):
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match="must be a folder with Python files, found none"):
        folder_corpus(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere must be a folder with Python files"):
        folder_corpus(tmp_path / "nowhere")
    (tmp_path / "one.py").write_text("x = 1")
    (tmp_path / "odd.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="side of .* holds no text"):
        folder_corpus(tmp_path)


# published sets, in the files that their publishers ship


def test_code_search_net_and_c4_are_read_from_their_own_files(tmp_path):
    rows = [{"code": f"def f{k}(): return {k}", "docstring": "x"} for k in range(4)]
    with gzip.open(tmp_path / "train_0.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:3]))
    found = code_search_net(tmp_path)
    assert found.validation == ("def f2(): return 2",)
    assert found.train == tuple(f"def f{k}(): return {k}" for k in (0, 1, 3)), "what judges is not trained on"
    for split in ("train", "validation"):
        with gzip.open(tmp_path / f"c4-{split}.00000-of-00001.json.gz", "wt") as file:
            file.write(json.dumps({"text": f"a page of {split}", "url": "u", "timestamp": "t"}) + "\n")
    assert c4(tmp_path).train == ("a page of train",)
    (tmp_path / "valid.jsonl").write_text('{"code": "x"}\n{"cod": 1}\n')
    with pytest.raises(ValueError, match=r"valid.jsonl, line 2 is not a row of this set"):
        code_search_net(tmp_path)


@pytest.mark.parametrize("read", [code_search_net, c4])
def test_a_set_that_is_not_here_needs_package_and_network(tmp_path, monkeypatch, read):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("comera_lab.runtime.packages.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'datasets is needed for downloading .*pip install "comera_lab\[data\]"'):
        read(tmp_path)

    def load_dataset(*names, **options):
        raise ConnectionError("no route to host\nand 40 lines more")

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("comera_lab.runtime.packages.util.find_spec", lambda name: object())
    with pytest.raises(OSError, match="could not be fetched: no route to host. Put its files there") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_fetched_set_is_written_whole_and_read_again(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, language, split):
        asked.append((name, language, split))
        return [{"whole_func_string": f"def {split}_{k}(): pass"} for k in range(3)]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("comera_lab.runtime.packages.util.find_spec", lambda name: object())
    first = code_search_net(tmp_path)
    assert first == code_search_net(tmp_path) and len(asked) == 2
    assert first.train[0] == "def train_0(): pass" and first.validation[2] == "def validation_2(): pass"


# codes


def test_codes_give_every_text_back(streams):
    for text in ("def f(x): return x", "é 漢 <end> <mask>", "", "\ttab\r\n"):
        ids = streams.tokenizer.encode(text)
        assert streams.tokenizer.decode(ids) == text and not set(ids) & {END, MASK}
    assert len(streams.tokenizer) == 300 and streams.tokenizer.decode([END]) == ""


def test_merges_are_learned_on_the_training_side_alone(corpus):
    odd = replace(corpus, validation=("zqzqzqzqzq " * 500,))
    assert encoded(odd, CodeTokenizer.learn(odd.train, 300)).tokenizer.json_text == (
        CodeTokenizer.learn(corpus.train, 300).json_text
    )


def test_a_vocabulary_out_of_reach_is_refused(corpus):
    with pytest.raises(ShapeError, match=r"these texts give [\d,]+ tokens, got vocabulary=50,000"):
        CodeTokenizer.learn(corpus.train, 50_000)
    with pytest.raises(ShapeError, match="vocabulary must be at least 259, bytes and special tokens, got 100"):
        CodeTokenizer.learn(corpus.train, 100)


# blocks


def test_targets_are_the_next_tokens_over_the_edges_of_blocks(streams):
    data = streams.blocks(16)
    assert torch.equal(data.train_y[:, :-1], data.train_x[:, 1:])
    assert torch.equal(data.train_y[:-1, -1], data.train_x[1:, 0])
    count = (len(streams.train) - 1) // 16
    assert data.train_x.shape == (count, 16) and data.classes == 300
    assert data.train_x.flatten().tolist() == streams.train[: count * 16].tolist()
    few = streams.blocks(16, validation_blocks=2)
    assert few.test_x.shape == (2, 16) and all(any(torch.equal(row, x) for x in data.test_x) for row in few.test_x)


def test_blocks_that_do_not_fit_are_refused(streams):
    with pytest.raises(ShapeError, match="tokens must fit both sides of the corpus"):
        streams.blocks(100_000)
    x = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 5\), got 0 to 7 in train"):
        TokenData("made", x + 7 * (torch.arange(4) == 1).int(), x, x, x, classes=5)
    with pytest.raises(ShapeError, match="Give one target for each token"):
        TokenData("made", x, x[:, :2], x, x, classes=5)


def test_masks_follow_the_published_mix():
    ids = torch.randint(len(SPECIAL), 300, (400, 40), dtype=torch.int32)
    read, targets = masked_batch(ids, 300, torch.Generator().manual_seed(0))
    asked = targets != IGNORE
    assert (asked.sum(1) == 6).all(), "15 % of 40"
    assert torch.equal(targets[asked], ids[asked]) and torch.equal(read[~asked], ids[~asked])
    covered = (read == MASK)[asked].float().mean()
    kept = (read == ids)[asked].float().mean()
    assert covered == pytest.approx(0.8, abs=0.02) and kept == pytest.approx(0.1, abs=0.02)
    assert (read[asked & (read != MASK)] >= len(SPECIAL)).all()
    again, _ = masked_batch(ids, 300, torch.Generator().manual_seed(0))
    other, _ = masked_batch(ids, 300, torch.Generator().manual_seed(1))
    assert torch.equal(read, again) and not torch.equal(read, other)


def test_the_validation_side_is_masked_once(streams):
    one, two = (streams.blocks(16, masked=True) for _ in range(2))
    assert torch.equal(one.test_x, two.test_x) and torch.equal(one.train_x, one.train_y)
    assert (one.test_y != IGNORE).sum() == 2 * len(one.test_y), "15 % of 16"


# the cache


def test_tokens_are_cached_checked_and_made_anew_where_damaged(tmp_path, monkeypatch, corpus):
    monkeypatch.setenv("COMERA_LAB_CACHE", str(tmp_path))
    made = token_streams(corpus, 300)
    (folder,) = tmp_path.iterdir()
    assert corpus.digest[:12] in folder.name
    monkeypatch.setattr(CodeTokenizer, "learn", lambda *_: pytest.fail("the cache was not used"))
    again = token_streams(corpus, 300)
    assert again.digest == made.digest and again.characters_per_token == made.characters_per_token
    monkeypatch.undo()
    monkeypatch.setenv("COMERA_LAB_CACHE", str(tmp_path))
    tokens = folder / "tokens.npz"
    whole = tokens.read_bytes()
    with np.load(tokens) as arrays:
        other = {name: arrays[name] for name in arrays.files} | {"train": made.train[::-1]}
    np.savez(tokens, **other)
    assert token_streams(corpus, 300).digest == made.digest
    for damaged in (whole[:100], b""):
        tokens.write_bytes(damaged)
        assert token_streams(corpus, 300).digest == made.digest
    (folder / "tokenizer.json").write_text("{}")
    assert token_streams(corpus, 300).digest == made.digest
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
