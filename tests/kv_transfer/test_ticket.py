"""Tickets: who may use one, and who is told why not."""

import msgspec
import pytest

from kv_transfer.errors import FailureReason, LayoutMismatchError, TicketError
from kv_transfer.ticket import Ticket, check_ticket
from tests.kv_transfer.fakes import LAYOUT, make_ticket

TICKET = make_ticket("r", "tcp://127.0.0.1:5", 40)


def test_a_ticket_tells_each_end_its_role() -> None:
    assert check_ticket(TICKET, "P", LAYOUT) == "producer"
    assert check_ticket(TICKET, "D", LAYOUT) == "consumer"


def test_a_ticket_of_another_process_is_refused() -> None:
    with pytest.raises(TicketError) as caught:
        check_ticket(TICKET, "P-restarted", LAYOUT)
    assert caught.value.reason is FailureReason.INCARNATION


def test_a_ticket_from_an_engine_to_itself_is_refused() -> None:
    with pytest.raises(TicketError) as caught:
        check_ticket(msgspec.structs.replace(TICKET, consumer="P"), "P", LAYOUT)
    assert caught.value.reason is FailureReason.AUDIENCE


def test_a_ticket_of_another_layout_is_refused() -> None:
    meta = msgspec.structs.replace(LAYOUT, rope="meta")
    with pytest.raises(LayoutMismatchError) as caught:
        check_ticket(TICKET, "D", meta)
    assert caught.value.reason is FailureReason.LAYOUT


def test_a_ticket_survives_the_wire() -> None:
    frame = msgspec.msgpack.encode(TICKET)
    assert msgspec.msgpack.decode(frame, type=Ticket) == TICKET


@pytest.mark.parametrize("endpoint", ["inproc://a", "http://h", "tcp://", "tcp://a b", ""])
def test_a_ticket_names_only_addresses_that_can_be_dialled(endpoint: str) -> None:
    frame = msgspec.msgpack.encode(msgspec.structs.replace(TICKET, producer_endpoint=endpoint))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=Ticket)
