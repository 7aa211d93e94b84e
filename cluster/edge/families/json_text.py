"""JSON in the output of a model: whole values, and values of which the end is not there yet."""

from __future__ import annotations

import enum
import json
import math
import re
from typing import Any, NoReturn

from cluster.edge.families.errors import MalformedCallError

MAX_DEPTH = 512
"""Objects and arrays within each other; decoders in clients do not go much deeper."""
_MAX_SCALAR_CHARS = 4096
_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(
    r'[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*',
)
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_CLOSING = {"{": "}", "[": "]"}


class _Expected(enum.Enum):
    VALUE = enum.auto()
    ITEM_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    REST_OF_KEY = enum.auto()
    REST_OF_STRING = enum.auto()


class JsonScanner:
    """Reader of one JSON value whose text comes in parts.

    Numbers and words are read once the character behind them is there, strings as they come.

    Attributes:
        is_done: Whether the value has been read, whole.
        is_malformed: Whether no JSON value begins with the text.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_malformed = False
        self._expected = _Expected.VALUE
        self._closing: list[str] = []

    def scan(self, text: str, at: int) -> int:
        """Read as much of a text as is certain.

        Args:
            text: The text, of which the part before `at` has been read.
            at: The position behind it.

        Returns:
            The position behind all that has been read now.
        """
        while not self.is_done and not self.is_malformed:
            if self._expected in (_Expected.REST_OF_KEY, _Expected.REST_OF_STRING):
                next_at = self._string(text, at)
                if self._expected in (_Expected.REST_OF_KEY, _Expected.REST_OF_STRING):
                    return next_at
            else:
                found = _SPACE.match(text, at)
                assert found is not None
                at = found.end()
                if at == len(text):
                    return at
                next_at = self._token(text, at)
                if next_at == at:
                    return at
            at = next_at
        return at

    def _string(self, text: str, at: int) -> int:
        """Read the rest of a string, as far as it is there."""
        found = _IN_STRING.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text) or _PART_OF_ESCAPE.match(text, at):
            return at
        if text[at] != '"':
            self.is_malformed = True
            return at
        if self._expected is _Expected.REST_OF_KEY:
            self._expected = _Expected.COLON
        else:
            self._end_value()
        return at + 1

    def _token(self, text: str, at: int) -> int:
        """Read a mark, or a number or word; return `at` if there is none, or not all of it."""
        mark, expected = text[at], self._expected
        is_value = expected in (_Expected.VALUE, _Expected.ITEM_OR_END)
        if is_value and mark in _CLOSING and len(self._closing) < MAX_DEPTH:
            self._closing.append(_CLOSING[mark])
            is_object = mark == "{"
            self._expected = _Expected.KEY_OR_END if is_object else _Expected.ITEM_OR_END
        elif is_value and mark == '"':
            self._expected = _Expected.REST_OF_STRING
        elif expected in (_Expected.KEY, _Expected.KEY_OR_END) and mark == '"':
            self._expected = _Expected.REST_OF_KEY
        elif expected is _Expected.COLON and mark == ":":
            self._expected = _Expected.VALUE
        elif expected is _Expected.COMMA_OR_END and mark == ",":
            is_object = self._closing[-1] == "}"
            self._expected = _Expected.KEY if is_object else _Expected.VALUE
        elif self._can_end() and mark == self._closing[-1]:
            self._closing.pop()
            self._end_value()
        elif is_value:
            return self._scalar(text, at)
        else:
            self.is_malformed = True
            return at
        return at + 1

    def _can_end(self) -> bool:
        return self._expected in (
            _Expected.KEY_OR_END,
            _Expected.ITEM_OR_END,
            _Expected.COMMA_OR_END,
        )

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        assert found is not None
        end, is_long = found.end(), len(found[0]) > _MAX_SCALAR_CHARS
        if end == len(text) and end > at and not is_long:
            return at
        try:
            if is_long:
                raise MalformedCallError
            loads(found[0])
        except MalformedCallError:
            self.is_malformed = True
            return at
        self._end_value()
        return end

    def _end_value(self) -> None:
        self._expected = _Expected.COMMA_OR_END
        self.is_done = not self._closing


def loads(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Decode standard JSON.

    Raises:
        MalformedCallError: The text is none, or has a number that no double holds.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error


def dumps(value: object) -> str:
    """Encode a value as JSON. Lone surrogates, which escapes may stand for, are escaped.

    Raises:
        MalformedCallError: It is no JSON value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCallError from error
    return text if is_encodable(text) else json.dumps(value)


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON.

    Raises:
        MalformedCallError: They are no JSON object.
    """
    if not isinstance(arguments, dict):
        raise MalformedCallError
    return dumps(arguments)


def is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number
