"""Whether other users of this host can read or change a file, or what stands in its place.

Looks and refuses; it never repairs: what another user could have changed or read cannot be trusted
afterwards either.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
# As for a `key_file`: a group may read, which a Kubernetes Secret with `fsGroup` needs.
_OTHERS_USE = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
_START = (
    'Start Ray with the variables of `ttserve environment` (eval "$(ttserve environment)" before '
    "`ray start`), which name a new folder of your own"
)
_HAPROXY = f", who could then do as they like with what goes through HAProxy. {_START}"
_SECRET = ": with what it holds they could run any program as this user. "


class UnsafeFileError(Exception):
    """Another user could read, change, replace or make a file; the message says what to do."""


def require_private(path: Path) -> None:
    """Refuse a file, there or not yet, that another user could have put there or could change.

    Every folder above it, up to a sticky one such as /tmp, must be this user's or root's and not
    be writable by others; the file must be this user's own and no link. Below a folder of this user
    that no other user may enter, modes do not matter.

    Raises:
        UnsafeFileError: It is not so, or a folder is not there; names the file or folder, and why.
    """
    path = Path(os.path.abspath(path))
    try:
        is_closed = _require_folders(path, _HAPROXY)
    except FileNotFoundError as error:
        raise UnsafeFileError(
            f"{error.filename} is not there: its folder may have been cleaned away. {_START}"
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


def require_secret(path: Path, advice: str = "") -> None:
    """Refuse a file that another user could read, change or replace.

    As `require_private`, but the file may be a link and root's, and no other user may use it. Its
    group may read it.

    Args:
        path: The file.
        advice: What to do, for the message.

    Raises:
        UnsafeFileError: It is not so; names the file or folder, and why.
        OSError: There is no such file, or this user may not look at it.
    """
    advice = _SECRET + advice
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
    """Check the folders above a file; returns whether one of them lets no other user in."""
    is_closed = False
    for folder in reversed(_folders(path)):
        info = folder.lstat()
        _require_owner(folder, info, {0, os.geteuid()}, advice)
        if stat.S_ISLNK(info.st_mode):
            is_closed = _require_folders(folder.resolve() / "_", advice) or is_closed
            continue
        is_closed = is_closed or _lets_nobody_in(info)
        if info.st_mode & _OTHERS_WRITE and not is_closed:
            raise UnsafeFileError(f"{folder} can be written by other users{advice}")
    return is_closed


def _folders(path: Path) -> list[Path]:
    """The folders above a file, the nearest first, that nobody but their owner can put there."""
    found: list[Path] = []
    for folder in path.parents:
        info = folder.lstat()
        is_sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if found and is_sticky and info.st_uid in {0, os.geteuid()}:
            break
        found.append(folder)
    return found


def _lets_nobody_in(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_ENTER


def _require_owner(path: Path, info: os.stat_result, owners: set[int], advice: str) -> None:
    if info.st_uid not in owners:
        raise UnsafeFileError(f"{path} belongs to user {info.st_uid}{advice}")
