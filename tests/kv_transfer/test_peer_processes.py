"""Two processes, of which one is killed or frozen at every stage of a transfer.

The other one is the test's own, so that its cache can be looked at. All stages of one kind share a
process as far as its death allows.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer.errors import FailureReason
from tests.kv_transfer.fakes import (
    QUICK,
    FakeEngine,
    FakeIO,
    make_engine,
    make_ticket,
    run_until,
)
from tests.kv_transfer.peer_process import NUM_BLOCKS, SEEDS
from tests.shared_memory import shared_memory_of

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 8 * 32 - 9

CONFIG = msgspec.structs.replace(
    QUICK, no_progress_s=1.2, no_data_s=4.0, lease_s=2.0, renew_s=0.4, rendezvous_s=2.5,
    closing_s=1.0,
)  # fmt: skip
"""Short deadlines: no transport notices a frozen process before they do."""

SLACK_S = 3.0
"""Added to every deadline, for a busy machine."""

STATES = ("waiting", "prefilling", "ready", "serving", "unconfirmed")
"""Progress of a transfer. waiting: offered, not fetched. prefilling: attached, nothing
computed. ready: computed, not fetched. serving: three of eight rows have been written.
unconfirmed: all that may be sent has been, and the consumer's core has not looked at it."""

FETCHED_LATER = ("waiting", "ready")
BLOCKS = {
    name: tuple(range(1 + 8 * n, 9 + 8 * n)) for n, name in enumerate((*STATES, "before", "after"))
}
"""Blocks of each request on both sides; the consumer's in another order."""


def source(request_id: str) -> tuple[int, ...]:
    return BLOCKS[request_id]


def target(request_id: str) -> tuple[int, ...]:
    return BLOCKS[request_id][::-1]


class Peer:
    """A ``peer_process`` and how to talk to it.

    Attributes:
        endpoints: Where its connector listens.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.endpoints = tuple(self._read())

    def tell(self, *command: object) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            while self._state() != "T":
                time.sleep(0.002)

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _read(self):
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def peer(name: str, path: str, config=CONFIG) -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.kv_transfer.peer_process", name]
    process = subprocess.Popen(
        [*command, msgspec.json.encode(config).decode(), path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Peer(process)
    finally:
        process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def engine(name: str, path: str, config=CONFIG) -> Iterator[FakeEngine]:
    io = FakeIO(NUM_BLOCKS, seed=SEEDS[name], shares=path == "shared")
    made = make_engine(name, io, config=config)
    try:
        yield made
    finally:
        made.worker.close(5.0)


@pytest.fixture(autouse=True)
def _patient_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transports.options.HEARTBEAT_TIMEOUT_S", 60.0)


def kv(request_id: str) -> np.ndarray:
    """Return the KV of a request."""
    return FakeIO(NUM_BLOCKS, seed=SEEDS["P"]).tokens(0, source(request_id), 0, NUM_TOKENS)


def load(consumer: FakeEngine, producer: Peer, request_id: str) -> None:
    consumer.load(make_ticket(request_id, producer.endpoints, NUM_TOKENS), target(request_id))
    consumer.step()


def is_right(consumer: FakeEngine, request_id: str, num_tokens: int = NUM_TOKENS) -> bool:
    got = consumer.io.tokens(0, target(request_id), 0, NUM_TOKENS)
    return np.array_equal(got[:num_tokens], kv(request_id)[:num_tokens])


# ---- the producer is another process


def fetch_from(producer: Peer, consumer: FakeEngine, request_id: str) -> None:
    """Move a request, and look that it is right."""
    producer.tell("offer", request_id, "D", NUM_TOKENS)
    load(consumer, producer, request_id)
    producer.tell("save", request_id, source(request_id), NUM_TOKENS)
    run_until(lambda: request_id in consumer.ended, [consumer])
    assert request_id in consumer.received, consumer.reasons
    assert is_right(consumer, request_id)


def attached(consumer: FakeEngine) -> int:
    """Count the loads whose producer has answered. Read from the other thread: one number each."""
    loading = list(consumer.worker._transport._sessions.consumer._loading.values())
    return sum(x.is_attached for x in loading)


def reach_all(producer: Peer, consumer: FakeEngine) -> None:
    """Bring one request to each of the states, all of them at once."""
    for state in STATES:
        producer.tell("offer", state, "D", NUM_TOKENS)
        if state not in FETCHED_LATER:
            load(consumer, producer, state)
    producer.tell("save", "ready", source("ready"), NUM_TOKENS)
    run_until(lambda: attached(consumer) == 3, [consumer])
    producer.tell("save", "serving", source("serving"), 100)
    run_until(lambda: len(consumer.io.changed() & set(target("serving"))) == 3, [consumer])
    # The consumer is not stepped from here on.
    producer.tell("save", "unconfirmed", source("unconfirmed"), NUM_TOKENS)
    give_up_s = time.monotonic() + 20
    while len(consumer.worker._transport._events) < 4:
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def assert_all_failed(consumer: FakeEngine, path: str, *reasons: FailureReason) -> None:
    for state in STATES:
        assert consumer.reasons[state] in reasons, state
        # Whatever it says that it has is right.
        num_tokens = consumer.failed[state].num_tokens
        assert is_right(consumer, state, num_tokens)
        if state == "unconfirmed":
            # Shared memory outlives its owner, whose confirmation does not come any more.
            assert num_tokens == (NUM_TOKENS if path == "shared" else 4 * 32)
        else:
            assert num_tokens == (96 if state == "serving" else 0)
    stats = consumer.stats
    assert stats.num_reserved_blocks == stats.num_inflight_loads == 0


@pytest.mark.parametrize("path", ["inline", "shared"])
def test_a_producer_that_is_killed_is_noticed_in_every_state(path: str) -> None:
    with engine("D", path) as consumer:
        with peer("P", path) as producer:
            fetch_from(producer, consumer, "before")
            reach_all(producer, consumer)
            producer.signal(signal.SIGKILL)
            producer.process.wait()
            for state in FETCHED_LATER:
                load(consumer, producer, state)
            deadline_s = CONFIG.no_progress_s + SLACK_S
            run_until(lambda: set(STATES) <= consumer.ended, [consumer], deadline_s)
        # The broken connection tells, long before any deadline.
        assert_all_failed(consumer, path, FailureReason.PEER_DEAD)
        with peer("P", path) as producer:
            fetch_from(producer, consumer, "after")


def test_a_frozen_producer_fails_the_load_and_thaws_too_late() -> None:
    path, name = "inline", "serving"  # The path on which its late rows could still be written.
    with engine("D", path) as consumer, peer("P", path) as producer:
        producer.tell("offer", name, "D", NUM_TOKENS)
        load(consumer, producer, name)
        producer.tell("save", name, source(name), 100)
        run_until(lambda: len(consumer.io.changed()) == 3, [consumer])
        producer.signal(signal.SIGSTOP)
        run_until(lambda: name in consumer.ended, [consumer], CONFIG.no_progress_s + SLACK_S)
        assert consumer.reasons == {name: FailureReason.STALLED}
        assert is_right(consumer, name, consumer.failed[name].num_tokens)
        consumer.io.cache[0][:, list(target(name))] = 0x5A
        producer.signal(signal.SIGCONT)
        producer.tell("save", name, source(name), NUM_TOKENS)
        # Over the same connection: all that it still had to say has been heard by then.
        fetch_from(producer, consumer, "after")
        assert (consumer.io.cache[0][:, list(target(name))] == 0x5A).all(), "a late write"


# ---- the consumer is another process


def rows(producer: FakeEngine, request_id: str) -> tuple[str, int]:
    """State and rows sent of a transfer."""
    for info in producer.worker.transfers(time.monotonic()):
        if info.request_id == request_id:
            return info.state, info.done_rows
    return "ended", 0


def offer(producer: FakeEngine, request_id: str) -> None:
    producer.add(make_ticket(request_id, producer.worker.endpoints, NUM_TOKENS))
    producer.step()


def tell_to_load(consumer: Peer, producer: FakeEngine, request_id: str) -> None:
    endpoints = producer.worker.endpoints
    consumer.tell("load", request_id, "P", endpoints, NUM_TOKENS, target(request_id))


def serve(producer: FakeEngine, consumer: Peer, request_id: str) -> None:
    """Move a request."""
    offer(producer, request_id)
    tell_to_load(consumer, producer, request_id)
    producer.save(request_id, source(request_id), NUM_TOKENS)
    run_until(lambda: request_id in producer.ended, [producer])
    assert request_id in producer.sent, producer.reasons


def offer_all(producer: FakeEngine, consumer: Peer) -> None:
    """Bring one request to each of the states, all of them at once."""
    for state in STATES:
        offer(producer, state)
        if state not in FETCHED_LATER:
            tell_to_load(consumer, producer, state)
    producer.save("ready", source("ready"), NUM_TOKENS)
    fetched = [state for state in STATES if state not in FETCHED_LATER]
    run_until(lambda: all(rows(producer, x)[0] != "waiting" for x in fetched), [producer])
    producer.save("serving", source("serving"), 100)
    run_until(lambda: rows(producer, "serving")[1] == 3, [producer])
    consumer.tell("pause")
    producer.save("unconfirmed", source("unconfirmed"), NUM_TOKENS)
    run_until(lambda: rows(producer, "unconfirmed")[1] >= 4, [producer])


def test_a_consumer_that_is_killed_is_noticed_in_every_state() -> None:
    path = "shared"
    patient = msgspec.structs.replace(CONFIG, lease_s=60.0)
    with engine("P", path, patient) as producer:
        with peer("D", path, patient) as consumer:
            serve(producer, consumer, "before")
            offer_all(producer, consumer)
            consumer.signal(signal.SIGKILL)
            consumer.process.wait()
            deadline_s = patient.rendezvous_s + SLACK_S
            run_until(lambda: set(STATES) <= producer.ended, [producer], deadline_s)
        for state in STATES:
            # A broken connection tells long before the lease ends.
            is_late = state in FETCHED_LATER
            expected = FailureReason.EXPIRED if is_late else FailureReason.PEER_DEAD
            assert producer.reasons[state] is expected, state
        assert producer.stats.num_leased_blocks == 0
        with peer("D", path, patient) as consumer:
            serve(producer, consumer, "after")
        assert not producer.io.changed()


def test_nothing_is_left_of_processes_that_were_killed(tmp_path: Path) -> None:
    path = "shared"
    with peer("P", path) as producer, peer("D", path) as consumer:
        producer.tell("offer", "r", "D", NUM_TOKENS)
        consumer.tell("load", "r", "P", producer.endpoints, NUM_TOKENS, target("before"))
        producer.tell("save", "r", source("before"), 100)
        names = [x.partition("://")[2].strip("@") for x in producer.endpoints[1:]]
        names += [x.partition("://")[2].strip("@") for x in consumer.endpoints[1:]]
        known = Path("/proc/net/unix").read_text()
        assert names
        assert all(name in known for name in names)
        files = shared_memory_of([producer.process.pid, consumer.process.pid])
        for end in (producer, consumer):
            end.signal(signal.SIGKILL)
            end.process.wait()
    known = Path("/proc/net/unix").read_text()
    assert not any(name in known for name in names)
    assert not [file for file in files if os.path.exists(file)]
    assert not list(tmp_path.iterdir())
