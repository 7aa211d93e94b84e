"""Content blocks of an answer, whole and as the events of a stream.

Owner: a `BlockWriter` belongs to one stream. Nothing here does I/O.
Source: Anthropic's API reference, "Messages" and "Streaming messages".
"""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from cluster.edge.families.message import ArgumentsPiece, CallStart, ContentPiece, ReasoningPiece

if TYPE_CHECKING:
    from cluster.edge.families.message import MessageDelta, Piece

Block: TypeAlias = dict[str, Any]

_CALLER = {"type": "direct"}
_DELTA_END = b"{}}\n\n"
_NEW_ID = re.compile("call_([0-9a-f]+)")
"""Ids of calls to which the model gave none."""
_MODEL_ID = re.compile("toolu_m_([A-Za-z0-9_-]+)")
"""Ids of blocks that hold the model's own id."""


def event(name: str, fields: Block) -> bytes:
    """Return an event of a stream; its data repeats its name."""
    data = orjson.dumps({"type": name, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def block_id(call_id: str) -> str:
    """Return the id of the block of a call; `model_call_id` undoes it for ids of the model's own.

    The templates of some families repeat these, which may have characters that Anthropic's ids
    never have.
    """
    if (match := _NEW_ID.fullmatch(call_id)) is not None:
        return f"toolu_{match[1]}"
    return f"toolu_m_{base64.urlsafe_b64encode(call_id.encode()).rstrip(b'=').decode()}"


def model_call_id(given: str) -> str:
    """Return the id by which a chat template names a call: the model's own, if it gave one."""
    match = _MODEL_ID.fullmatch(given)
    if match is None:
        return given
    text = match[1]
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return given  # another server's id


def content_blocks(message: MessageDelta) -> list[Block]:
    """Return the blocks of a whole message.

    A call that is not complete is left out: its arguments are no JSON object.
    """
    blocks: list[Block] = []
    arguments = ""
    for piece in message.pieces:
        if isinstance(piece, ContentPiece):
            blocks.append({**_new_block(piece), "text": piece.text})
        elif isinstance(piece, ReasoningPiece):
            signature = _signature(piece.text).hexdigest()
            fields = {"thinking": piece.text, "signature": signature}
            blocks.append({**_new_block(piece), **fields})
        elif isinstance(piece, CallStart):
            blocks.append(_new_block(piece))
            arguments = ""
        elif isinstance(piece, ArgumentsPiece):
            arguments += piece.text
        elif piece.is_complete:
            blocks[-1]["input"] = orjson.Fragment(arguments)
        else:
            blocks.pop()
    return blocks


class BlockWriter:
    """Converter of a message's pieces into the events of its blocks.

    A block is open from its first piece to the next one of another kind, so any division of the
    message gives the same blocks.
    """

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the open block; "" if none is open
        self._delta_head = b""  # common part of the deltas of the open block
        self._signature = _signature()  # of the open block

    def add(self, delta: MessageDelta) -> bytes:
        """Return the events of further pieces."""
        return b"".join([self._events(piece) for piece in delta.pieces])

    def close(self) -> bytes:
        """Return the events that end the open block, if there is one."""
        if not self._kind:
            return b""
        events = b""
        if self._kind == "thinking":
            signature, self._signature = self._signature.hexdigest(), _signature()
            events = self._delta({"type": "signature_delta", "signature": signature})
        self._kind = ""
        return events + event("content_block_stop", {"index": self._index})

    def _events(self, piece: Piece) -> bytes:
        if isinstance(piece, ContentPiece):
            begin = b"" if self._kind == "text" else self._open("text", piece)
            return begin + self._delta({"type": "text_delta", "text": piece.text})
        if isinstance(piece, ReasoningPiece):
            begin = b"" if self._kind == "thinking" else self._open("thinking", piece)
            self._signature.update(piece.text.encode())
            return begin + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallStart):
            return self._open("tool_use", piece)
        if isinstance(piece, ArgumentsPiece):
            return self._delta({"type": "input_json_delta", "partial_json": piece.text})
        return self.close()

    def _open(self, kind: str, piece: ContentPiece | ReasoningPiece | CallStart) -> bytes:
        events = self.close()
        self._index += 1
        self._kind = kind
        head = event("content_block_delta", {"index": self._index, "delta": {}})
        self._delta_head = head.removesuffix(_DELTA_END)
        fields = {"index": self._index, "content_block": _new_block(piece)}
        return events + event("content_block_start", fields)

    def _delta(self, delta: Block) -> bytes:
        return self._delta_head + orjson.dumps(delta) + b"}\n\n"


def _new_block(piece: ContentPiece | ReasoningPiece | CallStart) -> Block:
    """Return the empty block that a piece begins."""
    if isinstance(piece, ContentPiece):
        return {"type": "text", "text": "", "citations": None}
    if isinstance(piece, ReasoningPiece):
        return {"type": "thinking", "thinking": "", "signature": ""}
    call_id = block_id(piece.call_id)
    return {"type": "tool_use", "id": call_id, "name": piece.name, "caller": _CALLER, "input": {}}


def _signature(text: str = "") -> blake2b:
    """Return the signature of a thinking block, a checksum; clients must find one and return it."""
    return blake2b(text.encode(), digest_size=16)
