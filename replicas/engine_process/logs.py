"""Log lines of an engine: written to standard error in bounded number, without blocking.

Ray keeps standard error in a file without rotation, or in a pipe; the disk may be full, and the
pipe's reader may be stopped. The engine must keep serving: lines that cannot be written at once are
dropped and counted, and lines that any client can provoke are written a few times, then once a
minute.
"""

from __future__ import annotations

import logging
import os
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

BURST = 5
"""Lines of one kind that may be written at once."""
INTERVAL_S = 60.0
"""Seconds until another line of that kind may be written."""
MAX_LINE_BYTES = select.PIPE_BUF
"""Bytes that a pipe with room takes without blocking; longer lines lose their middle."""
_ELLIPSIS = b" [...] "


class LineLimit:
    """Decides which lines are written. Pure; owner: the `EngineLog` that asks.

    Its size is bounded by the number of kinds, which are places in the code.
    """

    def __init__(self) -> None:
        # Per kind: lines that may be written, the time of that count, and lines held back.
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}

    def admit(self, kind: Hashable, now_s: float) -> int | None:
        """Ask for one line.

        Args:
            kind: Lines of one kind share a limit.
            now_s: Monotonic clock.

        Returns:
            Number of lines of this kind held back since the last one; None holds this one back too.
        """
        left, then_s, num_held = self._kinds.get(kind, (float(BURST), now_s, 0))
        left = min(left + (now_s - then_s) / INTERVAL_S, float(BURST))
        is_admitted = left >= 1.0
        self._kinds[kind] = (left - 1.0, now_s, 0) if is_admitted else (left, now_s, num_held + 1)
        return num_held if is_admitted else None


class EngineLog(logging.Handler):
    """A log handler that writes to a file descriptor and never blocks or raises.

    Args:
        fd: The descriptor.

    Attributes:
        num_lost: Lines that could not be written since the last one that could.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._limit = LineLimit()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.num_lost = 0
        self.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s engine[%(process)d] %(message)s")
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless its kind is over its limit or the descriptor has no room."""
        num_held = self._limit.admit((record.pathname, record.lineno), time.monotonic())
        if num_held is None:
            return
        try:
            line = self._format_line(record, num_held).encode(errors="replace")
            if not self._poll.poll(0):
                raise BlockingIOError
            os.write(self._fd, _cut(line) + b"\n")
        except Exception:  # noqa: BLE001 - a call with wrong arguments may fail in every way
            self.num_lost += 1
        else:
            self.num_lost = 0

    def _format_line(self, record: logging.LogRecord, num_held: int) -> str:
        line = self.format(record)
        if num_held:
            line += f" (and {num_held} more like this)"
        if self.num_lost:
            line += f" ({self.num_lost} lines before it could not be written)"
        return line


def log_to_standard_error() -> None:
    """Send the log records of this process to standard error, bounded and without blocking."""
    logging.basicConfig(level=logging.INFO, handlers=[EngineLog(2)])


def _cut(raw: bytes) -> bytes:
    """Cut the middle out of a line that is too long; a traceback's reason is at its end."""
    room = MAX_LINE_BYTES - 1
    if len(raw) <= room:
        return raw
    head = room // 4
    return raw[:head] + _ELLIPSIS + raw[len(raw) - room + head + len(_ELLIPSIS) :]
