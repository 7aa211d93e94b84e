"""Reader of one choice's message: deltas of output in, parts of the message out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.families.message import ContentPiece, MessageDelta, ReasoningPiece
from cluster.errors import InternalError, NotReadyError
from replicas.reasoning import ReasoningReader

if TYPE_CHECKING:
    from cluster.edge.openai import ResponseSpec
    from replicas.output_processor import OutputDelta

NO_END = "the generation ended without a finish reason"


class MessageReader:
    """Reader of one choice's message, with the request's parser, or all text as content.

    Args:
        spec: Options of the answer.
        holds_calls: Whether a call is given only once it is complete, and one that is cut or
            malformed never, because the answer cannot mark it as such.
    """

    def __init__(self, spec: ResponseSpec, *, holds_calls: bool) -> None:
        self._parser = None if spec.new_parser is None else spec.new_parser()
        if self._parser is not None and holds_calls:
            self._parser.hold_calls()
        self._has_reasoning = spec.include_reasoning
        marks = spec.reasoning_marks
        self._tokens = None if marks is None else ReasoningReader(marks)
        self._num_tokens = self._num_chars = self._num_reasoning_chars = 0
        self._has_answered = False

    @property
    def has_calls(self) -> bool:
        """Return whether the message has calls so far."""
        return self._parser is not None and self._parser.has_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the tokens of the reasoning so far, however the output was divided into deltas.

        They are counted by the tokens around them, as `thinking_token_budget` counts them. Where
        these are not known, or the message has its reasoning elsewhere, such as before a call that
        ends it, the reasoning has the share of the tokens that it has of the text.
        """
        if self._tokens is not None:
            is_found = self._tokens.num_tokens > 0 or not self.has_reasoned
            if is_found and not (self._tokens.is_open and self._has_answered):
                return self._tokens.num_tokens
        if not self.has_reasoned:
            return 0
        return max(round(self._num_tokens * self._num_reasoning_chars / self._num_chars), 1)

    @property
    def has_reasoned(self) -> bool:
        """Return whether there was reasoning so far."""
        return self._num_reasoning_chars > 0

    def read(self, delta: OutputDelta) -> MessageDelta:
        """Return what a delta adds to the message; a delta with a finish reason is the last."""
        if self._parser is None:
            return MessageDelta([ContentPiece(delta.text)] if delta.text else [])
        if self._tokens is not None:
            self._tokens.read(delta.token_ids)
        self._num_tokens += len(delta.token_ids)
        self._num_chars += len(delta.text)
        part = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            # If the model did not stop by itself, a call may have no end.
            part.extend(self._parser.finish(is_cut=delta.finish_reason != "stop"))
        for piece in part.pieces:
            if isinstance(piece, ReasoningPiece):
                self._num_reasoning_chars += len(piece.text)
            else:
                self._has_answered = True
        return part if self._has_reasoning else part.without_reasoning()


def check_end(finish_reason: str | None) -> None:
    """Check that an answer is whole, or was cut by a limit, for APIs that name no other end.

    Raises:
        InternalError: The generation has not finished.
        NotReadyError: It was aborted.
    """
    if finish_reason is None:
        raise InternalError(NO_END)
    if finish_reason not in {"stop", "length"}:
        raise NotReadyError("the generation was aborted by an operator; send the request again")
