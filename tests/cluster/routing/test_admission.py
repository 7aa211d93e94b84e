"""Admission alone: which requests are admitted, in which order, and what refusals say."""

import math
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from cluster.config.schema import AdmissionConfig, TenantConfig
from cluster.errors import OverloadedError, SaturatedError
from cluster.routing.admission import Admission, Supply
from cluster.routing.backlog import PromptEngine
from cluster.routing.demand import Demand
from cluster.routing.helpers import Helper
from cluster.routing.tenants import MAX_AWAY, FairLine

TOKEN_S = 1e-3
STEP_TOKENS = 4096
NEVER_S = 1e9


def supply(num_engines=1, num_slots=64, num_empty_slots=64, num_helpers=0):
    engines = {f"e{i}": PromptEngine(0, STEP_TOKENS) for i in range(num_engines)}
    helpers = {f"h{i}": Helper((0, 1), STEP_TOKENS, i, 0, 0.01) for i in range(num_helpers)}
    return Supply(engines, num_slots, num_empty_slots, helpers)


def asks(request_id, num_tokens=1000, **fields):
    return Demand(request_id, [7] * num_tokens, **fields)


def make(max_queued_requests=10_000, timeout_s=60.0, **config):
    return Admission(AdmissionConfig(**config), max_queued_requests, timeout_s)


class Turn(NamedTuple):
    """An item in a line."""

    tenant: str
    key: tuple[float, ...]
    cost_s: float


class World:
    """Engines that take 1 ms for a token, one prompt after another, and many slots."""

    def __init__(self, admission, num_engines=1):
        self.admission = admission
        self.supply = supply(num_engines)
        self.now_s = 0.0
        self.count = 0
        self.free_s = dict.fromkeys(self.supply.prompts, 0.0)
        self.under_way = []  # (end, entry)
        self.ttft_s = {}
        self.served = []

    def teach(self, *lengths):
        """Teach the forecast how long prompts take."""
        for length in lengths * 4:
            for _ in self.supply.prompts:
                self.arrive(length, ttft_s=NEVER_S)
            self.run(self.now_s + 1000.0)
        self.ttft_s.clear()
        self.served.clear()

    def arrive(self, num_tokens=1000, **fields):
        self.count += 1
        demand = asks(f"r{self.count}", num_tokens, **fields)
        entry = self.admission.arrive(demand, self.now_s, self.supply)
        self.go_on()
        return entry

    def go_on(self):
        for entry in self.admission.assign(self.now_s, self.supply):
            engine = min(self.free_s, key=self.free_s.get)
            self.admission.asked(entry, engine, self.now_s)
            self.admission.placed(entry)
            self.served.append(entry)
            start_s = max(self.free_s[engine], self.now_s)
            self.free_s[engine] = start_s + entry.num_tokens * TOKEN_S
            self.under_way.append((self.free_s[engine], entry))
        self.under_way.sort(key=lambda pair: pair[0])

    def run(self, until_s):
        while self.under_way and self.under_way[0][0] <= until_s:
            self.now_s, entry = self.under_way.pop(0)
            self.admission.first_token(entry, self.now_s)
            self.ttft_s[entry] = self.now_s - entry.arrived_s
            self.admission.end(entry, self.now_s, 1)
            self.admission.expire(self.now_s)
            self.go_on()
        self.now_s = until_s
        self.admission.expire(until_s)
        self.go_on()


# --- what a decision says -------------------------------------------------------------------------


def test_a_late_request_is_refused_with_the_time_to_retry():
    world = World(make(ttft_s=2.5))
    world.teach(1000)
    for _ in range(2):
        world.arrive()
    with pytest.raises(OverloadedError) as refused:
        world.arrive()
    assert refused.value.status == 429
    assert refused.value.retry_after_s >= 1
    world.run(world.now_s + refused.value.retry_after_s)
    assert world.arrive().ttft_s == 2.5


def test_admitted_requests_keep_the_objective():
    world = World(make(ttft_s=2.5), num_engines=2)
    world.teach(1000, 300)
    refused = 0
    for i in range(400):
        world.run(world.now_s + 0.1)
        try:
            world.arrive(1000 if i % 3 else 300)
        except OverloadedError:
            refused += 1
    world.run(world.now_s + 100.0)
    assert refused > 100
    kept = [ttft_s <= 2.5 for ttft_s in world.ttft_s.values()]
    assert len(kept) > 150
    assert sum(kept) >= 0.85 * len(kept)


def test_without_samples_every_request_is_admitted():
    world = World(make(ttft_s=0.1))
    for _ in range(50):
        world.arrive()


def test_without_an_objective_all_requests_are_served_in_order():
    world = World(make())
    world.teach(1000)
    entries = [world.arrive() for _ in range(50)]
    world.run(world.now_s + 40.0)
    assert world.served == entries[: len(world.served)]
    assert len(world.served) >= 40


def test_a_prompt_too_long_for_its_objective_is_served_when_engines_are_idle():
    world = World(make(ttft_s=0.5))
    world.teach(100, 2000)
    world.arrive(100)
    with pytest.raises(OverloadedError) as refused:
        world.arrive(2000)
    world.run(world.now_s + refused.value.retry_after_s)
    entry = world.arrive(2000)
    world.run(world.now_s + 10.0)
    assert entry in world.ttft_s


def test_queued_requests_are_admitted_by_deadline():
    world = World(make(ttft_s=100.0))
    world.teach(1000)
    world.arrive(4000)
    late = world.arrive()
    urgent = world.arrive(ttft_s=20.0)
    world.run(world.now_s + 50.0)
    assert world.served[1:] == [urgent, late]


def test_a_request_may_have_its_own_objective():
    world = World(make(ttft_s=1e6))
    world.teach(1000)
    world.arrive()
    with pytest.raises(OverloadedError):
        world.arrive(ttft_s=1.2)
    world.arrive()


def test_a_queued_request_expires_at_the_last_useful_moment():
    world = World(make(ttft_s=5.0))
    world.teach(1000)
    first = world.arrive()
    waiting = world.arrive(4000, ttft_s=NEVER_S)
    slow = world.arrive(1000, ttft_s=50.0)
    assert first.passed_s is not None
    assert waiting.passed_s is None
    # The engine stands still: nothing is heard of the first.
    world.now_s = slow.latest_s
    assert world.admission.expire(slow.latest_s - 1e-6) == []
    assert world.admission.expire(slow.latest_s) == [slow]
    assert slow.latest_s < slow.arrived_s + 50.0


def test_queued_tokens_and_requests_are_bounded():
    world = World(make(max_queued_requests=2))
    world.teach(1000)
    world.arrive(4096)
    world.arrive()
    world.arrive()
    with pytest.raises(SaturatedError) as refused:
        world.arrive()
    assert refused.value.retry_after_s >= 4
    world = World(make(max_queued_tokens=2500))
    world.teach(1000)
    world.arrive(4096)
    world.arrive()
    with pytest.raises(SaturatedError, match="1 requests with 1000 prompt tokens"):
        world.arrive(2000)
    world.arrive()


def test_a_full_queue_admits_a_tenant_with_fewer_queued_requests():
    world = World(make(max_queued_requests=4))
    world.teach(1000)
    world.arrive(4096)
    flood = [world.arrive(tenant="flood") for _ in range(4)]
    for entry in reversed(flood[2:]):
        with pytest.raises(SaturatedError):
            world.arrive(tenant="flood")
        world.arrive(tenant="other")
        assert world.admission.overflow(world.now_s) == [entry]
    with pytest.raises(SaturatedError):
        world.arrive(tenant="other")
    assert world.admission.overflow(world.now_s) == []
    assert len(world.admission) == 4


def test_a_tenants_priority_goes_first():
    world = World(make(tenants={"t": TenantConfig(priority=-1)}))
    world.teach(1000)
    world.arrive(4096)
    others = [world.arrive(tenant="u") for _ in range(3)]
    first = world.arrive(tenant="t")
    world.run(world.now_s + 60.0)
    assert world.served[1:] == [first, *others]


def test_slots_are_not_given_out_twice():
    admission = make()
    few = supply(4, num_slots=2, num_empty_slots=2)
    entries = [admission.arrive(asks(f"r{i}"), 0.0, few) for i in range(4)]
    assert admission.assign(0.0, few) == entries[:2]
    assert admission.assign(0.0, few) == []
    # From now on the pools count its slot.
    admission.placed(entries[0])
    assert admission.assign(0.0, few._replace(num_empty_slots=1)) == []
    admission.end(entries[1], 1.0)
    assert admission.assign(1.0, few._replace(num_empty_slots=1)) == [entries[2]]


def test_admitted_load_is_limited_by_the_objective_per_token():
    admission = make(tpot_s=0.101)
    for load in range(1, 40):
        admission.forecast.tokens.add(load % 10, 0.05 + 0.01 * (load % 10))
    many = supply(8)
    entries = [admission.arrive(asks(f"r{i}", 10), 0.0, many) for i in range(9)]
    passed = admission.assign(0.0, many)
    assert passed == entries[:5]


# --- properties -----------------------------------------------------------------------------------

LENGTHS = st.integers(16, 6000)
POWERS = st.sampled_from([128, 256, 512, 1024, 2048, 4096])
"""What a forecast tells apart."""


@given(st.lists(LENGTHS, max_size=30), st.lists(LENGTHS, max_size=10), LENGTHS, st.integers(1, 4))
def test_more_load_never_shortens_the_time_to_retry(less, more, length, num_engines):
    """A request that is admitted under more load is also admitted under less."""
    retry_s = []
    for load in (less, [*less, *more]):
        admission = make(ttft_s=3.0)
        admission.forecast.saw_prompts([1000], 1000 * TOKEN_S)
        pools = supply(num_engines)
        for i, n in enumerate(load):
            entry = admission.arrive(asks(f"r{i}", n, ttft_s=NEVER_S), 0.0, pools)
            assert entry.latest_s > 0.0
        for i, entry in enumerate(admission.assign(0.0, pools)):
            admission.asked(entry, f"e{i % num_engines}", 0.0)
        try:
            admission.arrive(asks("last", length), 0.0, pools)
        except OverloadedError as error:
            retry_s.append(error.retry_after_s)
        else:
            retry_s.append(0)
    assert retry_s[0] <= retry_s[1]


@given(
    st.lists(POWERS, min_size=5, max_size=40), POWERS, st.integers(1, 4), st.sampled_from([1, 3])
)
def test_a_request_that_retries_after_the_given_time_is_admitted(load, length, num_engines, ttft_s):
    world = World(make(ttft_s=float(ttft_s)), num_engines)
    world.admission.forecast.saw_prompts([1000], 1000 * TOKEN_S)
    for n in load:
        world.arrive(n, ttft_s=NEVER_S)
    before = repr(world.admission)
    try:
        world.arrive(length)
    except OverloadedError as error:
        refused = error
    else:
        assume(False)
        return
    # One that was refused never held anything.
    assert repr(world.admission) == before
    world.admission.check_invariants()
    world.run(world.now_s + refused.retry_after_s)
    # Prompts are whole, and predictions share them out: an engine may be behind by one.
    world.run(world.now_s + max(load) * TOKEN_S)
    world.arrive(length)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 10.0)), min_size=10, max_size=80),
    st.floats(0.5, 3.0),
)
def test_tenants_shares_differ_by_at_most_a_request_of_each(arrivals, weight):
    """Weighted shares, as long as both tenants have requests waiting."""
    weights = {"a": weight, "b": 1.0, "c": 1.0}
    line = FairLine(weights.get)
    for i, (tenant, cost_s) in enumerate(arrivals):
        line.enter(Turn(tenant, (0, i), cost_s))
    most_s = {t: max([c for u, c in arrivals if u == t], default=0.0) for t in weights}
    had_s = dict.fromkeys(weights, 0.0)
    while line:
        turn = line.first()
        line.serve(turn, turn.cost_s)
        had_s[turn.tenant] += turn.cost_s / weights[turn.tenant]
        waiting = {other.tenant for other in line}
        for one in waiting:
            for other in waiting - {one}:
                spread_s = most_s[one] / weights[one] + most_s[other] / weights[other]
                assert abs(had_s[one] - had_s[other]) <= spread_s + 1e-9


def test_a_tenant_saves_up_no_credit_while_it_is_absent():
    line = FairLine(lambda _tenant: 1.0)
    for i in range(30):
        line.enter(Turn("a", (0, i), 1.0))
    for _ in range(20):
        line.serve(line.first(), 1.0)
    for i in range(30, 40):
        line.enter(Turn("b", (0, i), 1.0))
    served = []
    for _ in range(8):
        served.append(line.first().tenant)
        line.serve(line.first(), 1.0)
    assert served.count("a") == 4


def test_an_overcharge_is_given_back():
    line = FairLine(lambda _tenant: 1.0)
    for i in range(4):
        line.enter(Turn("ab"[i % 2], (0, i), 1.0))
    line.serve(line.first(), 10.0)
    assert line.first().tenant == "b"
    line.serve(line.first(), 5.0)
    line.charge("a", -9.0)
    assert line.first().tenant == "a"


def test_one_tenants_flood_does_not_delay_another():
    world = World(make())
    world.teach(1000)
    for _ in range(100):
        world.arrive(tenant="flood")
    entry = world.arrive(tenant="other")
    world.run(world.now_s + 8.0)
    assert entry in world.ttft_s


def test_an_objective_that_cannot_be_kept_does_not_delay_other_requests():
    admission, all_slots = make(), supply()
    for i in range(20):
        entry = admission.arrive(asks(f"r{i}"), 10.0 * i, all_slots)
        assert admission.assign(10.0 * i, all_slots) == [entry]
        admission.placed(entry)
        admission.first_token(entry, 10.0 * i + 1.0)
        admission.end(entry, 10.0 * i + 2.0, 10)
    decoding = admission.arrive(asks("decoding"), 300.0, all_slots)
    assert admission.assign(300.0, all_slots) == [decoding]
    admission.placed(decoding)
    admission.first_token(decoding, 301.0)
    never = admission.arrive(asks("never", tenant="a", tpot_s=1e-6), 301.0, all_slots)
    assert admission.assign(301.0, all_slots) == []
    others = [
        admission.arrive(asks(f"other {tenant}", 10, tenant=tenant), 302.0, all_slots)
        for tenant in "ab"
    ]
    assert set(admission.assign(302.0, all_slots)) <= set(others)
    for entry in others:
        admission.asked(entry, "e0", 302.0)
        admission.first_token(entry, 302.1)
        admission.assign(302.1, all_slots)
    assert all(entry.passed_s is not None for entry in others)
    assert never.passed_s is None
    for entry in (decoding, *others):
        admission.end(entry, 303.0)
    assert admission.assign(303.0, all_slots) == [never], "alone it does no harm"


def test_accounts_of_absent_tenants_are_bounded():
    line = FairLine(lambda _tenant: 1.0)
    most = 0
    line.enter(Turn("rich", (0, 0), 1.0))
    line.serve(line.first(), 1e6)
    line.release("rich")
    for i in range(5 * MAX_AWAY):
        line.enter(Turn(f"t{i}", (0, i), 1.0))
        line.serve(line.first(), 1.0)
        line.charge(f"t{i}", 1.0)
        line.release(f"t{i}")
        most = max(most, line.num_accounts)
    assert most <= MAX_AWAY + 1
    assert line.had_s("rich") == 1e6, "the account furthest ahead is kept"


class AdmissionMachine(RuleBasedStateMachine):
    """Events in any order: no request is lost, or in two places."""

    entries = Bundle("entries")

    @initialize(
        ttft_s=st.sampled_from([None, 0.5, 5.0]),
        tpot_s=st.sampled_from([None, 0.05]),
        num_slots=st.integers(1, 8),
        num_engines=st.integers(1, 3),
        num_helpers=st.integers(0, 3),
    )
    def begin(self, ttft_s, tpot_s, num_slots, num_engines, num_helpers):
        self.admission = make(ttft_s=ttft_s, tpot_s=tpot_s, max_queued_tokens=20_000)
        self.num_slots, self.num_engines = num_slots, num_engines
        self.num_helpers = num_helpers
        self.now_s = 0.0
        self.count = 0
        self.waiting, self.passed, self.placed = [], {}, set()

    @property
    def supply(self):
        num_empty_slots = self.num_slots - len(self.placed)
        return supply(self.num_engines, self.num_slots, num_empty_slots, self.num_helpers)

    def settle(self):
        for entry in self.admission.assign(self.now_s, self.supply):
            assert entry in self.waiting
            assert entry.helper is None or entry.engine == entry.helper.incarnation
            self.waiting.remove(entry)
            self.passed[entry] = None

    @rule(
        target=entries,
        num_tokens=LENGTHS,
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        tpot_s=st.sampled_from([None, 1e-6]),
    )
    def arrive(self, num_tokens, tenant, priority, tpot_s):
        self.count += 1
        fields = {"tenant": tenant, "priority": priority, "tpot_s": tpot_s}
        demand = asks(f"r{self.count}", num_tokens, **fields)
        try:
            entry = self.admission.arrive(demand, self.now_s, self.supply)
        except (OverloadedError, SaturatedError):
            return None
        assert entry.latest_s >= self.now_s
        self.waiting.append(entry)
        for over in self.admission.overflow(self.now_s):
            self.waiting.remove(over)
        self.settle()
        return entry

    @rule(entry=entries, engine=st.integers(0, 3))
    def ask(self, entry, engine):
        if entry in self.passed:
            self.admission.asked(entry, f"e{engine}", self.now_s)

    @rule(entry=entries)
    def place(self, entry):
        if entry in self.passed and len(self.placed) < self.num_slots:
            self.placed.add(entry)
            self.admission.placed(entry)

    @rule(entry=entries)
    def first_token(self, entry):
        if entry in self.passed:
            self.admission.first_token(entry, self.now_s)
            self.settle()

    @rule(entry=consumes(entries), num_tokens=st.integers(0, 50))
    def end(self, entry, num_tokens):
        if entry is None:
            return
        for _ in range(2):
            self.admission.end(entry, self.now_s, num_tokens)
        if entry in self.waiting:
            self.waiting.remove(entry)
        self.passed.pop(entry, None)
        self.placed.discard(entry)
        self.settle()

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds):
        self.now_s += seconds
        late = [entry for entry in self.waiting if entry.latest_s <= self.now_s]
        assert sorted(self.admission.expire(self.now_s), key=id) == sorted(late, key=id)
        self.waiting = [entry for entry in self.waiting if entry not in late]
        self.settle()

    @invariant()
    def everybody_is_in_one_place(self):
        if not hasattr(self, "admission"):
            return
        self.admission.check_invariants()
        assert len(self.admission) == len(self.waiting)
        assert self.placed <= {*self.passed}
        assert len(self.passed) <= self.num_slots
        # No request starves: an idle cluster with a free slot admits any queued request.
        if not self.passed:
            assert not self.waiting

    def teardown(self):
        if hasattr(self, "admission"):
            for entry in [*self.waiting, *self.passed]:
                self.admission.end(entry, self.now_s)
            self.admission.check_empty()


TestAdmissionMachine = AdmissionMachine.TestCase


def test_forecast_shares_the_time_of_prompts_that_end_together():
    forecast = make().forecast
    for _ in range(200):
        forecast.saw_prompts([100], 0.1)
        forecast.saw_prompts([100, 1000], 1.1)
    assert math.isclose(forecast.prompt_s(100), 0.1, rel_tol=0.05)
    assert math.isclose(forecast.prompt_s(1000), 1.0, rel_tol=0.05)


def test_a_slope_within_noise_limits_no_request():
    line = make().forecast.tokens
    for i in range(100):
        line.add(i % 7, 0.05 + 0.02 * ((i * 37) % 11) / 11)
    assert line.largest_x(0.1) is None
    assert line.largest_x(0.01) == 0.0
