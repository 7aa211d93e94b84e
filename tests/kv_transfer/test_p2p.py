"""Both sides of the connector over a network without sockets, under a virtual clock."""

import msgspec
import pytest

from kv_transfer.connector import (
    Failure,
    TransferRequest,
    TransferResults,
    load_connector,
)
from kv_transfer.errors import FailureReason, LayoutMismatchError, TicketError, TransferError
from kv_transfer.p2p import P2PConnector, P2PConnectorScheduler
from tests.kv_transfer.fakes import KEYS, LAYOUT, make_settings, make_ticket
from tests.kv_transfer.pairs import SOURCE, TARGET, Pair


def test_prefilled_blocks_reach_the_decode_engine(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.deliver()
    pair.assert_nothing_is_held()
    sent = pair.producer.stats.paths[pair.wired_path]
    received = pair.consumer.stats.paths[pair.wired_path]
    assert sent.bytes_sent == received.bytes_received == 8 * LAYOUT.row_bytes
    assert (sent.num_sent, received.num_received) == (1, 1)
    leases = pair.producer.stats.leases
    assert (leases["granted"], leases["done"]) == (1, 1)
    for stage in ("first_chunk", "stream", "commit", "total"):
        assert sum(pair.consumer.stats.stages[stage].counts) == 1
    for stage in ("rendezvous", "handover"):
        assert sum(pair.producer.stats.stages[stage].counts) == 1


def test_blocks_leave_as_prefill_chunks_make_them_ready(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill(80)
    pair.steps(4)
    assert pair.consumer.io.changed() == {1, 2}, "80 tokens fill two blocks"
    pair.prefill(192)
    pair.steps(6)
    assert pair.consumer.io.changed() == set(TARGET[:6])
    assert not pair.consumer.ended
    pair.prefill()
    pair.steps(6)
    pair.assert_delivered()


def test_a_consumer_may_come_long_before_the_producer_knows_the_request(path: str) -> None:
    pair = Pair(path)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(60, 1.0)
    pair.producer.add(pair.ticket)
    pair.deliver()


def test_a_failed_load_reports_its_verified_tokens(path: str) -> None:
    pair = Pair(path)
    pair.start(num_cached=32)
    pair.prefill(100)
    pair.steps(4)
    pair.network.cut(pair.producer.worker.endpoints[0])
    pair.consumer.step()
    assert pair.consumer.failed == {"r": Failure(FailureReason.PEER_DEAD, 96)}
    assert pair.has_rows(32, 96)


def test_an_abort_before_the_producer_knows_the_transfer_is_remembered(path: str) -> None:
    pair = Pair(path)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(1)
    pair.consumer.scheduler.cancel("r")
    pair.steps(1)
    pair.producer.add(pair.ticket)
    pair.steps(1)
    assert pair.producer.reasons == {"r": FailureReason.CANCELLED}


def test_a_load_that_was_never_admitted_can_be_cancelled(path: str) -> None:
    pair = Pair(path)
    pair.consumer.add(pair.ticket)
    assert pair.consumer.scheduler.request_finished("r", ())
    pair.consumer.step()
    assert pair.consumer.reasons == {"r": FailureReason.CANCELLED}
    assert not pair.consumer.scheduler.has_pending_work()


def test_a_prefill_that_ends_early_cancels_its_transfer(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill(64)
    pair.steps(3)
    assert pair.producer.scheduler.request_finished("r", [SOURCE[:2]])
    pair.steps(2)
    assert pair.consumer.reasons == pair.producer.reasons == {"r": FailureReason.CANCELLED}


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_broken_invariant_of_either_end_shows(who: str) -> None:
    pair = Pair()
    pair.start()
    pair.prefill(100)
    pair.steps(3)
    if who == "P":
        next(iter(pair.node(pair.producer).producer._sending.values())).sent_rows = 99
    else:
        next(iter(pair.node(pair.consumer).consumer._loading.values())).num_arrived = 99
    with pytest.raises(AssertionError):
        pair.steps(1)


# ---- the scheduler side alone


def request(ticket) -> TransferRequest:
    return TransferRequest(ticket.request_id, (0,) * ticket.num_tokens, KEYS.seal(ticket))


@pytest.fixture
def scheduler() -> P2PConnectorScheduler:
    return P2PConnector().create_scheduler(make_settings("D"), [LAYOUT])


def test_asking_for_matched_tokens_changes_nothing(scheduler: P2PConnectorScheduler) -> None:
    scheduler.on_new_request(request(make_ticket("r", "tcp://p:1", 70)), 0.0)
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens("r", 32) == (38, True)
    assert scheduler.get_num_new_matched_tokens("r", 96) == (0, False)
    assert scheduler.get_num_new_matched_tokens("another", 0) == (0, False)
    assert not scheduler.has_pending_work()


def test_a_load_is_handed_over_once(scheduler: P2PConnectorScheduler) -> None:
    scheduler.on_new_request(request(make_ticket("r", "tcp://p:1", 70)), 0.0)
    for _ in range(2):
        scheduler.update_state_after_alloc("r", 1, [(4, 5, 6, 7)], 38)
    assert scheduler.has_pending_work()
    (load,) = scheduler.build_connector_meta().loads
    assert (load.lane, load.block_ids, load.start_row) == (1, ((4, 5, 6),), 1)
    scheduler.update_state_after_alloc("r", 1, [(4, 5, 6, 7)], 38)
    assert scheduler.build_connector_meta().loads == ()
    assert scheduler.request_finished("r", [(4, 5, 6, 7)])
    assert scheduler.build_connector_meta().cancels == ("r",)


def test_a_cancel_is_forgotten_when_the_transfer_has_ended(
    scheduler: P2PConnectorScheduler,
) -> None:
    scheduler.on_new_request(request(make_ticket("r", "tcp://p:1", 70)), 0.0)
    scheduler.cancel("r")
    scheduler.update_connector_output(TransferResults(received=frozenset({"r"})))
    assert scheduler.build_connector_meta().cancels == ()
    assert not scheduler.request_finished("r", ())


def test_wrong_tickets_are_refused_before_anything_is_kept(
    scheduler: P2PConnectorScheduler,
) -> None:
    ticket = make_ticket("r", "tcp://p:1", 70)
    with pytest.raises(TicketError):
        scheduler.on_new_request(request(msgspec.structs.replace(ticket, consumer="E")), 0.0)
    other = msgspec.structs.replace(ticket, layout_hash="0" * 32)
    with pytest.raises(LayoutMismatchError):
        scheduler.on_new_request(request(other), 0.0)
    assert scheduler.num_inflight == 0
    scheduler.on_new_request(request(ticket), 0.0)
    for request_id in ("r", "r2"):
        again = msgspec.structs.replace(ticket, request_id=request_id)
        with pytest.raises(TransferError, match="transfer_id"):
            scheduler.on_new_request(request(again), 0.0)
    assert scheduler.num_inflight == 1


def test_too_few_blocks_are_refused_with_both_numbers(scheduler: P2PConnectorScheduler) -> None:
    scheduler.on_new_request(request(make_ticket("r", "tcp://p:1", 70)), 0.0)
    with pytest.raises(TransferError, match="2 blocks allocated, 3 needed"):
        scheduler.update_state_after_alloc("r", 0, [(1, 2)], 70)


def test_connectors_are_found_by_name_or_module_and_class() -> None:
    assert isinstance(load_connector("p2p"), P2PConnector)
    assert isinstance(load_connector("kv_transfer.p2p:P2PConnector"), P2PConnector)
    for name in ("nixl", "no_such_module:Class", "kv_transfer.p2p:Missing"):
        with pytest.raises(TransferError, match=name):
            load_connector(name)
