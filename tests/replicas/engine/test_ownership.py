"""Each field of a sequence is written by one module of the engine.

Read from the syntax trees: assignments to an attribute of a name, and calls that change its list.
"""

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from replicas.engine import sequence
from replicas.engine.sequence import KVLoad, KVPlace, Sequence

WRITERS = {
    "handle": "requests",
    "is_aborted": "request_table",
    "is_known_to_runner": "scheduler",
    "has_sent_tokens": "outputs",
    "load": "kv_loads",
    "look_at": "scheduler",
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
    for path in Path(sequence.__file__).parent.rglob("*.py"):
        for name in written(ast.parse(path.read_text())):
            if name in names:
                found[name].add(path.stem)
    assert found == {name: {module} for name, module in WRITERS.items()}


def test_a_phase_changes_in_the_request_table_alone():
    callers = set()
    for path in Path(sequence.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("transition"):
                callers.add(path.stem)
    assert callers == {"request_table"}


def test_every_way_of_writing_is_seen():
    source = """
s.a = 1; s.b += 1; s.c[0] = 1; s.d.append(1); del s.e; s.f, x = y; rows[0].g = 1
s.place.h = 1
self.i = 1; s.j(); x = s.k; columns.l.extend([1])
"""
    assert sorted(written(ast.parse(source))) == ["a", "b", "c", "d", "e", "f", "g", "h"]
