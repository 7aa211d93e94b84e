"""What the pooled connector asks of a store of KV units, and how it gets one.

A store maps keys to immutable byte strings and may lose any of them at any time: it is a cache.
Everything that can go wrong with it (absent, full, slow, frozen, dead) is a miss or a drop that
costs no more than ``timeout_s``, and never an exception. What a value means, and whether it came
back unchanged, is the caller's business: put a checksum into the value.
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
"""What became of a put: ``stored`` now, ``present`` before, or ``dropped`` for whatever reason."""

STORE_BACKENDS = {
    "shm": "kv_transfer.stores.shm:ShmStore",
    "ray": "kv_transfer.stores.ray:RayStore",
    "mooncake": "kv_transfer.stores.mooncake:MooncakeStore",
}
"""The built-in stores and their classes."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which store to use, and its limits.

    Attributes:
        backend: ``"shm"`` (engines of one node), ``"ray"`` or ``"mooncake"`` (engines of one
            cluster), or ``"module:Class"`` of a class whose constructor takes this config.
        capacity_bytes: Most bytes of values kept. Of ``shm`` and ``ray`` for the whole store, as
            said by whoever starts it; of ``mooncake`` the memory that this engine contributes.
        address: ``shm``: any name, ``name`` if it is empty. ``ray``: of the Ray cluster, ``""``
            for the one of this node. ``mooncake``: ``host:port`` of the master.
        name: ``shm`` and ``ray``: stores of different names know nothing of each other. When it is
            empty the connector puts in one that engines with the same KV have in common.
        unit_tokens: Tokens of one value. The same in every engine that shares the store; a multiple
            of every one's block size.
        timeout_s: Longest time that one call waits for the store.
        lease_s: How long a value that was got stays protected unless it is released earlier, and
            how long a put may take. As said by whoever starts the store.
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
    """Totals of one client. Owner: its thread; others only read single numbers.

    Attributes:
        hits: Values that ``get`` returned: units that a load got.
        misses: Keys that ``num_present`` or ``get`` was asked for in vain.
        puts: Values stored.
        drops: Values not stored although nobody had stored them before: the store was slow, full
            or away.
        errors: Calls that failed because the store was down, silent, or talked nonsense; poisoned
            values among them.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    drops: int = 0
    errors: int = 0


class Lease(Protocol):
    """A value and the store's promise not to evict it for ``lease_s``."""

    @property
    def value(self) -> NDArray[np.uint8]:
        """The value, 1-D and read-only. May be the store's own memory: copy before ``release``."""

    def release(self) -> bool:
        """Give the value up; idempotent, the first answer stays.

        Returns:
            True: the value was protected from ``get`` until now. False: the lease had ended, or
            the store cannot tell any more; whatever was read may be bytes of another value.
        """


class KVStore(Protocol):
    """One client of a store. Used from ONE thread.

    A call waits at most ``timeout_s``; copying the value comes on top. While a store does not
    answer, its clients skip most calls instead of waiting each time.
    """

    def num_present(self, keys: Sequence[bytes]) -> int:
        """Count how many of the keys, from the first on, are stored. Promises nothing for later."""

    def get(self, keys: Sequence[bytes]) -> Sequence[Lease]:
        """Lease the values of the keys, from the first on, up to the first that is missing."""

    def put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        """Store a copy of a value (1-D, contiguous) unless its key has one.

        Of two that put the same key at once, one stores. A value larger than the whole store is
        dropped.
        """

    def discard(self, key: bytes) -> None:
        """Make a key's value, which proved wrong, unavailable, so that the next put replaces it.

        Best effort. Leases on the value, also the caller's own, stay as they are.
        """

    def counters(self) -> StoreCounters:
        """Return the totals, which go on changing."""

    def close(self) -> None:
        """Give everything up that this client holds; idempotent. Ends no lease's memory."""


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
