"""Let any thread end the poll of an I/O thread."""

import contextlib
import socket


class WakeUp:
    """A socket that is readable once somebody has called ``wake``.

    Any thread may call that. The I/O thread polls and drains; whoever made this closes it.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._is_waking = False

    def fileno(self) -> int:
        """Return what to poll."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Let the I/O thread look at what it has to do, if it will not do so anyway.

        Why the flag: each system call gives the interpreter up to the other thread.
        """
        if self._is_waking:
            return
        self._is_waking = True
        try:
            self._sender.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: a wake-up is pending already. Closed: there is nobody left to wake.
            return

    def drain(self) -> None:
        """Take all wake-ups; the I/O thread looks at what there is to do after it."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
        # Not before they are taken, or one of now could be taken with them; and not after commands
        # are read: whoever adds one from then on has to wake this thread again.
        self._is_waking = False

    def close(self) -> None:
        """Let go of the socket, once the I/O thread has ended. Idempotent."""
        self._receiver.close()
        self._sender.close()
