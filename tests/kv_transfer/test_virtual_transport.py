"""Virtual transport: real sessions over simulated time and network."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_transfer.errors import FailureReason
from kv_transfer.messages import Cancel, Data, Fetch, LeaseInfo, Renew
from kv_transfer.p2p import P2PConnectorScheduler
from kv_transfer.p2p_worker import P2PConnectorWorker
from kv_transfer.transport import LoadFailed, Offer, SendFailed, StartLoad
from tests.kv_transfer.fakes import (
    KEYS,
    LAYOUT,
    QUICK,
    FakeEngine,
    FakeIO,
    make_settings,
    make_ticket,
)
from tests.kv_transfer.virtual_wire import Net, Wire

SOURCE, TARGET = tuple(range(9, 1, -1)), tuple(range(1, 9))
NUM_TOKENS = 8 * 32 - 5
IMPATIENT = msgspec.structs.replace(QUICK, no_data_s=4.0)
"""Lost blocks are asked for once; when that is lost too, only this ends the wait."""


def load(ticket, start_row=0):
    return StartLoad(ticket, KEYS.seal(ticket), start_row, LAYOUT.row_bytes)


class Pair:
    """Producer and consumer whose cores step only when the test calls ``steps``."""

    def __init__(self, latency_s=0.0):
        self.net = Net(latency_s)
        self.producer = self.engine("P", 1)
        self.consumer = self.engine("D", 2)
        self.ticket = make_ticket("r", self.producer.worker.endpoints[0], NUM_TOKENS)

    def engine(self, name, seed):
        settings = make_settings(name, config=IMPATIENT)
        notified, io = threading.Event(), FakeIO(10, seed=seed)
        worker = P2PConnectorWorker(settings, notified.set, Wire(self.net, name).make)
        worker.register_kv_caches([io])
        scheduler = P2PConnectorScheduler(settings, LAYOUT)
        return FakeEngine(name, io, scheduler, worker, notified, lambda: self.net.now_s)

    @property
    def engines(self):
        return self.producer, self.consumer

    def start(self):
        self.producer.add(self.ticket)
        self.consumer.load(self.ticket, TARGET)

    def steps(self, seconds, step_s=0.1):
        """Both cores step, again and again, when they are woken or have something to do."""
        for engine in self.engines:
            engine.step()
        end_s = self.net.now_s + seconds
        while self.net.now_s < end_s:
            self.net.run(self.net.now_s + step_s)
            for engine in self.engines:
                if engine.notified.is_set() or engine.scheduler.has_pending_work():
                    engine.notified.clear()
                    engine.step()

    def assert_delivered(self):
        assert (self.producer.sent, self.consumer.received) == ({"r"}, {"r"})
        want = self.producer.io.tokens(0, SOURCE, 0, NUM_TOKENS)
        assert np.array_equal(self.consumer.io.tokens(0, TARGET, 0, NUM_TOKENS), want)


@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_blocks_arrive(latency_s):
    pair = Pair(latency_s)
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(8.0)
    pair.assert_delivered()
    num_bytes = 8 * LAYOUT.row_bytes
    assert pair.producer.stats.paths["inline"].bytes_sent == num_bytes
    assert pair.consumer.stats.paths["inline"].bytes_received == num_bytes
    assert pair.consumer.stats.num_retransmits == 0


def test_nothing_moves_before_its_time():
    pair = Pair(latency_s=0.25)
    pair.start()
    pair.producer.step()
    pair.consumer.step()
    assert pair.net.sent == [], "commands are carried out by the clock, not inside the step"
    pair.net.run()
    assert [type(m) for m in pair.net.sent] == [Fetch]
    pair.net.run(0.249)
    assert [type(m) for m in pair.net.sent] == [Fetch]
    pair.net.run(0.25)
    assert [type(m) for m in pair.net.sent] == [Fetch, LeaseInfo]


@example([[0.0], [], [], [], [], [0.0], [], []])
@given(st.lists(st.sampled_from([[], [0.0], [0.0], [0.3], [0.0, 0.5]]), max_size=40))
def test_messages_may_be_lost_repeated_and_late(fates):
    pair = Pair()
    remaining = list(fates)
    pair.net.fates = lambda _message: remaining.pop(0) if remaining else [0.0]
    pair.start()
    pair.producer.save("r", SOURCE, NUM_TOKENS)
    pair.steps(20.0)
    assert pair.producer.ended == pair.consumer.ended == {"r"}
    if pair.consumer.received:
        want = pair.producer.io.tokens(0, SOURCE, 0, NUM_TOKENS)
        assert np.array_equal(pair.consumer.io.tokens(0, TARGET, 0, NUM_TOKENS), want)
    assert pair.net.num_due == 0, "no clock is left wound"


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
