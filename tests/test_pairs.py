"""Pairs of texts: read from WordNet's own format, balanced per premise and hypothesis, cached and checked."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from comera_lab.__main__ import main
from comera_lab.experiments import pairs as pairs_module
from comera_lab.experiments.pairs import (
    PairData,
    Vocabulary,
    cache_folder,
    load_pairs,
    load_wordnet_pairs,
    mnli_pairs,
    pairs_from_texts,
    prepare,
    read_jsonl,
    wordnet_pairs,
    write_cache,
)
from comera_lab.experiments.train import TrainConfig, fit
from comera_lab.experiments.wordnet import ancestors, labelled_pairs, read_synsets, split_of
from comera_lab.models.encoder import EncoderConfig, PairEncoder

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"


def _line(offset: int, file: int, kind: str, words: str, parents: tuple[int, ...], gloss: str) -> str:
    listed = words.split()
    named = " ".join(f"{word} 0" for word in listed)
    pointers = "".join(f"@ {parent:08d} {kind} 0000 " for parent in parents)
    head = f"{offset:08d} {file:02d} {kind} {len(listed):02x} {named} {len(parents) + 1:03d}"
    return f"{head} {pointers}~ 99999999 {kind} 0000 | {gloss}  \n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A forest of nouns in four lexicographer files and of verbs in two, with a cycle, in the on-disk format."""
    at = tmp_path / "dict"
    at.mkdir()
    files: dict[str, list[str]] = {"n": [], "v": []}
    for kind, roots in (("n", (3, 5, 6, 13)), ("v", (29, 30))):
        for file in roots:
            for branch in range(6):
                top = 1_000_000 * file + 10_000 * branch
                files[kind].append(_line(top, file, kind, f"kind{file}_{branch}", (), f"a kind of thing {branch}"))
                for leaf in range(1, 25):
                    gloss = f'café number {leaf} of kind {branch}; "an example"'
                    files[kind].append(_line(top + leaf, file, kind, f"leaf_{leaf} other", (top,), gloss))
    files["v"].append(_line(1, 29, "v", "restrain", (2,), "hold back"))
    files["v"].append(_line(2, 29, "v", "inhibit", (1,), "limit"))
    half = len(files["n"]) // 2
    for name, lines in (("noun1", files["n"][:half]), ("noun2", files["n"][half:]), ("verb", files["v"])):
        (at / f"data.{name}").write_text(LICENCE + "".join(lines), encoding="latin-1")
    (at / "LICENSE.txt").write_text(LICENCE)
    return at


def test_synsets_are_read_as_lemma_and_definition(folder: Path) -> None:
    synsets = read_synsets(folder)
    assert len(synsets) == 6 * 6 * 25 + 2
    leaf = synsets["n03010002"]
    assert (leaf.text, leaf.file, leaf.parents) == ("leaf 2 : café number 2 of kind 1", 3, ("n03010000",))
    assert ancestors(synsets)["v00000001"] == {"v00000001", "v00000002"}, "the walk ends in a cycle"


def test_permuted_premises_and_hypotheses_stand_equally_often_in_each_class(folder: Path) -> None:
    for split, pairs in labelled_pairs(read_synsets(folder)).items():
        assert pairs, split
        for side in (0, 1):
            counts = Counter((pair[side], pair[2]) for pair in pairs)
            assert all(len({counts[key, label] for label in (0, 1, 2)}) == 1 for key, _ in counts)


def test_labels_mean_what_they_say_and_no_premise_stands_in_two_splits(folder: Path) -> None:
    synsets = read_synsets(folder)
    above = ancestors(synsets)
    for split, pairs in labelled_pairs(synsets).items():
        for x, y, label in pairs:
            assert split_of(x) == split and x[0] == y[0]
            if label == 0:
                assert y in synsets[x].parents
            else:
                assert x != y and y not in above[x] and x not in above[y]
                assert (synsets[x].file == synsets[y].file) == (label == 1)


def test_same_files_same_pairs(folder: Path) -> None:
    assert wordnet_pairs(folder).digest == wordnet_pairs(folder).digest


@pytest.mark.parametrize("damage", ["00001740 03", "00001740 03 n zz entity 0 000 | text", "00001740 03 n 01 entity 0"])
def test_damaged_line_is_named(folder: Path, damage: str) -> None:
    with (folder / "data.noun2").open("a", encoding="latin-1") as file:
        file.write(damage + "\n")
    with pytest.raises(ValueError, match=r"data.noun2, line \d+ is not a WordNet synset"):
        read_synsets(folder)


def test_missing_file_is_named(folder: Path) -> None:
    (folder / "data.verb").unlink()
    with pytest.raises(FileNotFoundError, match="data.verb is missing"):
        read_synsets(folder)


# Vocabulary and ids


def test_vocabulary_is_by_frequency_and_built_on_train_alone() -> None:
    train = [("b b a.", "a b", 0), ("C", "c 12", 1)]
    data = pairs_from_texts("tiny", {"train": train, "dev": [("zebra a", "b", 2)], "test": [("b", "zebra", 0)]})
    assert data.vocabulary.words == ("<pad>", "<unk>", "<sep>", "b", "a", "c", ".", "12")
    premise, hypothesis, label = data.splits["dev"][0]
    assert (data.texts[premise, :3].tolist(), data.texts[hypothesis, :2].tolist(), label) == ([1, 4, 0], [3, 0], 2)


def test_encoding_cuts_and_fills() -> None:
    vocabulary = Vocabulary.of_texts(["a b c"], size=5)
    assert vocabulary.encode(["a b c a", ""], tokens=3).tolist() == [[3, 4, 1], [0, 0, 0]]
    assert vocabulary.encode([], tokens=3).shape == (0, 3)


def test_dataset_trains_a_siamese_encoder(folder: Path) -> None:
    data = wordnet_pairs(folder).dataset(train_pairs=64)
    assert data.train_x.shape[1:] == (2, 32) and data.train_x.dtype == torch.int32 and len(data.train_y) == 64
    config = EncoderConfig(width=8, hidden=8, heads=1, vocabulary=8000, rank=2, word_rank=2, layers=1)
    model = PairEncoder(config, generator=torch.Generator().manual_seed(0))
    result = fit(model, data, TrainConfig(steps=2, batch_size=8))
    assert result.accuracy is not None


def test_joined_sides_stand_in_one_row_for_a_cross_head() -> None:
    data = pairs_from_texts("tiny", {"train": [("a", "b c", 1), ("a b c", "c", 0)], "dev": [("a", "b", 2)]})
    a, b, c = (data.vocabulary.words.index(word) for word in "abc")
    rows = data.dataset(tokens=3, joined=True).train_x
    assert rows.tolist() == [[a, 2, b, c, 0, 0, 0], [a, b, c, 2, c, 0, 0]] and rows.dtype == torch.int32


def test_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split 'dev' must hold"):
        pairs_from_texts("tiny", {"train": [("a", "b", 0)], "dev": []})


# JSON lines, as MNLI


def _write_mnli(folder: Path, split: str, labels: tuple[int, ...]) -> None:
    rows = [{"premise": f"One {n}.", "hypothesis": "Two?", "label": n, "idx": n} for n in labels]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_mnli_format_is_read_and_pairs_without_a_label_are_left_out(tmp_path: Path) -> None:
    for split, labels in (("train", (0, 1, 2)), ("dev", (2, -1)), ("test", (0,))):
        _write_mnli(tmp_path, split, labels)
    data = mnli_pairs(tmp_path)
    assert {split: pairs[:, 2].tolist() for split, pairs in data.splits.items()} == {
        "train": [0, 1, 2],
        "dev": [2],
        "test": [0],
    }
    assert data.dataset("test").test_x.shape == (1, 2, 32)


def test_missing_mnli_files_are_fetched_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Split:
        def __init__(self, label: int) -> None:
            self.label = label

        def to_json(self, path: Path) -> None:
            if self.label == 2:
                assert not (path.parent / "test.jsonl").exists(), "a file under its own name is a whole one"
            path.write_text(json.dumps({"premise": "a", "hypothesis": "b", "label": self.label, "idx": 0}) + "\n")

    class Package:
        @staticmethod
        def load_dataset(name: str, part: str) -> dict[str, Split]:
            assert (name, part) == ("nyu-mll/glue", "mnli")
            return {"train": Split(0), "validation_matched": Split(1), "validation_mismatched": Split(2)}

    monkeypatch.setattr(pairs_module, "require", lambda package, purpose: Package)
    fetched = mnli_pairs(tmp_path / "mnli")
    assert [int(fetched.splits[split][0, 2]) for split in ("train", "dev", "test")] == [0, 1, 2]
    monkeypatch.undo()
    assert mnli_pairs(tmp_path / "mnli").digest == fetched.digest, "the files are there now: nothing is fetched"


def test_mnli_without_files_or_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"datasets is needed for downloading MNLI.*comera_lab\[data\]"):
        mnli_pairs(tmp_path)


def test_text_with_other_line_ends_is_one_line(tmp_path: Path) -> None:
    row = {"premise": "a\u2028b\x85c", "hypothesis": "d", "label": 1, "idx": 0}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_jsonl(tmp_path / "train.jsonl") == [("a\u2028b\x85c", "d", 1)]


@pytest.mark.parametrize(
    "line",
    [
        '{"premise": "a"}',
        "[1]",
        "{",
        '{"premise": "a", "hypothesis": "b", "label": 3}',
        '{"premise": 1, "hypothesis": "b", "label": 0}',
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="train.jsonl, line 1"):
        read_jsonl(path)


# The cache


@pytest.fixture
def archive(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            content = file.read_bytes()
            member = tarfile.TarInfo(f"{pairs_module.ARCHIVE_FOLDER}/{file.name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("COMERA_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pairs_module, "ARCHIVE_SHA256", pairs_module.hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_prepared_pairs_come_back_from_the_cache_with_their_licence(folder: Path, archive: Path) -> None:
    made = prepare(archive)
    assert made.digest == wordnet_pairs(folder).digest
    archive.unlink()
    assert prepare(archive).digest == load_wordnet_pairs().digest == made.digest
    assert (cache_folder() / "LICENSE.txt").read_text() == LICENCE
    assert sorted(path.name for path in cache_folder().parent.iterdir()) == [cache_folder().name]


def test_command_prepares_from_an_archive_once_and_is_silent_then(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", "--archive", str(archive)]) == 0
    assert "WordNet pairs: " in capsys.readouterr().out
    archive.unlink()
    assert main(["data", "prepare"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("file", "before"),
    [("Makefile", "comera-lab lab"), ("Makefile", "$(PYTEST) -m"), ("binder/postBuild", "NotebookClient")],
)
def test_set_up_prepares_the_pairs_before_they_are_needed(file: str, before: str) -> None:
    text = (Path(__file__).parents[1] / file).read_text()
    assert "comera-lab data prepare\n" in text[: text.index(before)][-200:]


def test_damaged_cache_is_built_anew(archive: Path) -> None:
    whole = prepare(archive)
    (cache_folder() / "vocabulary.txt").write_text("other")
    assert main(["data", "prepare", "--archive", str(archive)]) == 0
    assert load_wordnet_pairs().digest == whole.digest


def test_archive_of_other_content_is_refused(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive.write_bytes(b"other")
    assert main(["data", "prepare", "--archive", str(archive)]) == 2
    assert "must have sha256" in capsys.readouterr().err
    assert not cache_folder().exists()


def test_failed_download_is_one_line_and_the_kit_goes_on_with_docstring_pairs(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["data", "prepare"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "could not be downloaded: " in shown.err
    assert "Until then docstring pairs stand in." in shown.err
    assert not cache_folder().exists()
    with pytest.raises(OSError, match="could not be downloaded"):
        prepare()
    assert main(["data", "prepare", "--archive", str(archive.with_name("none"))]) == 2


def test_pairs_are_wordnet_where_prepared_and_docstrings_elsewhere(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = pairs_from_texts("Docstring pairs", {"train": [("a", "b", 0)], "dev": [("a", "b", 1)]}, "somewhere")
    monkeypatch.setattr(pairs_module, "function_pairs", lambda: stand_in)
    said: list[str] = []
    assert load_pairs(said.append) is stand_in
    assert said == ["The WordNet pairs are not on this machine: using somewhere. To get them: comera-lab data prepare"]
    prepare(archive)
    found = load_pairs(said.append)
    assert (found.name, found.source, len(said)) == ("WordNet pairs", "WordNet 3.0", 1)


def test_unprepared_and_damaged_caches_are_refused(archive: Path) -> None:
    with pytest.raises(FileNotFoundError, match="comera-lab data prepare"):
        load_wordnet_pairs()
    data = prepare(archive)
    other = PairData(data.name, data.vocabulary, np.roll(data.texts, 1, axis=1), data.splits)
    shutil.copy(cache_folder() / "LICENSE.txt", archive.parent / "LICENSE.txt")
    digest = (cache_folder() / "digest.txt").read_text()
    write_cache(other, cache_folder(), archive.parent / "LICENSE.txt")
    (cache_folder() / "digest.txt").write_text(digest)
    with pytest.raises(ValueError, match="it is damaged. Delete that folder"):
        load_wordnet_pairs()


# The real pairs, where they are prepared


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_one_side_alone_says_nothing_about_the_class(folder: Path, side: int) -> None:
    prepared = (cache_folder() / "pairs.npz").is_file()
    data = load_wordnet_pairs() if prepared else wordnet_pairs(folder)
    sizes = {split: len(pairs) for split, pairs in data.splits.items()}
    assert not prepared or sizes == {"train": 263_172, "dev": 14_631, "test": 14_799}
    for pairs in data.splits.values():
        counts = np.zeros((len(data.texts), 3), dtype=np.int64)
        np.add.at(counts, (pairs[:, side], pairs[:, 2]), 1)
        assert (counts == counts[:, :1]).all(), "any function of one side is right for exactly a third"
