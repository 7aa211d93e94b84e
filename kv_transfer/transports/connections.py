"""Break this process's own network connections, as a pulled cable does: for scripted faults.

ZMQ cannot drop the peers of a bound socket. Their connections are found among the process's file
descriptors by the address that they were accepted at; ZMQ and the other end then see them break.
"""

import os
import socket
from contextlib import suppress


def break_accepted(endpoint: str) -> int:
    """Break every connection that this process has accepted at an endpoint.

    The listening socket stays as it is: peers may connect again at once.

    Args:
        endpoint: ``tcp://<address>:<port>``, ``ipc://<path>`` or ``ipc://@<name>``, where a socket
            of this process is bound.

    Returns:
        How many connections were broken.
    """
    at = _name(endpoint)
    num_broken = 0
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            num_broken += _break(int(name), at)
    return num_broken


_Name = tuple[str, int] | str | bytes
"""What the operating system calls a bound address."""


def _name(endpoint: str) -> _Name:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return b"\0" + address[1:].encode() if address.startswith("@") else address
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _break(descriptor: int, at: _Name) -> bool:
    """Shut a connection down if it was accepted at an address.

    Why a copy: between the look and the deed the number may be closed and used for something else.

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
        connection.getpeername()  # A listening socket has none: OSError.
        connection.shutdown(socket.SHUT_RDWR)
        return True
