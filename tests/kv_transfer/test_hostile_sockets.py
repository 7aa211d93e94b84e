"""Floods of bytes, connections and sizes at every socket, during a real transfer."""

import itertools
import os
import random
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from kv_transfer.errors import FailureReason
from kv_transfer.messages import encode
from kv_transfer.stores import shm_messages
from kv_transfer.stores.shm_messages import socket_name
from kv_transfer.ticket import Ticket
from kv_transfer.transports.tcp import address_of
from tests.kv_transfer.fakes import KEYS, FakeEngine, make_ticket, run_until
from tests.kv_transfer.sockets import (
    NUM_TOKENS,
    TARGET,
    assert_transfers,
    dial,
    engines,
    listen,
    wait_until,
    zmq_socket,
)
from tests.kv_transfer.stores.shm_servers import connect, server_process, value
from tests.kv_transfer.test_messages import TO_CONSUMER, TO_PRODUCER

PLAIN_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL".ljust(64, b"\0")
"""First bytes of a ZMQ peer without any key."""

many = pytest.mark.parametrize(
    "count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
MOST_GROWTH = 64 << 20
"""Far less than the flood if it were kept, and more than the noise of an allocator."""


def resident_bytes(process: int | str = "self") -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def assert_little_growth(before: int) -> None:
    """Wait until what a closed connection held is free again: its end is not synchronous."""
    wait_until(lambda: resident_bytes() - before < MOST_GROWTH, "the memory is free again")


def transfer_during(flood: Callable[[], None], both: list[FakeEngine]) -> None:
    """Move requests while a flood runs in a thread, and raise its exception."""
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        for n in itertools.count():
            assert_transfers(both, f"during {n}")
            if n >= 3 and flooding.done():
                break
    flooding.result()


def attract(consumer: FakeEngine, malicious: zmq.Socket[bytes]) -> bytes:
    """Let a consumer fetch from a producer made by hand; returns its address there."""
    consumer.load(make_ticket("bad", listen(malicious), NUM_TOKENS), TARGET)
    consumer.step()
    peer, _ = malicious.recv_multipart()
    return peer


def real_frames(ticket: Ticket) -> list[bytes]:
    """Return the frames that the consumer of a finished transfer has sent, in order."""
    sealed = KEYS.seal(ticket)
    names = {"transfer_id": ticket.transfer_id, "epoch": ticket.epoch, "ticket": sealed}
    said = []
    for example in TO_PRODUCER:
        known = {x: names[x] for x in example.__struct_fields__ if x in names}
        said.append(encode(msgspec.structs.replace(example, **known)))
    return said


def strings(seed: int, real: list[bytes], count: int) -> Iterator[list[bytes]]:
    """Make messages that are random, cut short, repeated, changed, reordered, or of many parts."""
    dice = random.Random(seed)
    for n in range(count):
        frame = dice.choice(real)
        match n % 8:
            case 0 | 1:
                yield [dice.randbytes(dice.randrange(1, 60))]
            case 2:
                yield [frame[: dice.randrange(len(frame))]]
            case 3:
                yield [frame]
            case 4 | 5:
                changed = bytearray(frame)
                changed[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
                yield [bytes(changed)]
            case 6:
                yield dice.sample(real, 2)
            case _:
                yield [dice.randbytes(dice.randrange(9)) for _ in range(dice.randrange(1, 6))]


def num_noticed(engine: FakeEngine) -> int:
    """Return how many messages an engine has counted as invalid."""
    stats = engine.stats
    return stats.num_malformed + stats.num_unknown_ids + stats.num_bad_tickets


def send_oversize(endpoint: str, num_bytes: int) -> None:
    with zmq_socket(zmq.DEALER) as stranger:
        dial(stranger, endpoint)
        stranger.send(bytes(num_bytes))


@many
@pytest.mark.parametrize("which", [0, 1], ids=["tcp", "abstract"])
def test_hostile_frames_at_a_producer_change_nothing(which: int, count: int) -> None:
    """Send from a peer that holds the deployment's secret: frames of others are not even read."""
    with engines() as both, zmq_socket(zmq.DEALER) as stranger:
        assert_transfers(both, "before")
        endpoint = both[0].worker.endpoints[which]
        dial(stranger, endpoint)
        real = real_frames(make_ticket("before", both[0].worker.endpoints, NUM_TOKENS))
        before = resident_bytes()
        sent = []

        def flood() -> None:
            for parts in strings(which, real, count):
                stranger.send_multipart(parts)
                sent.append(len(parts))
                if len(sent) % 1000 == 0:
                    send_oversize(endpoint, 4096)

        transfer_during(flood, both)
        wait_until(lambda: num_noticed(both[0]) > count // 2, "junk was read", 120.0)
        assert len(sent) == count
        assert_transfers(both, "after")
        assert_little_growth(before)


@many
def test_hostile_frames_of_a_producer_change_nothing_at_its_consumer(count: int) -> None:
    with engines() as both, zmq_socket(zmq.ROUTER) as malicious:
        consumer = both[1]
        peer = attract(consumer, malicious)
        before = resident_bytes()
        sent = []

        def flood() -> None:
            for parts in strings(7, [encode(x) for x in TO_CONSUMER], count):
                malicious.send_multipart([peer, *parts])
                sent.append(len(parts))

        transfer_during(flood, both)
        wait_until(lambda: num_noticed(consumer) > count // 2, "junk was read", 120.0)
        assert len(sent) == count
        assert "bad" not in consumer.received
        assert_transfers(both, "after")
        assert_little_growth(before)


def region_name(engine: FakeEngine) -> str:
    return "\0ttserve-kv-" + engine.worker.endpoints[2].removeprefix("shm://")


@many
def test_bytes_of_a_peer_without_a_secret_are_not_read(count: int) -> None:
    dice = random.Random(11)
    with engines() as both:
        assert_transfers(both, "before")
        host, _, port = address_of(both[0].worker.endpoints[0])[len("tcp://") :].rpartition(":")
        real = real_frames(make_ticket("before", both[0].worker.endpoints, NUM_TOKENS))
        before = resident_bytes()

        def flood() -> None:
            left = list(strings(13, real, count))
            while left:
                with socket.create_connection((host, int(port))) as connection, suppress(OSError):
                    if dice.random() < 0.5:
                        connection.sendall(PLAIN_GREETING)
                    for _ in range(min(len(left), dice.randrange(1, 500))):
                        (frame, *_) = left.pop()
                        connection.sendall(bytes([0, len(frame) % 256]) + frame)

        transfer_during(flood, both)
        assert_transfers(both, "after")
        assert num_noticed(both[0]) == 0
        assert_little_growth(before)


def flood_pool(name: str, count: int) -> None:
    """Send so many bad frames to a pool's socket, over one connection after the other."""
    dice = random.Random(17)
    questions = [
        shm_messages.encode(x)
        for x in (
            shm_messages.Greeting(shm_messages.PROTOCOL_VERSION),
            shm_messages.NumPresent((b"a", b"b")),
            shm_messages.Get((b"a",)),
            shm_messages.Begin(b"a", 4096),
            shm_messages.Commit(1),
            shm_messages.Release(1),
            shm_messages.Discard(b"a"),
        )
    ]
    frames = itertools.chain.from_iterable(strings(19, questions, sys.maxsize))
    num_sent = 0
    while num_sent < count:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(20.0)
            # Not let in while too many wait; greeted or not, until it hangs up.
            with suppress(OSError):
                stranger.connect(name)
                if dice.random() < 0.9:
                    stranger.send(questions[0])
                for frame in itertools.islice(frames, 20):
                    stranger.send(frame or b"?")
                    num_sent += 1
                stranger.send(bytes(100_000))


@many
def test_hostile_frames_at_a_pools_socket_change_nothing(count: int) -> None:
    """Run the server in a process of its own; every client is of the same user."""
    with server_process() as (address, process):
        store = connect(address)
        before = resident_bytes(process.pid)

        with ThreadPoolExecutor(1) as threads:
            flooding = threads.submit(flood_pool, socket_name(address, os.getuid()), count)
            for n in itertools.count():
                if n >= 8 and flooding.done():
                    break
                key, want = f"honest {n}".encode(), value(n, 4096)
                assert store.put(key, want) in {"stored", "dropped"}
                for lease in store.get([key]):
                    assert (lease.value == want).all()
                    lease.release()
        flooding.result()
        assert store.put(b"after", value(99)) == "stored"
        (lease,) = store.get([b"after"])
        assert (lease.value == value(99)).all()
        lease.release()
        store.close()
        assert process.poll() is None
        assert resident_bytes(process.pid) - before < MOST_GROWTH


@pytest.mark.parametrize("which", [0, 1], ids=["tcp", "abstract"])
def test_oversize_frames_close_their_connection_and_no_other(which: int) -> None:
    # Made before and sent without a copy, so that only the receiver's memory can grow.
    oversize = [bytes(2049), b"x" * (32 << 20)]
    with engines() as both:
        before = resident_bytes()
        for n in range(4):
            with zmq_socket(zmq.DEALER) as stranger:
                dial(stranger, both[0].worker.endpoints[which])
                for frame in oversize:
                    stranger.send(frame, copy=False)
                if n % 2 == 0:
                    assert_transfers(both, f"during {n}")
        assert_transfers(both, "after")
        assert_little_growth(before)


def test_an_oversize_payload_of_a_producer_ends_its_own_transfers_only() -> None:
    with engines() as both, zmq_socket(zmq.ROUTER) as malicious:
        consumer = both[1]
        peer = attract(consumer, malicious)
        malicious.send_multipart([peer, encode(TO_CONSUMER[0]), bytes(64 << 20)])
        run_until(lambda: "bad" in consumer.ended, [consumer])
        assert consumer.reasons == {"bad": FailureReason.PEER_DEAD}
        assert_transfers(both, "after")


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8192:
        pytest.skip(f"this process may open {hard} files; 8192 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_half_open_connections_delay_no_transfer() -> None:
    with engines(shares=True) as both, ExitStack() as stack:
        tcp, abstract, _ = both[0].worker.endpoints
        host, _, port = address_of(tcp).removeprefix("tcp://").rpartition(":")
        for n in range(1000):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f"[: n % 11])  # Part of a greeting.
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.connect("\0" + abstract.removeprefix("ipc://@"))
        for _ in range(300):
            door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(door).connect(region_name(both[0]))
        assert_transfers(both, "during")
        assert both[1].stats.paths.keys() == {"shared"}
        stranger = stack.enter_context(zmq_socket(zmq.DEALER))
        dial(stranger, tcp)
        stranger.send(b"junk")
        wait_until(lambda: both[0].stats.num_malformed == 1, "a new connection is served")
    with engines() as both:
        assert_transfers(both, "after")
