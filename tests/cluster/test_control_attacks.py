"""Attacks on the control sockets of real engines, from another process, while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from kv_transfer.keys import KeyRing
from replicas.async_client import AsyncMPClient
from replicas.codec import decode_engine_frame, encode
from replicas.dealer import MAX_WAITING_MESSAGES, NO_ROOM, NOT_GREETED, connect_dealers
from replicas.errors import EngineDeadError, EngineStartError
from replicas.launch import start_engine
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    Hello,
    Refused,
    TokenOutput,
    Utility,
)
from tests.cluster.control_attacker import Knowledge
from tests.cluster.engines import (
    KEYS,
    Rig,
    ScriptedEngine,
    engine_config,
    prompts,
    rig,
    running,
    sampling,
    until,
    until_idle,
)

pytestmark = pytest.mark.process

OTHER = KeyRing((b"a secret of another deployment",))
NUM_STREAMS = 8
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engines():
    """A prefill and a decode engine that every test leaves idle."""
    with running(("prefill", engine_config("prefill")), ("decode", engine_config("decode"))) as two:
        yield two


def drive(coroutine, timeout_s=60.0):
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


async def attacked(known):
    """Let another process attack; the number of frames that it got."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.cluster.control_attacker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    try:
        told, _ = await process.communicate(msgspec.json.encode(known))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return int(told)


class Streams:
    """Streams of an honest ingress that run during an attack."""

    def __init__(self, made: Rig):
        self._made = made
        self._is_over = False
        self._expected: list[list[int]] = []
        self._params = sampling(48)
        self.num_done = 0
        self.live: dict[int, str] = {}

    async def __aenter__(self):
        self._prompts = prompts(NUM_STREAMS)
        self._expected = [await self._made.tokens(p, self._params) for p in self._prompts]
        self._tasks = [asyncio.ensure_future(self._go_on(i)) for i in range(NUM_STREAMS)]
        await until(lambda: self.num_done >= 2, "streams run")
        return self

    async def __aexit__(self, *error):
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _go_on(self, i):
        while not self._is_over:
            request = self._made.request(self._prompts[i], self._params)
            self.live[i] = request.request_id
            token_ids = []
            async for output in self._made.generate(request):
                assert output.index == len(token_ids)
                token_ids += output.token_ids
            assert token_ids == self._expected[i]
            self.num_done += 1


def num_aborted(metrics):
    return sum(group.requests_finished.get("abort", 0) for group in metrics.groups)


async def assert_harmless(engines, make_known, *, is_answered=False):
    async with rig(*engines) as made:
        aborted = [num_aborted(await made.engine_metrics(engine)) for engine in engines]
        async with Streams(made) as streams:
            before = streams.num_done
            for engine in engines:
                known = make_known(engine, list(streams.live.values()))
                assert bool(await attacked(known)) == is_answered
            await until(lambda: streams.num_done >= before + NUM_STREAMS, "streams go on")
        assert all(engine.handle.is_alive for engine in engines)
        for engine, before in zip(engines, aborted, strict=True):
            # Only the attacker's own requests are dropped or fail.
            assert is_answered or num_aborted(await made.engine_metrics(engine)) == before
        assert not made.lost
        await until_idle(made, *engines)


def test_a_client_without_a_key_gets_no_answer(engines):
    drive(assert_harmless(engines, lambda e, ids: Knowledge(e.description, KeyRing(), ids)))


def test_a_client_with_another_deployments_key_gets_no_answer(engines):
    def known(engine, ids):
        return Knowledge(engine.description, OTHER, ids, knows_public_key=True)

    drive(assert_harmless(engines, known))


def test_a_client_of_the_deployment_can_harm_no_request_but_its_own(engines):
    def known(engine, ids):
        return Knowledge(engine.description, KEYS, ids)

    drive(assert_harmless(engines, known, is_answered=True))


# --- a recorded session --------------------------------------------------------------------------


class Tap:
    """A TCP proxy that keeps what clients send through it.

    Attributes:
        recorded: The bytes of each connection, in the direction of the engine.
        is_hole: Whether everything vanishes, both ways, and every connection stays.
    """

    def __init__(self, endpoint: str):
        self._target = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self.recorded: list[bytearray] = []
        self.is_hole = False
        self.pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for pair in self.pairs:
            for writer in pair:
                writer.close()

    async def _serve(self, reader, writer):
        to_engine_reader, to_engine = await asyncio.open_connection(*self._target)
        self.recorded.append(bytearray())
        self.pairs.append((writer, to_engine))
        self._start(self._copy(reader, to_engine, self.recorded[-1]))
        self._start(self._copy(to_engine_reader, writer, bytearray()))

    def _start(self, copying):
        task = asyncio.ensure_future(copying)
        self._tasks.add(task)

    async def _copy(self, reader, writer, kept):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                kept += data
                if not self.is_hole:
                    writer.write(data)

    def cut(self):
        """Every connection breaks."""
        for pair in self.pairs:
            for writer in pair:
                writer.transport.abort()


@contextlib.asynccontextmanager
async def tapped(engine):
    """The engine as it is seen through two taps."""
    description = engine.description
    async with Tap(description.input_endpoint) as inward, Tap(description.output_endpoint) as out:
        seen = msgspec.structs.replace(
            description, input_endpoint=inward.endpoint, output_endpoint=out.endpoint
        )
        yield seen, inward, out


def num_finished(metrics):
    return sum(sum(group.requests_finished.values()) for group in metrics.groups)


def test_a_recorded_session_cannot_be_replayed(engines):
    decode = engines[1]

    async def scenario():
        async with tapped(decode) as (seen, inward, outward):
            client = AsyncMPClient(KEYS)
            await client.connect(seen)
            request = EngineRequest("recorded", prompts(1)[0], sampling(4))
            stream = client.open_stream(seen.incarnation, "recorded", AddRequest(request))
            while getattr(await stream.get(), "finish_reason", None) is None:
                pass
            await client.close()
            taken = [(decode.description.input_endpoint, bytes(inward.recorded[0]))]
            taken.append((decode.description.output_endpoint, bytes(outward.recorded[0])))
        assert min(len(raw) for _, raw in taken) > 300
        assert b"recorded" not in taken[0][1], "nobody on the way can read it"
        async with rig(*engines) as made:
            before = await made.engine_metrics(decode)
            async with Streams(made) as streams:
                for endpoint, raw in taken * 20:
                    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(raw)
                    # A greeting and a WELCOME for another session; then it is closed.
                    with contextlib.suppress(OSError):
                        await asyncio.wait_for(reader.read(), 20.0)
                    writer.close()
            after = await made.engine_metrics(decode)
            done = [
                sum(g.requests_finished.get("length", 0) for g in m.groups) for m in (before, after)
            ]
            assert done[1] - done[0] == streams.num_done + NUM_STREAMS
            assert not made.lost

    drive(scenario())


# --- keys ----------------------------------------------------------------------------------------


def test_secrets_are_rotated_without_an_outage():
    old, new = b"the secret of yesterday", b"the secret of tomorrow"
    stages = [(old,), (old, new), (new, old), (new,)]
    configs = [engine_config("both", keys=KeyRing(stage)) for stage in stages]
    ids = map(str, itertools.count())

    async def is_served(engine, secrets):
        client = AsyncMPClient(KeyRing(secrets))
        try:
            await client.connect(engine.description)
            # The engine may not know yet that the client before this one is gone.
            request = EngineRequest(next(ids), prompts(1)[0], sampling(3))
            stream = client.open_stream(engine.incarnation, request.request_id, AddRequest(request))
            while (event := await stream.get()) and not isinstance(event, TokenOutput):
                assert isinstance(event, Accepted)
            return True
        finally:
            await client.close()

    async def scenario(started):
        for at, engine in enumerate(started):
            for stage in stages[max(at - 1, 0) : at + 2]:
                assert await is_served(engine, stage)
        with pytest.raises(EngineDeadError, match="a secret that this process does not have"):
            await is_served(started[0], (new,))
        with pytest.raises(EngineDeadError, match="rejects this process's fir"):
            await is_served(started[0], (new, old))

    with running(*(("both", config) for config in configs)) as started:
        drive(scenario(started))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "localhost"])
def test_an_engine_listens_on_one_address(host):
    with pytest.raises(EngineStartError, match="cannot listen on"):
        start_engine(engine_config("both"), host=host)


def test_an_engine_without_a_secret_listens_on_loopback_alone():
    with pytest.raises(EngineStartError, match="without a secret"):
        start_engine(engine_config("both", keys=KeyRing()), host="10.0.0.7")


# --- what an engine says to those it does not serve ----------------------------------------------


@contextlib.contextmanager
def raw_client(engine, identity):
    """A client's two sockets, greeted."""
    with zmq.Context() as context:
        sockets = connect_dealers(context, identity, engine.description, KEYS)
        try:
            to_engine, from_engine = sockets
            while not from_engine.poll(100):
                to_engine.send(encode(Hello(PROTOCOL_VERSION)))
            yield sockets
        finally:
            for dealer in sockets:
                dealer.close(linger=0)


def next_event(from_engine, kinds):
    while from_engine.poll(20_000):
        for event in decode_engine_frame(from_engine.recv()).events:
            if isinstance(event, kinds):
                return event
    raise AssertionError(f"no {kinds}")


@pytest.mark.parametrize("num_tokens", [1000, 10_000])
def test_more_tokens_than_a_sequence_holds_fail_their_request_alone(engines, num_tokens):
    decode = engines[1]
    request = EngineRequest("long", [5] * (8000 if num_tokens == 1000 else 3), sampling(8))
    with raw_client(decode, b"long") as (to_engine, from_engine):
        to_engine.send(encode(AddRequest(request, "decode")))
        assert isinstance(next_event(from_engine, (Accepted, Refused)), Accepted)
        to_engine.send(encode(Activate("long", [[5] * num_tokens])))
        output = next_event(from_engine, TokenOutput)
        assert (output.finish_reason, "max_model_len" in output.error) == ("error", True)
        to_engine.send(encode(AddRequest(EngineRequest("next", [5, 9, 3], sampling(2)))))
        assert next_event(from_engine, TokenOutput).request_id == "next"


def test_a_request_that_cannot_be_read_is_refused_by_name(engines):
    bad = msgspec.msgpack.encode(["add", ["mine", [1, "two", 3], []], "local", -1, None])
    with raw_client(engines[1], b"bad") as (to_engine, from_engine):
        to_engine.send(bad)
        refused = next_event(from_engine, Refused)
        assert (refused.request_id, refused.reason) == ("mine", "invalid")


async def connected(description):
    """A client of an engine, and why it has lost it, once it has."""
    lost = []
    client = AsyncMPClient(KEYS, on_dead=lambda _, reason: lost.append(reason))
    await client.connect(description)
    return client, lost


async def to_the_end(stream):
    while True:
        await stream.get()


@pytest.mark.silence
def test_a_client_that_vanishes_without_a_word_leaves_nothing_on_the_engine(engines):
    decode = engines[1]

    async def scenario():
        async with tapped(decode) as (seen, inward, outward), rig(decode) as witness:
            client, lost = await connected(seen)
            # One request computes, the others wait for their KV: no engine, however fast, finishes
            # these before it notices.
            for n, prompt in enumerate(prompts(4)):
                leg = "decode" if n else "local"
                request = AddRequest(EngineRequest(f"vanished{n}", prompt, sampling(4000)), leg)
                stream = client.open_stream(seen.incarnation, f"vanished{n}", request)
                assert isinstance(await stream.get(), Accepted)
            before = num_aborted(await witness.engine_metrics(decode))
            inward.is_hole = outward.is_hole = True

            with pytest.raises(EngineDeadError, match="sent nothing"):
                await to_the_end(stream)
            await until_idle(witness, decode)
            assert num_aborted(await witness.engine_metrics(decode)) > before
            assert len(lost) == 1
            await client.close()

    drive(scenario())


def test_an_engine_that_reads_nothing_is_lost_before_it_costs_memory():
    chunk = Abort(["x" * 256] * 64)

    async def scenario():
        async with ScriptedEngine("decode", "deaf", lambda _: []) as engine:
            client, lost = await connected(engine.member.description)
            engine.stop_reading()
            request = AddRequest(EngineRequest("first", [5], sampling(2)))
            stream = client.open_stream("deaf", "first", request)
            num_sent = 0
            while not lost:
                with contextlib.suppress(EngineDeadError):
                    last = client.open_stream("deaf", f"r{num_sent}", chunk)
                num_sent += 1
                assert num_sent <= 4 * MAX_WAITING_MESSAGES
                # The other end's heartbeats are heard, and the queue is sent from.
                await asyncio.sleep(0.0)
            assert lost == [NO_ROOM]
            for ended in (stream, last):
                with pytest.raises(EngineDeadError, match="reads no messages"):
                    await to_the_end(ended)
            assert not client.incarnations
            await client.close()

    drive(scenario())


def test_a_client_dropped_by_the_engine_learns_it_and_reconnects(engines):
    decode = engines[1]

    async def scenario():
        async with tapped(decode) as (seen, _, outward), rig(decode) as witness:
            client, lost = await connected(seen)
            request = EngineRequest("cut", prompts(1)[0], sampling(4000))
            stream = client.open_stream(seen.incarnation, "cut", AddRequest(request))
            while not isinstance(await stream.get(), TokenOutput):
                pass
            outward.cut()

            while not lost:
                # The client reconnects by itself, and then gets an answer.
                client.send(seen.incarnation, Utility(1, "metrics"))
                await asyncio.sleep(0.02)
            await until_idle(witness, decode)
            with pytest.raises(EngineDeadError):
                await to_the_end(stream)
            assert lost == [NOT_GREETED]
            await client.connect(seen)
            await client.metrics(seen.incarnation)
            await client.close()

    drive(scenario())
