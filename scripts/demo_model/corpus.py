"""Reads the documentation of the running Python's standard library and splits it by module.

Decides which texts the demo model may learn from, which choose its checkpoint and which measure
it. Everything here is a pure function of the standard library's source files: no randomness, no
clock, nothing platform specific.

It is not a tokenizer and knows nothing of chat formats.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The Python whose documentation the demo model in the tree learned, and the digest of its corpus.
REFERENCE_PYTHON = "3.11.7"
REFERENCE_SHA256 = "8a15eb1f86388c169d84f7848fb342f55f13667c62db182e11dcbe79adc05c38"

# Directories that hold no documentation of the library: tests, third-party packages, bytecode.
_SKIPPED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
)
# Per mille of the top-level modules (by hash of their names) that are held out or validate.
_HELD_OUT_PER_MILLE = 150
_VALIDATION_PER_MILLE = 30
_TOPICS_MODULE = "pydoc_data"


@dataclass(frozen=True)
class Document:
    """One documentation string.

    Attributes:
        module: top-level module name; decides the part that the document belongs to.
        name: dotted name of what is documented, such as `json.dumps`; for a help topic the topic's
            own name.
        kind: "module", "class", "function", "topic" or "page".
        text: the cleaned documentation string, never empty.
        source: the source file that it stands in, or the topic.
    """

    module: str
    name: str
    kind: str
    text: str
    source: str = ""

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8 bytes, the unit that bits are divided by."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, split by top-level module. No text occurs twice.

    Attributes:
        train: what gradients are computed from.
        validation: modules that choose the checkpoint; the n-gram baseline may count them.
        held_out: modules that nothing is fitted to and nothing is chosen by.
        sha256: digest over every part, name and text; two equal digests mean equal experiments.
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str


def load_corpus() -> Corpus:
    """Collect, deduplicate and split the documentation of the running interpreter's library."""
    parts: dict[str, list[Document]] = {"train": [], "validation": [], "held_out": []}
    documents = [*_docstrings(Path(sysconfig.get_paths()["stdlib"])), *_topics()]
    seen: set[str] = set()
    # Train first: a text that also occurs in a train module is never counted as held out.
    for part in parts:
        for document in documents:
            if part_of_module(document.module) == part and document.text not in seen:
                seen.add(document.text)
                parts[part].append(document)
    digest = hashlib.sha256()
    for part, members in parts.items():
        for document in members:
            digest.update(f"{part}\0{document.name}\0{document.text}\0".encode())
    return Corpus(
        train=tuple(parts["train"]),
        validation=tuple(parts["validation"]),
        held_out=tuple(parts["held_out"]),
        sha256=digest.hexdigest(),
    )


def part_of_module(module: str) -> str:
    """Return "train", "validation" or "held_out" for a top-level module, by a hash of its name.

    The help topics are one module of a fifth of the corpus and always train.
    """
    if module == _TOPICS_MODULE:
        return "train"
    bucket = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big") % 1000
    if bucket < _HELD_OUT_PER_MILLE:
        return "held_out"
    return "validation" if bucket < _HELD_OUT_PER_MILLE + _VALIDATION_PER_MILLE else "train"


def pages(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Join what stands in one source file, in its order, to one document."""
    return tuple(
        Document(members[0].module, source, "page", "\n\n".join(d.text for d in members), source)
        for source, members in (
            (source, list(group)) for source, group in groupby(documents, lambda d: d.source)
        )
    )


def total_bytes(documents: Iterable[Document]) -> int:
    """Return the number of UTF-8 bytes of all texts together."""
    return sum(document.num_bytes for document in documents)


def _docstrings(root: Path) -> Iterator[Document]:
    paths = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts)
    for path in paths:
        parts = path.relative_to(root).with_suffix("").parts
        # _sysconfigdata_* is generated by the build of this very machine.
        if _SKIPPED_DIRECTORIES.intersection(parts) or parts[0].startswith("_sysconfigdata"):
            continue
        dotted = parts[:-1] if parts[-1] in ("__init__", "__main__") else parts
        tree = ast.parse(path.read_bytes())
        source = path.relative_to(root).as_posix()
        for document in _node_docstrings(tree, dotted or parts, parts[0]):
            yield replace(document, source=source)


def _node_docstrings(node: ast.AST, dotted: tuple[str, ...], module: str) -> Iterator[Document]:
    kinds = {ast.Module: "module", ast.ClassDef: "class"}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").strip()
        # Surrogates in a docstring (a handful of escapes) have no UTF-8 form.
        text = text.encode("utf-8", "replace").decode()
        if text:
            yield Document(module, ".".join(dotted), kinds.get(type(node), "function"), text)
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", None)
        is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _node_docstrings(child, (*dotted, name) if is_named and name else dotted, module)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics  # a module of data: half a megabyte that only this needs

    for name, text in sorted(topics.items()):
        yield Document(_TOPICS_MODULE, name, "topic", text.strip(), source=name)
