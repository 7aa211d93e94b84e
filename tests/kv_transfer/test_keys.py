"""Tickets: sealing, opening, roles, and the reasons of refusals."""

import hmac
import itertools
import pprint

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import FailureReason, TicketError, TransferError
from kv_transfer.keys import CLOCK_TOLERANCE_S, MAX_SEALED_BYTES, MIN_KEY_BYTES, KeyRing
from kv_transfer.ticket import Ticket, check_ticket
from tests.kv_transfer.fakes import LAYOUT, make_ticket

OLD, NEW = b"the secret of last year", b"the secret of this year"
KEYS = KeyRing((NEW,))
TICKET = msgspec.structs.replace(
    make_ticket("r", ("tcp://127.0.0.1:5", "ipc://@name"), 40), expires_ms=1_000_000
)
HASHES = frozenset({LAYOUT.content_hash()})


def refusal(keys: KeyRing, sealed: bytes, now_unix_s: float = 0.0) -> FailureReason | None:
    with pytest.raises(TicketError) as caught:
        keys.unseal(sealed, now_unix_s)
    return caught.value.reason


# ---- seals


def test_an_empty_ring_opens_nothing_and_seals_nothing() -> None:
    assert refusal(KeyRing(), KEYS.seal(TICKET)) is FailureReason.AUTH
    with pytest.raises(TicketError, match="key_file"):
        KeyRing().seal(TICKET)


def test_every_changed_byte_is_noticed() -> None:
    sealed = KEYS.seal(TICKET)
    for position in range(len(sealed)):
        forged = bytearray(sealed)
        forged[position] ^= 1
        assert refusal(KEYS, bytes(forged)) is FailureReason.AUTH


def test_every_truncation_and_a_surplus_byte_are_noticed() -> None:
    sealed = KEYS.seal(TICKET)
    for size in range(len(sealed)):
        assert refusal(KEYS, sealed[:size]) is FailureReason.AUTH
    assert refusal(KEYS, sealed + b"\0") is FailureReason.AUTH


@given(st.binary(max_size=200))
def test_random_bytes_are_no_ticket(sealed: bytes) -> None:
    assert refusal(KEYS, sealed) is FailureReason.AUTH


def test_a_seal_for_another_use_of_the_secret_makes_no_ticket() -> None:
    body = msgspec.msgpack.encode(TICKET)
    for context in (b"", b"ttserve kv ticket 1\0"):
        sealed = hmac.digest(NEW, context + body, "sha256") + body
        assert refusal(KEYS, sealed) is FailureReason.AUTH


def test_sealed_bytes_that_are_no_ticket_are_refused() -> None:
    other = msgspec.structs.replace(TICKET, num_tokens=0)
    assert refusal(KEYS, KEYS.seal(other)) is FailureReason.AUTH


def test_a_ticket_that_cannot_travel_is_refused_when_it_is_made() -> None:
    endpoint = "tcp://" + 240 * "h"
    long = msgspec.structs.replace(TICKET, request_id=256 * "r", producer_endpoints=3 * (endpoint,))
    with pytest.raises(TicketError, match="shorter request ids"):
        KEYS.seal(long)
    assert refusal(KEYS, bytes(MAX_SEALED_BYTES + 1)) is FailureReason.AUTH


def test_secrets_are_long_and_never_shown() -> None:
    with pytest.raises(ValueError, match=f"at least {MIN_KEY_BYTES}") as caught:
        KeyRing((b"hunter2",))
    assert "hunter2" not in str(caught.value)
    for shown in (repr(KEYS), str(KEYS), pprint.pformat(KEYS), f"{KEYS}"):
        assert NEW.decode() not in shown


# ---- rotation


def test_a_secret_is_exchanged_without_a_moment_in_which_tickets_fail() -> None:
    """Every pair of neighbouring stages may meet: the router and the engines change one by one."""
    stages = [KeyRing((OLD,)), KeyRing((OLD, NEW)), KeyRing((NEW, OLD)), KeyRing((NEW,))]
    for one, other in itertools.pairwise(stages):
        assert other.unseal(one.seal(TICKET), 0.0) == TICKET
        assert one.unseal(other.seal(TICKET), 0.0) == TICKET
    assert refusal(stages[3], stages[0].seal(TICKET)) is FailureReason.AUTH


# ---- age


@pytest.mark.parametrize("skew_s", [-CLOCK_TOLERANCE_S, 0.0, CLOCK_TOLERANCE_S])
def test_clocks_may_differ_by_the_tolerance(skew_s: float) -> None:
    assert KEYS.unseal(KEYS.seal(TICKET), 1000.0 + skew_s) == TICKET


def test_a_ticket_beyond_the_tolerance_is_too_old() -> None:
    sealed = KEYS.seal(TICKET)
    assert refusal(KEYS, sealed, 1000.0 + CLOCK_TOLERANCE_S + 0.01) is FailureReason.EXPIRED


def test_a_forged_ticket_is_refused_before_its_age_is_checked() -> None:
    assert refusal(KeyRing((OLD,)), KEYS.seal(TICKET), 1e9) is FailureReason.AUTH


# ---- roles


@pytest.mark.parametrize(
    ("changes", "engine", "role"),
    [
        ({}, "P", "producer"),
        ({}, "D", "consumer"),
        ({"consumer": ""}, "P", "producer"),
        ({"consumer": ""}, "D", FailureReason.INCARNATION),
        ({}, "P-restarted", FailureReason.INCARNATION),
        ({"consumer": "P"}, "P", FailureReason.AUDIENCE),
        ({"layout_hash": "other"}, "P", FailureReason.LAYOUT),
        ({"layout_hash": "other"}, "D", FailureReason.LAYOUT),
    ],
)
def test_a_ticket_tells_each_engine_its_role_or_why_it_has_none(changes, engine, role) -> None:
    ticket = msgspec.structs.replace(TICKET, **changes)
    if not isinstance(role, FailureReason):
        assert check_ticket(ticket, engine, HASHES) == role
        return
    with pytest.raises(TransferError) as caught:
        check_ticket(ticket, engine, HASHES)
    assert caught.value.reason is role


# ---- form


@pytest.mark.parametrize("endpoint", ["inproc://a", "http://h", "tcp://", "tcp://a b", ""])
def test_a_ticket_names_only_addresses_that_can_be_dialled(endpoint: str) -> None:
    ticket = msgspec.structs.replace(TICKET, producer_endpoints=("tcp://127.0.0.1:5", endpoint))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket)


@pytest.mark.parametrize("num_endpoints", [0, 4])
def test_a_ticket_names_one_to_three_addresses(num_endpoints: int) -> None:
    ticket = msgspec.structs.replace(TICKET, producer_endpoints=("tcp://h:1",) * num_endpoints)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket)


def test_derived_keys_differ_by_purpose_and_secret_and_never_show_a_secret() -> None:
    ring = KeyRing((OLD, NEW))
    one, other = ring.derive("one"), ring.derive("other")
    assert len({*one, *other, OLD, NEW}) == 6
    assert KeyRing((NEW,)).derive("one") == one[1:]
