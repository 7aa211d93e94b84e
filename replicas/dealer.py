"""The client's end of an engine's sockets: one way to connect, for every kind of client."""

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
"""A client repeats its Hello this often until the engine's first frame comes."""
CONNECT_S = 10.0
"""How long a started engine may take to send its first frame."""
QUIET_S = 2.0
"""An engine that sends nothing for so long (it sends heartbeats every 0.25 s) gets nothing new."""
SILENCE_S = 5.0
"""And one that sends nothing for so long counts as dead."""
MAX_WAITING_MESSAGES = 4096
"""Messages that may wait to be sent to one engine, behind all that it and both kernels take."""
NO_ROOM = f"it takes nothing: {MAX_WAITING_MESSAGES} messages wait for it"
"""What has become of an engine with which that is used up."""
NOT_GREETED = "it does not know this client any more, and has dropped its requests"
"""What has become of an engine that answers so, to whoever has requests on it."""

SocketT = TypeVar("SocketT", bound="zmq.Socket[object]")


def connect_dealers(
    context: zmq.Context[SocketT], identity: bytes, description: EngineDescription, keys: KeyRing
) -> tuple[SocketT, SocketT]:
    """Connect to both sockets of an engine: the one that takes messages, the one that sends frames.

    Only the second drops a connection whose peer is silent: the engine does not read the first for
    as long as it has too much to do. Whoever hears nothing on the second has to close both.

    Args:
        context: Decides whether the sockets are synchronous or asynchronous.
        identity: The client's id, the same on both sockets.
        description: The engine.
        keys: The secrets of the client's deployment.

    Raises:
        ServerKeyError: The engine holds none of these.
    """
    to_engine, from_engine = (_make(context, identity, description, keys) for _ in range(2))
    from_engine.setsockopt(zmq.RCVHWM, 0)
    from_engine.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    from_engine.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    to_engine.connect(description.input_endpoint)
    from_engine.connect(description.output_endpoint)
    return to_engine, from_engine


def too_large(description: EngineDescription, request_id: str, num_bytes: int) -> Refused | None:
    """Refuse in the engine's name a request that it would not read.

    It would close the connection, and with it end every request that the client has there.

    Args:
        description: The engine.
        request_id: The request.
        num_bytes: Of its message.
    """
    limit = max_client_message_bytes(description.max_model_len)
    if num_bytes <= limit:
        return None
    return Refused(
        request_id, "invalid", f"the request has {num_bytes} bytes; the engine reads {limit}"
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
