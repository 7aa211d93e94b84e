"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: `<tool_call>` around a JSON object of name and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.json_calls import read_object_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """One JSON object in each `<tool_call>` element."""

    starts: tuple[str, ...] = (_BEGIN,)
    separator = "\n"

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the object; the element's end may be missing."""
        del start, context
        yield from reader.skip_space()
        yield from read_object_call(reader, sink)
        end = reader.pos
        yield from reader.skip_space()
        if not (yield from reader.starts(_END)):
            reader.pos = end

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the object and the element's end."""
        del is_parallel
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f'\n{{"name": "{tool.name}", "arguments": '),
                    lark.arguments(tool.parameters),
                    lark.text(f"}}\n{_END}"),
                )
                for tool in tools
            ]
        )
