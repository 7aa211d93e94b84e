"""Ray Serve's side of autoscaling: what ingresses and replicas report, and the policy Serve calls.

Serve's controller calls the application's policy with one context for each deployment that may be
scaled, and does with the counts what it does with any: it starts replicas, or lets some drain. The
file that is deployed names it, `applications[0].autoscaling_policy`; which pools are scaled, and
how far, their `max_replicas` say. The ingress is among the deployments, with bounds that are equal:
only then does Serve collect what it reports.

Owner: the controller's process, of one `Autoscaler`. A new controller begins anew and changes
nothing before it has seen requests come and end.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from cluster.routing.step_time import StepCosts
from cluster.routing.traffic import Traffic
from cluster.scaling.capacity import Engine, Objectives
from cluster.scaling.policy import DECISION_INTERVAL_S, Autoscaler, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve._private.common import DeploymentID, ReplicaID, TimeSeries
    from ray.serve.config import AutoscalingContext

    from cluster.routing.router import Router
    from replicas.config import Role
    from replicas.messages import EngineDescription

_TRAFFIC, _COST = "traffic_", "cost_"
_LEARNED = "steps_learned"
_REFUSED_S = "refused_after_s"
_DP_GROUPS, _SLOTS, _COLD_START_S = "dp_groups", "slots_per_group", "cold_start_s"
_OLDEST_S = 60.0
"""A report that is older is of a replica that does not answer."""


def ingress_report(router: Router) -> dict[str, float]:
    """What an ingress tells the controller: what it counted, learned of steps, and refuses."""
    pools, admission = router.fleet.pools, router.config.admission
    traffic, costs = router.traffic.as_dict(), pools.pool_costs._asdict()
    refused_s = None if admission is None else admission.ttft_s
    return {
        **({} if refused_s is None else {_REFUSED_S: refused_s}),
        _LEARNED: float(pools.num_steps_learned),
        **{_TRAFFIC + name: value for name, value in traffic.items()},
        **{_COST + name: value for name, value in costs.items()},
    }


def replica_report(description: EngineDescription, cold_start_s: float) -> dict[str, float]:
    """What a replica of a pool tells the controller.

    Args:
        description: Of its engine.
        cold_start_s: From the start of its actor until it took requests.
    """
    return {
        _DP_GROUPS: float(description.dp_groups),
        _SLOTS: float(description.slots_per_group),
        _COLD_START_S: cold_start_s,
    }


class ApplicationPolicy:
    """See the module docstring; Serve makes it once, and calls it some times a second.

    Args:
        ttft_s: Seconds that a first token may take; None: no matter, as long as none waits longer
            and longer.
        tpot_s: Seconds that each further token may take in the mean; None: no matter.
    """

    def __init__(self, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
        self._ttft_s = ttft_s or math.inf
        self._autoscaler = Autoscaler(Objectives(self._ttft_s, tpot_s or math.inf))
        self._looked_s = -math.inf

    def __call__(
        self, contexts: Mapping[DeploymentID, AutoscalingContext]
    ) -> tuple[dict[DeploymentID, int], dict[DeploymentID, dict[str, Any]]]:
        """Replicas of each pool; every other deployment is left as it is."""
        counted: dict[str, Traffic] = {}
        # How often ingresses report. A look between two reports would see no arrivals.
        interval_s = DECISION_INTERVAL_S
        costs, most_learned, refuses_late = StepCosts(), 0.0, True
        pools: dict[Role, Pool] = {}
        ids: dict[Role, DeploymentID] = {}
        for deployment, context in contexts.items():
            role = _ROLES.get(deployment.name)
            if role is not None:
                pool = _pool(context)
                if pool is not None:
                    pools[role], ids[role] = pool, deployment
                continue
            if context.config is not None:
                interval_s = context.config.metrics_interval_s
            for replica, values in _latest(context, f"{_TRAFFIC}came").items():
                counted[replica.unique_id] = Traffic(**_with_prefix(values, _TRAFFIC))
                refuses_late &= values.get(_REFUSED_S, math.inf) <= self._ttft_s < math.inf
                # They all look at the same engines: whoever has seen most of them knows best.
                # One of the version before does not say how many.
                num_learned = values.get(_LEARNED, 0.0)
                if num_learned > most_learned:
                    costs = StepCosts(**_with_prefix(values, _COST))
                    most_learned = num_learned
        now_s = time.monotonic()  # Contexts have the wall's time, which may be set.
        if not pools or not counted or now_s - self._looked_s < interval_s:
            # Serve keeps the counts of whom the policy does not name.
            return {}, {}
        self._looked_s = now_s
        targets = self._autoscaler.decide(now_s, counted, costs, pools, refuses_late=refuses_late)
        return {ids[role]: count for role, count in targets.items()}, {}


_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "both": "both"}
"""Of the deployments that are pools, by name."""


def _pool(context: AutoscalingContext) -> Pool | None:
    """A pool, once one of its replicas has reported: they are all alike."""
    latest = _latest(context, _COLD_START_S)
    if not latest:
        return None
    values = next(iter(latest.values()))
    return Pool(
        context.target_num_replicas,
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
        Engine(int(values[_DP_GROUPS]), int(values[_SLOTS])),
        # The slowest: some find compiled kernels on disk, and a new host does not.
        max(values[_COLD_START_S] for values in latest.values()),
    )


def _latest(context: AutoscalingContext, needed: str) -> dict[ReplicaID, dict[str, float]]:
    """What each replica reported last, if that is not long ago and has what is needed."""
    found: dict[ReplicaID, dict[str, float]] = {}
    series: Mapping[ReplicaID, TimeSeries]
    for name, series in (context.raw_metrics or {}).items():
        for replica, values in series.items():
            if values and values[-1].timestamp > (context.current_time or 0.0) - _OLDEST_S:
                found.setdefault(replica, {})[name] = values[-1].value
    return {replica: values for replica, values in found.items() if needed in values}


def _with_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
