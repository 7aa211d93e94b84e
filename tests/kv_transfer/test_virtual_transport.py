"""Virtual transport: real sessions over simulated time and network."""

from __future__ import annotations

from kv_transfer.errors import FailureReason
from kv_transfer.messages import Cancel, Data, Fetch, Renew
from kv_transfer.transport import LoadFailed, Offer, SendFailed, StartLoad
from tests.kv_transfer.fakes import (
    KEYS,
    LAYOUT,
    QUICK,
    FakeIO,
    make_settings,
    make_ticket,
)
from tests.kv_transfer.virtual_wire import Net, Wire


def load(ticket, start_row=0):
    return StartLoad(ticket, KEYS.seal(ticket), start_row, LAYOUT)


def transport(net, name="T", **changes):
    woken = []
    settings = make_settings(name, config=QUICK)
    wire = Wire(net, name)
    made = wire.make(settings, FakeIO(2), lambda: woken.append(net.now_s))
    return made, wire, woken


def test_its_endpoint_names_the_start_of_the_engine():
    assert transport(Net(), "a")[0].endpoints[0] != transport(Net(), "b")[0].endpoints[0]


def test_commands_wait_until_the_step_has_come_to_them():
    """A command submitted some time into a step leaves at that time, not at the step's start."""
    net = Net()
    consumer, wire, _ = transport(net)
    wire.ahead_s = 0.5
    consumer.submit([load(make_ticket("r", "tcp://nowhere:1", 64))])
    wire.ahead_s = 0.0
    net.run(0.499)
    assert net.sent == []
    net.run(0.5)
    assert [type(m) for m in net.sent] == [Fetch]


def test_commands_of_one_submission_may_be_changed_afterwards():
    net = Net()
    consumer, _, _ = transport(net)
    commands = [load(make_ticket("r", "tcp://nowhere:1", 64))]
    consumer.submit(commands)
    commands.clear()
    net.run()
    assert [type(m) for m in net.sent] == [Fetch]


def test_an_unfetched_offer_lapses_at_its_deadline_and_wakes_the_core():
    net = Net()
    producer, _, woken = transport(net)
    producer.submit([Offer(make_ticket("r", producer.endpoints[0], 64, producer="T"))])
    net.run(QUICK.rendezvous_s - 0.001)
    assert (list(producer.poll()), woken) == ([], [])
    net.run(QUICK.rendezvous_s)
    [failed] = producer.poll()
    assert (type(failed), failed.reason) == (SendFailed, FailureReason.EXPIRED)
    assert woken == [QUICK.rendezvous_s]
    assert list(producer.poll()) == [], "events are taken once"


def test_a_consumer_asks_again_and_then_fails_the_load_of_a_silent_producer():
    net = Net()
    consumer, _, woken = transport(net)
    consumer.submit([load(make_ticket("r", "tcp://nowhere:1", 64))])
    net.run(QUICK.no_progress_s)
    [failed] = consumer.poll()
    assert (type(failed), failed.reason) == (LoadFailed, FailureReason.STALLED)
    assert woken == [QUICK.no_progress_s]
    num_fetches = sum(isinstance(m, Fetch) for m in net.sent)
    assert num_fetches == 1 + int(QUICK.no_progress_s / QUICK.probe_s - 1e-9)
    net.run(60.0)
    assert net.num_due == 0
    assert isinstance(net.sent[-1], Cancel)


def attached(net):
    """A pair whose consumer has asked for two blocks of a producer that has none yet."""
    producer, _, producer_woken = transport(net, "P")
    consumer, _, consumer_woken = transport(net, "D")
    ticket = make_ticket("r", producer.endpoints[0], 64)
    producer.submit([Offer(ticket)])
    consumer.submit([load(ticket)])
    net.run()
    producer.poll(), consumer.poll()
    producer_woken.clear(), consumer_woken.clear()
    return producer, consumer, ticket, producer_woken, consumer_woken


def test_a_lost_producer_is_reported_to_the_core():
    net = Net()
    producer, consumer, _, _, woken = attached(net)
    consumer.lose_producer("another one")
    assert list(consumer.poll()) == []
    consumer.lose_producer(producer.endpoints[0])
    [failed] = consumer.poll()
    assert (type(failed), failed.reason) == (LoadFailed, FailureReason.PEER_DEAD)
    assert woken == [0.0]


def test_a_lost_consumer_is_reported_to_the_core():
    net = Net()
    producer, _, _, woken, _ = attached(net)
    producer.lose_consumer(b"another one")
    assert list(producer.poll()) == []
    producer.lose_consumer(b"D")
    [failed] = producer.poll()
    assert (type(failed), failed.reason) == (SendFailed, FailureReason.PEER_DEAD)
    assert woken == [0.0]


def test_closing_stops_its_clock():
    net = Net()
    producer, consumer, *_ = attached(net)
    assert net.num_due > 0
    for closing in (producer, consumer, producer):
        closing.close(0.0)
    assert net.num_due == 0


def test_counters_are_those_of_the_sessions():
    net = Net()
    producer, consumer, *_ = attached(net)
    producer.receive_from_consumer(b"D", Renew(b"x" * 16, 0, 0, 1))
    assert producer.counters.num_unknown_ids == 1
    bad = Data(b"x" * 16, 0, "P", 0, 1, 0)
    consumer.receive_from_producer(producer.endpoints[0], bad, None)
    assert consumer.counters.num_malformed == 1
