"""How many replicas a demand needs, by queueing theory. Pure.

Prompts wait for one of c engines that compute them one after another: a queue with c servers. The
share that waits is that of Sakasegawa (1977), and their waits fall off exponentially, with a rate
that burstiness lowers (Kingman's heavy traffic limit). Where who would be late is refused as it
comes, the others do not wait for it: then fewer are refused than would be late (De Kok and Tijms
1985: exact for M/G/1 and for M/M/c). Sequences that decode at a time are requests per second times
how long each decodes (Little's law), and how long that is follows from how many a replica steps
together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.routing.step_time import StepCosts
    from cluster.scaling.meter import Demand

_LATE_SHARE = 0.05
"""Of first tokens, how many may be later than the objective."""
_FULL = 0.9
"""Share of an objective, or of the slots, that is planned with: the rest is for what is not."""
_DEVIATIONS = 1.5
"""Of sequences that decode at a time, which there is room for beyond their mean."""
_MOST = 10_000


class Objectives(NamedTuple):
    """What a cluster is scaled for.

    Attributes:
        ttft_s: Seconds that a first token may take.
        tpot_s: Seconds that each further token may take in the mean.
    """

    ttft_s: float
    tpot_s: float


class Engine(NamedTuple):
    """What decides how many sequences a replica decodes together.

    Attributes:
        dp_groups: DP groups, which step together.
        slots_per_group: Of each.
    """

    dp_groups: int
    slots_per_group: int


def decoding_replicas(
    demand: Demand, costs: StepCosts, engine: Engine, objectives: Objectives
) -> float:
    """Replicas that decode what is asked, not rounded."""
    rows = rows_within(demand, costs, engine, objectives)
    step_s = step_of(rows, demand, costs, engine)
    expected = demand.requests_per_s * demand.output_tokens * step_s
    expected += _DEVIATIONS * math.sqrt(expected * max(demand.burstiness, 1.0))
    # What is there already has to end somewhere.
    return max(expected, demand.num_decoding) / rows


def rows_within(demand: Demand, costs: StepCosts, engine: Engine, objectives: Objectives) -> int:
    """Sequences that a replica decodes together within the objective; at least one per group."""
    for rows_per_group in range(max(int(_FULL * engine.slots_per_group), 1), 1, -1):
        rows = rows_per_group * engine.dp_groups
        if step_of(rows, demand, costs, engine) <= _FULL * objectives.tpot_s:
            return rows
    return engine.dp_groups


def step_of(rows: int, demand: Demand, costs: StepCosts, engine: Engine) -> float:
    """Seconds of a step of so many sequences of the mean length, spread over the groups."""
    per_group = math.ceil(rows / engine.dp_groups)
    return costs.decode_step_s(per_group, per_group * demand.context_tokens, demand.context_tokens)


def prompt_replicas(
    demand: Demand,
    objectives: Objectives,
    *,
    horizon_s: float,
    taken: float = 0.0,
    refuses_late: bool = False,
) -> int:
    """Replicas that compute the prompts that are asked, early enough.

    Args:
        demand: What is asked.
        objectives: The time to a first token.
        horizon_s: Within how long what waits now is to be computed.
        taken: Replicas' worth of time that goes to something else, for one decoding.
        refuses_late: Whether requests that would be late are refused as they come.
    """
    offered = demand.requests_per_s * demand.prompt_s + demand.backlog_s / horizon_s
    # A prompt that is late on an idle replica is late on all of them: then waiting must be short.
    slack_s = max(objectives.ttft_s - demand.prompt_s, objectives.ttft_s / 4.0)
    least = max(math.ceil(taken), 1)
    for num_replicas in range(least, _MOST):
        servers = num_replicas - taken
        if servers <= offered:
            continue
        share = _waiting_share(offered, servers, demand, slack_s)
        if refuses_late:
            idle = 1.0 - offered / servers
            share = idle * share / (1.0 - (1.0 - idle) * share)
        if share <= _LATE_SHARE:
            return num_replicas
    return _MOST


def _waiting_share(offered: float, servers: float, demand: Demand, slack_s: float) -> float:
    """Share of requests that wait longer than `slack_s` for one of so many servers."""
    if not offered or not demand.prompt_s:
        return 0.0
    used = offered / servers
    share: float = used ** (math.sqrt(2.0 * (servers + 1.0)) - 1.0)
    # Half: of arrivals and of service each one half, and both are in the variance of work.
    rate = servers * (1.0 - used) / (demand.prompt_s * demand.burstiness / 2.0)
    return share * math.exp(-rate * slack_s)
