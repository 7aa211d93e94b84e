"""Wake-up of an I/O thread's poll by any thread."""

import contextlib
import socket


class WakeUp:
    """Socket that becomes readable when ``wake`` is called.

    Any thread may call ``wake``. The I/O thread polls and drains; the owner closes it.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._is_waking = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Wake the I/O thread, unless a wake-up is pending.

        The flag saves system calls, each of which gives the interpreter lock to the other thread.
        """
        if self._is_waking:
            return
        self._is_waking = True
        try:
            self._sender.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: a wake-up is pending already. Closed: the I/O thread has ended.
            return

    def drain(self) -> None:
        """Clear all wake-ups; the I/O thread must look for work after this, not before."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
        # After the reads, or a wake-up sent now could be read with them. Before commands are read:
        # a thread that adds one later must send a new wake-up.
        self._is_waking = False

    def close(self) -> None:
        """Close the socket, once the I/O thread has ended. Idempotent."""
        self._receiver.close()
        self._sender.close()
