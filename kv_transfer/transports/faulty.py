"""ZMQ transport whose connections fail by a script.

Faults happen at the wire, below the sessions, which so see the same as with a failing network.
"""

import time
from collections.abc import Callable
from typing import Protocol

from kv_transfer.connector import ConnectorSettings, KVMemory
from kv_transfer.producer import SendToConsumer
from kv_transfer.transports.connections import break_accepted
from kv_transfer.transports.tcp import address_of
from kv_transfer.transports.zmq import ZmqTransport


class LinkFaults(Protocol):
    """Scripted faults of one engine's connections.

    Asked on the transport's thread; ``now_s`` is the monotonic clock of the process.
    """

    def is_cut(self, now_s: float) -> bool:
        """Return whether no message gets in or out."""

    def corrupts(self, now_s: float) -> bool:
        """Return whether bytes of outgoing payloads are flipped after their checksum was made."""

    def num_breaks(self, now_s: float) -> int:
        """Return how often every connection has broken so far."""

    def next_change_s(self, now_s: float) -> float | None:
        """Return the time at which an answer changes next, or None."""


class FaultyTransport(ZmqTransport):
    """``ZmqTransport`` with scripted faults. Owner: as there."""

    def __init__(
        self,
        faults: LinkFaults,
        settings: ConnectorSettings,
        memory: KVMemory,
        notify: Callable[[], None],
    ) -> None:
        """Bind and start; ignore the breaks that happened earlier."""
        self._faults = faults
        self._num_breaks = faults.num_breaks(time.monotonic())
        super().__init__(settings, memory, notify)

    def _must_be_silent(self, now_s: float) -> bool:
        num_breaks = self._faults.num_breaks(now_s)
        if num_breaks > self._num_breaks:
            self._num_breaks = num_breaks
            for peer in self._peers:
                self._drop_producer(peer.endpoint)
            for endpoint in self._endpoints:
                if not endpoint.startswith("shm://"):
                    break_accepted(address_of(endpoint))
        return super()._must_be_silent(now_s) or self._faults.is_cut(now_s)

    def _deadlines_s(self, now_s: float) -> list[float | None]:
        return [*super()._deadlines_s(now_s), self._faults.next_change_s(now_s)]

    def _send_to_consumer(self, send: SendToConsumer) -> None:
        if send.payload is not None and self._faults.corrupts(time.monotonic()):
            # After the checksum was made.
            send.payload[:] ^= 0xFF
        super()._send_to_consumer(send)
