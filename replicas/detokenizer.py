"""Token ids to text while they arrive: whole characters only, cut at the first stop string.

Owner: one `IncrementalDetokenizer` per running request, used by one thread. It decides which text
may be sent now; whether a request has finished for other reasons is its caller's business.

It is cheap and exact, whatever the length of the output. Characters: where every token stands for
bytes, only those of an unfinished one are kept (`_ByteDecoder`); elsewhere the tokens since a
character boundary are decoded again (`_StreamDecoder`). Stop strings: only as much text as could
still become part of one is kept (`_StopMatcher`).
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MIN_CONTEXT_CHARS = 4
"""Visible characters before the first output token: more than one UTF-8 character has bytes, so
that what stands before them cannot matter."""
_MIN_CONTEXT_TOKENS = 6
_MAX_CONTEXT_TOKENS = 64
"""Tokens of the prompt that are looked through for these characters. Special tokens have none, and
a prompt may have nothing else: what stands before so many of them is taken to be finished."""
_MAX_PENDING_TOKENS = 64
"""Undecodable tokens after which a run is broken bytes and not an unfinished character."""
_MAX_TAIL_TOKENS = 12
_MAX_WINDOW_TOKENS = 12
"""Tokens after a boundary that are decoded again rather than made the next context."""


class IncrementalDetokenizer:
    """The text of one request's output, delta by delta.

    All deltas and the flush together are the text that decoding prompt and output at once gives
    after the prompt, up to the first stop string. One exception: a tokenizer with byte fallback
    (SentencePiece) voids a whole run of byte tokens when one of them is broken; characters of
    the run that were complete before have been sent by then, and stay.

    A stop string that ends first wins; among those that end together the longest.

    Attributes:
        stop_reason: The stop string that was found, or None. Once it is set, nothing more comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        """Start after a prompt.

        Args:
            tokenizer: The model's tokenizer.
            prompt_ids: The prompt's token ids: they tell whether the first output token begins
                a word, or finishes a character.
            skip_special_tokens: Leave special tokens out of the text.
            stop: Non-empty strings; the text ends before the first one found.
            include_stop_str_in_output: The text ends after it instead.
        """
        make = _ByteDecoder if tokenizer.is_byte_level else _StreamDecoder
        self._decoder = make(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = _StopMatcher(stop, include_stop_str_in_output) if stop else None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, or None."""
        return None if self._matcher is None else self._matcher.matched

    def append(self, token_ids: Sequence[int]) -> str:
        """Add output tokens and return the text that may be sent now.

        Give every output token in order, except an end token that should not show up in the
        text. The delta is "" while a character is unfinished or may belong to a stop string.
        """
        text = self._decoder.append(token_ids)
        return text if self._matcher is None else self._matcher.append(text)

    def finish(self) -> str:
        """Return what was held back; broken bytes at the end are U+FFFD."""
        text = self._decoder.finish()
        return text if self._matcher is None else self._matcher.append(text, is_final=True)


class _ByteDecoder:
    """Decodes tokens that are bytes of UTF-8: what is not a whole character yet waits."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        _, self._pending = self._decode(self._end_of(prompt_ids))
        # A character that the prompt breaks off is the prompt's, unless the output finishes it.
        self._owes_prompt = bool(self._pending)

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text of every character that they finish."""
        data = self._tokenizer.bytes_of(token_ids, self._skip_special_tokens)
        text, self._pending = self._decode(self._pending + data)
        return self._without_prompt(text) if self._owes_prompt else text

    def finish(self) -> str:
        """Return the rest, an unfinished character as U+FFFD."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return self._without_prompt(text) if self._owes_prompt else text

    @staticmethod
    def _decode(data: bytes) -> tuple[str, bytes]:
        """The characters of some bytes, and the beginning of one at their end."""
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        return text, data[num_read:]

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """Return so many of the prompt's last bytes that what stands before them cannot matter."""
        end = b""
        for token_id in reversed(prompt_ids[-_MAX_CONTEXT_TOKENS:]):
            if len(end) >= _MIN_CONTEXT_CHARS:
                break
            end = self._tokenizer.bytes_of([token_id], self._skip_special_tokens) + end
        return end

    def _without_prompt(self, text: str) -> str:
        if text:
            self._owes_prompt = False
        return text.removeprefix(_REPLACEMENT)


class _StreamDecoder:
    """Decodes a growing list of tokens, a character boundary at a time.

    `_token_ids` is the window: it starts at a character boundary (or far enough before one), so
    its decoded text, `_text`, grows only at its end. Trailing U+FFFD may stand for characters
    that are not finished, and wait. `_sent` is the part of the text that needs no sending.
    Source: the two offsets of vLLM v1/engine/detokenizer.py SlowIncrementalDetokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids, self._text = self._context(prompt_ids)
        self._sent = self._text
        self._boundary = len(self._token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text of every character that they finish."""
        self._token_ids.extend(token_ids)
        before, self._text = self._text, self._decode(self._token_ids)
        if self._text == before and not self._decode(token_ids):
            # Skipped special tokens, and ids without a token: they would only fill the window.
            del self._token_ids[len(self._token_ids) - len(token_ids) :]
            return ""
        start = self._start()
        settled = max(start, len(self._text.rstrip(_REPLACEMENT)))
        delta = self._text[start:settled]
        if delta:
            self._sent = self._text[:settled]
        if delta and settled == len(self._text):
            if len(self._token_ids) - self._boundary >= _MAX_WINDOW_TOKENS:
                self._move_window()
        elif len(self._token_ids) - self._boundary > _MAX_PENDING_TOKENS:
            delta += self._cut_window(settled)
        return delta

    def finish(self) -> str:
        """Return the rest, unfinished characters as U+FFFD."""
        rest = self._text[self._start() :]
        self._sent = self._text
        return rest

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _context(self, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
        """The shortest end of the prompt that fixes how the next token decodes, and its text."""
        size = _MIN_CONTEXT_TOKENS
        while True:
            tail = list(prompt_ids[-size:])
            text = self._decode(tail)
            is_enough = len(text) >= _MIN_CONTEXT_CHARS and not text.startswith(_REPLACEMENT)
            if is_enough or size >= min(len(prompt_ids), _MAX_CONTEXT_TOKENS):
                return tail, text
            size *= 2

    def _start(self) -> int:
        """Where unsent text begins; U+FFFD at the end of `_sent` may have become a character."""
        if self._text.startswith(self._sent):
            return len(self._sent)
        pairs = zip(self._sent, self._text, strict=False)
        shorter = min(len(self._sent), len(self._text))
        return next((i for i, (sent, now) in enumerate(pairs) if sent != now), shorter)

    def _move_window(self) -> None:
        """All is sent: keep the tokens since the last boundary, as context, if they show."""
        tail = self._token_ids[self._boundary :]
        text = self._decode(tail)
        if text and not text.endswith(_REPLACEMENT):
            self._token_ids, self._text, self._sent = tail, text, text
            self._boundary = len(tail)

    def _cut_window(self, settled: int) -> str:
        """Shorten a window full of broken bytes; return the U+FFFD that no token can mend."""
        for size in range(4, _MAX_TAIL_TOKENS):
            head = self._decode(self._token_ids[:-size])
            rest = self._decode(self._token_ids[-size:])
            if rest and head + rest == self._text:
                delta = self._text[settled : len(head)]
                self._token_ids, self._text, self._boundary = self._token_ids[-size:], rest, 0
                self._sent = rest[: max(0, settled - len(head))]
                return delta
        return ""


class _StopMatcher:
    """Holds back the end of a text while it could be the beginning of a stop string.

    `_buffer` ends where the text ends; its first `_num_sent` characters have been sent and stay
    only because a stop string may begin in them (when it is to be included in the output).
    """

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._max_partial = max(map(len, stop)) - 1
        self._buffer = ""
        self._num_sent = 0
        self.matched: str | None = None

    def append(self, text: str, is_final: bool = False) -> str:
        """Add text; return what no stop string can begin in, or all of it when final."""
        if self.matched is not None or not (text or is_final):
            return ""
        searched = len(self._buffer)
        self._buffer += text
        end = self._find(searched)
        if end is None:
            held = 0 if is_final or self._include_stop else self._max_partial
            end = max(self._num_sent, len(self._buffer) - held)
        delta = self._buffer[self._num_sent : end]
        surplus = max(0, len(self._buffer) - self._max_partial)
        self._buffer = self._buffer[surplus:]
        self._num_sent = max(0, end - surplus)
        return delta

    def _find(self, searched: int) -> int | None:
        """Where the text ends, if a stop string is in it; `searched` characters had none."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._buffer.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        if best is None:
            return None
        end, start, self.matched = best
        return end if self._include_stop else start
