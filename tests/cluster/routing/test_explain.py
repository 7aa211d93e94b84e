"""Records of requests: contents of a choice, and choosing again from a log."""

import asyncio
import math
import random
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.placing import Fleet
from cluster.lab.replay import read, replay, summary
from cluster.routing.choice import FEW, _few
from cluster.routing.cost import PRESETS, make_policies
from cluster.routing.demand import Demand
from cluster.routing.explain import (
    KEPT,
    KEPT_OF_AN_ID,
    MOST_MADE,
    Made,
    Route,
    Routes,
    predicted_token_s,
    predicted_ttft_s,
)
from cluster.routing.metrics import RouterMetrics
from cluster.routing.placement import Placement
from cluster.routing.route_log import LoggedRoute, RouteLog, logged
from cluster.routing.views import Column


class Notes:
    """A receiver that keeps every choice."""

    def __init__(self, *, keeps_whole=False):
        self.keeps_whole = keeps_whole
        self.made = []

    def note(self, side, request_id, choice):
        self.made.append(Made(len(self.made), side, choice))


def choose(policy, count, *, keeps_whole=True, seed=0):
    """Return the choices of a policy in this many situations."""
    dice = random.Random(seed)
    fleet, notes = Fleet("least_delay", dice), Notes(keeps_whole=keeps_whole)
    cached = {}
    decode = make_policies(policy, lambda _demand: cached, notes=notes).decode
    for number in range(count):
        cached = {Placement(dice.choice(fleet.names), dice.randrange(8)): 512 for _ in range(3)}
        demand = Demand(f"r{number}", [7] * 1000, expected_output_tokens=200, session="s")
        chosen = decode.place(demand, fleet.pools.decode_views())
        fleet.pools.hold(demand, chosen)
        assert notes.made[-1].choice.chosen == chosen
        fleet.tell(dice.choice(fleet.names))
    return fleet, notes.made


def test_a_choice_keeps_the_best_places_with_terms_and_snapshots():
    fleet, [made] = choose("least_delay", 1, keeps_whole=False)
    choice = made.choice
    assert choice.whole is None
    assert len(set(choice.places)) == FEW
    assert choice.num_places == choice.num_fitting == 64 * 8
    assert list(choice.costs) == sorted(choice.costs)
    for rank, place in enumerate(choice.places):
        terms = choice.terms(rank)
        names = ["first_token_s", "transfer_s", "prompt_harm_s", "work_s", "output_s"]
        assert list(terms) == names
        assert sum(terms.values()) == pytest.approx(choice.costs[rank])
        # The eight engines that told since have later ones.
        assert choice.seqs[rank] <= fleet.pools.snapshot(place.incarnation).seq
    assert choice.missed_tokens[0] in {1000.0, 488.0}


def test_places_that_could_not_take_the_request_are_not_kept():
    for costs, expected in (([1.0, 3.0, 2.0], [0, 2, 1]), ([1.0, np.inf, 2.0], [0, 2])):
        assert _few(0, np.array(costs)) == expected
    assert _few(1, np.array([np.inf, 2.0, np.inf])) == [1]


async def test_a_request_that_is_refused_again_and_again_keeps_a_bounded_route():
    _, [made] = choose("least_loaded", 1)
    routes = Routes(RouterMetrics("m"))
    with routes.follow("r", 8) as route:
        for _ in range(10 * MOST_MADE):
            routes.note("decode", "r", made.choice)
        routes.note("prefill", "r", made.choice)
    assert len(route.made) == MOST_MADE
    assert route.made[-1].side == "prefill"


@given(names=st.lists(st.sampled_from("abcdef"), max_size=60), most=st.integers(3, 12))
def test_the_book_keeps_the_latest_of_all_and_few_of_each_id(names, most):
    most_of_an_id = 3

    async def scenario():
        routes = Routes(RouterMetrics("m"))
        for number, name in enumerate(names):
            with routes.follow(f"{name}-{number:x}", 8):
                pass
        return routes

    with (
        mock.patch("cluster.routing.explain.KEPT", most),
        mock.patch("cluster.routing.explain.KEPT_OF_AN_ID", most_of_an_id),
    ):
        routes = asyncio.run(scenario())
    expected = []
    for number, name in enumerate(names):
        expected.append((name, number))
        same = [entry for entry in expected if entry[0] == name]
        if len(same) > most_of_an_id:
            expected.remove(same[0])
        del expected[:-most]
    assert len(routes) == len(expected) <= most
    for name in "abcdef":
        found = routes.of_client_id(name)
        kept = [] if found is None else [route.request_id for route in found.kept]
        assert kept == [f"{name}-{number:x}" for of, number in expected if of == name]


async def test_a_client_that_repeats_its_id_drops_only_its_own_records():
    routes = Routes(RouterMetrics("m"))
    for number, name in enumerate(["mine", *["loud"] * 3 * KEPT]):
        with routes.follow(f"{name}-{number:x}", 8):
            pass
    assert len(routes.of_client_id("mine").kept) == 1
    loud = routes.of_client_id("loud")
    assert (len(loud.kept), loud.num_dropped) == (KEPT_OF_AN_ID, 3 * KEPT - KEPT_OF_AN_ID)


async def test_a_running_request_is_recorded_after_its_record_was_dropped():
    _, [made] = choose("least_loaded", 1)
    routes = Routes(RouterMetrics("m"))
    with routes.follow("a-0", 8) as route:
        for number in range(KEPT_OF_AN_ID):
            with routes.follow(f"a-{1 + number:x}", 8):
                pass
        assert route not in routes.of_client_id("a").kept
        routes.note("decode", "a-0", made.choice)
        assert routes.get("a-0") is route
    assert routes.get("a-0") is None
    assert [noted.side for noted in route.made] == ["decode"]


@pytest.mark.parametrize("policy", ["least_loaded", "least_delay"])
def test_a_choice_keeps_its_values_when_views_change(policy):
    fleet, [made] = choose(policy, 1, keeps_whole=False)
    before = made.choice.terms(0), made.choice.columns.copy()
    for name in fleet.names:
        fleet.tell(name)
    views = fleet.pools.decode_views()
    index = views.index_of(made.choice.chosen)
    assert views.column(Column.ACTIVE)[index] != before[1][Column.ACTIVE, 0]
    assert made.choice.terms(0) == before[0]
    assert np.array_equal(made.choice.columns, before[1])


def test_the_only_place_is_kept_without_a_predicted_first_token():
    fleet, notes = Fleet("least_delay", random.Random(0)), Notes()
    decode = make_policies("least_delay", notes=notes).decode
    views = fleet.pools.decode_views()
    others = set(views.placements[1:])
    refused, spared = sorted(others)[:2], sorted(others)[2:]
    demand = Demand("r", [7] * 100)
    assert decode.place(demand, views, refused, spared) == views.placements[0]
    [made] = notes.made
    assert made.choice.places == [views.placements[0]]
    assert (made.choice.num_fitting, made.choice.num_refused) == (1, 2)
    assert made.choice.num_spared == len(others) - 2
    assert made.choice.terms(0) == {}
    assert predicted_ttft_s(made.choice) is None
    assert predicted_token_s(made.choice) > 0.0


def test_predictions_follow_the_policys_costs():
    _, [made] = choose("least_delay", 1)
    assert predicted_ttft_s(made.choice) == pytest.approx(made.choice.terms(0)["first_token_s"])


@pytest.mark.parametrize(
    "policy", [name for name in PRESETS if name not in {"random", "power_of_two"}]
)
def test_a_log_replays_to_the_same_choices_by_the_same_policy(policy):
    _, made = choose(policy, 60)
    route = Route("r", 1000, 0.0)
    route.made = made
    line = msgspec.json.encode(logged(route, policy))
    again = replay([msgspec.json.decode(line, type=LoggedRoute)], policy)
    assert len(again) == 60
    assert [row.replayed for row in again] == [row.logged for row in again]
    assert summary(again)[1]["decode_same"] == 1.0


def test_a_log_shows_the_cost_of_another_policy():
    _, made = choose("round_robin", 60)
    route = Route("r", 1000, 0.0)
    route.made = made
    lines, figures = summary(replay([logged(route, "round_robin")], "least_delay"))
    assert figures["placements"] == 60
    assert figures["decode_same"] < 0.5
    assert figures["decode_added_ms_replayed"] < figures["decode_added_ms_logged"]
    assert len(lines) == 2


def test_a_log_is_private_and_a_full_disk_loses_lines(tmp_path):
    lost = []
    log = RouteLog(tmp_path / "routes", "i", "least_delay", lambda: lost.append(1))
    log.write(Route("r", 3, 0.0))
    log.close()
    [path] = (tmp_path / "routes").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(path.read_bytes(), type=LoggedRoute).num_prompt_tokens == 3
    full = tmp_path / "full"
    full.mkdir()
    (full / "routes-i.jsonl").symlink_to("/dev/full")
    log = RouteLog(full, "i", "least_delay", lambda: lost.append(1))
    log.write(Route("r", 3, 0.0))
    log.close()
    assert len(lost) == 1


def test_a_line_that_fails_or_is_torn_loses_only_itself(tmp_path):
    lost = []
    log = RouteLog(tmp_path, "i", "least_delay", lambda: lost.append(1))
    wrong = Route("r", 3, 0.0)
    wrong.made = [None]
    log.write(wrong)
    log.write(Route("r", 4, 0.0))
    log.close()
    assert len(lost) == 1
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:9] + whole + whole + whole[:-9])
    routes, num_unreadable = read([path])
    assert [route.num_prompt_tokens for route in routes] == [4]
    assert num_unreadable == 2


def test_log_lines_of_another_version_are_counted_and_skipped(tmp_path):
    _, made = choose("least_delay", 2)
    routes = [Route(name, 1000, 0.0) for name in ("new", "old")]
    for route, choice in zip(routes, made, strict=True):
        route.made = [choice]
    new, old = (logged(route, "least_delay") for route in routes)
    del old.choices[0].columns["spare_prompt_s"]
    path = tmp_path / "routes.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, (new, old))))
    routes, num_unreadable = read([path])
    assert len(replay(routes, "least_delay")) == 1
    assert num_unreadable == 1


def test_a_migrated_stream_has_no_actual_token_time():
    _, [first, second] = choose("least_delay", 2)
    route = Route("r", 1000, 0.0)
    route.made = [first]
    route.began(512, 1.0)
    route.last_s, route.num_tokens = 3.0, 5
    assert route.actual == (1.0 - first.made_s, 0.5, 512)
    route.made.append(second._replace(made_s=2.0))
    assert route.actual.token_s is None
    assert route.of_prompt is first
    assert math.isfinite(route.predicted.ttft_s)
