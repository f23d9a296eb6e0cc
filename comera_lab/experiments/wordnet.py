"""WordNet 3.0 files into labelled pairs of texts: entailment, neutral, contradiction-like. No torch, no randomness.

A text is "lemma : definition" of a noun or verb synset. From every hypernym edge (x, y):
    entailment      (x, y): y is the direct hypernym of x
    neutral         (x, y'): y' from an edge whose x has the same lexicographer file; x and y' unrelated
    contradiction   (x, y'): y' from an edge of the same part of speech, of another lexicographer file; unrelated
The y' are permutations of the y inside one split, so that every premise and every hypothesis stands equally often in
each class: a model that reads one side alone is at chance. Labels come from a taxonomy, not from people:
"contradiction" means another supersense, and some neutral pairs are true by accident.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LABELS = ("entailment", "neutral", "contradiction")
SPLITS = ("train", "dev", "test")
FILES = ("data.noun1", "data.noun2", "data.verb")
_HYPERNYMS = ("@", "@i")
# One premise synset in twenty to dev, one to test.
_SPLIT_PARTS = 20


@dataclass(frozen=True)
class Synset:
    """A noun or verb meaning: `key` such as "n00001740", its lexicographer file, "lemma : definition", its parents."""

    key: str
    file: int
    text: str
    parents: tuple[str, ...]


@dataclass(frozen=True)
class Edge:
    """A synset and one direct hypernym of it."""

    child: str
    parent: str


# Edges are permuted inside their group, and only to partners that fit.
Rule = tuple[Callable[[Edge], str], Callable[[Edge, Edge], bool]]


def read_synsets(folder: Path) -> dict[str, Synset]:
    """The nouns and verbs of the WordNet files in `folder` by key, in file order.

    Nouns are split over two files; the encoding is latin-1. Raises FileNotFoundError for a missing file and
    ValueError, naming file and line, for a line of another format.
    """
    synsets: dict[str, Synset] = {}
    for name in FILES:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing. A WordNet folder holds {', '.join(FILES)}.")
        for number, line in enumerate(path.read_text(encoding="latin-1").splitlines(), start=1):
            if line.startswith("  ") or not line.strip():
                continue
            try:
                synset = _synset(line)
            except (ValueError, IndexError) as error:
                raise ValueError(f"{path}, line {number} is not a WordNet synset: {line:.60}. Restore it.") from error
            synsets[synset.key] = synset
    return synsets


def _synset(line: str) -> Synset:
    """wndb(5WN): offset lex_file type words_hex (word id)* pointers (symbol offset type source/target)* | gloss."""
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    kind, words = fields[2], int(fields[3], 16)
    lemma = fields[4].replace("_", " ")
    at = 4 + 2 * words
    pointers = [fields[at + 1 + 4 * k : at + 5 + 4 * k] for k in range(int(fields[at]))]
    parents = tuple(f"{to}{offset}" for symbol, offset, to, _ in pointers if symbol in _HYPERNYMS)
    definition = gloss.split('; "', 1)[0].strip().rstrip(";").strip()
    return Synset(f"{kind}{fields[0]}", int(fields[1]), f"{lemma} : {definition}", parents)


def ancestors(synsets: Mapping[str, Synset]) -> dict[str, frozenset[str]]:
    """Every synset's hypernyms at any distance. The verb graph has a cycle, so the walk remembers where it was."""
    found: dict[str, frozenset[str]] = {}
    for key in synsets:
        seen: set[str] = set()
        waiting = list(synsets[key].parents)
        while waiting:
            parent = waiting.pop()
            if parent in seen or parent not in synsets:
                continue
            seen.add(parent)
            waiting.extend(synsets[parent].parents)
        found[key] = frozenset(seen)
    return found


def split_of(key: str) -> str:
    """The split of a premise synset, by the sha1 of its key: the same on every machine."""
    return {0: "dev", 1: "test"}.get(sha1_part(key, _SPLIT_PARTS), "train")


def sha1_part(key: str, parts: int) -> int:
    """Which of `parts` equally likely parts a key belongs to, on every machine and in every process."""
    return int.from_bytes(_sha1(key), "big") % parts


def labelled_pairs(synsets: Mapping[str, Synset]) -> dict[str, list[tuple[str, str, int]]]:
    """(premise key, hypothesis key, index into LABELS) by split, in an order made by sha1.

    Edges for which no unrelated partner is left (in tiny files) are left out of all three classes.
    """
    above = ancestors(synsets)
    edges: dict[str, list[Edge]] = {name: [] for name in SPLITS}
    for synset in synsets.values():
        for parent in dict.fromkeys(synset.parents):
            if parent in synsets and parent != synset.key:
                edges[split_of(synset.key)].append(Edge(synset.key, parent))
    return {name: _classes(some, synsets, above) for name, some in edges.items()}


def _classes(
    edges: list[Edge], synsets: Mapping[str, Synset], above: Mapping[str, frozenset[str]]
) -> list[tuple[str, str, int]]:
    def unrelated(edge: Edge, other: Edge) -> bool:
        x, y = edge.child, other.parent
        return x != y and y not in above[x] and x not in above[y]

    def elsewhere(edge: Edge, other: Edge) -> bool:
        return synsets[edge.child].file != synsets[other.parent].file and unrelated(edge, other)

    return balanced_classes(
        edges, (lambda edge: str(synsets[edge.child].file), unrelated), (lambda edge: edge.child[0], elsewhere)
    )


def balanced_classes(edges: list[Edge], near: Rule, far: Rule) -> list[tuple[str, str, int]]:
    """(child, parent, label): the edges as class 0, their parents permuted by the rules `near` and `far` as 1 and 2.

    Every child and every parent stands equally often in each class. Edges that find no partner are left out.
    """
    kept = edges
    while True:
        one, lost = _permuted(kept, *near, "neutral")
        other, lost_far = _permuted(kept, *far, "contradiction")
        lost |= lost_far
        if not lost:
            break
        kept = [edge for edge in kept if edge not in lost]
    pairs = [(edge.child, edge.parent, 0) for edge in kept]
    pairs += [(edge.child, partner.parent, 1) for edge, partner in one]
    pairs += [(edge.child, partner.parent, 2) for edge, partner in other]
    return sorted(pairs, key=lambda pair: _sha1(" ".join(map(str, pair))))


def _permuted(
    edges: Iterable[Edge],
    group_of: Callable[[Edge], str],
    fits: Callable[[Edge, Edge], bool],
    salt: str,
) -> tuple[list[tuple[Edge, Edge]], set[Edge]]:
    """Each edge with another one of its group, as a permutation, and the edges of pairs that cannot be mended."""
    groups: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        groups[group_of(edge)].append(edge)
    matched: list[tuple[Edge, Edge]] = []
    lost: set[Edge] = set()
    for group in groups.values():
        group.sort(key=lambda edge: _sha1(f"{salt} {edge.child} {edge.parent}"))
        partners = _repaired(group, fits)
        matched += zip(group, partners, strict=True)
        # Either side may be the one that fits nowhere (a premise or a hypothesis near the root): both go.
        lost |= {edge for pair in zip(group, partners, strict=True) if not fits(*pair) for edge in pair}
    return matched, lost


def _repaired(group: Sequence[Edge], fits: Callable[[Edge, Edge], bool]) -> list[Edge]:
    """The group moved on by one, then partners swapped wherever two edges do not fit and both would."""
    partners = [*group[1:], *group[:1]]
    count = len(group)
    for i in range(count):
        if fits(group[i], partners[i]):
            continue
        for step in range(1, count):
            k = (i + step) % count
            if fits(group[i], partners[k]) and fits(group[k], partners[i]):
                partners[i], partners[k] = partners[k], partners[i]
                break
    return partners


def _sha1(text: str) -> bytes:
    return hashlib.sha1(text.encode(), usedforsecurity=False).digest()
