"""Refuses files that other users of this host can read, change or replace.

Never repairs permissions: a file that another user could have changed or read stays untrusted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
# As for a `key_file`, its group may read it: a Kubernetes Secret with `fsGroup` needs that.
_OTHERS_USE = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
_START = (
    'Start Ray with the variables of `ttserve environment` (eval "$(ttserve environment)" before '
    "`ray start`), which name a new folder of your own"
)
_HAPROXY = f", who could then read and change all traffic through HAProxy. {_START}"
_SECRET = ": its content would let them run any program as this user. "


class UnsafeFileError(Exception):
    """Another user could read, change, replace or make a file; the message says what to do."""


def require_private(path: Path) -> None:
    """Refuse a file that another user could have created or could change; it need not exist yet.

    Every folder above it, up to a sticky one such as /tmp, must belong to this user or root and not
    be writable by others. The file must belong to this user and not be a link. Modes do not matter
    below a folder of this user that no other user can enter.

    Raises:
        UnsafeFileError: A condition is not met, or a folder does not exist; names it and says why.
    """
    path = Path(os.path.abspath(path))
    try:
        is_closed = _require_folders(path, _HAPROXY)
    except FileNotFoundError as error:
        raise UnsafeFileError(
            f"{error.filename} does not exist: its folder may have been cleaned up. {_START}"
        ) from None
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    _require_owner(path, info, {os.geteuid()}, _HAPROXY)
    if stat.S_ISLNK(info.st_mode):
        raise UnsafeFileError(f"{path} is a symbolic link{_HAPROXY}")
    if info.st_mode & _OTHERS_WRITE and not is_closed:
        raise UnsafeFileError(f"{path} can be written by other users{_HAPROXY}")


def require_secret(path: Path, advice: str = "", consequence: str = _SECRET) -> None:
    """Refuse a file that another user could read, change or replace.

    The conditions are those of `require_private`, except that the file may be a link and may belong
    to root. Other users may have no access to it; its group may read it.

    Args:
        path: The file.
        advice: Advice to append to the error message.
        consequence: What another user could do with the content, for the same.

    Raises:
        UnsafeFileError: A condition is not met; names the file or folder, and says why.
        OSError: The file does not exist, or this user cannot access it.
    """
    advice = consequence + advice
    path = Path(os.path.abspath(path))
    _require_folders(path, advice)
    path = path.resolve()
    is_closed = _require_folders(path, advice)
    info = path.stat()
    _require_owner(path, info, {0, os.geteuid()}, advice)
    if info.st_mode & _OTHERS_USE and not is_closed:
        mode = stat.S_IMODE(info.st_mode)
        raise UnsafeFileError(f"{path} can be used by other users (mode {mode:04o}){advice}")


def _require_folders(path: Path, advice: str) -> bool:
    """Check the folders above a file; return whether other users cannot enter one of them."""
    is_closed = False
    for folder in reversed(_folders(path)):
        info = folder.lstat()
        _require_owner(folder, info, {0, os.geteuid()}, advice)
        if stat.S_ISLNK(info.st_mode):
            is_closed = _require_folders(folder.resolve() / "_", advice) or is_closed
            continue
        is_closed = is_closed or _is_private(info)
        if info.st_mode & _OTHERS_WRITE and not is_closed:
            raise UnsafeFileError(f"{folder} can be written by other users{advice}")
    return is_closed


def _folders(path: Path) -> list[Path]:
    """Return the folders above a file, the nearest first, up to a sticky one such as /tmp.

    Only its owner can rename or delete a folder in a sticky one.
    """
    found: list[Path] = []
    for folder in path.parents:
        info = folder.lstat()
        is_sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if found and is_sticky and info.st_uid in {0, os.geteuid()}:
            break
        found.append(folder)
    return found


def _is_private(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_ENTER


def _require_owner(path: Path, info: os.stat_result, owners: set[int], advice: str) -> None:
    if info.st_uid not in owners:
        raise UnsafeFileError(f"{path} belongs to user {info.st_uid}{advice}")
