"""Ray Serve's side of autoscaling: the reports of ingresses and replicas, and the policy.

Serve's controller calls the application's policy with one context for each scalable deployment. It
then starts or drains replicas to match the returned counts. The deployed file names the policy in
`applications[0].autoscaling_policy`, and a pool is scaled up to its `max_replicas`. The ingress is
scalable too, with equal bounds, because Serve collects reports of scalable deployments only.

The controller's process owns one `Autoscaler`. A new controller starts without history and changes
nothing before requests have arrived and ended.
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
"""Older reports are ignored: their replica does not answer."""


def ingress_report(router: Router) -> dict[str, float]:
    """Return an ingress's report: its counters, the step costs it learned, its refusal limit."""
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
    """Return a pool replica's report.

    Args:
        description: The description of its engine.
        cold_start_s: Seconds from the start of its actor until it took requests.
    """
    return {
        _DP_GROUPS: float(description.dp_groups),
        _SLOTS: float(description.slots_per_group),
        _COLD_START_S: cold_start_s,
    }


class ApplicationPolicy:
    """The autoscaling policy that Serve creates once and calls several times a second.

    Args:
        ttft_s: Objective for the time to a first token; None only keeps queues from growing.
        tpot_s: Objective for the mean time of each further token; None for no objective.
    """

    def __init__(self, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
        self._ttft_s = ttft_s or math.inf
        self._autoscaler = Autoscaler(Objectives(self._ttft_s, tpot_s or math.inf))
        self._looked_s = -math.inf

    def __call__(
        self, contexts: Mapping[DeploymentID, AutoscalingContext]
    ) -> tuple[dict[DeploymentID, int], dict[DeploymentID, dict[str, Any]]]:
        """Return the replicas of each pool; other deployments keep theirs."""
        counted: dict[str, Traffic] = {}
        # The interval of the ingresses' reports. A reading between two reports sees no arrivals.
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
                # All ingresses learn from the same engines: use the costs with the most samples.
                # An ingress of the previous version does not report their number.
                num_learned = values.get(_LEARNED, 0.0)
                if num_learned > most_learned:
                    costs = StepCosts(**_with_prefix(values, _COST))
                    most_learned = num_learned
        now_s = time.monotonic()  # Contexts have wall-clock time, which may be adjusted.
        if not pools or not counted or now_s - self._looked_s < interval_s:
            # Serve keeps the counts of deployments that are not in the result.
            return {}, {}
        self._looked_s = now_s
        targets = self._autoscaler.decide(now_s, counted, costs, pools, refuses_late=refuses_late)
        return {ids[role]: count for role, count in targets.items()}, {}


_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "both": "both"}
"""Role of each deployment that is a pool, by the deployment's name."""


def _pool(context: AutoscalingContext) -> Pool | None:
    """Return a pool's state; None until one of its replicas, which are all equal, has reported."""
    latest = _latest(context, _COLD_START_S)
    if not latest:
        return None
    values = next(iter(latest.values()))
    return Pool(
        context.target_num_replicas,
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
        Engine(int(values[_DP_GROUPS]), int(values[_SLOTS])),
        # Use the slowest: a new host has no compiled kernels on its disk yet.
        max(values[_COLD_START_S] for values in latest.values()),
    )


def _latest(context: AutoscalingContext, needed: str) -> dict[ReplicaID, dict[str, float]]:
    """Return each replica's latest values, if they are recent and contain `needed`."""
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
