"""Messages on their way: in order on control connections, through anything between connectors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.lab.simulation.loop import VirtualLoop
from cluster.lab.simulation.network import Channel, Network, NetworkConfig

CONTROL_BYTES = 200


class Host:
    """Everything that a network knows of a host."""

    def __init__(self, network, name):
        self.network = network
        self.incarnation = name
        self.kv_endpoint = f"kv://{name}"
        self.is_cut = False
        self.is_corrupt = False
        self.log = []
        self.transport = self
        network.attach(self)

    def corrupts(self):
        return self.is_corrupt

    def call_at(self, when_s, callback, *args):
        return self.network.loop.call_at(when_s, callback, *args)

    def do(self, callback, *args):
        callback(*args)

    def _note(self, *what):
        self.log.append((self.network.loop.time(), *what))

    def receive_from_consumer(self, peer, message):
        self._note("request", peer, message)

    def receive_from_producer(self, endpoint, message, payload):
        self._note("reply", endpoint, message, payload)

    def lose_producer(self, endpoint):
        self._note("lost endpoint", endpoint)

    def lose_consumer(self, peer):
        self._note("lost consumer", peer)


def lost(name):
    """What a host notes that has lost another one, which may be producer and consumer."""
    return [("lost endpoint", f"kv://{name}"), ("lost consumer", name.encode())]


def network(seed=0, **config):
    fields = {"latency_s": 0.25, "kv_bytes_per_s": 1000.0, **config}
    rng = np.random.Generator(np.random.Philox(seed))
    return Network(VirtualLoop(), NetworkConfig(**fields), rng)


def run(net, seconds=100.0):
    net.loop.run(asyncio.sleep(seconds))


def call_at(net, when_s, callback, *args):
    net.loop.call_at(when_s, callback, *args)


# --- control connections --------------------------------------------------------------------------


def test_a_message_takes_the_latency():
    net = network()
    channel, log = Channel(net, lambda: False), []
    call_at(net, 1.0, channel.send, lambda *args: log.append((net.loop.time(), args)), "x", 1)
    run(net)
    assert log == [(1.25, ("x", 1))]


def test_jitter_delays_and_never_reorders():
    net = network(jitter_s=5.0)
    channel, log = Channel(net, lambda: False), []
    for i in range(30):
        call_at(net, 0.1 * i, channel.send, lambda i=i: log.append((i, net.loop.time())))
    run(net)
    assert [i for i, _ in log] == list(range(30))
    delays_s = [at_s - 0.1 * i for i, at_s in log]
    assert min(delays_s) > 0.25
    assert 2.0 < max(delays_s) < 5.25


def test_both_directions_and_other_connections_do_not_wait_for_each_other():
    net = network(jitter_s=5.0)
    host, order = Host(net, "a"), []
    for name, channel in [(i, Channel(net, lambda: host.is_cut)) for i in range(20)]:
        channel.send(order.append, name)
    run(net)
    assert sorted(order) == list(range(20)) != order


def test_messages_on_their_way_are_counted():
    net = network()
    channel = Channel(net, lambda: False)
    channel.send(lambda: None)
    channel.send(lambda: None)
    assert channel.num_on_way == 2
    run(net, 0.5)
    assert channel.num_on_way == 0


@pytest.mark.parametrize("cut_s", [(0.5, 1.5), (1.1, 1.5)], ids=["when sent", "when it arrives"])
def test_a_cut_loses_what_is_sent_and_what_arrives(cut_s):
    net = network()
    host = Host(net, "a")
    channel, log = Channel(net, lambda: host.is_cut), []
    for at_s, is_cut in zip(cut_s, (True, False), strict=True):
        call_at(net, at_s, setattr, host, "is_cut", is_cut)
    for at_s in (0.125, 1.0, 1.5):
        call_at(net, at_s, channel.send, log.append, at_s)
    run(net)
    assert log == [0.125, 1.5]
    assert channel.num_on_way == 0


# --- between connectors ---------------------------------------------------------------------------


def test_a_consumers_message_reaches_the_producer_with_its_sender():
    net = network()
    a, b = Host(net, "a"), Host(net, "b")
    net.to_producer(a, b.kv_endpoint, "fetch")
    run(net)
    assert b.log == [(CONTROL_BYTES / 1000.0 + 0.25, "request", b"a", "fetch")]
    assert a.log == []


def test_payloads_take_their_time_one_after_the_other():
    net = network()
    a, b, c = (Host(net, name) for name in "abc")
    payload = np.arange(4, dtype=np.uint8)
    net.to_consumer(a, b"b", "one", payload, 800)
    net.to_consumer(a, b"c", "two", None, 1800)
    net.to_consumer(c, b"b", "three", None, 0)
    run(net)
    assert [entry[:3] for entry in b.log] == [(0.45, "reply", "kv://c"), (1.25, "reply", "kv://a")]
    assert b.log[1][4] is payload
    assert [entry[0] for entry in c.log] == [3.25], "the second one waits for the first"


def test_idle_bandwidth_is_not_saved_up():
    net = network()
    a, b = Host(net, "a"), Host(net, "b")
    for at_s in (0.0, 10.0):
        call_at(net, at_s, net.to_consumer, a, b"b", at_s, None, 800)
    run(net)
    assert [entry[0] for entry in b.log] == [1.25, 11.25]


def test_a_message_to_a_missing_host_breaks_the_connection():
    net = network()
    a = Host(net, "a")
    net.to_producer(a, "kv://gone", "fetch")
    net.to_consumer(a, b"gone", "data", None, 0)
    run(net)
    assert a.log == [(0.25, "lost endpoint", "kv://gone"), (0.25, "lost consumer", b"gone")]


def test_other_hosts_learn_of_a_hosts_death():
    net = network()
    a, b, c = (Host(net, name) for name in "abc")
    net.detach(a)
    run(net)
    assert [h.log for h in (b, c)] == [[(0.25, *entry) for entry in lost("a")]] * 2


def test_a_broken_connection_loses_what_is_on_its_way_and_stands_again():
    net = network()
    a, b, c = (Host(net, name) for name in "abc")
    net.to_consumer(a, b"b", "lost", None, 0)
    net.to_producer(b, a.kv_endpoint, "lost too")
    net.to_consumer(c, b"b", "not theirs", None, 0)
    call_at(net, 0.125, net.break_kv_connections, a)
    call_at(net, 0.25, net.to_consumer, a, b"b", "later", None, 0)
    run(net)
    assert [entry[1:] for entry in b.log if entry[1] != "reply"] == lost("a")
    assert [entry[3] for entry in b.log if entry[1] == "reply"] == ["not theirs", "later"]
    assert [entry[1:] for entry in a.log] == [*lost("b"), *lost("c")]


def test_loss_and_repetition_have_their_shares():
    net = network(kv_loss=0.25, kv_repetition=0.5, kv_bytes_per_s=1e9)
    a, b = Host(net, "a"), Host(net, "b")
    for i in range(400):
        net.to_consumer(a, b"b", i, None, 0)
    run(net)
    counts = np.bincount([entry[3] for entry in b.log], minlength=400)
    assert set(counts) == {0, 1, 2}
    assert 0.2 < np.mean(counts == 0) < 0.3
    assert 0.4 < np.mean(counts[counts > 0] == 2) < 0.6


def test_kv_jitter_reorders():
    net = network(kv_jitter_s=1.0, kv_bytes_per_s=1e9)
    a, b = Host(net, "a"), Host(net, "b")
    for i in range(30):
        net.to_producer(a, b.kv_endpoint, i)
    run(net)
    order = [entry[3] for entry in b.log]
    assert sorted(order) == list(range(30)) != order
    assert max(entry[0] for entry in b.log) < 1.26


def test_without_chance_nothing_is_drawn():
    """Else an option that is off would change what all others do."""
    net = network()
    a, b = Host(net, "a"), Host(net, "b")
    before = str(net._rng.bit_generator.state)
    Channel(net, lambda: a.is_cut).send(lambda: None)
    net.to_producer(a, b.kv_endpoint, "fetch")
    net.to_consumer(b, b"a", "data", np.zeros(3, np.uint8), 3)
    run(net)
    assert str(net._rng.bit_generator.state) == before


def test_damage_flips_one_bit_of_a_copy():
    net = network()
    a, b = Host(net, "a"), Host(net, "b")
    a.is_corrupt = True
    payload = np.zeros((3, 5), dtype=np.uint8)
    net.to_consumer(a, b"b", "data", payload, 15)
    net.to_consumer(a, b"b", "info", None, 0)
    run(net)
    damaged = b.log[0][4]
    assert damaged.shape == payload.shape
    assert np.unpackbits(damaged).sum() == 1
    assert not payload.any(), "the sender's own"
    assert b.log[1][4] is None


@pytest.mark.parametrize("cut", ["a", "b"])
def test_a_cut_loses_kv_messages_of_either_end(cut):
    net = network()
    a, b = Host(net, "a"), Host(net, "b")
    hosts = {"a": a, "b": b}
    net.to_consumer(a, b"b", "before", None, 0)
    call_at(net, 1.0, setattr, hosts[cut], "is_cut", True)
    call_at(net, 1.5, net.to_consumer, a, b"b", "during", None, 0)
    call_at(net, 2.0, setattr, hosts[cut], "is_cut", False)
    call_at(net, 3.0, net.to_consumer, a, b"b", "after", None, 0)
    run(net)
    assert [entry[3] for entry in b.log] == ["before", "after"]


def test_an_observer_sees_all_messages_of_producers_even_lost_ones():
    net = network(kv_loss=1.0)
    a, b = Host(net, "a"), Host(net, "b")
    seen = []
    net.kv_observer = type("Seen", (), {"kv_sent": lambda _, *sent: seen.append(sent)})()
    net.to_consumer(a, b"b", "data", None, 0)
    net.to_producer(b, a.kv_endpoint, "fetch")
    run(net)
    assert seen == [(a, b"b", "data")]
    assert b.log == a.log == []
