"""Replicas of an ingress: found, connected, lost, and found again."""

import asyncio
import contextlib
import sys

import pytest

from cluster.routing import fleet as fleet_module
from cluster.routing.fleet import Fleet
from replicas.errors import EngineDeadError
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import KEYS, make_member, until


class Connections:
    """A client that fails for engines in `dead`, and sends no snapshot of those in `silent`."""

    def __init__(self, on_snapshot, on_dead, on_moves, on_kv_events):
        self.on_snapshot, self.on_dead, self.on_moves = on_snapshot, on_dead, on_moves
        self.on_kv_events = on_kv_events
        self.incarnations = frozenset()
        self.dead = {}
        self.silent = set()
        self.answer_s = 0.0

    async def connect(self, description):
        name = description.incarnation
        await asyncio.sleep(self.answer_s)
        if name in self.dead:
            raise self.dead[name]
        self.incarnations |= {name}
        if name not in self.silent:
            self.say(name)

    def say(self, name, seq=0, *, draining=False):
        groups = [GroupSnapshot(4, [64], 0, 0, 0)]
        self.on_snapshot(name, EngineSnapshot(seq, draining, 0, 0, 0, groups))

    def lose(self, name):
        self.incarnations -= {name}
        self.on_dead(name, "test")


class Discovery:
    """A discovery with given answers that it counts."""

    def __init__(self, *names, wanted=None):
        self.members = [make_member("both", name) for name in names]
        self.wanted = len(names) if wanted is None else wanted
        self.num_looks = self.num_asked = 0

    async def find(self):
        self.num_looks += 1
        await asyncio.sleep(0)
        return self.members

    async def num_wanted(self):
        self.num_asked += 1
        return self.wanted


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(fleet_module, "DISCOVERY_S", 0.01)
    monkeypatch.setattr(fleet_module, "DISCOVERY_IDLE_S", 3600.0)


@contextlib.asynccontextmanager
async def following(*names, wanted=None):
    """A fleet that follows a discovery of these replicas."""
    fleet, discovery = Fleet(Connections, KEYS), Discovery(*names, wanted=wanted)
    task = asyncio.ensure_future(fleet.follow(discovery))
    try:
        yield fleet, discovery
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled(), "following ends when it is cancelled"


def known(fleet):
    return sorted(m.description.incarnation for m in fleet.pools.members())


async def until_complete(fleet):
    await until(lambda: fleet._is_complete, "complete")


async def test_members_are_connected_and_then_discovery_is_asked_seldom():
    async with following("a", "b") as (fleet, discovery):
        await until_complete(fleet)
        assert (known(fleet), fleet.pools.num_open) == (["a", "b"], 2)
        looks = discovery.num_looks
        await asyncio.sleep(0.1)
        assert discovery.num_looks == looks


@pytest.mark.parametrize("wanted", [3, None])
async def test_discovery_is_asked_often_while_members_are_missing_or_unknown(wanted):
    async with following("a", wanted=2) as (fleet, discovery):
        discovery.wanted = wanted
        fleet._is_complete = False
        fleet._look.set()
        await until(lambda: fleet.pools.num_open == 1, "connected")
        looks = discovery.num_looks
        await until(lambda: discovery.num_looks > looks + 3, "it looks on")
        discovery.members.append(make_member("both", "late"))
        discovery.wanted = 2
        await until_complete(fleet)
        assert known(fleet) == ["a", "late"]


async def test_a_loss_asks_discovery_at_once_for_members_and_their_number():
    async with following("a", "b") as (fleet, discovery):
        await until_complete(fleet)
        discovery.members = [make_member("both", "b"), make_member("both", "c")]
        fleet.client.lose("a")
        await until_complete(fleet)
        assert known(fleet) == ["b", "c"]
        discovery.members, discovery.wanted = [make_member("both", "c")], 1
        fleet.client.lose("b")
        await until_complete(fleet)
        assert known(fleet) == ["c"], "fewer are wanted now"


async def test_after_the_loss_of_all_replicas_requests_wait_for_discovery():
    async with following("a", "b") as (fleet, discovery):
        told = []
        fleet.on_change = lambda: told.append(fleet.pools.is_stranded)
        await asyncio.sleep(0)
        assert not fleet.pools.is_stranded, "discovery has not answered yet"
        await until_complete(fleet)
        assert not fleet.pools.is_looked_for
        # As after a stop of the whole process: all connections are gone, and both are found again.
        told.clear()
        fleet.client.lose("a")
        fleet.client.lose("b")
        assert not fleet.pools.may_decode
        await until_complete(fleet)
        assert not any(told), "it could have waited"
        # And now they are gone.
        discovery.members = []
        fleet.client.lose("a")
        fleet.client.lose("b")
        assert not fleet.pools.is_stranded
        await until(lambda: fleet.pools.is_stranded, "it asked")
        assert told[-1], "waiting requests are woken"


async def test_a_draining_member_counts_as_missing():
    async with following("a", "b", wanted=2) as (fleet, discovery):
        await until_complete(fleet)
        fleet.client.say("a", 1, draining=True)
        fleet.client.lose("b")
        await until(lambda: discovery.num_looks > 5, "it looks on")
        assert not fleet._is_complete
        assert "a" in known(fleet), "it has requests to finish"


async def test_an_unreachable_member_counts_while_listed_and_is_logged_once(caplog):
    """Connecting is retried every few seconds; the count does not change with that."""

    async with following("a", "b") as (fleet, discovery):
        await until_complete(fleet)
        assert fleet.num_unresponsive == 0
        fleet.client.dead["a"] = EngineDeadError("test")
        fleet.client.lose("a")
        looks = discovery.num_looks
        for more in range(1, 5):
            await until(lambda more=more: discovery.num_looks > looks + more, "tried again")
            assert fleet.num_unresponsive == 1
        told = [r.levelname for r in caplog.records if "replica=" in r.getMessage()]
        assert told.count("WARNING") == 1
        del fleet.client.dead["a"]
        await until(lambda: fleet.pools.num_open == 2, "it answers")
        assert fleet.num_unresponsive == 0
        fleet.client.lose("a")
        discovery.members = discovery.members[1:]
        await until(lambda: fleet.num_unresponsive == 0, "a replica that is gone does not count")


async def test_an_unreachable_member_is_forgotten_and_retried():
    async with following("a") as (fleet, discovery):
        fleet.client.dead["a"] = EngineDeadError("gone")
        await until(lambda: discovery.num_looks > 3, "it tries on")
        assert not fleet._is_complete
        fleet.client.dead.clear()
        await until_complete(fleet)
        assert fleet.pools.num_open == 1


async def test_a_member_whose_connection_fails_for_any_reason_is_forgotten():
    fleet = Fleet(Connections, KEYS)
    fleet.client.dead["a"] = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        await fleet.connect(make_member("both", "a"))
    assert known(fleet) == []


async def test_cancelling_at_the_moment_of_a_loss_ends_the_task():
    async with following("a") as (fleet, _):
        await until_complete(fleet)
        fleet.client.lose("a")


# --- discovery that fails ------------------------------------------------------------------------


class Failing(Discovery):
    """A discovery that raises `error` while it is set."""

    error = None

    async def find(self):
        members = await super().find()
        if self.error is not None:
            raise self.error
        return members


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(fleet_module, "DISCOVERY_FAILED_S", 0.02)
    monkeypatch.setattr(sys.modules[__name__], "Discovery", Failing)


@pytest.mark.parametrize("error", [AttributeError("?"), asyncio.InvalidStateError(), OSError()])
async def test_known_replicas_stay_and_new_ones_are_found_after_any_failed_discovery(
    failing, error, caplog
):
    async with following("a", "b") as (fleet, discovery):
        await until_complete(fleet)
        discovery.error = error
        fleet.client.lose("b")
        looks = discovery.num_looks
        await until(lambda: discovery.num_looks > looks + 20, "it asks on")
        assert known(fleet) == ["a"]
        lines = [r for r in caplog.records if "discovery of replicas failed" in r.getMessage()]
        assert 1 <= len(lines) <= 6, "not one for each"
        discovery.error = None
        await until_complete(fleet)
        assert known(fleet) == ["a", "b"]


async def test_no_change_reports_stranded_at_the_moment_of_a_loss():
    async with following("a") as (fleet, _):
        await until_complete(fleet)
        told = []
        fleet.on_change = lambda: told.append(fleet.pools.is_stranded)
        fleet.client.lose("a")
        await until_complete(fleet)
        assert not any(told)


async def test_a_loss_during_discovery_asks_discovery_again():
    async with following("a", "b") as (fleet, discovery):
        await until_complete(fleet)
        discovery.members = []
        fleet.client.lose("a")
        await asyncio.sleep(0)
        fleet.client.lose("b")
        looks = discovery.num_looks
        await until(lambda: fleet.pools.is_stranded, "it asked")
        assert discovery.num_looks > looks


@pytest.mark.parametrize("apart_s", [0.0, 0.003, 0.03])
async def test_each_lost_engine_is_waited_for_once(apart_s):
    async with following(*"abcd") as (fleet, _):
        await until_complete(fleet)
        fleet.client.answer_s = 0.05
        for name in "abcd":
            fleet.client.dead[name] = EngineDeadError("gone")
        for name in "abcd":
            fleet.client.lose(name)
            await asyncio.sleep(apart_s)
        await until(lambda: fleet.pools.is_stranded, "no replica is waited for any more")
        for _ in range(100):
            await asyncio.sleep(0.002)
            assert fleet.pools.is_stranded, "nor when they are tried again"


async def test_a_connected_engine_without_a_snapshot_is_waited_for():
    async with following("a") as (fleet, discovery):
        await until_complete(fleet)
        fleet.client.silent.add("a")
        looks = discovery.num_looks
        fleet.client.lose("a")
        await until(lambda: discovery.num_looks > looks + 3, "it is connected, and looked for")
        assert not fleet.pools.may_decode
        assert not fleet.pools.is_stranded
        fleet.client.say("a")
        assert fleet.pools.may_decode
        assert not fleet.pools.is_looked_for


async def test_no_request_waits_while_discovery_fails(failing):
    async with following("a") as (fleet, discovery):
        await until_complete(fleet)
        discovery.error = OSError()
        fleet.client.lose("a")
        await until(lambda: fleet.pools.is_stranded, "it asked")


async def test_a_fleet_is_lost_only_without_replicas_and_discovery_for_long(failing, monkeypatch):
    monkeypatch.setattr(fleet_module, "LOST_S", 0.2)

    async with following("a") as (fleet, discovery):
        await until_complete(fleet)
        discovery.error = AttributeError("?")
        fleet._look.set()
        await asyncio.sleep(0.5)
        assert not fleet.is_lost, "it knows a replica"
        fleet.client.lose("a")
        await until(lambda: fleet.is_lost, "lost")
        discovery.error = None
        await until_complete(fleet)
        assert not fleet.is_lost
        discovery.members = []
        fleet.client.lose("a")
        await asyncio.sleep(0.5)
        assert not fleet.is_lost, "replicas that start slowly will be found"


def test_engines_send_no_cache_events_that_no_policy_uses():
    assert Fleet(Connections, KEYS).client.on_kv_events is not None
    assert Fleet(Connections, KEYS, follows_prefixes=False).client.on_kv_events is None


async def test_snapshots_settle_after_the_tokens_received_with_them():
    async with following("a") as (fleet, _):
        await until_complete(fleet)
        loop, views = asyncio.get_running_loop(), fleet.pools.decode_views()
        tokens, found = asyncio.Queue(), []

        async def read():
            for _ in range(2):
                token = await tokens.get()
                found.append((token, views[0].num_empty_slots))

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        for seq in (1, 2):
            groups = [GroupSnapshot(4 - seq, [64], 0, 0, 0)]
            fleet.client.on_snapshot("a", EngineSnapshot(seq, False, 0, 0, 0, groups))
            tokens.put_nowait(seq)
            settled = loop.create_future()
            loop.call_later(0.001, settled.set_result, None)
            await settled
        await reader
        assert found == [(1, 4), (2, 3)]
        assert views[0].num_empty_slots == 2
