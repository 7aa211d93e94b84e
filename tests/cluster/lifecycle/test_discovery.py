"""An ingress under Serve whose questions about replicas fail."""

import asyncio
import warnings

import msgspec
import pytest

from cluster.routing import fleet
from kv_transfer.keys import KeyRing
from tests.cluster.engines import make_member, until

with warnings.catch_warnings():
    # Serve declares its own fields in a way that its pydantic no longer likes.
    warnings.simplefilter("ignore")
    from cluster.lifecycle import deployments

ARGS = {"pools": {"both": {}}}


class Directory:
    """Fails in a way that nobody has thought of."""

    num_looks = 0

    async def find(self):
        self.num_looks += 1
        raise AttributeError("an answer had no such thing")

    async def num_wanted(self):
        raise AssertionError


@pytest.fixture
def replica(as_replica):
    as_replica(KeyRing((bytes(16),)))
    made = deployments.IngressReplica(ARGS)
    made._directory = Directory()
    return made


async def serving(replica, scenario):
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        await scenario()


def test_an_ingress_stays_healthy_when_discovery_fails(replica):
    async def scenario():
        await until(lambda: replica._directory.num_looks, "it has asked")
        await asyncio.sleep(0.1)
        await replica.check_health()
        await until(lambda: replica._directory.num_looks > 1, "it asks again")
        await replica.check_health()

    asyncio.run(serving(replica, scenario))


def test_an_ingress_without_replicas_or_discovery_is_replaced(replica, monkeypatch):
    monkeypatch.setattr(fleet, "LOST_S", 0.2)

    async def scenario():
        await until(lambda: replica._ingress.fleet.is_lost, "lost")
        with pytest.raises(RuntimeError, match="no replica is known"):
            await replica.check_health()

    asyncio.run(serving(replica, scenario))


class Pools:
    """A directory's pools, as far as it asks them."""

    def __init__(self, answers):
        self._answers = answers
        self.directory = deployments.PoolDirectory(dict.fromkeys(answers))
        self.directory._find_in_pool = self.find

    async def find(self, pool, _handle):
        answer = self._answers[pool]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Handle:
    """A pool's handle whose replicas give these answers to a broadcast."""

    def __init__(self, *answers):
        self._answers = answers

    def broadcast(self, method):
        assert method == "describe"
        return self

    def results(self, *, timeout_s, return_exceptions):
        assert timeout_s
        assert return_exceptions
        return self._answers


def test_a_replica_without_a_readable_answer_does_not_hide_the_others():
    description = make_member("decode", "d").description
    answers = TimeoutError(), {"incarnation": 7}, msgspec.to_builtins(description)
    directory = deployments.PoolDirectory({"decode": Handle(*answers)})
    found = asyncio.run(directory.find())
    assert [(member.pool, member.description) for member in found] == [("decode", description)]


def test_a_pool_that_fails_does_not_hide_the_others():
    member = make_member("decode", "d")
    error = AttributeError("?")
    pools = Pools({"prefill": error, "decode": [member]})
    assert asyncio.run(pools.directory.find()) == [member]
    with pytest.raises(AttributeError):
        asyncio.run(Pools({"prefill": error, "decode": []}).directory.find())
