"""`least_delay` equals its formula, computed plainly for each place and term."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.cost import MAX_OUTPUT_TOKENS, ROUNDING, make_policies
from cluster.routing.demand import Demand
from cluster.routing.placement import ANY_GROUP, EngineSummary, Placement
from cluster.routing.views import Column, Places, Views

COUNTS = st.integers(0, 3)
SECONDS = st.sampled_from([0.0, 0.1, 0.3]) | st.floats(0.0, 1.0)
OF_PLACE = [*[COUNTS] * 2, *[COUNTS] * 3, SECONDS, st.integers(0, 4), st.integers(0, 40)]
OF_ENGINE = [
    st.integers(0, 40), st.integers(0, 40), COUNTS, *[SECONDS] * 3, *[SECONDS] * 3, *[SECONDS] * 3,
    SECONDS, SECONDS, SECONDS,
]  # fmt: skip


class Kept:
    """A receiver that keeps the last choice and its inputs."""

    keeps_whole = True

    def note(self, side, request_id, choice):
        self.choice = choice


@st.composite
def engines(draw, num_groups):
    """Engines that are often equal, and often all have room."""
    placements, written = [], []
    of_engines = draw(st.lists(st.tuples(*OF_ENGINE), min_size=1, max_size=2))
    has_room, is_even = draw(st.booleans()), draw(st.booleans())
    for engine in range(draw(st.integers(1, 4))):
        count = draw(num_groups)
        groups = [ANY_GROUP] if count == 0 else range(count)
        placements += [Placement(f"e{engine}", group) for group in groups]
        columns = [[draw(number) for _ in groups] for number in OF_PLACE]
        columns[Column.FREE_TOKENS] = [20 * n for n in columns[Column.FREE_TOKENS]]
        for column in (Column.EMPTY_SLOTS, Column.FREE_TOKENS) if has_room else ():
            columns[column] = [99] * len(columns[column])
        spares = Column.SPARE_PROMPT_S, Column.SPARE_ROWS, Column.SPARE_CONTEXT_TOKENS
        for column in spares if is_even else ():
            columns[column] = [0] * len(columns[column])
        written.append((columns, draw(st.sampled_from(of_engines))))
    views, first = Views(placements), 0
    for columns, of_engine in written:
        num_places = len(columns[0])
        of_places = [number for column in columns for number in column]
        told = EngineSummary("both", (), 0.0), [[9]] * num_places, of_places, of_engine
        views.write(first, Places.of(*told))
        first += num_places
    return views


def beyond(wanted, spare, each_s):
    return max(wanted - spare, 0.0) * each_s


def plain_parts(view, demand, missed, mean_rows, side):
    """Return each term's value for one place by the formula, in Python floats."""
    length, rows = demand.num_prompt_tokens, demand.num_choices
    pairs = (length - 0.5 * missed) * missed
    prompt_s = view.prompt_s + missed * view.prompt_token_s + pairs * view.prompt_pair_s
    more_s = max(prompt_s - view.spare_prompt_s, 0.0)
    first_token_s, harm_s = view.queue_s + more_s, view.num_rows * more_s
    if side == "prefill":
        return {
            "first_token_s": first_token_s,
            "prompt_harm_s": 0.5 * harm_s,
            "work_s": mean_rows * prompt_s,
        }
    first = demand.num_first_tokens
    added_s = (
        beyond(rows, view.spare_rows, view.row_s)
        + beyond(rows * first, view.spare_context_tokens, view.context_token_s)
        + beyond(first, view.max_context_tokens, view.longest_token_s)
    )
    num_output = min(demand.expected_output_tokens, MAX_OUTPUT_TOKENS)
    output_s = ((view.num_rows + 1.0) * added_s + view.next_step_s) * num_output
    return {
        "first_token_s": first_token_s,
        "transfer_s": missed * view.transfer_token_s,
        "prompt_harm_s": 0.1 * harm_s,
        "work_s": 0.3 * mean_rows * prompt_s,
        "output_s": 0.1 * output_s,
    }


def close(one, other):
    return math.isclose(one, other, rel_tol=1e-11, abs_tol=1e-300)


def check_choice(views, demand, cached, refused, turn, side):
    """Check that a policy takes the place by the formula, and keeps the terms of the best few."""
    notes = Kept()
    policy = getattr(make_policies("least_delay", lambda _: cached, notes=notes), side)
    policy.turn = turn
    placement = policy.place(demand, views, refused)

    mean_rows = sum(view.num_rows for view in views) / len(views)
    parts = [
        plain_parts(view, demand, demand.num_prompt_tokens - cached.get(p, 0), mean_rows, side)
        for view, p in zip(views, views.placements, strict=True)
    ]
    costs = {
        i: sum(parts[i].values())
        for i, fits in enumerate(views.fitting(demand))
        if fits and views.placements[i] not in refused
    }
    if len(costs) < 2:
        assert placement == next((views.placements[i] for i in costs), None)
        return
    least = min(costs.values())
    best = [i for i, s in costs.items() if s <= least * (1.0 + ROUNDING)]
    if any(ROUNDING / 2 < s / least - 1.0 < 2 * ROUNDING for s in costs.values() if least):
        return  # at the edge of the tolerance the last bits decide
    least_active = min(views[i].num_active for i in best)
    best = [i for i in best if views[i].num_active == least_active]
    chosen = next((i for i in best if i >= turn), best[0])
    assert placement == views.placements[chosen]

    few = [views.index_of(p) for p in notes.choice.places]
    assert few[0] == chosen
    assert len(few) == min(3, len(costs))
    others = sorted(s for i, s in costs.items() if i != chosen)
    assert all(map(close, [costs[i] for i in few[1:]], others))
    for rank, index in enumerate(few):
        assert close(notes.choice.costs[rank], costs[index])
        kept = notes.choice.terms(rank)
        assert list(kept)[: len(parts[index])] == list(parts[index])
        assert all(close(kept[name], part) for name, part in parts[index].items())


@given(
    st.data(),
    st.sampled_from(["decode", "prefill"]),
    st.integers(1, 30),
    st.integers(1, 2),
    st.integers(1, 600),
)
def test_a_product_equals_the_formula_at_each_place(data, side, length, choices, output):
    views = data.draw(engines(st.just(0) if side == "prefill" else st.integers(1, 3)))
    demand = Demand("r", [7] * length, choices, output)
    cached = data.draw(
        st.dictionaries(st.sampled_from(views.placements), st.integers(0, length), max_size=2)
    )
    refused = data.draw(st.sets(st.sampled_from(views.placements), max_size=2))
    turn = data.draw(st.integers(0, len(views)))
    check_choice(views, demand, cached, refused, turn, side)


def test_placements_follow_the_formula_while_views_change():
    dice = random.Random(0)
    for side, num_groups in (("decode", 4), ("prefill", 1)) * 10:
        groups = range(num_groups) if side == "decode" else [ANY_GROUP]
        names = [f"e{i}" for i in range(dice.randrange(2, 9))]
        views = Views(Placement(name, group) for name in names for group in groups)
        for first in range(0, len(views), num_groups):
            views.write(first, drawn(dice, num_groups))
        for _ in range(200):
            views.write(num_groups * dice.randrange(len(names)), drawn(dice, num_groups))
            length = dice.randrange(1, 9000)
            demand = Demand("r", [7] * length, dice.randrange(1, 4), dice.randrange(1, 900))
            holders = dice.sample(views.placements, dice.choice([0, 0, 1, len(views)]))
            cached = {place: dice.randrange(length) for place in holders}
            refused = dice.sample(views.placements, dice.randrange(2))
            check_choice(views, demand, cached, refused, dice.randrange(len(views)), side)


def drawn(dice, num_places):
    """Return values of an engine somewhere between idle and full."""
    ranges = [(0, 32), (0, 40_000), (0, 40_000), (0, 32), (0, 9), (0, 2), (0, 32), (0, 40_000)]
    of_places = [dice.randrange(*ends) for ends in ranges for _ in range(num_places)]
    of_engine = [
        dice.randrange(9000), dice.randrange(200), dice.randrange(9000),
        *[1e-3 * dice.random() for _ in range(3)], 1e-4 * dice.random(),
        1e-7 * dice.random(), 1e-6 * dice.random(), 1e-2 * dice.random(), 1e-4 * dice.random(),
        1e-8 * dice.random(), 1e-6 * dice.random(), dice.random(), 0.05 * dice.random(),
    ]  # fmt: skip
    return Places.of(EngineSummary("both", (), 0.0), [[9]] * num_places, of_places, of_engine)


@given(st.integers(2, 99), st.data())
def test_equal_places_take_turns_wherever_they_are_in_the_list(count, data):
    """The last bits of sums over many places must not decide."""
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    places = [Placement(f"e{i:02}", 0) for i in range(count)]
    views, engine = Views(places), drawn(dice, 1)
    engine.of_places[:2] = 1e9
    for index in range(count):
        views.write(index, engine)
    length = data.draw(st.integers(1, 9000))
    cached = dict.fromkeys(places, length // 2) if data.draw(st.booleans()) else {}
    policy = make_policies("least_delay", lambda _: cached).decode
    demand = Demand("r", [7] * length)
    assert [policy.place(demand, views) for _ in places] == places
