"""The virtual network: what delays, holds, loses, repeats, reorders and damages messages.

Owner of every message that is on its way. Control connections (ingress to engine) keep their
order and lose nothing while they stand, as ZMQ over TCP does; KV messages may meet anything, since
their protocol promises to bear it. All randomness comes from the run's seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cluster.lab.simulation.loop import VirtualLoop
    from kv_transfer.messages import ToConsumer, ToProducer
    from kv_transfer.transports.virtual import VirtualTransport

_MESSAGE_BYTES = 200
"""What a message without payload takes of the wire."""


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages travel.

    Attributes:
        latency_s: One way, between any two processes.
        jitter_s: Up to this much more, drawn for each message.
        kv_bytes_per_s: Bandwidth with which a host sends KV.
        kv_loss: Share of the KV messages that are lost.
        kv_repetition: Share that arrive twice.
        kv_jitter_s: Up to this much more for a KV message: later ones may overtake it.
    """

    latency_s: float = 100e-6
    jitter_s: float = 0.0
    kv_bytes_per_s: float = 12.5e9
    kv_loss: float = 0.0
    kv_repetition: float = 0.0
    kv_jitter_s: float = 0.0


class KVHost(Protocol):
    """What the network knows of a host.

    Attributes:
        incarnation: Names it as a consumer.
        kv_endpoint: Names it as a producer.
        transport: Takes what arrives; None where KV is not moved.
    """

    incarnation: str
    kv_endpoint: str
    transport: VirtualTransport | None

    @property
    def is_cut(self) -> bool:
        """Whether nothing gets from or to it now."""

    def corrupts(self) -> bool:
        """Whether KV that leaves it now is damaged on its way."""

    def call_at(self, when_s: float, callback: Callable[..., object], *args: object) -> object:
        """Let something happen in its process at a virtual time."""

    def do(self, callback: Callable[..., object], *args: object) -> None:
        """Let something happen in its process now."""


class KVObserver(Protocol):
    """Who watches what passes between the KV connectors."""

    def kv_sent(self, host: KVHost, peer: bytes, message: ToConsumer) -> None:
        """A producer sends a consumer a message."""

    def kv_arrived(self, host: KVHost, peer: bytes, message: ToProducer) -> None:
        """A message of a consumer reaches a producer."""


class Channel:
    """One direction of a control connection: in order, after the network's delay.

    Args:
        is_shut: Whether nothing gets through now.

    Attributes:
        num_on_way: Messages that were sent and have not arrived.
    """

    def __init__(self, network: Network, is_shut: Callable[[], bool]) -> None:
        self._network = network
        self._is_shut = is_shut
        self._last_s = float("-inf")
        self.num_on_way = 0

    def send(self, deliver: Callable[..., None], *args: object) -> None:
        """Call `deliver` when the message arrives; never if it is shut at either time."""
        if self._is_shut():
            return
        loop = self._network.loop
        self._last_s = max(self._last_s, loop.time() + self._network.delay_s())
        self.num_on_way += 1
        loop.call_at(self._last_s, self._arrive, deliver, args)

    def _arrive(self, deliver: Callable[..., None], args: tuple[object, ...]) -> None:
        self.num_on_way -= 1
        if not self._is_shut():
            deliver(*args)


class Network:
    """See the module docstring.

    Attributes:
        kv_observer: Told of every KV message that a producer sends or gets.
    """

    def __init__(self, loop: VirtualLoop, config: NetworkConfig, rng: np.random.Generator) -> None:
        self.loop = loop
        self.kv_observer: KVObserver | None = None
        self._config = config
        self._rng = rng
        self._by_endpoint: dict[str, KVHost] = {}
        self._by_peer: dict[bytes, KVHost] = {}
        self._free_s: dict[str, float] = {}
        # How often the connection of two hosts has broken: what was on its way then is lost.
        self._num_breaks: dict[tuple[str, str], int] = {}

    def delay_s(self) -> float:
        """How long the next control message takes."""
        return self._config.latency_s + self._up_to_s(self._config.jitter_s)

    @property
    def longest_delay_s(self) -> float:
        """How long a control message takes at most."""
        return self._config.latency_s + self._config.jitter_s

    def attach(self, host: KVHost) -> None:
        """Let a host's KV connector be found."""
        self._by_endpoint[host.kv_endpoint] = host
        self._by_peer[host.incarnation.encode()] = host

    def detach(self, host: KVHost) -> None:
        """Take out a host that died: its peers find their connections broken."""
        self._by_endpoint.pop(host.kv_endpoint, None)
        self._by_peer.pop(host.incarnation.encode(), None)
        self._free_s.pop(host.incarnation, None)
        self.break_kv_connections(host)

    def break_kv_connections(self, host: KVHost) -> None:
        """Lose what is on its way to and from a host, and tell both ends of each connection."""
        for other in list(self._by_endpoint.values()):
            if other is not host:
                pair = _pair(host, other)
                self._num_breaks[pair] = self._num_breaks.get(pair, 0) + 1
                other.call_at(self._soon_s(), _lose, other, host)
                host.call_at(self._soon_s(), _lose, host, other)

    def to_producer(self, sender: KVHost, endpoint: str, message: ToProducer) -> None:
        """Carry a consumer's message."""
        host = self._by_endpoint.get(endpoint)
        if host is None:
            sender.call_at(self._soon_s(), _transport(sender).lose_producer, endpoint)
            return
        peer = sender.incarnation.encode()
        self._carry(sender, host, _MESSAGE_BYTES, self._reach_producer, host, peer, message)

    def to_consumer(
        self,
        sender: KVHost,
        peer: bytes,
        message: ToConsumer,
        payload: NDArray[np.uint8] | None,
        num_bytes: int,
    ) -> None:
        """Carry a producer's message; `num_bytes` is what its payload stands for."""
        host = self._by_peer.get(peer)
        if host is None:
            sender.call_at(self._soon_s(), _transport(sender).lose_consumer, peer)
            return
        if payload is not None and sender.corrupts():
            payload = self._damage(payload)
        if self.kv_observer is not None:
            self.kv_observer.kv_sent(sender, peer, message)
        receive = _transport(host).receive_from_producer
        num_bytes += _MESSAGE_BYTES
        self._carry(sender, host, num_bytes, receive, sender.kv_endpoint, message, payload)

    def _reach_producer(self, host: KVHost, peer: bytes, message: ToProducer) -> None:
        if self.kv_observer is not None:
            self.kv_observer.kv_arrived(host, peer, message)
        _transport(host).receive_from_consumer(peer, message)

    def _carry(
        self,
        sender: KVHost,
        host: KVHost,
        num_bytes: int,
        receive: Callable[..., None],
        *args: object,
    ) -> None:
        """Let a host receive a message: never, once or twice."""
        pair = _pair(sender, host)
        num_breaks = self._num_breaks.get(pair, 0)

        def arrive() -> None:
            if num_breaks == self._num_breaks.get(pair, 0) and not host.is_cut:
                host.do(receive, *args)

        for arrival_s in self._arrivals(sender, host, num_bytes):
            self.loop.call_at(arrival_s, arrive)

    def _soon_s(self) -> float:
        return self.loop.time() + self._config.latency_s

    def _arrivals(self, sender: KVHost, receiver: KVHost, num_bytes: int) -> list[float]:
        """When a KV message arrives: once as a rule, perhaps twice or never."""
        config, now_s = self._config, self.loop.time()
        if sender.is_cut or receiver.is_cut:
            return []
        if config.kv_loss and self._rng.random() < config.kv_loss:
            return []
        start_s = max(now_s, self._free_s.get(sender.incarnation, 0.0))
        done_s = start_s + num_bytes / config.kv_bytes_per_s
        self._free_s[sender.incarnation] = done_s
        is_repeated = config.kv_repetition and self._rng.random() < config.kv_repetition
        return [
            done_s + config.latency_s + self._up_to_s(config.kv_jitter_s)
            for _ in range(2 if is_repeated else 1)
        ]

    def _up_to_s(self, most_s: float) -> float:
        return most_s * self._rng.random() if most_s else 0.0

    def _damage(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
        damaged = payload.copy()
        flat = damaged.reshape(-1)
        flat[self._rng.integers(len(flat))] ^= 1 << int(self._rng.integers(8))
        return damaged


def _transport(host: KVHost) -> VirtualTransport:
    assert host.transport is not None, f"{host.incarnation} moves no KV"
    return host.transport


def _lose(host: KVHost, other: KVHost) -> None:
    """A host's connections to another one broke, in both roles."""
    if host.transport is not None:
        host.transport.lose_producer(other.kv_endpoint)
        host.transport.lose_consumer(other.incarnation.encode())


def _pair(one: KVHost, other: KVHost) -> tuple[str, str]:
    """The connection of two hosts, whichever of them is named first."""
    first, second = sorted((one.incarnation, other.incarnation))
    return first, second
