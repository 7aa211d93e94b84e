"""The parts of an assistant's message, and the sink that collects them."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from cluster.edge.families.errors import MalformedCallError
from cluster.edge.families.json_text import dumps, is_encodable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_CALLS = 1024
"""Most calls of one message; further ones are dropped."""
_INDEX = re.compile(r":[0-9]+$")


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Text for the user, which follows the content so far."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the model's reasoning, which follows the reasoning so far."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call of a tool; until its end nothing but its arguments follows.

    Attributes:
        index: Its place among the calls of the message.
        name: The tool's name.
        call_id: Its id: the model's, or a new one.
    """

    index: int
    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """Text of a call's arguments, which follows the text so far.

    Attributes:
        index: The call's place among the calls of the message.
        text: A part of a JSON object.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call.

    Attributes:
        index: The call's place among the calls of the message.
        is_complete: Whether its arguments are a whole JSON object, which bodies of later requests
            may hold. If not, the output was cut, or turned out to be no call, and the arguments so
            far are the beginning of an object.
    """

    index: int
    is_complete: bool = True


Piece: TypeAlias = ContentPiece | ReasoningPiece | CallStart | ArgumentsPiece | CallEnd


@dataclass(slots=True)
class MessageDelta:
    """What a part of the output adds to a message.

    Attributes:
        pieces: In the order of the output. Texts of one kind do not follow each other.
    """

    pieces: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Add a piece; text continues a piece of the same kind."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(piece, ContentPiece) and isinstance(last, ContentPiece):
            piece = ContentPiece(last.text + piece.text)
        elif isinstance(piece, ReasoningPiece) and isinstance(last, ReasoningPiece):
            piece = ReasoningPiece(last.text + piece.text)
        elif isinstance(piece, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            piece = ArgumentsPiece(piece.index, last.text + piece.text)
        else:
            self.pieces.append(piece)
            return
        self.pieces[-1] = piece

    def extend(self, other: MessageDelta) -> None:
        """Add what comes after."""
        for piece in other.pieces:
            self.add(piece)

    def without_reasoning(self) -> MessageDelta:
        """Return the other pieces."""
        kept = MessageDelta()
        for piece in self.pieces:
            if not isinstance(piece, ReasoningPiece):
                kept.add(piece)
        return kept


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: The tool's name.
        arguments: A JSON object as text.
        call_id: Its id: the model's, or a new one.
        is_complete: See `CallEnd`; true in the message of a whole output.
    """

    name: str
    arguments: str
    call_id: str = ""
    is_complete: bool = True


@dataclass(slots=True)
class Message:
    """A whole message.

    Attributes:
        content: Text for the user.
        reasoning: Text of the model's reasoning.
        calls: Calls of tools.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, delta: MessageDelta) -> Message:
        """Return the message of all its pieces."""
        message = cls()
        for piece in delta.pieces:
            if isinstance(piece, ContentPiece):
                message.content += piece.text
            elif isinstance(piece, ReasoningPiece):
                message.reasoning += piece.text
            elif isinstance(piece, CallStart):
                message.calls.append(ToolCall(piece.name, "", piece.call_id, is_complete=False))
            else:
                call = message.calls[piece.index]
                if isinstance(piece, ArgumentsPiece):
                    call = replace(call, arguments=call.arguments + piece.text)
                else:
                    call = replace(call, is_complete=piece.is_complete)
                message.calls[piece.index] = call
        return message


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a request offers.

    Attributes:
        name: Its name.
        parameters: JSON schema of its arguments.
        is_strict: Whether calls must follow the schema even if no call is required.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(slots=True)
class _OpenCall:
    """A call without its end; its index is there once its start was given.

    `before` has the state of the text before it, which continues if it turns out to be no call.
    """

    name: str
    call_id: str
    index: int | None = None
    arguments: list[str] = field(default_factory=list)
    before: tuple[str, str, bool, bool] | None = None


class MessageSink:
    """Collector of a message's parts; it drops the white space that belongs to the markup.

    White space at the end of a part is held back until the next part begins.

    Args:
        new_call_id: Makes the id of a call that has none.
        keeps_space: Whether white space between content and calls belongs to the content.
        max_calls: Most calls; further ones are dropped.

    Attributes:
        holds_calls: Whether nothing of a call is given before its end.
        num_calls: Number of complete calls.
        num_given: Number of calls of which at least the start was given.
    """

    def __init__(
        self,
        new_call_id: Callable[[], str],
        *,
        keeps_space: bool = False,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._new_call_id = new_call_id
        self._keeps_space = keeps_space
        self._max_calls = max_calls
        self._delta = MessageDelta()
        self._space = ""
        self._reasoning_space = ""
        self._is_fresh = True  # no visible content since the beginning or the last markup
        self._has_markup = False
        self._has_reasoning = False
        self._call_ids: set[str] = set()
        self._open: _OpenCall | None = None
        self.holds_calls = False
        self.num_calls = 0
        self.num_given = 0

    def content(self, text: str) -> None:
        """Add content."""
        visible = text.rstrip()
        if not visible:
            self._space += text
            return
        before = self._space + visible
        if self._is_fresh and self._has_markup and not self._keeps_space:
            before = before.lstrip()
        self._delta.add(ContentPiece(before))
        self._space = text[len(visible) :]
        self._is_fresh = False

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        visible = text.rstrip()
        if not visible:
            self._reasoning_space += text
            return
        self._space = ""
        before = self._reasoning_space + visible if self._has_reasoning else visible.lstrip()
        self._delta.add(ReasoningPiece(before))
        self._has_reasoning = True
        self._reasoning_space = text[len(visible) :]

    def end_reasoning(self) -> None:
        """End the reasoning; white space around it is dropped."""
        self._reasoning_space = self._space = ""
        self._has_reasoning = False
        self._has_markup = True

    def call(self, name: object, arguments: str, call_id: str = "") -> None:
        """Add a complete call; see `begin_call`.

        Args:
            name: The tool's name.
            arguments: A JSON object as text.
            call_id: The model's id; "" if its format has none.
        """
        self.begin_call(name, call_id)
        self.add_arguments(arguments.removesuffix("}"))
        self.end_call()

    def begin_call(self, name: object, call_id: str = "") -> None:
        """Begin a call; only its arguments may follow until its end.

        An id that an earlier call has gets the call's own index, as in Kimi K2's ids, or a new one
        replaces it if it has none: results name calls by their ids.

        Raises:
            MalformedCallError: The name is no text, or an empty one.
        """
        if not isinstance(name, str) or not name or not is_encodable(name):
            raise MalformedCallError
        self._open = _OpenCall(name, call_id)
        if not self.holds_calls:
            self._give_call(self._open)

    def add_arguments(self, text: str) -> None:
        """Add a part of the open call's arguments, a JSON object without its last brace."""
        assert self._open is not None
        self._open.arguments.append(text)
        if self._open.index is not None:
            self._delta.add(ArgumentsPiece(self._open.index, text))

    def end_call(self) -> None:
        """End the open call and its arguments, of which the last brace is missing.

        Raises:
            MalformedCallError: The decoder of bodies refuses the arguments, as for half of a
                surrogate pair. The client could not send the call back. The call stays open.
        """
        call = self._open
        assert call is not None
        arguments = "".join([*call.arguments, "}"])
        try:
            orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise MalformedCallError from error
        self._open = None
        if self.holds_calls:
            self._give_call(call)
        if call.index is not None:
            self._delta.add(ArgumentsPiece(call.index, arguments if self.holds_calls else "}"))
            self._delta.add(CallEnd(call.index))
            self.num_calls += 1

    def abandon_call(self, *, is_cut: bool) -> bool:
        """End the open call, if there is one, because it is cut or malformed.

        The whole text of a malformed call may follow: it continues the text before the call.

        Args:
            is_cut: Whether a limit of the output cuts it.

        Returns:
            Whether there was one.
        """
        call, self._open = self._open, None
        if call is None:
            return False
        if call.index is not None:
            self._delta.add(CallEnd(call.index, is_complete=False))
        elif is_cut:
            self._end_text()
        if call.before is not None and not is_cut:
            self._space, self._reasoning_space, self._is_fresh, self._has_markup = call.before
        return True

    def _give_call(self, call: _OpenCall) -> None:
        """Give the start of a call, unless there are too many."""
        is_visible = self._keeps_space and not self._is_fresh
        space = "" if is_visible else self._space
        call.before = (space, self._reasoning_space, self._is_fresh, self._has_markup)
        self._end_text()
        if self.num_given < self._max_calls:
            call.index = self.num_given
            call_id = self._unused(call.call_id) or self._new_call_id()
            self._delta.add(CallStart(call.index, call.name, call_id))
            self.num_given += 1

    def _end_text(self) -> None:
        """End the text before a call."""
        self._reasoning_space = ""
        if self._keeps_space and not self._is_fresh and self._space:
            self._delta.add(ContentPiece(self._space))
        self._space, self._is_fresh, self._has_markup = "", True, True

    def _unused(self, call_id: str) -> str:
        """Return the id of the next call; "" if an earlier one has it."""
        if call_id in self._call_ids:
            stem, has_index = _INDEX.subn("", call_id)
            indices = range(self.num_given, self.num_given + MAX_CALLS + 1)
            free = (each for i in indices if (each := f"{stem}:{i}") not in self._call_ids)
            call_id = next(free) if has_index else ""
        if call_id:
            self._call_ids.add(call_id)
        return call_id

    def drain(self, *, is_last: bool = False) -> MessageDelta:
        """Return what was added since the last call; the last one has what was held back."""
        if is_last:
            if self._has_reasoning and self._reasoning_space:
                self._delta.add(ReasoningPiece(self._reasoning_space))
            if not (self._is_fresh and self._has_markup) and self._space:
                self._delta.add(ContentPiece(self._space))
        delta, self._delta = self._delta, MessageDelta()
        return delta


class ArgumentsWriter:
    """Writer of a call whose format gives its arguments one by one, each once it is whole.

    Args:
        sink: Gets the call.
        name: The tool's name.

    Attributes:
        keys: Names of the arguments so far.
    """

    def __init__(self, sink: MessageSink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._is_begun = False
        self._written: set[str] = set()
        self.keys: set[str] = set()

    def begin_argument(self, key: str) -> None:
        """Begin an argument, of which the name alone is there."""
        self._begin_call()
        self.keys.add(key)

    def end_argument(self, key: str, value: object) -> None:
        """Add the value of an argument; one that repeats another's name is left out."""
        if key in self._written:
            return
        separator = ", " if self._written else ""
        self._written.add(key)
        self._sink.add_arguments(f"{separator}{dumps(key)}: {dumps(value)}")

    def end_call(self) -> None:
        """End the call, which may have no arguments."""
        self._begin_call()
        self._sink.end_call()

    def _begin_call(self) -> None:
        if not self._is_begun:
            self._sink.begin_call(self._name)
            self._sink.add_arguments("{")
            self._is_begun = True


def new_call_id() -> str:
    """Return an id of a call as OpenAI's API has them."""
    return f"call_{uuid.uuid4().hex[:24]}"
