"""Sessions of an engine in both roles: credit, confirmations, and rows that became ready."""

from __future__ import annotations

import numpy as np
import pytest

from kv_transfer.messages import (
    Credit,
    Renew,
    encode_mapped,
)
from kv_transfer.sessions import TransferSessions
from kv_transfer.transport import (
    ArrivedMapped,
    Chunk,
    Confirmed,
    Consumed,
    Delivered,
    Granted,
    MappedChunk,
    Offer,
    ProducerRoute,
    Ready,
    Repeat,
    Spoiled,
    StartLoad,
    WireCounters,
)
from tests.kv_transfer.fakes import KEYS, LAYOUT, QUICK, FakeIO, make_settings, make_ticket

HERE = "tcp://here:1"


def load(ticket, start_row=0):
    return StartLoad(ticket, KEYS.seal(ticket), start_row, LAYOUT.row_bytes)


class Both:
    """Sessions of an engine that fetches from itself: its messages come back to it."""

    def __init__(self):
        self.counters = WireCounters()
        told = make_settings("E", config=QUICK)
        paths = frozenset({"inline", "shared"})
        self.sessions = TransferSessions(told, LAYOUT, self.counters, paths)
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


def test_credit_is_returned_by_the_quarter_window(both):
    ticket = make_ticket("r", HERE, 8 * 32, producer="E", consumer="E")
    both.apply(Offer(ticket), load(ticket))
    assert both.deliver() == [Granted(ticket.transfer_id, 0, 4, "inline")]
    both.apply(Ready(ticket.transfer_id, 8))
    payload = np.ones((1, LAYOUT.row_bytes), np.uint8)
    for row in range(4):
        both.apply(Chunk(ticket.transfer_id, row, payload))
    both.deliver()
    both.apply(Consumed(ticket.transfer_id, 1))
    assert both.deliver() == [Granted(ticket.transfer_id, 0, 5, "inline")]
    assert both.passed[-1] is Credit


def test_rows_in_shared_memory_count_when_the_producer_has_confirmed(both):
    ticket, io = both.ticket, FakeIO(4, shares=True)
    both.apply(Offer(ticket))
    both.sessions.load(load(ticket), ProducerRoute(HERE, "shared", io.blocks), 0.0)
    assert both.deliver() == [Granted(ticket.transfer_id, 0, 2, "shared")]
    ids = np.array([3, 1], np.int64)
    told = encode_mapped(ids, io.blocks[0].digests(ids))
    both.apply(MappedChunk(ticket.transfer_id, 0, 2, 0, told))
    [arrived] = both.deliver()
    assert isinstance(arrived, ArrivedMapped)
    assert arrived.block_ids.tolist() == [3, 1]
    both.apply(Spoiled(ticket.transfer_id, 1, 1), Consumed(ticket.transfer_id, 1))
    assert both.deliver() == [Repeat(ticket.transfer_id, 1, 1)]
    again = encode_mapped(ids[1:], io.blocks[0].digests(ids[1:]))
    both.apply(MappedChunk(ticket.transfer_id, 1, 1, 0, again))
    assert isinstance(both.deliver()[0], ArrivedMapped)
    both.apply(Consumed(ticket.transfer_id, 1))
    assert both.deliver() == [Delivered(ticket.transfer_id, 2), Confirmed(ticket.transfer_id)]


def test_ready_rows_are_reported_with_the_next_answer(both):
    both.apply(Offer(both.ticket), load(both.ticket))
    both.deliver()
    both.apply(Ready(both.ticket.transfer_id, 1))
    renew = Renew(both.ticket.transfer_id, both.ticket.epoch, 0, 2)
    both.sessions.producer.on_message(b"E", renew, 0.0)
    [(_, info, _)] = both.sessions.producer.take_sends()
    assert info.ready_rows == 1


def test_a_broken_invariant_of_either_half_shows(both):
    both.apply(Offer(both.ticket))
    both.sessions.check_invariants()
    next(iter(both.sessions.producer._sending.values())).sent_rows = 99
    with pytest.raises(AssertionError):
        both.sessions.check_invariants()
