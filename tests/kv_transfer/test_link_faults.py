"""Connections that are made to fail: a transfer recovers, or fails with its reason."""

import functools
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kv_transfer.errors import FailureReason
from kv_transfer.messages import encode
from kv_transfer.transports.connections import break_accepted
from kv_transfer.transports.faulty import FaultyTransport
from tests.kv_transfer import sockets
from tests.kv_transfer.fakes import KEYS, FakeEngine, make_ticket, run_until
from tests.kv_transfer.sockets import (
    NUM_TOKENS,
    assert_transfers,
    dial,
    stream,
    zmq_socket,
)
from tests.kv_transfer.test_messages import FETCH

# None of these deadlines ends a transfer within a test's time, unless the test changes it.
PATIENT = msgspec.structs.replace(
    sockets.PATIENT, no_progress_s=60.0, no_data_s=60.0, lease_s=60.0, rendezvous_s=60.0
)


class Script:
    """Link faults that a test switches on and off while the engines run."""

    def __init__(self, *, break_at_s: float | None = None) -> None:
        self.cut = False
        self.corrupt = lambda: False
        self.breaks = 0
        self._break_at_s = break_at_s

    def is_cut(self, now_s: float) -> bool:
        return self.cut

    def corrupts(self, now_s: float) -> bool:
        return self.corrupt()

    def num_breaks(self, now_s: float) -> int:
        is_past = self._break_at_s is not None and now_s >= self._break_at_s
        return self.breaks + is_past

    def next_change_s(self, now_s: float) -> float | None:
        is_due = self._break_at_s is not None and now_s < self._break_at_s
        return self._break_at_s if is_due else None


@pytest.fixture(params=[False, True], ids=["inline", "shared"])
def shares(request: pytest.FixtureRequest) -> bool:
    """Return whether the consumer reads the producer's memory, so that only messages can fail."""
    return request.param


def num_checksum_failures(consumer: FakeEngine) -> int:
    """Read from the other end's thread: a single number."""
    return consumer.worker._transport.counters.num_checksum_failures


@contextmanager
def pair(
    config=PATIENT,
    of_producer: Script | None = None,
    of_consumer: Script | None = None,
    *,
    shares: bool = False,
) -> Iterator[list[FakeEngine]]:
    each = [
        {"make_transport": script and functools.partial(FaultyTransport, script)}
        for script in (of_producer, of_consumer)
    ]
    with sockets.engines(config=config, shares=shares, each=each) as engines:
        yield engines


# ---- broken connections


@pytest.mark.parametrize("end", ["of_producer", "of_consumer"])
def test_a_broken_connection_fails_both_ends_and_the_next_transfer_connects_again(
    end: str, shares: bool
) -> None:
    script = Script()
    with pair(**{end: script}, shares=shares) as engines:
        producer, consumer = engines
        stream(engines)
        script.breaks += 1
        run_until(lambda: producer.failed and consumer.failed, engines)
        assert consumer.reasons == {"r": FailureReason.PEER_DEAD}
        assert producer.reasons["r"] in {FailureReason.PEER_DEAD, FailureReason.CANCELLED}
        assert producer.stats.num_leased_blocks == 0
        assert_transfers(engines, "again")


def test_a_connection_breaks_on_time_while_nothing_moves() -> None:
    silent = msgspec.structs.replace(PATIENT, renew_s=59.0, no_progress_s=1000.0)
    script = Script(break_at_s=time.monotonic() + 0.5)
    with pair(silent, of_producer=script) as engines:
        stream(engines)
        assert not engines[1].failed
        run_until(lambda: bool(engines[1].failed), engines)
        assert engines[1].reasons == {"r": FailureReason.PEER_DEAD}


def test_a_break_before_the_start_is_not_repeated() -> None:
    with pair(of_producer=Script(break_at_s=time.monotonic() - 1.0)) as engines:
        # The first thing that ever happens at this producer, so that nothing woke it before.
        with zmq_socket(zmq.DEALER) as dealer:
            dial(dealer, engines[0].worker.endpoints[0])
            ticket = make_ticket("other", engines[0].worker.endpoints, NUM_TOKENS)
            dealer.send(encode(msgspec.structs.replace(FETCH, ticket=KEYS.seal(ticket))))
            assert dealer.poll(10_000), "the connection broke"
        assert_transfers(engines, "r")


# ---- corrupted payloads


def test_a_chunk_that_is_corrupted_once_is_sent_again(shares: bool) -> None:
    script = Script()
    with pair(of_producer=script, shares=shares) as engines:
        script.corrupt = lambda: num_checksum_failures(engines[1]) == 0
        assert_transfers(engines, "r")
        assert engines[1].stats.num_checksum_failures > 0
        assert engines[1].stats.num_retransmits > 0


# ---- partitions


@pytest.mark.parametrize("end", ["of_producer", "of_consumer"])
def test_a_long_partition_is_silence_and_heals(end: str, shares: bool) -> None:
    script = Script()
    quick = msgspec.structs.replace(PATIENT, no_progress_s=0.4, lease_s=0.8, renew_s=0.2)
    with pair(quick, **{end: script}, shares=shares) as engines:
        producer, consumer = engines
        stream(engines)
        script.cut = True
        run_until(lambda: producer.failed and consumer.failed, engines)
        assert consumer.reasons == {"r": FailureReason.STALLED}
        assert producer.reasons == {"r": FailureReason.EXPIRED}
        script.cut = False
        assert_transfers(engines, "again")


# ---- breaking sockets


def test_only_connections_that_were_accepted_at_the_endpoint_break() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        at_one, at_other = one.getsockname(), other.getsockname()
        dialled = [socket.create_connection(at) for at in (at_one, at_one, at_other)]
        accepted = [one.accept()[0], one.accept()[0], other.accept()[0]]
        try:
            assert break_accepted(f"tcp://127.0.0.1:{at_one[1]}") == 2
            assert [peer.recv(1) for peer in dialled[:2]] == [b"", b""]
            dialled[2].sendall(b"x")
            assert accepted[2].recv(1) == b"x"
            with socket.create_connection(at_one), one.accept()[0] as again:
                again.sendall(b"y")
        finally:
            for connection in dialled + accepted:
                connection.close()
