"""How many replicas each pool should have now: one pure policy for a whole application.

Owner: whoever scales the application; it tells the time, and what ingresses have counted.
A replica that is started now computes only after its cold start, so demand is looked at that far
ahead. One more is started at once, one less is let go only when none was needed for as long as it
takes to start one: starting and stopping then costs at most twice what knowing the future would.
Whether a replica that goes has requests is not looked at here: it drains.
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
    from cluster.scaling.meter import Demand
    from replicas.config import Role

LOOK_S = 10.0
"""How often to decide: as often as Serve's replicas report where nothing else is configured."""
_WINDOWS = 3.0
"""Cold starts that demand is looked back at, to see where it goes."""
_RECENT_S = 2.0 * LOOK_S
_SHORTEST_S = 60.0
"""A cold start that is shorter is taken as this long where a mean is taken over it."""


class Pool(NamedTuple):
    """A pool as it is now.

    Attributes:
        num_replicas: Wanted so far: those that take requests, and those that start.
        least: Replicas that it never has less than.
        most: Replicas that it never has more than.
        engine: Of each replica.
        cold_start_s: From when one is wanted until it takes requests.
    """

    num_replicas: int
    least: int
    most: int
    engine: Engine
    cold_start_s: float


class Autoscaler:
    """See the module docstring.

    Args:
        objectives: What the replicas have to keep.
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
        """How many replicas each pool should have.

        Args:
            now_s: On any clock that does not go back.
            counted: By ingress, a name that is never given again.
            costs: Of the parts of a step, as far as anybody knows.
            pools: Either `prefill` and `decode`, or `both`; the same ones each time.
            refuses_late: Whether ingresses refuse who would miss the time to a first token.
        """
        cold_start_s = max(pool.cold_start_s for pool in pools.values())
        if self._meter is None:
            self._meter = Meter(_WINDOWS * max(cold_start_s, _SHORTEST_S), _RECENT_S)
        self._meter.look(now_s, counted)
        demand = self._meter.demand(cold_start_s, costs)
        targets: dict[Role, int] = {}
        for role, pool in pools.items():
            needed = pool.num_replicas
            if demand is not None:
                needed = self._replicas(role, pool, demand, costs, refuses_late=refuses_late)
            held = self._hold(role, now_s, needed, pool.cold_start_s)
            targets[role] = min(max(held, pool.least), pool.most)
        return targets

    def _replicas(
        self, role: Role, pool: Pool, demand: Demand, costs: StepCosts, *, refuses_late: bool
    ) -> int:
        """What a demand needs of a role."""
        horizon_s = max(pool.cold_start_s, _SHORTEST_S)
        taken = 0.0
        if role != "prefill":
            taken = decoding_replicas(demand, costs, pool.engine, self._objectives)
        if role == "decode":
            return math.ceil(taken)
        return prompt_replicas(
            demand, self._objectives, horizon_s=horizon_s, taken=taken, refuses_late=refuses_late
        )

    def _hold(self, role: Role, now_s: float, needed: int, hold_s: float) -> int:
        """The most that was needed within a time."""
        kept = self._needed.setdefault(role, deque())
        # Those that a later and larger one stands for are of no use any more.
        while kept and kept[-1][1] <= needed:
            kept.pop()
        kept.append((now_s, needed))
        while kept[0][0] < now_s - hold_s:
            kept.popleft()
        return kept[0][1]
