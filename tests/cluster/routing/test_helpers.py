"""Decode engines that help with prompts: which ones, with how many, and when."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.demand import Demand
from cluster.routing.entry import AdmissionEntry
from cluster.routing.forecast import Forecast
from cluster.routing.helpers import SPARE, Helper, Helpers
from cluster.routing.placement import Placement

STEP_TOKENS = 8192
LANES = (0, 1, 2, 3)
PROMPT_S = 1.0
LAST_S = 3.0 - (1.0 + SPARE) * PROMPT_S
"""When the prompt of one who came at 0 has to begin."""


def waits(number, num_tokens=1000, arrived_s=0.0, tpot_s=0.1, *, is_spilled=True):
    demand = Demand(f"r{number}", [7] * num_tokens)
    return AdmissionEntry(
        demand, arrived_s, 3.0, tpot_s, (0, arrived_s, number), is_spilled=is_spilled
    )


def taught(mean_output=20):
    """Teach that a prompt of up to 1,024 tokens takes a second."""
    forecast = Forecast()
    forecast.saw_slot(1.0, mean_output)
    helpers = Helpers(forecast)
    helpers.ask("h0", "first", 1000, 0.0)
    helpers.done("h0", "first", PROMPT_S)
    return helpers


def engines(*num_rows, lanes=LANES):
    return {f"h{i}": Helper(lanes, STEP_TOKENS, rows, 0, 0.04) for i, rows in enumerate(num_rows)}


def test_the_first_prompt_is_given_alone_and_at_once():
    one, two = waits(1), waits(2)
    given_ = Helpers(Forecast()).due([one, two], engines(0, 0), 0.0)
    assert given_ == [(one, Placement("h0", 0))]


def test_a_batch_waits_until_one_would_be_late_and_uses_a_lane_for_each():
    helpers = taught()
    entries = [waits(1), waits(2, arrived_s=0.5)]
    assert helpers.due(entries, engines(0, 0), LAST_S - 0.1) == []
    given_ = helpers.due(entries, engines(0, 0), LAST_S)
    assert given_ == [(entries[0], Placement("h0", 0)), (entries[1], Placement("h0", 1))]


def test_a_full_batch_begins_at_once():
    entries = [waits(number) for number in range(6)]
    given_ = taught().due(entries, engines(0, 0), 0.0)
    assert [entry for entry, _ in given_] == entries[:4]


def test_other_queued_requests_fill_a_batch_last_first():
    one, sooner, later = waits(1), waits(2, is_spilled=False), waits(3, is_spilled=False)
    given_ = taught().due([sooner, later, one], engines(0, 0, lanes=(0, 1)), LAST_S)
    assert [entry for entry, _ in given_] == [one, later]


def test_at_least_one_engine_only_decodes():
    helpers = taught()
    entries = [waits(number) for number in range(4)]
    assert helpers.plan(entries, engines(0), 0.0) == []
    helpers.ask("h0", "other", 1000, 0.0)
    assert helpers.plan(entries, engines(0, 0), 0.0) == []
    assert helpers.plan(entries, engines(0, 0, 0), 0.0) != []


def test_more_harm_than_good_is_not_done():
    entries = [waits(number) for number in range(4)]
    # A second of standstill costs most answers of 20 tokens their 0.1 s for each.
    assert taught().plan(entries, engines(20, 20), LAST_S) == []
    assert taught().plan(entries, engines(2, 20), LAST_S) != []
    # Those with an answer of 2,000 tokens do not notice.
    assert taught(mean_output=2000).plan(entries, engines(20, 20), LAST_S) != []
    # Until it has to begin, most of the short answers have ended.
    assert taught().plan(entries, engines(10, 20), LAST_S) == []
    assert taught().plan(entries, engines(10, 20), 0.0) != []


def test_decode_only_requests_avoid_idle_and_prefilling_engines():
    helpers = taught()
    entry = waits(1)
    assert helpers.to_spare(entry, engines(0, 0)) == set()
    assert helpers.to_spare(entry, engines(3, 0)) == {"h1"}
    helpers.ask("h0", "other", 1000, 0.0)
    assert helpers.to_spare(entry, engines(3, 0)) == {"h0"}
    # Steps of 0.04 s leave no room for more rows under an objective of 0.05 s.
    assert helpers.to_spare(waits(1, tpot_s=0.05), engines(0, 3, 0)) == {"h0"}
    assert helpers.to_spare(entry, {}) == set()


def test_prompts_take_the_time_of_the_longest_beside_them():
    helpers = Helpers(Forecast())
    for number, length in enumerate((300, 2000, 900)):
        helpers.ask("h0", f"r{number}", length, 0.0)
    for number in range(3):
        helpers.done("h0", f"r{number}", 2.0)
    helpers.check_empty()
    assert [helpers.prompt_s(length) for length in (1024, 2048, 4096)] == [1.0, 2.0, 4.0]


@given(
    lengths=st.lists(st.integers(1, 6000), max_size=20),
    num_rows=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    spilled=st.integers(0, 2**20),
    now_s=st.floats(0.0, 3.0),
)
def test_no_request_is_given_twice_or_too_late(lengths, num_rows, spilled, now_s):
    helpers, known = taught(), engines(*num_rows)
    entries = [
        waits(i, length, is_spilled=bool(spilled >> i & 1)) for i, length in enumerate(lengths)
    ]
    given_ = helpers.due(entries, known, now_s)
    assert len({id(entry) for entry, _ in given_}) == len(given_)
    assert len({place for _, place in given_}) == len(given_)
    for engine in known:
        mine = [entry for entry, place in given_ if place.incarnation == engine]
        assert len(mine) <= len(LANES)
        assert sum(entry.num_tokens for entry in mine) <= STEP_TOKENS
        longest_s = max((helpers.prompt_s(entry.num_tokens) for entry in mine), default=-math.inf)
        assert now_s + longest_s <= 3.0
    assert len({place.incarnation for _, place in given_}) < len(known)
