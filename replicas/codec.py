"""Encoders and decoders of the engine's wire: msgpack of tagged structs, with a size limit."""

import msgspec

from replicas.messages import ClientMessage, EngineFrame

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest frame that either side reads: a prompt of a few million tokens."""

_encoder = msgspec.msgpack.Encoder()
_client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    ClientMessage
)
_engine_frame_decoder: msgspec.msgpack.Decoder[EngineFrame] = msgspec.msgpack.Decoder(EngineFrame)


def encode(message: ClientMessage | EngineFrame) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_client_message(raw: bytes) -> ClientMessage:
    """Decode what a client sent.

    Raises:
        msgspec.MsgspecError: Not a message of this protocol.
    """
    return _client_message_decoder.decode(raw)


def decode_engine_frame(raw: bytes) -> EngineFrame:
    """Decode what an engine sent.

    Raises:
        msgspec.MsgspecError: Not a frame of this protocol.
    """
    return _engine_frame_decoder.decode(raw)
