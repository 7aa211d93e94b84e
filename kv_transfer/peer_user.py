"""Tell whose process is at the other end of a Unix socket; anybody may take a name that is free."""

import socket
import struct

_CREDENTIALS = struct.Struct("iII")


def peer_user_id(connection: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel knows it.

    Raises:
        OSError: The socket is closed or not connected.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(found)
    return int(user_id)
