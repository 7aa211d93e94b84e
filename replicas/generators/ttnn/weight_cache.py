"""Keep one conversion of a model's weights in a folder, for the next start.

A conversion is a folder of one file per tensor and a manifest with their sizes and checksums. It is
written beside its place and renamed when it is whole, so nobody ever sees half of one; of several
processes that convert the same, the one that holds the lock file writes. What a file holds is the
caller's business. A cache that cannot be read or written costs time, never a start: callers go on
without it.
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
"""File name -> bytes, xxh3 of them in hexadecimal."""

_MANIFEST = "manifest.json"


class DamagedCacheError(Exception):
    """A conversion on disk that is not what was written; says which file and what is wrong."""


class WeightCache:
    """The place of one conversion on disk.

    Owner: ``folder``, and beside it ``folder``.partial and ``folder``.lock.
    """

    def __init__(self, folder: Path) -> None:
        """Say where it is; touches nothing.

        Args:
            folder: Of this conversion alone; its parents are made when it is written.
        """
        self.folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")

    def read(self, names: Sequence[str]) -> CachedFiles | None:
        """Open the conversion.

        Args:
            names: The files that it must consist of.

        Returns:
            None if there is none.

        Raises:
            DamagedCacheError: It cannot be read, or does not consist of these files.
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
            raise DamagedCacheError(f"{self.folder} holds other files than this model's")
        return CachedFiles(self.folder, files)

    @contextmanager
    def writing(self) -> Iterator[CacheWriter | None]:
        """Write the conversion; whatever is in its place is replaced when the block ends well.

        Yields:
            None if another process is writing it, or the folder cannot be written (warned about).
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
    """Reads the files of one conversion. Owner: nothing."""

    def __init__(self, folder: Path, files: Files) -> None:
        """Take what the manifest says.

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
        """Return where a file is, once its bytes are seen to be those that were written.

        Raises:
            DamagedCacheError: They are not, or cannot be read.
        """
        path = self._folder / name
        try:
            found = file_digest(path).hex()
        except OSError as error:
            raise DamagedCacheError(f"{path}: {error.strerror}") from error
        if found != self._files[name][1]:
            raise DamagedCacheError(f"{path} does not have the checksum that was written")
        return path


class CacheWriter:
    """Writes the files of one conversion. Owner: its folder, until ``commit`` renames it."""

    def __init__(self, folder: Path) -> None:
        """Begin; what another process left there when it died goes."""
        self._folder = folder
        self._files: Files = {}
        self._has_failed = False
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, name: str, dump: Callable[[Path], None]) -> None:
        """Write one file; after a failure, which is warned about, this does nothing.

        Args:
            name: File name.
            dump: Writes the file; raises OSError or RuntimeError where it cannot.
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
        """Put the files in their place, if all could be written."""
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
