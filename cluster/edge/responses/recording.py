"""Recordings of outputs, from which the events of a response can be made again. Pure.

A recording is what the items of a response are built from, in the order of the output: one line of
JSON for each part. It takes a fraction of the memory of the events, and gives the same ones.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cluster.edge.families.message import ArgumentsPiece, CallEnd, CallStart, ContentPiece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cluster.edge.families.message import Piece

Kind = Literal["begin", "content", "reasoning", "call", "arguments", "end", "cut"]
_TEXTS = ("content", "reasoning", "arguments")


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of an output.

    Attributes:
        kind: "begin" before the first output of a response in the background; a piece of a text;
            the beginning of a "call", and its "end", or "cut" if it is not whole.
        text: The text, or the name of the called function.
        logprobs: Log probabilities of a content's tokens, as in the answer.
        call_id: Id of the call.
        namespace: Namespace of the called function, if one has it.
    """

    kind: Kind
    text: str = ""
    logprobs: list[dict[str, Any]] = []
    call_id: str = ""
    namespace: str | None = None


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Part)


def part_of(
    piece: Piece, logprobs: list[dict[str, Any]], namespaces: Mapping[str, dict[str, str]]
) -> Part:
    """Return the part that a piece of a message is.

    Args:
        piece: The piece.
        logprobs: Log probabilities of its content.
        namespaces: Of each function in a namespace, its fields of a call, by the model's name of
            it.
    """
    if isinstance(piece, CallStart):
        named = namespaces.get(piece.name, {"name": piece.name})
        return Part("call", named["name"], [], piece.call_id, named.get("namespace"))
    if isinstance(piece, ArgumentsPiece):
        return Part("arguments", piece.text)
    if isinstance(piece, CallEnd):
        return Part("end" if piece.is_complete else "cut")
    if isinstance(piece, ContentPiece):
        return Part("content", piece.text, logprobs)
    return Part("reasoning", piece.text)


def parts_of_items(items: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return parts that build finished items: one for each text."""
    parts: list[Part] = []
    for item in items:
        if item["type"] == "function_call":
            parts += [
                Part("call", item["name"], [], item["call_id"], item.get("namespace")),
                Part("arguments", item["arguments"]),
                Part("end"),
            ]
            continue
        [content] = item["content"]
        # An answer without output has one empty message, which is not a part of an output.
        if content["text"]:
            kind: Kind = "content" if item["type"] == "message" else "reasoning"
            parts.append(Part(kind, content["text"], content.get("logprobs", [])))
    return parts


def encode_part(part: Part) -> bytes:
    """Return the line of a part."""
    return _ENCODER.encode(part) + b"\n"


def pages(recording: bytes, num_parts: int) -> Iterator[bytes]:
    """Yield the whole lines of a recording, some at a time: there may be 100,000 of them."""
    begin = 0
    while begin < len(recording):
        end = begin
        for _ in range(num_parts):
            end = recording.find(b"\n", end) + 1 or len(recording)
        yield recording[begin:end]
        begin = end


def decode_parts(recording: bytes) -> list[Part]:
    """Return the parts of whole lines."""
    return _DECODER.decode_lines(recording)


class KnownOutput:
    """Output that is recorded already, and is made again.

    The texts may come in other pieces than they are recorded in; calls may have other ids.

    Args:
        parts: The recorded parts.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._left = deque(parts)

    def new_part(self, part: Part) -> Part | None:
        """Return what of the next part is not recorded; None if all of it is."""
        while self._left:
            known = self._left.popleft()
            if known.kind != part.kind:
                # The output differs from here on: another version may parse it in another way.
                self._left.clear()
            elif part.kind not in _TEXTS:
                return None
            elif len(known.text) > len(part.text):
                text = known.text[len(part.text) :]
                self._left.appendleft(msgspec.structs.replace(known, text=text))
                return None
            else:
                part = msgspec.structs.replace(part, text=part.text[len(known.text) :])
                if not part.text:
                    return None
        return part
