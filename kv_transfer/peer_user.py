"""User of the process at the other end of a Unix socket, and descriptors received from it.

Any user may bind a free abstract name, so a client must check who has bound it.
"""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")
_DESCRIPTOR = struct.Struct("i")


def peer_user_id(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel knows it.

    Raises:
        OSError: The socket is closed or not connected.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(found)
    return int(user_id)


def receive_descriptor(connection: socket.socket, max_bytes: int) -> tuple[bytes, int | None]:
    """Receive a message with a descriptor, which no child of this process inherits.

    Not ``socket.recv_fds``: in Python 3.11 that ignores its flags.

    Returns:
        The message, and the descriptor; None unless exactly one came with a whole message.

    Raises:
        OSError: Nothing came.
    """
    message, rights, flags, _ = connection.recvmsg(
        max_bytes, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    found = [
        descriptor
        for level, kind, data in rights
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(data)
    ]
    if len(found) == 1 and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        return message, found[0]
    for descriptor in found:
        os.close(descriptor)
    return message, None
