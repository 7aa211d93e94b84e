"""An ingress in the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.lab.simulation.client import VirtualClient
    from cluster.routing.fleet import Fleet
    from cluster.routing.router import Router


class VirtualIngress(NamedTuple):
    """The production's fleet and router over virtual connections, without text and HTTP."""

    name: str
    fleet: Fleet[VirtualClient]
    router: Router
