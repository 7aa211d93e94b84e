"""Same scenario, same run, to the bit: in one process, in others, and whatever is passed over."""

import logging
import os
import subprocess
import sys

import msgspec
import pytest

from cluster.lab.simulation.adversarial_scenarios import random_scenario
from cluster.lab.simulation.records import ABORTED
from cluster.lab.simulation.scenario import Scenario, build, run_scenario

SEEDS = range(100, 104)
PRINT_DIGESTS = """
import logging
from cluster.lab.simulation.adversarial_scenarios import random_scenario
from cluster.lab.simulation.scenario import run_scenario
logging.disable(logging.CRITICAL)
for seed in range({first}, {last} + 1):
    outcome = run_scenario(random_scenario(seed))
    print(seed, outcome.num_events, outcome.digest)
"""


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("replicas").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("replicas").setLevel(logging.NOTSET)


def lines():
    outcomes = [(seed, run_scenario(random_scenario(seed))) for seed in SEEDS]
    return [f"{seed} {outcome.num_events} {outcome.digest}" for seed, outcome in outcomes]


def test_two_runs_in_one_process_are_equal():
    scenario = random_scenario(SEEDS[0])
    one, other = run_scenario(scenario), run_scenario(scenario)
    assert one.failure is None
    assert len(one.log) > 100
    assert msgspec.json.encode(one.log) == msgspec.json.encode(other.log)
    assert (one.num_events, one.outcomes, one.digest) == (
        other.num_events, other.outcomes, other.digest,
    )  # fmt: skip


def test_another_seed_gives_another_run():
    digests = {run_scenario(random_scenario(seed)).digest for seed in SEEDS[:3]}
    assert len(digests) == 3


def test_the_seed_of_a_scenario_alone_changes_the_run():
    scenario = next(
        s for s in map(random_scenario, SEEDS) if s.network.jitter_s and len(s.requests) > 10
    )
    other = msgspec.structs.replace(scenario, seed=scenario.seed + 1)
    assert run_scenario(scenario).digest != run_scenario(other).digest


@pytest.mark.process
def test_hash_seeds_of_the_interpreter_change_nothing():
    script = PRINT_DIGESTS.format(first=SEEDS[0], last=SEEDS[-1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "1")
    ]
    one, other = (process.communicate()[0].splitlines() for process in processes)
    assert len(one) == len(SEEDS)
    assert one == other


def test_a_scenario_survives_its_file():
    for seed in SEEDS:
        scenario = random_scenario(seed)
        assert Scenario.from_json(scenario.to_json()) == scenario


def facts(scenario):
    simulation = build(scenario)
    result = simulation.run()
    records = [
        (r.request_id, r.outcome, r.replica, r.prefill_replica, r.num_cached_tokens, r.queued_s)
        for r in result.records
    ]
    times_s = {r.request_id: r.token_times_s.tolist() for r in result.records}
    ends_s = {r.request_id: (r.finished_s, r.transfer_s) for r in result.records}
    return records, times_s, ends_s, simulation.recorder.outputs, result.num_events


@pytest.mark.parametrize("seed", range(200, 206))
def test_running_ahead_does_not_change_scenarios(seed):
    scenario = random_scenario(seed)
    calm = msgspec.structs.replace(
        scenario,
        faults=(),
        network=msgspec.structs.replace(scenario.network, jitter_s=0.0),
    )
    fast = facts(calm)
    slow = facts(msgspec.structs.replace(calm, run_ahead=False))
    assert fast[0] == slow[0]
    assert fast[4] < slow[4], "nothing was passed over"
    for request_id, outcome, *_ in fast[0]:
        got = [part[request_id] for part in fast[1:4]]
        wanted = [part[request_id] for part in slow[1:4]]
        if outcome == ABORTED:
            # A client that leaves within a stretch has not been given that stretch's tokens.
            got, wanted = ([x[0][: len(got[0])], x[1], x[2][: len(got[2])]] for x in (got, wanted))
        assert got == wanted, request_id
