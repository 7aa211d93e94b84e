"""Breaking of this process's own network connections, as a pulled cable does, for scripted faults.

ZMQ cannot drop the peers of a bound socket. Their connections are found among the process's file
descriptors by the address that accepted them; ZMQ and the other end then see them break.
"""

import os
import socket
from contextlib import suppress


def break_accepted(endpoint: str) -> int:
    """Break every connection that this process has accepted at an endpoint.

    The listening socket stays open: peers may connect again at once.

    Args:
        endpoint: ``tcp://<address>:<port>``, ``ipc://<path>`` or ``ipc://@<name>``, where a socket
            of this process is bound.

    Returns:
        Number of connections broken.
    """
    at = _name(endpoint)
    num_broken = 0
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            num_broken += _break(int(name), at)
    return num_broken


_Name = tuple[str, int] | str | bytes
"""A bound address as the operating system reports it."""


def _name(endpoint: str) -> _Name:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return b"\0" + address[1:].encode() if address.startswith("@") else address
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _break(descriptor: int, at: _Name) -> bool:
    """Shut a connection down if it was accepted at an address.

    Works on a duplicate: between check and shutdown another thread may close the descriptor, and
    the system may reuse its number.

    Raises:
        OSError: The descriptor is closed, no socket, or not connected.
    """
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        name = connection.getsockname()
        if (name[:2] if isinstance(name, tuple) else name) != at:
            return False
        connection.getpeername()  # Raises OSError for a listening socket.
        connection.shutdown(socket.SHUT_RDWR)
        return True
