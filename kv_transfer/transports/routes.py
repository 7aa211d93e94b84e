"""Routes to producers: endpoint, and path of the payload.

A producer of this host and user is reached over its Unix socket and asked for its KV memory. Loads
wait for that answer, for a short time. Any other producer is reached over TCP.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from kv_transfer.errors import WireError
from kv_transfer.layout import KVLayout
from kv_transfer.peer_user import peer_user_id
from kv_transfer.shared_region import RegionFetch
from kv_transfer.transport import ProducerRoute, StartLoad

logger = logging.getLogger(__name__)

_REGION_S = 0.25
"""Time that a load waits for its producer's memory; after it the payload is sent instead."""

_Key = tuple[tuple[str, ...], str]
"""Endpoints of a producer and the hash of its layout."""


@dataclass(slots=True, eq=False)
class _Approach:
    """Loads that wait for the memory of their producer."""

    fetch: RegionFetch
    fileno: int
    give_up_s: float
    loads: list[StartLoad] = field(default_factory=list)


class ProducerRoutes:
    """Routes to all producers of one engine.

    Owner: the I/O thread. Only a route over shared memory is kept, until ``drop_producer``; any
    other is looked for again with the next load.
    """

    def __init__(
        self, layouts: Mapping[str, KVLayout], poller: zmq.Poller, *, has_nixl: bool
    ) -> None:
        """Start without routes.

        Args:
            layouts: Layouts of acceptable producers whose memory can be mapped, by their hash.
            poller: Wakes the I/O thread when a producer has answered.
            has_nixl: Whether payload from other hosts may come over NIXL.
        """
        self._layouts = layouts
        self._poller = poller
        self._has_nixl = has_nixl
        self._without_nixl: set[str] = set()
        self._known: dict[_Key, ProducerRoute] = {}
        self._approaches: dict[_Key, _Approach] = {}

    def find(self, load: StartLoad, now_s: float) -> ProducerRoute | None:
        """Return the route of a load; None if it must wait for ``take_ready`` to return it."""
        key = (load.ticket.producer_endpoints, load.ticket.layout_hash)
        approach = self._approaches.get(key)
        if approach is not None:
            approach.loads.append(load)
            return None
        address = next((x for x in key[0] if x.startswith("shm://")), None)
        if key in self._known or address is None or key[1] not in self._layouts:
            return self._known.get(key) or self._plain(key[0])
        fetch = RegionFetch(address, load.sealed)
        if fetch.fileno() < 0:
            return self._plain(key[0])
        self._approaches[key] = _Approach(fetch, fetch.fileno(), now_s + _REGION_S, [load])
        self._poller.register(fetch.fileno(), zmq.POLLIN)
        return None

    def take_ready(self, now_s: float) -> list[tuple[StartLoad, ProducerRoute]]:
        """Remove and return the loads that need not wait any longer, each with its route."""
        ready: list[tuple[StartLoad, ProducerRoute]] = []
        for key, approach in list(self._approaches.items()):
            answer = approach.fetch.poll()
            if answer == "waiting" and now_s < approach.give_up_s:
                continue
            del self._approaches[key]
            self._poller.unregister(approach.fileno)
            approach.fetch.close()
            route = self._plain(key[0])
            if not isinstance(answer, str):
                try:
                    lanes = answer.lanes(self._layouts[key[1]])
                    route = self._known[key] = ProducerRoute(route.endpoint, "shared", lanes)
                except WireError as error:
                    logger.warning(
                        "cannot read the KV memory of %s in place, so payload is sent: %s",
                        route.endpoint,
                        error,
                    )
                answer.close()
            logger.info("KV from %s comes over the path %s", route.endpoint, route.path)
            ready += [(load, route) for load in approach.loads]
        return ready

    def take_waiting(self, transfer_id: bytes) -> tuple[StartLoad, ProducerRoute] | None:
        """Remove and return a load that waits, with any route over which to cancel it."""
        for approach in self._approaches.values():
            for load in approach.loads:
                if load.ticket.transfer_id == transfer_id:
                    approach.loads.remove(load)
                    return load, ProducerRoute(_nearest(load.ticket.producer_endpoints))
        return None

    def avoid_nixl(self, endpoint: str) -> None:
        """Use another path than NIXL for a producer from now on."""
        self._without_nixl.add(endpoint)

    def drop_producer(self, endpoint: str) -> None:
        """Drop the route to a producer's memory; its successor is asked again."""
        self._without_nixl.discard(endpoint)
        for key, route in list(self._known.items()):
            if route.endpoint == endpoint:
                del self._known[key]

    def next_deadline_s(self) -> float | None:
        """Return the time at which a load stops waiting, or None."""
        return min((x.give_up_s for x in self._approaches.values()), default=None)

    def close(self) -> None:
        """Close the connections to producers that have not answered."""
        for approach in self._approaches.values():
            approach.fetch.close()
        self._approaches.clear()

    def _plain(self, endpoints: Sequence[str]) -> ProducerRoute:
        """Return the route for payload that is sent, not read in the producer's memory."""
        endpoint = _nearest(endpoints)
        is_far = endpoint.startswith("tcp://") and endpoint not in self._without_nixl
        return ProducerRoute(endpoint, "nixl" if self._has_nixl and is_far else "inline")


def _nearest(endpoints: Sequence[str]) -> str:
    """Return the Unix socket of a producer of this host and user, else its TCP endpoint."""
    for endpoint in endpoints:
        if endpoint.startswith("ipc://@") and _is_neighbour(endpoint):
            return endpoint
    return next((x for x in endpoints if x.startswith("tcp://")), endpoints[0])


def _is_neighbour(endpoint: str) -> bool:
    """Return whether a process of this user listens there; any user may bind a free name."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect("\0" + endpoint.removeprefix("ipc://@"))
            return peer_user_id(probe) == os.geteuid()
    except OSError:
        return False  # It does not listen or is too busy: TCP is left.
