"""The connector over real sockets, between threads and between processes."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.messages import encode
from tests.kv_transfer.fakes import (
    LAYOUT,
    QUICK,
    FakeEngine,
    FakeIO,
    make_engine,
    make_ticket,
    run_until,
)
from tests.kv_transfer.test_messages import FETCH, TO_CONSUMER, TO_PRODUCER

ROOT = Path(__file__).parents[2]
# A transfer in a test machine under load may be slow; only the tests of silence need quick ones.
PATIENT = msgspec.structs.replace(QUICK, no_progress_s=10.0, lease_s=20.0, rendezvous_s=20.0)
SOURCE, TARGET = tuple(range(1, 9)), tuple(range(9, 1, -1))
NUM_TOKENS = 8 * 32 - 9


@pytest.fixture(params=["tcp", "ipc"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    if request.param == "tcp":
        return lambda name: "tcp://127.0.0.1:*"
    return lambda name: f"ipc://{tmp_path}/{name}"


@contextmanager
def engines(
    *names: str,
    bind: Callable[[str], str] = lambda name: "tcp://127.0.0.1:*",
    num_blocks: int = 10,
    config=PATIENT,
) -> Iterator[list[FakeEngine]]:
    made = [
        make_engine(name, FakeIO(num_blocks, seed=seed), bind=bind(name), config=config)
        for seed, name in enumerate(names)
    ]
    try:
        yield made
    finally:
        for engine in made:
            engine.worker.close(5.0)


def start(producer: FakeEngine, consumer: FakeEngine, num_ready: int = NUM_TOKENS) -> None:
    ticket = make_ticket("r", producer.worker.endpoint, NUM_TOKENS)
    producer.scheduler.on_new_request("r", ticket)
    consumer.load(ticket, TARGET)
    producer.save("r", SOURCE, num_ready)


def wait_until(predicate: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < give_up_s, what
        threading.Event().wait(0.005)


# ---- delivery


def test_thirty_two_concurrent_requests_arrive_byte_for_byte(bind: Callable[[str], str]) -> None:
    with engines("P", "D", bind=bind, num_blocks=300) as (producer, consumer):
        dice = random.Random(7)
        requests = {}
        free = dice.sample(range(1, 300), 299), dice.sample(range(1, 300), 299)
        for n in range(32):
            num_tokens = dice.randint(1, 9 * 32)
            num_blocks = LAYOUT.num_blocks(num_tokens)
            blocks = tuple(tuple(pool.pop() for _ in range(num_blocks)) for pool in free)
            requests[f"r{n}"] = (num_tokens, *blocks)
            ticket = make_ticket(f"r{n}", producer.worker.endpoint, num_tokens)
            producer.scheduler.on_new_request(f"r{n}", ticket)
            producer.save(f"r{n}", blocks[0], num_tokens)
            consumer.load(ticket, blocks[1])
        run_until(lambda: len(producer.sent) == 32, [producer, consumer])
        assert consumer.received == producer.sent == requests.keys()
        for num_tokens, source, target in requests.values():
            got, want = (
                consumer.io.rows(0, target, num_tokens),
                producer.io.rows(0, source, num_tokens),
            )
            assert np.array_equal(got, want)
            assert not consumer.io.tail(target[-1], num_tokens).any()
        total = sum(len(source) for _, source, _ in requests.values())
        sent, received = producer.stats, consumer.stats
        assert sent.blocks_sent == received.blocks_received == total
        assert sent.bytes_sent == received.bytes_received == total * LAYOUT.bytes_per_block
        assert (sent.num_sent, received.num_received) == (32, 32)
        assert sent.num_leased_blocks == received.num_inflight_loads == 0
        assert received.stage_seconds["total"] > 0


def test_one_engine_produces_and_consumes_at_once() -> None:
    with engines("A", "B") as (one, other):
        there = make_ticket("x", one.worker.endpoint, 60, producer="A", consumer="B")
        back = make_ticket("y", other.worker.endpoint, 60, producer="B", consumer="A")
        one.scheduler.on_new_request("x", there)
        other.scheduler.on_new_request("y", back)
        other.load(there, (1, 2))
        one.load(back, (3, 4))
        one.save("x", (5, 6), 60)
        other.save("y", (7, 8), 60)
        run_until(lambda: {"x", "y"} == one.ended == other.ended, [one, other])
        assert np.array_equal(one.io.rows(0, (3, 4), 60), other.io.rows(0, (7, 8), 60))
        assert np.array_equal(other.io.rows(0, (1, 2), 60), one.io.rows(0, (5, 6), 60))


def test_chunks_travel_while_prefill_goes_on(bind: Callable[[str], str]) -> None:
    with engines("P", "D", bind=bind) as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.writes) == 3, [producer, consumer])
        assert not consumer.ended
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: "r" in producer.sent, [producer, consumer])
        assert sorted(consumer.io.writes) == [(0, block) for block in sorted(TARGET)]


def test_only_the_blocks_behind_a_local_hit_travel() -> None:
    with engines("P", "D") as (producer, consumer):
        ticket = make_ticket("r", producer.worker.endpoint, NUM_TOKENS)
        producer.scheduler.on_new_request("r", ticket)
        consumer.load(ticket, TARGET, num_cached=5 * 32)
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: "r" in producer.sent, [producer, consumer])
        assert sorted(consumer.io.writes) == [(0, block) for block in sorted(TARGET[5:])]
        assert producer.stats.blocks_sent == consumer.stats.blocks_received == 3


def test_a_request_id_can_be_used_again_after_its_transfer_ended() -> None:
    with engines("P", "D") as (producer, consumer):
        for attempt in (b"1", b"2"):
            ticket = make_ticket("r", producer.worker.endpoint, NUM_TOKENS)
            ticket = msgspec.structs.replace(ticket, transfer_id=attempt * 16)
            for engine in (producer, consumer):
                engine.received.clear()
                engine.sent.clear()
            producer.scheduler.on_new_request("r", ticket)
            consumer.load(ticket, TARGET)
            producer.save("r", SOURCE, NUM_TOKENS)
            run_until(lambda: "r" in producer.sent, [producer, consumer])
            assert "r" in consumer.received


# ---- cancellation and refusal


def test_a_cancel_by_the_consumer_frees_the_producer_and_stops_writes() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.writes) == 3, [producer, consumer])
        assert consumer.scheduler.request_finished("r", TARGET)
        consumer.step()
        assert consumer.failed == {"r": FailureReason.CANCELLED}
        canary = consumer.io.cache.copy()
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: bool(producer.failed), [producer, consumer])
        assert producer.failed == {"r": FailureReason.CANCELLED}
        assert np.array_equal(consumer.io.cache, canary)


def test_a_cancel_by_the_producer_reaches_the_consumer() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.writes) == 3, [producer, consumer])
        producer.scheduler.cancel("r")
        run_until(lambda: bool(consumer.failed), [producer, consumer])
        assert consumer.failed == producer.failed == {"r": FailureReason.CANCELLED}


def test_a_lease_nobody_fetches_expires_and_wakes_the_engine() -> None:
    config = msgspec.structs.replace(QUICK, rendezvous_s=0.2)
    with engines("P", config=config) as (producer,):
        producer.scheduler.on_new_request("r", make_ticket("r", "tcp://127.0.0.1:1", NUM_TOKENS))
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: bool(producer.failed), [producer])
        assert producer.failed == {"r": FailureReason.EXPIRED}


@pytest.mark.parametrize(
    ("offered", "used", "reason"),
    [
        ({"consumer": "E"}, {}, FailureReason.AUDIENCE),
        ({}, {"producer_incarnation": "P-before"}, FailureReason.INCARNATION),
        ({"num_tokens": 8}, {}, FailureReason.LAYOUT),
    ],
)
def test_wrong_ends_get_no_data(offered, used, reason: FailureReason) -> None:
    with engines("P", "D") as (producer, consumer):
        ticket = make_ticket("r", producer.worker.endpoint, NUM_TOKENS)
        producer.scheduler.on_new_request("r", msgspec.structs.replace(ticket, **offered))
        producer.save("r", SOURCE, NUM_TOKENS)
        producer.step()
        consumer.load(msgspec.structs.replace(ticket, **used), TARGET)
        run_until(lambda: bool(consumer.failed), [producer, consumer])
        assert consumer.failed == {"r": reason}
        assert consumer.io.writes == []


# ---- death and silence


@contextmanager
def peer_process(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``peer_process`` and yield it with the line that it prints when it is set up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kv_transfer.peer_process", *args],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def producer_process(num_ready: int) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return peer_process("producer", str(NUM_TOKENS), str(num_ready))


def stream_from(endpoint: str, consumer: FakeEngine) -> None:
    """Fetch until the three blocks that are ready have arrived."""
    consumer.load(make_ticket("r", endpoint, NUM_TOKENS), TARGET)
    run_until(lambda: len(consumer.io.writes) == 3, [consumer])


@pytest.mark.process
def test_blocks_arrive_from_another_process() -> None:
    with engines("D", config=QUICK) as (consumer,), producer_process(NUM_TOKENS) as (_, endpoint):
        consumer.load(make_ticket("r", endpoint, NUM_TOKENS), TARGET)
        run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.received == {"r"}
        want = FakeIO(64, seed=1).rows(0, SOURCE, NUM_TOKENS)
        assert np.array_equal(consumer.io.rows(0, TARGET, NUM_TOKENS), want)


@pytest.mark.process
def test_a_killed_producer_fails_the_load_as_dead() -> None:
    with engines("D") as (consumer,), producer_process(100) as (process, endpoint):
        stream_from(endpoint, consumer)
        process.kill()
        run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.failed == {"r": FailureReason.PEER_DEAD}


@pytest.mark.process
def test_a_frozen_producer_fails_the_load_and_its_late_chunks_are_not_written() -> None:
    with engines("D", config=QUICK) as (consumer,), producer_process(100) as (process, endpoint):
        stream_from(endpoint, consumer)
        process.send_signal(signal.SIGSTOP)
        run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.failed == {"r": FailureReason.STALLED}
        canary = consumer.io.cache.copy()
        process.send_signal(signal.SIGCONT)
        # The revived producer serves a second transfer over the same connection: whatever it
        # still had to say about the first one has been received by then, and ignored.
        consumer.load(
            msgspec.structs.replace(
                make_ticket("unknown", endpoint, NUM_TOKENS), producer_incarnation="other"
            ),
            TARGET,
        )
        run_until(lambda: "unknown" in consumer.failed, [consumer])
        assert np.array_equal(consumer.io.cache, canary)


@pytest.mark.process
def test_a_killed_consumer_gives_the_blocks_back_long_before_the_lease_ends() -> None:
    config = msgspec.structs.replace(QUICK, lease_s=1000.0)
    with engines("P", config=config) as (producer,):
        endpoint = producer.worker.endpoint
        producer.scheduler.on_new_request("r", make_ticket("r", endpoint, NUM_TOKENS))
        producer.save("r", SOURCE, 100)
        producer.step()
        with peer_process("consumer", str(NUM_TOKENS), endpoint) as (process, _):
            run_until(lambda: len(producer.io.reads) == 3, [producer])
            process.kill()
            run_until(lambda: bool(producer.ended), [producer])
        assert producer.failed == {"r": FailureReason.PEER_DEAD}
        assert producer.stats.num_leased_blocks == 0


def test_an_address_where_nobody_listens_is_dead_at_once() -> None:
    with engines("D") as (consumer,):
        with socket.socket() as placeholder:
            placeholder.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{placeholder.getsockname()[1]}"
            consumer.load(make_ticket("r", endpoint, NUM_TOKENS), TARGET)
            run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.failed == {"r": FailureReason.PEER_DEAD}


def test_an_endpoint_that_cannot_be_dialled_fails_only_its_load() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer)
        consumer.load(make_ticket("bad", "tcp://not a host:x", NUM_TOKENS), TARGET)
        run_until(lambda: len(consumer.ended) == 2, [producer, consumer])
        assert consumer.failed == {"bad": FailureReason.PEER_DEAD}
        assert consumer.received == {"r"}


# ---- hostile bytes


def test_a_late_or_foreign_chunk_is_dropped_and_counted() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with engines("D") as (consumer,):
            ticket = make_ticket("r", f"tcp://127.0.0.1:{port}", NUM_TOKENS)
            consumer.load(ticket, TARGET)
            consumer.step()
            peer, _ = router.recv_multipart()
            canary = consumer.io.cache.copy()
            payload = bytes(LAYOUT.bytes_per_block)
            data = msgspec.structs.replace(
                TO_CONSUMER[0], transfer_id=ticket.transfer_id, num_blocks=1
            )
            for changes, body in [
                ({"transfer_id": b"?" * 16}, payload),
                ({"epoch": 9}, payload),
                ({"incarnation": "P-before"}, payload),
                ({"first_block": 1 << 20}, payload),
                ({}, payload[:-1]),
                ({}, payload),
                ({}, payload),
            ]:
                frame = encode(msgspec.structs.replace(data, **changes))
                router.send_multipart([peer, frame, body])
            run_until(lambda: bool(consumer.ended), [consumer])
            assert consumer.failed == {"r": FailureReason.CHECKSUM}
            stats = consumer.stats
            assert stats.num_dropped_chunks == 3
            assert stats.num_unknown_ids == 1
            assert stats.num_malformed == 2
            assert stats.num_checksum_failures == 2
            router.send_multipart([peer, encode(data), payload])
            wait_until(lambda: consumer.stats.num_dropped_chunks == 4, "late chunk seen")
            consumer.step()
            assert np.array_equal(consumer.io.cache, canary)
    finally:
        router.close()
        context.term()


def test_random_bytes_at_the_socket_change_nothing(bind: Callable[[str], str]) -> None:
    with engines("P", "D", bind=bind) as (producer, consumer):
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(producer.worker.endpoint)
        dice = random.Random(3)
        for _ in range(2000):
            frame = bytearray(encode(dice.choice(TO_PRODUCER)))
            frame[dice.randrange(len(frame))] = dice.randrange(256)
            stranger.send_multipart(
                dice.choice([[dice.randbytes(dice.randrange(80))], [bytes(frame)], [b"", b"", b""]])
            )
        stranger.send(bytes(1 << 20))
        start(producer, consumer)
        run_until(lambda: "r" in producer.sent, [producer, consumer])
        assert consumer.received == {"r"}
        wait_until(lambda: producer.stats.num_malformed > 1000, "junk was read")
        stranger.close()
        context.term()


def test_bytes_that_are_not_zmq_change_nothing() -> None:
    with engines("P", "D") as (producer, consumer):
        port = int(producer.worker.endpoint.rpartition(":")[2])
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(junk)
        start(producer, consumer)
        run_until(lambda: "r" in producer.sent, [producer, consumer])
        assert consumer.received == {"r"}


def test_a_fetch_of_another_protocol_version_is_answered_with_that_reason() -> None:
    with engines("P") as (producer,):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(producer.worker.endpoint)
        dealer.send(encode(msgspec.structs.replace(FETCH, version=99)))
        assert dealer.poll(10_000)
        assert b"version" in dealer.recv()
        dealer.close()
        context.term()


# ---- start and end


def test_close_leaves_no_thread_socket_or_file(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with engines("P", "D", bind=lambda name: f"ipc://{tmp_path}/{name}") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.writes) == 3, [producer, consumer])
        assert len(list(tmp_path.iterdir())) == 2
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "file descriptors are closed")
    producer.worker.close(1.0)
    with pytest.raises(TransferError, match="closed"):
        producer.step()


def test_closing_one_end_mid_stream_fails_the_other() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.writes) == 3, [producer, consumer])
        producer.worker.close(5.0)
        run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.failed == {"r": FailureReason.PEER_DEAD}


@pytest.mark.parametrize(
    "address", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:5", "inproc://x", "tcp://127.0.0.1:x"]
)
def test_only_a_named_address_is_bound(address: str) -> None:
    with pytest.raises(TransferError, match="cannot bind"):
        make_engine("P", FakeIO(4), bind=address)
