"""The number of replicas that a demand needs, by queueing theory. Pure.

Prefill: c engines compute prompts one after another, so prompts wait in a queue with c servers. The
share of prompts that wait is Sakasegawa's (1977). Waits fall off exponentially, at a rate that
burstiness lowers (Kingman's heavy traffic limit). Where ingresses refuse late requests on arrival,
the others do not wait for these, so fewer are refused than would otherwise be late (De Kok and
Tijms 1985: exact for M/G/1 and for M/M/c).

Decode: the sequences that decode at a time are requests per second times the decode time of each
(Little's law). The decode time follows from the sequences that a replica steps together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.routing.step_time import StepCosts
    from cluster.scaling.meter import DemandForecast

_LATE_SHARE = 0.05
"""Share of first tokens that may miss the objective."""
_PLANNED_SHARE = 0.9
"""Share of an objective, or of the slots, that plans use: the rest is a margin for model errors."""
_HEADROOM_DEVIATIONS = 1.5
"""Standard deviations of the number of decoding sequences for which to reserve slots."""
_MAX_REPLICAS = 10_000


class Objectives(NamedTuple):
    """The latency objectives that a cluster is scaled for.

    Attributes:
        ttft_s: Seconds to a request's first token.
        tpot_s: Mean seconds of each further token.
    """

    ttft_s: float
    tpot_s: float


class Engine(NamedTuple):
    """The decode slots of a replica.

    Attributes:
        dp_groups: DP groups, which step together.
        slots_per_group: Decode slots of each group.
    """

    dp_groups: int
    slots_per_group: int


def decoding_replicas(
    demand: DemandForecast, costs: StepCosts, engine: Engine, objectives: Objectives
) -> float:
    """Return the replicas that the demand needs for decoding, not rounded."""
    rows = max_rows_in_objective(demand, costs, engine, objectives)
    step_s = decode_step_s(rows, demand, costs, engine)
    expected = demand.requests_per_s * demand.output_tokens * step_s
    expected += _HEADROOM_DEVIATIONS * math.sqrt(expected * max(demand.burstiness, 1.0))
    # Sequences that decode already need their slots until they end.
    return max(expected, demand.num_decoding) / rows


def max_rows_in_objective(
    demand: DemandForecast, costs: StepCosts, engine: Engine, objectives: Objectives
) -> int:
    """Return the sequences that a replica may decode within the objective, at least one a group."""
    for rows_per_group in range(max(int(_PLANNED_SHARE * engine.slots_per_group), 1), 1, -1):
        rows = rows_per_group * engine.dp_groups
        if decode_step_s(rows, demand, costs, engine) <= _PLANNED_SHARE * objectives.tpot_s:
            return rows
    return engine.dp_groups


def decode_step_s(rows: int, demand: DemandForecast, costs: StepCosts, engine: Engine) -> float:
    """Return the seconds of a step with `rows` sequences of mean length, spread over the groups."""
    per_group = math.ceil(rows / engine.dp_groups)
    return costs.decode_step_s(per_group, per_group * demand.context_tokens, demand.context_tokens)


def prompt_replicas(
    demand: DemandForecast,
    objectives: Objectives,
    *,
    horizon_s: float,
    taken: float = 0.0,
    refuses_late: bool = False,
) -> int:
    """Return the replicas that compute the prompts within the objective.

    Args:
        demand: The demand to serve.
        objectives: Has the objective for the time to a first token.
        horizon_s: Seconds within which the present backlog has to be computed.
        taken: Replicas' worth of time that is used for other work, such as decoding.
        refuses_late: Whether requests that would be late are refused on arrival.
    """
    offered = demand.requests_per_s * demand.prompt_s + demand.backlog_s / horizon_s
    # A prompt that is late even on an idle replica cannot be helped: then keep its wait short.
    slack_s = max(objectives.ttft_s - demand.prompt_s, objectives.ttft_s / 4.0)
    least = max(math.ceil(taken), 1)
    for num_replicas in range(least, _MAX_REPLICAS):
        servers = num_replicas - taken
        if servers <= offered:
            continue
        share = _waiting_share(offered, servers, demand, slack_s)
        if refuses_late:
            idle = 1.0 - offered / servers
            share = idle * share / (1.0 - (1.0 - idle) * share)
        if share <= _LATE_SHARE:
            return num_replicas
    return _MAX_REPLICAS


def _waiting_share(offered: float, servers: float, demand: DemandForecast, slack_s: float) -> float:
    """Return the share of requests that wait longer than `slack_s` for one of the servers."""
    if not offered or not demand.prompt_s:
        return 0.0
    used = offered / servers
    share: float = used ** (math.sqrt(2.0 * (servers + 1.0)) - 1.0)
    # Kingman's formula halves the sum of the variances of arrivals and of service. `burstiness`,
    # a variance of work, contains both.
    rate = servers * (1.0 - used) / (demand.prompt_s * demand.burstiness / 2.0)
    return share * math.exp(-rate * slack_s)
