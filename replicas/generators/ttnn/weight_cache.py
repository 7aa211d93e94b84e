"""Cache on disk of a model's converted weights, for later starts.

A conversion is a folder with one file per tensor and a manifest with their sizes and checksums. It
is written beside its final place and renamed when complete, so that readers never see a partial
one. Of several processes that convert the same weights, the one that holds the lock file writes.
The callers define the files' content. An unreadable or unwritable cache costs time, but never fails
a start: callers continue without it.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from replicas.generators.fingerprint import file_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

Files: TypeAlias = dict[str, tuple[int, str]]
"""File name -> size in bytes, and hexadecimal xxh3 of the content."""

_MANIFEST = "manifest.json"


class DamagedCacheError(Exception):
    """Damaged conversion on disk; names the file and the defect."""


class WeightCache:
    """Location of one conversion on disk.

    Owns ``folder``, and beside it ``folder``.partial and ``folder``.lock.
    """

    def __init__(self, folder: Path) -> None:
        """Set the location; accesses no file.

        Args:
            folder: Folder of this conversion only; its parents are created when it is written.
        """
        self.folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")

    def read(self, names: Sequence[str]) -> CachedFiles | None:
        """Open the conversion.

        Args:
            names: The exact files of the conversion.

        Returns:
            None if there is none.

        Raises:
            DamagedCacheError: It cannot be read, or has other files.
        """
        try:
            raw = (self.folder / _MANIFEST).read_bytes()
        except FileNotFoundError:
            if self.folder.exists():
                raise DamagedCacheError(f"{self.folder} has no {_MANIFEST}") from None
            return None
        except OSError as error:
            raise DamagedCacheError(f"{self.folder}: {error.strerror}") from error
        try:
            files = msgspec.json.decode(raw, type=Files)
        except msgspec.DecodeError as error:
            raise DamagedCacheError(f"{self.folder / _MANIFEST}: {error}") from error
        if set(files) != set(names):
            raise DamagedCacheError(f"{self.folder} has other files than this model's")
        return CachedFiles(self.folder, files)

    @contextmanager
    def writing(self) -> Iterator[CacheWriter | None]:
        """Write the conversion, and replace an earlier one when the block ends without an error.

        Yields:
            The writer; None if another process is writing, or the folder is unwritable (logged).
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            lock = self.folder.with_name(f"{self.folder.name}.lock").open("w")
        except OSError as error:
            logger.warning("converted weights are not kept: %s", error)
            yield None
            return
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            except OSError as error:  # a file system without locks
                logger.warning("converted weights are not kept: %s: %s", lock.name, error)
                yield None
                return
            writer = CacheWriter(self._partial)
            try:
                yield writer
                writer.commit(self.folder)
            finally:
                shutil.rmtree(self._partial, ignore_errors=True)


class CachedFiles:
    """Reader of the files of one conversion. Owns nothing."""

    def __init__(self, folder: Path, files: Files) -> None:
        """Check the files' sizes against the manifest.

        Raises:
            DamagedCacheError: A file is missing or has another size.
        """
        self._folder = folder
        self._files = files
        for name, (size, _) in files.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise DamagedCacheError(f"{folder / name}: {error.strerror}") from error
            if found != size:
                raise DamagedCacheError(f"{folder / name} has {found} bytes instead of {size}")

    def path(self, name: str) -> Path:
        """Return a file's path after verifying its checksum.

        Raises:
            DamagedCacheError: The content differs or cannot be read.
        """
        path = self._folder / name
        try:
            found = file_digest(path).hex()
        except OSError as error:
            raise DamagedCacheError(f"{path}: {error.strerror}") from error
        if found != self._files[name][1]:
            raise DamagedCacheError(f"{path} does not match its checksum")
        return path


class CacheWriter:
    """Writer of the files of one conversion. Owns its folder until ``commit`` renames it."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, and remove the remains of a process that died."""
        self._folder = folder
        self._files: Files = {}
        self._has_failed = False
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, name: str, dump: Callable[[Path], None]) -> None:
        """Write one file; does nothing after a failure, which is logged.

        Args:
            name: File name.
            dump: Function that writes the file; raises OSError or RuntimeError on failure.
        """
        if self._has_failed:
            return
        path = self._folder / name
        try:
            self._folder.mkdir(exist_ok=True)
            dump(path)
            self._files[name] = (path.stat().st_size, file_digest(path).hex())
        except (OSError, RuntimeError) as error:
            self._fail(error)

    def commit(self, folder: Path) -> None:
        """Move the files to their final place if all were written."""
        if self._has_failed:
            return
        try:
            (self._folder / _MANIFEST).write_bytes(msgspec.json.encode(self._files))
            if folder.exists():
                shutil.rmtree(folder)
            self._folder.rename(folder)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        shutil.rmtree(self._folder, ignore_errors=True)
        logger.warning("converted weights are not kept in %s: %s", self._folder, error)
