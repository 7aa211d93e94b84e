"""Reads the process table from /proc; it is empty on systems without /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One line of the process table.

    Attributes:
        process_id: Its id.
        parent_id: Id of its parent.
        session_id: Id of its session.
        num_threads: Its number of threads.
        started: Its start time in kernel ticks; distinguishes processes with a reused id.
        command: Its command line, with spaces between the arguments.
    """

    process_id: int
    parent_id: int
    session_id: int
    num_threads: int
    started: str
    command: str


def process_table(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Return every process except zombies, by id.

    Args:
        proc: Mount point of the kernel's process file system.
    """
    table = {}
    with contextlib.suppress(OSError):
        for folder in proc.iterdir():
            if folder.name.isdigit():
                # The process may have ended since it was listed.
                with contextlib.suppress(OSError):
                    # The name, which ends at the last parenthesis, may contain any characters.
                    stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    if stat[0] != "Z":
                        table[int(folder.name)] = Process(
                            int(folder.name), int(stat[1]), int(stat[3]), int(stat[17]), stat[19],
                            command.decode(errors="replace"),
                        )  # fmt: skip
    return table


def process_environ(process_id: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """Return the environment that a process was started with.

    Raises:
        OSError: The process has ended, or belongs to another user.
    """
    entries = (proc / str(process_id) / "environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}
