"""Watchers of messages: a producer that sends KV to the wrong one, or too late, is caught."""

from types import SimpleNamespace

import pytest

from cluster.lab.simulation.monitors import LeaseMonitor
from kv_transfer.keys import KeyRing
from kv_transfer.lease import LeaseState
from kv_transfer.messages import PROTOCOL_VERSION, Data, Fetch, LeaseInfo, Renew
from kv_transfer.ticket import Ticket

KEYS = KeyRing((bytes(16),))
TRANSFER = bytes(range(16))
LEASE_S = 4.0
HOST = SimpleNamespace(incarnation="p")


class Clock:
    now_s = 0.0

    def time(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def monitor(clock):
    return LeaseMonitor(clock, LEASE_S, KEYS)


def fetch(consumer, producer="p"):
    ticket = Ticket(TRANSFER, "r", 0, ("ipc://@p",), producer, consumer, 32, "layout", 10**6)
    return Fetch(
        version=PROTOCOL_VERSION,
        transfer_id=TRANSFER,
        epoch=0,
        ticket=KEYS.seal(ticket),
        consumer=consumer,
        start_row=0,
        end_row=1,
        window=1,
    )


DATA = Data(TRANSFER, 0, "p", 0, 1, 0)
SERVING = LeaseInfo(TRANSFER, 0, LeaseState.SERVING, int(1000 * LEASE_S), 1, 0)


def test_kv_may_go_to_a_tickets_consumer_during_the_lease(monitor, clock):
    monitor.kv_arrived(HOST, b"d", fetch("d"))
    monitor.kv_sent(HOST, b"d", SERVING)
    clock.now_s = 3.0
    monitor.kv_arrived(HOST, b"d", Renew(TRANSFER, 0, 0, 1))
    clock.now_s = 3.0 + LEASE_S
    monitor.kv_sent(HOST, b"d", DATA)


def test_kv_for_a_consumer_without_a_ticket_is_caught(monitor):
    monitor.kv_arrived(HOST, b"d", fetch("d"))
    monitor.kv_sent(HOST, b"d", SERVING)
    with pytest.raises(AssertionError, match="without a ticket"):
        monitor.kv_sent(HOST, b"other", DATA)


@pytest.mark.parametrize("message", [fetch(""), fetch("d"), fetch("other", producer="p2")])
def test_a_ticket_does_not_cover_another_consumer(monitor, message):
    monitor.kv_arrived(HOST, b"other", message)
    with pytest.raises(AssertionError, match="without a ticket"):
        monitor.kv_sent(HOST, b"other", DATA)


def test_kv_before_the_lease_begins_and_after_it_ends_is_caught(monitor, clock):
    monitor.kv_arrived(HOST, b"d", fetch("d"))
    with pytest.raises(AssertionError, match="was not fetched"):
        monitor.kv_sent(HOST, b"d", DATA)
    monitor.kv_sent(HOST, b"d", SERVING)
    monitor.kv_sent(HOST, b"d", DATA)
    clock.now_s = LEASE_S + 0.01
    with pytest.raises(AssertionError, match="the lease ended"):
        monitor.kv_sent(HOST, b"d", DATA)


def test_renewal_of_another_consumer_does_not_lengthen_the_lease(monitor, clock):
    monitor.kv_arrived(HOST, b"d", fetch("d"))
    monitor.kv_sent(HOST, b"d", SERVING)
    clock.now_s = 3.0
    monitor.kv_arrived(HOST, b"other", Renew(TRANSFER, 0, 0, 1))
    clock.now_s = 5.0
    with pytest.raises(AssertionError, match="the lease ended"):
        monitor.kv_sent(HOST, b"d", DATA)
