"""Texts as ids: byte-pair codes learned on the training side, streams cut into blocks, causal or masked.

The cache is keyed by the corpus' digest, the vocabulary and `BUILDER_VERSION`, and its checksum is compared each time
it is read: a damaged one is made anew, for the texts are here.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comera_lab.experiments.corpus import Corpus
from comera_lab.experiments.datasets import Dataset
from comera_lab.experiments.pairs import cache_root
from comera_lab.objectives.token_loss import IGNORE
from comera_lab.runtime import require
from comera_lab.shapes import ShapeError, positive_int

BUILDER_VERSION = 2
SPECIAL = ("<pad>", "<mask>", "<end>")
PAD, MASK, END = range(3)
_SMALLEST = 256 + len(SPECIAL)
MASKED_SHARE = 0.15  # as in BERT and CodeBERT; of these 80 % read <mask>, 10 % another token, 10 % themselves
_MASK_SEED = 20_020  # the validation side is masked once, so that all evaluations ask the same
_FILES = ("tokens.npz", "tokenizer.json")
_Ids = npt.NDArray[np.int32]


class CodeTokenizer:
    """Byte-pair codes (Sennrich 2016) over bytes: every text can be written, and `decode` gives it back exactly."""

    def __init__(self, json_text: str) -> None:
        self.json_text = json_text
        self._inner: Any = require("tokenizers", "byte-pair codes").Tokenizer.from_str(json_text)

    @classmethod
    def learn(cls, texts: Iterable[str], vocabulary: int) -> CodeTokenizer:
        """Merge the most frequent pairs until there are `vocabulary` tokens, three special ones and 256 bytes included.

        Raises ShapeError for fewer than those, or where the texts do not hold so many pairs worth merging.
        """
        if positive_int(vocabulary, "vocabulary") < _SMALLEST:
            raise ShapeError(
                f"vocabulary must be at least {_SMALLEST}, bytes and special tokens, got {vocabulary}. Try 2048."
            )
        tools = require("tokenizers", "byte-pair codes")
        inner = tools.Tokenizer(tools.models.BPE())
        inner.pre_tokenizer = tools.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tools.decoders.ByteLevel()
        trainer = tools.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(tools.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        found = inner.get_vocab_size()
        if found < vocabulary:
            raise ShapeError(
                f"these texts give {found:,} tokens, got vocabulary={vocabulary:,}. "
                f"Ask for at most {found:,}, or give more text."
            )
        return cls(inner.to_str())

    def __len__(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens, whatever the text says."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        """One list of ids for each text; special tokens written out in a text are plain characters."""
        self._inner.encode_special_tokens = True
        return [list(one.ids) for one in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; special tokens are left out, half a character reads as �."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=True))


@dataclass(frozen=True)
class TokenStreams:
    """Both sides as one long row of ids each, every text ended by <end>."""

    tokenizer: CodeTokenizer
    train: _Ids
    validation: _Ids
    source: str
    characters_per_token: float  # of the validation side

    @property
    def digest(self) -> str:
        """sha256 over tokenizer and ids."""
        digest = hashlib.sha256(self.tokenizer.json_text.encode())
        for side in (self.train, self.validation):
            digest.update(str(side.shape).encode() + np.ascontiguousarray(side.astype("<i4")).tobytes())
        return digest.hexdigest()

    def blocks(self, tokens: int = 128, *, masked: bool = False, validation_blocks: int | None = None) -> TokenData:
        """Blocks of `tokens` ids, next tokens as targets, or masked. What is left at the end of a side is dropped.

        `validation_blocks` keeps so many, spread evenly over the side. Raises ShapeError for a side without a block.
        """
        positive_int(tokens, "tokens")
        sides = {}
        for name, stream in (("train", self.train), ("test", self.validation)):
            count = (len(stream) - 1) // tokens
            if count < 1:
                raise ShapeError(
                    f"tokens must fit both sides of the corpus, got {tokens} for {len(stream)} ids in the {name} side. "
                    "Use shorter blocks or more text."
                )
            ids = torch.from_numpy(stream)
            chosen = torch.arange(count)
            if name == "test" and validation_blocks is not None and validation_blocks < count:
                chosen = torch.arange(positive_int(validation_blocks, "validation_blocks")) * count // validation_blocks
            x, y = (ids[shift : shift + count * tokens].view(count, tokens) for shift in (0, 0 if masked else 1))
            sides[f"{name}_x"], sides[f"{name}_y"] = (x, y) if len(chosen) == count else (x[chosen], y[chosen])
        if masked:
            draw = torch.Generator().manual_seed(_MASK_SEED)
            sides["test_x"], sides["test_y"] = masked_batch(sides["test_x"], len(self.tokenizer), draw)
        return TokenData(
            name=self.source,
            **sides,
            classes=len(self.tokenizer),
            note="masked tokens" if masked else "next tokens",
            masked=masked,
        )


@dataclass(frozen=True)
class TokenData(Dataset):
    """x and y (rows, tokens) int32 ids. Causal: y are the next tokens. Masked: train_y equals train_x and is masked
    batch by batch in training; test_x is masked already, test_y is `IGNORE` where nothing is asked."""

    masked: bool = False

    def __post_init__(self) -> None:
        for side in ("train", "test"):
            x, y = getattr(self, f"{side}_x"), getattr(self, f"{side}_y")
            if x.ndim != 2 or x.shape != y.shape or not len(x):
                raise ShapeError(
                    f"{side}_x and {side}_y must be (rows, tokens), got {tuple(x.shape)} and {tuple(y.shape)}. "
                    "Give one target for each token."
                )
            if int(x.max()) >= self.classes or int(y.max()) >= self.classes or int(x.min()) < 0:
                raise ValueError(
                    f"ids must lie in [0, {self.classes}), got {int(x.min())} to {max(int(x.max()), int(y.max()))} in "
                    f"{side}. Use the tokenizer of this vocabulary."
                )


def masked_batch(ids: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """ids (rows, tokens) -> (what the model reads, targets), `IGNORE` where nothing is asked.

    In every row 15 % of the places, at least one, are asked for, in BERT's mix (arXiv 1810.04805, CodeBERT arXiv
    2002.08155): eight in ten read <mask>, one another token, one itself. `generator` is a CPU generator.
    """
    rows, tokens = ids.shape
    count = max(1, round(MASKED_SHARE * tokens))
    order = torch.rand(rows, tokens, generator=generator)
    asked = torch.zeros(rows, tokens, dtype=torch.bool).scatter_(1, order.topk(count, dim=1).indices, True)
    choice = torch.rand(rows, tokens, generator=generator)
    others = torch.randint(len(SPECIAL), vocabulary, (rows, tokens), generator=generator, dtype=ids.dtype)
    asked, choice, others = (part.to(ids.device) for part in (asked, choice, others))
    read = ids.masked_fill(asked & (choice < 0.8), MASK)
    read = torch.where(asked & (choice >= 0.9), others, read)
    return read, ids.masked_fill(~asked, IGNORE)


def token_streams(corpus: Corpus, vocabulary: int = 2048) -> TokenStreams:
    """The corpus in codes of its training side, from the cache or made and put there: some seconds."""
    folder = cache_root() / f"tokens-{corpus.digest[:12]}-{vocabulary}-v{BUILDER_VERSION}"
    found = _from_cache(folder, corpus.source)
    if found is None:
        found = encoded(corpus, CodeTokenizer.learn(corpus.train, vocabulary))
        _to_cache(found, folder)
    return found


def encoded(corpus: Corpus, tokenizer: CodeTokenizer) -> TokenStreams:
    """The corpus in the codes of `tokenizer`."""
    train, validation = (
        np.array([i for ids in tokenizer.encode_all(side) for i in (*ids, END)], dtype=np.int32)
        for side in (corpus.train, corpus.validation)
    )
    characters = sum(map(len, corpus.validation))
    return TokenStreams(tokenizer, train, validation, corpus.source, characters / len(validation))


def _from_cache(folder: Path, source: str) -> TokenStreams | None:
    """None where there is nothing, or nothing whole."""
    try:
        packed, text = ((folder / name).read_bytes() for name in _FILES)
        wanted = (folder / "digest.txt").read_text().strip()
    except OSError:
        return None
    if _checksum(packed, text) != wanted:
        return None
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        train, validation, per_token = (arrays[name] for name in ("train", "validation", "characters_per_token"))
    return TokenStreams(CodeTokenizer(text.decode()), train, validation, source, float(per_token))


def _to_cache(streams: TokenStreams, folder: Path) -> None:
    """Written whole or not at all."""
    packed = io.BytesIO()
    np.savez_compressed(
        packed,
        train=streams.train,
        validation=streams.validation,
        characters_per_token=np.float64(streams.characters_per_token),
    )
    text = streams.tokenizer.json_text.encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, content in zip(_FILES, (packed.getvalue(), text), strict=True):
        (fresh / name).write_bytes(content)
    (fresh / "digest.txt").write_text(_checksum(packed.getvalue(), text) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        fresh.rename(folder)
    except OSError:
        # another process put the same tokens there in the meantime
        shutil.rmtree(fresh)
        if not folder.is_dir():
            raise


def _checksum(packed: bytes, text: bytes) -> str:
    return hashlib.sha256(hashlib.sha256(packed).digest() + text).hexdigest()
