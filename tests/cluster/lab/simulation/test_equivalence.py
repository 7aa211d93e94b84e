"""Two ways to one result: steps passed over at once or one by one."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cluster.config.schema import OrderName, PolicyName
from cluster.lab.workloads.request import TraceRequest, Workload
from kv_transfer.config import TransferConfig
from replicas.generators.simulated.timing import LinkTiming, MeshTiming
from tests.cluster.lab.simulation.clusters import (
    BLOCK_SIZE,
    pool,
    requests,
    simulate,
    simulation,
)

MESH = MeshTiming(
    block_size=BLOCK_SIZE,
    prefill_token_s=7.3e-5,
    prefill_token_pair_s=1.1e-8,
    decode_base_s=0.0173,
    context_token_s=3.7e-6,
    prefill_lanes_s=0.0011,
    decode_lanes_s=0.0007,
    compile_s=0.0,
    host_s=0.00103,
    host_row_s=2.1e-5,
    bytes_per_token=1000,
    link=LinkTiming(0.0002, 12.5e9),
)
"""Times that no sum of others ever meets."""

ROOT = Path(__file__).parents[4]
SECONDS = st.floats(0.0, 1.5, allow_subnormal=False)


@st.composite
def workloads(draw):
    """Some begin alike; a prompt that is too long may be among them."""
    rows = []
    now_s = 0.0
    for _ in range(draw(st.integers(1, 15))):
        now_s += draw(st.one_of(st.just(0.0), SECONDS, SECONDS.map(lambda s: s / 50)))
        blocks = tuple(draw(st.integers(0, 2)) for _ in range(draw(st.integers(0, 4))))
        num_prompt = draw(st.one_of(st.integers(1, 120), st.just(600)))
        rows.append(TraceRequest(now_s, num_prompt, draw(st.integers(1, 120)), blocks))
    return Workload("drawn", tuple(rows), BLOCK_SIZE)


@st.composite
def pools(draw, roles):
    return [draw(pool_of(role)) for role in roles]


@st.composite
def pool_of(draw, role):
    lanes = draw(st.integers(1, 2))
    spec = pool(
        role,
        draw(st.integers(1, 3)),
        MESH,
        num_blocks=draw(st.sampled_from([9, 14, 33])),
        max_model_len=256,
        tt_data_parallel=lanes,
        max_batch_size=lanes * draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from([16, 64, 512])),
        enable_prefix_caching=draw(st.booleans()),
        reservation_timeout_s=draw(st.sampled_from([120.0, 0.7])),
    )
    chunk_bytes = draw(st.sampled_from([1, 2**20]))
    return spec._replace(
        transfer=TransferConfig(chunk_bytes=chunk_bytes, window_bytes=2000),
        facts=msgspec.structs.replace(spec.facts, supports_async_decode=draw(st.booleans())),
    )


@st.composite
def options(draw, workload):
    numbers = st.integers(0, len(workload.requests) - 1)
    return {
        "ingresses": draw(st.integers(1, 3)),
        "router": {
            "policy": draw(st.sampled_from(get_args(PolicyName))),
            "order": draw(st.sampled_from(get_args(OrderName))),
            "max_queued_requests": draw(st.sampled_from([256, 2])),
            "queue_timeout_s": draw(st.sampled_from([60.0, 1.3])),
        },
        "aborts": draw(st.dictionaries(numbers, SECONDS, max_size=4)),
        "network": {"latency_s": draw(st.sampled_from([0.000113, 0.0, 0.0217]))},
    }


def run(spec, workload, **more):
    one = simulation(spec, workload, keeps_events=False, **more)
    return one, one.run()


def assert_equal(ahead, plain):
    """Every record, bit for bit; tokens too. An aborted client may have got other ones."""
    (one, found), (other, right) = ahead, plain
    for record, expected in zip(found.records, right.records, strict=True):
        for name in record.__struct_fields__:
            if record.outcome == "aborted" and name in ("token_times_s", "num_cached_tokens"):
                continue
            got, want = getattr(record, name), getattr(expected, name)
            assert np.array_equal(got, want), f"{record.request_id}.{name}: {got} != {want}"
        if record.outcome != "aborted":
            tokens = one.recorder.outputs[record.request_id]
            assert tokens == other.recorder.outputs[record.request_id]
    assert found.duration_s == right.duration_s
    if any(host.core.is_working for host in one.replicas.hosts):
        return  # The last client left, and nobody waited for what its engine was doing.
    for replica, expected in zip(found.replicas, right.replicas, strict=True):
        for name in replica.__struct_fields__:
            got, want = getattr(replica, name), getattr(expected, name)
            if name in ("busy_s", "slot_busy_s"):  # sums of other summands
                want = pytest.approx(want, rel=1e-9, abs=1e-12)
            assert np.array_equal(got, want) or got == want, f"{replica.name}.{name}"


ROLES = pytest.mark.parametrize("roles", [["both"], ["prefill", "decode"]], ids="-".join)


@ROLES
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), workloads())
def test_running_ahead_changes_nothing(roles, data, workload):
    specs = data.draw(pools(roles))
    given_options = {"checks": False, "models_kv": True, **data.draw(options(workload))}
    ahead = run(specs, workload, **given_options)
    plain = run(specs, workload, run_ahead=False, **given_options)
    assert_equal(ahead, plain)
    event(f"events saved: {round(1 - ahead[1].num_events / plain[1].num_events, 1)}")
    for outcome in {r.outcome for r in plain[1].records}:
        event(outcome)


def test_running_ahead_saves_events():
    workload = requests((0.0, 30, 200))
    ahead, plain = (simulate(pool(), workload, run_ahead=on) for on in (True, False))
    assert ahead.num_events < plain.num_events / 4
