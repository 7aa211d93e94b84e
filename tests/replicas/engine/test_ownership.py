"""Each field of a sequence is written by one module of the packages that see sequences.

Read from the syntax trees: assignments to an attribute of a name, and calls that change its list.
"""

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import replicas.engine
import replicas.engine_process
import replicas.sampling
from replicas.engine.sequence import KVLoad, KVPlace, Sequence

PACKAGES = (replicas.engine, replicas.engine_process, replicas.sampling)

WRITERS = {
    "handle": "requests",
    "is_aborted": "request_table",
    "is_drawn_on_host": "scheduler",
    "is_known_to_runner": "scheduler",
    "has_sent_tokens": "outputs",
    "load": "kv_loads",
    "examine_at": "scheduler",
    "num_computed_tokens": "scheduler",
    "num_preemptions": "request_table",
    "order": "request_table",
    "phase": "sequence",
    "pooled": "scheduler",
    "prompt_logprobs": "scheduler",
    "stop_ids": "scheduler",
    "token_ids": "scheduler",
    **dict.fromkeys((field.name for field in fields(KVPlace)), "kv_cache"),
    **dict.fromkeys((field.name for field in fields(KVLoad)), "kv_loads"),
}
OTHERS = {"self", "columns", "batch"}
"""Names of objects that are no sequences and have attributes of the same name."""
CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault"}


def modules():
    """Yield the stem and the tree of each module of the packages."""
    for package in PACKAGES:
        for path in Path(package.__file__).parent.rglob("*.py"):
            yield path.stem, ast.parse(path.read_text())


def written(tree):
    """Return the attributes that a module assigns or changes, of objects other than `OTHERS`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) as target:
                pass
            case ast.Subscript(value=ast.Attribute() as target, ctx=ast.Store() | ast.Del()):
                pass
            case ast.Call(ast.Attribute(ast.Attribute() as target, change)) if change in CHANGES:
                pass
            case _:
                continue
        owner = target.value.value if isinstance(target.value, ast.Subscript) else target.value
        is_place = isinstance(owner, ast.Attribute) and owner.attr == "place"
        if is_place or (isinstance(owner, ast.Name) and owner.id not in OTHERS):
            yield target.attr


def test_each_field_of_a_sequence_has_the_writer_that_is_named_here():
    names = {field.name for field in (*fields(Sequence), *fields(KVPlace), *fields(KVLoad))}
    found = defaultdict(set)
    for module, tree in modules():
        for name in names.intersection(written(tree)):
            found[name].add(module)
    assert found == {name: {module} for name, module in WRITERS.items()}


def test_a_phase_changes_in_the_request_table_alone():
    callers = set()
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("transition"):
                callers.add(module)
    assert callers == {"request_table"}


def test_every_way_of_writing_is_seen():
    source = """
s.a = 1; s.b += 1; s.c[0] = 1; s.d.append(1); del s.e; s.f, x = y; rows[0].g = 1
s.place.h = 1
self.i = 1; s.j(); x = s.k; columns.l.extend([1])
"""
    assert sorted(written(ast.parse(source))) == ["a", "b", "c", "d", "e", "f", "g", "h"]
