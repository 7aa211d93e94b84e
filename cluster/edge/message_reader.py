"""Reader of one choice's message: deltas of output in, parts of the message out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.families.message import ContentPiece, MessageDelta, ReasoningPiece

if TYPE_CHECKING:
    from cluster.edge.openai import ResponseSpec
    from replicas.output_processor import OutputDelta


class MessageReader:
    """Reader of one choice's message, with the request's parser, or all text as content.

    Args:
        spec: Options of the answer.
        holds_calls: Whether a call is given only once it is complete, and one that is cut or
            malformed never, because the answer cannot mark it as such.

    Attributes:
        has_reasoned: Whether there was reasoning so far.
    """

    def __init__(self, spec: ResponseSpec, *, holds_calls: bool) -> None:
        self._parser = None if spec.new_parser is None else spec.new_parser()
        if self._parser is not None and holds_calls:
            self._parser.hold_calls()
        self._has_reasoning = spec.include_reasoning
        self._num_before = 0
        self.has_reasoned = self._has_answered = False

    @property
    def has_calls(self) -> bool:
        """Return whether the message has calls so far."""
        return self._parser is not None and self._parser.has_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the tokens before the answer; 0 if none of them are reasoning."""
        return self._num_before if self.has_reasoned else 0

    def read(self, delta: OutputDelta) -> MessageDelta:
        """Return what a delta adds to the message; a delta with a finish reason is the last."""
        if self._parser is None:
            return MessageDelta([ContentPiece(delta.text)] if delta.text else [])
        part = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            # If the model did not stop by itself, a call may have no end.
            part.extend(self._parser.finish(is_cut=delta.finish_reason != "stop"))
        if not self._has_answered:
            for piece in part.pieces:
                is_reasoning = isinstance(piece, ReasoningPiece)
                self.has_reasoned |= is_reasoning
                self._has_answered |= not is_reasoning
            if not self._has_answered:
                self._num_before += len(delta.token_ids)
        return part if self._has_reasoning else part.without_reasoning()
