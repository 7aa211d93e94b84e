"""Chaos: what it runs, what it does about a failure, and what it says."""

import itertools
import logging
from collections import Counter
from typing import get_args

import msgspec
import pytest
from typer.testing import CliRunner

from cluster import cli
from cluster.config.schema import OrderName
from cluster.lab.simulation import chaos
from cluster.lab.simulation.adversarial_scenarios import random_scenario
from cluster.lab.simulation.chaos import ChaosOptions, explore, failure_kind, investigate, run_seed
from cluster.lab.simulation.scenario import (
    Scenario,
    ScenarioPool,
    ScenarioRequest,
    ScenarioTiming,
    build,
    run_scenario,
)
from cluster.lab.simulation.shrink import Shrinker
from replicas.engine.block_pool import BlockPool
from replicas.engine_process.server import EngineServer
from replicas.faults import KINDS, Fault
from replicas.simulation.virtual_engine import VirtualEngine


@pytest.fixture
def leak(monkeypatch):
    """A block pool that loses a block, once a sequence has had more than six."""
    free = BlockPool.free
    monkeypatch.setattr(
        BlockPool, "free", lambda self, ids: free(self, ids[:-1] if len(ids) > 6 else ids)
    )


def scenarios(num_events):
    """Scenarios from seed 0 on for at least so many events, each with what came of it."""
    logging.getLogger("replicas").setLevel(logging.CRITICAL)
    runs = []
    for seed in itertools.count():
        scenario = random_scenario(seed)
        outcome = run_scenario(scenario)
        runs.append((scenario, outcome))
        num_events -= outcome.num_events
        if num_events <= 0:
            return runs
    raise AssertionError


@pytest.fixture(scope="module")
def sweep():
    """Enough of them that everything happens."""
    return scenarios(340_000)


def check(runs):
    """No invariant is broken and every request has an end; how often which."""
    assert not {s.seed: outcome.failure for s, outcome in runs if outcome.failure}
    outcomes = sum((Counter(outcome.outcomes) for _, outcome in runs), Counter())
    assert outcomes["ok"] > 0.3 * outcomes.total()
    assert outcomes.total() == sum(len(scenario.requests) for scenario, _ in runs)
    return outcomes


def test_random_scenarios_break_no_invariant():
    check(scenarios(20_000))


@pytest.mark.slow
def test_everything_that_may_happen_does(sweep):
    assert set(check(sweep)) - {"no_ingress"} == {
        "ok", "aborted", "BadRequestError", "NotReadyError", "QueueTimeoutError",
        "ReplicaLostError", "SaturatedError", "OverloadedError",
        "ingress_lost",
        "InternalError",  # of rows that get no token
    }  # fmt: skip


@pytest.mark.slow
def test_scenarios_reach_the_corners(sweep):
    kinds = {fault.kind for scenario, _ in sweep for fault in scenario.faults}
    assert kinds == set(KINDS)
    killed = {f.target.split("/")[0] for s, _ in sweep for f in s.faults if f.kind == "kill"}
    assert {"prefill", "decode", "ingress"} <= killed
    log = [event for _, outcome in sweep for event in outcome.log]
    assert {"lost", "start", "kill", "freeze", "thaw", "abort", "activate", "load"} <= {
        event.kind for event in log
    }
    reasons = {event.detail[-1] for event in log if event.kind in {"refuse", "kv_loaded"}}
    assert {
        "no_slot", "no_blocks", "ok", "peer_dead", "stalled", "cancelled", "checksum",
    } <= reasons  # fmt: skip
    orders = {scenario.router.order for scenario, _ in sweep if len(scenario.pools) == 2}
    assert orders == {*get_args(OrderName)}
    # (request, epoch) of every transfer that was handed to a decode replica.
    loads = [
        Counter((event.subject, event.detail[1]) for event in outcome.log if event.kind == "load")
        for scenario, outcome in sweep
        if scenario.router.order == "prefill_first"
    ]
    assert max(count for counter in loads for count in counter.values()) > 1, "and to a second one"
    outcomes = [outcome for _, outcome in sweep]
    assert sum(outcome.num_preemptions for outcome in outcomes) > 10
    assert sum(outcome.num_transfers for outcome in outcomes) > 20
    assert sum(outcome.num_retries for outcome in outcomes) > 20
    assert sum(outcome.num_cached_tokens for outcome in outcomes) > 1000


def test_several_processes_see_what_one_sees():
    one = explore(ChaosOptions(seed=3, events=5_000))
    two = explore(ChaosOptions(seed=3, events=5_000, jobs=2))
    assert one[:4] == two[:4]


def test_a_failure_is_shrunk_and_told_with_the_command_that_replays_it(leak, tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "SHRINK_S", 3.0)
    said = []
    options = ChaosOptions(events=100_000, out=tmp_path)
    assert not chaos.chaos(options, said.append, shows_progress=False)
    text = "".join(said)
    seed = int(text.split("ttserve chaos --seed ")[1].split()[0])
    assert run_seed(seed).failure is not None
    assert "KVCacheManager.check_invariants" in text
    path = tmp_path / f"seed-{seed}.json"
    assert f"ttserve chaos --replay {path}" in text
    shrunk = Scenario.from_json(path.read_bytes())
    assert len(shrunk.requests) < len(random_scenario(seed).requests)
    again = []
    assert not chaos.replay(path, again.append)
    assert "KVCacheManager.check_invariants" in "".join(again)
    assert "place" in "".join(again)
    assert len(again) <= chaos.NUM_TRACE_LINES + 1


def test_commands_end_with_the_code_of_what_they_found(leak, tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "SHRINK_S", 0.5)
    bad = tmp_path / "bad.json"
    seed = next(s for s in range(100) if run_seed(s).failure is not None)
    bad.write_bytes(random_scenario(seed).to_json())
    run = CliRunner().invoke
    assert run(cli.app, ["chaos", "--replay", str(bad)]).exit_code == 1
    good = tmp_path / "good.json"
    good.write_bytes(msgspec.structs.replace(random_scenario(seed), requests=()).to_json())
    # Nothing arrives, so nothing can go wrong.
    done = run(cli.app, ["chaos", "--replay", str(good)])
    assert done.exit_code == 0, done.output
    assert "passed" in done.output
    good.write_text("{}")
    assert run(cli.app, ["chaos", "--replay", str(good)]).exit_code == 2
    done = run(cli.app, ["chaos", "--seed", str(seed), "--events", "1", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert f"seed {seed} fails" in done.output


def test_an_unpatched_scenario_is_no_find():
    assert investigate(random_scenario(0), shrink_s=1.0) is None


def test_what_a_failure_is_called_does_not_depend_on_its_numbers():
    one = "AssertionError (groups.py:219 in check): free=1 (of 2): 7"
    other = "AssertionError (groups.py:219 in check): free=3"
    assert failure_kind(one) == failure_kind(other) != failure_kind(one.replace("219", "220"))


# --- shrinking ----------------------------------------------------------------------------------


def test_shrinking_keeps_what_is_needed_and_drops_the_rest():
    scenario = next(
        s for s in map(random_scenario, range(100)) if len(s.requests) > 20 and len(s.faults) > 3
    )
    needed = {scenario.requests[3].block_ids, scenario.requests[17].block_ids}
    fault = scenario.faults[1]

    def fails(smaller):
        return needed <= {r.block_ids for r in smaller.requests} and fault in smaller.faults

    shrunk = Shrinker(fails, budget_s=60.0).shrink(scenario)
    assert {r.block_ids for r in shrunk.requests} == needed
    assert shrunk.faults == (fault,)
    assert all(r.abort_s is None and r.num_output_tokens == 1 for r in shrunk.requests)
    assert shrunk.ingresses == 1
    assert not shrunk.network.jitter_s


def test_shrinking_ends_when_its_time_is_over():
    now_s = iter(range(1000))
    shrinker = Shrinker(lambda _: True, budget_s=10.0, clock=lambda: float(next(now_s)))
    shrinker.shrink(random_scenario(0))
    assert shrinker.num_runs < 12


# --- what the simulator itself once did wrong -----------------------------------------------------


def one_engine(**changes):
    """A scenario of one engine and one request, which comes at once."""
    request = ScenarioRequest(
        arrival_s=0.0, num_prompt_tokens=40, num_output_tokens=3, block_ids=(1, 2)
    )
    pool = ScenarioPool(role="both")
    return Scenario(seed=0, max_model_len=500, pools=(pool,), requests=(request,), **changes)


def test_engines_and_ingresses_have_met_before_the_first_request_comes():
    assert run_scenario(one_engine()).outcomes == {"ok": 1}


def test_a_partition_of_a_dead_replica_is_nothing():
    faults = (
        Fault(at_s=1.0, target="both/0", kind="kill"),
        Fault(at_s=1.5, target="both/0", kind="partition", duration_s=30.0),
    )
    outcome = run_scenario(one_engine(faults=faults, restart_s=20.0))
    assert outcome.failure is None
    assert outcome.outcomes == {"ok": 1}


def test_a_turn_begins_when_the_last_one_has_ended(monkeypatch):
    under_way = set()
    begin, end = VirtualEngine.begin_turn, VirtualEngine.end_turn

    def begins(self, now_s):
        assert self not in under_way
        turn = begin(self, now_s)
        if turn.end_times_s:
            under_way.add(self)
        return turn

    def ends(self, turn, num_steps, now_s):
        under_way.discard(self)
        return end(self, turn, num_steps, now_s)

    monkeypatch.setattr(VirtualEngine, "begin_turn", begins)
    monkeypatch.setattr(VirtualEngine, "end_turn", ends)
    # While the decode engine stands still a message comes, and then a reservation lapses: two
    # reasons for a turn once it goes on.
    requests = tuple(
        ScenarioRequest(
            arrival_s=arrival_s, num_prompt_tokens=300, num_output_tokens=3, block_ids=ids
        )
        for arrival_s, ids in ((0.0, tuple(range(10))), (0.7, tuple(range(20, 30))))
    )
    scenario = msgspec.structs.replace(
        one_engine(),
        pools=(ScenarioPool(role="prefill"), ScenarioPool(role="decode", reservation_timeout_s=1)),
        timing=ScenarioTiming(prefill_token_s=5e-3),
        requests=requests,
        faults=(Fault(at_s=0.5, target="decode/0", kind="freeze", duration_s=2.5),),
    )
    outcome = run_scenario(scenario)
    assert outcome.failure is None
    # The second one's prompt is computed while the decode engine stands still.
    assert outcome.outcomes == {"QueueTimeoutError": 1, "ok": 1}


def test_moving_kv_takes_the_engine_time_even_if_nothing_runs():
    pools = (ScenarioPool(role="prefill"), ScenarioPool(role="decode"))
    slow = msgspec.structs.replace(
        one_engine(), pools=pools, timing=ScenarioTiming(move_s=0.5, decode_base_s=1e-3)
    )
    simulation = build(slow)
    result = simulation.run()
    assert [record.outcome for record in result.records] == ["ok"]
    # One message each: half a second to read it, half a second to write it.
    busy_s = {replica.role: replica.busy_s for replica in result.replicas}
    assert busy_s["prefill"] == pytest.approx(0.5, abs=0.1)
    assert busy_s["decode"] == pytest.approx(0.5, abs=0.1)


def test_a_step_that_never_ends_is_a_failure_not_a_hang(monkeypatch):
    monkeypatch.setattr(EngineServer, "next_deadline_s", lambda _self: 0.0)
    assert "time stands still" in (run_scenario(one_engine()).failure or "")


def test_a_failed_run_leaves_no_task_behind(leak):
    seed = next(s for s in range(100) if run_seed(s).failure is not None)
    simulation = build(random_scenario(seed))
    with pytest.raises(AssertionError):
        simulation.run()
    assert not [task for task in simulation.loop._tasks if not task.done()]
