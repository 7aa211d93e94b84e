"""Forbidden constructs in a package that listens to other processes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kv_transfer"

UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {
    "recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "eval", "exec",
}  # fmt: skip


def parse(text: str) -> ast.Module:
    tree = ast.parse(text)
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            child.parent = parent  # type: ignore[attr-defined]
    return tree


def ancestors(node: ast.AST) -> Iterator[ast.AST]:
    while (node := getattr(node, "parent", None)) is not None:
        yield node


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module or ""}
    return set()


def unsafe_serializers(tree: ast.Module) -> list[int]:
    """Return the lines that can turn bytes into code."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if {name.partition(".")[0] for name in imported(node)} & UNSAFE_MODULES
        or (isinstance(node, ast.Attribute) and node.attr in UNSAFE_CALLS)
        or (isinstance(node, ast.Name) and node.id in UNSAFE_CALLS)
    ]


def is_narrowing(test: ast.expr) -> bool:
    """Return whether a test only narrows the type of an own value for the type checker."""
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def asserts_on_the_outside(tree: ast.Module) -> list[int]:
    """Return the lines that may crash on messages of another process.

    Allowed are: methods ``check_invariants``, which only tests call; types of own values; and, in
    modules that never see a message, mistakes of the caller, with words that say which.
    """
    sees_messages = any(
        name in {"kv_transfer.messages", "zmq", "socket"}
        for node in ast.walk(tree)
        for name in imported(node)
    )
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        and not is_narrowing(node.test)
        and not any(getattr(x, "name", "") == "check_invariants" for x in ancestors(node))
        and (sees_messages or node.msg is None)
    ]


def test_no_file_breaks_a_rule() -> None:
    names = set()
    for file in ROOT.rglob("*.py"):
        names.add(file.relative_to(ROOT).as_posix())
        tree = parse(file.read_text())
        for rule in (unsafe_serializers, asserts_on_the_outside):
            assert rule(tree) == [], (file, rule)
    assert names >= {"consumer.py", "producer.py", "transports/zmq.py", "shared_region.py"}


@pytest.mark.parametrize(
    ("rule", "num_found", "text"),
    [
        (unsafe_serializers, 1, "import pickle"),
        (unsafe_serializers, 1, "def f():\n    from cloudpickle import loads"),
        (unsafe_serializers, 1, "import os, marshal as m"),
        (unsafe_serializers, 1, "socket.recv_pyobj()"),
        (unsafe_serializers, 1, "eval(frame)"),
        (unsafe_serializers, 0, "import json\n'''pickle'''"),
        (asserts_on_the_outside, 1, "import zmq\nassert len(frames) == 2, 'frames'"),
        (
            asserts_on_the_outside,
            1,
            "from kv_transfer.messages import Data\nassert data.num > 0",
        ),
        (asserts_on_the_outside, 1, "assert count > 0"),
        (asserts_on_the_outside, 0, "import zmq\nassert self._io is not None"),
        (asserts_on_the_outside, 0, "import zmq\nassert isinstance(meta, Meta)"),
        (
            asserts_on_the_outside,
            0,
            "import zmq\ndef check_invariants(self):\n    assert self.x == 1",
        ),
        (asserts_on_the_outside, 0, "assert state not in ENDS, 'the caller is wrong'"),
    ],
)
def test_each_rule_finds_what_it_forbids_and_nothing_else(rule, num_found: int, text: str) -> None:
    assert len(rule(parse(text))) == num_found
