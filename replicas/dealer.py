"""The client's end of an engine's sockets: one way to connect, for every kind of client."""

from __future__ import annotations

from typing import TypeVar

import zmq

from replicas.codec import MAX_MESSAGE_BYTES

HELLO_S = 0.05
"""A client repeats its Hello this often until the engine's first frame comes."""
CONNECT_S = 10.0
"""How long a started engine may take to send its first frame."""
QUIET_S = 2.0
"""An engine that sends nothing for so long (it sends heartbeats every 0.25 s) gets nothing new."""
SILENCE_S = 5.0
"""And one that sends nothing for so long counts as dead."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 5000

SocketT = TypeVar("SocketT", bound="zmq.Socket[object]")


def connect_dealer(context: zmq.Context[SocketT], identity: bytes, endpoint: str) -> SocketT:
    """Connect a DEALER socket that drops a connection whose peer is silent.

    Args:
        context: Decides whether the socket is synchronous or asynchronous.
        identity: The client's id, the same on both sockets of an engine.
        endpoint: One of the two endpoints of an engine's description.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.connect(endpoint)
    return socket
