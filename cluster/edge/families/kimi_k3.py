"""Kimi K3: elements for reasoning, response and calls (XTML)."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

from cluster.edge.families.formats import ReasoningTexts, WholeFormat, try_calls
from cluster.edge.families.message import ArgumentsWriter, MessageSink
from cluster.edge.families.parameters import (
    is_text,
    json_of,
    kinds,
    parameter_list,
    property_schema,
)
from cluster.edge.families.reader import Markers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import Tool
    from cluster.edge.families.reader import Steps, TextReader

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_THINK, _THINK_END = f"{_OPEN}think{_SEPARATOR}", f"{_CLOSE}think{_SEPARATOR}"
_RESPONSE, _RESPONSE_END = f"{_OPEN}response{_SEPARATOR}", f"{_CLOSE}response{_SEPARATOR}"
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEPARATOR}", f"{_CLOSE}tools{_SEPARATOR}"
_ENDS_OF_MESSAGE = (f"{_CLOSE}message{_SEPARATOR}", "<|end_of_msg|>")
_CALL_END = f"{_CLOSE}call{_SEPARATOR}"
_ARGUMENT_END = f"{_CLOSE}argument{_SEPARATOR}"
_END_OF_VALUE = re.compile(
    rf"{re.escape(_ARGUMENT_END)}(?={re.escape(_OPEN)}argument|{re.escape(_CLOSE)}call)"
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_REASONING_ENDS = Markers((_THINK_END, _RESPONSE))
_CONTENT_ENDS = Markers((_RESPONSE_END,))
_ELEMENTS = Markers((_THINK, _RESPONSE, _TOOLS, *_ENDS_OF_MESSAGE))


class KimiK3(WholeFormat):
    """Elements `think`, `response` and `tools`."""

    is_section = True
    keeps_space = True

    def read(self, reader: TextReader, sink: MessageSink, context: OutputContext) -> Steps[None]:
        """Read elements; text outside of them is content."""
        found: str | None = None
        for start in (_THINK, _RESPONSE):
            if context.prompt_end.endswith(start):
                found = start
        while True:
            if found == _THINK:
                end = yield from reader.copy_until(_REASONING_ENDS, sink.reasoning)
                if end is None:
                    return
                sink.end_reasoning()
                found = _RESPONSE if end == _RESPONSE else ""
            elif found == _RESPONSE:
                yield from reader.copy_until(_CONTENT_ENDS, sink.content)
                found = ""
            elif found == _TOOLS:
                yield from try_calls(self, _TOOLS, reader, sink, context)
                found = ""
            else:
                found = yield from reader.copy_until(_ELEMENTS, sink.content)
                if found is None:
                    return

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the rest of the element of the calls."""
        del start
        sink = sink if context.tools else MessageSink(str)  # Others' calls are read, but not given.
        while True:
            yield from reader.skip_space()
            if (yield from reader.starts(_TOOLS_END)):
                return
            reader.call_begin = reader.pos
            yield from reader.expect(f"{_OPEN}call ")
            name = (yield from _attributes(reader)).get("tool", "")
            writer = ArgumentsWriter(sink, name)
            while not (yield from reader.starts(_CALL_END)):
                yield from reader.expect(f"{_OPEN}argument ")
                attributes = yield from _attributes(reader)
                key, is_string = attributes.get("key", ""), attributes.get("type") == "string"
                writer.begin_argument(key)
                read = reader.until if is_string else reader.value_until
                text = yield from read(_END_OF_VALUE, 2 * len(_ARGUMENT_END))
                writer.end_argument(key, text if is_string else json_of(text))
            writer.end_call()

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the element of the calls."""
        index = lark.terminal("/[0-9]{1,2}/")
        options = []
        for tool in tools:
            parameters = tool.parameters

            def make(name: str, value: str, parameters: object = parameters) -> str:
                assert isinstance(parameters, dict)
                schema = property_schema(parameters, name)
                kind = "string" if is_text(schema) else min(kinds(schema) - {"string"})
                key = html.escape(name)
                begin = f'{_OPEN}argument key="{key}" type="{kind}"{_SEPARATOR}'
                return lark.sequence(lark.text(begin), value)

            options.append(
                lark.sequence(
                    lark.text(f'{_OPEN}call tool="{tool.name}" index="'),
                    index,
                    lark.text(f'"{_SEPARATOR}'),
                    parameter_list(lark, tool, make, _ARGUMENT_END),
                    lark.text(_CALL_END),
                )
            )
        call = lark.any_of(options)
        return lark.sequence(
            lark.text(_TOOLS), call, f"{call}*" if is_parallel else "", lark.text(_TOOLS_END)
        )

    def shortened(self, prompt_end: str) -> str:
        """Return the element that the prompt has begun."""
        return next((start for start in (_THINK, _RESPONSE) if prompt_end.endswith(start)), "")

    def reasoning_texts(self, prompt_end: str) -> ReasoningTexts | None:
        """Return the marks of the element, unless the prompt has begun the response."""
        if prompt_end.endswith(_RESPONSE):
            return None
        return ReasoningTexts(_THINK, _THINK_END, prompt_end.endswith(_THINK))

    def message(self, lark: Lark, calls: str, prompt_end: str, *, is_required: bool) -> str:
        """Return reasoning, a response and calls."""
        response = lark.text(_RESPONSE_END) if is_required else lark.until(_RESPONSE_END)
        before = _before_response(lark, prompt_end)
        return lark.sequence(before, response, calls if is_required else lark.optional(calls))

    def answer(self, lark: Lark, content: str, prompt_end: str) -> str:
        """Return reasoning, which may be missing, and a response."""
        return lark.sequence(_before_response(lark, prompt_end), content, lark.text(_RESPONSE_END))


def _before_response(lark: Lark, prompt_end: str) -> str:
    """Return an expression for what precedes the text of the response."""
    if prompt_end.endswith(_RESPONSE):
        return ""
    think, start = lark.until(_THINK_END, (_RESPONSE,)), lark.text(_RESPONSE)
    if prompt_end.endswith(_THINK):
        return lark.sequence(think, start)
    return lark.sequence(lark.optional(lark.sequence(lark.text(_THINK), think)), start)


def _attributes(reader: TextReader) -> Steps[dict[str, str]]:
    """Read the rest of an opening mark; return its attributes."""
    text = yield from reader.until(_SEPARATOR)
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)}
