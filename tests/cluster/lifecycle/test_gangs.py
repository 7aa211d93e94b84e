"""Ranks of a gang find its hub, and nothing of it stays where they look, however they start."""

from types import SimpleNamespace

import pytest

from cluster.lifecycle import gangs
from cluster.lifecycle.gangs import find_gang
from kv_transfer.keys import KeyRing
from replicas.errors import EngineStartError, GangLostError
from replicas.gang.wire import connect

KEYS = KeyRing((b"k" * 32,))


@pytest.fixture
def store(monkeypatch):
    """What Ray's key-value store has."""
    found = {}
    for name, call in {
        "_internal_kv_put": lambda key, value, **_: found.update({key: value}),
        "_internal_kv_get": lambda key, **_: found.get(key),
        "_internal_kv_del": lambda key, **_: found.pop(key),
    }.items():
        monkeypatch.setattr(gangs, name, call)
    return found


def context(rank):
    return SimpleNamespace(gang_id="g", rank=rank, world_size=2)


def test_ranks_find_the_hub_only_while_they_start(store):
    with find_gang(context(0), KEYS, "127.0.0.1") as (first, hub):
        with find_gang(context(1), KEYS, "127.0.0.1") as (second, none):
            assert (first.hub, second.hub, none) == (hub.address, hub.address, None)
        assert store
    assert not store
    connect(hub.address, KEYS, "g").close()  # it is there for as long as its replica is
    hub.close()


def test_a_gang_that_fails_to_start_leaves_nothing(store):
    with pytest.raises(EngineStartError), find_gang(context(0), KEYS, "127.0.0.1") as (_, hub):
        raise EngineStartError("no memory")
    assert not store
    with pytest.raises(GangLostError):
        connect(hub.address, KEYS, "g")


def test_a_replica_without_a_gang_needs_no_hub():
    with find_gang(None, KEYS, "127.0.0.1") as found:
        assert found == (None, None)
