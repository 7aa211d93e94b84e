"""Mistral: `[TOOL_CALLS]` before a list of JSON objects, or before each name and its arguments."""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import TYPE_CHECKING, Any

from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.formats import ToolFormat
from cluster.edge.families.json_calls import read_arguments
from cluster.edge.families.json_text import arguments_text, loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_END_OF_ID = re.compile(r"(?=\[ARGS\])")
_END_OF_NAME = re.compile(r"(?=\[ARGS\]|\[CALL_ID\]|[{\s])")


class Mistral(ToolFormat):
    """Both formats; a constrained call has the newer one, of tokenizers since version 11."""

    starts: tuple[str, ...] = (_START,)
    keeps_space = True

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read a list, or one call."""
        del start, context
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[":
            for call in loads((yield from reader.json_text())):
                _give_call(sink, call)
            return
        name = yield from reader.until(_END_OF_NAME, len(_ID))
        call_id = ""
        if (yield from reader.starts(_ID)):
            call_id = yield from reader.until(_END_OF_ID, len(_ARGUMENTS))
        yield from reader.starts(_ARGUMENTS)
        yield from reader.skip_space()
        yield from read_arguments(reader, sink, name, call_id)
        sink.end_call()

    def new_call_id(self) -> str:
        """Return nine letters and digits, which the templates of later turns demand."""
        return uuid.uuid4().hex[:9]

    def rendered_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose calls have ids of nine letters and digits.

        Source: the templates of Mistral's models since tokenizer version 3 refuse other ids.
        """
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "id": _short_id(call["id"])} if "id" in call else call
                for call in message["tool_calls"]
            ]
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        return message

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return a name and its arguments."""
        del is_parallel
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f"{tool.name}{_ARGUMENTS}"), lark.arguments(tool.parameters)
                )
                for tool in tools
            ]
        )


def _give_call(sink: MessageSink, call: object) -> None:
    """Give a call of a list to a sink.

    Raises:
        MalformedCallError: It has no name, or its arguments are no object.
    """
    if not isinstance(call, dict) or "name" not in call:
        raise MalformedCallError
    arguments = call.get("arguments", call.get("parameters", {}))
    given = call.get("id")
    is_id = isinstance(given, str) and _SHORT_ID.fullmatch(given) is not None
    sink.call(call["name"], arguments_text(arguments), str(given) if is_id else "")


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits: the given one, or a hash of it."""
    if _SHORT_ID.fullmatch(call_id) is not None:
        return call_id
    return hashlib.blake2b(call_id.encode(errors="backslashreplace"), digest_size=5).hexdigest()[:9]
