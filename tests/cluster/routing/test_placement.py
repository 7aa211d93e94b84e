"""Placement policies: a place that fits or none, the same for equal views, by their rules."""

import collections
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.cost import CACHE_AWARE_POLICIES, PRESETS, make_policies
from cluster.routing.demand import Demand
from cluster.routing.placement import ANY_GROUP, EngineSummary, GroupView, Placement, fits
from cluster.routing.step_time import StepCosts
from cluster.routing.views import NUM_OF_PLACE, Column, Places, Views

INCARNATIONS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 2)
BLOCK_SIZE = 4
FIRST_COLUMN = len(GroupView.__struct_fields__) - len(Column)


def needs(num_blocks):
    """Return a request that needs this many blocks to start."""
    return Demand("r", [7] * (num_blocks * BLOCK_SIZE - 1))


class Load(NamedTuple):
    """The load of a place as a request finds it; the spares are its group's."""

    queue_s: float = 0.0
    step_s: float = 0.0
    num_rows: int = 0
    spare_prompt_s: float = 0.0
    spare_rows: int = 0
    spare_context_tokens: int = 0
    max_context_tokens: int = 0
    costs: StepCosts = StepCosts()
    transfer_token_s: float = 0.0


def a_view(placement, index, blocks, slots, room, active, waiting, queued, load):
    return GroupView(
        *placement, *TOLD[:-1], index, blocks, slots, *room, active, waiting,
        load.spare_prompt_s, load.spare_rows, load.spare_context_tokens, load.max_context_tokens,
        load.num_rows, queued,
        *load.costs[4:], *load.costs[1:], load.transfer_token_s, load.queue_s, load.step_s,
    )  # fmt: skip


IDLE = Load()
TOLD = EngineSummary("both", (), 0.0)


def group_view(
    incarnation, dp_group, slots, blocks, active=0, index=0, *, waiting=0, queued=0, load=IDLE
):
    """A DP group of a decode engine that also computes prompts."""
    room = blocks * BLOCK_SIZE, (8 - blocks) * BLOCK_SIZE
    place = Placement(incarnation, dp_group)
    return a_view(place, index, [blocks], slots, room, active, waiting, queued, load)


def prefill_view(incarnation, queued_tokens, active, index=0, *, load=IDLE):
    """A prefill engine as a whole."""
    place = Placement(incarnation, ANY_GROUP)
    return a_view(place, index, [0], 0, (0, 0), active, 0, queued_tokens, load)


def listed(views):
    """Return views as the pools list them, each as an engine of one place."""
    made = Views(view.placement for view in views)
    for i, view in enumerate(views):
        values = msgspec.structs.astuple(view)[FIRST_COLUMN:]
        told = TOLD, [view.num_free_blocks], values[:NUM_OF_PLACE], values[NUM_OF_PLACE:]
        made.write(i, Places.of(*told))
    return made


def place(policy, demand, views, refused=()):
    """Place a request among a new list of these views."""
    return policy.place(demand, listed(views), refused)


def most_empty_slots():
    return make_policies("most_empty_slots").decode


def place_decode(num_blocks, views, refused=()):
    return place(most_empty_slots(), needs(num_blocks), views, refused)


def place_prefill(views, refused=(), policy=None):
    policy = policy or make_policies("most_empty_slots").prefill
    placement = place(policy, needs(1), views, {Placement(i, ANY_GROUP) for i in refused})
    return placement and placement.incarnation


@st.composite
def prefill_views(draw):
    keys = draw(st.lists(INCARNATIONS, unique=True))
    return [prefill_view(name, draw(COUNTS), draw(COUNTS), i) for i, name in enumerate(keys)]


REFUSED = st.sets(st.builds(Placement, INCARNATIONS, st.integers(0, 2)), max_size=4)


@given(prefill_views(), st.sets(INCARNATIONS), st.randoms())
def test_prefill_placement_takes_the_least_work_in_front(views, refused, random):
    target = place_prefill(views, refused)
    allowed = {v.incarnation: v for v in views if v.incarnation not in refused}
    assert place_prefill(random.sample(views, len(views)), refused) == target
    if target is None:
        assert allowed == {}
        return
    work = {i: (v.num_queued_tokens, v.num_active) for i, v in allowed.items()}
    assert work[target] == min(work.values())


# --- policies that remember -----------------------------------------------------------------------


def groups(*slots, num_blocks=9):
    """Return one replica for each number of empty slots."""
    return [group_view(f"e{i}", 0, n, num_blocks, 0, i) for i, n in enumerate(slots)]


def decode_turns(policy, views, count, **options):
    placements = [place(policy, needs(1), views, **options) for _ in range(count)]
    return [p and p.incarnation for p in placements]


def test_round_robin_of_prefill_engines_has_a_turn_of_its_own():
    decode, policy = make_policies("round_robin")
    engines = [prefill_view(f"p{i}", 100 * i, i, i) for i in range(3)]
    assert decode_turns(decode, groups(1, 1), 1) == ["e0"]
    found = [place_prefill(engines, policy=policy) for _ in range(4)]
    assert found == ["p0", "p1", "p2", "p0"]
    assert place_prefill(engines, {"p1"}, policy) == "p2"
    assert place_prefill(engines, {"p0", "p1", "p2"}, policy) is None
    assert place_prefill([], (), policy) is None
    assert place_prefill(engines, (), policy) == "p0"


@pytest.mark.parametrize("name", PRESETS)
def test_policies_have_memories_of_their_own(name):
    one, other = make_policies(name), make_policies(name)
    views = groups(*[3] * 7)
    assert decode_turns(one.decode, views, 9) == decode_turns(other.decode, views, 9)
    again = make_policies(name)
    decode_turns(again.prefill, views, 5)
    assert decode_turns(again.decode, views, 9) == decode_turns(
        make_policies(name).decode, views, 9
    )


# --- the rules, said again ----------------------------------------------------------------------


@st.composite
def loaded_views(draw):
    """DP groups of several engines, each with a load of its own."""
    keys = draw(st.lists(st.tuples(INCARNATIONS, st.integers(0, 2)), unique=True, max_size=9))
    count, cost = st.integers(0, 200), st.sampled_from([0.0, 0.25, 0.5, 2.0])
    costs = st.builds(StepCosts, *[cost] * 7)
    load = st.builds(Load, cost, cost, count, cost, *[count] * 3, costs, cost)
    return [
        group_view(
            *key, draw(COUNTS), draw(st.integers(0, 8)), draw(count), i,
            waiting=draw(count), queued=draw(count), load=draw(load),
        )
        for i, key in enumerate(keys)
    ]  # fmt: skip


@st.composite
def calls_of(draw):
    """Requests in sequence, each with views of its own."""
    call = st.tuples(st.integers(1, 5), loaded_views(), REFUSED, st.integers(0, 20))
    return draw(st.lists(call, min_size=1, max_size=5))


def in_turn(key):
    """Return the view with the least key; equal ones take turns."""

    def rule(demand, views, turn, cached):
        least = min(key(demand, v, cached) for v in views)
        best = [v for v in views if key(demand, v, cached) == least]
        return [next((v for v in best if v.index >= turn), best[0])]

    return rule


def missed(demand, view, cached):
    return demand.num_prompt_tokens - cached.get(view.placement, 0)


def follow_the_prefix(demand, views, turn, cached):
    loads = [v.num_active for v in views]
    is_out_of_balance = max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)
    most = max(cached.get(v.placement, 0) for v in views)
    if not is_out_of_balance and most / demand.num_prompt_tokens > 0.3:
        views = [v for v in views if cached.get(v.placement, 0) == most]
    return in_turn(lambda _d, v, _c: v.num_active)(demand, views, turn, cached)


def less_loaded_of_any_two(_demand, views, _turn, _cached):
    """Return the places that two draws can give."""
    if len(views) < 3:
        return [v for v in views if v.num_active == min(v.num_active for v in views)]
    most = max(v.num_active for v in views)
    busiest = [v for v in views if v.num_active == most]
    return views if len(busiest) > 1 else [v for v in views if v is not busiest[0]]


RULES = {
    "most_empty_slots": lambda _d, views, _t, _c: [
        min(views, key=lambda v: (-v.num_empty_slots, -v.num_free_tokens, v.placement))
    ],
    "round_robin": in_turn(lambda *_: 0),
    "random": lambda _d, views, _t, _c: views,
    "least_loaded": in_turn(lambda _d, v, _c: v.num_active),
    "power_of_two": less_loaded_of_any_two,
    "prefix_aware": follow_the_prefix,
    "waiting_and_running": in_turn(
        lambda _d, v, _c: 4 * v.num_waiting + (v.num_active - v.num_waiting)
    ),
    "cache_and_load": in_turn(
        lambda d, v, c: (v.num_queued_tokens + missed(d, v, c)) + v.num_held_tokens
    ),
}


@pytest.mark.parametrize("name", RULES)
@given(calls_of(), st.randoms())
def test_a_policy_follows_its_rule(name, calls, random):
    cached = {}
    policy, turn = make_policies(name, lambda _demand: cached).decode, 0
    for num_blocks, views, refused, most_cached in calls:
        demand = needs(num_blocks)
        cached.clear()
        most = min(most_cached, demand.num_prompt_tokens)
        cached |= {v.placement: random.randint(0, most) for v in views}
        allowed = [v for v in views if fits(demand, v) and v.placement not in refused]
        placement = place(policy, demand, views, refused)
        if not allowed:
            assert placement is None
            continue
        may_have = RULES[name](demand, allowed, turn, cached)
        assert placement in [v.placement for v in may_have]
        turn = next(v.index for v in views if v.placement == placement) + 1


def test_random_takes_each_place_as_often():
    policy = make_policies("random").decode
    counts = collections.Counter(decode_turns(policy, groups(*[1] * 8), 4000))
    assert len(counts) == 8
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())


def test_two_ingresses_draw_differently_and_a_simulation_again_the_same():
    views = groups(*[1] * 8)

    def turns(seed):
        policy = make_policies("random", seed=seed).decode
        return list(decode_turns(policy, views, 20))

    assert turns(1) == turns(1)
    assert turns(1) != turns(2)


def test_two_that_are_drawn_are_each_pair_as_often():
    """Among equal places they take turns; the busier one of a pair is never chosen."""
    policy = make_policies("power_of_two").decode
    views = [group_view(f"e{i}", 0, 1, 9, 10 * i, i) for i in range(5)]
    counts = collections.Counter(decode_turns(policy, views, 5000))
    for i in range(5):
        expected = 5000 * (4 - i) / 10
        assert abs(counts[f"e{i}"] - expected) < 5 * max(expected, 1) ** 0.5


COSTS = StepCosts(0.04, 0.0, 1e-6, 0.0, 0.02, 2e-4, 0.0)


def loaded(queue_s=0.0, num_rows=0, spare=0, step_s=0.04):
    return Load(queue_s, step_s, num_rows, 0.0, 0, spare, 0, COSTS)


def test_a_request_goes_to_the_lane_that_makes_no_step_longer():
    """Both lanes have room; in the one with the shorter context it adds no time."""
    full, light = loaded(num_rows=9), loaded(num_rows=9, spare=100_000)
    views = [
        group_view("e", 0, 30, 8, 4, 0, load=full),
        group_view("e", 1, 2, 8, 5, 1, load=light),
    ]
    demand = Demand("r", [7] * 7, expected_output_tokens=100)
    assert place(make_policies("least_delay").decode, demand, views) == Placement("e", 1)
    assert place(most_empty_slots(), demand, views) == Placement("e", 0)


def test_a_prompt_goes_beside_one_that_waits_and_not_behind_it():
    """Lanes compute prompts side by side: the next step does not become longer."""
    behind, beside = loaded(queue_s=0.5, num_rows=9), loaded(queue_s=0.5, num_rows=9)
    beside = beside._replace(spare_prompt_s=0.5)
    views = [
        group_view("busy", 0, 30, 8, 4, 0, load=behind),
        group_view("busy", 1, 30, 8, 5, 1, load=beside),
        group_view("far", 0, 30, 8, 5, 2, load=loaded(queue_s=0.5, num_rows=9)),
    ]
    demand = Demand("r", [7] * 7, expected_output_tokens=100)
    assert place(make_policies("least_delay").decode, demand, views) == Placement("busy", 1)


def test_slots_are_not_work():
    """The replica with most empty slots has minutes of prompts queued."""
    views = [
        group_view("long", 0, 30, 8, 2, 0, load=loaded(queue_s=60.0, num_rows=2)),
        group_view("short", 0, 10, 8, 22, 1, load=loaded(queue_s=0.5, num_rows=22)),
    ]
    assert place(make_policies("least_delay").decode, needs(1), views).incarnation == "short"
    assert place_decode(1, views).incarnation == "long"


def test_a_prompt_goes_where_it_is_cached_unless_the_queue_there_costs_more():
    demand = Demand("r", [7] * 31)
    cached = {Placement("e0", 0): 28}
    for queue_s, expected in ((0.0, "e0"), (0.001, "e0"), (0.1, "e1")):
        views = [
            group_view("e0", 0, 4, 8, 0, 0, load=loaded(queue_s)),
            group_view("e1", 0, 4, 8, 0, 1, load=loaded()),
        ]
        policy = make_policies("least_delay", lambda _demand: cached).decode
        assert place(policy, demand, views).incarnation == expected, queue_s


def test_cached_kv_saves_the_time_of_its_transfer():
    """Prefill engines compute the prompts."""
    costs = COSTS._replace(prompt_s=0.0, prompt_token_s=0.0, prompt_pair_s=0.0)
    demand = Demand("r", [7] * 31)
    cached = {Placement("e0", 0): 28}
    for step_s, expected in ((0.04, "e0"), (0.1, "e1")):
        loads = [Load(step_s=s, costs=costs, transfer_token_s=1e-4) for s in (step_s, 0.04)]
        views = [group_view(f"e{i}", 0, 4, 8, 0, i, load=load) for i, load in enumerate(loads)]
        policy = make_policies("least_delay", lambda _demand: cached).decode
        policy._turn = 1
        assert place(policy, demand, views).incarnation == expected, step_s


def test_a_cached_prefix_is_worth_a_longer_queue_under_load():
    """Computing it once more delays every later request."""
    demand = Demand("r", [7] * 31)
    cached = {Placement("e0", 0): 28}
    for num_rows, expected in ((0, "e1"), (40, "e0")):
        views = [
            group_view("e0", 0, 4, 8, 0, 0, load=loaded(queue_s=0.01, num_rows=num_rows)),
            group_view("e1", 0, 4, 8, 0, 1, load=loaded(num_rows=num_rows)),
        ]
        for policy in make_policies("least_delay", lambda _demand: cached):
            assert place(policy, demand, views).incarnation == expected, num_rows


@pytest.mark.parametrize("name", ["prefix_aware", "cache_and_load"])
def test_every_ingress_keeps_a_session_together_on_equal_costs(name):
    views = groups(*[4] * 8)
    homes = collections.Counter()
    for i in range(32):
        demand = Demand("r", [7], session=f"session {i}")
        asked = {place(make_policies(name).decode, demand, views[k:] + views[:k]) for k in (0, 3)}
        [home] = asked
        homes[home] += 1
        others = [view for view in views if view.placement != home]
        assert place(make_policies(name).decode, demand, others) in {v.placement for v in others}
        cached = {others[0].placement: 1}
        follows = make_policies(name, lambda _demand, cached=cached: cached).decode
        assert place(follows, demand, views) == others[0].placement, "what is cached counts first"
    assert len(homes) > 4


# --- policies and step costs ---------------------------------------------------------------------


def test_every_choice_takes_a_slot():
    three = Demand("r", [7], num_choices=3)
    assert place(most_empty_slots(), three, groups(1, 2)) is None
    assert place(most_empty_slots(), three, groups(1, 3)) == Placement("e1", 0)


@pytest.mark.parametrize("name", PRESETS)
def test_policies_that_use_caches_are_listed(name):
    asked = []

    def cached_tokens(demand):
        asked.append(demand)
        return {}

    policies = make_policies(name, cached_tokens)
    place(policies.decode, needs(1), [group_view("a", 0, 4, 9), group_view("b", 0, 4, 9)])
    place(policies.prefill, needs(1), [prefill_view("a", 0, 0), prefill_view("b", 0, 0)])
    assert bool(asked) == (name in CACHE_AWARE_POLICIES)


def test_a_whole_engine_has_the_most_that_a_group_has_cached():
    counts = {
        Placement("a", 0): 3, Placement("a", 1): 7, Placement("a", 2): 5,
        Placement("b", ANY_GROUP): 2, Placement("gone", 0): 9,
    }  # fmt: skip
    assert Views(Placement(i, ANY_GROUP) for i in "abc").most_of(counts).tolist() == [7, 2, 0]
    assert Views(Placement("a", group) for group in (1, 0, 3)).most_of(counts).tolist() == [7, 3, 0]
