"""An ingress in the simulator: the production's router and pool state over virtual connections.

Owner of one ingress's router, pool state and client, like `cluster.service.ClusterService`, without
text and HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.metrics import RouterMetrics
from cluster.pools import Member, PoolState
from cluster.router import Router
from cluster.simulation.client import VirtualClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.config.schema import RouterConfig
    from cluster.simulation.client import Observer
    from cluster.simulation.host import VirtualHost
    from cluster.simulation.network import Network
    from cluster.tickets import TicketOffice
    from replicas.messages import EngineSnapshot


class VirtualIngress:
    """See the module docstring.

    Args:
        name: For the engines to tell ingresses apart.
        config: How requests are placed.
        network: What carries its messages.
        observer: Who keeps the record.
        tickets: Begins transfers and seals their tickets.
        on_lost: Called with the incarnation of an engine that it has lost.
    """

    def __init__(
        self,
        name: str,
        config: RouterConfig,
        network: Network,
        observer: Observer,
        *,
        tickets: TicketOffice,
        on_lost: Callable[[VirtualIngress, str], None],
    ) -> None:
        self.name = name
        self.pools = PoolState()
        self.client = VirtualClient(name, network, observer, self._take_snapshot, self._lose)
        metrics = RouterMetrics("simulated")
        self.router = Router(self.client, self.pools, config, metrics, tickets)
        self._on_lost = on_lost

    def add(self, host: VirtualHost) -> None:
        """Take in a replica that discovery has found."""
        self.pools.add(Member(host.role, host.name, host.engine.description))
        self.client.connect(host)

    def _take_snapshot(self, incarnation: str, snapshot: EngineSnapshot) -> None:
        self.pools.take_snapshot(incarnation, snapshot)
        self.router.capacity_changed()

    def _lose(self, incarnation: str, _reason: str) -> None:
        self.pools.remove(incarnation)
        self.router.capacity_changed()
        self._on_lost(self, incarnation)
