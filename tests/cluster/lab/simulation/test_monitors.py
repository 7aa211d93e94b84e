"""Watchers of messages: KV that goes to the wrong one or too late, choices that are forgotten."""

from types import SimpleNamespace

import pytest

from cluster.lab.simulation.monitors import LeaseMonitor, ProtocolMonitor
from kv_transfer.keys import KeyRing
from kv_transfer.lease import LeaseState
from kv_transfer.messages import PROTOCOL_VERSION, Data, Fetch, LeaseInfo, Renew
from kv_transfer.ticket import Ticket
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams

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


# --- choices of a request -------------------------------------------------------------------------


ENGINE = SimpleNamespace(incarnation="d", core=SimpleNamespace(stuck_s=0.0))


class Nothing:
    """Something that does nothing with any message."""

    def __getattr__(self, _):
        return lambda *_args, **_kwargs: None


@pytest.fixture
def protocol(clock):
    monitor = ProtocolMonitor(clock, Nothing(), Nothing(), Nothing())
    request = EngineRequest("r", [1, 2, 3], SamplingParams(n=3))
    send(monitor, AddRequest(request, "decode"))
    monitor.arrived(ENGINE, Accepted("r", 0, 0, 0, 1, 3))
    return monitor


def send(monitor, message):
    monitor.sent(ENGINE, message, is_stalled=False)


def end(choice, reason="length"):
    return TokenOutput("r", 0, [], reason, choice=choice)


def test_a_request_has_ended_once_all_of_its_choices_have(protocol):
    for choice in range(3):
        protocol.arrived(ENGINE, end(choice))
    protocol.ended("r")


def test_a_choice_that_is_left_is_caught(protocol):
    protocol.arrived(ENGINE, end(0))
    protocol.arrived(ENGINE, end(2))
    with pytest.raises(AssertionError, match=r"not aborted: \{'d': 'decode'\}"):
        protocol.ended("r")


def test_a_choice_that_the_client_has_dropped_need_not_end(protocol):
    send(protocol, Abort(["r"], "stop", [1]))
    protocol.arrived(ENGINE, end(0))
    assert protocol.describe_wait("r") != "no engine"
    protocol.arrived(ENGINE, end(2))
    protocol.ended("r")


def test_an_error_of_one_choice_ends_all(protocol):
    protocol.arrived(ENGINE, end(1, "error"))
    protocol.ended("r")


def test_only_an_activation_that_crosses_an_error_is_allowed(protocol, clock):
    protocol.arrived(ENGINE, end(0, "error"))
    send(protocol, Activate("r", []))
    clock.now_s = 1.0
    with pytest.raises(AssertionError, match="d has no r"):
        send(protocol, Activate("r", []))
