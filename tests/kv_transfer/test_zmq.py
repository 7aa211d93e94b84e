"""The connector over real sockets, between threads and between processes."""

import gc
import os
import random
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.keys import KeyRing
from kv_transfer.messages import encode
from kv_transfer.shared_region import RegionFetch
from kv_transfer.transport import CancelSend
from kv_transfer.transports.wake_up import WakeUp
from tests.kv_transfer.fakes import (
    KEYS,
    LAYOUT,
    FakeEngine,
    FakeIO,
    make_engine,
    make_ticket,
    run_until,
)
from tests.kv_transfer.sockets import (
    NUM_TOKENS,
    SOURCE,
    TARGET,
    assert_transfers,
    engines,
    listen,
    start,
    stream,
    wait_until,
    zmq_socket,
)
from tests.kv_transfer.test_messages import TO_CONSUMER

TCP = "tcp://127.0.0.1:*"
WAYS = {
    "tcp": (TCP, 1, False),
    "file": ("ipc://{}", 1, False),
    "abstract": (TCP, 3, False),
    "shared": (TCP, 3, True),
}
"""Address that the producer binds, endpoints for the consumer, and shared memory."""


# ---- delivery


@pytest.mark.parametrize("way", WAYS)
def test_thirty_two_concurrent_requests_arrive_byte_for_byte(way: str, tmp_path: Path) -> None:
    bind, num_endpoints, shares = WAYS[way]
    bind = bind.format(tmp_path / "{}")
    with engines(bind=bind, shares=shares, num_blocks=300) as (producer, consumer):
        dice = random.Random(7)
        requests = {}
        free = dice.sample(range(1, 300), 299), dice.sample(range(1, 300), 299)
        for n in range(32):
            num_tokens = dice.randint(1, 9 * 32)
            num_blocks = LAYOUT.num_blocks(num_tokens)
            blocks = tuple(tuple(pool.pop() for _ in range(num_blocks)) for pool in free)
            requests[f"r{n}"] = (num_tokens, *blocks)
            ticket = make_ticket(f"r{n}", producer.worker.endpoints[:num_endpoints], num_tokens)
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
        name = "shared" if shares else "inline"
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


def test_a_producer_that_was_once_too_slow_to_share_its_memory_is_asked_again() -> None:
    with engines(shares=True) as (producer, consumer):
        server = producer.worker._transport._region_server
        serve, server.serve = server.serve, lambda: None
        for request_id, path in (("slow", "inline"), ("quick", "shared")):
            assert_transfers([producer, consumer], request_id)
            assert path in producer.stats.paths
            server.serve = serve


def test_a_producer_of_another_host_is_reached_over_tcp() -> None:
    with engines(shares=True) as both:
        elsewhere = "ipc://@ttserve-kv-elsewhere", "shm://" + "0" * 32
        assert_transfers(both, endpoints=(both[0].worker.endpoints[0], *elsewhere))
        assert both[1].stats.paths.keys() == {"inline"}


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        (KEYS, {"producer_incarnation": "Q"}),
        (KEYS, {"consumer": ""}),
        (KEYS, {"expires_ms": 1}),
        (KeyRing((b"a secret of another cluster",)), {}),
    ],
)
def test_memory_is_shown_to_no_holder_of_another_ticket(
    keys: KeyRing, changes: dict[str, Any]
) -> None:
    with engines("P", shares=True) as (producer,):
        ticket = make_ticket("r", producer.worker.endpoints, NUM_TOKENS)
        sealed = keys.seal(msgspec.structs.replace(ticket, **changes))
        fetch = RegionFetch(producer.worker.endpoints[2], sealed)
        while (answer := fetch.poll()) == "waiting":
            select.select([fetch], [], [])
        assert answer == "failed"


def test_a_request_id_can_be_used_again_after_its_transfer_ended() -> None:
    with engines() as (producer, consumer):
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
    with engines() as (producer, consumer):
        start([producer, consumer])
        consumer.load(make_ticket("bad", "tcp://not-a-host:x", NUM_TOKENS), TARGET)
        run_until(lambda: len(consumer.ended) == 2, [producer, consumer])
        assert consumer.reasons == {"bad": FailureReason.PEER_DEAD}
        assert consumer.received == {"r"}


# ---- hostile bytes


def test_a_late_or_foreign_chunk_is_dropped_and_counted() -> None:
    with zmq_socket(zmq.ROUTER) as router, engines("D") as (consumer,):
        ticket = make_ticket("r", listen(router), NUM_TOKENS)
        consumer.load(ticket, TARGET)
        consumer.step()
        peer, _ = router.recv_multipart()
        canary = consumer.io.cache.copy()
        payload = bytes(LAYOUT.row_bytes)
        data = msgspec.structs.replace(TO_CONSUMER[0], transfer_id=ticket.transfer_id, num_rows=1)
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


# ---- what the core takes back


def test_blocks_that_were_taken_back_a_moment_ago_are_not_confirmed() -> None:
    """The consumer's last word waits to be read while the producer's core gives the blocks up."""
    with engines(shares=True) as (producer, consumer):
        stream([producer, consumer])
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
        with engines(bind=f"ipc://{tmp_path}/{{}}", shares=True) as (producer, consumer):
            stream([producer, consumer])
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


@pytest.mark.parametrize(
    "address", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:5", "inproc://x", "tcp://127.0.0.1:x"]
)
def test_only_a_named_address_is_bound(address: str) -> None:
    with pytest.raises(TransferError, match="cannot bind"):
        make_engine("P", FakeIO(4), bind=address)
