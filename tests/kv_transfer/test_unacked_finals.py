"""Repetition of unacknowledged ends, and fetches parked for transfers that are not known yet."""

import msgspec
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason
from kv_transfer.lease import LeaseState
from kv_transfer.messages import Cancel, Done, Fail, LeaseInfo
from kv_transfer.parked import MAX_PARKED, Parked, ParkedFetches
from kv_transfer.unacked_finals import UnackedFinals
from tests.kv_transfer.fakes import make_ticket
from tests.kv_transfer.test_messages import FETCH

CONFIG = TransferConfig(renew_s=1.0, no_progress_s=3.0, closing_s=3.5)
ONE, OTHER = b"1" * 16, b"2" * 16


def done(transfer_id: bytes = ONE) -> Done:
    return Done(transfer_id, 7, b"ticket")


def said(*messages: Done | Cancel) -> UnackedFinals:
    finals = UnackedFinals(CONFIG)
    for message in messages:
        finals.add(f"tcp://{message.transfer_id[:1].decode()}", message, 0.0)
    return finals


def info(state: LeaseState, epoch: int = 7) -> LeaseInfo:
    return LeaseInfo(ONE, epoch, state, 0, 0, 0)


def test_a_final_is_repeated_until_its_deadline() -> None:
    finals = said(done())
    assert finals.deadlines_s() == [1.0]
    assert finals.due(0.9) == []
    for now_s in (1.0, 2.0, 3.0):
        assert finals.due(now_s) == [("tcp://1", done())]
        assert finals.due(now_s) == [], "not twice in one turn"
    assert finals.due(3.5) == []
    assert (len(finals), finals.deadlines_s()) == (0, [])


@pytest.mark.parametrize("state", list(LeaseState))
def test_any_answer_that_the_transfer_is_over_acknowledges_a_final(state: LeaseState) -> None:
    finals = said(done(), Cancel(OTHER, 7, FailureReason.CANCELLED, b"ticket"))
    finals.acknowledge(info(state, epoch=6))
    assert ONE in finals, "it speaks of another transfer under this id"
    finals.acknowledge(info(state))
    assert (ONE in finals) == (state in {LeaseState.WAITING, LeaseState.SERVING})
    assert OTHER in finals
    finals.acknowledge(Fail(ONE, 7, FailureReason.EXPIRED))
    assert ONE not in finals


def test_a_lost_peer_and_a_restarted_transfer_get_no_finals() -> None:
    finals = said(done(ONE), done(OTHER))
    finals.on_peer_lost("tcp://1")
    assert finals.due(1.0) == [("tcp://2", done(OTHER))]
    finals.discard(OTHER)
    finals.discard(OTHER)
    assert finals.due(2.0) == []


def parked(number: int, peer: bytes = b"D", deadline_s: float = 1.0) -> Parked:
    ticket = make_ticket("r", ("tcp://p",), 32)
    transfer_id = number.to_bytes(16, "big")
    fetch = msgspec.structs.replace(FETCH, transfer_id=transfer_id)
    return Parked(peer, fetch, ticket, deadline_s)


def test_the_first_fetch_for_a_transfer_is_parked() -> None:
    fetches = ParkedFetches()
    assert fetches.park(parked(1))
    assert not fetches.park(parked(1, peer=b"E"))
    assert fetches.park(parked(1, deadline_s=9.0)), "it asks again"
    assert fetches.next_deadline_s() == 1.0, "and waits for no longer"
    first = fetches.pop_fetch((1).to_bytes(16, "big"))
    assert first is not None
    assert first.peer == b"D"
    assert fetches.pop_fetch((1).to_bytes(16, "big")) is None
    assert fetches.next_deadline_s() is None


def test_parked_fetches_give_way_to_newer_ones_and_expire() -> None:
    fetches = ParkedFetches()
    for number in range(MAX_PARKED + 1):
        assert fetches.park(parked(number, deadline_s=float(number)))
    fetches.check_invariants()
    assert (0).to_bytes(16, "big") not in fetches.transfer_ids
    assert fetches.expire(0.5) == 0
    assert fetches.expire(10.0) == 10
    assert fetches.next_deadline_s() == 11.0
    assert fetches.expire(float(MAX_PARKED)) == MAX_PARKED - 10
    assert fetches.transfer_ids == set()
