"""DeepSeek: a section of calls with JSON arguments (V3, R1, V3.1), or elements (V3.2 and later)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.json_calls import read_arguments
from cluster.edge.families.json_text import arguments_text
from cluster.edge.families.message import ArgumentsWriter
from cluster.edge.families.parameters import is_text, json_of, parameter_list, property_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekJson(ToolFormat):
    """A section of calls with their arguments as JSON.

    Args:
        is_fenced: Whether a call has its type before its name, and its arguments in a code block,
            as up to V3 and R1.
    """

    starts: tuple[str, ...] = (_SECTION,)
    is_section = True
    keeps_space = True

    def __init__(self, *, is_fenced: bool) -> None:
        self._is_fenced = is_fenced

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the section."""
        del start, context
        while True:
            yield from reader.skip_space()
            if (yield from reader.starts(_SECTION_END)):
                return
            reader.call_begin = reader.pos
            yield from reader.expect(_CALL)
            name = yield from reader.until(_SEPARATOR)
            if self._is_fenced:
                name = yield from reader.until("\n")
                yield from reader.expect("```json\n")
            yield from read_arguments(reader, sink, name.strip())
            yield from reader.skip_space()
            if self._is_fenced:
                yield from reader.expect("```")
            yield from reader.expect(_CALL_END)
            sink.end_call()

    def rendered_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with arguments as text and without empty content.

        Source: the templates of V3, R1 and V3.1 append arguments to texts, and show the calls of a
        message only if its content is none.
        """
        if not message.get("tool_calls"):
            return message
        calls = [
            {**call, "function": {**function, "arguments": arguments_text(function["arguments"])}}
            for call in message["tool_calls"]
            for function in [call["function"]]
        ]
        return {**message, "tool_calls": calls, "content": message.get("content") or None}

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the section."""
        before = f"{_CALL}function{_SEPARATOR}%s\n```json\n" if self._is_fenced else None
        before = before or f"{_CALL}%s{_SEPARATOR}"
        behind = f"\n```{_CALL_END}" if self._is_fenced else _CALL_END
        call = lark.any_of(
            [
                lark.sequence(
                    lark.text(before % tool.name),
                    lark.arguments(tool.parameters),
                    lark.text(behind),
                )
                for tool in tools
            ]
        )
        separator = lark.text("\n") if self._is_fenced else ""
        more = f"({lark.sequence(separator, call)})*" if is_parallel else ""
        return lark.sequence(call, more, lark.text(_SECTION_END))


class DeepSeekElements(ToolFormat):
    """A section of `invoke` elements with one element for each argument (DSML).

    Args:
        section: Name of the section's element.
        space: Text between the elements' mark and their names.
    """

    is_section = True

    def __init__(self, section: str, space: str = "") -> None:
        mark = f"｜DSML｜{space}"
        self._mark = mark
        self._section_end = f"</｜DSML｜{section}>"
        self.starts = (f"<｜DSML｜{section}>",)
        self._parameter_end = f"</{mark}parameter>"
        next_element = rf"(?:<{mark}parameter|</{mark}invoke>)"
        self._end_of_value = re.compile(rf"{self._parameter_end}(?=\s{{0,16}}{next_element})")

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the section."""
        del start
        while True:
            yield from reader.skip_space()
            if (yield from reader.starts(self._section_end)):
                return
            reader.call_begin = reader.pos
            yield from reader.expect(f'<{self._mark}invoke name="')
            name = yield from reader.until('"')
            is_empty = yield from reader.starts("/>")
            writer = ArgumentsWriter(sink, name)
            if not is_empty:
                yield from reader.expect(">")
            while not is_empty:
                yield from reader.skip_space()
                if (yield from reader.starts(f"</{self._mark}invoke>")):
                    break
                yield from reader.expect(f'<{self._mark}parameter name="')
                key = yield from reader.until('"')
                attributes = yield from reader.until(">")
                writer.begin_argument(key)
                is_string = 'string="true"' in attributes
                if "string=" not in attributes:
                    is_string = is_text(property_schema(context.parameters(name), key))
                read = reader.until if is_string else reader.value_until
                text = yield from read(self._end_of_value, 64)
                writer.end_argument(key, text if is_string else json_of(text))
            writer.end_call()

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the section."""
        options = []
        for tool in tools:
            parameters = tool.parameters

            def make(name: str, value: str, parameters: object = parameters) -> str:
                assert isinstance(parameters, dict)
                is_string = str(is_text(property_schema(parameters, name))).lower()
                begin = f'<{self._mark}parameter name="{name}" string="{is_string}">'
                return lark.sequence(lark.text(begin), value)

            options.append(
                lark.sequence(
                    lark.text(f'<{self._mark}invoke name="{tool.name}">\n'),
                    parameter_list(
                        lark,
                        tool,
                        make,
                        f"{self._parameter_end}\n",
                        (self._parameter_end,),
                    ),
                    lark.text(f"</{self._mark}invoke>\n"),
                )
            )
        call = lark.any_of(options)
        more = f"{call}*" if is_parallel else ""
        return lark.sequence(lark.text("\n"), call, more, lark.text(self._section_end))
