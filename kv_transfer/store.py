"""Interface between the pooled connector and a store of KV units, and its configuration.

A store maps keys to immutable byte strings and may lose any of them at any time: it is a cache.
Every failure of a store (absent, full, slow, frozen, dead) is a miss or a drop that costs no more
than ``timeout_s``, and never an exception. The caller gives values their meaning and must check
that they come back unchanged: put a checksum into the value.
"""

import importlib
from collections.abc import Sequence
from typing import Literal, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.errors import TransferError
from kv_transfer.layout import ROW_TOKENS

MAX_KEY_BYTES = 64
"""Longest key; a longer one is never present and never stored."""

PutOutcome = Literal["stored", "present", "dropped"]
"""Result of a put: ``stored`` now, ``present`` before, or ``dropped`` for any reason."""

STORE_BACKENDS = {
    "shm": "kv_transfer.stores.shm:ShmStore",
    "ray": "kv_transfer.stores.ray:RayStore",
    "mooncake": "kv_transfer.stores.mooncake:MooncakeStore",
}
"""Classes of the built-in stores."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice of a store, and its limits.

    Attributes:
        backend: ``"shm"`` (engines of one node), ``"ray"`` or ``"mooncake"`` (engines of one
            cluster), or ``"module:Class"`` of a class whose constructor takes this config.
        capacity_bytes: Most bytes of values kept. For ``shm`` and ``ray`` of the whole store; the
            engine that starts the store sets it. For ``mooncake`` the memory that this engine
            contributes.
        address: ``shm``: any name, ``name`` if it is empty. ``ray``: of the Ray cluster, ``""``
            for the one of this node. ``mooncake``: ``host:port`` of the master.
        name: ``shm`` and ``ray``: stores of different names are separate. When it is empty the
            connector derives one that is equal in engines with the same KV.
        unit_tokens: Tokens of one value. The same in every engine that shares the store, and a
            multiple of the block size of each.
        timeout_s: Longest time that one call waits for the store.
        lease_s: How long a value stays protected after ``get`` unless it is released earlier, and
            how long a put may take. The engine that starts the store sets it.
    """

    backend: str
    capacity_bytes: int
    address: str = ""
    name: str = ""
    unit_tokens: int = 256
    timeout_s: float = 0.25
    lease_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "unit_tokens", "timeout_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.unit_tokens % ROW_TOKENS:
            raise ValueError(
                f"unit_tokens must be a multiple of {ROW_TOKENS}, got {self.unit_tokens}"
            )


class StoreCounters(msgspec.Struct, kw_only=True):
    """Totals of one client. Owner: its thread; other threads only read single numbers.

    Attributes:
        hits: Values that ``get`` returned: units that a load got.
        misses: Keys that ``num_present`` or ``get`` was asked for and did not find.
        puts: Values stored.
        drops: Values not stored although the key had none: the store was slow, full or away.
        errors: Calls that failed because the store was down, silent, or sent nonsense; poisoned
            values among them.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    drops: int = 0
    errors: int = 0


class Lease(Protocol):
    """Value with the store's promise not to evict it for ``lease_s``."""

    @property
    def value(self) -> NDArray[np.uint8]:
        """Value, 1-D and read-only. May be the store's own memory: copy before ``release``."""

    def release(self) -> bool:
        """End the lease; idempotent, the first answer stays.

        Returns:
            True: the value was protected from ``get`` until now. False: the lease had ended, or
            the store can no longer tell; the bytes read may belong to another value.
        """


class KVStore(Protocol):
    """Client of a store. Used from ONE thread.

    A call waits at most ``timeout_s``; copying the value comes on top. While a store does not
    answer, its clients skip most calls instead of waiting each time.
    """

    def num_present(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, are stored at this moment."""

    def get(self, keys: Sequence[bytes]) -> Sequence[Lease]:
        """Lease the values of the keys, from the first on, up to the first that is missing."""

    def put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        """Store a copy of a value (1-D, contiguous) unless its key has one.

        Of two that put the same key at once, one stores. A value larger than the whole store is
        dropped.
        """

    def discard(self, key: bytes) -> None:
        """Make a key's value, which proved wrong, unavailable, so that the next put replaces it.

        Best effort. Leases on the value, also the caller's own, are not affected.
        """

    def counters(self) -> StoreCounters:
        """Return the live totals, which keep changing."""

    def close(self) -> None:
        """Release all that this client holds; idempotent. The memory of leases stays valid."""


def make_store(config: StoreConfig) -> KVStore:
    """Make a client. The store itself need not be up, now or ever.

    Raises:
        TransferError: When the backend is unknown, or something that it needs is not installed.
    """
    target = STORE_BACKENDS.get(config.backend, config.backend)
    module_name, separator, class_name = target.partition(":")
    if not (separator and module_name and class_name):
        raise TransferError(
            f"unknown KV store {config.backend!r}: use one of {sorted(STORE_BACKENDS)} or "
            "'module:Class'"
        )
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TransferError(f"cannot load KV store {config.backend!r}: {error}") from error
    return cast("KVStore", factory(config))
