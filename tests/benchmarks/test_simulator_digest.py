"""The digest of the simulator's results: the same for equal results, and for no others."""

import msgspec
import pytest

from benchmarks.simulator_digest import SCENARIOS, digest, run

NUM_REQUESTS = 12
QUIET = [scenario for scenario in SCENARIOS if not scenario.faults]


@pytest.mark.parametrize("scenario", QUIET, ids=lambda scenario: scenario.name)
def test_steps_passed_over_at_once_give_the_digest_of_single_steps(scenario):
    many = run(scenario, NUM_REQUESTS)
    single = run(scenario, NUM_REQUESTS, run_ahead=False)
    assert many.num_events < single.num_events
    assert digest(many) == digest(single)


def test_each_result_counts():
    result = run(SCENARIOS[0], NUM_REQUESTS)
    [first, *others] = result.records
    later = first.token_times_s.copy()
    later[0] = later[0] + 2.0**-40
    changed = {
        "a token time": msgspec.structs.replace(first, token_times_s=later),
        "an engine": msgspec.structs.replace(first, replica="another"),
    }
    digests = {
        name: digest(msgspec.structs.replace(result, records=[record, *others]))
        for name, record in changed.items()
    }
    assert len({digest(result), *digests.values()}) == 3, digests


def test_wall_time_does_not_count():
    result = run(SCENARIOS[0], NUM_REQUESTS)
    assert digest(msgspec.structs.replace(result, wall_s=1e9)) == digest(result)
