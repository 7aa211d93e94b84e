"""A gang of engines gives a single engine's tokens on any rank, and ends as a whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kv_transfer.keys import KeyRing
from replicas.async_client import AsyncMPClient
from replicas.errors import EngineDeadError, GangLostError
from replicas.gang import wire
from replicas.gang.hub import GangHub
from replicas.gang.wire import connect
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.gang.gangs import gang
from tests.replicas.slow_generators import MANY_TOKENS

pytestmark = pytest.mark.process

PROMPTS = [[5, 9, 3], list(range(1, 38)), [11], [7 * i % 149 for i in range(1, 22)]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, temperature=0.0, seed=0, ignore_eos=True)
HANGS_S = 9.0
"""When a step of an engine hangs: more than the first of its size may take before it stalls."""
ENDS_S = 20.0
"""Longest time until all ranks know of a loss; five seconds of silence count as one."""


def config(**changes):
    settings = {
        "model": model_folder("qwen3-moe"), "max_model_len": 256, "max_batch_size": 4,
        "num_blocks": 40, "max_num_batched_tokens": 16, **changes,
    }  # fmt: skip
    return make_config(**settings)


@pytest.fixture(scope="module")
def alone():
    """Tokens of one engine that has all experts, by the seed of their parameters."""
    with engine_core(config()) as core:
        return {s.seed: generate(core, PROMPTS, s) for s in (GREEDY, SEEDED)}


@asynccontextmanager
async def clients(handles):
    opened = []
    try:
        for handle in handles:
            client = AsyncMPClient(handle.keys)
            opened.append(client)
            await client.connect(handle.description)
        yield opened
    finally:
        for client in opened:
            await client.close()


async def tokens(client, handle, request_id, prompt, sampling, begun=None):
    request = EngineRequest(request_id, list(prompt), sampling)
    stream = client.open_stream(handle.description.incarnation, request_id, AddRequest(request))
    found = []
    while True:
        event = await stream.get()
        if isinstance(event, TokenOutput):
            assert event.error is None
            found += event.token_ids
            if begun is not None:
                begun.set()
            if event.finish_reason is not None:
                stream.close(abort=False)
                return found


@pytest.fixture(scope="module")
def pair():
    """A gang of two that every test leaves idle."""
    with gang(config(), 2) as found:
        yield found


def run_all(handles, sampling):
    """Every prompt on the ranks in turn, all at once."""

    async def run():
        async with clients(handles) as opened:
            ranks = [i % len(handles) for i in range(len(PROMPTS))]
            return await asyncio.gather(
                *(
                    tokens(opened[rank], handles[rank], f"r{i}", PROMPTS[i], sampling)
                    for i, rank in enumerate(ranks)
                )
            )

    return asyncio.run(run())


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_all_ranks_at_once_give_the_tokens_of_one_engine(pair, alone, sampling):
    _, handles = pair
    assert run_all(handles, sampling) == alone[sampling.seed]


def test_a_probe_of_one_rank_is_a_turn_of_all(pair, alone):
    hub, handles = pair
    before = hub.num_turns

    async def run():
        async with clients(handles) as opened:
            for client, handle in zip(opened, handles, strict=True):
                assert await client.probe(handle.description.incarnation)

    asyncio.run(run())
    assert hub.num_turns - before == 2
    assert run_all(handles, GREEDY) == alone[GREEDY.seed]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_works_and_the_other_serves_it(pair, alone, rank):
    hub, handles = pair
    before = hub.num_turns

    async def run():
        async with clients([handles[rank]]) as (client,):
            return await tokens(client, handles[rank], "r", PROMPTS[2], GREEDY)

    assert asyncio.run(run()) == alone[GREEDY.seed][2]
    # The prompt is one token.
    assert hub.num_turns - before == GREEDY.max_tokens


def test_an_idle_gang_takes_no_turn_and_a_request_to_any_rank_wakes_all(pair, alone):
    hub, handles = pair
    turns, waves = hub.num_turns, hub.num_waves
    time.sleep(6.0)  # longer than silence may last
    assert hub.num_turns == turns
    assert run_all(handles[1:], GREEDY) == alone[GREEDY.seed]
    give_up_s = time.monotonic() + 10
    while not hub._waves.is_paused:
        assert time.monotonic() < give_up_s, "nobody has a batch any more"
        time.sleep(0.01)
    assert run_all(handles[:1], GREEDY) == alone[GREEDY.seed]
    assert hub.num_waves >= waves + 2


def test_a_long_prompt_of_one_rank_is_no_stall_of_another(tmp_path, caplog):
    folder = Path(shutil.copytree(model_folder("qwen3-moe"), tmp_path / "long"))
    described = msgspec.json.decode((folder / "config.json").read_bytes())
    described["max_position_embeddings"] = 4096
    (folder / "config.json").write_bytes(msgspec.json.encode(described))
    slow = config(
        model=str(folder), generator="tests.replicas.slow_generators:LateWithMany",
        max_model_len=4096, max_num_batched_tokens=4096, num_blocks=140,
    )  # fmt: skip
    prompt = [7 * i % 149 for i in range(MANY_TOKENS)]
    with gang(slow, 2) as (hub, handles):

        async def run():
            async with clients(handles[:1]) as (client,):
                return await tokens(client, handles[0], "r", prompt, GREEDY)

        assert len(asyncio.run(run())) == GREEDY.max_tokens
    assert hub.num_turns == GREEDY.max_tokens
    assert not [r for r in caplog.records if "stalls" in r.getMessage()]


@pytest.mark.slow
def test_a_gang_drains_as_one(alone):
    with gang(config(), 2) as (hub, handles):

        async def run():
            async with clients(handles) as opened:
                late = asyncio.create_task(
                    tokens(opened[1], handles[1], "r", PROMPTS[1], GREEDY)
                )  # fmt: skip
                await asyncio.sleep(0)
                # Rank 0 has no work, and rank 1 cannot step without it.
                assert not await asyncio.to_thread(handles[0].drain, 1.0)
                found = await late
                assert await asyncio.to_thread(handles[1].drain, ENDS_S)
                assert await asyncio.to_thread(handles[0].drain, ENDS_S)
                return found

        assert asyncio.run(run()) == alone[GREEDY.seed][1]
        for handle in handles:
            handle.stop()
        assert [handle.wait() for handle in handles] == [0, 0]
        assert hub.loss is None


def lose(size, rank, deed, *, is_idle):
    """Start a gang, do something to a rank, and see how every rank ends."""
    with gang(config(), size) as (hub, handles):

        async def run():
            begun = asyncio.Event()
            async with clients(handles) as opened:
                streams = [
                    asyncio.create_task(tokens(c, h, "r", PROMPTS[0], LONG, begun))
                    for c, h in zip(opened, handles, strict=True)
                    if not is_idle
                ]
                if not is_idle:
                    await begun.wait()
                os.kill(handles[rank].description.pid, deed)
                return await asyncio.wait_for(
                    asyncio.gather(*streams, return_exceptions=True), ENDS_S
                )

        ends = asyncio.run(run())
        others = [handle for i, handle in enumerate(handles) if i != rank]
        deadline_s = time.monotonic() + ENDS_S
        while any(handle.is_alive for handle in others):
            assert time.monotonic() < deadline_s, "a rank goes on without the one that was lost"
            time.sleep(0.05)
        assert hub.loss is not None
        assert hub.loss.rank == rank
        return ends, [str(handle.failure) for handle in others]


@pytest.mark.parametrize(
    "is_idle", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stepping", "idle"]
)
@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.silence
def test_a_rank_that_is_lost_ends_all_with_the_same_error(deed, is_idle):
    ends, failures = lose(2, 1, deed, is_idle=is_idle)
    assert all(isinstance(end, EngineDeadError) for end in ends)
    reason = "its connection closed" if deed == signal.SIGKILL else "it sent nothing"
    assert all(f"rank 1 was lost: {reason}" in failure for failure in failures)


def test_the_hanging_rank_is_reported_lost_and_no_waiting_one():
    hangs = config(
        generator="tests.replicas.slow_generators:HangsServing", step_timeout_s=HANGS_S
    )  # fmt: skip
    with gang(hangs, 2) as (hub, handles):

        async def run():
            async with clients(handles[:1]) as (client,):
                with pytest.raises(EngineDeadError):
                    await tokens(client, handles[0], "r", PROMPTS[0], GREEDY)

        asyncio.run(run())
        for handle in handles:
            ended = threading.Event()
            handle.call_at_exit(lambda _code, ended=ended: ended.set())
            assert ended.wait(ENDS_S)
        assert hub.loss.rank == 1
        assert "s in one step" in hub.loss.reason
        assert f"rank 1 was lost: {hub.loss.reason}" in str(handles[0].failure)
        assert "a step did not end" in str(handles[1].failure)


@pytest.mark.slow
@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.silence
def test_of_four_ranks_none_outlives_the_first(deed):
    ends, failures = lose(4, 0, deed, is_idle=False)
    assert len(ends) == 4
    assert all(isinstance(end, EngineDeadError) for end in ends)
    assert all("rank 0 was lost" in failure for failure in failures)


def test_a_hot_expert_on_both_ranks_gives_the_tokens_of_one_engine(alone):
    """Expert 0 is on both ranks, and the others are not shared out equally."""
    table = ((0, 1), *((1,),) * 5, (0,), (0,))
    with gang(config(expert_placement=table), 2) as (_, handles):
        assert run_all(handles, GREEDY) == alone[GREEDY.seed]


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one_engine(alone):
    with gang(config(), 4) as (_, handles):
        for sampling in (GREEDY, SEEDED):
            assert run_all(handles, sampling) == alone[sampling.seed]


def test_a_hub_admits_only_holders_of_a_secret():
    keys, others = KeyRing((b"k" * 32,)), KeyRing((b"o" * 32,))
    hub = GangHub("g", 2, keys)
    try:
        with pytest.raises(GangLostError, match="rejected this rank"):
            connect(hub.address, others, "g")
        with pytest.raises(GangLostError, match="rejected this rank"):
            connect(hub.address, keys, "another")
        connect(hub.address, KeyRing((b"k" * 32, b"o" * 32)), "g").close()
    finally:
        hub.close()
    with socket.socket() as probe:
        port = int(hub.address.rpartition(":")[2])
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def is_hung_up(connection):
    """Return whether the other end is gone, found out by one more byte."""
    try:
        connection.send(b"x")
        return not connection.recv(64)
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_handshake_sent_byte_by_byte_times_out(monkeypatch):
    monkeypatch.setattr(wire, "PROVE_S", 2.0)
    hub = GangHub("g", 2, KeyRing((b"k" * 32,)))
    host, _, port = hub.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port))) as slow:
            slow.settimeout(0.4)
            assert any(is_hung_up(slow) for _ in range(int(ENDS_S / 0.4))), "the hub waits on"
    finally:
        hub.close()
