"""Lets a policy say how many replicas each pool has, as Ray Serve lets one.

Owner of the looks at the cluster, every few virtual seconds. The policy is the production's, an
oracle, or Serve's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from cluster.routing.step_time import StepCosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.lab.simulation.ingresses import Ingresses
    from cluster.lab.simulation.loop import VirtualLoop
    from cluster.lab.simulation.simulated_replicas import SimulatedReplicas
    from cluster.routing.traffic import Traffic
    from replicas.config import Role


class ClusterObservation(NamedTuple):
    """What a policy is shown.

    Attributes:
        now_s: Virtual seconds.
        counted: What each ingress has counted, by name.
        costs: What steps cost, as an ingress has learned.
        num_replicas: Of each pool, wanted so far.
    """

    now_s: float
    counted: dict[str, Traffic]
    costs: StepCosts
    num_replicas: dict[Role, int]


class Scaler(Protocol):
    """Says how many replicas each pool should have.

    Attributes:
        interval_s: How often it is asked.
    """

    interval_s: float

    def decide(self, seen: ClusterObservation) -> Mapping[Role, int]:
        """Replicas that each pool should have from now on; one not named stays as it is."""
        ...


class ScalingLoop:
    """See the module docstring."""

    def __init__(
        self, scaler: Scaler, replicas: SimulatedReplicas, ingresses: Ingresses, loop: VirtualLoop
    ) -> None:
        self._scaler = scaler
        self._replicas = replicas
        self._ingresses = ingresses
        self._loop = loop

    def start(self) -> None:
        """Look for the first time, and then again and again."""
        alive = self._ingresses.alive
        seen = ClusterObservation(
            self._loop.time(),
            {ingress.name: ingress.router.traffic for ingress in alive},
            alive[0].fleet.pools.pool_costs if alive else StepCosts(),
            {role: self._replicas.num_replicas(role) for role in self._replicas.roles},
        )
        for role, count in self._scaler.decide(seen).items():
            self._replicas.scale(role, count)
        self._loop.call_later(self._scaler.interval_s, self.start)
