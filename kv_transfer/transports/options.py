"""Socket options of both ends of a KV connection."""

import zmq

HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0
"""Interval of ZMQ's own heartbeats, and the silence after which it drops a connection."""


def set_options(endpoint: zmq.Socket[bytes], max_bytes: int) -> None:
    """Set the options of a socket.

    Args:
        endpoint: The socket, neither bound nor connected.
        max_bytes: Longest frame that it accepts.
    """
    endpoint.set(zmq.LINGER, 0)
    endpoint.set(zmq.MAXMSGSIZE, max_bytes)
    endpoint.set(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
    endpoint.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * HEARTBEAT_TIMEOUT_S))
    # No limit on messages: above one, a ROUTER drops them silently. Credits limit the bytes.
    endpoint.set(zmq.SNDHWM, 0)
