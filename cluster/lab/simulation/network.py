"""The virtual network: delays, loses, repeats, reorders and corrupts messages.

Owns every message on its way. Control connections (ingress to engine) keep the order and lose
nothing while they are open, as ZMQ over TCP. KV messages may suffer any of these, because their
protocol must tolerate it. All randomness is from the run's seed.
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
"""Bytes of a message without its payload."""


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties of the network.

    Attributes:
        latency_s: One-way latency between any two processes.
        jitter_s: Largest additional delay, drawn for each message.
        kv_bytes_per_s: Bandwidth with which a host sends KV.
        kv_loss: Share of KV messages that are lost.
        kv_repetition: Share of KV messages that arrive twice.
        kv_jitter_s: Largest additional delay of a KV message; later ones may overtake it.
    """

    latency_s: float = 100e-6
    jitter_s: float = 0.0
    kv_bytes_per_s: float = 12.5e9
    kv_loss: float = 0.0
    kv_repetition: float = 0.0
    kv_jitter_s: float = 0.0


class KVHost(Protocol):
    """A host as the network sees it.

    Attributes:
        incarnation: Its name as a consumer.
        kv_endpoint: Its name as a producer.
        transport: The receiver of its messages; None if it moves no KV.
    """

    incarnation: str
    kv_endpoint: str
    transport: VirtualTransport | None

    @property
    def is_cut(self) -> bool:
        """Whether a partition drops all of its messages now."""

    def corrupts(self) -> bool:
        """Return whether KV that it sends now is corrupted on the way."""

    def call_at(self, when_s: float, callback: Callable[..., object], *args: object) -> object:
        """Run a callback in its process at a virtual time."""

    def do(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in its process now."""


class KVObserver(Protocol):
    """An observer of the messages between KV connectors."""

    def kv_sent(self, host: KVHost, peer: bytes, message: ToConsumer) -> None:
        """Observe a message that a producer sends to a consumer."""

    def kv_arrived(self, host: KVHost, peer: bytes, message: ToProducer) -> None:
        """Observe a consumer's message that arrives at a producer."""


class Channel:
    """One direction of a control connection: in order, after the network's delay.

    Args:
        is_shut: Returns whether messages are dropped now.

    Attributes:
        num_on_way: Messages on their way.
    """

    def __init__(self, network: Network, is_shut: Callable[[], bool]) -> None:
        self._network = network
        self._is_shut = is_shut
        self._last_s = float("-inf")
        self.num_on_way = 0

    def send(self, deliver: Callable[..., None], *args: object) -> None:
        """Call `deliver` when the message arrives; drop it if the channel is shut at either end."""
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
    """The network of one run.

    Attributes:
        kv_observer: Observer of every KV message that a producer sends or receives.
    """

    def __init__(self, loop: VirtualLoop, config: NetworkConfig, rng: np.random.Generator) -> None:
        self.loop = loop
        self.kv_observer: KVObserver | None = None
        self._config = config
        self._rng = rng
        self._by_endpoint: dict[str, KVHost] = {}
        self._by_peer: dict[bytes, KVHost] = {}
        self._free_s: dict[str, float] = {}
        # Number of breaks of each connection: messages sent before a break are lost.
        self._num_breaks: dict[tuple[str, str], int] = {}

    def delay_s(self) -> float:
        """Draw the delay of the next control message."""
        return self._config.latency_s + self._up_to_s(self._config.jitter_s)

    @property
    def longest_delay_s(self) -> float:
        """The longest delay of a control message."""
        return self._config.latency_s + self._config.jitter_s

    def attach(self, host: KVHost) -> None:
        """Connect a host's KV connector."""
        self._by_endpoint[host.kv_endpoint] = host
        self._by_peer[host.incarnation.encode()] = host

    def detach(self, host: KVHost) -> None:
        """Disconnect a host that died; its peers' connections break."""
        self._by_endpoint.pop(host.kv_endpoint, None)
        self._by_peer.pop(host.incarnation.encode(), None)
        self._free_s.pop(host.incarnation, None)
        self.break_kv_connections(host)

    def break_kv_connections(self, host: KVHost) -> None:
        """Break a host's KV connections: messages on their way are lost, both ends are notified."""
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
        """Carry a producer's message; `num_bytes` is the size of the payload it represents."""
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
        """Deliver a message to a host: never, once or twice."""
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
        """Draw the arrival times of a KV message: usually one, perhaps two or none."""
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
    """Notify a host that its connections to another one broke, in both roles."""
    if host.transport is not None:
        host.transport.lose_producer(other.kv_endpoint)
        host.transport.lose_consumer(other.incarnation.encode())


def _pair(one: KVHost, other: KVHost) -> tuple[str, str]:
    """Return the key of the connection of two hosts, independent of their order."""
    first, second = sorted((one.incarnation, other.incarnation))
    return first, second
