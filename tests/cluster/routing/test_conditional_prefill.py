"""When a decode engine computes a prompt itself, by the cost of either way."""

import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.routing.conditional_prefill import ConditionalPrefill
from cluster.routing.cost import OUTPUT_WEIGHT, no_cached_tokens
from cluster.routing.demand import Demand
from cluster.routing.explain import predicted_ttft_s
from cluster.routing.forecast import Lengths
from cluster.routing.placement import ANY_GROUP, Placement
from cluster.routing.pools import PoolState
from replicas.messages import EngineSnapshot, GroupSnapshot, StepWork, num_pairs
from tests.cluster.engines import make_member
from tests.kv_groups import one_kv_group

TOKEN_S = 1e-3
SLOWER = 2.0
"""A lane of a decode engine takes so many times as long as a prefill engine."""
STEP_S = 0.05
PREFILL = Placement("p", ANY_GROUP)


def asks(name, num_tokens=1000):
    return Demand(name, [7] * num_tokens)


def group(num_rows=0, num_empty_slots=8):
    return GroupSnapshot(num_empty_slots, [2000], num_rows, 0, 0)


def prompt_step(num_tokens, token_s):
    return StepWork(0, 0, 0, 1, num_tokens, 0, num_tokens * token_s)


class World:
    """A prefill engine, and decode engines with two lanes each."""

    def __init__(self, *num_rows, knows=True, cached=no_cached_tokens, output=200, kv_bytes=1024):
        self.pools = PoolState()
        self.lengths = Lengths()
        for _ in range(4):
            self.lengths.prompts.add(1000)
            self.lengths.outputs.add(output)
        self.pools.add(make_member("prefill", "p"))
        for seq, length in enumerate((500, 1000, 2000, 4000)):
            self.tell("p", seq, "prefill", [group()], prompt_step(length, TOKEN_S))
        self.engines = [f"d{i}" for i in range(len(num_rows))]
        for name, rows in zip(self.engines, num_rows, strict=True):
            groups = one_kv_group(65, 32, kv_bytes // 32)
            self.pools.add(make_member("decode", name, dp_groups=2, kv_groups=groups))
            for seq, length in enumerate((500, 1000, 2000, 4000)):
                step = prompt_step(length, SLOWER * TOKEN_S) if knows else None
                self.tell(name, seq, "decode", [group(rows), group()], step)
        self.core = ConditionalPrefill(self.pools, cached, self.lengths)

    def tell(self, name, seq, role, groups, step):
        decode = StepWork(1 + seq % 2, 0, 0, 0, 0, 0, STEP_S) if role == "decode" else None
        said = EngineSnapshot(seq, False, 0, 0, seq, groups, role, STEP_S, decode, step)
        self.pools.take_snapshot(name, said)

    def queue(self, num_prompts):
        """Queue prompts at the prefill engine."""
        for i in range(num_prompts):
            self.pools.hold(asks(f"q{i}"), PREFILL)

    def place(self, demand=None, now_s=0.0):
        return self.core.place(demand or asks("r"), now_s)

    def give(self, name, now_s=0.0, num_tokens=1000):
        place = self.place(asks(name, num_tokens), now_s)
        assert place is not None
        self.core.give(asks(name, num_tokens), place, now_s)
        return place


def test_an_idle_prefill_engine_is_the_better_place():
    assert World(0, 0).place() is None


def test_a_prompt_does_not_queue_while_a_decode_engine_is_idle():
    world = World(9, 0)
    world.queue(2)
    place = world.place()
    assert place is not None
    assert place.incarnation == "d1"


def test_a_prompt_avoids_engines_where_it_would_stop_many_sequences():
    world = World(40)
    world.queue(2)
    # Two seconds are a fifth of the time of an answer: 16 seconds of 40 sequences.
    assert world.place() is None
    few = World(3)
    few.queue(2)
    assert few.place() is not None


def test_short_answers_suffer_more():
    places = []
    for output in (2, 2000):
        world = World(6, output=output)
        world.queue(3)
        places.append(world.place())
    assert places[0] is None
    assert places[1] is not None


def test_groups_compute_prompts_side_by_side_and_one_group_in_turn():
    world = World(0)
    world.queue(9)
    lanes = [world.give(f"r{i}").dp_group for i in range(3)]
    # The first is begun at once; those that come meanwhile get a lane each.
    assert sorted(lanes[1:]) == [0, 1]
    world.core.drop("r0", 2.0)
    assert sorted(world.core._engines["d0"].begun) == ["r1", "r2"]


def test_a_prompt_computed_beside_others_adds_no_harm():
    alone, joined = World(30), World(30)
    for world in (alone, joined):
        world.queue(3)
    assert alone.place() is None
    for name in ("begun", "waits"):
        joined.core.give(asks(name), Placement("d0", 0), 0.0)
    place = joined.place(now_s=1.9)
    assert place == Placement("d0", 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 900), st.integers(0, 2)),
        min_size=2, max_size=5,
    ),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000)), max_size=12),
    st.integers(1, 4000),
    st.floats(0.0, 9.0),
    st.sampled_from([1, 60, 2000]),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_each_place_is_weighed_as_the_formula_says(
    engines, asked, num_tokens, now_s, output, is_cached, is_one_gone
):
    """Python floats for one place at a time, and numpy for all at once."""
    cached = {Placement("d1", 1): num_tokens // 2} if is_cached else {}
    world = World(*(rows for rows, *_ in engines), output=output, cached=lambda _demand: cached)
    own = {}
    for i, (number, length) in enumerate(asked):
        place = Placement(world.engines[number % len(engines)], number % 2)
        world.core.give(asks(f"own{i}", length), place, 0.1 * i)
        own.setdefault(place.incarnation, []).append((place.dp_group, length))
    for name, (rows, num_others, num_empty) in zip(world.engines, engines, strict=True):
        # With prompts that others asked for, and steps by which pairs of tokens are not free.
        lane = GroupSnapshot(
            num_empty, [2000], rows, 0, 0, 0, 0, num_others, num_pairs(0, num_others),
            int(num_others > 0),
        )  # fmt: skip
        for seq in range(4):
            step = prompt_step(1000 * (seq + 1), SLOWER * TOKEN_S)
            pairs = num_pairs(0, step.num_prompt_tokens)
            step = replace(step, num_prompt_pairs=pairs, device_s=step.device_s + 1e-7 * pairs)
            world.tell(name, 9 + seq, "decode", [lane, group()], step)
    if is_one_gone:
        world.pools.set_moves("d0", False)
    # A prompt counts with its expected time at the moment it was given.
    given = {
        incarnation: [*engine.begun.values(), *engine.waiting.values()]
        for incarnation, engine in world.core._engines.items()
    }
    began_s = {incarnation: engine.began_s for incarnation, engine in world.core._engines.items()}
    views = world.pools.decode_views()
    scene = world.core._scene(asks("r", num_tokens), views)
    weighed = sum(world.core._parts(scene, now_s)).tolist()
    assert len(weighed) == len(views) == 2 * (len(engines) - is_one_gone)
    assert {name: len(asked) for name, asked in own.items()} == {
        name: len(prompts) for name, prompts in given.items()
    }
    for view, delay_s in zip(views, weighed, strict=True):
        if not view.num_empty_slots:
            assert delay_s == math.inf
            continue
        missed = num_tokens - cached.get(view.placement, 0)
        pairs = (num_tokens - missed / 2) * missed
        prompt_s = (
            view.own_prompt_s
            + missed * view.own_prompt_token_s
            + pairs * view.own_prompt_pair_s
        )  # fmt: skip
        assert view.own_prompt_pair_s > 0
        # The first of an engine is begun at once, the others wait for it.
        begun, *waiting = given.get(view.incarnation, [(0, 0.0)])
        lanes = [sum(s for lane, s in waiting if lane == dp_group) for dp_group in (0, 1)]
        left_s = max(began_s.get(view.incarnation, 0.0) + begun[1] - now_s, 0.0)
        wait_s = left_s + max(view.queue_s - begun[1] - max(lanes), 0.0)
        after_s = max(*lanes, lanes[view.dp_group] + prompt_s)
        stop_s = after_s - max(lanes)
        share = stop_s / (output * view.next_step_s)
        harm_s = view.num_rows * min(max(share, OUTPUT_WEIGHT), 1.0) * stop_s
        assert math.isclose(delay_s, wait_s + after_s + harm_s, rel_tol=1e-9)


class Notes:
    keeps_whole = False

    def __init__(self):
        self.made = []

    def note(self, side, request_id, choice):
        self.made.append((side, request_id, choice))


def test_a_prompt_on_a_decode_engine_is_explained():
    world, notes = World(4, 0), Notes()
    world.core = ConditionalPrefill(world.pools, no_cached_tokens, world.lengths, notes)
    world.queue(3)
    place = world.place()
    assert not notes.made, "it may not have its slot there"
    world.core.give(asks("r"), place, 0.0)
    [(side, request_id, choice)] = notes.made
    assert (side, request_id, choice.chosen, choice.num_refused) == ("prompt", "r", place, 0)
    terms = choice.terms(0)
    assert list(terms) == ["wait_s", "prompt_s", "stands_still_s"]
    assert choice.costs[0] == sum(terms.values()) == min(choice.costs)
    assert choice.ttft_s == predicted_ttft_s(choice) == terms["wait_s"] + terms["prompt_s"]
    assert choice.elsewhere_s > choice.costs[0]
    world.core.drop("r", 1.0)
    world.place(asks("gone"))
    world.core.drop("gone", 1.0)
    world.core.check_empty()
    assert len(notes.made) == 1


def test_equal_places_get_prompts_in_turn():
    world = World(0, 0, 0)
    world.queue(9)
    places = []
    for i in range(12):
        assert world.place(asks("looks only")) == world.place(asks(f"r{i}"))
        places.append(world.give(f"r{i}"))
        world.core.drop(f"r{i}", 0.0)
    assert len(set(places)) == 6
    assert places[:6] == places[6:]


def test_fetching_counts_against_a_prefill_engine():
    """If fetching takes longer than it saves, a decode engine computes the prompt."""
    places = [World(0, kv_bytes=size).place(asks("r", 4000)) for size in (1024, 10**9)]
    assert places[0] is None
    assert places[1] is not None


def test_a_decode_engine_computes_prompts_that_it_has_cached():
    world = World(3, cached=lambda _demand: {Placement("d0", 1): 960})
    assert world.place() == Placement("d0", 1)


def test_unknown_costs_are_tried_only_with_short_prompts():
    world = World(0, knows=False)
    world.queue(1)
    world.lengths.prompts.add(1000)
    assert world.place(asks("r", 1000)) is not None
    world.lengths.prompts.add(4000)
    assert world.place(asks("long", 4000)) is None
    known = World(0)
    known.queue(9)
    known.lengths.prompts.add(4000)
    assert known.place(asks("long", 4000)) is not None


def test_without_costs_or_prefill_engines_prompts_stay():
    world = World(0)
    world.pools.remove("p")
    assert world.place() is None
    pools = PoolState()
    pools.add(make_member("prefill", "p"))
    pools.add(make_member("decode", "d"))
    for name, role in (("p", "prefill"), ("d", "decode")):
        pools.take_snapshot(name, EngineSnapshot(0, False, 0, 0, 0, [group()], role))
    core = ConditionalPrefill(pools, no_cached_tokens, Lengths())
    assert core.place(asks("r"), 0.0) is None


def test_no_slot_no_prompt():
    world = World(0)
    world.queue(9)
    assert world.place() is not None
    world.tell("d0", 9, "decode", [group(8, 0), group(8, 0)], None)
    assert world.place() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_every_prompt_that_was_given_is_over_once(events):
    world = World(0, 0)
    world.queue(30)
    under_way = []
    for now_s, (number, ends) in enumerate(events):
        name = f"r{number}"
        if ends:
            world.core.drop(name, float(now_s))
            under_way = [n for n in under_way if n != name]
        elif name not in under_way:
            world.core.give(asks(name), Placement(f"d{number % 2}", number % 2), float(now_s))
            under_way.append(name)
        kept = world.core._engines.values()
        assert sorted(n for e in kept for n in (*e.begun, *e.waiting)) == sorted(under_way)
        assert all(e.begun for e in kept), "a waiting prompt waits for one that has begun"
    for name in under_way:
        world.core.drop(name, 99.0)
    world.core.check_empty()
