"""Permission to fetch: versions, layouts, incarnations, tickets and stolen tickets."""

import random

import msgspec
import numpy as np
import pytest

import kv_transfer.loading
from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.keys import CLOCK_TOLERANCE_S, KeyRing
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Data,
    Done,
    Fail,
    LeaseInfo,
    Mapped,
    Renew,
)
from tests.kv_transfer.fakes import KEYS, LAYOUT, FakeEngine, FakeIO, make_loopback_engine
from tests.kv_transfer.pairs import NUM_TOKENS, TARGET, Pair, fetch
from tests.kv_transfer.worlds import World

OLD, NEW = b"the secret of last year", b"the secret of this year"
STRANGER = b"tcp://stranger:1"


def offered(path: str = "inline") -> Pair:
    """A producer that has a request ready, of which its consumer has not heard."""
    pair = Pair(path)
    pair.producer.add(pair.ticket)
    pair.prefill()
    pair.steps(1)
    return pair


def ask(pair: Pair, message, peer: bytes = STRANGER) -> list:
    """Send a message to the producer and return its answers over that connection."""
    producer = pair.node(pair.producer).producer
    pair.node(pair.producer).send()
    producer.on_message(peer, message, pair.network.now_s)
    producer.check_invariants()
    sends = producer.take_sends()
    producer._sends = [send for send in sends if send.peer != peer]  # Due to others.
    pair.producer.step()
    return [send.message for send in sends if send.peer == peer]


def assert_refused(answers: list, reason: FailureReason) -> None:
    assert [(type(answer), answer.reason) for answer in answers] == [(Fail, reason)]


# ---- versions, layouts, processes


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_of_the_protocol_is_refused_by_name(
    path: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(path)
    monkeypatch.setattr(kv_transfer.loading, "PROTOCOL_VERSION", version)
    pair.start()
    pair.prefill()
    pair.steps(3)
    assert pair.consumer.reasons == {"r": FailureReason.VERSION}
    assert not pair.consumer.io.changed()
    assert not pair.producer.ended, "the right consumer may still come"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"consumer": "somebody else"}, FailureReason.AUDIENCE),
        ({"epoch": 2}, FailureReason.EPOCH),
        ({"num_tokens": NUM_TOKENS - 32}, FailureReason.LAYOUT),
    ],
)
def test_a_fetch_that_contradicts_the_offer_is_refused(path: str, change, reason) -> None:
    pair = Pair(path)
    pair.producer.add(msgspec.structs.replace(pair.ticket, **change))
    pair.prefill()
    pair.steps(1)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(2)
    assert pair.consumer.reasons == {"r": reason}
    assert not pair.consumer.io.changed()
    assert not pair.producer.ended


def test_a_consumer_that_was_chosen_later_may_fetch(path: str) -> None:
    pair = Pair(path)
    pair.producer.add(msgspec.structs.replace(pair.ticket, consumer=""))
    pair.prefill()
    pair.steps(1)
    pair.load_and_deliver()


def test_a_restarted_producer_at_the_same_address_is_refused(path: str) -> None:
    pair = Pair(path)
    old = msgspec.structs.replace(pair.ticket, producer_incarnation="P-before")
    pair.consumer.load(old, TARGET)
    pair.steps(2)
    assert pair.consumer.reasons == {"r": FailureReason.INCARNATION}


def test_a_producer_that_restarts_in_the_middle_is_never_read(path: str) -> None:
    """Restart the process at the same address without a visible break of the connection."""
    world = World(path)
    world.start()
    world.prefill(100)
    world.steps(5)
    endpoint = world.producer.worker.endpoints[0]
    new = make_loopback_engine("P2", FakeIO(10, seed=9, shares=path != "inline"), world.network)
    node = new.worker._transport
    node.endpoint, node.endpoints = endpoint, (endpoint,)
    world.network.nodes[endpoint] = node
    while not world.consumer.ended:
        world.step(world.consumer)
        new.step()
        world.network.advance(0.5)
    assert world.consumer.reasons == {"r": FailureReason.STALLED}
    assert world.consumer.failed["r"].num_tokens == 96
    assert new.worker.stats(0.0).num_unknown_ids > 0


# ---- secrets and clocks


def test_a_producer_without_the_secret_gives_nothing_away() -> None:
    pair, old, new = Pair(), KeyRing((OLD,)), KeyRing((NEW,))
    pair.producer.scheduler._keys = pair.node(pair.producer).producer._checks._keys = old
    pair.consumer.scheduler._keys = new
    pair.producer.keys = pair.consumer.keys = new
    with pytest.raises(TicketError) as caught:
        pair.producer.add(pair.ticket)
    assert caught.value.reason is FailureReason.AUTH
    pair.consumer.load(pair.ticket, TARGET)
    pair.finish(pair.consumer)
    # A stranger gets no answer, and sees the same as with a silent engine.
    assert pair.consumer.reasons == {"r": FailureReason.STALLED}
    assert pair.producer.stats.num_bad_tickets >= 1


def set_wall_clock(pair: Pair, engine: FakeEngine, skew_s: float) -> None:
    """Let an engine's wall clock be ahead of the network's from now on."""
    engine.scheduler._unix_now_s = lambda: pair.network.now_s + skew_s
    pair.node(engine).producer._checks._unix_now_s = lambda: pair.network.now_s + skew_s


@pytest.mark.parametrize("jump_s", [-180.0, 180.0])
def test_a_wall_clock_that_is_set_back_or_forth_costs_no_later_transfer(jump_s: float) -> None:
    """The router mints by the clock as it is now; an engine that remembered another is too late."""
    skew_s = 0.0
    pair = Pair(unix_now_s=lambda: 1e9 + skew_s)
    for request_id, skew_s in (("before", 0.0), ("r", jump_s)):
        expires_ms = int(1000 * (1e9 + skew_s + 5.0))
        pair.ticket = msgspec.structs.replace(pair.make_ticket(request_id), expires_ms=expires_ms)
        pair.start()
        num_blocks = pair.producer.io.layout.num_blocks(pair.num_tokens)
        pair.producer.save(request_id, pair.source[:num_blocks], pair.num_tokens)
        pair.steps(12)
        assert request_id in pair.consumer.received
        assert request_id in pair.producer.sent
    # A ticket minted by the old clock is as old as it says.
    late = msgspec.structs.replace(pair.make_ticket("late"), expires_ms=int(1000 * 1e9 - 1e6))
    with pytest.raises(TicketError) as caught:
        pair.producer.add(late)
    assert caught.value.reason is FailureReason.EXPIRED


def test_a_clock_beyond_the_tolerance_refuses_with_the_reason() -> None:
    pair = Pair()
    expires_ms = int(1000 * pair.network.now_s)
    pair.ticket = msgspec.structs.replace(pair.ticket, expires_ms=expires_ms)
    pair.producer.add(pair.ticket)
    pair.steps(1)
    set_wall_clock(pair, pair.producer, CLOCK_TOLERANCE_S + 1.0)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(3)
    assert pair.consumer.reasons == {"r": FailureReason.EXPIRED}
    set_wall_clock(pair, pair.consumer, CLOCK_TOLERANCE_S + 1.0)
    with pytest.raises(TicketError, match="clocks") as caught:
        pair.consumer.add(pair.ticket)
    assert caught.value.reason is FailureReason.EXPIRED


# ---- thieves


def test_a_forged_or_cut_ticket_gets_nothing(path: str) -> None:
    pair = offered(path)
    sealed = KEYS.seal(pair.ticket)
    changed = bytes([sealed[0] ^ 0x40]) + sealed[1:]
    forgeries = [sealed[:-1], changed, KeyRing((OLD,)).seal(pair.ticket)]
    for forged in forgeries:
        assert ask(pair, fetch(pair, forged)) == []
    assert pair.producer.stats.num_bad_tickets == len(forgeries)
    pair.load_and_deliver()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"consumer": "E"}, FailureReason.AUDIENCE),
        ({"transfer_id": b"?" * 16}, FailureReason.AUTH),
        ({"epoch": 2}, FailureReason.EPOCH),
        ({"end_row": 9}, FailureReason.LAYOUT),
        ({"start_row": 8}, FailureReason.LAYOUT),
        ({"start_row": 5, "end_row": 4}, FailureReason.LAYOUT),
        ({"path": "shared"}, FailureReason.LAYOUT),
        ({"version": 1}, FailureReason.VERSION),
    ],
)
def test_a_fetch_that_its_own_ticket_does_not_allow_gets_nothing(changes, reason) -> None:
    pair = offered("inline")
    assert_refused(ask(pair, fetch(pair, **changes)), reason)
    pair.load_and_deliver()


def test_an_engine_that_needs_more_than_the_window_gets_nothing(path: str) -> None:
    """The producer has freed the blocks behind its window: they may hold another request's KV."""
    pair = Pair(path, layouts=(msgspec.structs.replace(LAYOUT, window=40), LAYOUT))
    pair.start()
    pair.prefill(pair.num_tokens)
    pair.steps(3)
    assert pair.consumer.reasons == {"r": FailureReason.LAYOUT}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"consumer": ""}, FailureReason.AUDIENCE), ({"expires_ms": 1}, FailureReason.EXPIRED)],
)
def test_a_ticket_without_a_consumer_or_with_a_past_expiry_is_no_permit(changes, reason) -> None:
    pair = offered()
    sealed = KEYS.seal(msgspec.structs.replace(pair.ticket, **changes))
    assert_refused(ask(pair, fetch(pair, sealed)), reason)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_stolen_ticket_is_no_use_while_its_owner_holds_the_connection(
    path: str, num_steps: int
) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill(100)
    pair.steps(num_steps)
    for attempt in (0, 1):
        stolen = fetch(pair, attempt=attempt, path=pair.wired_path)
        assert_refused(ask(pair, stolen), FailureReason.AUDIENCE)
    pair.deliver()


def test_a_stolen_ticket_is_no_use_before_the_producer_knows_the_transfer(path: str) -> None:
    pair = Pair(path)
    pair.consumer.load(pair.ticket, TARGET)
    pair.steps(1)
    assert_refused(ask(pair, fetch(pair)), FailureReason.AUDIENCE)
    pair.producer.add(pair.ticket)
    pair.deliver()


@pytest.mark.parametrize("peer", [STRANGER, b"tcp://D:1"])
def test_a_ticket_is_no_use_after_its_transfer(path: str, peer: bytes) -> None:
    pair = Pair(path)
    pair.start()
    pair.deliver()
    for attempt in (0, 1):
        again = fetch(pair, attempt=attempt, path=pair.wired_path)
        assert_refused(ask(pair, again, peer), FailureReason.UNKNOWN_TRANSFER)
    assert pair.producer.stats.leases["late_fetch"] == 2


def test_a_repetition_before_the_first_fetch_is_ignored(path: str) -> None:
    pair = offered(path)
    assert ask(pair, fetch(pair, attempt=1, path=pair.wired_path)) == []
    pair.load_and_deliver()


def last_words(pair: Pair, *sealed: bytes) -> list:
    tid, epoch = pair.ticket.transfer_id, pair.ticket.epoch
    done = [Done(tid, epoch, x) for x in sealed if x]
    return done + [Cancel(tid, epoch, FailureReason.CANCELLED, x) for x in sealed]


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_transfer_cannot_be_ended_without_its_ticket(path: str, is_offered: bool) -> None:
    """Try before its consumer has attached, and before the producer knows the transfer."""
    pair = offered(path) if is_offered else Pair(path)
    foreign = [
        b"",
        KeyRing((OLD,)).seal(pair.ticket),
        KEYS.seal(msgspec.structs.replace(pair.ticket, transfer_id=b"?" * 16)),
        KEYS.seal(msgspec.structs.replace(pair.ticket, producer_incarnation="Q")),
        KEYS.seal(msgspec.structs.replace(pair.ticket, consumer="")),
        KEYS.seal(msgspec.structs.replace(pair.ticket, expires_ms=1)),
    ]
    if is_offered:  # Before that, the producer does not know its consumer.
        foreign.append(KEYS.seal(msgspec.structs.replace(pair.ticket, consumer="E")))
    for message in last_words(pair, *foreign):
        assert ask(pair, message) == []
    if not is_offered:
        pair.producer.add(pair.ticket)
        pair.prefill()
    pair.load_and_deliver()


@pytest.mark.parametrize("number", [0, 1])
def test_the_ticket_ends_a_transfer_before_its_fetch(number: int) -> None:
    pair = offered()
    message = last_words(pair, KEYS.seal(pair.ticket))[number]
    [answer] = ask(pair, message)
    assert answer.state == ["done", "cancelled"][number]
    pair.steps(2)
    assert pair.producer.sent == ({"r"} if number == 0 else set())
    assert pair.producer.reasons == ({"r": FailureReason.CANCELLED} if number else {})


def test_messages_of_another_attempt_or_producer_change_nothing(path: str) -> None:
    pair = Pair(path)
    pair.start()
    pair.prefill(100)
    pair.steps(3)
    tid, epoch = pair.ticket.transfer_id, pair.ticket.epoch + 1
    peer = b"tcp://D:1"
    for message in (
        Done(tid, epoch, KEYS.seal(pair.ticket)),
        Cancel(tid, epoch, FailureReason.CANCELLED),
    ):
        assert ask(pair, message, peer) == []
    consumer = pair.node(pair.consumer).consumer
    endpoint = pair.producer.worker.endpoints[0]
    for message in (Fail(tid, epoch, FailureReason.EXPIRED), Cancel(tid, epoch, "cancelled")):
        consumer.on_message(endpoint, message, None, pair.network.now_s)
        right_epoch = msgspec.structs.replace(message, epoch=pair.ticket.epoch)
        consumer.on_message("tcp://other:1", right_epoch, None, pair.network.now_s)
    pair.deliver()


# ---- well-formed nonsense


def nonsense(dice: random.Random, pair: Pair):
    """A message that decodes, about transfers that exist or not, with numbers of any size."""
    tid = dice.choice([pair.ticket.transfer_id, dice.randbytes(16)])
    numbers = [0, 1, 2, 7, 8, 9, 1 << 20, (1 << 31) - 1]

    def number() -> int:
        return dice.choice(numbers)

    epoch, reason = dice.choice([0, 1, 2]), dice.choice(list(FailureReason))
    sealed = dice.choice([KEYS.seal(pair.ticket), dice.randbytes(dice.randint(1, 100))])
    start, end, path = number(), number(), dice.choice(["inline", "shared", "nixl"])
    return dice.choice(
        [
            fetch(pair, sealed, transfer_id=tid, epoch=epoch, start_row=start, end_row=end,
                  window=number(), path=path, attempt=dice.choice([0, 1]),
                  consumer=dice.choice("DE")),
            Credit(tid, epoch, number(), number()),
            Renew(tid, epoch, number(), number()),
            Done(tid, epoch, sealed),
            Cancel(tid, epoch, reason, dice.choice([b"", sealed])),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_well_formed_nonsense_of_strangers_changes_nothing(path: str, seed: int) -> None:
    dice = random.Random(seed)
    pair = Pair(path)
    pair.start()
    pair.steps(2)
    for n in range(1500):
        ask(pair, nonsense(dice, pair), b"stranger %d" % dice.randrange(3))
        if n % 300 == 0:
            pair.prefill(min(NUM_TOKENS, n // 5))
            pair.steps(1, 0.1)
    pair.prefill()
    pair.steps(20, 0.1)
    pair.assert_delivered()


@pytest.mark.parametrize("seed", range(2))
def test_well_formed_nonsense_of_the_consumer_harms_only_its_own_transfer(
    path: str, seed: int
) -> None:
    dice = random.Random(seed)
    pair = Pair(path)
    pair.start()
    pair.prefill(100)
    pair.steps(2)
    for _ in range(300):
        ask(pair, nonsense(dice, pair), b"tcp://D:1")
        pair.node(pair.producer).producer.check_invariants()
    pair.producer.step()
    assert pair.node(pair.producer).producer._parked.transfer_ids <= {pair.ticket.transfer_id}
    assert not pair.producer.io.changed()


@pytest.mark.parametrize("seed", range(2))
def test_well_formed_nonsense_of_the_producer_writes_nothing_wrong(path: str, seed: int) -> None:
    """World compares whatever the consumer believes in."""
    dice = random.Random(seed)
    world = World(path)
    world.start()
    world.prefill(100)
    world.steps(2)
    consumer, endpoint = world.node(world.consumer).consumer, world.producer.worker.endpoints[0]
    for _ in range(400):
        tid = dice.choice([world.ticket.transfer_id, dice.randbytes(16)])
        first, num = dice.choice([0, 3, 7, 8, 1 << 20]), dice.choice([1, 2, 8, (1 << 31) - 1])
        name, epoch = dice.choice(["P", "Q"]), dice.choice([1, 1, 2])
        size = dice.choice([0, 16, 32, world.producer.io.layout.row_bytes])
        message = dice.choice(
            [
                Data(tid, epoch, name, first, num, dice.getrandbits(64)),
                Mapped(tid, epoch, name, first, num, dice.choice([0, 1, 9]), dice.getrandbits(64)),
                LeaseInfo(tid, epoch, dice.choice(["waiting", "serving"]), 5, first, first),
            ]
        )
        payload = None
        if isinstance(message, Data | Mapped) or dice.random() < 0.1:
            payload = np.frombuffer(dice.randbytes(size), np.uint8)
        consumer.on_message(endpoint, message, payload, world.network.now_s)
        world.node(world.consumer).send()
    world.prefill()
    world.run(0.25, 80.0)
