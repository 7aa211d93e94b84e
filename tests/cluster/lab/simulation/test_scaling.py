"""Replicas come and go in a simulated cluster: after their start, and after their requests."""

import pytest

from tests.cluster.lab.simulation.clusters import (
    RoundTiming,
    events_of,
    outcomes,
    pool,
    requests,
    simulation,
)

WARM_UP_S = 4.0


class Plan:
    """Counts by time: the last entry that has begun holds."""

    interval_s = 1.0

    def __init__(self, *entries):
        self.entries = entries
        self.seen = []

    def decide(self, seen):
        self.seen.append(seen._replace(counted=dict(seen.counted)))
        begun = [counts for at_s, counts in self.entries if at_s <= seen.now_s]
        return begun[-1] if begun else {}


def scaled(pools, workload, plan, **options):
    made = simulation(pools, workload, scaler=plan, **options)
    return made, made.run()


def both(replicas=1):
    return pool("both", replicas, RoundTiming(WARM_UP_S))


def test_a_new_replica_takes_requests_after_its_start():
    """Two slots each: the third request waits until the second replica is there."""
    plan = Plan((0.0, {"both": 2}))
    workload = requests((0.0, 32, 480), (0.0, 32, 480), (0.5, 32, 8), (30.0, 32, 8))
    _, result = scaled(both(), workload, plan, restart_s=2.0)
    assert outcomes(result) == ["ok"] * 4
    [(start_s, name)] = events_of(result, "start")[1:]
    assert name == "both/1"
    assert start_s == 6.0
    assert result.records[2].replica == "both/1"
    assert 6.0 < result.records[2].token_times_s[0] < 9.0


def test_a_surplus_replica_ends_its_requests_and_takes_no_more():
    plan = Plan((1.0, {"both": 1}))
    workload = requests((0.0, 32, 400), (0.1, 32, 400), (0.2, 32, 400), (20.0, 32, 8))
    _, result = scaled(both(2), workload, plan)
    assert outcomes(result) == ["ok"] * 4
    [(_, left)] = events_of(result, "leave")
    [stopped] = [replica for replica in result.replicas if replica.stopped_s is not None]
    assert stopped.name == left
    last_s = max(r.finished_s for r in result.records if r.replica == left)
    assert last_s > 1.0
    assert stopped.stopped_s >= last_s
    assert len(events_of(result, "start")) == 2


def test_surplus_replicas_that_have_not_started_go_first():
    plan = Plan((0.0, {"both": 3}), (2.0, {"both": 2}))
    workload = requests((0.0, 32, 300), (20.0, 32, 8))
    made, result = scaled(both(2), workload, plan)
    assert events_of(result, "leave") == [(2.0, "both/2")]
    assert [name for _, name in events_of(result, "start")] == ["both/0", "both/1"]
    assert made.replicas.num_replicas("both") == 2


def test_replica_seconds_include_starts_and_drains():
    plan = Plan((2.0, {"both": 2}), (3.0, {"both": 1}))
    workload = requests((0.0, 32, 8), (20.0, 32, 8))
    _, result = scaled(both(), workload, plan)
    assert result.replica_seconds == pytest.approx(result.duration_s + 1.0)


def test_a_policy_gets_traffic_and_step_costs():
    plan = Plan()
    workload = requests((0.5, 40, 20), (0.6, 48, 30), (9.0, 32, 8))
    scaled(both(), workload, plan)
    first, last = plan.seen[0], plan.seen[8]
    [counted] = first.counted.values()
    assert counted is next(iter(last.counted.values())), "counts are the router's own"
    [counted] = last.counted.values()
    assert last.num_replicas == {"both": 1}
    assert last.costs.decode_s > 0
    assert counted.came == 3
    assert counted.ended_tokens == 40 + 48 + 32
    assert counted.output_tokens == 20 + 30 + 8
    assert counted.num_waiting == counted.num_decoding == 0


def test_scaling_up_and_down_loses_no_request():
    """With every check on, and killed ones among them."""
    counts = (3, 1, 2, 4, 1, 3, 2)
    plan = Plan(*((3.0 * i, {"prefill": n, "decode": 5 - n}) for i, n in enumerate(counts)))
    rows = [(0.2 * i, 32 + 5 * (i % 20), 8 + i % 40) for i in range(110)]
    faults = [{"at_s": 7.0, "target": "decode/0", "kind": "kill", "duration_s": None}]
    pools = [pool("prefill", 2, RoundTiming(1.0)), pool("decode", 2, RoundTiming(1.0))]
    for given_faults in ((), faults):
        _, result = scaled(pools, requests(*rows), plan, models_kv=True, faults=given_faults)
        failed = [outcome for outcome in outcomes(result) if outcome != "ok"]
        assert len(failed) <= (2 if given_faults else 0), failed
        assert len(events_of(result, "leave")) > 8
