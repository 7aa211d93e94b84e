"""TCP's own watch over a connection, for sockets that cannot have ZMQ's heartbeats.

libzmq ends the process ("!_io_error") when a connection breaks on which it had stopped reading, for
its queue was full, and a heartbeat is due or waits to be answered.
"""

from typing import Any

import zmq

_SILENCE_S = 5


def watch_by_tcp(socket: zmq.Socket[Any]) -> None:
    """Let the kernel break a connection whose other end acknowledges nothing for 5 s."""
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _SILENCE_S)
    socket.set(zmq.TCP_MAXRT, 1000 * _SILENCE_S)
