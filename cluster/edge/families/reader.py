"""Incremental reading of a model's output for parsers that are written as generators.

A parser asks a `TextReader` for what it needs, and yields where it needs more text. It decides only
on text that it has seen whole, so that its result cannot depend on how the text was divided.
"""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from cluster.edge.families.errors import MalformedCallError, TruncatedCallError
from cluster.edge.families.json_text import JsonScanner

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

T = TypeVar("T")
Steps: TypeAlias = "Generator[None, None, T]"
"""A reading step: it yields whenever it needs more text, and returns its result."""

_IN_JSON_STRING = re.compile(r'["\x00-\x1f]|\\.')
_OUTSIDE_JSON_STRING = re.compile(r'["{}\[\]<]')


@functools.lru_cache(maxsize=256)
def _literal(text: str) -> re.Pattern[str]:
    """Return an expression for a text; formats have few, which are searched for often."""
    return re.compile(re.escape(text))


class Markers:
    """Texts to search for; none may be the beginning of another.

    Args:
        texts: The texts, each at least one character long.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._beginnings = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._longest = max(map(len, self.texts), default=1)

    def search(self, text: str, begin: int) -> re.Match[str] | None:
        """Return the first marker in a text from `begin` on."""
        return self._pattern.search(text, begin)

    def num_pending(self, text: str, begin: int) -> int:
        """Return the characters at the end of a text that may be the beginning of a marker."""
        least = max(begin, len(text) - self._longest + 1)
        for at in range(least, len(text)):
            if text[at:] in self._beginnings:
                return len(text) - at
        return 0


class TextReader:
    """The text of an output so far, and how much of it has been read.

    Owner: one parser of one choice.

    Attributes:
        text: The text that is still needed.
        pos: Position in `text` up to which it has been read.
        is_ended: Whether no more text comes.
        is_cut: Whether the text has ended because of a limit, not because the model has stopped.
        call_begin: Position at which the call that is being read begins.
        num_refused_chars: Length of the texts so far that looked like calls but are none.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_ended = False
        self.is_cut = False
        self.call_begin = 0
        self.num_refused_chars = 0

    def wait(self) -> Steps[bool]:
        """Wait for more text; return False if there is none."""
        num_chars = len(self.text)
        while len(self.text) == num_chars:
            if self.is_ended:
                return False
            yield
        return True

    def more(self) -> Steps[None]:
        """Wait for more text.

        Raises:
            TruncatedCallError: There is none.
        """
        if not (yield from self.wait()):
            raise TruncatedCallError

    def copy_until(self, markers: Markers, emit: Callable[[str], None]) -> Steps[str | None]:
        """Emit the text up to the first marker and read the marker; return None without one."""
        if self.pos > len(self.text) // 2:  # At most as much is copied as was read.
            self.text, self.pos = self.text[self.pos :], 0
        while True:
            found = markers.search(self.text, self.pos)
            if found is not None:
                emit(self.text[self.pos : found.start()])
                self.pos = found.end()
                return found[0]
            end = len(self.text) - markers.num_pending(self.text, self.pos)
            emit(self.text[self.pos : end])
            self.text, self.pos = self.text[end:], 0
            if not (yield from self.wait()):
                emit(self.text)
                self.pos = len(self.text)
                return None

    def skip_space(self) -> Steps[None]:
        """Read white space; waits for the character behind it."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos].isspace():
                self.pos += 1
            if self.pos < len(self.text) or not (yield from self.wait()):
                return

    def starts(self, literal: str) -> Steps[bool]:
        """Read a literal if the text continues with it; return whether it does."""
        while len(self.text) - self.pos < len(literal):
            if not literal.startswith(self.text[self.pos :]) or not (yield from self.wait()):
                return False
        if not self.text.startswith(literal, self.pos):
            return False
        self.pos += len(literal)
        return True

    def starts_any(self, literals: Iterable[str]) -> Steps[str | None]:
        """Read the literal that the text continues with; return it, or None."""
        for literal in literals:
            if (yield from self.starts(literal)):
                return literal
        return None

    def expect(self, literal: str) -> Steps[None]:
        """Read a literal.

        Raises:
            MalformedCallError: The text continues otherwise.
            TruncatedCallError: The text has ended.
        """
        if not (yield from self.starts(literal)):
            self.refuse()

    def refuse(self) -> NoReturn:
        """Give up on a call: it is cut if the whole text has been read, else it is none."""
        raise (
            TruncatedCallError
            if self.is_ended and self.pos == len(self.text)
            else MalformedCallError
        )

    def reread(self, begin: int, error: MalformedCallError | TruncatedCallError) -> None:
        """Go back to a position, as the text from there is no call, and count what is read again.

        Args:
            begin: The position.
            error: What ended the call.
        """
        end = len(self.text) if isinstance(error, TruncatedCallError) else self.pos
        self.num_refused_chars += end - begin
        self.pos = begin

    def peek(self) -> Steps[str]:
        """Return the next character without reading it.

        Raises:
            TruncatedCallError: There is none.
        """
        while self.pos == len(self.text):
            yield from self.more()
        return self.text[self.pos]

    def until(
        self,
        pattern: re.Pattern[str] | str,
        longest: int = 1,
        accepts: Callable[[re.Match[str]], bool] | None = None,
    ) -> Steps[str]:
        """Read up to a pattern, and the pattern; return the text before it.

        Args:
            pattern: A literal, or an expression whose matches no further text can change.
            longest: Characters that a match of an expression may begin before new text.
            accepts: Returns whether a match counts.

        Raises:
            TruncatedCallError: The text ends without it.
        """
        if isinstance(pattern, str):
            longest = len(pattern)
            pattern = _literal(pattern)
        begin = at = self.pos
        while True:
            found = pattern.search(self.text, at)
            if found is not None and (accepts is None or accepts(found)):
                self.pos = found.end()
                return self.text[begin : found.start()]
            if found is not None:
                at = found.start() + 1
                continue
            at = max(at, len(self.text) - longest)
            yield from self.more()

    def value_until(
        self,
        pattern: re.Pattern[str],
        longest: int,
        accepts: Callable[[re.Match[str]], bool] | None = None,
    ) -> Steps[str]:
        """Read a value that may be JSON up to a pattern, and the pattern; see `until`.

        The pattern is not searched for in JSON's strings, which may hold it.

        Raises:
            TruncatedCallError: The text ends without the pattern.
        """
        begin = self.pos
        end = yield from self._skip_json()
        if end is not None:
            with contextlib.suppress(TruncatedCallError):
                behind = yield from self.until(pattern, longest, accepts)
                if not behind.strip():
                    return self.text[begin : end + len(behind)]
        self.pos = begin
        return (yield from self.until(pattern, longest, accepts))

    def _skip_json(self) -> Steps[int | None]:
        """Read a JSON string, object or array; return its end, or None if it is none."""
        yield from self.skip_space()
        if not self.text.startswith(('"', "{", "["), self.pos):
            return None
        depth, in_string = 0, False
        while True:
            mark = yield from self._next(_IN_JSON_STRING if in_string else _OUTSIDE_JSON_STRING)
            if mark == '"':
                in_string = not in_string
            elif mark in ("{", "["):
                depth += 1
            elif mark in ("}", "]"):
                depth -= 1
            elif not mark.startswith("\\"):
                return None
            if depth == 0 and not in_string:
                return self.pos

    def _next(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read up to a match of one or two characters, and it; return "" if there is none."""
        while (found := pattern.search(self.text, self.pos)) is None:
            self.pos = max(self.pos, len(self.text) - 1)
            if not (yield from self.wait()):
                return ""
        self.pos = found.end()
        return found[0]

    def json(self, emit: Callable[[str], None], *, without_end: bool = False) -> Steps[None]:
        """Read a JSON value and emit its text in parts, each as soon as it is certain.

        Args:
            emit: Gets the parts.
            without_end: Whether to keep the last character from it, a bracket.

        Raises:
            MalformedCallError: The text is none, from the position on that has been reached.
            TruncatedCallError: The text ends before the value does.
        """
        scanner = JsonScanner()
        while True:
            begin = self.pos
            self.pos = scanner.scan(self.text, begin)
            end = self.pos - (without_end and scanner.is_done)
            if end > begin:
                emit(self.text[begin:end])
            if scanner.is_malformed:
                raise MalformedCallError
            if scanner.is_done:
                return
            yield from self.more()

    def json_text(self) -> Steps[str]:
        """Read a JSON value and return its text; see `json`."""
        parts: list[str] = []
        yield from self.json(parts.append)
        return "".join(parts)
