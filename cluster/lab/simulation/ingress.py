"""An ingress in the simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from cluster.lab.simulation.client import VirtualClient
    from cluster.routing.fleet import Fleet
    from cluster.routing.router import Router


@dataclass(slots=True, eq=False)
class VirtualIngress:
    """The production's fleet and router over virtual connections, without text and HTTP.

    Attributes:
        name: Name of this start of the ingress.
        tasks: The tasks of its process: its requests and its discovery.
        is_alive: Whether its process exists.
    """

    name: str
    fleet: Fleet[VirtualClient]
    router: Router
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_alive: bool = True

    def run(self, task: asyncio.Task[None]) -> None:
        """Add a task, which is cancelled when the process ends."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def die(self) -> None:
        """End the process at once; it sends nothing more."""
        self.is_alive = False
        self.fleet.client.die()
        self.fleet.close()
        for task in self.tasks:
            task.cancel()
