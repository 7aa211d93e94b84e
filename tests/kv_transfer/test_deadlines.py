"""Silence, queues and slow cores: every wait has its end, and an end is final."""

import msgspec
import numpy as np
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from kv_transfer.keys import CLOCK_TOLERANCE_S
from kv_transfer.messages import Data, Mapped
from tests.kv_transfer.fakes import FakeEngine
from tests.kv_transfer.pairs import NUM_TOKENS, TARGET, Pair
from tests.kv_transfer.worlds import World

CONFIG = TransferConfig()


def freeze(pair: Pair, engine: FakeEngine, *, is_frozen: bool = True) -> None:
    """Stop or continue a process: its core, its threads and the messages on their way to it."""
    pair.node(engine).is_frozen = is_frozen


def stream(world: World) -> None:
    """Start a transfer of which three rows are ready and there."""
    world.start()
    world.prefill(100)
    world.steps(5, 0.1)
    assert len(world.consumer.io.changed()) == 3


def run_until(world: World, engine: FakeEngine, deadline_s: float) -> float:
    """Step until an engine reports the end; returns how long it took."""
    began_s = world.network.now_s
    while not engine.ended:
        assert world.network.now_s - began_s <= deadline_s + 1.0
        world.steps(1, 0.25)
    return world.network.now_s - began_s


# ---- frozen processes


def test_a_frozen_producer_fails_the_load_and_its_late_chunks_are_not_written(path: str) -> None:
    world = World(path)
    stream(world)
    freeze(world, world.producer)
    took_s = run_until(world, world.consumer, CONFIG.no_progress_s)
    assert world.consumer.reasons == {"r": FailureReason.STALLED}
    assert took_s >= CONFIG.no_progress_s - 0.5
    freeze(world, world.producer, is_frozen=False)
    world.prefill()
    world.steps(20, 0.5)  # World looks whether anything is written into the reused blocks.
    assert world.producer.reasons == {"r": FailureReason.STALLED}
    world.assert_over()


def test_a_frozen_consumer_loses_its_lease_and_reads_no_reused_blocks(path: str) -> None:
    world = World(path)
    stream(world)
    world.prefill()
    world.step(world.producer)  # Messages from here on wait until the consumer thaws.
    freeze(world, world.consumer)
    took_s = run_until(world, world.producer, CONFIG.lease_s)
    assert world.producer.reasons == {"r": FailureReason.EXPIRED}
    assert took_s >= CONFIG.lease_s - 6.0
    assert world.producer.stats.leases["expired"] == 1
    freeze(world, world.consumer, is_frozen=False)
    run_until(world, world.consumer, CONFIG.no_progress_s)
    if world.path != "inline":  # Rows that travelled are right whenever they are looked at.
        assert world.consumer.reasons["r"] in {FailureReason.EXPIRED, FailureReason.STALLED}
    world.steps(20, 0.5)
    world.assert_over()


@pytest.mark.parametrize("frozen", ["P", "D"])
def test_a_freeze_shorter_than_the_deadlines_costs_nothing(path: str, frozen: str) -> None:
    world = World(path)
    stream(world)
    engine = world.producer if frozen == "P" else world.consumer
    world.prefill()
    freeze(world, engine)
    world.steps(16, 0.25)
    freeze(world, engine, is_frozen=False)
    world.run(0.25, 5.0)
    assert world.consumer.received == world.producer.sent == {"r"}
    world.assert_over()


# ---- slow cores


def test_a_producer_whose_core_hangs_fails_the_load_later(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill()
    pair.producer.step()
    pair.consumer.step()
    pair.network.advance()
    began_s = pair.network.now_s
    while not pair.consumer.ended:
        pair.consumer.step()
        pair.network.advance(1.0)
    # Its I/O thread still answers, so that it is neither dead nor silent.
    assert pair.consumer.reasons == {"r": FailureReason.STALLED}
    assert CONFIG.no_data_s <= pair.network.now_s - began_s <= CONFIG.no_data_s + 3


def test_a_producer_that_never_confirms_fails_the_load() -> None:
    """Let it answer "serving" for ever, although every row was read."""
    pair = Pair("shared")
    pair.start()
    pair.prefill()
    pair.steps(2)
    pair.node(pair.producer).producer._on_live = lambda *_args: None
    pair.node(pair.producer).producer._leases.expire = lambda _now_s: ()
    began_s = pair.network.now_s
    pair.finish(pair.consumer)
    assert pair.consumer.reasons == {"r": FailureReason.STALLED}
    assert pair.consumer.failed["r"].num_tokens == NUM_TOKENS
    assert pair.network.now_s - began_s <= CONFIG.no_data_s + 3


# ---- queues


@pytest.mark.parametrize("num_leases", [3.5, 20])
def test_a_consumer_may_wait_many_leases_for_its_prefill(path: str, num_leases: float) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill(70)
    pair.steps(int(num_leases * CONFIG.lease_s), 1.0)
    assert not pair.producer.ended | pair.consumer.ended
    pair.deliver()


def test_a_consumer_whose_core_queues_many_leases_renews_from_its_own_thread(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill()
    pair.steps(2)
    for _ in range(int(3.5 * CONFIG.lease_s)):
        pair.producer.step()
        pair.network.advance(1.0)
    pair.steps(12)
    pair.assert_delivered()
    assert pair.producer.stats.leases["renewed"] >= 10


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_fetch_after_the_end_gets_an_error_and_never_data(path: str, is_attached: bool) -> None:
    world = World(path)
    if is_attached:
        stream(world)
        world.network.fate = lambda _message: []
    else:
        world.producer.add(world.ticket)
        world.prefill()
    run_until(world, world.producer, CONFIG.rendezvous_s)
    world.network.fate = lambda _message: [0.0]
    if not is_attached:
        world.consumer.load(world.ticket, TARGET)
    run_until(world, world.consumer, CONFIG.no_progress_s)
    assert world.producer.reasons == {"r": FailureReason.EXPIRED}
    moved = [m for m in world.network.sent if isinstance(m, Data | Mapped)]
    assert is_attached or not moved
    assert is_attached or world.producer.stats.leases["late_fetch"] == 1
    expected = FailureReason.STALLED if is_attached else FailureReason.EXPIRED
    assert world.consumer.reasons == {"r": expected}
    world.steps(30, 1.0)
    world.assert_over()


def test_a_chunk_after_the_deadline_is_not_sent_even_before_the_next_tick(
    path: str,
) -> None:
    world = World(path)
    stream(world)
    world.network.now_s += CONFIG.lease_s + 1.0
    num_sent = len(world.network.sent)
    world.prefill()
    world.producer.step()
    world.network.advance()
    sent = world.network.sent[num_sent:]
    assert not any(isinstance(message, Data | Mapped) for message in sent)
    world.steps(2)
    assert world.producer.reasons == {"r": FailureReason.EXPIRED}


def test_a_transfer_id_is_never_granted_twice(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.deliver()
    pair.producer.sent.clear()
    pair.producer.add(pair.ticket)
    pair.prefill()
    pair.steps(3)
    assert pair.producer.reasons == {"r": FailureReason.CANCELLED}


def test_a_ticket_that_becomes_too_old_does_not_end_a_lease_that_lives(path: str) -> None:
    """Request lost rows again with a ticket that has expired since."""
    lost: list[str] = []

    def fate(message: object) -> list[float]:
        is_lost = isinstance(message, Data | Mapped) and lost
        return [] if is_lost and lost.pop() else [0.0]

    pair = Pair(path, fate)
    young_s = 100.0
    pair.ticket = msgspec.structs.replace(
        pair.ticket, expires_ms=int(1000 * (pair.network.now_s + young_s))
    )
    pair.start()
    pair.prefill(70)
    pair.steps(5)
    pair.steps(int(young_s + CLOCK_TOLERANCE_S) + 5, 1.0)
    lost.append("one chunk")
    pair.prefill()
    pair.steps(30, 0.5)
    assert not lost
    assert pair.consumer.stats.num_retransmits > 0
    pair.assert_delivered()


def test_a_rendezvous_is_as_long_as_stated_on_both_sides(path: str) -> None:
    world = World(path)
    world.producer.add(world.ticket)
    world.prefill()
    assert run_until(world, world.producer, CONFIG.rendezvous_s) >= CONFIG.rendezvous_s - 0.5
    assert world.producer.stats.send_failures == {"expired": 1}
    alone = World(path)
    alone.consumer.load(alone.ticket, TARGET)
    assert run_until(alone, alone.consumer, CONFIG.rendezvous_s) >= CONFIG.rendezvous_s - 0.5
    assert alone.consumer.reasons == {"r": FailureReason.UNKNOWN_TRANSFER}
    assert np.array_equal(alone.producer.io.cache, alone.producer.io.original)
