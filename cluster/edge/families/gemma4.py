"""Gemma 4: `<|tool_call>call:name{key:value}<tool_call|>`, with a special token as quotes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.gemma4_grammar import QUOTE, SchemaGrammar
from cluster.edge.families.json_text import arguments_text, loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_CALL, _CALL_END = "<|tool_call>", "<tool_call|>"
_MARK = re.compile(r'<\|"\|>|[{}\[\]]')
_END_OF_NAME = re.compile(r"(?=\{)|(?=<tool_call\|>)")
_END_OF_VALUE = re.compile(r"[,}\]]")
_MAX_DEPTH = 64


class Gemma4(ToolFormat):
    """Objects with keys without quotes."""

    starts: tuple[str, ...] = (_CALL,)
    keeps_space = True

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read one call."""
        del start, context
        yield from reader.expect("call:")
        name = yield from reader.until(_END_OF_NAME, len(_CALL_END))
        text = yield from _brackets(reader)
        yield from reader.skip_space()
        yield from reader.expect(_CALL_END)
        value, end = _value(text, 0, 0)
        if end != len(text):
            raise MalformedCallError
        sink.call(name.strip(), arguments_text(value))

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the function's name, its arguments and the call's end."""
        del is_parallel
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f"call:{tool.name}"),
                    SchemaGrammar(lark, tool.parameters).arguments(),
                    lark.text(_CALL_END),
                )
                for tool in tools
            ]
        )


def _brackets(reader: TextReader) -> Steps[str]:
    """Read an object as text; only its brackets outside strings are checked.

    Raises:
        MalformedCallError: The text continues otherwise.
        TruncatedCallError: The text ends before the object does.
    """
    if (yield from reader.peek()) != "{":
        raise MalformedCallError
    begin = at = reader.pos
    depth = 0
    while True:
        found = _MARK.search(reader.text, at)
        if found is None:
            at = max(at, len(reader.text) - len(QUOTE))
            yield from reader.more()
            continue
        at = found.end()
        if found[0] == QUOTE:
            while (end := reader.text.find(QUOTE, at)) < 0:
                at = max(at, len(reader.text) - len(QUOTE))
                yield from reader.more()
            at = end + len(QUOTE)
        else:
            depth += 1 if found[0] in "{[" else -1
            if depth == 0:
                reader.pos = at
                return reader.text[begin:at]


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at a position, and where it ends.

    Raises:
        MalformedCallError: There is none, or it is nested too deep.
    """
    at = _skip_space(text, at)
    if depth > _MAX_DEPTH or at >= len(text):
        raise MalformedCallError
    if text.startswith(QUOTE, at):
        return _string(text, at)
    if text[at] == "{":
        return _object(text, at, depth)
    if text[at] == "[":
        return _array(text, at, depth)
    found = _END_OF_VALUE.search(text, at)
    if found is None:
        raise MalformedCallError
    bare = text[at : found.start()].strip()
    try:
        return loads(bare), found.start()
    except MalformedCallError:
        return bare, found.start()


def _string(text: str, at: int) -> tuple[str, int]:
    begin = at + len(QUOTE)
    end = text.find(QUOTE, begin)
    if end < 0:
        raise MalformedCallError
    return text[begin:end], end + len(QUOTE)


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip_space(text, at + 1)
    while not text.startswith("}", at):
        if text.startswith(QUOTE, at):
            key, at = _string(text, at)
            at = text.find(":", at)
        else:
            end = text.find(":", at)
            key, at = text[at:end].strip(), end
        if at < 0 or not key:
            raise MalformedCallError
        found[key], at = _value(text, at + 1, depth + 1)
        at = _behind_separator(text, at, "}")
    return found, at + 1


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = _skip_space(text, at + 1)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _behind_separator(text, at, "]")
    return found, at + 1


def _behind_separator(text: str, at: int, end: str) -> int:
    """Return the position of the next entry, or of the closing bracket."""
    at = _skip_space(text, at)
    if text.startswith(",", at):
        return _skip_space(text, at + 1)
    if not text.startswith(end, at):
        raise MalformedCallError
    return at


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
