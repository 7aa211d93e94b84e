"""Stack dumps of a stalled engine, requested and logged by its parent process.

A call that does not return may hold the interpreter lock, so the engine cannot dump itself. The
parent sends a signal; `faulthandler` handles it without the interpreter and writes every thread's
stack to an unnamed file that the parent created and reads. The engine itself reports whether it
stalls (`replicas.watchdog`); an engine that sends no beats at all counts as stalled, too.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.engine_process.parent import EngineReport

logger = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR2
"""No library in an engine uses this signal."""
MAX_DUMP_BYTES = 1 << 16
"""Bytes of a dump that are logged; faulthandler writes at most 100 frames of 100 threads."""

Turn = Literal["stalls", "moves"]


class StallWatch:
    """Detector of an engine's stalls; reports each beginning and end once. Pure.

    Counts its own checks and reads no clock, as `HangWatch` does.

    Args:
        max_silent_looks: The engine also counts as stalled after this many checks without a beat.
    """

    def __init__(self, max_silent_looks: int) -> None:
        self._max_silent_looks = max_silent_looks
        self._num_silent_looks = 0
        self.is_stalled = False

    def look(self, says: Sequence[bool]) -> Turn | None:
        """Take what the engine has said since the last look.

        Args:
            says: For each beat in order, whether the engine reports a stall.
        """
        self._num_silent_looks = 0 if says else self._num_silent_looks + 1
        # Without a beat the state stays until the silence exceeds the limit.
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
    """Logger of one engine's stalls: its activity and stacks, once each. Owns the dump file.

    Args:
        process_id: The engine's process id, for log lines.
        process_fd: Its pidfd, which unlike the id is never reused; owned from now on.
        dump_fd: The file that the engine writes its stacks to; owned from now on.
        look_s: Seconds between two checks.
        stall_s: Silence in seconds after which the engine counts as stalled.
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
        # A dump is read one check after it was requested: by then it has been written.
        self._is_asked = False

    @property
    def is_stalled(self) -> bool:
        """Whether the engine stalls, according to its latest beats."""
        return self._watch.is_stalled

    def look(self, said: Sequence[EngineReport]) -> None:
        """Process the engine's reports since the last check; log a stall's beginning and end."""
        self._num_looks += 1
        if self._is_asked:
            self._is_asked = False
            self._log_dump()
        beats = [report for report in said if report.beat is not None]
        for report in beats:
            self._doing = report.doing or self._doing
        turn = self._watch.look([bool(report.doing) for report in beats])
        if turn == "stalls":
            self._num_looks = 0
            self._begin()
        elif turn == "moves":
            logger.warning(
                "engine pid=%d has recovered from a stall of %.1f s", self._process_id,
                self._num_looks * self._look_s,
            )  # fmt: skip
            self._doing = ""

    def close(self) -> None:
        """Log a requested dump if there is one, and close the descriptors."""
        if self._is_asked:
            self._log_dump()
        os.close(self._dump_fd)
        os.close(self._process_fd)

    def _begin(self) -> None:
        state = kernel_state(self._process_id)
        logger.warning(
            "engine pid=%d stalls (process state %s): %s", self._process_id, state,
            self._doing or "it sends no beats",
        )  # fmt: skip
        # A stopped process (state T) would dump only after it resumes, when it is of no use.
        if not state.startswith("T"):
            # Parent and engine share one file position. The previous dump is already logged.
            os.ftruncate(self._dump_fd, 0)
            os.lseek(self._dump_fd, 0, os.SEEK_SET)
            try:
                signal.pidfd_send_signal(self._process_fd, DUMP_SIGNAL)
            except ProcessLookupError:
                return
            self._is_asked = True

    def _log_dump(self) -> None:
        raw = os.pread(self._dump_fd, MAX_DUMP_BYTES, 0)
        stacks = raw.decode(errors="replace") or "none: it did not answer the signal"
        logger.warning("stacks of engine pid=%d:\n%s", self._process_id, stacks)


def dump_stacks_to(fd: int) -> None:
    """Make this process answer the signal; called by the engine."""
    # The interpreter's end restores what was there before: by default the signal would end the
    # process, and an engine that ends slowly may still be asked for its stacks.
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
    faulthandler.register(DUMP_SIGNAL, file=fd)


def new_dump_file() -> int:
    """Create an unnamed in-memory file for an engine's stacks; return its descriptor."""
    return os.memfd_create("ttserve-stacks", os.MFD_CLOEXEC)


def kernel_state(process_id: int, proc: Path = Path("/proc")) -> str:
    """Return a process's state such as "D (disk sleep)"; empty if the process is gone."""
    try:
        lines = (proc / str(process_id) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State")), "")
