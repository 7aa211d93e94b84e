"""Capacity: enough by queueing theory, no less for more work, and held against a queue itself."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.step_time import StepCosts
from cluster.scaling.capacity import (
    Engine,
    Objectives,
    decode_step_s,
    decoding_replicas,
    max_rows_in_objective,
    prompt_replicas,
)
from cluster.scaling.meter import DemandForecast

COSTS = StepCosts(
    decode_s=0.04, row_s=2e-4, context_token_s=1e-7, prompt_s=0.1, prompt_token_s=1e-4
)
ENGINE = Engine(dp_groups=8, slots_per_group=8)
OBJECTIVES = Objectives(ttft_s=3.0, tpot_s=0.1)

demands = st.builds(
    DemandForecast,
    requests_per_s=st.floats(0.0, 50.0),
    prompt_s=st.floats(0.01, 2.0),
    burstiness=st.floats(0.5, 20.0),
    output_tokens=st.floats(1.0, 500.0),
    context_tokens=st.floats(1.0, 8000.0),
    num_decoding=st.floats(0.0, 500.0),
    backlog_s=st.floats(0.0, 100.0),
)


def demand(**fields):
    return DemandForecast(
        **{
            "requests_per_s": 4.0, "prompt_s": 0.4, "burstiness": 1.0, "output_tokens": 100.0,
            "context_tokens": 1000.0, "num_decoding": 0.0, "backlog_s": 0.0, **fields,
        }
    )  # fmt: skip


@given(demands)
def test_replicas_keep_up_with_the_prompts(asked):
    count = prompt_replicas(asked, OBJECTIVES, horizon_s=60.0)
    assert count >= 1
    assert count >= asked.requests_per_s * asked.prompt_s + asked.backlog_s / 60.0


@given(
    demands,
    st.sampled_from(["requests_per_s", "prompt_s", "burstiness", "backlog_s"]),
    st.floats(1, 3),
)
def test_more_work_needs_no_fewer_replicas(asked, field, factor):
    more = asked._replace(**{field: getattr(asked, field) * factor})
    assert prompt_replicas(more, OBJECTIVES, horizon_s=60.0) >= prompt_replicas(
        asked, OBJECTIVES, horizon_s=60.0
    )


@given(demands)
def test_a_tighter_objective_needs_no_fewer_replicas(asked):
    tight = Objectives(ttft_s=1.0, tpot_s=0.05)
    assert prompt_replicas(asked, tight, horizon_s=60.0) >= prompt_replicas(
        asked, OBJECTIVES, horizon_s=60.0
    )
    assert max_rows_in_objective(asked, COSTS, ENGINE, tight) <= max_rows_in_objective(
        asked, COSTS, ENGINE, OBJECTIVES
    )


@given(demands)
def test_rows_keep_the_time_per_token_where_possible(asked):
    rows = max_rows_in_objective(asked, COSTS, ENGINE, OBJECTIVES)
    assert ENGINE.dp_groups <= rows <= ENGINE.dp_groups * ENGINE.slots_per_group
    if rows > ENGINE.dp_groups:
        assert decode_step_s(rows, asked, COSTS, ENGINE) <= OBJECTIVES.tpot_s


@given(demands)
def test_there_are_slots_for_all_decoding_sequences(asked):
    replicas = decoding_replicas(asked, COSTS, ENGINE, OBJECTIVES)
    rows = max_rows_in_objective(asked, COSTS, ENGINE, OBJECTIVES)
    step_s = decode_step_s(rows, asked, COSTS, ENGINE)
    assert replicas * rows >= asked.requests_per_s * asked.output_tokens * step_s * (1 - 1e-9)
    assert replicas * rows >= asked.num_decoding * (1 - 1e-9)


def test_decoding_and_prefill_share_a_pool():
    asked = demand()
    alone = prompt_replicas(asked, OBJECTIVES, horizon_s=60.0)
    assert prompt_replicas(asked, OBJECTIVES, horizon_s=60.0, taken=1.5) == pytest.approx(
        alone + 1.5, abs=1.0
    )


def test_no_demand_needs_one_replica():
    nothing = demand(requests_per_s=0.0)
    assert prompt_replicas(nothing, OBJECTIVES, horizon_s=60.0) == 1
    assert math.ceil(decoding_replicas(nothing, COSTS, ENGINE, OBJECTIVES)) == 0


@pytest.mark.parametrize("rate", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("refuses_late", [False, True])
def test_planned_replicas_keep_the_objective_in_a_simulated_queue(rate, refuses_late):
    """Poisson arrivals, exponential service: no more are late than are planned with, about."""
    rng = np.random.Generator(np.random.Philox(3))
    asked = demand(requests_per_s=rate, prompt_s=0.5, burstiness=2.0)
    servers = prompt_replicas(asked, OBJECTIVES, horizon_s=60.0, refuses_late=refuses_late)

    def late_share(num_servers):
        arrivals_s = np.cumsum(rng.exponential(1.0 / rate, 20_000))
        free_s = [0.0] * num_servers
        late = 0
        for at_s, service_s in zip(arrivals_s, rng.exponential(0.5, arrivals_s.size), strict=True):
            begin_s = max(at_s, free_s[0])
            is_late = begin_s - at_s > OBJECTIVES.ttft_s - 0.5
            late += is_late
            if not (is_late and refuses_late):
                heapq.heapreplace(free_s, begin_s + service_s)
        return late / arrivals_s.size

    assert late_share(servers) <= 0.06
    # Those that refuse might get by with less than all that comes; that is never planned.
    if servers > 1 and not (refuses_late and servers - 1 <= rate * 0.5):
        assert late_share(servers - 1) > 0.03


@given(demands)
def test_fewer_replicas_suffice_if_late_requests_are_refused(asked):
    refusing = prompt_replicas(asked, OBJECTIVES, horizon_s=60.0, refuses_late=True)
    assert refusing <= prompt_replicas(asked, OBJECTIVES, horizon_s=60.0)
    assert refusing >= asked.requests_per_s * asked.prompt_s
