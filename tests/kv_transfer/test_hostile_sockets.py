"""Floods of bytes, connections and sizes at every socket, while a real transfer goes on."""

import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from kv_transfer.errors import FailureReason
from kv_transfer.messages import encode
from tests.kv_transfer.fakes import KEYS, FakeEngine, FakeIO, make_engine, make_ticket, run_until
from tests.kv_transfer.test_messages import TO_CONSUMER, TO_PRODUCER
from tests.kv_transfer.test_zmq import NUM_TOKENS, PATIENT, SOURCE, TARGET, wait_until

NUM_STRINGS = 100_000
MOST_GROWTH = 96 << 20
"""Far less than what arrives if nobody throws it away, and more than an allocator's moods."""


@contextmanager
def engines(*, shares: bool = False) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with ExitStack() as stack:
        made = []
        for seed, name in enumerate("PD"):
            made.append(make_engine(name, FakeIO(10, seed=seed, shares=shares), config=PATIENT))
            stack.callback(made[-1].worker.close, 5.0)
        yield made[0], made[1]


@contextmanager
def zmq_socket(kind: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        made.sndtimeo = 20_000
        yield made


@contextmanager
def running(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do something in a thread until the block ends, and raise what it raised."""
    stop, raised = threading.Event(), []

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60.0)
    assert not thread.is_alive()
    assert not raised


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def assert_transfers(engines: tuple[FakeEngine, FakeEngine], request_id: str) -> None:
    producer, consumer = engines
    ticket = make_ticket(request_id, producer.worker.endpoints, NUM_TOKENS)
    producer.add(ticket)
    consumer.load(ticket, TARGET)
    producer.save(request_id, SOURCE, NUM_TOKENS)
    run_until(lambda: request_id in producer.ended & consumer.ended, engines)
    assert request_id in producer.sent & consumer.received
    got = consumer.io.tokens(0, TARGET, 0, NUM_TOKENS)
    assert (got == producer.io.tokens(0, SOURCE, 0, NUM_TOKENS)).all()


def strings(seed: int, examples: list) -> Iterator[list[bytes]]:
    """Random bytes, nearly right messages, and messages of many parts."""
    dice = random.Random(seed)
    frames = [encode(message) for message in examples]
    for n in range(NUM_STRINGS):
        if n % 4 == 0:
            frame = bytearray(dice.choice(frames))
            frame[dice.randrange(len(frame))] = dice.randrange(256)
            yield [bytes(frame)]
        elif n % 64 == 1:
            yield [dice.randbytes(dice.randrange(9)) for _ in range(dice.randrange(1, 6))]
        else:
            yield [dice.randbytes(dice.randrange(1, 60))]


@pytest.mark.parametrize("which", [0, 1], ids=["tcp", "abstract"])
def test_random_strings_at_a_producer_change_nothing(which: int) -> None:
    with engines() as both, zmq_socket(zmq.DEALER) as stranger:
        assert_transfers(both, "before")
        stranger.connect(both[0].worker.endpoints[which])
        before = resident_bytes()
        sent = []

        def flood(stop: threading.Event) -> None:
            for parts in strings(which, TO_PRODUCER):
                stranger.send_multipart(parts)
                sent.append(len(parts))

        with running(flood):
            for n in range(4):
                assert_transfers(both, f"during {n}")
            wait_until(lambda: both[0].stats.num_malformed > NUM_STRINGS // 2, "junk was read")
        assert len(sent) == NUM_STRINGS
        assert_transfers(both, "after")
        assert both[0].stats.num_malformed > NUM_STRINGS // 2
        assert resident_bytes() - before < MOST_GROWTH


def test_random_strings_of_a_producer_change_nothing_at_its_consumer() -> None:
    with engines() as both, zmq_socket(zmq.ROUTER) as malicious:
        consumer = both[1]
        port = malicious.bind_to_random_port("tcp://127.0.0.1")
        ticket = make_ticket("bad", f"tcp://127.0.0.1:{port}", NUM_TOKENS)
        consumer.load(ticket, TARGET)
        consumer.step()
        peer, _ = malicious.recv_multipart()
        before = resident_bytes()
        sent = []

        def flood(stop: threading.Event) -> None:
            for parts in strings(7, TO_CONSUMER):
                malicious.send_multipart([peer, *parts])
                sent.append(len(parts))

        with running(flood):
            for n in range(4):
                assert_transfers(both, f"during {n}")
            wait_until(lambda: consumer.stats.num_malformed > NUM_STRINGS // 2, "junk was read")
        assert len(sent) == NUM_STRINGS
        assert "bad" not in consumer.received
        assert_transfers(both, "after")
        assert resident_bytes() - before < MOST_GROWTH


def region_name(engine: FakeEngine) -> str:
    return "\0ttserve-kv-" + engine.worker.endpoints[2].removeprefix("shm://")


def test_random_strings_at_the_door_of_shared_memory_change_nothing() -> None:
    dice = random.Random(5)
    sealed = KEYS.seal(make_ticket("r", "tcp://127.0.0.1:1", NUM_TOKENS))
    with engines(shares=True) as both:
        files = len(list(Path("/proc/self/fd").iterdir()))
        before = resident_bytes()
        handed_out = []

        def flood(stop: threading.Event) -> None:
            for n in range(3000):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
                    door.settimeout(5.0)
                    door.connect(region_name(both[0]))
                    try:
                        for _ in range(dice.randrange(4)):
                            forged = bytearray(sealed)
                            forged[dice.randrange(len(forged))] ^= 1 << dice.randrange(8)
                            junk = dice.randbytes(dice.randrange(1, 3000))
                            door.send(dice.choice([junk, bytes(forged)]))
                        if n % 10 == 0:
                            door.shutdown(socket.SHUT_WR)
                            _, rights, _, _ = door.recvmsg(1 << 17, socket.CMSG_LEN(4))
                            handed_out.extend(rights)
                    except (BrokenPipeError, ConnectionResetError):
                        continue

        with running(flood):
            for n in range(4):
                assert_transfers(both, f"during {n}")
        assert not handed_out
        assert_transfers(both, "after")
        assert both[1].stats.paths.keys() == {"shared"}
        assert resident_bytes() - before < MOST_GROWTH
        wait_until(
            lambda: len(list(Path("/proc/self/fd").iterdir())) <= files + 16, "connections closed"
        )


@pytest.mark.parametrize("which", [0, 1], ids=["tcp", "abstract"])
def test_oversize_frames_close_their_connection_and_no_other(which: int) -> None:
    with engines() as both:
        before = resident_bytes()
        for n in range(8):
            with zmq_socket(zmq.DEALER) as stranger:
                stranger.connect(both[0].worker.endpoints[which])
                for size in (2049, 64 << 20):
                    stranger.send(bytes(size))
                if n % 4 == 0:
                    assert_transfers(both, f"during {n}")
        assert_transfers(both, "after")
        assert resident_bytes() - before < MOST_GROWTH


def test_an_oversize_payload_of_a_producer_ends_its_own_transfers_only() -> None:
    with engines() as both, zmq_socket(zmq.ROUTER) as malicious:
        consumer = both[1]
        port = malicious.bind_to_random_port("tcp://127.0.0.1")
        ticket = make_ticket("bad", f"tcp://127.0.0.1:{port}", NUM_TOKENS)
        consumer.load(ticket, TARGET)
        consumer.step()
        peer, _ = malicious.recv_multipart()
        malicious.send_multipart([peer, encode(TO_CONSUMER[0]), bytes(256 << 20)])
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
def test_a_thousand_half_open_connections_hold_up_nobody() -> None:
    with engines(shares=True) as both, ExitStack() as stack:
        tcp, abstract, _ = both[0].worker.endpoints
        host, _, port = tcp.removeprefix("tcp://").rpartition(":")
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
        stranger.connect(tcp)
        stranger.send(b"junk")
        wait_until(lambda: both[0].stats.num_malformed == 1, "a new connection is served")
    with engines() as both:
        assert_transfers(both, "after")
