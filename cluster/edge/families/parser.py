"""The parser of one choice's output: text in, parts of a message out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.families.formats import OutputContext, read_message
from cluster.edge.families.message import MAX_CALLS, Message, MessageSink, new_call_id
from cluster.edge.families.reader import TextReader

if TYPE_CHECKING:
    from cluster.edge.families.formats import ReasoningFormat, ToolFormat
    from cluster.edge.families.message import MessageDelta


class OutputParser:
    """Incremental parser: any division of a text gives the same message.

    Where the arguments of a call are JSON in the output they are given as they come, else one by
    one or all together. Their last brace comes when the whole call has been read, so that a call
    which is cut, or turns out to be none, never has arguments that can be decoded.

    Args:
        tools: Format of tool calls; None reads none.
        reasoning: Format of reasoning; None reads none.
        context: What is known about the request.
        max_calls: Most calls; further ones are dropped.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        context: OutputContext,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._reader = TextReader()
        keeps_space = tools is not None and tools.keeps_space
        make_id = new_call_id if tools is None else tools.new_call_id
        self._sink = MessageSink(make_id, keeps_space=keeps_space, max_calls=max_calls)
        self._steps = read_message(tools, reasoning, self._reader, self._sink, context)
        self._is_done = False

    @property
    def has_calls(self) -> bool:
        """Return whether the message has complete calls."""
        return self._sink.num_calls > 0

    def hold_calls(self) -> None:
        """Give nothing of a call before its end, and of one that is cut or malformed nothing."""
        self._sink.holds_calls = True

    def feed(self, text: str) -> MessageDelta:
        """Add output; return what it completes."""
        self._reader.text += text
        self._resume()
        return self._sink.drain()

    def finish(self, *, is_cut: bool = False) -> MessageDelta:
        """End the output; return the rest of the message.

        Args:
            is_cut: Whether the model did not stop by itself. A call without an end is dropped then;
                else it is content.
        """
        self._reader.is_ended, self._reader.is_cut = True, is_cut
        self._resume()
        return self._sink.drain(is_last=True)

    def read(self, text: str, *, is_cut: bool = False) -> Message:
        """Return the message of a whole output; see `finish`.

        Nothing of a call that is cut or malformed is in it.
        """
        self.hold_calls()
        delta = self.feed(text)
        delta.extend(self.finish(is_cut=is_cut))
        return Message.of(delta)

    def _resume(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, "done") == "done"
