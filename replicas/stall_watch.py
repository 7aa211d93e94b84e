"""What an engine's parent does when the engine stalls: it lets it say, once, where it stands.

A call that does not come back may keep the interpreter to itself, so nothing in the engine can be
counted on: the parent sends a signal, `faulthandler` answers it from its handler without the
interpreter, and writes every thread's stack to a file without a name that the parent made and
reads. Whether it stalls the engine says itself as long as it can (`replicas.engine.pulse`, the one
judge); of one that says nothing at all its silence does.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.engine.reports import EngineReport

logger = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR2
"""Nothing that an engine computes with uses it."""
MAX_DUMP_BYTES = 1 << 16
"""More of a dump is not told: it has a hundred frames of a hundred threads at most."""

Turn = Literal["stalls", "moves"]


class StallWatch:
    """Tells when an engine begins to stall, and when it moves again; each once, by turns. Pure.

    Counts its own looks and reads no clock, as `HangWatch` does.

    Args:
        max_silent_looks: After so many without a word of it, it stalls too.
    """

    def __init__(self, max_silent_looks: int) -> None:
        self._max_silent_looks = max_silent_looks
        self._num_silent_looks = 0
        self.is_stalled = False

    def look(self, says: Sequence[bool]) -> Turn | None:
        """Take what the engine has said since the last look.

        Args:
            says: Of each beat, whether it stalls, in order.
        """
        self._num_silent_looks = 0 if says else self._num_silent_looks + 1
        # One that has fallen silent is as it was until it has been so for too long.
        is_stalled = (
            says[-1]
            if says
            else self.is_stalled or self._num_silent_looks >= self._max_silent_looks
        )
        if is_stalled == self.is_stalled:
            return None
        self.is_stalled = is_stalled
        return "stalls" if is_stalled else "moves"


class StallReports:
    """Logs each stall of one engine once: what it was doing, and its stacks. Owner of their file.

    Args:
        process_id: The engine's, for a person.
        process_fd: The same as a descriptor, which is never another's; owned from now on.
        dump_fd: The file that it writes its stacks to; owned from now on.
        look_s: Seconds from one look to the next.
        stall_s: How long it may be silent before it stalls.
    """

    def __init__(
        self, process_id: int, process_fd: int, dump_fd: int, look_s: float, stall_s: float
    ) -> None:
        self._process_id = process_id
        self._process_fd = process_fd
        self._dump_fd = dump_fd
        self._look_s = look_s
        self._watch = StallWatch(math.ceil(stall_s / look_s))
        self._num_looks = 0
        self._doing = ""
        # A dump is read one look after it was asked for: by then it is written.
        self._is_asked = False

    @property
    def is_stalled(self) -> bool:
        """Whether it stalls, as far as was heard."""
        return self._watch.is_stalled

    def look(self, said: Sequence[EngineReport]) -> None:
        """Take what the engine has said since the last look."""
        self._num_looks += 1
        if self._is_asked:
            self._is_asked = False
            self._tell_dump()
        beats = [report for report in said if report.beat is not None]
        for report in beats:
            self._doing = report.doing or self._doing
        turn = self._watch.look([bool(report.doing) for report in beats])
        if turn == "stalls":
            self._num_looks = 0
            self._begin()
        elif turn == "moves":
            logger.warning(
                "engine pid=%d moves again after %.1f s", self._process_id,
                self._num_looks * self._look_s,
            )  # fmt: skip
            self._doing = ""

    def close(self) -> None:
        """Read no more; what was asked for and has come is told first."""
        if self._is_asked:
            self._tell_dump()
        os.close(self._dump_fd)
        os.close(self._process_fd)

    def _begin(self) -> None:
        state = kernel_state(self._process_id)
        logger.warning(
            "engine pid=%d stalls (%s): %s", self._process_id, state,
            self._doing or "nothing is heard of it",
        )  # fmt: skip
        # One that is stopped would answer when it goes on, which nobody wants to know.
        if not state.startswith("T"):
            # Both ends of the file share one position: the last dump is told, and need not stay.
            os.ftruncate(self._dump_fd, 0)
            os.lseek(self._dump_fd, 0, os.SEEK_SET)
            try:
                signal.pidfd_send_signal(self._process_fd, DUMP_SIGNAL)
            except ProcessLookupError:
                return
            self._is_asked = True

    def _tell_dump(self) -> None:
        raw = os.pread(self._dump_fd, MAX_DUMP_BYTES, 0)
        stacks = raw.decode(errors="replace") or "it did not answer"
        logger.warning("stacks of engine pid=%d:\n%s", self._process_id, stacks)


def new_dump_file() -> int:
    """A file in memory, without a name, for an engine's stacks."""
    return os.memfd_create("ttserve-stacks", os.MFD_CLOEXEC)


def kernel_state(process_id: int, proc: Path = Path("/proc")) -> str:
    """What the kernel says a process does, for one "D (disk sleep)"; empty if it is gone."""
    try:
        lines = (proc / str(process_id) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State")), "")
