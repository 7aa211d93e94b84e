"""Exclusive locks of boards: one locked file per board, in a folder of the user.

Two processes that open the same chip hang or fail with unhelpful errors, and a board that was not
closed can hang the next process that opens it. The lock is the kernel's and ends with its process,
however that ends; the file's content survives. A file that can be locked and still names a process
shows that this process died with the board open.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

_BOARD = re.compile(r"[0-9A-Za-z:.]+")


class BoardLocks:
    """Locks of several boards, all or none, held from construction to `release`.

    Attributes:
        boards: The boards' names as given.
        left_open: Boards that a process had open when it died.
        folder: Folder of the lock files.
    """

    def __init__(self, boards: Sequence[str], folder: Path | None = None) -> None:
        """Lock the boards, without waiting.

        Args:
            boards: Their names, PCI addresses or digits.
            folder: Folder of the lock files; None is the user's own in the temporary folder.

        Raises:
            DeviceError: Another process holds one of them (named), or the files cannot be written.
        """
        self.boards = tuple(sorted(set(boards)))
        self._files: dict[str, int] = {}
        self.left_open: tuple[str, ...] = ()
        folder = folder or Path(tempfile.gettempdir()) / f"ttserve-boards-{os.getuid()}"
        self.folder = folder
        if not self.boards:
            return
        try:
            _make_private(folder)
            for board in self.boards:
                self._lock(board)
            self.left_open = tuple(board for board in self.boards if self._holder(board))
        except OSError as error:
            self._unlock()
            raise DeviceError(
                f"cannot lock boards {', '.join(self.boards)} with files in {folder}: {error}; "
                "give this process a writable temporary folder (TMPDIR)"
            ) from error
        except DeviceError:
            self._unlock()
            raise

    def mark_open(self) -> None:
        """Record that this process is about to open the boards."""
        for file in self._files.values():
            _write(file, f"{os.getpid()}\n")

    def mark_closed(self) -> None:
        """Record that the boards were closed and need no reset."""
        for file in self._files.values():
            _write(file, "")

    def release(self) -> None:
        """Release the locks. Idempotent."""
        self._unlock()

    def file_of(self, board: str) -> Path:
        """Return the lock file of a board; deleting it removes the record of a dead process."""
        return self.folder / f"{board}.lock"

    def _lock(self, board: str) -> None:
        if _BOARD.fullmatch(board) is None:
            raise DeviceError(f"{board!r} is not a board; TT_VISIBLE_DEVICES is a list like 0,1")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.file_of(board), flags, 0o600)
        self._files[board] = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder(board)
            whose = f"process {holder}" if holder else "another process"
            raise DeviceError(
                f"board {board} is in use by {whose}; end it, or give this process other boards "
                "with TT_VISIBLE_DEVICES"
            ) from None

    def _holder(self, board: str) -> str:
        return os.pread(self._files[board], 32, 0).decode(errors="replace").strip()

    def _unlock(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                os.close(file)
        self._files.clear()


def _make_private(folder: Path) -> None:
    """Create the folder, or check that it belongs to the user: its parent is world-writable."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
