"""Kimi K2: a section of calls, each with an id that has its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.json_calls import read_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_OR_END = re.compile(rf"(?={re.escape(_CALL)}|{re.escape(_SECTION_END)})")
_INDEX = re.compile(r":[0-9]+$")


class KimiK2(ToolFormat):
    """Calls with ids such as `functions.get_weather:0`, which later turns repeat."""

    starts: tuple[str, ...] = (_SECTION,)
    is_section = True
    keeps_space = True

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the section; text between calls is ignored."""
        del start, context
        while True:
            yield from reader.until(_CALL_OR_END, len(_SECTION_END))
            if (yield from reader.starts(_SECTION_END)):
                return
            reader.call_begin = reader.pos
            yield from reader.expect(_CALL)
            call_id = (yield from reader.until(_ARGUMENTS)).strip()
            yield from reader.skip_space()
            name = _INDEX.sub("", call_id).removeprefix("functions.")
            yield from read_arguments(reader, sink, name, call_id)
            yield from reader.skip_space()
            yield from reader.expect(_CALL_END)
            sink.end_call()

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the section."""
        index = lark.terminal("/[0-9]{1,2}/")
        call = lark.any_of(
            [
                lark.sequence(
                    lark.text(f"{_CALL}functions.{tool.name}:"),
                    index,
                    lark.text(_ARGUMENTS),
                    lark.arguments(tool.parameters),
                    lark.text(_CALL_END),
                )
                for tool in tools
            ]
        )
        return lark.sequence(call, f"{call}*" if is_parallel else "", lark.text(_SECTION_END))
