"""The virtual network: what delays, holds, loses, repeats, reorders and damages messages.

Owner of every message that is on its way. Control connections (ingress to engine) keep their
order and lose nothing while they stand, as ZMQ over TCP does; KV messages may meet anything, since
their protocol promises to bear it. All randomness comes from the run's seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cluster.simulation.host import VirtualHost
    from cluster.simulation.loop import VirtualLoop
    from kv_transfer.messages import ToConsumer, ToProducer

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


class Channel:
    """One direction of a control connection: in order, after the network's delay.

    Args:
        network: Whose delays it has.
        host: The engine's end, which may be cut off.
    """

    def __init__(self, network: Network, host: VirtualHost) -> None:
        self._network = network
        self._host = host
        self._last_s = 0.0

    def send(self, deliver: Callable[..., None], *args: object) -> None:
        """Call `deliver` when the message arrives; held back while the host is cut off."""
        loop = self._network.loop
        free_s = self._host.reachable_s(loop.time())
        if free_s is None:
            return
        self._last_s = max(self._last_s, free_s + self._network.delay_s())
        loop.call_at(self._last_s, deliver, *args)


class Network:
    """See the module docstring.

    Args:
        loop: Virtual time.
        config: How messages travel.
        rng: Where chance comes from.
    """

    def __init__(self, loop: VirtualLoop, config: NetworkConfig, rng: np.random.Generator) -> None:
        self.loop = loop
        self._config = config
        self._rng = rng
        self._by_endpoint: dict[str, VirtualHost] = {}
        self._by_peer: dict[bytes, VirtualHost] = {}
        self._free_s: dict[str, float] = {}

    def delay_s(self) -> float:
        """How long the next control message takes."""
        jitter_s = self._config.jitter_s
        return self._config.latency_s + (jitter_s * self._rng.random() if jitter_s else 0.0)

    def attach(self, host: VirtualHost) -> None:
        """Let a host's KV connector be found."""
        self._by_endpoint[host.kv_endpoint] = host
        self._by_peer[host.incarnation.encode()] = host

    def detach(self, host: VirtualHost) -> None:
        """Take out a host that died: its peers find their connections broken."""
        self._by_endpoint.pop(host.kv_endpoint, None)
        self._by_peer.pop(host.incarnation.encode(), None)
        self._free_s.pop(host.incarnation, None)
        self.break_kv_connections(host)

    def break_kv_connections(self, host: VirtualHost) -> None:
        """Tell both ends of every KV connection of a host that it broke."""
        for other in list(self._by_endpoint.values()):
            if other is not host:
                other.call_at(self._soon_s(), other.lose_kv_peer, host)
                host.call_at(self._soon_s(), host.lose_kv_peer, other)

    def to_producer(self, sender: VirtualHost, endpoint: str, message: ToProducer) -> None:
        """Carry a consumer's message."""
        host = self._by_endpoint.get(endpoint)
        if host is None:
            sender.call_at(self._soon_s(), sender.lose_kv_endpoint, endpoint)
            return
        peer = sender.incarnation.encode()
        for arrival_s in self._arrivals(sender, host, _MESSAGE_BYTES):
            host.call_at(arrival_s, host.receive_from_consumer, peer, message)

    def to_consumer(
        self,
        sender: VirtualHost,
        peer: bytes,
        message: ToConsumer,
        payload: NDArray[np.uint8] | None,
        num_bytes: int,
    ) -> None:
        """Carry a producer's message; `num_bytes` is what its payload stands for."""
        host = self._by_peer.get(peer)
        if host is None:
            sender.call_at(self._soon_s(), sender.lose_kv_consumer, peer)
            return
        if payload is not None and sender.corrupts():
            payload = self._damage(payload)
        for arrival_s in self._arrivals(sender, host, num_bytes + _MESSAGE_BYTES):
            host.call_at(
                arrival_s, host.receive_from_producer, sender.kv_endpoint, message, payload
            )

    def _soon_s(self) -> float:
        return self.loop.time() + self._config.latency_s

    def _arrivals(self, sender: VirtualHost, receiver: VirtualHost, num_bytes: int) -> list[float]:
        """When a KV message arrives: once as a rule, perhaps twice or never."""
        config, now_s = self._config, self.loop.time()
        sent_s = sender.reachable_s(now_s)
        open_s = receiver.reachable_s(now_s)
        if sent_s is None or open_s is None:
            return []
        if config.kv_loss and self._rng.random() < config.kv_loss:
            return []
        start_s = max(sent_s, open_s, self._free_s.get(sender.incarnation, 0.0))
        done_s = start_s + num_bytes / config.kv_bytes_per_s
        self._free_s[sender.incarnation] = done_s
        copies = 1
        if config.kv_repetition and self._rng.random() < config.kv_repetition:
            copies = 2
        return [done_s + config.latency_s + self._kv_jitter_s() for _ in range(copies)]

    def _kv_jitter_s(self) -> float:
        jitter_s = self._config.kv_jitter_s
        return jitter_s * self._rng.random() if jitter_s else 0.0

    def _damage(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
        damaged = payload.copy()
        flat = damaged.reshape(-1)
        flat[self._rng.integers(len(flat))] ^= 1 << int(self._rng.integers(8))
        return damaged
