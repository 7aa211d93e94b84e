"""The store's table: no value changes under a live lease, and no slot is lost or used twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.stores.table import Grant, PutPlace, SlotCounts, StoreTable

LEASE_S = 10.0
SLOT = 64
CAPACITY = 4 * SLOT
keys = st.integers(0, 6).map(lambda n: bytes([n]))
clients = st.integers(1, 3)


def make_table(capacity_bytes: int = CAPACITY) -> StoreTable:
    return StoreTable(capacity_bytes, LEASE_S)


def put(table: StoreTable, key: bytes, client: int = 1, size: int = SLOT, now_s: float = 0) -> str:
    place = table.begin_put(client, key, size, now_s)
    return table.commit(client, place.put_id, now_s) if isinstance(place, PutPlace) else place


class StoreMachine(RuleBasedStateMachine):
    """Drives a table and a slab, in which every open put, lapsed or not, keeps writing.

    Model: for each client its place, value and start of writing; and the live leases with their
    first contents.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.slab: dict[int, str] = {}
        self.now_s = 0.0
        self.num_puts = 0
        self.open: dict[int, tuple[bytes, PutPlace, str, float]] = {}
        self.known: dict[bytes, str] = {}
        self.leases: dict[int, tuple[int, int, str, float]] = {}

    def is_put_live(self, client: int) -> bool:
        return client in self.open and self.now_s < self.open[client][3] + LEASE_S

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.9, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(client=clients, key=keys, size=st.sampled_from([1, 8, SLOT, 2 * SLOT, CAPACITY + 1]))
    def begin(self, client: int, key: bytes, size: int) -> None:
        self.open.pop(client, None)
        others = [c for c in self.open if self.open[c][0] == key and self.is_put_live(c)]
        place = self.table.begin_put(client, key, size, self.now_s)
        if isinstance(place, PutPlace):
            assert not others
            assert 0 <= place.offset <= place.offset + size <= CAPACITY
            assert all(other[1].offset != place.offset for other in self.open.values())
            self.num_puts += 1
            self.open[client] = (key, place, f"put {self.num_puts}", self.now_s)

    @rule(client=clients)
    def write(self, client: int) -> None:
        if client in self.open:
            _, place, content, _ = self.open[client]
            self.slab[place.offset] = content

    @rule(client=clients, is_stale=st.booleans())
    def commit(self, client: int, is_stale: bool) -> None:
        if client not in self.open:
            assert self.table.commit(client, 1, self.now_s) == "dropped"
            return
        key, place, content, _ = self.open[client]
        if is_stale:
            assert self.table.commit(client, place.put_id + 1000, self.now_s) == "dropped"
            return
        self.slab[place.offset] = content
        outcome = self.table.commit(client, place.put_id, self.now_s)
        assert (outcome == "stored") == self.is_put_live(client)
        del self.open[client]
        if outcome == "stored":
            self.known[key] = content

    @rule(client=clients, key=keys)
    def put(self, client: int, key: bytes) -> None:
        self.begin(client, key, SLOT)
        self.commit(client, is_stale=False)

    @rule(client=clients)
    def abort(self, client: int) -> None:
        self.table.abort(client)
        self.open.pop(client, None)

    @rule(client=clients, wanted=st.lists(keys, max_size=4))
    def get(self, client: int, wanted: list[bytes]) -> None:
        num_present = self.table.num_present(wanted)
        grants = self.table.get(client, wanted, self.now_s)
        assert len(grants) == num_present
        for key, grant in zip(wanted, grants, strict=False):
            assert self.slab[grant.offset] == self.known[key]
            until_s = self.now_s + LEASE_S
            self.leases[grant.lease_id] = (client, grant.offset, self.known[key], until_s)

    @rule(client=clients, index=st.integers(0, 9))
    def release(self, client: int, index: int) -> None:
        if not self.leases:
            return
        lease_id = sorted(self.leases)[index % len(self.leases)]
        owner, _, _, until_s = self.leases[lease_id]
        is_live = owner == client and self.now_s < until_s
        assert self.table.release(client, lease_id, self.now_s) == is_live
        if is_live:
            self.leases[lease_id] = (owner, 0, "", 0.0)

    @rule(key=keys)
    def discard(self, key: bytes) -> None:
        self.table.discard(key)
        assert self.table.num_present([key]) == 0
        self.known.pop(key, None)

    @rule(client=clients)
    def die(self, client: int) -> None:
        """After this nothing is left of the client."""
        self.table.drop_client(client)
        self.open.pop(client, None)
        for lease_id, (owner, _, _, _) in self.leases.items():
            if owner == client:
                self.leases[lease_id] = (owner, 0, "", 0.0)

    @invariant()
    def nothing_is_lost_and_no_leased_value_changes(self) -> None:
        self.table.check_invariants()
        assert self.table.counts().writing == len(self.open)
        for _, offset, content, until_s in self.leases.values():
            assert self.now_s >= until_s or self.slab[offset] == content

    def teardown(self) -> None:
        for client in (1, 2, 3):
            self.table.drop_client(client)
        self.table.check_invariants()
        counts = self.table.counts()
        assert (counts.writing, counts.leased) == (0, 0)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=40)


def test_the_longest_unused_value_goes_first() -> None:
    table = make_table()
    for key in (b"a", b"b", b"c", b"d"):
        assert put(table, key) == "stored"
    table.release(1, table.get(1, [b"a"], 1.0)[0].lease_id, 1.0)
    assert put(table, b"e") == "stored"
    assert [table.num_present([key]) for key in (b"a", b"b", b"c", b"d", b"e")] == [1, 0, 1, 1, 1]


def test_of_values_used_together_the_last_goes_first() -> None:
    """Units of one prompt: without its first, none of the others is of use."""
    table = make_table()
    for key in (b"a", b"b", b"c", b"d"):
        put(table, key)
    assert table.num_present([b"a", b"b", b"c", b"d"]) == 4
    put(table, b"e")
    assert table.num_present([b"a", b"b", b"c", b"d"]) == 3


def test_a_leased_value_is_not_evicted_and_its_slot_comes_back() -> None:
    table = make_table()
    for key in (b"a", b"b", b"c", b"d"):
        put(table, key)
    leases = table.get(1, [b"a", b"b", b"c", b"d"], 0.0)
    assert put(table, b"e", client=2) == "dropped"
    assert table.release(1, leases[2].lease_id, 1.0)
    assert not table.release(1, leases[2].lease_id, 1.0)
    assert put(table, b"e", client=2, now_s=1.0) == "stored"
    assert table.num_present([b"c"]) == 0
    assert put(table, b"f", client=2, now_s=LEASE_S) == "stored"
    assert not table.release(1, leases[0].lease_id, LEASE_S)


def test_a_client_cannot_end_the_lease_or_put_of_another() -> None:
    table = make_table(2 * SLOT)
    put(table, b"a")
    (grant,) = table.get(1, [b"a"], 0.0)
    assert not table.release(2, grant.lease_id, 0.0)
    place = table.begin_put(1, b"b", SLOT, 0.0)
    assert table.commit(2, place.put_id, 0.0) == "dropped"
    table.abort(2)
    assert table.counts() == SlotCounts(free=0, writing=1, stored=0, leased=1)
    assert table.release(1, grant.lease_id, 0.0)
    assert table.commit(1, place.put_id, 0.0) == "stored"


def test_a_value_leased_twice_is_kept_for_the_second() -> None:
    table = make_table(SLOT)
    put(table, b"a")
    (first,), (second,) = table.get(1, [b"a"], 0.0), table.get(2, [b"a"], 5.0)
    assert table.release(1, first.lease_id, 6.0)
    assert put(table, b"b", client=3, now_s=14.9) == "dropped"
    assert table.release(2, second.lease_id, 14.9)
    assert put(table, b"b", client=3, now_s=14.9) == "stored"


def test_a_lapsed_put_never_succeeds_and_its_slot_waits_for_its_writer() -> None:
    """The writer may be frozen in the middle of it."""
    table = make_table(2 * SLOT)
    frozen = table.begin_put(1, b"a", SLOT, 0.0)
    second = table.begin_put(2, b"a", SLOT, LEASE_S)
    assert isinstance(second, PutPlace)
    assert second.offset != frozen.offset
    assert table.commit(2, second.put_id, LEASE_S) == "stored"
    assert table.counts() == SlotCounts(free=0, writing=1, stored=1, leased=0)
    assert table.commit(1, frozen.put_id, LEASE_S + 1) == "present"
    assert table.counts() == SlotCounts(free=1, writing=0, stored=1, leased=0)


def test_a_larger_value_makes_the_slots_larger_unless_one_is_read_or_written() -> None:
    table = make_table()
    put(table, b"a", size=SLOT)
    (grant,) = table.get(1, [b"a"], 0.0)
    assert put(table, b"b", client=2, size=2 * SLOT) == "dropped"
    table.release(1, grant.lease_id, 0.0)
    writer = table.begin_put(3, b"c", SLOT, 0.0)
    assert put(table, b"b", client=2, size=2 * SLOT) == "dropped"
    table.commit(3, writer.put_id, 0.0)
    assert put(table, b"b", client=2, size=2 * SLOT) == "stored"
    assert table.counts() == SlotCounts(free=1, writing=0, stored=1, leased=0)
    assert put(table, b"a", size=1) == "stored"
    assert table.num_present([b"b"]) == 1


@pytest.mark.parametrize("size", [0, CAPACITY + 1, 1 << 62])
def test_a_value_of_absurd_size_is_dropped_and_costs_nothing(size: int) -> None:
    table = make_table()
    put(table, b"a")
    assert put(table, b"b", size=size) == "dropped"
    assert table.num_present([b"a"]) == 1


def test_a_value_may_fill_the_store_and_slots_start_at_cache_lines() -> None:
    table = make_table(100)
    assert put(table, b"a", size=100) == "stored"
    table = make_table(1000)
    offsets = [table.begin_put(client, bytes([client]), 65, 0.0).offset for client in (1, 2, 3)]
    assert offsets == [0, 128, 256]


def test_content_comes_back() -> None:
    table = make_table()
    place = table.begin_put(1, b"a", 10, 0.0)
    table.commit(1, place.put_id, 0.0, content="value")
    assert table.get(1, [b"a", b"b"], 0.0) == [Grant(2, 0, 10, "value")]
