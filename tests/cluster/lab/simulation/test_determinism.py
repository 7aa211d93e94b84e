"""Same scenario, same run, to the bit: in one process and in others."""

import os
import subprocess
import sys

import msgspec
import pytest

from cluster.lab.simulation.adversarial_scenarios import random_scenario
from cluster.lab.simulation.scenario import Scenario, run_scenario

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


def test_two_runs_in_one_process_are_equal():
    scenario = random_scenario(SEEDS[0])
    one, other = run_scenario(scenario), run_scenario(scenario)
    assert one.failure is None
    assert len(one.log) > 100
    assert msgspec.json.encode(one.log) == msgspec.json.encode(other.log)
    assert (one.num_events, one.outcomes, one.digest) == (
        other.num_events, other.outcomes, other.digest,
    )  # fmt: skip


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
