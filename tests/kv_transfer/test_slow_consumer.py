"""Consumers that take nothing, or ask for too much, cost no more than their window.

No memory is measured here. The rows that a producer holds for a consumer are counted on the wires
and in the queues.
"""

import msgspec
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from kv_transfer.messages import Data, Mapped, Renew
from kv_transfer.transport import Arrived, ArrivedMapped
from tests.kv_transfer.fakes import (
    FakeEngine,
    FakeIO,
    make_loopback_engine,
    make_ticket,
    ticks,
)
from tests.kv_transfer.pairs import Pair, fetch
from tests.kv_transfer.worlds import TINY, World

NUM_ROWS = 100
WINDOW = 4
CONFIG = TransferConfig(
    chunk_bytes=TINY.row_bytes,
    window_bytes=WINDOW * TINY.row_bytes,
    mapped_chunk_bytes=8 * TINY.row_bytes,
)


def long_pair(path: str = "inline", config: TransferConfig = CONFIG, **settings) -> Pair:
    return Pair(path, num_tokens=32 * NUM_ROWS, layouts=(TINY, TINY), config=config, **settings)


def held_rows(pair: Pair) -> int:
    """Return the rows whose payload is between the two caches."""
    events = pair.node(pair.consumer).events
    return sum(event.num_rows for event in events if isinstance(event, Arrived))


def test_credits_bound_what_a_slow_consumer_is_sent() -> None:
    pair = long_pair()
    announce(pair)
    assert held_rows(pair) == WINDOW
    assert pair.producer.stats.credit_stalled_s > 3.0
    sent = sum(isinstance(message, Data) for message in pair.network.sent)
    assert sent == WINDOW, "the core reads no further ahead either"
    assert len(set(pair.producer.io.reads)) == WINDOW
    pair.finish(step_s=0.1)
    pair.assert_delivered()


def announce(pair: Pair) -> None:
    """Start a transfer whose consumer's core looks at nothing for five seconds."""
    pair.start()
    pair.prefill()
    pair.consumer.step()
    for _ in range(50):
        pair.producer.step()
        pair.network.advance(0.1)


def test_announcements_of_shared_memory_are_small() -> None:
    pair = long_pair("shared")
    told: list[int] = []

    def watch(frame: bytes, payload):
        told.append(0 if payload is None else payload.nbytes)
        return frame, payload

    pair.node(pair.producer).mangle = watch
    announce(pair)
    assert sum(told) == 16 * NUM_ROWS
    events = [x for x in pair.node(pair.consumer).events if isinstance(x, ArrivedMapped)]
    assert sum(event.num_rows for event in events) == NUM_ROWS


@pytest.mark.parametrize("window", [5, 1 << 20, (1 << 31) - 1])
def test_a_consumer_that_claims_more_room_gets_no_more(window: int) -> None:
    pair = long_pair()
    pair.producer.add(pair.ticket)
    pair.prefill()
    producer, tid = pair.node(pair.producer).producer, pair.ticket.transfer_id
    greedy = fetch(pair, window=window)
    producer.on_message(b"tcp://D:1", greedy, pair.network.now_s)
    for _ in range(20):
        pair.producer.step()
        # It also claims to have consumed rows that were never sent.
        producer.on_message(b"tcp://D:1", Renew(tid, 1, 0, window), pair.network.now_s)
        pair.network.advance(0.1)
    assert sum(isinstance(message, Data) for message in pair.network.sent) == WINDOW
    producer.on_message(b"tcp://D:1", Renew(tid, 1, (1 << 31) - 1, window), pair.network.now_s)
    pair.network.advance()
    pair.producer.step()
    pair.network.advance()
    assert sum(isinstance(message, Data) for message in pair.network.sent) == 2 * WINDOW


def test_repeated_requests_for_rows_get_them_no_faster() -> None:
    pair = long_pair()
    pair.start()
    pair.prefill()
    pair.steps(2)
    pair.producer.step()
    producer = pair.node(pair.producer).producer
    again = fetch(pair, window=WINDOW, attempt=1)
    before = len([m for m in pair.network.sent if isinstance(m, Data)])
    for _ in range(500):
        producer.on_message(b"tcp://D:1", again, pair.network.now_s)
        pair.producer.step()
    assert pair.producer.stats.num_retransmits == 1
    sent = [m for m in pair.network.sent if isinstance(m, Data)]
    assert len(sent) - before <= 2 * WINDOW


def test_many_loads_share_the_room_of_one_engine() -> None:
    config = msgspec.structs.replace(CONFIG, max_inflight_bytes=6 * TINY.row_bytes)
    pair = long_pair(config=config)
    node = pair.node(pair.consumer)
    for n in range(5):
        ticket = make_ticket(f"r{n}", pair.producer.worker.endpoints[0], 640, layout=TINY)
        pair.producer.add(ticket)
        pair.producer.save(f"r{n}", pair.source[:20], 640)
        pair.consumer.load(ticket, pair.target[20 * n : 20 * n + 20])
    pair.consumer.step()
    for _ in range(20):
        pair.producer.step()
        pair.network.advance(0.1)
    # The first has its window; of the others each has a chunk, so that none waits for ever.
    assert held_rows(pair) == WINDOW + 4
    assert len(node.consumer._loading) == 5
    pair.finish(step_s=0.1)
    assert len(pair.consumer.received) == 5


def test_loads_that_share_too_little_room_are_slow_and_do_not_wait_for_renewals() -> None:
    config = msgspec.structs.replace(
        CONFIG, window_bytes=10 * TINY.row_bytes, max_inflight_bytes=12 * TINY.row_bytes
    )
    pair = long_pair(config=config)
    for n in range(3):
        ticket = make_ticket(f"r{n}", pair.producer.worker.endpoints[0], 640, layout=TINY)
        pair.producer.add(ticket)
        if n:  # The first takes the room, and waits for its prefill.
            pair.producer.save(f"r{n}", pair.source[:20], 640)
        pair.consumer.load(ticket, pair.target[20 * n : 20 * n + 20])
    began_s = pair.network.now_s
    while len(pair.consumer.received) < 2:
        pair.steps(1, 0.05)
        assert pair.network.now_s - began_s < 4 * config.probe_s


def other_consumer(pair: Pair, name: str, **settings) -> FakeEngine:
    io = FakeIO(NUM_ROWS + 2, seed=3, layout=TINY, shares=pair.path == "shared")
    return make_loopback_engine(name, io, pair.network, CONFIG, **settings)


def test_a_consumer_that_takes_nothing_delays_no_other(path: str) -> None:
    pair = long_pair(path)
    quick = other_consumer(pair, "E")
    pair.start()
    pair.prefill()
    pair.consumer.step()  # Once, and then never again.
    ticket = pair.make_ticket("other", consumer="E")
    pair.producer.add(ticket)
    pair.producer.save("other", pair.source, ticket.num_tokens)
    quick.load(ticket, pair.target)
    for _ in range(NUM_ROWS):
        pair.producer.step()
        quick.step()
        pair.network.advance(0.1)
    assert quick.received == pair.producer.sent == {"other"}
    assert not pair.consumer.ended


def test_transfers_take_turns_when_there_is_much_to_do(path: str) -> None:
    config = msgspec.structs.replace(CONFIG, copy_s=2.0, copy_share=1e-9)
    pair = long_pair(path, config, step_now_s=ticks())
    other = other_consumer(pair, "E", step_now_s=ticks())
    pair.start()
    ticket = pair.make_ticket("other", consumer="E")
    pair.producer.add(ticket)
    other.load(ticket, pair.target)
    pair.prefill()
    pair.producer.save("other", pair.source, ticket.num_tokens)
    counts = []
    while len(pair.producer.ended) < 2:
        for engine in (*pair.engines, other):
            engine.step()
        pair.network.advance()
        done = {x.request_id: x.done_rows for x in pair.producer.worker.transfers(0.0)}
        if len(done) == 2:
            counts.append(abs(done["r"] - done["other"]))
        assert pair.network.now_s < 2000
        pair.network.now_s += 0.01
    assert max(counts) <= 8


# ---- several chunks under way


@pytest.mark.parametrize("num_good", range(4))
def test_one_bad_chunk_of_several_is_one_report_and_nothing_is_written_after_it(
    path: str, num_good: int
) -> None:
    """The others arrive seconds later; World looks at the blocks all the time."""
    late: list[int] = []

    def fate(message: object) -> list[float]:
        if isinstance(message, Data | Mapped):
            late.append(message.first_row)
            return [0.0 if len(late) <= num_good + 1 else 3.0]
        return [0.0]

    world = World(path, fate, num_tokens=32 * 8)
    node = world.node(world.producer)
    bad_row = num_good if path == "inline" else 2 * num_good

    def mangle(frame: bytes, payload):
        if payload is None or msgspec.msgpack.decode(frame)[4] != bad_row:
            return frame, payload
        return frame, payload ^ 1

    node.mangle = mangle
    world.start()
    world.prefill()
    world.run(0.25, 30.0)
    assert world.consumer.reasons == world.producer.reasons == {"r": FailureReason.CHECKSUM}
    world.steps(40, 0.25)
    world.assert_over()
