"""Reads the documentation of the running Python's standard library and splits it by module.

Decides which texts the demo model may learn from, which choose its checkpoint and which measure
it. Everything here is a pure function of the standard library: no randomness, no clock. Builds of
one Python version differ in the compiled modules that they have, so those to read are named here.

It is not a tokenizer and knows nothing of chat formats.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sysconfig
import warnings
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The Python whose documentation the demo model in the tree learned, and the digest of its corpus.
REFERENCE_PYTHON = "3.11.7"
REFERENCE_SHA256 = "923580d7041300a4f59f41b1cc2f5ba540172c5b84ab7315171964da6eafb04d"

# Directories that hold no documentation of the library: tests, third-party packages, bytecode.
_SKIPPED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
)
# Per mille of the top-level modules (by hash of their names) that are held out or validate.
_HELD_OUT_PER_MILLE = 150
_VALIDATION_PER_MILLE = 30
_TOPICS_MODULE = "pydoc_data"
# Modules written in C that need no library outside Python, some of them not in every version. Their
# docstrings are in no source file.
# Not _decimal: its texts are those of _pydecimal, which trains, with few words changed.
# fmt: off
_COMPILED_MODULES = (
    "_abc", "_asyncio", "_bisect", "_codecs", "_collections", "_contextvars", "_csv",
    "_datetime", "_elementtree", "_functools", "_heapq", "_imp", "_io", "_json", "_locale",
    "_lsprof", "_md5", "_multiprocessing", "_opcode", "_operator", "_pickle", "_posixshmem",
    "_posixsubprocess", "_queue", "_random", "_sha1", "_sha256", "_sha512", "_signal",
    "_socket", "_sre", "_statistics", "_string", "_struct", "_symtable", "_thread",
    "_tracemalloc", "_typing", "_warnings", "_weakref", "_zoneinfo", "array", "atexit",
    "audioop", "binascii", "builtins", "cmath", "errno", "faulthandler", "fcntl", "gc", "grp",
    "itertools", "marshal", "math", "mmap", "posix", "pwd", "pyexpat", "resource", "select",
    "sys", "syslog", "termios", "time", "unicodedata",
)
# fmt: on
# The names under which compiled modules are known; otherwise the underscore in front goes.
_PUBLIC_NAMES = {
    "builtins": "",
    "posix": "os",
    "_thread": "threading",
    "_sre": "re",
    "_lsprof": "cProfile",
}


@dataclass(frozen=True)
class Document:
    """One documentation string.

    Attributes:
        module: top-level module name, without leading underscores if the module is compiled;
            decides the part that the document belongs to.
        name: dotted name of the documented object, such as `json.dumps`; of a help topic its own
            name.
        kind: "module", "class", "function", "topic" or "page".
        text: the cleaned documentation string, never empty.
        source: the source file or compiled module that it stands in, or the topic.
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
        train: modules for gradients.
        validation: modules that choose the checkpoint; the n-gram baseline may count them.
        held_out: modules used neither to fit nor to choose anything.
        sha256: digest over every part, name and text; two equal digests mean equal experiments.
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str


def load_corpus() -> Corpus:
    """Collect, deduplicate and split the documentation of the running interpreter's library."""
    parts: dict[str, list[Document]] = {"train": [], "validation": [], "held_out": []}
    documents = [
        *_docstrings(Path(sysconfig.get_paths()["stdlib"])),
        *_compiled_docstrings(),
        *_topics(),
    ]
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
    """Join the documents of each source file, in order, to one document."""
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


def _compiled_docstrings() -> Iterator[Document]:
    for name in _COMPILED_MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        # Without its underscore, a module is in the same part as the Python module that wraps it.
        module = name.lstrip("_")
        dotted = tuple(filter(None, [_PUBLIC_NAMES.get(name, module)]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of modules to be removed
            compiled = importlib.import_module(name)
        yield from _object_docstrings(compiled, dotted, module, name)


def _object_docstrings(
    thing: object, dotted: tuple[str, ...], module: str, source: str
) -> Iterator[Document]:
    """Yield the docstrings of a compiled module, class or function and of its members."""
    is_scope = inspect.ismodule(thing) or inspect.isclass(thing)
    kind = "module" if inspect.ismodule(thing) else "class" if is_scope else "function"
    documentation = getattr(thing, "__doc__", None)
    text = inspect.cleandoc(documentation).strip() if isinstance(documentation, str) else ""
    if text:
        yield Document(module, ".".join(dotted) or module, kind, text, source)
    for name, member in sorted(vars(thing).items()) if is_scope else ():
        if _is_compiled(member, inside_module=inspect.ismodule(thing)):
            yield from _object_docstrings(member, (*dotted, name), module, source)


def _is_compiled(member: object, *, inside_module: bool) -> bool:
    if inspect.isclass(member):
        return inside_module  # a class inside a class is an alias such as `__class__`
    if inspect.isfunction(member):
        return False
    return inspect.isroutine(member) or inspect.isdatadescriptor(member)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics  # a module of data: half a megabyte that only this needs

    for name, text in sorted(topics.items()):
        yield Document(_TOPICS_MODULE, name, "topic", text.strip(), source=name)
