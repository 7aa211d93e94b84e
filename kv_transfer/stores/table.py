"""Table of a store's values: which are kept, where, and which clients read or write them.

A slab of ``capacity_bytes`` is cut into slots as large as the largest value so far; the values of
one deployment are all equally large. A slot is *free*, *writing* (a put is under way), *stored*, or
*leased* (stored, and being read). Only stored slots are evicted, the longest unused first. A put
has two phases, so that no reader sees half a value. Pure: time comes in as ``now_s``.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kv_transfer.store import PutOutcome

SLOT_ALIGNMENT = 64
"""Slots start at cache lines."""

ClientId = int
"""Identifies a client while it is connected; never used twice."""


class PutPlace(NamedTuple):
    """Place that a put writes to; ``put_id`` is never reused, so a late commit hits no other."""

    put_id: int
    offset: int


class Grant(NamedTuple):
    """Leased value: bytes ``offset`` to ``offset + num_bytes`` of the slab, or ``content``."""

    lease_id: int
    offset: int
    num_bytes: int
    content: object


class SlotCounts(NamedTuple):
    """Number of slots in each state."""

    free: int
    writing: int
    stored: int
    leased: int


@dataclass(slots=True, eq=False)
class _Value:
    slot: int
    num_bytes: int
    content: object
    num_leases: int = 0
    is_discarded: bool = False
    """True once the key is removed; the slot is freed when the last lease ends."""


@dataclass(slots=True, eq=False)
class _Put:
    put_id: int
    key: bytes
    slot: int
    num_bytes: int
    deadline_s: float


@dataclass(slots=True, eq=False)
class _ReadLease:
    client: ClientId
    value: _Value
    deadline_s: float


@dataclass(eq=False)
class StoreTable:
    """Values, puts and leases of one store.

    Owner: the owner of the slab. A client puts one value at a time.

    A lease or put that is not ended within ``lease_s`` lapses. The slot of a lapsed lease may be
    evicted. The slot of a lapsed put may not: its writer may be frozen in the middle of it and
    resume later. So the slot stays *writing* until the client sends anything about it or is gone.
    The put can no longer succeed, and other clients may put the same key.

    Attributes:
        capacity_bytes: Size of the slab.
        lease_s: How long a lease or a put lasts.
    """

    capacity_bytes: int
    lease_s: float
    _slot_bytes: int = 0
    _num_slots: int = 0
    _next_id: int = 0
    _free: list[int] = field(default_factory=list)
    _values: OrderedDict[bytes, _Value] = field(default_factory=OrderedDict)
    """Values that can be found; the longest unused first."""
    _puts: dict[ClientId, _Put] = field(default_factory=dict)
    _writers: OrderedDict[bytes, _Put] = field(default_factory=OrderedDict)
    """Puts that may still succeed; the earliest deadline first."""
    _leases: OrderedDict[int, _ReadLease] = field(default_factory=OrderedDict)
    """Leases; the earliest deadline first."""

    def __repr__(self) -> str:
        """Show the number of slots in each state."""
        return f"StoreTable({self._slot_bytes} bytes per slot, {self.counts()})"

    # ---- reading

    def num_present(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, are stored. Counts as use of them."""
        num_present = 0
        for key in keys:
            if key not in self._values:
                break
            num_present += 1
        self._touch(keys[:num_present])
        return num_present

    def get(self, client: ClientId, keys: Sequence[bytes], now_s: float) -> list[Grant]:
        """Lease the values of the keys, from the first on, up to the first that is missing."""
        self._expire(now_s)
        num_present = self.num_present(keys)
        return [self._grant(client, self._values[key], now_s) for key in keys[:num_present]]

    def release(self, client: ClientId, lease_id: int, now_s: float) -> bool:
        """End a lease.

        Returns:
            False when it had lapsed before, or never was this client's.
        """
        self._expire(now_s)
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client:
            return False
        self._end_lease(lease_id)
        return True

    # ---- writing

    def begin_put(
        self, client: ClientId, key: bytes, num_bytes: int, now_s: float
    ) -> PutPlace | Literal["present", "dropped"]:
        """Start a put; ends an earlier put of the same client.

        A value larger than a slot resets the table to larger slots, empty, if no value is being
        read or written. Otherwise, or when all slots are in use, it is dropped. So is the second of
        two puts of one key at the same time.
        """
        self._expire(now_s)
        self.abort(client)
        if key in self._values:
            self._touch([key])
            return "present"
        if key in self._writers or not 0 < num_bytes <= self.capacity_bytes:
            return "dropped"
        slot = self._take_slot(num_bytes)
        if slot is None:
            return "dropped"
        put = _Put(self._new_id(), key, slot, num_bytes, now_s + self.lease_s)
        self._puts[client] = self._writers[key] = put
        return PutPlace(put.put_id, slot * self._slot_bytes)

    def commit(
        self, client: ClientId, put_id: int, now_s: float, content: object = None
    ) -> PutOutcome:
        """Make a value visible whose bytes are all written.

        Args:
            client: The client that began the put.
            put_id: From ``begin_put``.
            now_s: Monotonic clock.
            content: The value itself, where the slab is not real.

        Returns:
            ``present`` or ``dropped`` when the put had lapsed.
        """
        self._expire(now_s)
        put = self._puts.get(client)
        if put is None or put.put_id != put_id:
            return "dropped"
        if self._writers.get(put.key) is not put:
            self.abort(client)
            return "present" if put.key in self._values else "dropped"
        del self._puts[client], self._writers[put.key]
        self._values[put.key] = _Value(put.slot, put.num_bytes, content)
        return "stored"

    def abort(self, client: ClientId) -> None:
        """End the client's put, if it has one."""
        put = self._puts.pop(client, None)
        if put is None:
            return
        self._free.append(put.slot)
        if self._writers.get(put.key) is put:
            del self._writers[put.key]

    def discard(self, key: bytes) -> None:
        """Remove a key; readers keep its value until their leases end."""
        value = self._values.pop(key, None)
        if value is None:
            return
        value.is_discarded = True
        if value.num_leases == 0:
            self._free.append(value.slot)

    def drop_client(self, client: ClientId) -> None:
        """End the put and the leases of a client that is gone and can no longer write."""
        self.abort(client)
        for lease_id in [i for i, lease in self._leases.items() if lease.client == client]:
            self._end_lease(lease_id)

    # ---- state

    def counts(self) -> SlotCounts:
        """Return the number of slots in each state."""
        leased = {lease.value.slot for lease in self._leases.values()}
        num_stored = sum(value.num_leases == 0 for value in self._values.values())
        return SlotCounts(len(self._free), len(self._puts), num_stored, len(leased))

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        leased = {lease.value.slot for lease in self._leases.values()}
        slots = [
            *self._free,
            *(put.slot for put in self._puts.values()),
            *(value.slot for value in self._values.values() if value.num_leases == 0),
            *leased,
        ]
        assert sorted(slots) == list(range(self._num_slots))
        assert self._num_slots * self._slot_bytes <= self.capacity_bytes
        puts = set(self._puts.values())
        assert all(put in puts and put.key == key for key, put in self._writers.items())
        assert not self._writers.keys() & self._values.keys()
        values = {*self._values.values(), *(lease.value for lease in self._leases.values())}
        for value in values:
            assert value.num_leases == sum(x.value is value for x in self._leases.values())
            assert value.num_bytes <= self._slot_bytes
        assert not any(value.is_discarded for value in self._values.values())
        for ends in (self._leases, self._writers):
            deadlines = [end.deadline_s for end in ends.values()]
            assert deadlines == sorted(deadlines)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Record a use, the first key last: a later unit is useless without the earlier ones."""
        for key in reversed(keys):
            self._values.move_to_end(key)

    def _grant(self, client: ClientId, value: _Value, now_s: float) -> Grant:
        lease_id = self._new_id()
        self._leases[lease_id] = _ReadLease(client, value, now_s + self.lease_s)
        value.num_leases += 1
        return Grant(lease_id, value.slot * self._slot_bytes, value.num_bytes, value.content)

    def _end_lease(self, lease_id: int) -> None:
        value = self._leases.pop(lease_id).value
        value.num_leases -= 1
        if value.is_discarded and value.num_leases == 0:
            self._free.append(value.slot)

    def _take_slot(self, num_bytes: int) -> int | None:
        if num_bytes > self._slot_bytes and not self._enlarge_slots(num_bytes):
            return None
        if self._free:
            return self._free.pop()
        unused = next((key for key, value in self._values.items() if not value.num_leases), None)
        return self._values.pop(unused).slot if unused is not None else None

    def _enlarge_slots(self, num_bytes: int) -> bool:
        """Reset to larger slots, all free; return False while any value is read or written."""
        if self._leases or self._puts:
            return False
        self._values.clear()
        aligned = -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._slot_bytes = min(aligned, self.capacity_bytes)
        self._num_slots = self.capacity_bytes // self._slot_bytes
        self._free = list(reversed(range(self._num_slots)))
        return True

    def _expire(self, now_s: float) -> None:
        """End the leases and the chances of puts that have lapsed."""
        while self._leases and next(iter(self._leases.values())).deadline_s <= now_s:
            self._end_lease(next(iter(self._leases)))
        while self._writers and next(iter(self._writers.values())).deadline_s <= now_s:
            self._writers.popitem(last=False)
