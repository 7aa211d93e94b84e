"""API keys: which tenant a request's key belongs to, from a file of hashed keys.

The file holds the SHA-256 of each key. A fast hash is enough for the keys that `new_key` makes of
256 random bits: nothing can be guessed that a slow hash would protect. A shared key is what the
user has chosen; its hash is in a file that only its owner can read. Keys are looked up by their
hash, so the time of a look-up says nothing about how much of a wrong key is right.

The file is read again when it changes, in a thread. If the new one cannot be read, or is not valid,
the keys before it stay; the log and a metric report it.

Owner: an `ApiKeys` owns the table of one file in one process. The table is replaced as a whole.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from cluster.config.schema import MAX_TENANT_CHARS, KeyTenant, convert
from cluster.edge.tenants import Tenant
from cluster.errors import AuthenticationError, ClusterConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
CHECK_INTERVAL_S = 1.0
_MAX_DEPTH = 16
_KEY_BYTES = 32
_KEY_PREFIX = "tts-"
_MAX_KEY_BYTES = 256
_HASH_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_SHARED_KEY = re.compile(rf"(?! )[\x20-\x7e]{{1,{_MAX_KEY_BYTES}}}(?<! )")
_TENANT_NAME = re.compile(rf"[\x21-\x7e]{{1,{MAX_TENANT_CHARS}}}")
_BEARER = b"bearer "
_REFUSAL = "no valid API key; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader, which refuses a tenant that is there twice instead of dropping one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len({repr(key) for key in keys}):
            raise yaml.constructor.ConstructorError(problem_mark=node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def new_key() -> tuple[str, str]:
    """Return a new key, and its line for the file of keys."""
    text = base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).decode().rstrip("=")
    key = _KEY_PREFIX + text
    return key, _HASH_PREFIX + _digest(key.encode()).hex()


def shared_key_entry(key: str) -> str:
    """Return the entry of the one tenant of a key that all clients share, an admin.

    A newline at the key's end, as in the file of a secret, is no part of it.

    Raises:
        ClusterConfigError: No request could show the key.
    """
    key = key.rstrip("\r\n")
    if not _SHARED_KEY.fullmatch(key):
        raise ClusterConfigError(
            f"an API key must have 1 to {_MAX_KEY_BYTES} visible ASCII characters, and no space at "
            "its beginning or end"
        )
    return f'default: {{keys: ["{_HASH_PREFIX}{_digest(key.encode()).hex()}"], admin: true}}\n'


def parse_keys(text: str, where: str) -> dict[bytes, Tenant]:
    """Return the tenant of each key by the key's hash.

    Args:
        text: YAML, a mapping of tenants' names to `KeyTenant`.
        where: Name of the file, for messages.

    Raises:
        ClusterConfigError: The file is not valid; the message names the tenant but shows no key.
    """
    try:
        _check_depth(text)
        raw = yaml.load(text, _Loader)
    except Exception as error:  # noqa: BLE001 - a file must end no thread
        # PyYAML's constructors raise any error, such as ValueError for the date 2024-13-45.
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ClusterConfigError(
            f"{where}{line}: this is not YAML, or has a name twice; list several keys of one "
            "tenant under `keys`, and quote names that look like dates or numbers"
        ) from None
    if not isinstance(raw, dict) or not raw:
        raise ClusterConfigError(
            f"{where} must map names of tenants to their keys; see docs/keys.md"
        )
    tenants: dict[bytes, Tenant] = {}
    for name, fields in raw.items():
        if not isinstance(name, str) or not _TENANT_NAME.fullmatch(name):
            raise ClusterConfigError(
                f"{where}: a tenant's name has 1 to {MAX_TENANT_CHARS} visible ASCII characters"
            )
        entry = convert(fields, KeyTenant, f"{where}: {name}")
        models = None if entry.models is None else frozenset(entry.models)
        tenant = Tenant.limited(name, entry, is_admin=entry.admin, models=models)
        for i, key in enumerate(entry.keys):
            if not _HASH.fullmatch(key):
                raise ClusterConfigError(
                    f"{where}: {name}.keys[{i}] must be sha256: and 64 hexadecimal digits, as "
                    "`ttserve keys new` prints it"
                )
            digest = bytes.fromhex(key.removeprefix(_HASH_PREFIX))
            if digest in tenants:
                raise ClusterConfigError(f"{where}: {name}.keys[{i}] is there twice")
            tenants[digest] = tenant
    return tenants


def _check_depth(text: str) -> None:
    """Refuse deep nesting, which would overflow the stack of libyaml's composer.

    Raises:
        yaml.YAMLError: It is deeper than any valid file, or this is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError("too deep")


def read_keys(path: str) -> dict[bytes, Tenant]:
    """Read a file of keys that no other user can change; the rest as `parse_keys`."""
    where = f"file of API keys {path}"
    try:
        with Path(path).open(encoding="utf-8") as file:
            # Check the open file: the path could lead to another one by now.
            info = os.fstat(file.fileno())
            if info.st_uid not in {0, os.geteuid()} or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ClusterConfigError(
                    f"{where}: other users can change it; it must belong to root or to this user, "
                    "and be writable for the owner alone (`chmod 640`)"
                )
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        # A decoder's message would show the bytes that it could not decode.
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ClusterConfigError(f"{where}: {reason}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ClusterConfigError(f"{where} is larger than {MAX_FILE_BYTES} bytes")
    return parse_keys(text, where)


class ApiKeys:
    """The keys of a file that may change.

    Args:
        path: Path of the file.

    Attributes:
        num_failed_reads: Versions of the file that could not be used; the keys before them stay.

    Raises:
        ClusterConfigError: The file cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._version = _version(path)
        self._tenants: Mapping[bytes, Tenant] = read_keys(path)
        self._has_failed = False
        self.num_failed_reads = 0

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Return the tenant of a request's key.

        Raises:
            AuthenticationError: There is no key, or no valid one; the answer does not say which.
        """
        key = _presented(headers)
        if key is not None and len(key) <= _MAX_KEY_BYTES:
            tenant = self._tenants.get(_digest(key))
            if tenant is not None:
                return tenant
        raise AuthenticationError(_REFUSAL)

    def refresh(self) -> None:
        """Read the file again if it has changed; keep the keys if it cannot be used.

        A file that could not be used is read at each refresh, as the reason may pass without a
        change of the file. Only its first failure is counted and logged.
        """
        version = _version(self._path)
        is_changed = version != self._version
        if not is_changed and not self._has_failed:
            return
        self._version = version
        self._has_failed = True
        try:
            self._tenants = read_keys(self._path)
        except ClusterConfigError as error:
            if is_changed:
                self.num_failed_reads += 1
                logger.error("keeping the API keys of the file before: %s", error)
        else:
            self._has_failed = False
            logger.info("read %d API keys", len(self._tenants))

    def follow(self) -> None:
        """Refresh for ever; for a thread of its own, so that a slow disk delays no request."""
        while True:
            time.sleep(CHECK_INTERVAL_S)
            try:
                self.refresh()
            except Exception:
                # Otherwise no later change would act, such as the removal of a stolen key.
                self.num_failed_reads += 1
                logger.exception("keeping the API keys of the file before")


@cache
def shared_keys(path: str) -> ApiKeys:
    """Return the keys of a file, which the whole process shares, and follow the file.

    The client guard and the application both need them, and Serve makes the guard by itself.
    """
    keys = ApiKeys(path)
    threading.Thread(target=keys.follow, name="api-keys", daemon=True).start()
    return keys


def _version(path: str) -> tuple[int, ...] | None:
    """Return what changes with the file, also where a Kubernetes mount swaps a link to it."""
    try:
        info = Path(path).stat()
    except OSError:
        return None
    # Only the time of the last change of status shows a new mode or owner.
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino, info.st_dev


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key that a request shows, from `Authorization` before `x-api-key`."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        is_key = name in {b"authorization", b"x-api-key"}
        if is_key and found.setdefault(name, value) != value:
            return None
    bearer = found.get(b"authorization", b"")
    if bearer[: len(_BEARER)].lower() == _BEARER:
        return bearer[len(_BEARER) :].strip()
    return found.get(b"x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
