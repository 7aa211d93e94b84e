"""Requests that lose their blocks in the middle of a transfer."""

import numpy as np
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from tests.kv_transfer.pairs import NUM_TOKENS, Pair
from tests.kv_transfer.worlds import World

CONFIG = TransferConfig()


def test_a_preempted_prefill_is_sent_again_from_where_it_is_computed_again() -> None:
    pair = Pair("inline")
    io = pair.producer.io
    pair.start()
    pair.prefill(192)
    pair.producer.step()
    pair.producer.scheduler.request_preempted("r")
    rows = io.blocks[0].read_rows(pair.source, 0, 8)
    moved = tuple(range(2, 10))
    io.cache[:] = 0
    pair.steps(5)
    assert not pair.consumer.ended
    io.blocks[0].write_rows(moved, 0, rows)
    pair.producer.save("r", moved, NUM_TOKENS)
    pair.steps(12)
    assert pair.producer.sent == pair.consumer.received == {"r"}
    want = io.tokens(0, moved, 0, NUM_TOKENS)
    assert np.array_equal(pair.consumer.io.tokens(0, pair.target, 0, NUM_TOKENS), want)


@pytest.mark.parametrize("num_steps", range(6))
def test_a_producer_may_be_preempted_at_any_time(path: str, num_steps: int) -> None:
    """World overwrites the blocks at once, and compares what the consumer believes in."""
    world = World(path)
    world.start()
    world.prefill(100)
    world.steps(num_steps, 0.1)
    world.preempt()
    world.steps(4, 0.1)
    if not world.producer.ended:
        world.prefill(64)
        world.steps(2, 0.1)
        world.prefill()
    world.run(0.25, 10.0)
    if path == "inline" or num_steps == 0:
        assert world.consumer.received == world.producer.sent == {"r"}
    elif num_steps > 1:
        # The consumer may have read what replaced the rows.
        expected = {"r": FailureReason.CANCELLED}
        assert world.producer.reasons == world.consumer.reasons == expected
    world.steps(12, 1.0)
    world.assert_over()


def test_a_preemption_between_reading_and_confirming_ends_the_transfer() -> None:
    world = World("shared")
    world.start()
    world.prefill()
    world.steps(2, 0.1)
    world.network.fate = lambda _message: []  # Done is on its way, and lost this time.
    world.step(world.consumer)
    assert world.consumer.worker.transfers(0.0)[0].state == "confirming"
    world.preempt()
    world.network.fate = lambda _message: [0.0]
    world.run(0.25, 10.0)
    assert world.producer.reasons == world.consumer.reasons == {"r": FailureReason.CANCELLED}


def test_a_confirmation_that_is_under_way_stands(path: str) -> None:
    """Rows that were read before the preemption are correct and must count."""
    world = World(path)
    world.start()
    world.prefill()
    for _ in range(20):
        world.steps(1, 0.1)
        if not world.node(world.producer).sessions.producer.num_open:
            break
    world.preempt()
    world.run(0.25, 10.0)
    assert world.consumer.received == {"r"}


def test_a_preempted_prefill_that_waits_long_is_waited_for() -> None:
    """No row is ready meanwhile, so that the producer's core does not look stuck."""
    world = World("inline")
    world.start()
    world.prefill(100)
    world.steps(1, 0.1)
    world.prefill()
    world.producer.step()
    world.preempt()
    world.steps(int(2 * CONFIG.no_data_s), 1.0)
    assert not world.consumer.ended
    world.prefill()
    world.run(0.25, 10.0)
    assert world.consumer.received == world.producer.sent == {"r"}


def test_lost_rows_of_a_preempted_prefill_wait_until_they_are_computed_again() -> None:
    lost = [1, 1, 1, 1]

    def fate(message: object) -> list[float]:
        is_lost = type(message).__name__ == "Data" and lost
        return [] if is_lost and lost.pop() else [0.0]

    world = World("inline", fate)
    world.start()
    world.prefill(192)
    world.steps(2, 0.1)
    world.preempt()
    world.steps(20, 0.5)
    assert not lost
    assert world.consumer.stats.num_retransmits > 0
    world.prefill()
    world.run(0.25, 20.0)
    assert world.consumer.received == {"r"}


@pytest.mark.parametrize("who", ["P", "D"])
@pytest.mark.parametrize("num_steps", range(6))
def test_either_end_may_cancel_at_any_time(path: str, num_steps: int, who: str) -> None:
    """Messages on their way must not be written into blocks that are used again."""
    world = World(path)
    world.start()
    world.prefill(100)
    world.steps(num_steps, 0.1)
    world.prefill()
    if who == "P":
        world.producer.scheduler.cancel("r")
    else:
        assert world.consumer.scheduler.request_finished("r", [world.target])
    world.run(0.25, 10.0)
    assert world.consumer.reasons == world.producer.reasons == {"r": FailureReason.CANCELLED}
    world.steps(12, 1.0)
    world.assert_over()


@pytest.mark.parametrize("dead", ["P", "D"])
@pytest.mark.parametrize("num_steps", range(2, 6))
def test_either_end_may_die_at_any_time(path: str, num_steps: int, dead: str) -> None:
    """World compares what the consumer believes in."""
    world = World(path)
    world.start()
    world.prefill(100)
    world.steps(num_steps, 0.1)
    world.prefill()
    gone, left = world.engines if dead == "P" else world.engines[::-1]
    world.network.cut(gone.worker.endpoints[0])
    while not left.ended:
        world.step(left)
    assert left.reasons == {"r": FailureReason.PEER_DEAD}
    assert left.stats.num_leased_blocks == left.stats.num_reserved_blocks == 0
