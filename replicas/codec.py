"""The engine's wire: msgpack of tagged structs, its size limits, and ZMQ's own heartbeats."""

import msgspec

from replicas.errors import UnreadableMessageError
from replicas.messages import MAX_REQUEST_ID_CHARS, ClientMessage, EngineFrame

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame that a client reads. Generous: the sender has proved to be the engine."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""Interval and timeout of ZMQ's heartbeats on connections that carry frames."""

_MAX_TOKEN_BYTES = 5
_OTHER_BYTES = 1 << 16
"""Room for a message without its token ids: salt, stop strings, ids, ticket, ZMQ's framing."""

_encoder = msgspec.msgpack.Encoder()
_client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    ClientMessage
)
_engine_frame_decoder: msgspec.msgpack.Decoder[EngineFrame] = msgspec.msgpack.Decoder(EngineFrame)

_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that a decoder raises for malformed or hostile bytes."""


class _RequestHead(msgspec.Struct, array_like=True):
    request_id: str


class _AddRequest(msgspec.Struct, array_like=True, tag="add"):
    request: _RequestHead


_head_decoder = msgspec.msgpack.Decoder(_AddRequest)


def max_client_message_bytes(max_model_len: int) -> int:
    """Return the size of the largest message that an engine reads, in bytes.

    That is a prompt of full length and as many stop token ids.

    Args:
        max_model_len: The engine's longest sequence, in tokens.
    """
    return _OTHER_BYTES + 2 * _MAX_TOKEN_BYTES * max_model_len


def encode(message: ClientMessage | EngineFrame) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_client_message(raw: bytes) -> ClientMessage:
    """Decode a message from a client.

    Raises:
        UnreadableMessageError: Not a message of this protocol.
    """
    try:
        return _client_message_decoder.decode(raw)
    except _ERRORS as error:
        raise UnreadableMessageError(str(error), _added_request_id(raw)) from error


def decode_engine_frame(raw: bytes) -> EngineFrame:
    """Decode a frame from an engine.

    Raises:
        UnreadableMessageError: Not a frame of this protocol.
    """
    try:
        return _engine_frame_decoder.decode(raw)
    except _ERRORS as error:
        raise UnreadableMessageError(str(error)) from error


def _added_request_id(raw: bytes) -> str | None:
    """Return the id of the request that an unreadable `AddRequest` is about, if there is one."""
    try:
        request_id = _head_decoder.decode(raw).request.request_id
    except _ERRORS:
        return None
    return request_id if len(request_id) <= MAX_REQUEST_ID_CHARS else None
