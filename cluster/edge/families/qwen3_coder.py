"""Qwen 3 Coder and Qwen 3.5: elements for the function and each of its parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.message import ArgumentsWriter
from cluster.edge.families.parameters import is_text, parameter_list, property_schema, value_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SPACES = r"\s{0,16}"
_ENDS = re.compile(
    rf"\n?{_PARAMETER_END}(?={_SPACES}(?:{_PARAMETER}|{_FUNCTION_END}))"
    rf"|\n(?={_FUNCTION_END}{_SPACES}{_CALL_END})"
    rf"|\n(?={_PARAMETER}(?P<next>[^>\n]{{1,127}})>)"
)
"""What ends a value: its element's end, or an element that cannot be in it."""
_NOT_IN_VALUE = (_PARAMETER_END, f"\n{_FUNCTION_END}", f"\n{_PARAMETER}")
"""Texts that may end a value for the parser; a constrained string has none of them."""
_LONGEST = 256


class Qwen3Coder(ToolFormat):
    """`<function=…>` with a `<parameter=…>` for each argument, mostly in a `<tool_call>`."""

    starts: tuple[str, ...] = (_CALL, _FUNCTION)
    separator = "\n"

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read one function; the elements around it and the ends of parameters may be missing."""
        if start == _CALL:
            yield from reader.skip_space()
            yield from reader.expect(_FUNCTION)
        name = (yield from reader.until(">")).strip()
        parameters = context.parameters(name)
        properties = parameters.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        writer = ArgumentsWriter(sink, name)

        def is_end(found: re.Match[str]) -> bool:
            other = found["next"]
            return other is None or (other in properties and other not in writer.keys)

        while True:
            yield from reader.skip_space()
            if (yield from reader.starts(_FUNCTION_END)):
                break
            yield from reader.expect(_PARAMETER)
            key = (yield from reader.until(">")).strip()
            yield from reader.starts("\n")
            writer.begin_argument(key)  # An element of this name does not end its own value.
            schema = property_schema(parameters, key)
            read = reader.until if is_text(schema) else reader.value_until
            text = yield from read(_ENDS, _LONGEST, is_end)
            writer.end_argument(key, value_of(text, schema))
        writer.end_call()
        end_of_call = reader.pos
        yield from reader.skip_space()
        if not (yield from reader.starts(_CALL_END)):
            reader.pos = end_of_call

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the function and the call's end."""
        del is_parallel
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f"\n{_FUNCTION}{tool.name}>\n"),
                    parameter_list(
                        lark,
                        tool,
                        lambda name, value: lark.sequence(
                            lark.text(f"{_PARAMETER}{name}>\n"), value
                        ),
                        f"\n{_PARAMETER_END}\n",
                        _NOT_IN_VALUE,
                    ),
                    lark.text(f"{_FUNCTION_END}\n{_CALL_END}"),
                )
                for tool in tools
            ]
        )
