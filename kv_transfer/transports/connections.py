"""Break this process's own network connections, as a pulled cable does: for scripted faults.

ZMQ cannot drop the peers of a bound socket. Their connections are found among the process's file
descriptors by the address that they were accepted at; ZMQ and the other end then see them break.
"""

import os
import socket
from contextlib import suppress


def break_accepted(endpoint: str) -> int:
    """Break every TCP connection that this process has accepted at an endpoint.

    The listening socket stays as it is: peers may connect again at once.

    Args:
        endpoint: ``tcp://<address>:<port>`` where a socket of this process is bound.

    Returns:
        How many connections were broken.
    """
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    at = (address.strip("[]"), int(port))
    num_broken = 0
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            num_broken += _break(int(name), at)
    return num_broken


def _break(descriptor: int, at: tuple[str, int]) -> bool:
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
        if connection.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        if connection.getsockname()[:2] != at:
            return False
        connection.getpeername()  # A listening socket has none: OSError.
        connection.shutdown(socket.SHUT_RDWR)
        return True
