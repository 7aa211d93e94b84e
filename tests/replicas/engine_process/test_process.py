"""The engine as a process of its own: start, loss of either end, and hostile messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading

import msgspec
import pytest
import zmq

from replicas import async_client
from replicas.client import SyncMPClient
from replicas.codec import decode_engine_frame, encode
from replicas.dealer import MAX_WAITING_MESSAGES, connect_dealers
from replicas.errors import EngineDeadError, EngineStartError
from replicas.launch import start_engine
from replicas.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AddRequest,
    EngineRequest,
    Hello,
    NotGreeted,
    Refused,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.engine_process import engine_client
from tests.replicas.engine_process.engine_client import (
    connected,
    is_idle,
    parent_of_engine,
    python,
    read,
    status,
    until,
    wait_gone,
)

pytestmark = pytest.mark.process

LONG = SamplingParams(max_tokens=240, temperature=0.0, seed=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0.0, seed=0)
PROMPT = [5, 9, 3]


def config(**changes):
    settings = {"max_model_len": 256, "max_batch_size": 4, "num_blocks": 40, **changes}
    return make_config(model_folder("llama-gqa"), **settings)


@pytest.fixture(scope="module")
def engine():
    """An engine that every test leaves idle."""
    handle = start_engine(config())
    yield handle
    handle.stop()


@pytest.fixture
def doomed():
    """An engine of the test's own."""
    handle = start_engine(config())
    yield handle
    if handle.is_alive:
        os.kill(handle.description.pid, signal.SIGKILL)
    handle.stop()


def open_stream(client, handle, request_id, sampling=SHORT, prompt=PROMPT):
    return engine_client.open_stream(client, handle, request_id, sampling, prompt)


async def first_token(stream):
    while not isinstance(await stream.get(), TokenOutput):
        pass


async def num_aborted(client, handle):
    """Requests that were dropped since the engine started."""
    metrics = await client.metrics(handle.description.incarnation)
    return sum(group.requests_finished.get("abort", 0) for group in metrics.groups)


# --- start and end -----------------------------------------------------------------------------


def test_sigterm_ends_an_engine_whose_parent_still_holds_its_stdin(doomed):
    os.kill(doomed.description.pid, signal.SIGTERM)
    assert doomed.wait() == 0


def test_engine_tells_how_far_its_start_has_come_and_what_it_is():
    stages = []
    settings = config(tt_data_parallel=2, kv_connector="p2p")
    handle = start_engine(
        settings, progress=lambda stage, fraction: stages.append((stage, fraction))
    )
    described = handle.description
    handle.stop()
    handle.stop()
    assert not handle.is_alive
    assert stages
    assert all(0.0 <= fraction <= 1.0 for _, fraction in stages)
    assert described.model == settings.model
    [kv_group] = described.kv_groups
    assert (described.dp_groups, described.slots_per_group) == (2, 2)
    assert (kv_group.block_size, kv_group.num_usable_blocks) == (32, 39)
    assert described.max_model_len == 256
    assert any(e.startswith("tcp://127.0.0.1:") for e in described.kv_endpoints)
    assert len(described.kv_layout_hash) == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere/at/all"}, ["/nowhere/at/all"]),
        ({"max_model_len": 1000}, ["1000", "256"]),
        ({"kv_connector": "p2p", "block_size": 16, "num_blocks": 80}, ["16", "32"]),
        ({"kv_connector": "pigeon"}, ["pigeon", "p2p"]),
        ({"kv_connector": "p2p", "kv_endpoint": "tcp://192.0.2.1:*"}, ["192.0.2.1"]),
    ],
)
def test_engine_that_cannot_start_says_why(changes, words):
    with pytest.raises(EngineStartError) as caught:
        start_engine(msgspec.structs.replace(config(), **changes))
    for word in words:
        assert word in str(caught.value)


def test_an_engine_may_have_more_connections_than_its_parents_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        handle = start_engine(config())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        allowed, most = resource.prlimit(handle.description.pid, resource.RLIMIT_NOFILE)
        assert allowed == min(most, 65536)
    finally:
        handle.stop()


def test_engine_ends_with_its_parent():
    with parent_of_engine(config()) as (parent, started):
        assert status(int(started))
        os.kill(parent.pid, signal.SIGKILL)
        wait_gone([int(started)])


# --- loss of the engine ------------------------------------------------------------------------


def dead_streams(handle, kill):
    """Open more streams than there are slots, `kill`, and return what each stream ends with."""

    async def run():
        lost = []
        async with connected(handle, on_dead=lambda *args: lost.append(args)) as client:
            streams = [open_stream(client, handle, f"r{i}", LONG) for i in range(40)]
            for stream in streams[:4]:
                await first_token(stream)
            call = asyncio.ensure_future(client.metrics(handle.description.incarnation))
            kill(handle.description.pid)
            ends = await asyncio.gather(*map(read, streams), call, return_exceptions=True)
            with pytest.raises(EngineDeadError):
                open_stream(client, handle, "late")
            return ends, lost

    ends, lost = asyncio.run(run())
    assert [incarnation for incarnation, _ in lost] == [handle.description.incarnation]
    return ends[:-1], lost[0][1]


def test_killed_engine_ends_every_open_stream_with_an_error(doomed):
    ends, reason = dead_streams(doomed, lambda pid: os.kill(pid, signal.SIGKILL))
    assert {type(error) for error in ends[4:]} == {EngineDeadError}
    assert reason == "its connection broke"
    assert doomed.wait() == -signal.SIGKILL


@pytest.mark.silence
def test_frozen_engine_counts_as_dead(doomed, monkeypatch):
    monkeypatch.setattr(async_client, "SILENCE_S", 2.0)
    ends, reason = dead_streams(doomed, lambda pid: os.kill(pid, signal.SIGSTOP))
    assert {type(error) for error in ends[4:]} == {EngineDeadError}
    assert "sent nothing" in reason


def test_a_synchronous_client_waits_for_an_engine_that_takes_nothing():
    client = SyncMPClient(config())
    long = ["x" * 256] * 32

    def send():
        for _ in range(3 * MAX_WAITING_MESSAGES):
            client.abort(long)

    try:
        os.kill(client.description.pid, signal.SIGSTOP)
        sender = threading.Thread(target=send)
        sender.start()
        sender.join(5.0)
        assert sender.is_alive()
        os.kill(client.description.pid, signal.SIGCONT)
        sender.join(60.0)
        assert not sender.is_alive()
        client.add_request(EngineRequest("r", PROMPT, SHORT))
        assert client.get_outputs()
    finally:
        client.shutdown()


def test_a_synchronous_client_waits_for_no_engine_that_is_gone(monkeypatch):
    client = SyncMPClient(config())
    monkeypatch.setattr("replicas.client.SILENCE_S", 1.0)
    try:
        os.kill(client.description.pid, signal.SIGSTOP)
        for _ in range(3 * MAX_WAITING_MESSAGES):
            client.abort(["x" * 256] * 32)
        with pytest.raises(EngineDeadError):
            drain_outputs(client)
    finally:
        os.kill(client.description.pid, signal.SIGKILL)
        client.shutdown()


def drain_outputs(client):
    """Read more often than there can be steps."""
    for _ in range(1000):
        client.get_outputs()


def test_killed_engine_ends_a_synchronous_client_with_an_error():
    client = SyncMPClient(config())
    try:
        client.add_request(EngineRequest("r", PROMPT, LONG))
        os.kill(client.description.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            drain_outputs(client)
    finally:
        client.shutdown()


# --- loss of a client --------------------------------------------------------------------------


def test_client_that_closes_without_a_word_takes_its_requests_along(engine):
    async def run():
        async with connected(engine) as witness:
            before = await num_aborted(witness, engine)
            async with connected(engine) as client:
                streams = [open_stream(client, engine, f"r{i}", LONG) for i in range(60)]
                await first_token(streams[0])
            await until(lambda: is_idle(witness, engine), "slots and blocks free")
            assert await num_aborted(witness, engine) > before
            assert len(await read(open_stream(witness, engine, "after"))) == 5

    asyncio.run(run())


def test_killed_client_takes_its_requests_along(engine):
    code = (
        "import asyncio, sys, msgspec\n"
        "from kv_transfer.keys import KeyRing\n"
        "from replicas.async_client import AsyncMPClient\n"
        "from replicas.messages import AddRequest, EngineDescription\n"
        "engine = msgspec.json.decode(sys.argv[1], type=EngineDescription)\n"
        "requests = msgspec.json.decode(sys.argv[2], type=list[AddRequest])\n"
        "async def main():\n"
        "    client = AsyncMPClient(msgspec.json.decode(sys.argv[3], type=KeyRing))\n"
        "    await client.connect(engine)\n"
        "    for r in requests:\n"
        "        s = client.open_stream(engine.incarnation, r.request.request_id, r)\n"
        "    await s.get()\n"
        "    print('open', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    requests = [AddRequest(EngineRequest(f"k{i}", PROMPT, LONG)) for i in range(60)]
    arguments = [
        msgspec.json.encode(x).decode() for x in (engine.description, requests, engine.keys)
    ]

    async def count():
        async with connected(engine) as witness:
            return await num_aborted(witness, engine)

    before = asyncio.run(count())
    with python(code, *arguments) as (process, line):
        assert line == "open"
        process.kill()

        async def run():
            async with connected(engine) as witness:
                await until(lambda: is_idle(witness, engine), "slots and blocks free")
                return await num_aborted(witness, engine)

        assert asyncio.run(run()) > before


def test_closed_stream_frees_its_slot(engine):
    async def run():
        async with connected(engine) as client:
            stream = open_stream(client, engine, "r", LONG)
            await first_token(stream)
            stream.close(abort=True)
            stream.close(abort=True)
            await until(lambda: is_idle(client, engine), "slots and blocks free")

    asyncio.run(run())


# --- messages ----------------------------------------------------------------------------------


@contextlib.contextmanager
def raw_sockets(engine, identity):
    """A client's two sockets without the client."""
    with zmq.Context() as context:
        sockets = connect_dealers(context, identity, engine.description, engine.keys)
        try:
            yield sockets
        finally:
            for socket in sockets:
                socket.close(linger=1000)


def assert_serves(engine):
    async def run():
        async with connected(engine) as client:
            assert len(await read(open_stream(client, engine, "check"))) == 5

    asyncio.run(run())


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"no message"],
        [b"\xc1" * 1000],
        [encode(Hello(PROTOCOL_VERSION))[:-1]],
        [msgspec.msgpack.encode(["add", 5, "local", -1, None])],
        [msgspec.msgpack.encode(["unknown"])],
        [b"one", b"too", b"many"],
    ],
)
def test_malformed_message_is_dropped_and_the_engine_goes_on(engine, frames):
    with raw_sockets(engine, b"stranger") as (out, _):
        out.send_multipart(frames)
        assert_serves(engine)


def test_client_of_another_protocol_version_is_not_served(engine):
    async def num_known():
        async with connected(engine) as client:
            metrics = await client.metrics(engine.description.incarnation)
            return sum(sum(g.requests_finished.values()) for g in metrics.groups)

    with raw_sockets(engine, b"from the future") as (out, back):
        before = asyncio.run(num_known())
        out.send(encode(Hello(PROTOCOL_VERSION + 1)))
        out.send(encode(AddRequest(EngineRequest("r", PROMPT, SHORT))))
        assert_serves(engine)
        assert_serves(engine)
        while back.poll(0):
            assert decode_engine_frame(back.recv()).events == [NotGreeted()]
        assert asyncio.run(num_known()) == before + 2


def test_two_clients_share_an_engine_and_see_only_their_own(engine):
    async def run():
        async with connected(engine) as one, connected(engine) as two:
            first = [open_stream(one, engine, f"one{i}", prompt=[i, 1]) for i in range(6)]
            second = [open_stream(two, engine, f"two{i}", prompt=[i, 2]) for i in range(6)]
            return await asyncio.gather(*map(read, first + second))

    prompts = [[i, j] for j in (1, 2) for i in range(6)]
    with engine_core(config()) as core:
        assert asyncio.run(run()) == generate(core, prompts, SHORT)


def test_snapshots_come_in_order_and_end_at_the_start_values(engine):
    snapshots = []

    async def run():
        async with connected(
            engine, on_snapshot=lambda _, snapshot: snapshots.append(snapshot)
        ) as client:
            start = snapshots[0]
            await asyncio.gather(*(read(open_stream(client, engine, f"r{i}")) for i in range(6)))

            async def is_back():
                return snapshots[-1].groups == start.groups

            await until(is_back, "the last snapshot shows an idle engine")

    asyncio.run(run())
    numbers = [snapshot.seq for snapshot in snapshots]
    assert numbers == sorted(numbers)
    assert min(snapshot.groups[0].num_empty_slots for snapshot in snapshots) < 4


def test_draining_engine_refuses_and_finishes_what_it_has(doomed):
    snapshots = []

    async def is_told():
        return snapshots[-1].draining

    async def run():
        async with connected(doomed, on_snapshot=lambda _, s: snapshots.append(s)) as client:
            old = open_stream(client, doomed, "old", LONG)
            assert isinstance(await old.get(), Accepted)
            draining = asyncio.ensure_future(asyncio.to_thread(doomed.drain, 20.0))
            await until(is_told, "it has been told")
            refused = await open_stream(client, doomed, "new").get()
            assert isinstance(refused, Refused)
            assert refused.reason == "draining"
            assert not draining.done()
            assert len(await read(old)) == LONG.max_tokens
            assert await draining

    asyncio.run(run())
