"""Both sides of the connector over a network without sockets, under a virtual clock."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.connector import ConnectorSettings, TransferResults, load_connector
from kv_transfer.errors import FailureReason, LayoutMismatchError, TicketError, TransferError
from kv_transfer.p2p import P2PConnector, P2PConnectorScheduler
from tests.kv_transfer.fakes import (
    LAYOUT,
    FakeEngine,
    FakeIO,
    Faults,
    Network,
    make_loopback_engine,
    make_ticket,
)

SOURCE = tuple(range(9, 1, -1))
TARGET = tuple(range(1, 9))
NUM_TOKENS = 8 * 32 - 5


class Pair:
    """A producer and a consumer on one network."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.network = Network(faults)
        self.producer = make_loopback_engine("P", FakeIO(10, seed=1), self.network)
        self.consumer = make_loopback_engine("D", FakeIO(10, seed=2), self.network)
        self.ticket = make_ticket("r", self.producer.worker.endpoint, NUM_TOKENS)

    def start(self, *, num_cached: int = 0) -> None:
        self.producer.scheduler.on_new_request("r", self.ticket)
        self.consumer.load(self.ticket, TARGET, num_cached)

    def steps(self, num: int = 1, seconds: float = 0.0) -> None:
        for _ in range(num):
            self.producer.step()
            self.consumer.step()
            self.network.advance(seconds)

    def finish(self, engine: FakeEngine, seconds: float = 200.0) -> None:
        """Step until the engine has no transfer left."""
        for _ in range(int(seconds)):
            self.steps(1, 1.0)
            if not engine.scheduler.num_inflight:
                return
        raise AssertionError(repr(engine.scheduler))

    def assert_delivered(self, num_cached: int = 0) -> None:
        first = num_cached // 32
        want = self.producer.io.rows(0, SOURCE[first:], NUM_TOKENS - num_cached)
        got = self.consumer.io.rows(0, TARGET[first:], NUM_TOKENS - num_cached)
        assert np.array_equal(got, want)
        assert not self.consumer.io.tail(TARGET[-1], NUM_TOKENS).any()


def test_prefilled_blocks_reach_the_decode_engine() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(12)
    assert (pair.producer.sent, pair.consumer.received) == ({"r"}, {"r"})
    pair.assert_delivered()
    sent, received = pair.producer.stats, pair.consumer.stats
    assert sent.blocks_sent == received.blocks_received == 8
    assert sent.bytes_sent == received.bytes_received == 8 * LAYOUT.bytes_per_block
    assert sent.num_leased_blocks == sent.num_inflight_sends == received.num_inflight_loads == 0


def test_blocks_leave_as_prefill_chunks_make_them_ready() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE[:3], 80)
    pair.steps(4)
    assert sorted(pair.consumer.io.writes) == [(0, 1), (0, 2)], "80 tokens fill two blocks"
    pair.producer.save("r", SOURCE[:6], 192)
    pair.steps(6)
    assert {block for _, block in pair.consumer.io.writes} == set(TARGET[:6])
    assert not pair.consumer.ended
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(6)
    assert pair.consumer.received == {"r"}
    pair.assert_delivered()


@pytest.mark.parametrize("num_cached", [32, 7 * 32])
def test_a_local_prefix_hit_is_not_fetched(num_cached: int) -> None:
    pair = Pair()
    pair.start(num_cached=num_cached)
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(12)
    pair.assert_delivered(num_cached)
    num_wired = 8 - num_cached // 32
    assert sorted(pair.consumer.io.writes) == [(0, b) for b in TARGET[-num_wired:]]
    assert pair.producer.stats.blocks_sent == num_wired


def test_a_full_local_hit_releases_the_producer_without_data() -> None:
    pair = Pair()
    pair.start(num_cached=NUM_TOKENS)
    pair.steps(3)
    assert (pair.producer.sent, pair.consumer.received) == ({"r"}, {"r"})
    assert pair.consumer.io.writes == []


def test_a_consumer_may_come_long_before_the_producer_hears_of_the_request() -> None:
    pair = Pair()
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(60, 1.0)
    pair.producer.scheduler.on_new_request("r", pair.ticket)
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(12)
    pair.assert_delivered()


def test_a_prefill_that_takes_many_leases_is_waited_for() -> None:
    pair = Pair()
    pair.start()
    pair.steps(200, 1.0)
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(12)
    pair.assert_delivered()


def test_a_producer_that_never_hears_of_it_fails_the_load() -> None:
    pair = Pair()
    pair.consumer.load(pair.ticket, TARGET)
    pair.finish(pair.consumer)
    assert pair.consumer.failed == {"r": FailureReason.UNKNOWN_TRANSFER}


def test_a_lease_that_nobody_fetches_expires_and_frees_the_blocks() -> None:
    pair = Pair()
    pair.producer.scheduler.on_new_request("r", pair.ticket)
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(2)
    assert pair.producer.scheduler.request_finished("r", SOURCE)
    pair.finish(pair.producer)
    assert pair.producer.failed == {"r": FailureReason.EXPIRED}
    assert pair.producer.stats.send_failures == {"expired": 1}


def test_a_fetch_after_expiry_gets_an_error_and_no_data() -> None:
    pair = Pair()
    pair.producer.scheduler.on_new_request("r", pair.ticket)
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.finish(pair.producer)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(3)
    assert pair.consumer.failed == {"r": FailureReason.EXPIRED}
    assert pair.consumer.io.writes == []


def test_a_silent_consumer_loses_its_lease_and_gets_no_late_data() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(1)
    pair.network.nodes.pop(pair.consumer.worker.endpoint)
    for _ in range(40):
        pair.producer.step()
        pair.network.advance(1.0)
    assert pair.producer.failed == {"r": FailureReason.EXPIRED}


def test_a_frozen_producer_is_noticed() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(2)
    pair.network.nodes.pop(pair.producer.worker.endpoint)
    for _ in range(8):
        pair.consumer.step()
        pair.network.advance(1.0)
    assert pair.consumer.failed == {"r": FailureReason.STALLED}


def test_a_producer_whose_core_hangs_is_noticed_later() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(2)
    for _ in range(90):
        pair.consumer.step()
        pair.network.advance(1.0)
    assert pair.consumer.failed == {"r": FailureReason.STALLED}
    assert 0 < len(pair.consumer.io.writes) < 8


def test_a_consumer_whose_core_is_busy_for_long_loses_nothing() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    for _ in range(100):
        pair.producer.step()
        pair.network.advance(1.0)
    pair.steps(12)
    pair.assert_delivered()


def test_a_dead_producer_fails_the_load_at_once() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(2)
    pair.network.cut(pair.producer.worker.endpoint)
    pair.consumer.step()
    assert pair.consumer.failed == {"r": FailureReason.PEER_DEAD}


def test_a_dead_consumer_ends_the_send_at_once_when_it_is_noticed() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(2)
    pair.network.cut(pair.consumer.worker.endpoint)
    pair.producer.step()
    assert pair.producer.failed == {"r": FailureReason.PEER_DEAD}


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_of_the_consumer_ends_both_sides(num_steps: int) -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(num_steps)
    assert pair.consumer.scheduler.request_finished("r", TARGET)
    pair.consumer.step()
    canary = pair.consumer.io.cache.copy()
    pair.network.advance()
    pair.steps(3)
    assert pair.consumer.failed == {"r": FailureReason.CANCELLED}
    assert pair.producer.failed == {"r": FailureReason.CANCELLED}
    assert np.array_equal(pair.consumer.io.cache, canary)


@pytest.mark.parametrize("num_steps", range(4))
def test_an_abort_of_the_producer_ends_both_sides(num_steps: int) -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(num_steps)
    pair.producer.scheduler.cancel("r")
    pair.steps(3)
    assert pair.producer.failed == {"r": FailureReason.CANCELLED}
    assert pair.consumer.failed == {"r": FailureReason.CANCELLED}


def test_an_abort_before_the_producer_hears_of_it_is_remembered() -> None:
    pair = Pair()
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(1)
    pair.consumer.scheduler.cancel("r")
    pair.steps(1)
    pair.producer.scheduler.on_new_request("r", pair.ticket)
    pair.steps(1)
    assert pair.producer.failed == {"r": FailureReason.CANCELLED}


def test_a_load_that_was_never_admitted_can_be_cancelled() -> None:
    pair = Pair()
    pair.consumer.scheduler.on_new_request("r", pair.ticket)
    assert pair.consumer.scheduler.request_finished("r", ())
    pair.consumer.step()
    assert pair.consumer.failed == {"r": FailureReason.CANCELLED}
    assert not pair.consumer.scheduler.has_pending_work()


def test_a_prefill_that_ends_early_cancels_its_transfer() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE[:2], 64)
    pair.steps(3)
    assert pair.producer.scheduler.request_finished("r", SOURCE[:2])
    pair.steps(2)
    assert pair.consumer.failed == pair.producer.failed == {"r": FailureReason.CANCELLED}


def test_a_preempted_prefill_is_read_only_after_it_was_computed_again() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE[:6], 192)
    pair.producer.step()
    pair.producer.scheduler.request_preempted("r")
    rows = pair.producer.io.read_blocks(0, SOURCE)
    moved = tuple(range(2, 10))
    pair.producer.io.cache[:] = 0
    pair.steps(5)
    pair.producer.io.write_blocks(0, moved, rows)
    pair.producer.save("r", moved, NUM_TOKENS)
    pair.steps(12)
    assert pair.consumer.received == {"r"}
    want = pair.producer.io.rows(0, moved, NUM_TOKENS)
    assert np.array_equal(pair.consumer.io.rows(0, TARGET, NUM_TOKENS), want)


def test_a_corrupted_chunk_is_asked_for_once_more() -> None:
    pair = Pair()
    pair.network.nodes[pair.producer.worker.endpoint].corrupt = 1
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(14)
    pair.assert_delivered()
    assert pair.consumer.stats.num_checksum_failures == 1
    assert pair.consumer.stats.num_retransmits == pair.producer.stats.num_retransmits == 1


def test_a_chunk_that_stays_corrupted_fails_both_sides_and_is_never_written() -> None:
    pair = Pair()
    pair.network.nodes[pair.producer.worker.endpoint].corrupt = 100
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(10)
    assert pair.consumer.failed == pair.producer.failed == {"r": FailureReason.CHECKSUM}
    assert pair.consumer.io.writes == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"consumer": "somebody else"}, FailureReason.AUDIENCE),
        ({"epoch": 2}, FailureReason.EPOCH),
        ({"num_tokens": NUM_TOKENS - 32}, FailureReason.LAYOUT),
    ],
)
def test_a_fetch_that_contradicts_the_offer_is_refused(change, reason) -> None:
    pair = Pair()
    pair.producer.scheduler.on_new_request("r", msgspec.structs.replace(pair.ticket, **change))
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(1)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(2)
    assert pair.consumer.failed == {"r": reason}
    assert pair.consumer.io.writes == []
    assert not pair.producer.ended


def test_a_restarted_producer_at_the_same_address_is_refused() -> None:
    pair = Pair()
    old = msgspec.structs.replace(pair.ticket, producer_incarnation="P-before")
    pair.consumer.load(old, TARGET)
    pair.steps(2)
    assert pair.consumer.failed == {"r": FailureReason.INCARNATION}


def test_credits_bound_what_a_slow_consumer_is_sent() -> None:
    pair = Pair()
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.consumer.step()
    for _ in range(50):
        pair.producer.step()
        pair.network.advance(0.1)
    node = pair.network.nodes[pair.consumer.worker.endpoint]
    assert sum(len(event.payload) for event in node.events) == 4, "the window"


@settings(max_examples=120, deadline=None)
@given(
    faults=st.builds(
        Faults,
        seed=st.integers(0, 1 << 30),
        drop=st.sampled_from([0.0, 0.1, 0.4]),
        repeat=st.sampled_from([0.0, 0.3]),
        delay=st.sampled_from([0.0, 0.5]),
    ),
    num_cached=st.sampled_from([0, 64]),
    abort=st.sampled_from([None, "P", "D"]),
    abort_step=st.integers(0, 12),
)
def test_whatever_the_network_does_blocks_are_right_or_the_transfer_fails(
    faults: Faults,
    num_cached: int,
    abort: str | None,
    abort_step: int,
) -> None:
    pair = Pair(faults)
    pair.start(num_cached=num_cached)
    before = pair.consumer.io.cache.copy()
    engines = {"P": pair.producer, "D": pair.consumer}
    for step in range(20):
        pair.producer.save("r", SOURCE, min(NUM_TOKENS, 40 * step))
        if step == abort_step and abort:
            engines[abort].scheduler.cancel("r")
        pair.steps(1, 0.3)
    pair.network.faults.heal()
    pair.finish(pair.consumer)
    after = pair.consumer.io.cache.copy()
    pair.finish(pair.producer)
    if "r" in pair.consumer.received:
        pair.assert_delivered(num_cached)
    else:
        assert "r" not in pair.producer.sent
    assert np.array_equal(pair.consumer.io.cache, after), "written after the end was reported"
    untouched = [0, *TARGET[: num_cached // 32], 9]
    assert np.array_equal(before[0, untouched], after[0, untouched])
    for engine in engines.values():
        assert engine.stats.num_inflight_loads == engine.stats.num_inflight_sends == 0


# ---- the scheduler side alone


@pytest.fixture
def scheduler() -> P2PConnectorScheduler:
    return P2PConnector().create_scheduler(ConnectorSettings(incarnation="D"), LAYOUT)


def test_asking_for_matched_tokens_changes_nothing(scheduler: P2PConnectorScheduler) -> None:
    scheduler.on_new_request("r", make_ticket("r", "tcp://p:1", 70))
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens("r", 32) == (38, True)
    assert scheduler.get_num_new_matched_tokens("r", 96) == (0, False)
    assert scheduler.get_num_new_matched_tokens("another", 0) == (0, False)
    assert not scheduler.has_pending_work()


def test_a_load_is_handed_over_once(scheduler: P2PConnectorScheduler) -> None:
    scheduler.on_new_request("r", make_ticket("r", "tcp://p:1", 70))
    for _ in range(2):
        scheduler.update_state_after_alloc("r", 1, (4, 5, 6, 7), 38)
    assert scheduler.has_pending_work()
    (load,) = scheduler.build_connector_meta().loads
    assert (load.lane, load.block_ids, load.start_block) == (1, (4, 5, 6), 1)
    scheduler.update_state_after_alloc("r", 1, (4, 5, 6, 7), 38)
    assert scheduler.build_connector_meta().loads == ()
    assert scheduler.request_finished("r", (4, 5, 6, 7))
    assert scheduler.build_connector_meta().cancels == ("r",)


def test_a_cancel_is_forgotten_when_the_transfer_has_ended(
    scheduler: P2PConnectorScheduler,
) -> None:
    scheduler.on_new_request("r", make_ticket("r", "tcp://p:1", 70))
    scheduler.cancel("r")
    scheduler.update_connector_output(TransferResults(received=frozenset({"r"})))
    assert scheduler.build_connector_meta().cancels == ()
    assert not scheduler.request_finished("r", ())


def test_wrong_tickets_are_refused_before_anything_is_kept(
    scheduler: P2PConnectorScheduler,
) -> None:
    ticket = make_ticket("r", "tcp://p:1", 70)
    with pytest.raises(TicketError):
        scheduler.on_new_request("r", msgspec.structs.replace(ticket, consumer="E"))
    with pytest.raises(LayoutMismatchError):
        scheduler.on_new_request("r", msgspec.structs.replace(ticket, layout_hash="0" * 32))
    assert scheduler.num_inflight == 0
    scheduler.on_new_request("r", ticket)
    with pytest.raises(TransferError, match="transfer_id"):
        scheduler.on_new_request("r2", ticket)


def test_too_few_blocks_are_refused_with_both_numbers(scheduler: P2PConnectorScheduler) -> None:
    scheduler.on_new_request("r", make_ticket("r", "tcp://p:1", 70))
    with pytest.raises(TransferError, match="2 blocks allocated, 3 needed"):
        scheduler.update_state_after_alloc("r", 0, (1, 2), 70)


def test_connectors_are_found_by_name_or_module_and_class() -> None:
    assert isinstance(load_connector("p2p"), P2PConnector)
    assert isinstance(load_connector("kv_transfer.p2p:P2PConnector"), P2PConnector)
    for name in ("nixl", "no_such_module:Class", "kv_transfer.p2p:Missing"):
        with pytest.raises(TransferError, match=name):
            load_connector(name)
