"""Clock and network for virtual transports in a test: a list of due calls, without randomness."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from kv_transfer.transports.virtual import VirtualTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kv_transfer.connector import ConnectorSettings, KVDeviceIO
    from kv_transfer.messages import ToConsumer, ToProducer


class Due:
    """A call that has not happened yet."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Net:
    """Schedule of calls; owns the transports that were made with `Wire.make`.

    Attributes:
        latency_s: Of every message.
        fates: Called with each message: delays of its copies; none loses it.
        sent: Every message sent, in order.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.latency_s = latency_s
        self.fates: Callable[[object], list[float]] = lambda _message: [self.latency_s]
        self.sent: list[object] = []
        self.transports: dict[str, VirtualTransport] = {}
        self._due: list[tuple[float, int, Due]] = []
        self._order = itertools.count()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Due:
        assert when_s >= self.now_s, f"{when_s} has passed at {self.now_s}"
        due = Due(callback)
        heapq.heappush(self._due, (when_s, next(self._order), due))
        return due

    @property
    def num_due(self) -> int:
        """Calls that will happen."""
        return sum(not due.is_cancelled for _, _, due in self._due)

    def run(self, until_s: float | None = None) -> None:
        """Run the calls that are due until then; by default those due now."""
        until_s = self.now_s if until_s is None else until_s
        while self._due and self._due[0][0] <= until_s:
            when_s, _, due = heapq.heappop(self._due)
            if not due.is_cancelled:
                self.now_s = max(self.now_s, when_s)
                due.callback()
                for transport in self.transports.values():
                    transport.check_invariants()
        self.now_s = until_s

    def post(self, message: object, deliver: Callable[[], None]) -> None:
        self.sent.append(message)
        for delay_s in self.fates(message):
            self.call_at(self.now_s + delay_s, deliver)


class Wire:
    """One engine's `VirtualWire`.

    Attributes:
        ahead_s: How far into its step the engine is.
    """

    def __init__(self, net: Net, name: str) -> None:
        self.net = net
        self.name = name
        self.ahead_s = 0.0

    def make(
        self, settings: ConnectorSettings, io: KVDeviceIO, notify: Callable[[], None]
    ) -> VirtualTransport:
        transport = VirtualTransport(settings, io, notify, self)
        self.net.transports[self.name] = transport
        return transport

    def now_s(self) -> float:
        return self.net.now_s + self.ahead_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Due:
        return self.net.call_at(when_s, callback)

    def send_to_producer(self, endpoint: str, message: ToProducer) -> None:
        def deliver() -> None:
            for transport in self.net.transports.values():
                if endpoint in transport.endpoints:
                    transport.receive_from_consumer(self.name.encode(), message)

        self.net.post(message, deliver)

    def send_to_consumer(
        self, peer: bytes, message: ToConsumer, payload: NDArray[np.uint8] | None
    ) -> None:
        [endpoint] = self.net.transports[self.name].endpoints

        def deliver() -> None:
            transport = self.net.transports.get(peer.decode())
            if transport is not None:
                transport.receive_from_producer(endpoint, message, payload)

        self.net.post(message, deliver)
