"""The Ray store: its directory alone, then one cluster with real deaths."""

import gc
import os
import signal
import time
import warnings
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import ray

from kv_transfer.stores import backoff
from kv_transfer.stores import ray as ray_store
from kv_transfer.stores.ray import Directory, RayStore
from tests.kv_transfer.children import child
from tests.kv_transfer.stores.ray_process import NAME, config
from tests.kv_transfer.stores.shm_servers import NUM_SLOTS, VALUE_BYTES, eventually, value


class Object:
    """Stands for an ObjectRef."""


def put(directory: Directory, key: bytes, client: int = 1) -> "weakref.ref[Object]":
    put_id = directory.begin_put(client, key, VALUE_BYTES)
    assert isinstance(put_id, int)
    stored = Object()
    assert directory.commit(client, put_id, [stored]) == "stored"
    return weakref.ref(stored)


def test_the_directory_releases_evicted_and_discarded_values() -> None:
    directory = Directory(2 * VALUE_BYTES, lease_s=60.0)
    first, second = put(directory, b"a"), put(directory, b"b")
    ((lease_id, content),) = directory.get(2, (b"a",))
    assert content == [first()]
    del content
    third = put(directory, b"c")
    gc.collect()
    assert (first() is None, second() is None, third() is None) == (False, True, False)
    assert directory.begin_put(1, b"a", VALUE_BYTES) == "present"
    directory.discard(b"a")
    assert first() is not None
    directory.release(2, [lease_id, lease_id + 1])
    gc.collect()
    assert first() is None
    assert directory.num_present((b"c",)) == 1


def test_the_put_of_a_dead_engine_makes_room_when_it_lapses() -> None:
    directory = Directory(VALUE_BYTES, lease_s=0.05)
    assert isinstance(directory.begin_put(1, b"a", VALUE_BYTES), int)
    assert directory.begin_put(2, b"a", VALUE_BYTES) == "dropped"
    eventually(lambda: isinstance(directory.begin_put(2, b"b", VALUE_BYTES), int))
    assert directory.commit(1, 1, [Object()]) == "dropped"


def test_an_aborted_put_leaves_nothing() -> None:
    directory = Directory(VALUE_BYTES, lease_s=60.0)
    directory.begin_put(1, b"a", VALUE_BYTES)
    directory.abort(1)
    put(directory, b"b", client=2)
    assert directory.num_present((b"a",)) == 0


# ---- a store without a cluster


class Method:
    """Stand-in for a method of an actor, which returns a stand-in for a reference to its answer."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def remote(self, *_: object) -> object:
        return self._answer


class FakeRay:
    """Stands for the module: references are their own values, and None never comes."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.due_s: list[float] = []
        self.copying_s = 0.0

    def is_initialized(self) -> bool:
        return True

    def wait(self, references: list[object], *, num_returns: int, timeout: float) -> None:
        self.due_s.append(time.monotonic() + timeout)

    def get(self, reference: object, timeout: float) -> object:
        time.sleep(self.copying_s)
        if reference is None:
            self.due_s.append(time.monotonic() + timeout)
            raise ray.exceptions.GetTimeoutError
        return reference


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_store, "ray", fake)
    return fake


def test_arrived_values_are_returned_before_the_deadline(fake_ray: FakeRay) -> None:
    store = RayStore(config(""))
    store._directory = SimpleNamespace(
        get=Method([(1, [value(1)]), (2, [None])]), release=Method(None)
    )
    end_s = time.monotonic() + 1.0
    (found,) = store._get((b"a", b"b"), end_s)
    assert np.array_equal(found, value(1))
    # Both for all of them and for the one that does not come.
    assert len(fake_ray.due_s) == 2
    assert all(due_s <= end_s - 0.1 or due_s <= time.monotonic() for due_s in fake_ray.due_s)
    store.close()


def test_copying_a_value_does_not_count_as_waiting(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "COPY_BYTES_PER_S", VALUE_BYTES / 60)
    fake_ray.copying_s = 0.02
    store = RayStore(msgspec.structs.replace(config(""), timeout_s=0.04))
    store._directory = SimpleNamespace(begin_put=Method(1), commit=Method("stored"))
    store._keeper = SimpleNamespace(keep=Method(["kept"]))
    assert store.put(b"a", value(1)) == "stored"
    assert store.counters().errors == 0
    store.close()


# ---- a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as environment:
        warnings.simplefilter("ignore")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        context = ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            namespace="somebody else's",
        )
        try:
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()


@pytest.fixture
def store(cluster: str) -> Iterator[RayStore]:
    store = RayStore(config(cluster))
    put_surely(store, b"warm", value(0), 120)
    yield store
    store.close()
    assert ray.is_initialized(), "it left a Ray that was not its own"


def put_surely(store: RayStore, key: bytes, content: np.ndarray, deadline_s: float = 60.0) -> None:
    """Put until the key is there: a put that misses its deadline may still be stored."""
    eventually(lambda: store.put(key, content) in {"stored", "present"}, deadline_s)


def find(store: RayStore, key: bytes) -> np.ndarray:
    leases = []
    eventually(lambda: leases.extend(store.get([key])) or leases, 60)
    assert leases[0].release()
    return leases[0].value


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.mark.ray
def test_a_value_outlives_the_engine_that_put_it(store: RayStore, cluster: str) -> None:
    with child("stores.ray_process", cluster, "outlives") as writer:
        assert writer.stdout.readline().strip() == "stored"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    eventually(lambda: store.num_present([b"outlives", b"no"]) == 1)
    found = find(store, b"outlives")
    assert np.array_equal(found, value(1))
    assert not found.flags.writeable
    assert not found.flags.owndata
    eventually(lambda: store.put(b"outlives", value(2)) == "present")


@pytest.mark.ray
def test_a_value_in_use_stays_while_others_come_and_go(store: RayStore, cluster: str) -> None:
    other = RayStore(config(cluster))
    put_surely(store, b"held", value(5))
    held = find(store, b"held")
    for number in range(2 * NUM_SLOTS):
        put_surely(other, b"x%d" % number, value(number))
    eventually(lambda: other.num_present([b"x%d" % (2 * NUM_SLOTS - 1)]) == 1)
    assert store.num_present([b"held"]) == 0
    assert np.array_equal(held, value(5))
    assert store.put(b"big", np.zeros(NUM_SLOTS * VALUE_BYTES + 1, np.uint8)) == "dropped"
    other.close()


@pytest.mark.ray
def test_stores_of_other_names_have_other_tables(store: RayStore, cluster: str) -> None:
    put_surely(store, b"mine", value(5))
    other = RayStore(config(cluster, "other"))
    put_surely(other, b"theirs", value(6), 120)
    eventually(lambda: other.num_present([b"theirs"]) == 1)
    assert other.num_present([b"mine"]) == 0
    assert store.num_present([b"theirs"]) == 0
    other.close()


@pytest.mark.ray
def test_an_invalid_value_is_a_miss_and_is_replaced(store: RayStore) -> None:
    directory = ray.get_actor(f"kv-store-directory-{NAME}", namespace="ttserve")
    for poison in (b"bytes", np.zeros(3), np.zeros((2, 2), np.uint8)):
        put_id = ray.get(directory.begin_put.remote(99, b"poison", VALUE_BYTES))
        ray.get(directory.commit.remote(99, put_id, [ray.put(poison)]))
        # A get that misses its deadline discards nothing.
        eventually(
            lambda: (
                store.get([b"poison"]) == []
                and ray.get(directory.num_present.remote((b"poison",))) == 0
            )
        )
    put_surely(store, b"poison", value(1))
    assert np.array_equal(find(store, b"poison"), value(1))


@pytest.mark.ray
def test_dead_actors_are_a_miss_and_are_replaced(store: RayStore) -> None:
    put_surely(store, b"lost", value(3))
    node = ray.get_runtime_context().get_node_id()
    ray.kill(ray.get_actor(f"kv-store-keeper-{NAME}-{node}", namespace="ttserve"))
    eventually(lambda: store.get([b"lost"]) == [] and store.num_present([b"lost"]) == 0)
    put_surely(store, b"lost", value(3))
    assert np.array_equal(find(store, b"lost"), value(3))
    errors = store.counters().errors
    ray.kill(ray.get_actor(f"kv-store-directory-{NAME}", namespace="ttserve"))
    eventually(lambda: store.num_present([b"lost"]) == 0 and store.counters().errors > errors)
    put_surely(store, b"lost", value(3))


@pytest.mark.ray
def test_a_directory_that_is_busy_is_not_waited_for_each_time(store: RayStore) -> None:
    directory = ray.get_actor(f"kv-store-directory-{NAME}", namespace="ttserve")
    pid = ray.get(directory.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    errors = store.counters().errors
    try:
        for _ in range(100):
            assert store.num_present([b"warm"]) == 0
            assert store.put(b"warm", value(0)) == "dropped"
        assert 1 <= store.counters().errors - errors <= 5
    finally:
        os.kill(pid, signal.SIGCONT)
    put_surely(store, b"after", value(1))


@pytest.mark.process
def test_without_ray_everything_is_a_miss() -> None:
    with child("stores.ray_process", "127.0.0.1:1") as client:
        answer, _ = client.communicate(timeout=240)
    assert answer.strip() == "0 [] {'dropped'}"
