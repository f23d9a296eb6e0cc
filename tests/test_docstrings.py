"""Docstring pairs: mined from sources as they lie, whole modules on one side, one side alone says nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from comera_lab.experiments.docstrings import docstring_pairs, documented_functions
from comera_lab.experiments.pairs import function_pairs
from comera_lab.experiments.wordnet import SPLITS, sha1_part

MODULE = '''
def read_{n}(path, {n}_size):
    """Read {n} rows of a file. The rest is left alone.

    More text.
    """
    # a comment
    first = path + {size}
    second = {n}_size * first
    return read_{n}(first, second)


class Reader:
    async def close(self):
        """Close what {n} was opened with"""
        self.state = {size}
        await self.{n}
        self.gone = True

    def short(self):
        """One line is not enough for {n}"""
        return {size}

    def silent(self):
        a = 1
        b = 2
        return a + b
'''


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Four packages of 26 modules, each with two documented functions, and what has to be left out."""
    root = tmp_path / "lib"
    for package in ("ant", "bee", "cow", "doe"):
        for number in range(26):
            path = root / package / f"m{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(MODULE.format(n=f"{package}{chr(97 + number)}", size=number), encoding="utf-8")
    (root / "ant" / "tests").mkdir()
    (root / "ant" / "tests" / "m.py").write_text(MODULE.format(n="left_out", size=1))
    (root / "broken.py").write_text("def f(:\n")
    (root / "null.py").write_bytes(b"x = 1\0\n")
    (root / "latin.py").write_bytes(b"x = '\xe9'\n")
    (root / "odd.py").write_text("x = '\\d'\n")
    return root


def test_functions_are_read_with_first_sentence_and_body_without_name_comments_and_docs(sources: Path) -> None:
    functions = documented_functions(sources)
    assert len(functions) == 4 * 26 * 2
    first = functions[0]
    assert (first.module, first.line, first.package) == ("ant/m0.py", 2, "ant")
    assert first.doc == "Read anta rows of a file."
    assert first.body == "path anta_size\nfirst = path + 0\nsecond = anta_size * first\nreturn it(first, second)"
    assert functions[1].body.startswith("self\nself.state = 0\nawait")


def test_repeated_docs_and_bodies_are_kept_once(sources: Path) -> None:
    (sources / "ant" / "twin.py").write_text((sources / "ant" / "m0.py").read_text())
    assert len(documented_functions(sources)) == 4 * 26 * 2


def test_labels_mean_what_they_say_and_modules_stay_on_one_side(sources: Path) -> None:
    functions = documented_functions(sources)
    by_doc = {function.doc: function for function in functions}
    by_body = {function.body: function for function in functions}
    pairs = docstring_pairs(functions)
    assert set(pairs) == set(SPLITS) and all(pairs.values())
    for split, some in pairs.items():
        for side in (0, 1):
            counts = Counter((pair[side], pair[2]) for pair in some)
            assert all(len({counts[text, label] for label in (0, 1, 2)}) == 1 for text, _ in counts)
        for doc, body, label in some:
            one, other = by_doc[doc], by_body[body]
            for function in (one, other):
                assert {0: "dev", 1: "test"}.get(sha1_part(function.module, 10), "train") == split
            assert (one == other) == (label == 0)
            assert label != 1 or (one.module == other.module)
            assert label != 2 or one.package != other.package


def test_same_sources_same_pairs_and_the_source_is_named(sources: Path) -> None:
    one = function_pairs(sources)
    assert one.digest == function_pairs(sources).digest
    assert one.source == f"docstrings and function bodies of {sources}"
    assert one.dataset("test").train_x.shape[1:] == (2, 32)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none must be a folder with Python sources"):
        documented_functions(tmp_path / "none")


@pytest.mark.slow
def test_standard_library_gives_enough_pairs_of_each_class() -> None:
    data = function_pairs()
    assert "standard library of Python 3." in data.source
    for split, least in (("train", 3000), ("dev", 150), ("test", 150)):
        counts = Counter(data.splits[split][:, 2].tolist())
        assert len(set(counts.values())) == 1 and len(data.splits[split]) >= least
