"""Pairs of a docstring and a function body from this Python's own standard library: three classes, no download.

A premise is the first sentence of a docstring, a hypothesis the code of a body:
    entailment      the body that the docstring belongs to
    neutral         another body of the same module
    contradiction   a body of another top-level package
As with WordNet, bodies are permuted inside one split, so that one side alone says nothing about the class. Whole
modules go to one split. The names mean less here: a body of the same module may well do what the docstring says.
It is a hard task, near what a bag of words can do; contents differ between Python versions. Nothing is copied.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from comera_lab.experiments.wordnet import SPLITS, Edge, balanced_classes, sha1_part

# Tests repeat themselves, and these are tools or copies of other projects.
EXCLUDED = frozenset(
    ("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages")
)
_SPLIT_PARTS = 10  # one module in ten to dev, one to test
_LEAST_WORDS = 4  # of a docstring's first sentence
_LEAST_LINES = 3  # of a body
_MASK = "it"


@dataclass(frozen=True)
class Function:
    """One documented function: where it stands ("json/decoder.py", 343), first sentence, code without name and docs."""

    module: str
    line: int
    doc: str
    body: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.line}"

    @property
    def package(self) -> str:
        return self.module.split("/")[0].removesuffix(".py")


def documented_functions(folder: str | Path | None = None) -> list[Function]:
    """The functions below `folder` (default: the standard library), in order of path and line, repeats left out.

    Files that this Python cannot parse are left out. Raises FileNotFoundError for a folder that is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} must be a folder with Python sources. Give another one.")
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    docs: set[str] = set()
    bodies: set[str] = set()
    kept = []
    for module in paths:
        if EXCLUDED.intersection(module.split("/")[:-1]):
            continue
        for function in _functions(module, (root / module).read_bytes()):
            if function.doc not in docs and function.body not in bodies:
                kept.append(function)
            docs.add(function.doc)
            bodies.add(function.body)
    return kept


def docstring_pairs(functions: list[Function]) -> Mapping[str, list[tuple[str, str, int]]]:
    """(docstring, body, index into LABELS) by split, in an order made by sha1."""
    by_key = {function.key: function for function in functions}
    edges: dict[str, list[Edge]] = {name: [] for name in SPLITS}
    for function in functions:
        split = {0: "dev", 1: "test"}.get(sha1_part(function.module, _SPLIT_PARTS), "train")
        edges[split].append(Edge(function.key, function.key))

    def module(edge: Edge) -> str:
        return by_key[edge.child].module

    def apart(edge: Edge, other: Edge) -> bool:
        return by_key[edge.child].package != by_key[other.parent].package

    return {
        name: [
            (by_key[doc].doc, by_key[body].body, label)
            for doc, body, label in balanced_classes(some, (module, _different), (lambda edge: "", apart))
        ]
        for name, some in edges.items()
    }


def _different(edge: Edge, other: Edge) -> bool:
    return edge.child != other.parent


def _functions(module: str, source: bytes) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(found, key=lambda node: node.lineno):
        doc = re.split(r"(?<=[.!?])\s|\n\s*\n", ast.get_docstring(node) or "", maxsplit=1)[0]
        lines = "\n".join(ast.unparse(statement) for statement in node.body[1:])
        if len(doc.split()) >= _LEAST_WORDS and lines.count("\n") + 1 >= _LEAST_LINES:
            arguments = " ".join(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
            yield Function(
                module,
                node.lineno,
                _masked(" ".join(doc.split()), node.name),
                _masked(f"{arguments}\n{lines}", node.name),
            )


def _masked(text: str, name: str) -> str:
    """Without the function's own name: most docstrings repeat it, and the pairs would be told apart by it."""
    return re.sub(rf"\b{re.escape(name)}\b", _MASK, text)
