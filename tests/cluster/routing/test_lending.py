"""Streams of a draining engine: their KV is transferred to the next engine, or recomputed.

Real engine processes, and a router over real connections.
"""

import asyncio

import pytest

from cluster.routing.leg import Leg
from replicas import async_client, launch
from tests import engines as local
from tests.cluster.engines import (
    engine_config,
    prompts,
    rig,
    running,
    sampling,
    until_idle,
)

pytestmark = pytest.mark.process

NUM_TOKENS = 1500
SEEDED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
# Each prompt fills a block: of a stream that has none, however few tokens have come, no KV moves.
CASES = [
    (prompt, sampling(NUM_TOKENS, **(SEEDED | {"seed": 70 + i} if i % 2 else {})))
    for i, prompt in enumerate(prompts(4, lengths=(40, 1065, 70, 530)))
]
GAPS = "ttserve_router_migration_gap_seconds_count"


@pytest.fixture(scope="module")
def prefill():
    """A prefill engine for all."""
    with running(("prefill", engine_config("prefill"))) as [engine]:
        yield engine


@pytest.fixture(scope="module")
def expected():
    """Tokens of one local engine."""
    config = engine_config("both", max_batch_size=32, tt_data_parallel=1, num_blocks=400)
    with local.engine_core(config) as core:
        return local.generate(core, [p for p, _ in CASES], [s for _, s in CASES])


@pytest.fixture
def decode():
    """Two decode engines, of which one is left and may be lost."""
    with running(*[("decode", engine_config("decode"))] * 2) as engines:
        yield engines


async def begin(made):
    """Start streams and wait until each has tokens of a decode engine."""
    streams = [made.generate(made.request(*case)) for case in CASES]

    async def head(outputs):
        return [*(await anext(outputs)).token_ids, *(await anext(outputs)).token_ids]

    return streams, await asyncio.gather(*map(head, streams))


async def finish(streams, heads):
    """Return the whole outputs of started streams."""

    async def rest_of(outputs):
        return [token async for output in outputs for token in output.token_ids]

    rests = await asyncio.wait_for(asyncio.gather(*map(rest_of, streams)), 300)
    return [head + rest for head, rest in zip(heads, rests, strict=True)]


def hand_over(leaving):
    """Let an engine drain soon."""
    return asyncio.ensure_future(asyncio.to_thread(leaving.handle.drain, 600.0))


def count(made, kv):
    """Return the number of migrated streams by how the next engine got the KV."""
    return made.count(GAPS, model_name="tiny", kv=kv)


async def test_streams_that_are_handed_over_take_their_kv_along(
    prefill, decode, expected, monkeypatch
):
    monkeypatch.setattr(launch, "HAND_OVER_SHARE", 0.0001)
    leaving, other = decode
    async with rig(prefill, leaving) as made:
        streams, heads = await begin(made)
        await made.connect(other.member)
        drained = hand_over(leaving)
        results = await finish(streams, heads)
        assert await drained
        assert made.lost == []
        assert count(made, "moved") == len(CASES)
        # The lender may hear that it is left before it hears that all has come.
        paths = (await made.engine_metrics(other)).transfer.paths
        assert sum(path.num_received for path in paths.values()) >= len(CASES)
        assert (await made.engine_metrics(other)).kv_recompute_tokens == 0
        await until_idle(made, prefill, leaving, other)
    assert results == expected


def frozen(leaving):
    leaving.signal(19)


def killed(leaving):
    leaving.kill()


@pytest.mark.parametrize("ends", [killed, frozen])
async def test_streams_continue_with_the_same_tokens_when_the_lender_is_lost(
    prefill, decode, expected, monkeypatch, ends
):
    monkeypatch.setattr(launch, "HAND_OVER_SHARE", 0.0001)
    monkeypatch.setattr(async_client, "QUIET_S", 0.5)
    monkeypatch.setattr(async_client, "SILENCE_S", 2.0)
    leaving, other = decode
    lend, lent = Leg.lend, []

    def lend_and_end(self, ticket, epoch):
        lend(self, ticket, epoch)
        lent.append(self.incarnation)
        if len(lent) == 2:
            # Of one stream the transfer may have begun; of the others it has not, or never will.
            ends(leaving)

    monkeypatch.setattr(Leg, "lend", lend_and_end)
    async with rig(prefill, leaving) as made:
        streams, heads = await begin(made)
        await made.connect(other.member)
        drained = hand_over(leaving)
        results = await finish(streams, heads)
        leaving.kill()
        await drained
        assert lent
        assert set(lent) == {leaving.incarnation}
        assert count(made, "moved") + count(made, "recomputed") >= 3
        assert count(made, "recomputed") > 0
        await until_idle(made, prefill, other)
    assert results == expected
