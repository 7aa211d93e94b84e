"""What `least_delay` weighs in columns is what its formula says of each place: equal to the bit."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.cost import MAX_OUTPUT_TOKENS, OUTPUT_WEIGHT, WORK_WEIGHT, make_policies
from cluster.routing.demand import Demand
from cluster.routing.placement import ANY_GROUP, Placement, Told
from cluster.routing.views import Column, Places, Views

COUNTS = st.integers(0, 3)
SECONDS = st.sampled_from([0.0, 0.1, 0.3]) | st.floats(0.0, 1.0)
OF_PLACE = [*[COUNTS] * 2, *[COUNTS] * 3, st.integers(0, 4), st.integers(0, 40)]
OF_ENGINE = [
    st.integers(0, 40), *[SECONDS] * 3, *[SECONDS] * 3, SECONDS, st.integers(0, 40), COUNTS,
    SECONDS, SECONDS,
]  # fmt: skip


class Kept:
    """The last choice, and what it was made among."""

    keeps_whole = True

    def note(self, side, request_id, choice):
        self.choice = choice


@st.composite
def engines(draw, num_groups):
    """Often equal ones, and often with room everywhere."""
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
        for column in (Column.SPARE_ROWS, Column.SPARE_CONTEXT_TOKENS) if is_even else ():
            columns[column] = [0] * len(columns[column])
        written.append((columns, draw(st.sampled_from(of_engines))))
    views, first = Views(placements), 0
    for columns, of_engine in written:
        num_places = len(columns[0])
        of_places = [number for column in columns for number in column]
        told = Told("both", (), 0.0), [[9]] * num_places, of_places, of_engine
        views.write(first, Places.of(*told))
        first += num_places
    return views


def beyond(wanted, spare, each_s):
    return max(wanted - spare, 0.0) * each_s


def plain_cost(view, demand, missed, mean_rows, side):
    """One place's, in Python's floats, in the order of the formula."""
    length, rows = demand.num_prompt_tokens, demand.num_choices
    prompt_s = (length - 0.5 * missed) * view.prompt_pair_s + view.prompt_token_s
    prompt_s = prompt_s * missed + view.prompt_s
    if side == "prefill":
        return view.queue_s + prompt_s + 0.5 * (view.num_rows * prompt_s) + mean_rows * prompt_s
    first = demand.num_first_tokens
    added_s = (
        beyond(rows, view.spare_rows, view.row_s)
        + beyond(rows * first, view.spare_context_tokens, view.context_token_s)
        + beyond(first, view.max_context_tokens, view.longest_token_s)
    )
    num_output = min(demand.expected_output_tokens, MAX_OUTPUT_TOKENS)
    return (
        view.queue_s + prompt_s
        + missed * view.transfer_token_s
        + OUTPUT_WEIGHT * (view.num_rows * prompt_s)
        + WORK_WEIGHT * (mean_rows * prompt_s)
        + OUTPUT_WEIGHT * (((view.num_rows + 1.0) * added_s + view.next_step_s) * num_output)
    )  # fmt: skip


@given(
    st.data(),
    st.sampled_from(["decode", "prefill"]),
    st.integers(1, 30),
    st.integers(1, 2),
    st.integers(1, 600),
)
def test_columns_say_of_each_place_what_the_formula_says(data, side, length, choices, output):
    views = data.draw(engines(st.just(0) if side == "prefill" else st.integers(1, 3)))
    demand = Demand("r", [7] * length, choices, output)
    cached = data.draw(
        st.dictionaries(st.sampled_from(views.placements), st.integers(0, length), max_size=2)
    )
    refused = data.draw(st.sets(st.sampled_from(views.placements), max_size=2))
    notes = Kept()
    policy = getattr(make_policies("least_delay", lambda _: cached, notes=notes), side)
    policy.turn = turn = data.draw(st.integers(0, len(views)))
    placement = policy.place(demand, views, refused)

    fitting = [bool(fits) for fits in views.fitting(demand)]
    fitting = [f and p not in refused for f, p in zip(fitting, views.placements, strict=True)]
    mean_rows = sum(view.num_rows for view in views) / len(views)
    costs = [
        plain_cost(view, demand, length - cached.get(p, 0), mean_rows, side) if fits else math.inf
        for view, p, fits in zip(views, views.placements, fitting, strict=True)
    ]
    if not any(fitting):
        assert placement is None
        return
    best = [i for i, s in enumerate(costs) if fitting[i] and s == min(costs)]
    if sum(fitting) > 1:
        least_active = min(views[i].num_active for i in best)
        best = [i for i in best if views[i].num_active == least_active]
    chosen = next((i for i in best if i >= turn), best[0])
    assert placement == views.placements[chosen]
    if sum(fitting) > 1:
        few = [views.index_of(p) for p in notes.choice.places]
        assert notes.choice.costs.tolist() == [costs[i] for i in few]
