"""The parts of an assistant's message, and the sink that collects them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.edge.families.reader import NotACallError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CALLS = 1024
"""Most calls of one message; further ones are dropped."""
_INDEX = re.compile(r":[0-9]+$")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: The tool's name.
        arguments: A JSON object as text.
        call_id: The id that the model gave the call; "" if its format has none.
    """

    name: str
    arguments: str
    call_id: str = ""


@dataclass(slots=True)
class MessageDelta:
    """What a piece of output adds to a message.

    Attributes:
        content: Text for the user.
        reasoning: Text of the model's reasoning.
        calls: Calls that are complete.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: list[MessageDelta]) -> MessageDelta:
        """Return parts as one; their order by kind is lost."""
        message = cls()
        for part in parts:
            message.extend(part)
        return message

    def extend(self, other: MessageDelta) -> None:
        """Add what comes after."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls


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


class MessageSink:
    """Collector of a message's parts; it drops the white space that belongs to the markup.

    White space at the end of a part is held back until the next part begins. Each collected part
    has one kind: content, reasoning or a call.

    Args:
        keeps_space: Whether white space between content and calls belongs to the content.
        max_calls: Most calls; further ones are dropped.
    """

    def __init__(self, *, keeps_space: bool = False, max_calls: int = MAX_CALLS) -> None:
        self._keeps_space = keeps_space
        self._max_calls = max_calls
        self._parts: list[MessageDelta] = []
        self._space = ""
        self._reasoning_space = ""
        self._is_fresh = True  # no visible content since the beginning or the last markup
        self._has_markup = False
        self._has_reasoning = False
        self._call_ids: set[str] = set()
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Add content."""
        visible = text.rstrip()
        if not visible:
            self._space += text
            return
        before = self._space + visible
        if self._is_fresh and self._has_markup and not self._keeps_space:
            before = before.lstrip()
        self._parts.append(MessageDelta(content=before))
        self._space = text[len(visible) :]
        self._is_fresh = False

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        visible = text.rstrip()
        if not visible:
            self._reasoning_space += text
            return
        self._space = ""
        if not self._has_reasoning:
            visible_part = visible.lstrip()
        else:
            visible_part = self._reasoning_space + visible
        self._parts.append(MessageDelta(reasoning=visible_part))
        self._has_reasoning = True
        self._reasoning_space = text[len(visible) :]

    def end_reasoning(self) -> None:
        """End the reasoning; white space around it is dropped."""
        self._reasoning_space = self._space = ""
        self._has_reasoning = False
        self._has_markup = True

    def call(self, name: object, arguments: str, call_id: str = "") -> None:
        """Add a complete call.

        An id that an earlier call has gets the call's own index, as in Kimi K2's ids, or is dropped
        if it has none: results name calls by their ids.

        Raises:
            NotACallError: The name is no text, or an empty one.
        """
        if not isinstance(name, str) or not name or not _is_encodable(name):
            raise NotACallError
        self._reasoning_space = ""
        if self._keeps_space and not self._is_fresh and self._space:
            self._parts.append(MessageDelta(content=self._space))
        self._space, self._is_fresh, self._has_markup = "", True, True
        if self.num_calls < self._max_calls:
            call = ToolCall(name, arguments, self._unused(call_id))
            self._parts.append(MessageDelta(calls=[call]))
            self.num_calls += 1

    def _unused(self, call_id: str) -> str:
        if call_id in self._call_ids:
            stem, has_index = _INDEX.subn("", call_id)
            indices = range(self.num_calls, self.num_calls + MAX_CALLS + 1)
            free = (each for i in indices if (each := f"{stem}:{i}") not in self._call_ids)
            call_id = next(free) if has_index else ""
        if call_id:
            self._call_ids.add(call_id)
        return call_id

    def take(self, *, is_last: bool = False) -> list[MessageDelta]:
        """Return the parts since the last call; the last one has what was held back."""
        if is_last:
            if self._has_reasoning and self._reasoning_space:
                self._parts.append(MessageDelta(reasoning=self._reasoning_space))
            if self._space and not (self._is_fresh and self._has_markup):
                self._parts.append(MessageDelta(content=self._space))
        parts, self._parts = self._parts, []
        return parts


def give_call(sink: MessageSink, call: Any, call_id: str = "") -> None:  # noqa: ANN401 - any JSON value
    """Give a call in the form of an object to a sink.

    Raises:
        NotACallError: The object has no name, or its arguments are none.
    """
    if not isinstance(call, dict) or "name" not in call:
        raise NotACallError
    arguments = call.get("arguments", call.get("parameters", {}))
    sink.call(call["name"], arguments_text(arguments), call_id)


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON.

    Raises:
        NotACallError: They are no JSON object.
    """
    if not isinstance(arguments, dict):
        raise NotACallError
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotACallError from error
    return text if _is_encodable(text) else json.dumps(arguments)


def loads(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Decode standard JSON.

    Raises:
        NotACallError: The text is none, or has a number that no double holds.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates, which escapes in JSON may stand for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
