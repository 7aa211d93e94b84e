"""Calls whose arguments are JSON in the output: they are given as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.json_text import loads

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.edge.families.message import MessageSink
    from cluster.edge.families.reader import Steps, TextReader

_ARGUMENTS = ("arguments", "parameters")


def read_arguments(
    reader: TextReader, sink: MessageSink, name: object, call_id: str = ""
) -> Steps[None]:
    """Begin a call and read its arguments; `sink.end_call` completes them.

    Raises:
        MalformedCallError: The text continues with something else than a JSON object.
        TruncatedCallError: The text ends before the object does.
    """
    if (yield from reader.peek()) != "{":
        raise MalformedCallError
    sink.begin_call(name, call_id)
    yield from reader.json(sink.add_arguments, without_end=True)


def read_object_call(
    reader: TextReader,
    sink: MessageSink,
    *,
    names: Collection[str] | None = None,
    first_keys: Collection[str] | None = None,
) -> Steps[None]:
    """Read a JSON object with a call's name and arguments.

    Arguments behind the name are given as they come, others together with the name.

    Args:
        reader: The text.
        sink: Gets the call.
        names: Names that a call may have, if not all; arguments must be there then.
        first_keys: Keys that the object may begin with, if not all.

    Raises:
        MalformedCallError: The text continues with something else.
        TruncatedCallError: The text ends before the object does.
    """
    yield from reader.expect("{")
    values: dict[str, Any] = {}
    arguments = ""
    is_open = False
    while not (yield from _ends(reader, is_first=not values)):
        key = yield from _key(reader)
        if first_keys is not None and not values and key not in first_keys:
            raise MalformedCallError
        if key not in _ARGUMENTS:
            values[key] = loads((yield from reader.json_text()))
            if key == "name" and (is_open or not _is_name(values[key], names)):
                raise MalformedCallError
            continue
        if is_open or arguments or (yield from reader.peek()) != "{":
            raise MalformedCallError
        if "name" in values:
            yield from read_arguments(reader, sink, values["name"])
            is_open = True
        else:
            arguments = yield from reader.json_text()
        values[key] = None
    if not is_open:
        if "name" not in values or (names is not None and not arguments):
            raise MalformedCallError
        sink.call(values["name"], arguments or "{}")
    else:
        sink.end_call()


def _is_name(name: object, names: Collection[str] | None) -> bool:
    return isinstance(name, str) and (names is None or name in names)


def _ends(reader: TextReader, *, is_first: bool) -> Steps[bool]:
    """Read the end of an object, or what precedes its next key; return whether it was the end."""
    yield from reader.skip_space()
    if (yield from reader.starts("}")):
        return True
    if not is_first:
        yield from reader.expect(",")
        yield from reader.skip_space()
    return False


def _key(reader: TextReader) -> Steps[str]:
    """Read a key and the colon behind it."""
    if (yield from reader.peek()) != '"':
        raise MalformedCallError
    key: str = loads((yield from reader.json_text()))
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    return key
