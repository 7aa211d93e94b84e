"""One door to both halves: each command reaches its half, and time passes for both."""

from __future__ import annotations

import numpy as np
import pytest

from kv_transfer.errors import FailureReason
from kv_transfer.messages import Cancel, Credit, Data, Done, Fetch, LeaseInfo, Renew
from kv_transfer.sessions import TransferSessions
from kv_transfer.transport import (
    Arrived,
    CancelLoad,
    CancelSend,
    Chunk,
    Consumed,
    Delivered,
    Granted,
    Load,
    LoadFailed,
    Offer,
    Ready,
    SendFailed,
    WireCounters,
)
from tests.kv_transfer.fakes import LAYOUT, QUICK, make_ticket

HERE = "tcp://here:1"


class Both:
    """Sessions of an engine that fetches from itself: what it sends comes back."""

    def __init__(self):
        self.counters = WireCounters()
        self.sessions = TransferSessions("E", LAYOUT, QUICK, self.counters)
        self.ticket = make_ticket("r", HERE, 64, producer="E", consumer="E")
        self.passed = []

    def apply(self, *commands, now_s=0.0):
        for command in commands:
            self.sessions.apply(command, now_s)
            self.sessions.check_invariants()

    def deliver(self, now_s=0.0):
        """Deliver until there is nothing more; returns the events."""
        while sends := [*self.sessions.consumer.take_sends(), *self.sessions.producer.take_sends()]:
            for to, message, *payload in sends:
                self.passed.append(type(message))
                if to == HERE:
                    self.sessions.producer.on_message(b"E", message, now_s)
                else:
                    self.sessions.consumer.on_message(HERE, message, *payload, now_s)
        return self.sessions.take_events()


@pytest.fixture
def both():
    return Both()


def test_every_command_reaches_its_half(both):
    ticket = both.ticket
    payload = np.arange(2 * LAYOUT.bytes_per_block, dtype=np.uint8).reshape(2, -1)
    both.apply(Offer(ticket), Load(ticket, 0))
    assert both.deliver() == [Granted(ticket.transfer_id, 0, 2)]
    both.apply(Ready(ticket.transfer_id, 2), Chunk(ticket.transfer_id, 0, payload))
    [arrived] = both.deliver()
    assert isinstance(arrived, Arrived)
    assert np.array_equal(arrived.payload, payload)
    both.apply(Consumed(ticket.transfer_id, 1))
    assert both.deliver() == []
    assert both.passed[-2:] == [Data, Credit]
    both.apply(Consumed(ticket.transfer_id, 1))
    assert both.deliver() == [Delivered(ticket.transfer_id, 2)]
    assert both.passed[-2:] == [Done, LeaseInfo]
    assert both.passed[0] is Fetch
    assert both.counters == WireCounters()


def test_ready_blocks_are_told_with_the_next_answer(both):
    both.apply(Offer(both.ticket), Load(both.ticket, 0))
    both.deliver()
    both.apply(Ready(both.ticket.transfer_id, 1))
    renew = Renew(both.ticket.transfer_id, both.ticket.epoch, 0, 2)
    both.sessions.producer.on_message(b"E", renew, 0.0)
    [(_, info, _)] = both.sessions.producer.take_sends()
    assert info.ready_blocks == 1


def test_the_producer_cancels(both):
    both.apply(Offer(both.ticket), Load(both.ticket, 0))
    both.deliver()
    both.apply(CancelSend(both.ticket.transfer_id))
    assert both.deliver() == [LoadFailed(both.ticket.transfer_id, FailureReason.CANCELLED)]


def test_the_consumer_cancels(both):
    both.apply(Offer(both.ticket), Load(both.ticket, 0))
    both.deliver()
    both.apply(CancelLoad(both.ticket.transfer_id))
    assert both.deliver() == [SendFailed(both.ticket.transfer_id, FailureReason.CANCELLED)]
    assert Cancel in both.passed


def test_the_next_deadline_is_the_earlier_one_of_both_halves(both):
    sessions = both.sessions
    assert sessions.next_deadline_s() is None
    both.apply(Offer(both.ticket), now_s=1.0)
    lease_s = sessions.producer.next_deadline_s()
    assert sessions.next_deadline_s() == lease_s == 1.0 + QUICK.rendezvous_s
    other = make_ticket("other", "tcp://there:1", 64, producer="P", consumer="E")
    both.apply(Load(other, 0), now_s=1.0)
    assert sessions.consumer.next_deadline_s() == sessions.next_deadline_s() == 1.0 + QUICK.probe_s
    both.apply(CancelSend(both.ticket.transfer_id))
    assert sessions.next_deadline_s() == 1.0 + QUICK.probe_s


def test_time_passes_for_both_halves(both):
    other = make_ticket("other", "tcp://there:1", 64, producer="P", consumer="E")
    both.apply(Offer(both.ticket), Load(other, 0))
    both.sessions.tick(QUICK.rendezvous_s)
    assert both.sessions.take_events() == [
        SendFailed(both.ticket.transfer_id, FailureReason.EXPIRED),
        LoadFailed(other.transfer_id, FailureReason.UNKNOWN_TRANSFER),
    ]
    assert both.sessions.take_events() == []


def test_a_broken_invariant_of_either_half_shows(both):
    both.apply(Offer(both.ticket))
    both.sessions.check_invariants()
    next(iter(both.sessions.producer._sending.values())).sent_blocks = 99
    with pytest.raises(AssertionError):
        both.sessions.check_invariants()
