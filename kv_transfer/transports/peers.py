"""Connections to the producers that an engine fetches from, each a DEALER with its monitor."""

import logging
from collections.abc import Iterator, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import ServerKeyError
from kv_transfer.transports.options import set_options
from kv_transfer.transports.tcp import address_of, connect_tcp

logger = logging.getLogger(__name__)

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
"""Monitor events after which a producer counts as gone: the connection broke, or was refused."""


class Peer:
    """Connection to one producer. Owner: ``Peers``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.dealer = context.socket(zmq.DEALER)
        self.monitor: zmq.Socket[bytes] | None = None

    def connect(self, settings: ConnectorSettings, max_bytes: int, producer: str) -> None:
        """Start to connect to this incarnation; the monitor runs from before the first attempt."""
        set_options(self.dealer, max_bytes)
        self.monitor = self.dealer.get_monitor_socket(_LOST)
        if self.endpoint.startswith("tcp://"):
            connect_tcp(self.dealer, self.endpoint, settings, producer)
        else:
            self.dealer.connect(self.endpoint)

    def is_lost(self) -> bool:
        """Return whether the monitor has seen the connection break or be refused."""
        while self.monitor is not None and self.monitor.poll(0):
            if int(recv_monitor_message(self.monitor)["event"]) & _LOST:
                return True
        return False

    def close(self) -> None:
        """Close both sockets and drop queued messages."""
        if self.monitor is not None:
            self.dealer.disable_monitor()
            self.monitor.close(linger=0)
        self.dealer.close(linger=0)


class Peers:
    """Connections to producers, by endpoint.

    Owner: the I/O thread, whose poller knows their sockets.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ConnectorSettings,
        max_bytes: int,
        poller: zmq.Poller,
    ) -> None:
        """Start without connections.

        Args:
            context: Makes the sockets.
            settings: The engine's.
            max_bytes: Longest frame that a producer may send.
            poller: Poller of the I/O thread.
        """
        self._context = context
        self._settings = settings
        self._max_bytes = max_bytes
        self._poller = poller
        self._connected: dict[str, Peer] = {}
        self._incarnations: dict[str, str] = {}

    def __iter__(self) -> Iterator[Peer]:
        """Yield the connections; some may be closed during the iteration."""
        return iter(list(self._connected.values()))

    def ready(self, ready: Mapping[object, int]) -> list[Peer]:
        """Return the connections that a poll reported as ready."""
        return [peer for peer in self if peer.dealer in ready or peer.monitor in ready]

    def expect(self, endpoint: str, incarnation: str) -> None:
        """Record which engine has to answer at an endpoint."""
        self._incarnations[endpoint] = incarnation

    def reach(self, endpoint: str) -> Peer | None:
        """Return the connection to a producer, made if there is none; None if that fails."""
        return self._connected.get(endpoint) or self._connect(endpoint)

    def close(self, endpoint: str) -> None:
        """Close the connection to a producer, and drop the incarnation expected there."""
        self._incarnations.pop(endpoint, None)
        peer = self._connected.pop(endpoint, None)
        if peer is not None:
            self._poller.unregister(peer.dealer)
            self._poller.unregister(peer.monitor)
            peer.close()

    def close_all(self) -> None:
        """Close all connections; call only when the poller is not used any more."""
        for peer in self._connected.values():
            peer.close()
        self._connected.clear()

    def _connect(self, endpoint: str) -> Peer | None:
        peer = None
        try:
            peer = Peer(self._context, endpoint)
            peer.connect(self._settings, self._max_bytes, self._incarnations.get(endpoint, ""))
        except (zmq.ZMQError, ServerKeyError) as error:
            logger.warning(
                "cannot connect KV transfer to %s, failing its loads: %s",
                address_of(endpoint),
                error,
            )
            if peer is not None:
                peer.close()
            return None
        self._connected[endpoint] = peer
        self._poller.register(peer.dealer, zmq.POLLIN)
        self._poller.register(peer.monitor, zmq.POLLIN)
        return peer
