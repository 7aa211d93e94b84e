"""Client side of an engine's two sockets, shared by all kinds of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import zmq

from kv_transfer.curve import secure_client
from replicas.codec import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    MAX_FRAME_BYTES,
    max_client_message_bytes,
)
from replicas.messages import Refused

if TYPE_CHECKING:
    from kv_transfer.keys import KeyRing
    from replicas.messages import EngineDescription

HELLO_S = 0.05
"""Interval at which a client repeats its Hello until the engine's first frame arrives."""
CONNECT_S = 10.0
"""Longest time that a started engine may take to send its first frame."""
QUIET_S = 2.0
"""An engine silent for this long gets no new requests. Its heartbeats come every 0.25 s."""
SILENCE_S = 5.0
"""An engine silent for this long counts as dead."""
MAX_WAITING_MESSAGES = 4096
"""Messages queued in this process for one engine; kernels and the engine buffer more."""
NO_ROOM = f"it reads no messages: {MAX_WAITING_MESSAGES} are queued for it"
"""Loss reason of an engine whose queue is full."""
NOT_GREETED = "it no longer knows this client and has dropped its requests"
"""Loss reason of an engine that answers `NotGreeted`."""

SocketT = TypeVar("SocketT", bound="zmq.Socket[object]")


def connect_dealers(
    context: zmq.Context[SocketT], identity: bytes, description: EngineDescription, keys: KeyRing
) -> tuple[SocketT, SocketT]:
    """Connect to an engine's input socket (messages) and output socket (frames).

    Only the output socket has heartbeats: a busy engine may leave its input socket unread for a
    while. If nothing arrives on the output socket, close both.

    Args:
        context: Decides whether the sockets are synchronous or asynchronous.
        identity: The client's id, the same on both sockets.
        description: The engine.
        keys: The secrets of the client's deployment.

    Raises:
        ServerKeyError: The engine holds none of these secrets.
    """
    to_engine, from_engine = (_make(context, identity, description, keys) for _ in range(2))
    from_engine.setsockopt(zmq.RCVHWM, 0)
    from_engine.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    from_engine.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    to_engine.connect(description.input_endpoint)
    from_engine.connect(description.output_endpoint)
    return to_engine, from_engine


def too_large(description: EngineDescription, request_id: str, num_bytes: int) -> Refused | None:
    """Return a refusal for a request larger than the engine reads, or None.

    The engine would close the connection, and all of the client's requests on it would be lost.

    Args:
        description: The engine.
        request_id: The request.
        num_bytes: Size of its encoded message.
    """
    limit = max_client_message_bytes(
        description.max_model_len, description.vocab_size, description.slots_per_group
    )
    if num_bytes <= limit:
        return None
    return Refused(
        request_id,
        "invalid",
        f"the request has {num_bytes} bytes; the engine reads at most {limit}",
    )


def _make(
    context: zmq.Context[SocketT], identity: bytes, description: EngineDescription, keys: KeyRing
) -> SocketT:
    socket = context.socket(zmq.DEALER)
    try:
        secure_client(socket, keys, description.incarnation, description.public_key)
    except BaseException:
        socket.close(linger=0)
        raise
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_WAITING_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket
