"""Which replicas run, as Ray Serve would tell the ingresses of a simulated cluster.

Owner of the map from incarnation to host. A replica's actor answers although its engine stands
still; one that is cut off does not, and whoever asks waits for it in vain.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.routing.fleet import DESCRIBE_TIMEOUT_S
from cluster.routing.pools import Member

if TYPE_CHECKING:
    from cluster.lab.simulation.host import VirtualHost


class VirtualDirectory:
    """A `Discovery`; see the module docstring.

    Args:
        num_wanted: How many replicas there should be.
        latency_s: From an ingress to a replica's actor.

    Attributes:
        hosts: Every host that lives, by incarnation, in the order of their starts.
    """

    def __init__(self, num_wanted: int, latency_s: float) -> None:
        self.hosts: dict[str, VirtualHost] = {}
        self._num_wanted = num_wanted
        self._latency_s = latency_s
        self._members: dict[str, Member] = {}

    def attach(self, host: VirtualHost) -> None:
        """A replica has started."""
        self.hosts[host.incarnation] = host
        self._members[host.incarnation] = Member(host.role, host.name, host.engine.description)

    def detach(self, host: VirtualHost) -> None:
        """A replica has died."""
        del self.hosts[host.incarnation], self._members[host.incarnation]

    async def find(self) -> list[Member]:
        """See `Discovery`."""
        answering = [i for i, host in self.hosts.items() if not host.is_cut]
        is_whole = len(answering) == len(self.hosts)
        await asyncio.sleep(2 * self._latency_s if is_whole else DESCRIBE_TIMEOUT_S)
        # Who has died meanwhile has answered before.
        return [self._members[i] for i in answering if i in self._members]

    async def num_wanted(self) -> int:
        """See `Discovery`."""
        return self._num_wanted
