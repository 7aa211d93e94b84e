"""Llama 4 and others: the message is a list of Python calls."""

from __future__ import annotations

import ast
import keyword
import re
from typing import TYPE_CHECKING, NamedTuple

from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.json_text import arguments_text
from cluster.edge.families.parameters import definitions, listed_properties, property_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_OUTSIDE = re.compile(r"""["'()\[\]{}]""")
_INSIDE = {mark: re.compile(rf"[{mark}\\]") for mark in "\"'"}
_NAMES = {"true": True, "false": False, "null": None}


class _Call(NamedTuple):
    name: str
    arguments: dict[str, object]


class Pythonic(ToolFormat):
    """A list such as `[f(a=1), g()]` at the message's beginning."""

    starts: tuple[str, ...] = (_BEGIN,)
    start: str | None = ""
    leading: tuple[str, ...] = ("[",)
    is_section = True
    keeps_space = True
    passes_cut = True

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the list; another list is content as soon as that shows."""
        if start == "[":
            reader.pos -= 1
        yield from reader.skip_space()
        begin = reader.pos
        yield from reader.expect("[")
        yield from reader.skip_space()
        yield from _skip_name(reader)
        yield from reader.expect("(")
        reader.pos = begin
        for call in _calls((yield from _brackets(reader)), context):
            sink.call(call.name, arguments_text(call.arguments))
        yield from reader.starts(_END)

    def can_call(self, tool: Tool) -> bool:
        """Return whether the names of the tool and of its arguments are names of Python."""
        properties = tool.parameters.get("properties")
        names = [*tool.name.split("."), *(properties if isinstance(properties, dict) else ())]
        return all(name.isidentifier() and not keyword.iskeyword(name) for name in names)

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the list, with JSON for values."""
        options = []
        for tool in tools:
            required = tool.parameters.get("required", ())
            parts = []
            for name in listed_properties(tool.parameters):
                schema = {
                    **definitions(tool.parameters),
                    **property_schema(tool.parameters, name),
                }
                value = lark.sequence(lark.text(f"{name}="), lark.json(schema))
                parts.append((lark.rule(value), name in required))
            arguments = lark.list_of(parts, ", ")
            options.append(lark.sequence(lark.text(f"{tool.name}("), arguments, lark.text(")")))
        call = lark.any_of(options)
        more = f"({lark.text(', ')} {call})*" if is_parallel else ""
        return lark.sequence(lark.text("["), call, more, lark.text("]"))


def _skip_name(reader: TextReader) -> Steps[None]:
    """Read the name of a function.

    Raises:
        MalformedCallError: There is none.
        TruncatedCallError: The text has ended.
    """
    begin = reader.pos
    while True:
        character = yield from reader.peek()
        if not (character.isalnum() or character in "_."):
            break
        reader.pos += 1
    if reader.pos == begin:
        raise MalformedCallError


def _brackets(reader: TextReader) -> Steps[str]:
    """Read a text in brackets, in which brackets in strings do not count.

    Raises:
        TruncatedCallError: The text ends before the last bracket.
    """
    begin = at = reader.pos
    depth, quote = 0, ""
    while True:
        found = (_INSIDE[quote] if quote else _OUTSIDE).search(reader.text, at)
        if found is None:
            at = len(reader.text)
            yield from reader.more()
            continue
        at = found.end()
        if found[0] == "\\":
            while at == len(reader.text):
                yield from reader.more()
            at += 1
        elif found[0] in "\"'":
            quote = "" if quote else found[0]
        else:
            depth += 1 if found[0] in "([{" else -1
            if depth == 0:
                reader.pos = at
                return reader.text[begin:at]


def _calls(text: str, context: OutputContext) -> list[_Call]:
    """Return the calls of a Python list.

    Raises:
        MalformedCallError: It holds something else, or a function that is not offered.
    """
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            raise MalformedCallError
        return [_call(element, context) for element in tree.elts]
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedCallError from error


def _call(element: ast.expr, context: OutputContext) -> _Call:
    if not isinstance(element, ast.Call) or element.args:
        raise MalformedCallError
    name = ast.unparse(element.func)
    if name not in context.tools:
        raise MalformedCallError
    arguments = {}
    for argument in element.keywords:
        if argument.arg is None:
            raise MalformedCallError
        arguments[argument.arg] = _value(argument.value)
    return _Call(name, arguments)


def _value(node: ast.expr) -> object:
    """Return the value of a literal of Python or JSON; raises ValueError for others."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise MalformedCallError
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is None or isinstance(value, str | int | float):
        return value
    raise MalformedCallError
