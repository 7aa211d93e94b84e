"""Two processes, of which one is killed or frozen in the middle of a transfer.

The other one is the test's own, so that its cache can be looked at.
"""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer.errors import FailureReason
from tests.kv_transfer.children import child
from tests.kv_transfer.fakes import QUICK, FakeEngine, FakeIO, make_ticket, run_until
from tests.kv_transfer.peer_process import NUM_BLOCKS, SEEDS
from tests.kv_transfer.sockets import NUM_TOKENS, SOURCE, TARGET, engines

pytestmark = pytest.mark.process

CONFIG = msgspec.structs.replace(QUICK, lease_s=60.0)
SLACK_S = 3.0
"""Added to every deadline, for a busy machine."""


class Peer:
    """A ``peer_process`` and how to talk to it.

    Attributes:
        endpoints: Where its connector listens.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.endpoints = tuple(self._read())

    def tell(self, *command: object) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        self._read()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        while self._state() != "T":
            time.sleep(0.002)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _read(self):
        return json.loads(self.process.stdout.readline())


@contextmanager
def peer(name: str, path: str) -> Iterator[Peer]:
    with child("peer_process", name, msgspec.json.encode(CONFIG).decode(), path) as process:
        yield Peer(process)


@contextmanager
def engine(name: str, path: str) -> Iterator[FakeEngine]:
    with engines(name, num_blocks=NUM_BLOCKS, config=CONFIG, shares=path == "shared") as (made,):
        yield made


@pytest.fixture(autouse=True)
def _patient_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transports.options.HEARTBEAT_TIMEOUT_S", 60.0)


# ---- the producer is another process


def is_right(consumer: FakeEngine, num_tokens: int) -> bool:
    want = FakeIO(NUM_BLOCKS, seed=SEEDS["P"]).tokens(0, SOURCE, 0, num_tokens)
    return np.array_equal(consumer.io.tokens(0, TARGET, 0, num_tokens), want)


def load(consumer: FakeEngine, producer: Peer, request_id: str) -> None:
    consumer.load(make_ticket(request_id, producer.endpoints, NUM_TOKENS), TARGET)
    consumer.step()


def fetch_from(producer: Peer, consumer: FakeEngine, request_id: str) -> None:
    """Move a request, and look that it is right."""
    producer.tell("offer", request_id, "D", NUM_TOKENS)
    load(consumer, producer, request_id)
    producer.tell("save", request_id, SOURCE, NUM_TOKENS)
    run_until(lambda: request_id in consumer.ended, [consumer])
    assert request_id in consumer.received, consumer.reasons
    assert is_right(consumer, NUM_TOKENS)


def stream_from(producer: Peer, consumer: FakeEngine) -> None:
    """Start a transfer; return when three of its eight blocks have arrived."""
    producer.tell("offer", "r", "D", NUM_TOKENS)
    load(consumer, producer, "r")
    producer.tell("save", "r", SOURCE, 100)
    run_until(lambda: len(consumer.io.changed()) == 3, [consumer])


@pytest.mark.parametrize("path", ["inline", "shared"])
def test_a_producer_that_is_killed_fails_its_loads_and_its_successor_serves(path: str) -> None:
    with engine("D", path) as consumer:
        with peer("P", path) as producer:
            stream_from(producer, consumer)
            producer.kill()
            load(consumer, producer, "late")
            run_until(lambda: {"r", "late"} <= consumer.ended, [consumer])
        # The broken connection tells, long before any deadline.
        assert consumer.reasons == dict.fromkeys(["r", "late"], FailureReason.PEER_DEAD)
        assert [consumer.failed[x].num_tokens for x in ("r", "late")] == [96, 0]
        assert is_right(consumer, 96)
        assert consumer.stats.num_reserved_blocks == consumer.stats.num_inflight_loads == 0
        with peer("P", path) as producer:
            fetch_from(producer, consumer, "after")


def test_a_frozen_producer_fails_the_load_and_thaws_too_late() -> None:
    path = "inline"  # Where its late rows could still be written.
    with engine("D", path) as consumer, peer("P", path) as producer:
        stream_from(producer, consumer)
        producer.freeze()
        run_until(lambda: "r" in consumer.ended, [consumer], CONFIG.no_progress_s + SLACK_S)
        assert consumer.reasons == {"r": FailureReason.STALLED}
        consumer.io.cache[:] = 0x5A
        producer.process.send_signal(signal.SIGCONT)
        producer.tell("save", "r", SOURCE, NUM_TOKENS)
        ticket = make_ticket("after", producer.endpoints, 32)
        producer.tell("offer", "after", "D", 32)
        consumer.load(ticket, (20,))
        producer.tell("save", "after", (20,), 32)
        # Over the same connection: all that it still had to say has been heard by then.
        run_until(lambda: "after" in consumer.received, [consumer])
        assert (consumer.io.cache[0][:, list(TARGET)] == 0x5A).all(), "a late write"


# ---- the consumer is another process


def tell_to_load(consumer: Peer, producer: FakeEngine, request_id: str, num_ready: int) -> None:
    """Offer a request whose first tokens are ready, and let the consumer load it."""
    endpoints = producer.worker.endpoints
    producer.add(make_ticket(request_id, endpoints, NUM_TOKENS))
    producer.step()
    consumer.tell("load", request_id, "P", endpoints, NUM_TOKENS, TARGET)
    producer.save(request_id, SOURCE, num_ready)


def test_a_consumer_that_is_killed_gives_its_blocks_back_and_its_successor_is_served() -> None:
    with engine("P", "shared") as producer:
        with peer("D", "shared") as consumer:
            tell_to_load(consumer, producer, "r", 100)
            run_until(
                lambda: [x.done_rows for x in producer.worker.transfers(0.0)] == [3], [producer]
            )
            consumer.kill()
            # A broken connection tells long before the lease ends.
            run_until(lambda: "r" in producer.ended, [producer])
        assert producer.reasons == {"r": FailureReason.PEER_DEAD}
        assert producer.stats.num_leased_blocks == 0
        with peer("D", "shared") as consumer:
            tell_to_load(consumer, producer, "after", NUM_TOKENS)
            run_until(lambda: "after" in producer.sent, [producer])
        assert not producer.io.changed()
