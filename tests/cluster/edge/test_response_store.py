"""The bounded store of responses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.edge.responses.store import _ENTRY_BYTES, ResponseStore


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def make_store(max_bytes=10 * _ENTRY_BYTES, max_age_s=100.0, max_responses=100):
    clock = Clock()
    return ResponseStore(max_bytes, max_age_s, clock, max_responses), clock


def test_a_response_belongs_to_one_tenant():
    store, _ = make_store()
    store.put("a", "r", b"body", (b"turn",))
    found = store.get("a", "r")
    assert (found.body, found.turns) == (b"body", (b"turn",))
    assert store.get("b", "r") is None
    assert store.delete("b", "r") is False
    assert store.delete("a", "r") is True
    assert store.get("a", "r") is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_least_recently_used_response_goes_first():
    store, _ = make_store(max_responses=2)
    for name in "rs":
        store.put("", name, b"", ())
    assert store.get("", "r") is not None
    store.put("", "t", b"", ())
    assert [store.get("", name) is not None for name in "rst"] == [True, False, True]


def test_a_tenant_that_fills_the_store_loses_its_own_responses():
    store, _ = make_store()
    store.put("small", "r", b"", ())
    for i in range(100):
        store.put("large", str(i), b"x" * 100, ())
    assert store.get("small", "r") is not None
    assert store.get("large", "99") is not None
    assert store.get("large", "0") is None


def test_a_response_that_is_too_old_is_forgotten():
    store, clock = make_store()
    store.put("", "r", b"", ())
    clock.now_s = 50.0
    store.put("", "s", b"", ())
    assert store.get("", "r") is not None
    clock.now_s = 100.0
    assert store.get("", "r") is None
    assert store.get("", "s") is not None


@pytest.mark.parametrize("max_bytes", [0, _ENTRY_BYTES])
def test_a_response_that_is_larger_than_the_store_is_not_kept(max_bytes):
    store, _ = make_store(max_bytes)
    assert store.is_on is (max_bytes > 0)
    assert not store.put("", "r", b"x" * _ENTRY_BYTES, ())
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_that_is_larger_than_the_store_removes_no_other():
    store, _ = make_store()
    for name in "rs":
        assert store.put("", name, b"", ())
    store.put("", "large", b"x" * 10 * _ENTRY_BYTES, ())
    assert [store.get("", name) is not None for name in ("r", "s", "large")] == [True, True, False]


TENANTS, NAMES = st.sampled_from("ab"), st.sampled_from("rstu")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "delete", "wait"]),
            TENANTS,
            NAMES,
            st.integers(0, 5000),
        ),
        max_size=40,
    )
)
def test_the_store_stays_within_its_limits_and_counts_its_memory(steps):
    store, clock = make_store(max_bytes=8 * _ENTRY_BYTES, max_responses=5)
    for number, (what, tenant, name, size) in enumerate(steps):
        if what == "put":
            store.put(tenant, f"{name}{number}", b"x" * size, (b"y",))
        elif what == "wait":
            clock.now_s += size / 100
        else:
            getattr(store, what)(tenant, f"{name}{size % 40}")
        shelves = store._shelves.values()
        kept = [response for shelf in shelves for response in shelf.responses.values()]
        assert store.num_bytes == sum(response.num_bytes for response in kept)
        assert store.num_bytes <= 8 * _ENTRY_BYTES
        assert len(store) == len(kept) <= 5


def test_responses_of_another_store_keep_their_age():
    old, clock = make_store()
    store, own_clock = make_store()
    own_clock.now_s = 7.0
    for name, now_s in (("r", 0.0), ("s", 60.0)):
        clock.now_s = now_s
        old.put("a", name, name.encode(), (b"turn",))
    store.put("b", "own", b"", ())
    clock.now_s = 90.0
    assert [moved.response_id for moved in old.oldest(0)] == ["r"]
    store.adopt(old.oldest(10**6))
    assert store.get("a", "r").turns == (b"turn",)
    own_clock.now_s += 10.0
    assert [name for name in "rs" if store.get("a", name) is not None] == ["s"]
    assert store.get("b", "own") is not None
    own_clock.now_s += 60.0
    assert store.get("a", "s") is None
    assert store.get("b", "own") is not None


def test_a_response_that_is_stored_again_is_replaced():
    store, _ = make_store()
    store.put("", "r", b"one", ())
    store.put("", "r", b"two!", ())
    assert store.get("", "r").body == b"two!"
    assert (len(store), store.num_bytes) == (1, _ENTRY_BYTES + 4)
