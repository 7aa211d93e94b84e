"""Tickets: sealed with the cluster's keys, for as long as a hand-over takes."""

import msgspec
import pytest

from cluster.routing.tickets import TicketOffice
from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.keys import CLOCK_TOLERANCE_S, KeyRing
from replicas.messages import EngineRequest
from tests.cluster.engines import KEYS, make_member, sampling

CONFIG = TransferConfig(rendezvous_s=50.0, lease_s=10.0, renew_s=1.0)
NOW_S = 1000.0


def office(keys=KEYS, now_s=NOW_S):
    ids = iter([bytes([i]) * 16 for i in range(9)])
    return TicketOffice(keys, CONFIG, lambda: next(ids), lambda: now_s)


def begin(tickets, epoch=3):
    request = EngineRequest("r", [1, 2, 3], sampling())
    return tickets.begin(request, epoch, make_member("prefill", "p").description)


def test_both_tickets_of_a_transfer_differ_only_in_the_consumer():
    tickets = office()
    transfer = begin(tickets)
    offer, fetch = (KEYS.unseal(tickets.seal(transfer, c), NOW_S) for c in ("", "d"))
    assert (offer.consumer, fetch.consumer) == ("", "d")
    assert msgspec.structs.replace(offer, consumer="d") == fetch
    assert (fetch.request_id, fetch.epoch, fetch.num_tokens) == ("r", 3, 3)
    assert begin(tickets).transfer_id != transfer.transfer_id


def test_ticket_lasts_as_long_as_a_hand_over_may_take():
    tickets = office()
    sealed = tickets.seal(begin(tickets), "d")
    end_s = NOW_S + CONFIG.rendezvous_s + CONFIG.lease_s
    assert KEYS.unseal(sealed, end_s).expires_ms == end_s * 1000
    with pytest.raises(TicketError) as caught:
        KEYS.unseal(sealed, end_s + CLOCK_TOLERANCE_S + 1)
    assert caught.value.reason is FailureReason.EXPIRED


def test_ticket_of_another_cluster_is_refused():
    tickets = office(KeyRing((b"of another cluster",)))
    with pytest.raises(TicketError) as caught:
        KEYS.unseal(tickets.seal(begin(tickets), "d"), NOW_S)
    assert caught.value.reason is FailureReason.AUTH
