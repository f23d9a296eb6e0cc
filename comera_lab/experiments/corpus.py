"""Texts for a language model, split by file: this Python's own standard library, any folder, CodeSearchNet or C4.

A file goes to the validation side by the sha1 of its path, the same on every machine. Files of equal content count
once, so that no text stands on both sides. Nothing is copied: the standard library is read where it is installed, and
its contents differ between Python versions, so `Corpus.digest` belongs to every number made with it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from comera_lab.experiments.docstrings import EXCLUDED
from comera_lab.experiments.wordnet import sha1_part
from comera_lab.runtime import require

SIDES = ("train", "validation")
_VALIDATION_PARTS = 10  # one file in ten
_SITE = ("site-packages", "dist-packages")
_C4_ROWS = 20_000


@dataclass(frozen=True)
class Corpus:
    """Texts of both sides in a fixed order; `source` says in words where they come from.

    Raises ValueError where a side has no text: a model is judged on texts that it never saw.
    """

    name: str
    train: tuple[str, ...]
    validation: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        for side in SIDES:
            if not any(getattr(self, side)):
                raise ValueError(
                    f"the {side} side of {self.source} holds no text: {len(self.train)} to train, "
                    f"{len(self.validation)} to validate. Give more files."
                )

    @cached_property
    def digest(self) -> str:
        """sha256 over both sides."""
        digest = hashlib.sha256()
        for side in SIDES:
            for text in getattr(self, side):
                digest.update(side.encode() + hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()

    @property
    def characters(self) -> int:
        """Characters of both sides."""
        return sum(len(text) for side in SIDES for text in getattr(self, side))

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.train):,} texts to train, {len(self.validation):,} to validate, "
            f"{self.characters / 1e6:.1f} million characters; {self.source}, digest {self.digest[:12]}"
        )


def standard_library(*, packages: bool = False, files: int | None = None) -> Corpus:
    """The Python files of the standard library without tests; with `packages` those of site-packages too.

    `files` keeps the first so many of an order that is as good as random: for a look in seconds.
    """
    root = sysconfig.get_paths()["stdlib"]
    texts = _python_files(Path(root), EXCLUDED)
    source = f"the standard library of Python {platform.python_version()}"
    if packages:
        texts |= {
            f"site-packages/{name}": text
            for name, text in _python_files(Path(sysconfig.get_paths()["purelib"]), EXCLUDED - set(_SITE)).items()
        }
        source += " and its site-packages"
    return corpus_of(texts, "Python code", source, files)


def folder_corpus(folder: str | Path, *, files: int | None = None) -> Corpus:
    """The Python files below `folder`. Raises FileNotFoundError for a folder that is none or holds none."""
    return corpus_of(_python_files(Path(folder), frozenset()), "Python code", str(folder), files)


def corpus_of(texts: dict[str, str], name: str, source: str, files: int | None = None) -> Corpus:
    """Path -> text becomes a Corpus: repeats left out, sides by the sha1 of the path."""
    seen: set[str] = set()
    sides: dict[str, list[str]] = {side: [] for side in SIDES}
    for path in sorted(texts, key=lambda path: hashlib.sha1(path.encode(), usedforsecurity=False).digest())[:files]:
        text = texts[path]
        if text.strip() and text not in seen:
            seen.add(text)
            sides["train" if sha1_part(path, _VALIDATION_PARTS) else "validation"].append(text)
    return Corpus(name, tuple(sides["train"]), tuple(sides["validation"]), source)


# Public sets, in the files that their publishers ship


def code_search_net(folder: str | Path, *, language: str = "python") -> Corpus:
    """CodeSearchNet from `folder`/{train,valid}*.jsonl[.gz], or fetched there with `datasets`: whole functions.

    Raises ImportError without that package, OSError of one line without a network, ValueError for a broken line.
    """

    def fetch(split: str) -> Iterator[dict[str, Any]]:
        load = require("datasets", "downloading CodeSearchNet").load_dataset
        for row in load("code-search-net/code_search_net", language, split=split):
            yield {"code": row["whole_func_string"]}

    def read(row: dict[str, Any]) -> str:
        text = row["code"] if "code" in row else row["whole_func_string"]
        return str(text)

    return _published(Path(folder), "CodeSearchNet", {"train": "train", "validation": "valid"}, read, fetch)


def c4(folder: str | Path, *, rows: int = _C4_ROWS) -> Corpus:
    """C4 (English) from `folder`/c4-{train,validation}*.json.gz, or its first `rows` fetched there with `datasets`.

    A tenth as many rows for validation. Raises as `code_search_net`.
    """

    def fetch(split: str) -> Iterator[dict[str, Any]]:
        load = require("datasets", "downloading C4").load_dataset
        stream = load("allenai/c4", "en", split=split, streaming=True)
        yield from stream.take(rows if split == "train" else max(1, rows // 10))

    def read(row: dict[str, Any]) -> str:
        return str(row["text"])

    return _published(Path(folder), "C4", {"train": "c4-train", "validation": "c4-validation"}, read, fetch)


def _published(
    folder: Path,
    name: str,
    prefixes: dict[str, str],
    read: Callable[[dict[str, Any]], str],
    fetch: Callable[[str], Iterator[dict[str, Any]]],
) -> Corpus:
    """Both sides as published, texts that stand on both left out of the training side."""
    sides = {}
    for side, prefix in prefixes.items():
        paths = sorted(path for path in folder.glob(f"{prefix}*") if path.name.endswith((".jsonl", ".json", ".gz")))
        if not paths:
            paths = [_fetched(folder / f"{prefix}.jsonl.gz", name, side, fetch)]
        sides[side] = list(dict.fromkeys(text for path in paths for text in _texts(path, read)))
    held_out = set(sides["validation"])
    train = tuple(text for text in sides["train"] if text not in held_out)
    return Corpus(name, train, tuple(sides["validation"]), f"{name} in {folder}")


def _fetched(path: Path, name: str, side: str, fetch: Callable[[str], Iterator[dict[str, Any]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    try:
        rows = fetch(side)
        with gzip.open(unfinished, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"{name} is not in {path.parent} and could not be fetched: {why:.160}. Put its files there, "
            "or use the standard library, which needs no network."
        ) from None
    unfinished.rename(path)
    return path


def _texts(path: Path, read: Callable[[dict[str, Any]], str]) -> Iterable[str]:
    with path.open("rb") as raw, gzip.open(raw) if path.name.endswith(".gz") else raw as file:
        for number, line in enumerate(file, start=1):
            try:
                yield read(json.loads(line))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is not a row of this set: {line[:60]!r}. Get it again."
                ) from error


def _python_files(root: Path, excluded: frozenset[str]) -> dict[str, str]:
    """Path below `root` -> text, of the files that are UTF-8."""
    paths = [path for path in root.rglob("*.py") if not excluded.intersection(path.relative_to(root).parts[:-1])]
    if not paths:
        raise FileNotFoundError(f"{root} must be a folder with Python files, found none. Give another folder.")
    texts = {}
    for path in paths:
        try:
            texts[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # test inputs in other encodings: not a text to learn from
    return texts
