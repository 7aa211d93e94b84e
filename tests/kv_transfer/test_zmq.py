"""The connector over real sockets, between threads and between processes."""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import zmq

from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.messages import encode
from kv_transfer.transport import CancelSend
from kv_transfer.transports.tcp import address_of
from kv_transfer.transports.wake_up import WakeUp
from tests.kv_transfer.fakes import (
    KEYS,
    LAYOUT,
    QUICK,
    FakeEngine,
    FakeIO,
    make_engine,
    make_ticket,
    run_until,
)
from tests.kv_transfer.insiders import dial, listen
from tests.kv_transfer.test_messages import FETCH, TO_CONSUMER, TO_PRODUCER

# A transfer in a test machine under load may be slow; only the tests of silence need quick ones.
PATIENT = msgspec.structs.replace(QUICK, no_progress_s=10.0, lease_s=20.0, rendezvous_s=20.0)
SOURCE, TARGET = tuple(range(1, 9)), tuple(range(9, 1, -1))
NUM_TOKENS = 8 * 32 - 9


class Way(NamedTuple):
    """Way in which a consumer reaches a producer.

    Attributes:
        bind: Address on which the producer listens, with a directory in it.
        is_near: Whether the consumer gets the producer's abstract socket too.
        shares: Whether the KV memory of both is shared.
    """

    bind: str
    is_near: bool = True
    shares: bool = False

    def endpoints(self, engine: FakeEngine) -> tuple[str, ...]:
        return engine.worker.endpoints if self.is_near else engine.worker.endpoints[:1]


TCP = "tcp://127.0.0.1:*"
SHARED = Way(TCP, shares=True)
WAYS = {
    "tcp": Way(TCP, is_near=False),
    "file": Way("ipc://{}", is_near=False),
    "abstract": Way(TCP),
    "shared": SHARED,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    found = WAYS[request.param]
    return found._replace(bind=found.bind.format(tmp_path / "{}"))


@contextmanager
def engines(
    *names: str, way: Way = WAYS["tcp"], num_blocks: int = 10, config=PATIENT
) -> Iterator[list[FakeEngine]]:
    made = [
        make_engine(
            name,
            FakeIO(num_blocks, seed=seed, shares=way.shares),
            bind=way.bind.format(name),
            config=config,
        )
        for seed, name in enumerate(names)
    ]
    try:
        yield made
    finally:
        for engine in made:
            engine.worker.close(5.0)


def start(
    producer: FakeEngine, consumer: FakeEngine, num_ready: int = NUM_TOKENS, way: Way = WAYS["tcp"]
) -> None:
    ticket = make_ticket("r", way.endpoints(producer), NUM_TOKENS)
    producer.add(ticket)
    consumer.load(ticket, TARGET)
    producer.save("r", SOURCE, num_ready)


def wait_until(predicate: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    give_up_s = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < give_up_s, what
        threading.Event().wait(0.005)


# ---- delivery


def test_thirty_two_concurrent_requests_arrive_byte_for_byte(way: Way) -> None:
    with engines("P", "D", way=way, num_blocks=300) as (producer, consumer):
        dice = random.Random(7)
        requests = {}
        free = dice.sample(range(1, 300), 299), dice.sample(range(1, 300), 299)
        for n in range(32):
            num_tokens = dice.randint(1, 9 * 32)
            num_blocks = LAYOUT.num_blocks(num_tokens)
            blocks = tuple(tuple(pool.pop() for _ in range(num_blocks)) for pool in free)
            requests[f"r{n}"] = (num_tokens, *blocks)
            ticket = make_ticket(f"r{n}", way.endpoints(producer), num_tokens)
            producer.add(ticket)
            producer.save(f"r{n}", blocks[0], num_tokens)
            consumer.load(ticket, blocks[1])
        run_until(lambda: len(producer.ended & consumer.ended) == 32, [producer, consumer])
        assert consumer.received == producer.sent == requests.keys()
        for num_tokens, source, target in requests.values():
            got, want = (
                consumer.io.tokens(0, target, 0, num_tokens),
                producer.io.tokens(0, source, 0, num_tokens),
            )
            assert np.array_equal(got, want)
            assert not consumer.io.tail(target, num_tokens).any()
        num_bytes = LAYOUT.row_bytes * sum(len(source) for _, source, _ in requests.values())
        name = "shared" if way.shares else "inline"
        sent, received = producer.stats, consumer.stats
        assert sent.paths.keys() == received.paths.keys() == {name}
        assert sent.paths[name].bytes_sent == received.paths[name].bytes_received == num_bytes
        assert (sent.paths[name].num_sent, received.paths[name].num_received) == (32, 32)
        assert sent.num_leased_blocks == received.num_inflight_loads == 0
        assert received.stages["total"].total_s > 0


def test_one_engine_produces_and_consumes_at_once() -> None:
    with engines("A", "B") as (one, other):
        there = make_ticket("x", one.worker.endpoints, 60, producer="A", consumer="B")
        back = make_ticket("y", other.worker.endpoints, 60, producer="B", consumer="A")
        one.add(there)
        other.add(back)
        other.load(there, (1, 2))
        one.load(back, (3, 4))
        one.save("x", (5, 6), 60)
        other.save("y", (7, 8), 60)
        run_until(lambda: {"x", "y"} == one.ended == other.ended, [one, other])
        assert np.array_equal(one.io.tokens(0, (3, 4), 0, 60), other.io.tokens(0, (7, 8), 0, 60))
        assert np.array_equal(other.io.tokens(0, (1, 2), 0, 60), one.io.tokens(0, (5, 6), 0, 60))


def test_chunks_travel_during_prefill(way: Way) -> None:
    with engines("P", "D", way=way) as (producer, consumer):
        start(producer, consumer, num_ready=100, way=way)
        run_until(lambda: len(consumer.io.changed()) == 3, [producer, consumer])
        assert not consumer.ended
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: {"r"} == producer.sent == consumer.received, [producer, consumer])
        assert consumer.io.changed() == set(TARGET)


def test_only_the_blocks_behind_a_local_hit_travel() -> None:
    with engines("P", "D") as (producer, consumer):
        ticket = make_ticket("r", producer.worker.endpoints, NUM_TOKENS)
        producer.add(ticket)
        consumer.load(ticket, TARGET, num_cached=5 * 32)
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: "r" in producer.sent, [producer, consumer])
        assert consumer.io.changed() == set(TARGET[5:])
        assert producer.stats.paths["inline"].bytes_sent == 3 * LAYOUT.row_bytes


def test_a_producer_that_was_once_too_slow_to_share_its_memory_is_asked_again() -> None:
    with engines("P", "D", way=SHARED) as (producer, consumer):
        server = producer.worker._transport._region_server
        serve, server.serve = server.serve, lambda: None
        for request_id, path in (("slow", "inline"), ("quick", "shared")):
            ticket = make_ticket(request_id, producer.worker.endpoints, NUM_TOKENS)
            producer.add(ticket)
            consumer.load(ticket, TARGET)
            producer.save(request_id, SOURCE, NUM_TOKENS)
            run_until(lambda x=request_id: x in producer.sent, [producer, consumer])
            assert path in producer.stats.paths
            server.serve = serve


def test_a_request_id_can_be_used_again_after_its_transfer_ended() -> None:
    with engines("P", "D") as (producer, consumer):
        for attempt in (b"1", b"2"):
            ticket = make_ticket("r", producer.worker.endpoints, NUM_TOKENS)
            ticket = msgspec.structs.replace(ticket, transfer_id=attempt * 16)
            for engine in (producer, consumer):
                engine.received.clear()
                engine.sent.clear()
            producer.add(ticket)
            consumer.load(ticket, TARGET)
            producer.save("r", SOURCE, NUM_TOKENS)
            run_until(lambda: "r" in producer.sent, [producer, consumer])
            assert "r" in consumer.received


# ---- cancellation and refusal


def test_a_cancel_by_the_consumer_frees_the_producer_and_stops_writes() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.changed()) == 3, [producer, consumer])
        assert consumer.scheduler.request_finished("r", [TARGET])
        consumer.step()
        assert consumer.reasons == {"r": FailureReason.CANCELLED}
        canary = consumer.io.cache.copy()
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: bool(producer.failed), [producer, consumer])
        assert producer.reasons == {"r": FailureReason.CANCELLED}
        assert np.array_equal(consumer.io.cache, canary)


def test_a_cancel_by_the_producer_reaches_the_consumer() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.changed()) == 3, [producer, consumer])
        producer.scheduler.cancel("r")
        run_until(lambda: bool(consumer.failed), [producer, consumer])
        assert consumer.reasons == producer.reasons == {"r": FailureReason.CANCELLED}


def test_an_unfetched_lease_expires_and_wakes_the_engine() -> None:
    config = msgspec.structs.replace(QUICK, rendezvous_s=0.2)
    with engines("P", config=config) as (producer,):
        producer.add(make_ticket("r", "tcp://127.0.0.1:1", NUM_TOKENS))
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: bool(producer.failed), [producer])
        assert producer.reasons == {"r": FailureReason.EXPIRED}


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
        ticket = make_ticket("r", producer.worker.endpoints, NUM_TOKENS)
        producer.add(msgspec.structs.replace(ticket, **offered))
        producer.save("r", SOURCE, NUM_TOKENS)
        producer.step()
        consumer.load(msgspec.structs.replace(ticket, **used), TARGET)
        run_until(lambda: bool(consumer.failed), [producer, consumer])
        assert consumer.reasons == {"r": reason}
        assert not consumer.io.changed()


# ---- no producer


def test_an_address_without_a_listener_is_dead_at_once() -> None:
    with engines("D") as (consumer,):
        with socket.socket() as placeholder:
            placeholder.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{placeholder.getsockname()[1]}"
            consumer.load(make_ticket("r", endpoint, NUM_TOKENS), TARGET)
            run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.reasons == {"r": FailureReason.PEER_DEAD}


def test_an_endpoint_that_cannot_be_dialled_fails_only_its_load() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer)
        consumer.load(make_ticket("bad", "tcp://not-a-host:x", NUM_TOKENS), TARGET)
        run_until(lambda: len(consumer.ended) == 2, [producer, consumer])
        assert consumer.reasons == {"bad": FailureReason.PEER_DEAD}
        assert consumer.received == {"r"}


# ---- hostile bytes


def test_a_late_or_foreign_chunk_is_dropped_and_counted() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    endpoint = listen(router)
    try:
        with engines("D") as (consumer,):
            ticket = make_ticket("r", endpoint, NUM_TOKENS)
            consumer.load(ticket, TARGET)
            consumer.step()
            peer, _ = router.recv_multipart()
            canary = consumer.io.cache.copy()
            payload = bytes(LAYOUT.row_bytes)
            data = msgspec.structs.replace(
                TO_CONSUMER[0], transfer_id=ticket.transfer_id, num_rows=1
            )
            for changes, body in [
                ({"transfer_id": b"?" * 16}, payload),
                ({"epoch": 9}, payload),
                ({"incarnation": "P-before"}, payload),
                ({"first_row": 1 << 20}, payload),
                ({}, payload[:-1]),
                ({}, payload),
                ({}, payload),
            ]:
                frame = encode(msgspec.structs.replace(data, **changes))
                router.send_multipart([peer, frame, body])
            run_until(lambda: bool(consumer.ended), [consumer])
            assert consumer.reasons == {"r": FailureReason.CHECKSUM}
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


def test_random_bytes_at_the_socket_change_nothing(way: Way) -> None:
    with engines("P", "D", way=way) as (producer, consumer):
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        dial(stranger, producer.worker.endpoints[0])
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
        port = int(address_of(producer.worker.endpoints[0]).rpartition(":")[2])
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
        dial(dealer, producer.worker.endpoints[0])
        sealed = KEYS.seal(make_ticket("r", "tcp://127.0.0.1:1", NUM_TOKENS))
        dealer.send(encode(msgspec.structs.replace(FETCH, version=99, ticket=sealed)))
        assert dealer.poll(10_000)
        assert b"version" in dealer.recv()
        dealer.close()
        context.term()


# ---- what the core takes back


def test_blocks_that_were_taken_back_a_moment_ago_are_not_confirmed() -> None:
    """The consumer's last word waits to be read while the producer's core gives the blocks up."""
    with engines("P", "D", way=SHARED) as (producer, consumer):
        start(producer, consumer, num_ready=100, way=SHARED)
        run_until(lambda: len(consumer.io.changed()) == 3, [producer, consumer])
        transport = producer.worker._transport
        take_ready = transport._routes.take_ready
        taken: list[bytes] = []

        def take_back(now_s: float):
            # Between the commands and the messages of a turn, in which all has been read.
            if consumer_is_confirming() and transport._router.poll(0) and not taken:
                taken.append(b"r".ljust(16, b"."))
                transport._commands.append(CancelSend(taken[0]))
            return take_ready(now_s)

        def consumer_is_confirming() -> bool:
            infos = consumer.worker.transfers(0.0)
            return bool(infos) and infos[0].state == "confirming"

        transport._routes.take_ready = take_back
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: bool(consumer.ended), [producer, consumer])
        assert taken
        assert consumer.reasons == {"r": FailureReason.CANCELLED}


# ---- waking the I/O thread


class Interrupted:
    """A socket at whose every reading the other thread does something first."""

    def __init__(self, inner: socket.socket, meanwhile: Callable[[], None]) -> None:
        self.inner = inner
        self.meanwhile = meanwhile

    def recv(self, size: int) -> bytes:
        self.meanwhile()
        return self.inner.recv(size)


@pytest.mark.parametrize("num_reading", [1, 2])
def test_a_command_that_comes_while_wake_ups_are_read_wakes_the_thread_again(
    num_reading: int,
) -> None:
    wake_up = WakeUp()
    receiver = wake_up._receiver
    count = iter(range(100))

    def meanwhile() -> None:
        if next(count) == num_reading - 1:
            wake_up.wake()

    try:
        wake_up._receiver = Interrupted(receiver, meanwhile)
        wake_up.wake()
        wake_up.drain()
        # All commands so far are read now. The next one:
        wake_up.wake()
        assert receiver.recv(1)
    finally:
        receiver.close()
        wake_up._sender.close()


# ---- start and end


def listening(engine: FakeEngine) -> list[str]:
    """Return the names of an engine's abstract sockets on which a process listens."""
    names = [x.partition("://")[2].strip("@") for x in engine.worker.endpoints[1:]]
    known = Path("/proc/net/unix").read_text()
    return [name for name in names if name in known]


def test_close_leaves_no_thread_socket_or_file(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    def run() -> None:
        way = Way(f"ipc://{tmp_path}/{{}}", shares=True)
        with engines("P", "D", way=way) as (producer, consumer):
            start(producer, consumer, num_ready=100, way=way)
            run_until(lambda: len(consumer.io.changed()) == 3, [producer, consumer])
            assert len(list(tmp_path.iterdir())) == 2
            assert len(listening(producer)) == 2
        assert set(threading.enumerate()) <= threads
        assert list(tmp_path.iterdir()) == []
        wait_until(lambda: not listening(producer), "abstract sockets are gone")
        producer.worker.close(1.0)
        with pytest.raises(TransferError, match="closed"):
            producer.step()

    run()
    gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "file descriptors are closed")


def test_closing_one_end_mid_stream_fails_the_other() -> None:
    with engines("P", "D") as (producer, consumer):
        start(producer, consumer, num_ready=100)
        run_until(lambda: len(consumer.io.changed()) == 3, [producer, consumer])
        producer.worker.close(5.0)
        run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.reasons == {"r": FailureReason.PEER_DEAD}


@pytest.mark.parametrize(
    "address", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:5", "inproc://x", "tcp://127.0.0.1:x"]
)
def test_only_a_named_address_is_bound(address: str) -> None:
    with pytest.raises(TransferError, match="cannot bind"):
        make_engine("P", FakeIO(4), bind=address)
