"""Floods of hostile frames at both sockets of a real engine, while honest requests run."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from replicas.async_client import AsyncMPClient
from replicas.codec import encode, max_client_message_bytes
from replicas.dealer import connect_dealers
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Activate,
    AddRequest,
    EngineRequest,
    Hello,
    LoadKV,
    Utility,
)
from tests.cluster.engines import KEYS, engine_config, rig, running, sampling, until
from tests.cluster.test_control_attacks import Streams, drive, tapped

pytestmark = pytest.mark.process

SLOW = [pytest.mark.slow, pytest.mark.timeout(1500)]
COUNTS = [500, pytest.param(100_000, marks=SLOW)]
# Each with a connection and a handshake of its own, which cost the milliseconds.
CONNECTIONS = [500, pytest.param(20_000, marks=SLOW)]
MOST_GROWTH = 96 << 20
"""Bytes; an inbox that is full of the costliest messages, and an allocator's moods."""
DRAIN = msgspec.msgpack.encode(["drain"])


@pytest.fixture(scope="module")
def engine():
    with running(("both", engine_config("both", max_num_waiting=64))) as [made]:
        yield made


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def flooded(engine, flood):
    """Run honest streams while a thread floods; the growth of the engine's memory in bytes."""
    async with rig(engine) as made, Streams(made) as streams:
        before_bytes, before = resident_bytes(engine.description.pid), streams.num_done
        most = [before_bytes]
        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.2)
            assert engine.handle.is_alive
            most.append(resident_bytes(engine.description.pid))
        assert streams.num_done > before
        assert not made.lost
        during = streams.num_done
        await until(lambda: streams.num_done >= during + 2, "streams go on")
    growth = max(most) - before_bytes
    print(f"grew by {growth / 2**20:.1f} MiB, {during - before} streams ended meanwhile")
    return growth


# --- raw bytes -----------------------------------------------------------------------------------


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def raw_strings(dice, recorded, count):
    """Random bytes; real sessions cut short, changed or with parts exchanged; sizes without end."""
    for n in range(count):
        session = dice.choice(recorded)
        match n % 6:
            case 0:
                yield dice.randbytes(dice.randrange(1, 200))
            case 1:
                yield session
            case 2:
                yield session[: dice.randrange(1, len(session))]
            case 3:
                changed = bytearray(session)
                changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
                yield bytes(changed)
            case 4:
                cut = dice.randrange(64, len(session))
                yield session[:64] + session[cut:] + session[64:cut]
            case _:
                yield GREETING + b"\x06" + struct.pack(">Q", dice.randrange(1 << 62)) + bytes(64)


def throw(endpoint, strings):
    """Each on a connection of its own, which breaks afterwards."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    for raw in strings:
        with socket.socket() as connection:
            connection.settimeout(20.0)
            # Ends with a reset: no port waits for late packets.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):
                connection.connect((host, int(port)))
                connection.sendall(raw)


async def recorded_sessions(engine):
    async with tapped(engine) as (seen, inward, outward):
        client = AsyncMPClient(KEYS)
        await client.connect(seen)
        await client.metrics(seen.incarnation)
        await client.close()
        return [bytes(inward.recorded[0]), bytes(outward.recorded[0])]


@pytest.mark.parametrize("count", CONNECTIONS)
@pytest.mark.parametrize("which", ["input_endpoint", "output_endpoint"])
def test_random_bytes_change_nothing(engine, which, count):
    async def scenario():
        recorded = await recorded_sessions(engine)
        strings = raw_strings(random.Random(count), recorded, count)
        endpoint = getattr(engine.description, which)
        return await flooded(engine, lambda: throw(endpoint, strings))

    assert drive(scenario(), 1200.0) < MOST_GROWTH


# --- messages of a client ------------------------------------------------------------------------


def hostile_messages(dice, count):
    """What a client of the deployment could send that has lost its mind."""
    request = EngineRequest("mad", [5, 9, 3], sampling(2))
    real = [
        *map(encode, [
            Hello(PROTOCOL_VERSION), AddRequest(request), AddRequest(request, "decode"),
            AddRequest(request, "prefill", 0, b"x" * 2000), AddRequest(request, "local", 99),
            Activate("mad", [[5] * 9000]), Activate("mad", [[-1]]), Activate("mad", [[1], [2]]),
            Activate("mad", []), LoadKV("mad", b"x" * 5000, -(2**63)), Abort(["mad"] * 100),
            Abort([]), Utility(2**63, "x" * 10_000), Utility(0, "metrics"),
            Utility(1, "kv_transfers"), AddRequest(EngineRequest("y" * 300, [5], sampling(2))),
            AddRequest(EngineRequest("n", [5], sampling(2, seed=2**63 - 1, top_k=2**63 - 1))),
        ]),
        DRAIN,
        b"\x92\xa5abort\x91\xa2\xff\xfe",
        b"\x93\xa5hello\x04" + b"\x91" * 10_000,
        msgspec.msgpack.encode(["add", ["mad", [1, "two"], []], "local", -1, None]),
    ]  # fmt: skip
    for n in range(count):
        raw = dice.choice(real)
        match n % 4:
            case 0:
                changed = bytearray(raw)
                changed[dice.randrange(len(changed))] = dice.randrange(256)
                raw = bytes(changed)
            case 1:
                raw = raw[: dice.randrange(len(raw))]
            case 2:
                raw = dice.randbytes(dice.randrange(60))
        yield [raw] if n % 64 else [raw, b"and", b"more"]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("which", [0, 1], ids=["input", "output"])
def test_malformed_messages_change_nothing(engine, which, count):
    def flood():
        with zmq.Context() as context:
            sockets = connect_dealers(context, b"mad", engine.description, KEYS)
            dealer = sockets[which]
            dealer.set(zmq.SNDTIMEO, 60_000)
            for n, parts in enumerate(hostile_messages(random.Random(count), count)):
                dealer.send_multipart(parts)
                while sockets[1].poll(0):
                    sockets[1].recv_multipart()
                if n % 500 == 0:
                    time.sleep(0.01)
            # One that is too long: it ends the connection, and nothing else.
            made = engine.description
            most = max_client_message_bytes(
                made.max_model_len, made.vocab_size, made.slots_per_group
            )
            dealer.send(bytes(most + 1000))
            time.sleep(1.0)
            for socket in sockets:
                socket.close(linger=0)

    assert drive(flooded(engine, flood), 1200.0) < MOST_GROWTH
