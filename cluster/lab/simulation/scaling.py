"""Runs an autoscaling policy in the simulator, every few virtual seconds, as Ray Serve does.

The policy is the production's, an oracle, or Serve's own.
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
    """The input of an autoscaling policy.

    Attributes:
        now_s: Virtual time.
        counted: Counters of each ingress, by name.
        costs: Step costs, as learned by an ingress.
        num_replicas: Present target of each pool.
    """

    now_s: float
    counted: dict[str, Traffic]
    costs: StepCosts
    num_replicas: dict[Role, int]


class Scaler(Protocol):
    """An autoscaling policy.

    Attributes:
        interval_s: Seconds between decisions.
    """

    interval_s: float

    def decide(self, seen: ClusterObservation) -> Mapping[Role, int]:
        """Return the replicas that each pool should have; pools left out stay as they are."""
        ...


class ScalingLoop:
    """The periodic calls of an autoscaling policy."""

    def __init__(
        self, scaler: Scaler, replicas: SimulatedReplicas, ingresses: Ingresses, loop: VirtualLoop
    ) -> None:
        self._scaler = scaler
        self._replicas = replicas
        self._ingresses = ingresses
        self._loop = loop

    def start(self) -> None:
        """Apply the policy now, and again after each interval."""
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
