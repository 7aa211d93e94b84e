"""Incremental conversion of token ids to text: whole characters, cut at the first stop string.

Owner: one `IncrementalDetokenizer` per running request, used by one thread. It decides which text
may be sent now. Other reasons for the end of a request are handled by its caller.

The cost of a token does not depend on the length of the output. If tokens stand for bytes, only the
bytes of an unfinished character are kept (`_ByteDecoder`). Otherwise the tokens since a character
boundary are decoded again (`_StreamDecoder`). For stop strings, only text that could still become
part of one is kept (`_StopMatcher`).
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MIN_CONTEXT_CHARS = 4
"""Characters or bytes of context before the first output token. A UTF-8 character has at most 4
bytes, so earlier text cannot affect the decoding."""
_MIN_CONTEXT_TOKENS = 6
_MAX_CONTEXT_TOKENS = 64
"""Most tokens of the prompt that are searched for this context. A prompt may consist of special
tokens, which have no text; earlier text is then assumed to end at a character boundary."""
_MAX_PENDING_TOKENS = 64
"""Undecodable tokens after which a run counts as broken bytes, not as an unfinished character."""
_MAX_TAIL_TOKENS = 12
_MAX_WINDOW_TOKENS = 12
"""Tokens after a boundary that are decoded again before they become the next context."""


class IncrementalDetokenizer:
    """The text of one request's output, delta by delta.

    All deltas and the last flush give the same text after the prompt as decoding prompt and output
    at once, up to the first stop string. One exception: a tokenizer with byte fallback
    (SentencePiece) discards a whole run of byte tokens if one of them is broken. Complete
    characters of the run have been sent by then, and stay.

    Of several stop strings the one that ends first counts; of those that end together the longest.

    Attributes:
        stop_reason: The stop string that was found, or None. Once it is set, no more text follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Start after a prompt.

        Args:
            tokenizer: The model's tokenizer.
            prompt_ids: The prompt's token ids. They decide whether the first output token begins a
                word or completes a character.
            skip_special_tokens: Leave special tokens out of the text.
            stop: Non-empty strings; the text ends before the first one found.
            include_stop_str_in_output: The text ends behind it instead.
            min_tokens: A stop string that ends in the text of so many tokens does not count.
        """
        make = _ByteDecoder if tokenizer.is_byte_level else _StreamDecoder
        self._decoder = make(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = _StopMatcher(stop, include_stop_str_in_output) if stop else None
        self._num_unstoppable = min_tokens

    @property
    def stop_reason(self) -> str | None:
        """Return the stop string that ended the text, or None."""
        return None if self._matcher is None else self._matcher.matched

    def append(self, token_ids: Sequence[int]) -> str:
        """Add output tokens and return the text that may be sent now.

        The caller gives every output token in order, except an end token that must not appear in
        the text. The delta is "" while a character is unfinished or may belong to a stop string.
        With stop strings and `min_tokens`, give the tokens one at a time.
        """
        text = self._decoder.append(token_ids)
        if self._matcher is None:
            return text
        self._num_unstoppable -= len(token_ids)
        return self._matcher.append(text, may_stop=self._num_unstoppable < 0)

    def finish(self) -> str:
        """Return the text that was held back; broken bytes at the end become U+FFFD."""
        text = self._decoder.finish()
        if self._matcher is None:
            return text
        return self._matcher.append(text, may_stop=self._num_unstoppable < 0, is_final=True)


class _ByteDecoder:
    """Decoder of tokens that are bytes of UTF-8; holds back bytes of an unfinished character."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        _, self._pending = self._decode(self._end_of(prompt_ids))
        # An unfinished character at the prompt's end belongs to the prompt unless the output
        # completes it.
        self._owes_prompt = bool(self._pending)

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text of every character that they complete."""
        data = self._tokenizer.bytes_of(token_ids, self._skip_special_tokens)
        text, self._pending = self._decode(self._pending + data)
        return self._without_prompt(text) if self._owes_prompt else text

    def finish(self) -> str:
        """Return the rest, an unfinished character as U+FFFD."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return self._without_prompt(text) if self._owes_prompt else text

    @staticmethod
    def _decode(data: bytes) -> tuple[str, bytes]:
        """Return the characters of some bytes, and the bytes of an unfinished one at their end."""
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        return text, data[num_read:]

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """Return enough of the prompt's last bytes that earlier ones cannot affect the decoding."""
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
    """Decoder of a growing list of tokens, from one character boundary to the next.

    `_token_ids` is the window. It starts at a character boundary (or far enough before one), so its
    decoded text, `_text`, grows only at its end. Trailing U+FFFD may stand for unfinished
    characters, and are held back. `_sent` is the part of the text that has been sent or is context.
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
        """Add tokens; return the text of every character that they complete."""
        self._token_ids.extend(token_ids)
        before, self._text = self._text, self._decode(self._token_ids)
        if self._text == before and not self._decode(token_ids):
            # Skipped special tokens and unknown ids would only fill the window.
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
        """Return the shortest end of the prompt that fixes how the next token decodes; its text."""
        size = _MIN_CONTEXT_TOKENS
        while True:
            tail = list(prompt_ids[-size:])
            text = self._decode(tail)
            is_enough = len(text) >= _MIN_CONTEXT_CHARS and not text.startswith(_REPLACEMENT)
            if is_enough or size >= min(len(prompt_ids), _MAX_CONTEXT_TOKENS):
                return tail, text
            size *= 2

    def _start(self) -> int:
        """Return where unsent text begins; U+FFFD at the end of `_sent` may now be a character."""
        if self._text.startswith(self._sent):
            return len(self._sent)
        pairs = zip(self._sent, self._text, strict=False)
        shorter = min(len(self._sent), len(self._text))
        return next((i for i, (sent, now) in enumerate(pairs) if sent != now), shorter)

    def _move_window(self) -> None:
        """After all text was sent, keep only the tokens since the last boundary, as context."""
        tail = self._token_ids[self._boundary :]
        text = self._decode(tail)
        if text and not text.endswith(_REPLACEMENT):
            self._token_ids, self._text, self._sent = tail, text, text
            self._boundary = len(tail)

    def _cut_window(self, settled: int) -> str:
        """Shorten a window full of broken bytes; return the U+FFFD that no token can complete."""
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
    """Search for stop strings; holds back text that may be the beginning of one.

    `_buffer` is the end of the text. Its first `_num_sent` characters have been sent, and are kept
    only because a stop string that is included in the output may begin in them.
    """

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._max_partial = max(map(len, stop)) - 1
        self._buffer = ""
        self._num_sent = 0
        self.matched: str | None = None

    def append(self, text: str, *, may_stop: bool = True, is_final: bool = False) -> str:
        """Add text; return the part in which no stop string can begin, or all of it if final.

        Args:
            text: The text.
            may_stop: Whether a stop string that ends in it counts.
            is_final: Whether it is the last.
        """
        if self.matched is not None or not (text or is_final):
            return ""
        searched = len(self._buffer)
        self._buffer += text
        end = self._find(searched) if may_stop else None
        if end is None:
            held = 0 if is_final or self._include_stop else self._max_partial
            end = max(self._num_sent, len(self._buffer) - held)
        delta = self._buffer[self._num_sent : end]
        surplus = max(0, len(self._buffer) - self._max_partial)
        self._buffer = self._buffer[surplus:]
        self._num_sent = max(0, end - surplus)
        return delta

    def _find(self, searched: int) -> int | None:
        """Return where the text ends if it has a stop string; `searched` characters had none."""
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
