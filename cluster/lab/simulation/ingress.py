"""An ingress in the simulator: the production's fleet and router over virtual connections.

Owner of one ingress's fleet and router, like `cluster.ingress.Ingress`, without text and
HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.config.schema import RouterConfig
    from cluster.lab.simulation.client import VirtualClient
    from cluster.routing.tickets import TicketOffice
    from replicas.messages import EngineSnapshot

    OnSnapshot = Callable[[str, EngineSnapshot], None]
    OnDead = Callable[[str, str], None]


class VirtualIngress:
    """See the module docstring.

    Args:
        name: For the engines to tell ingresses apart.
        config: How requests are placed.
        make_client: Makes its connections; see `Fleet`.
        tickets: Begins transfers and seals their tickets.
        on_lost: Called with the incarnation of an engine that it has lost.
    """

    def __init__(
        self,
        name: str,
        config: RouterConfig,
        make_client: Callable[[OnSnapshot, OnDead], VirtualClient],
        tickets: TicketOffice,
        on_lost: Callable[[VirtualIngress, str], None],
    ) -> None:
        self.name = name

        def make_watched(on_snapshot: OnSnapshot, on_dead: OnDead) -> VirtualClient:
            def on_dead_or_lost(incarnation: str, reason: str) -> None:
                on_dead(incarnation, reason)
                on_lost(self, incarnation)

            return make_client(on_snapshot, on_dead_or_lost)

        self.fleet = Fleet(make_watched)
        self.router = Router(self.fleet, config, RouterMetrics("simulated"), tickets)
