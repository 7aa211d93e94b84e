"""Whether other users of this host can change a file, or what stands in its place.

Looks and refuses; it never repairs: what somebody else could have changed cannot be trusted
afterwards either.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_ADVICE = (
    'Start Ray with the variables of `ttserve environment` (eval "$(ttserve environment)" before '
    "`ray start`), which name a new folder of your own"
)


class UnsafeFileError(Exception):
    """Another user could change, replace or make a file; the message says what to do."""


def require_private(path: Path) -> None:
    """Refuse a file, there or not yet, that somebody else could have put there or could change.

    Every folder above it, up to a sticky one such as /tmp, must be this user's or root's and not
    be writable by others; the file must be this user's own and no link. Where a folder of this
    user lets nobody else in, modes below it do not matter.

    Raises:
        UnsafeFileError: It is not so, or a folder is not there; names the file or folder, and why.
    """
    path = Path(os.path.abspath(path))
    is_closed = False
    try:
        folders = _folders(path)
    except FileNotFoundError as error:
        raise UnsafeFileError(
            f"{error.filename} is not there: its folder may have been cleaned away. {_ADVICE}"
        ) from None
    for folder in reversed(folders):
        info = folder.lstat()
        _require_owner(folder, info, {0, os.geteuid()})
        if stat.S_ISLNK(info.st_mode):
            require_private(folder.resolve() / "_")
            continue
        is_closed = is_closed or _lets_nobody_in(info)
        if info.st_mode & _OTHERS_WRITE and not is_closed:
            raise _unsafe(folder, "can be written by other users")
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    _require_owner(path, info, {os.geteuid()})
    if stat.S_ISLNK(info.st_mode):
        raise _unsafe(path, "is a symbolic link")
    if info.st_mode & _OTHERS_WRITE and not is_closed:
        raise _unsafe(path, "can be written by other users")


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


def _require_owner(path: Path, info: os.stat_result, owners: set[int]) -> None:
    if info.st_uid not in owners:
        raise _unsafe(path, f"belongs to user {info.st_uid}")


def _unsafe(path: Path, why: str) -> UnsafeFileError:
    return UnsafeFileError(
        f"{path} {why}, who could then do as they like with what goes through HAProxy. {_ADVICE}"
    )
