"""Long texts to token ids, a piece at a time: the ids of the whole text in bounded memory. Pure.

The `tokenizers` library takes some 300 bytes of memory a character while it encodes a text, so that
a text of 8 MiB took gigabytes. Here a text is cut where a tokenizer provably continues as if the
text began there. Such places are known for two shapes of tokenizer.json; others encode a text
whole, up to `MAX_WHOLE_CHARS`.

Words: BPE of pre-tokens that an expression of GPT-2's kind finds (GPT-2, Llama 3, Qwen2). A match
begins where the previous one ended, and does not depend on earlier text. A window of the text is
encoded. Tokens near the window's end are discarded, because more text may change them: all after
the last boundary that has `_MARGIN` characters and the longest added token behind it. A boundary
counts only behind a visible character, because the text after a run of white space decides how the
run is divided.

Spaces: BPE of the whole text with "▁" for a space (SentencePiece: Llama 2, Mistral), if no token of
the vocabulary has a "▁" behind another character. Then no merge crosses from a word to the space
after it, and both sides are encoded independently.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicas.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tokenizers

PIECE_CHARS = 2**14
"""Characters of a piece; encoding one takes at most some 20 ms, during which other texts wait."""
MAX_UNCUT_CHARS = 2**18
"""Longest part of a text without a place to cut, for tokenizers with known places."""
MAX_WHOLE_CHARS = 2**19
"""Longest text for tokenizers without known places to cut."""
_MARGIN = 8
"""Characters behind a boundary that the expressions below may read before they end a match."""
_MAX_LOOKED_AT = 4096
"""Tokens at the end of a window among which a boundary is searched."""
_SPACE = "▁"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_EXPRESSIONS = frozenset({_GPT2, _CL100K % "", _CL100K % "{1,3}"})
"""Every alternative takes a run of one kind of character, with at most three others around it, and
looks one character ahead. Source: tokenizer.json of GPT-2, Qwen2 and Llama 3."""


class NoCutError(InvalidRequestError):
    """A text is too long to be encoded at once and has no place where it may be cut."""

    def __init__(self, most: int) -> None:
        super().__init__(
            "prompt",
            f"the text has more than {most} characters without a place where it can be "
            "cut for this model's tokenizer; send token ids, or a text with more spaces in it",
        )


@dataclass(frozen=True, slots=True)
class _Words:
    """Rule for cutting texts of pre-tokens.

    Attributes:
        margin: Least number of characters behind a cut.
        composes: Whether the normalizer joins characters with marks that follow them.
    """

    margin: int
    composes: bool


@dataclass(frozen=True, slots=True)
class _Spaces:
    """Rule for cutting texts with "▁" for spaces.

    Attributes:
        prepends: Whether each text gets a "▁" in front, which replaces the space at the cut.
        added: Texts of added tokens; none may touch a cut.
        margin: Characters of the longest added token.
    """

    prepends: bool
    added: tuple[str, ...]
    margin: int


class PieceEncoder:
    """Encoder of texts, a piece at a time.

    Args:
        backend: The tokenizer, without truncation and padding.

    Attributes:
        can_cut: Whether places to cut texts are known for this tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special_ids = _special_ids(backend)
        self._shape = None if self._special_ids is None else _shape(backend)
        self.can_cut = self._shape is not None

    def pieces(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Yield the token ids of a text, a piece at a time.

        Each step releases the GIL while it encodes.

        Raises:
            NoCutError: The text has more than `MAX_WHOLE_CHARS` characters and no places to cut are
                known, or a part without such a place has more than `MAX_UNCUT_CHARS`.
        """
        if self._special_ids is None or self._shape is None or len(text) <= PIECE_CHARS:
            if len(text) > MAX_WHOLE_CHARS:
                raise NoCutError(MAX_WHOLE_CHARS)
            # The library releases the GIL only for batches.
            yield self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
            return
        prefix, suffix = self._special_ids if add_special_tokens else ([], [])
        yield prefix
        begin = 0
        while begin < len(text):
            ids, begin = self._next(self._shape, text, begin)
            yield ids
        yield suffix

    def _next(self, shape: _Words | _Spaces, text: str, begin: int) -> tuple[list[int], int]:
        """Encode the next piece; return its ids and where the piece after it begins."""
        size = PIECE_CHARS
        while begin + size < len(text):
            if isinstance(shape, _Words):
                found = self._words(shape, text, begin, begin + size)
            else:
                found = self._to_space(shape, text, begin, begin + size)
            if found is not None:
                return found
            if size >= MAX_UNCUT_CHARS:
                raise NoCutError(MAX_UNCUT_CHARS)
            size *= 2
        return self._encode(text[begin:]).ids, len(text)

    def _words(
        self, shape: _Words, text: str, begin: int, end: int
    ) -> tuple[list[int], int] | None:
        """Encode up to the last certain boundary before `end`."""
        window = text[begin:end]
        encoding = self._encode(window)
        last = len(encoding) - 1
        for index in range(last, max(last - _MAX_LOOKED_AT, 0), -1):
            word = encoding.token_to_word(index)
            if word != encoding.token_to_word(index - 1):
                # Offsets may leave out a word's white space, but never its last visible character.
                place = encoding.token_to_chars(index - 1)
                cut = 0 if place is None else place[1]
                if (
                    0 < cut <= len(window) - shape.margin
                    and not window[cut - 1].isspace()
                    and not (shape.composes and _may_compose(window[cut]))
                ):
                    return encoding.ids[:index], begin + cut
        return None

    def _to_space(
        self, shape: _Spaces, text: str, begin: int, end: int
    ) -> tuple[list[int], int] | None:
        """Encode up to the last space before `end` at which a text may be cut."""
        cut = end
        while (cut := text.rfind(" ", begin + 1, cut)) > 0:
            if text[cut - 1] in (" ", _SPACE):
                continue
            near = text[max(cut - shape.margin, 0) : cut + 2 + shape.margin]
            if any(token in near for token in shape.added):
                continue
            # The tokenizer itself puts the "▁" of this space before the next piece.
            return self._encode(text[begin:cut]).ids, cut + 1 if shape.prepends else cut
        return None

    def _encode(self, text: str) -> tokenizers.Encoding:
        # The library releases the GIL only for batches.
        return self._backend.encode_batch([text], add_special_tokens=False)[0]


def _special_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids before and behind every text; None if a text is not found just once."""
    inner = backend.encode("a", add_special_tokens=False).ids
    outer = backend.encode("a", add_special_tokens=True).ids
    places = [i for i in range(len(outer)) if inner and outer[i : i + len(inner)] == inner]
    if len(places) != 1:
        return None
    return outer[: places[0]], outer[places[0] + len(inner) :]


def _shape(backend: tokenizers.Tokenizer) -> _Words | _Spaces | None:
    """Return the rule for cutting a tokenizer's texts; None if none is known."""
    spec: dict[str, Any] = json.loads(backend.to_str())
    model, added = spec["model"], spec["added_tokens"]
    normalizers = _parts(spec["normalizer"], "normalizers")
    steps = _parts(spec["pre_tokenizer"], "pretokenizers")
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    # A token of the first three kinds matches by the text around it, which a cut would hide. One of
    # the last kind matches the normalized text, but cuts are made in the original.
    if any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added) or (
        normalizers and any(t["normalized"] for t in added)
    ):
        return None
    texts = tuple(token["content"] for token in added)
    margin = max(map(len, texts), default=0)
    kinds = [part["type"] for part in normalizers]
    if kinds in ([], ["NFC"]) and any(map(_splits, steps)) and all(map(_restarts, steps)):
        return _Words(margin + _MARGIN, composes=bool(kinds))
    prepends = _prepends(normalizers, steps)
    has_spaces = _SPACE in model["vocab"] and not any(map(_crosses, model["vocab"]))
    return _Spaces(prepends, texts, margin) if prepends is not None and has_spaces else None


def _parts(step: dict[str, Any] | None, of: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, one after the other."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[of] for part in _parts(inner, of)]


def _restarts(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer that starts at one of its boundaries finds the later ones."""
    if step["type"] == "Split":
        is_known: bool = step["pattern"].get("Regex") in _KNOWN_EXPRESSIONS
        return is_known and str(step["behavior"]) in ("Isolated", "Removed")
    if step["type"] == "ByteLevel":
        return not bool(step["add_prefix_space"])
    return bool(step["type"] == "Digits")


def _splits(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer divides a text by an expression."""
    return step["type"] == "Split" or (step["type"] == "ByteLevel" and bool(step["use_regex"]))


def _prepends(normalizers: list[dict[str, Any]], steps: list[dict[str, Any]]) -> bool | None:
    """Return whether "▁" is put before each text; None if the tokenizer is not of that kind."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    if not steps and normalizers in ([replace], [prepend, replace]):
        return len(normalizers) == 2
    if not normalizers and len(steps) == 1 and steps[0]["type"] == "Metaspace":
        # Metaspace adds no "▁" to a text that begins with a space.
        return False if steps[0]["replacement"] == _SPACE else None
    return None


def _crosses(token: str) -> bool:
    """Return whether a token has a "▁" behind another character."""
    return _SPACE in token.lstrip(_SPACE)


def _may_compose(character: str) -> bool:
    """Return whether NFC may combine or reorder a character with the one before it."""
    code = ord(character)
    is_jamo = 0x1100 <= code <= 0x11FF or 0xA960 <= code <= 0xA97F or 0xD7B0 <= code <= 0xD7FF
    return is_jamo or unicodedata.category(character).startswith("M")
