"""The engine's wire: msgpack of tagged structs, its size limits, and ZMQ's own heartbeats."""

import msgspec

from replicas.errors import UnreadableMessageError
from replicas.messages import MAX_REQUEST_ID_CHARS, ClientMessage, EngineFrame
from replicas.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame that a client reads. Generous: the sender has proved to be the engine."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""Interval and timeout of ZMQ's heartbeats on connections that carry frames."""

_MAX_TOKEN_BYTES = 5
_MAX_NUMBER_BYTES = 9
_OTHER_BYTES = (
    (1 << 16)  # salt, ids, ticket, numbers, ZMQ's framing
    + MAX_STOP_STRINGS * (4 * MAX_STOP_CHARS + _MAX_NUMBER_BYTES)
    + MAX_LOGIT_BIASES * (_MAX_TOKEN_BYTES + _MAX_NUMBER_BYTES)
    + MAX_BAD_WORDS * (MAX_BAD_WORD_TOKENS + 1) * _MAX_TOKEN_BYTES
    + MAX_GRAMMAR_BYTES
)
"""Room for a message without its prompt, its output tokens, and lists as long as the vocabulary."""

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


def max_client_message_bytes(max_model_len: int, vocab_size: int, slots_per_group: int) -> int:
    """Return the size of the largest message that an engine reads, in bytes.

    That is a prompt of full length, the output of every choice, as many stop token ids and allowed
    token ids as there are, and the largest of everything else.

    Args:
        max_model_len: The engine's longest sequence, in tokens.
        vocab_size: Number of token ids.
        slots_per_group: Decode slots of a DP group, which hold the choices of a request.
    """
    num_choices = min(slots_per_group, MAX_CHOICES)
    num_token_ids = (1 + num_choices) * max_model_len + 2 * vocab_size
    return _OTHER_BYTES + _MAX_TOKEN_BYTES * num_token_ids


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
