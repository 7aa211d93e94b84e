"""Llama 3.1 to 3.3: the message is a JSON object of name and parameters."""

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

_TAG = "<|python_tag|>"
_KEYS = ("name", "type", "function", "parameters", "arguments")


class Llama3Json(ToolFormat):
    """JSON objects at the message's beginning or behind `<|python_tag|>`, divided by `; `."""

    starts: tuple[str, ...] = (_TAG,)
    leading: tuple[str, ...] = ("{",)
    start: str | None = ""
    separator = "; "
    keeps_space = True
    passes_cut = True

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read objects; other JSON is content as soon as its first key shows that."""
        if start == "{":
            reader.pos -= 1
        while True:
            yield from reader.skip_space()
            reader.call_begin = reader.pos
            yield from read_object_call(reader, sink, names=context.tools, first_keys=_KEYS)
            end = reader.pos
            yield from reader.skip_space()
            if not (yield from reader.starts(";")):
                reader.pos = end
                return

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the object."""
        del is_parallel
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f'{{"name": "{tool.name}", "parameters": '),
                    lark.arguments(tool.parameters),
                    lark.text("}"),
                )
                for tool in tools
            ]
        )
