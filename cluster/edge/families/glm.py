"""GLM 4.5 to 5: a `<tool_call>` with the function's name, and pairs of keys and values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cluster.edge.families.errors import TruncatedCallError
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
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_END_OF_VALUE = re.compile(rf"{_VALUE_END}(?=\s{{0,16}}(?:{_KEY}|{_CALL_END}))")
_END_OF_NAME = re.compile(rf"(?={_KEY}|{_CALL_END}|\n)")
_LONGEST = 48


class Glm(ToolFormat):
    """Calls of GLM.

    Args:
        line_break: Text between elements: a line break up to GLM 4.6, nothing since.
    """

    starts: tuple[str, ...] = (_CALL,)

    def __init__(self, line_break: str) -> None:
        self._line_break = line_break

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read one call."""
        del start
        name = (yield from reader.until(_END_OF_NAME, _LONGEST)).strip()
        parameters = context.parameters(name)
        writer = ArgumentsWriter(sink, name)
        while True:
            yield from reader.skip_space()
            if (yield from reader.starts(_CALL_END)):
                break
            yield from reader.expect(_KEY)
            key = yield from reader.until(_KEY_END)
            yield from reader.skip_space()
            yield from reader.expect(_VALUE)
            writer.begin_argument(key)
            schema = property_schema(parameters, key)
            text, is_closed = yield from _value(reader, is_text=is_text(schema))
            writer.end_argument(key, value_of(text, schema))
            if not is_closed:
                break
        writer.end_call()

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the name, the pairs and the call's end."""
        del is_parallel
        line = self._line_break
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f"{tool.name}{line}"),
                    parameter_list(
                        lark,
                        tool,
                        lambda name, value: (
                            f"{lark.text(f'{_KEY}{name}{_KEY_END}{line}{_VALUE}')} {value}"
                        ),
                        f"{_VALUE_END}{line}",
                        (_VALUE_END,),
                    ),
                    lark.text(_CALL_END),
                )
                for tool in tools
            ]
        )


def _value(reader: TextReader, *, is_text: bool) -> Steps[tuple[str, bool]]:
    """Read a value; return whether its end was there. Else the call's end is that of the text."""
    begin = reader.pos
    try:
        read = reader.until if is_text else reader.value_until
        return (yield from read(_END_OF_VALUE, _LONGEST)), True
    except TruncatedCallError:
        text = reader.text[begin:].rstrip()
        if not text.endswith(_CALL_END):
            raise
        reader.pos = len(reader.text)
        return text.removesuffix(_CALL_END), False
