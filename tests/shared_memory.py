"""The files of shared memory that given processes hold, from /proc: never those of the host."""

import contextlib
import os
from collections.abc import Iterable

FOLDER = "/dev/shm/"
_DELETED = " (deleted)"


def shared_memory_of(process_ids: Iterable[int]) -> set[str]:
    """Return the paths below /dev/shm that these processes have open or mapped now."""
    return {path for process_id in process_ids for path in _files(process_id)}


def _files(process_id: int) -> set[str]:
    paths: set[str] = set()
    # The process may have ended, and a descriptor may be closed, since it was listed.
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{process_id}/fd"):
            with contextlib.suppress(OSError):
                paths.add(os.readlink(descriptor.path))
    with contextlib.suppress(OSError), open(f"/proc/{process_id}/maps", encoding="utf-8") as maps:
        # Address, permissions, offset, device, inode, and a path where there is one.
        paths |= {
            columns[5].rstrip("\n") for line in maps if len(columns := line.split(None, 5)) > 5
        }
    return {path for path in paths if path.startswith(FOLDER) and not path.endswith(_DELETED)}
