"""GPT-OSS: messages with a channel, of which one may have a tool as its recipient (Harmony).

Source: OpenAI's guide to the format; openai-harmony 0.0.8.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cluster.edge.families.errors import MalformedCallError, TruncatedCallError
from cluster.edge.families.formats import ReasoningTexts, WholeFormat
from cluster.edge.families.json_calls import read_arguments
from cluster.edge.families.reader import Markers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.families.formats import OutputContext
    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_MESSAGE, _END, _CALL, _RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
_HEADS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE)
_END_OF_HEADER = re.compile(r"<\|message\|>|<\|end\|>|<\|call\|>|<\|return\|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAME = re.compile(r"<\|channel\|>\s*(\w*)")
_FUNCTIONS = "functions."
_TEXT_ENDS = Markers((_END, _RETURN))
_CALL_ENDS = Markers((_END, _CALL, _RETURN))


class Harmony(WholeFormat):
    """Reasoning on the channel `analysis`, content on `final` and `commentary`, calls as JSON."""

    is_section = True
    keeps_space = True

    def read(self, reader: TextReader, sink: MessageSink, context: OutputContext) -> Steps[None]:
        """Read messages; text without any structure is content."""
        while True:
            begin = reader.pos
            yield from reader.skip_space()
            if reader.pos == len(reader.text):
                return
            is_header = yield from reader.starts_any((*_HEADS, "to="))
            if is_header is None:
                reader.pos = begin
                yield from reader.copy_until(_TEXT_ENDS, sink.content)
                continue
            if is_header == _MESSAGE:
                reader.pos -= len(_MESSAGE)
            try:
                text = is_header + (yield from reader.until(_END_OF_HEADER, len(_RETURN)))
            except TruncatedCallError:
                if reader.is_cut:
                    raise
                sink.content(reader.text[begin:])
                return
            if reader.text[reader.pos - len(_MESSAGE) : reader.pos] == _MESSAGE:
                yield from self._read_message(text, reader, sink, context)

    def _read_message(
        self, header: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        channels = _NAME.findall(header)
        channel = channels[-1] if channels else "final"
        if recipient is not None and recipient[1].startswith(_FUNCTIONS) and context.tools:
            yield from reader.skip_space()
            name = recipient[1].removeprefix(_FUNCTIONS)
            begin, emit = reader.pos, _drop
            try:
                yield from read_arguments(reader, sink, name)
                sink.end_call()
            except (MalformedCallError, TruncatedCallError) as error:
                is_cut = isinstance(error, TruncatedCallError) and reader.is_cut
                sink.abandon_call(is_cut=is_cut)
                if is_cut:
                    raise
                emit, reader.pos = sink.content, begin
            yield from reader.copy_until(_CALL_ENDS, emit)
        elif recipient is not None:
            yield from reader.copy_until(_CALL_ENDS, _drop)
        elif channel == "analysis":
            yield from reader.copy_until(_TEXT_ENDS, sink.reasoning)
            if not reader.is_ended or reader.pos < len(reader.text):
                sink.end_reasoning()
        elif channel in ("final", "commentary"):
            yield from reader.copy_until(_TEXT_ENDS, sink.content)
        else:
            yield from reader.copy_until(_CALL_ENDS, _drop)

    def rendered_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose reasoning is named as the template of GPT-OSS takes it.

        Source: that template refuses a message with calls that has both content and `thinking`.
        """
        reasoning = message.get("reasoning")
        if not reasoning or not message.get("tool_calls") or message.get("content"):
            return message
        return {**message, "thinking": reasoning}

    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return the message of a call, after which the model stops."""
        del is_parallel
        header = f"{_CHANNEL}commentary {_CONSTRAIN}json{_MESSAGE}"
        return lark.any_of(
            [
                lark.sequence(
                    lark.text(f" to={_FUNCTIONS}{tool.name}{header}"),
                    lark.arguments(tool.parameters),
                )
                for tool in tools
            ]
        )

    def reasoning_texts(self, prompt_end: str) -> ReasoningTexts:
        """Return the marks of a message on the channel `analysis`."""
        del prompt_end
        start = f"{_CHANNEL}analysis{_MESSAGE}"
        return ReasoningTexts(start, _END, is_open=False, may_repeat=True)

    def message(self, lark: Lark, calls: str, prompt_end: str, *, is_required: bool) -> str:
        """Return reasoning and a preamble, which may be missing, then a call or the answer."""
        del prompt_end
        before = [
            lark.optional(
                lark.sequence(
                    lark.text(f"{_CHANNEL}{channel}{_MESSAGE}"),
                    lark.until(_END, (_RETURN,)),
                    lark.text(f"{_START}assistant"),
                )
            )
            for channel in (("analysis",) if is_required else ("analysis", "commentary"))
        ]
        answer = lark.sequence(
            lark.text(f"{_CHANNEL}final{_MESSAGE}"), lark.free_without((_END, _RETURN))
        )
        last = calls if is_required else lark.any_of([calls, answer])
        return lark.sequence(*before, last)

    def answer(self, lark: Lark, content: str, prompt_end: str) -> str:
        """Return reasoning, which may be missing, and a message on the channel `final`."""
        del prompt_end
        start = lark.text(f"{_START}assistant")
        analysis = lark.text(f"{_CHANNEL}analysis{_MESSAGE}")
        thought = lark.optional(lark.sequence(analysis, lark.until(_END), start))
        return lark.sequence(thought, lark.text(f"{_CHANNEL}final{_MESSAGE}"), content)


def _drop(text: str) -> None:
    """Ignore a text that is neither content nor a call."""
