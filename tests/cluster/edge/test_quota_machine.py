"""Limits over several ingresses without tasks: values and times in, decisions out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.schema import TenantLimits
from cluster.edge.quota_machine import QuotaMachine, QuotaRequest
from cluster.edge.quotas import Ask

TENANTS = ("a", "b", "c")
ACTIONS = st.tuples(
    st.sampled_from(["begin", "end", "cancel", "start", "finish", "charge", "wait"]),
    st.integers(0, 2),
    st.sampled_from(TENANTS),
    st.integers(1, 3),
)


class Network:
    """Ingresses whose exchanges begin and end in steps, on a clock that only steps move."""

    def __init__(self, num_ingresses, limits):
        self.limits = limits
        self.now_s = 0.0
        self.machines = [QuotaMachine(f"ingress {i}") for i in range(num_ingresses)]
        self.exchanges = [None] * num_ingresses
        self.requests = [[] for _ in self.machines]
        self.meet()

    def meet(self):
        for number in range(len(self.machines)):
            self.finish(number)
            self.start(number)
            self.finish(number)

    def begin(self, number, tenant, num=1):
        request = QuotaRequest(tenant, self.limits, Ask(num))
        self.machines[number].begin(request, self.now_s)
        self.requests[number].append(request)
        return request

    def end(self, number):
        """End the oldest open request of an ingress."""
        held = [r for r in self.requests[number] if is_open(r)]
        if held:
            self.requests[number].remove(held[0])
            self.machines[number].end(held[0], self.now_s)

    def cancel(self, number):
        """Cancel the newest request of an ingress, which may wait or be open."""
        held = [r for r in self.requests[number] if not r.is_decided or r.refusal is None]
        if held:
            self.requests[number].remove(held[-1])
            self.machines[number].cancel(held[-1], self.now_s)

    def start(self, number):
        """Begin an exchange; all ingresses answer at once, but the answers are under way."""
        if self.exchanges[number] is None:
            exchange, _ = self.machines[number].begin_exchange(self.now_s)
            answers = [machine.answer(exchange, self.now_s) for machine in self.machines]
            self.exchanges[number] = (exchange, answers, self.now_s)

    def finish(self, number):
        if self.exchanges[number] is not None:
            (exchange, answers, begun_s), self.exchanges[number] = self.exchanges[number], None
            ended = self.machines[number].end_exchange(exchange, answers, begun_s, self.now_s)
            assert ended.num_silent == 0

    def act(self, action, number, tenant, count):
        if action == "begin":
            self.begin(number, tenant, count)
        elif action == "charge":
            self.machines[number].charge(tenant, self.limits, count, self.now_s)
        elif action == "wait":
            self.now_s += count * 0.05
        else:
            getattr(self, action)(number)

    def num_open(self, tenant):
        return sum(
            request.ask.num
            for held in self.requests
            for request in held
            if request.tenant == tenant and is_open(request)
        )


def is_open(request):
    return request.is_decided and request.refusal is None


@given(st.lists(ACTIONS, max_size=60), st.integers(1, 4))
def test_ingresses_that_hear_each_other_never_admit_more_than_the_limit(steps, most):
    network = Network(3, TenantLimits(max_requests=most))
    for step in steps:
        network.act(*step)
        # An exchange that took longer than an instant lets an ingress count alone for a while.
        if step[0] == "wait":
            network.meet()
        for tenant in TENANTS:
            assert network.num_open(tenant) <= most


@given(st.lists(ACTIONS, max_size=60), st.integers(1, 4))
def test_every_request_is_decided_and_what_has_ended_is_forgotten(steps, most):
    limits = TenantLimits(max_requests=most, requests_per_minute=30, tokens_per_minute=30)
    network = Network(3, limits)
    for step in steps:
        network.act(*step)
    network.meet()
    network.meet()
    assert all(request.is_decided for held in network.requests for request in held)
    for number, held in enumerate(network.requests):
        for _ in range(len(held)):
            network.end(number)
    for _ in range(3):
        network.now_s += 121.0
        network.meet()
    for machine in network.machines:
        assert (len(machine.book), machine.num_tenants, machine.is_waiting) == (0, 0, False)


@given(st.lists(st.floats(0.0, 90.0), min_size=1, max_size=40), st.integers(1, 9))
def test_a_window_admits_its_requests_and_names_the_time_of_the_next(waits, per_minute):
    network = Network(1, TenantLimits(requests_per_minute=per_minute))
    times = []
    for wait_s in waits:
        network.now_s += wait_s
        request = network.begin(0, "a")
        if request.refusal is not None:
            # A little earlier it is refused, then admitted.
            early_s = request.refusal.retry_after_s * 0.99
            network.now_s += early_s
            assert network.begin(0, "a").refusal is not None
            network.now_s += request.refusal.retry_after_s - early_s + 1e-6
            assert network.begin(0, "a").refusal is None
        times.append(network.now_s)
    for start in times:
        num = sum(start <= each < start + 60.0 for each in times)
        assert num <= 2 * per_minute


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=30))
def test_tokens_of_all_ingresses_are_taken_from_one_allowance(charges):
    network = Network(3, TenantLimits(tokens_per_minute=1000))
    for number in range(3):
        network.begin(number, "a")
    network.meet()
    for number, num_tokens in charges:
        network.machines[number].charge("a", network.limits, num_tokens, network.now_s)
    network.meet()
    network.meet()
    left = 1000 - sum(num_tokens for _, num_tokens in charges)
    for machine in network.machines:
        account = machine.book.account("a", network.limits, network.now_s)
        assert account.tokens.level(network.now_s) == pytest.approx(left)


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "silent"])
def test_without_its_owner_an_ingress_decides_alone_for_a_while(fails):
    network = Network(2, TenantLimits(max_requests=1))
    one, other = network.machines
    tenant = next(name for name in map(str, range(99)) if one.owner(name) == other.ingress)
    waiting = network.begin(0, tenant)
    assert not waiting.is_decided
    exchange, _ = one.begin_exchange(network.now_s)
    if fails:
        decided = one.fail_exchange(network.now_s)
    else:
        own = one.answer(exchange, network.now_s)
        decided, num_silent = one.end_exchange(exchange, [own], network.now_s, network.now_s)
        assert num_silent == 1
    assert decided == [waiting]
    assert is_open(waiting)
    assert network.begin(0, tenant).refusal is not None
    network.now_s += 2.1
    network.meet()
    assert not network.begin(0, tenant).is_decided
