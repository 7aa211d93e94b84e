"""The number of replicas that each pool should have now: one pure policy for an application.

The caller passes the time and the ingresses' counters. A replica that is started now takes requests
only after its cold start, so the policy uses the demand forecast for that time. It adds replicas at
once. It removes one only after fewer replicas sufficed for a whole cold start: starting and
stopping then costs at most twice as much as in an optimal schedule. Removed replicas drain, so
their requests do not matter here.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cluster.scaling.capacity import Engine, Objectives, decoding_replicas, prompt_replicas
from cluster.scaling.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.routing.step_time import StepCosts
    from cluster.routing.traffic import Traffic
    from cluster.scaling.meter import DemandForecast
    from replicas.config import Role

DECISION_INTERVAL_S = 10.0
"""Seconds between decisions: Serve's default interval for the reports of replicas."""
_HISTORY_COLD_STARTS = 3.0
"""Length of the demand history, in cold starts."""
_RECENT_S = 2.0 * DECISION_INTERVAL_S
_MIN_COLD_START_S = 60.0
"""Shorter cold starts count as this long where demand is averaged over a cold start."""


class Pool(NamedTuple):
    """The present state of a pool.

    Attributes:
        num_replicas: Present target: replicas that take requests or start.
        min_replicas: Smallest target.
        max_replicas: Largest target.
        engine: The engine of each replica.
        cold_start_s: Seconds from the decision to add a replica until it takes requests.
    """

    num_replicas: int
    min_replicas: int
    max_replicas: int
    engine: Engine
    cold_start_s: float


class Autoscaler:
    """The autoscaling policy of one application, with its demand history.

    Args:
        objectives: Latencies that the replicas have to keep.
    """

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._meter: Meter | None = None
        self._needed: dict[Role, deque[tuple[float, int]]] = {}

    def decide(
        self,
        now_s: float,
        counted: Mapping[str, Traffic],
        costs: StepCosts,
        pools: Mapping[Role, Pool],
        *,
        refuses_late: bool = False,
    ) -> dict[Role, int]:
        """Return the number of replicas that each pool should have.

        Args:
            now_s: Time on a monotonic clock.
            counted: Counters by ingress; a name is never reused.
            costs: Costs of the parts of a step, as learned so far.
            pools: Either `prefill` and `decode`, or `both`; the same ones in each call.
            refuses_late: Whether ingresses refuse requests that would miss the objective for the
                time to a first token.
        """
        cold_start_s = max(pool.cold_start_s for pool in pools.values())
        if self._meter is None:
            self._meter = Meter(
                _HISTORY_COLD_STARTS * max(cold_start_s, _MIN_COLD_START_S), _RECENT_S
            )
        self._meter.observe(now_s, counted)
        demand = self._meter.demand(cold_start_s, costs)
        targets: dict[Role, int] = {}
        for role, pool in pools.items():
            needed = pool.num_replicas
            if demand is not None:
                needed = self._replicas(role, pool, demand, costs, refuses_late=refuses_late)
            held = self._max_needed_within(role, now_s, needed, pool.cold_start_s)
            targets[role] = min(max(held, pool.min_replicas), pool.max_replicas)
        return targets

    def _replicas(
        self,
        role: Role,
        pool: Pool,
        demand: DemandForecast,
        costs: StepCosts,
        *,
        refuses_late: bool,
    ) -> int:
        """Return the replicas of a role that the demand needs."""
        horizon_s = max(pool.cold_start_s, _MIN_COLD_START_S)
        taken = 0.0
        if role != "prefill":
            taken = decoding_replicas(demand, costs, pool.engine, self._objectives)
        if role == "decode":
            return math.ceil(taken)
        return prompt_replicas(
            demand, self._objectives, horizon_s=horizon_s, taken=taken, refuses_late=refuses_late
        )

    def _max_needed_within(self, role: Role, now_s: float, needed: int, hold_s: float) -> int:
        """Return the largest number needed within the last `hold_s` seconds."""
        kept = self._needed.setdefault(role, deque())
        # A later entry that is as large makes these irrelevant.
        while kept and kept[-1][1] <= needed:
            kept.pop()
        kept.append((now_s, needed))
        while kept[0][0] < now_s - hold_s:
            kept.popleft()
        return kept[0][1]
