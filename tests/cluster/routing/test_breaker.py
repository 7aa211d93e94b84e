"""Circuit breakers: when a replica is shut out, for how long, and how it is probed."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.routing.breaker import FIRST_OPEN_S, FORGET_S, MAX_OPEN_S, THRESHOLD, Breakers

REPLICAS = ["a", "b", "c"]
replica = st.sampled_from(REPLICAS)


def trip(breakers, now_s, name="a"):
    """Record failures until the breaker opens; return when it is half open."""
    while breakers.state(name) != "open":
        breakers.failed(name, now_s)
    return next(
        now_s + wait for wait in (2.0**i for i in range(1, 8)) if probe_after(breakers, now_s, wait)
    )


def probe_after(breakers, now_s, wait_s, name="a"):
    breakers.expire(now_s + wait_s)
    return breakers.state(name) == "half_open"


def test_a_breaker_opens_only_after_consecutive_failures():
    breakers = Breakers()
    for _ in range(10):
        for _ in range(THRESHOLD - 1):
            assert not breakers.failed("a", 0.0)
        assert not breakers.succeeded("a")
    assert breakers.admits("a")
    for _ in range(THRESHOLD - 1):
        assert not breakers.failed("a", 0.0)
    assert breakers.failed("a", 0.0)
    assert breakers.state("a") == "open"
    assert breakers.admits("b")


def test_one_request_probes_and_its_token_closes_the_breaker():
    breakers = Breakers()
    now_s = trip(breakers, 0.0)
    assert now_s == FIRST_OPEN_S
    assert breakers.sent("a", "r1")
    assert breakers.state("a") == "probing"
    assert not breakers.admits("a")
    assert not breakers.sent("a", "r2")
    assert not breakers.ended("a", "r2")
    assert breakers.succeeded("a")
    assert breakers.state("a") == "closed"


def test_a_probe_whose_client_leaves_is_sent_again():
    breakers = Breakers()
    trip(breakers, 0.0)
    breakers.sent("a", "r1")
    assert breakers.ended("a", "r1")
    assert breakers.state("a") == "half_open"


def test_each_failed_probe_doubles_the_time_up_to_a_limit_and_a_success_forgets_that():
    breakers = Breakers()
    now_s, waits = trip(breakers, 0.0), []
    for _ in range(8):
        breakers.sent("a", "r")
        breakers.failed("a", now_s)
        wait_s = 1.0
        while breakers.state("a") == "open":
            wait_s += 1.0
            breakers.expire(now_s + wait_s)
        waits.append(wait_s)
        now_s += wait_s
    assert waits == [4.0, 8.0, 16.0, 32.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]
    breakers.succeeded("a")
    assert trip(breakers, now_s) == now_s + FIRST_OPEN_S


def test_old_breakers_are_forgotten():
    breakers = Breakers()
    breakers.failed("a", 0.0)
    breakers.expire(FORGET_S - 1.0)
    breakers.failed("a", FORGET_S - 1.0)
    breakers.expire(3 * FORGET_S)
    for _ in range(THRESHOLD - 1):
        breakers.failed("a", 3 * FORGET_S)
    assert breakers.admits("a")


class Machine(RuleBasedStateMachine):
    """Three replicas with any events: each one comes back, one request at a time."""

    def __init__(self):
        super().__init__()
        self.breakers = Breakers()
        self.now_s = 0.0
        self.num_requests = 0
        self.out = {name: set() for name in REPLICAS}
        self.probes = {name: set() for name in REPLICAS}

    def changes(self, name, change):
        """Exactly the replicas that are reported as changed have changed."""
        before = {name: self.breakers.admits(name) for name in REPLICAS}
        said = change()
        after = {name: self.breakers.admits(name) for name in REPLICAS}
        assert said == (before[name] != after[name])
        assert all(before[other] == after[other] for other in REPLICAS if other != name)

    @rule(name=replica)
    def send(self, name):
        if not self.breakers.admits(name):
            return
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        is_probe = self.breakers.state(name) == "half_open"
        self.changes(name, lambda: self.breakers.sent(name, request_id))
        self.out[name].add(request_id)
        if is_probe:
            self.probes[name].add(request_id)

    @rule(name=replica)
    def succeed(self, name):
        self.changes(name, lambda: self.breakers.succeeded(name))
        assert self.breakers.state(name) == "closed"
        self.probes[name].clear()

    @rule(name=replica)
    def fail(self, name):
        was = self.breakers.state(name)
        self.changes(name, lambda: self.breakers.failed(name, self.now_s))
        assert self.breakers.state(name) == "open" or was == "closed"
        if was in {"half_open", "probing"}:
            self.probes[name].clear()

    @rule(name=replica, data=st.data())
    def end(self, name, data):
        if self.out[name]:
            request_id = data.draw(st.sampled_from(sorted(self.out[name])))
            self.out[name].discard(request_id)
            self.changes(name, lambda: self.breakers.ended(name, request_id))
            self.probes[name].discard(request_id)

    @rule(seconds=st.floats(0.0, 3 * MAX_OPEN_S))
    def wait(self, seconds):
        self.now_s += seconds
        self.breakers.expire(self.now_s)
        if seconds >= MAX_OPEN_S:
            assert all(self.breakers.state(name) != "open" for name in REPLICAS)

    @invariant()
    def at_most_one_request_tries_a_replica_that_failed(self):
        for name in REPLICAS:
            probes = self.probes[name] & self.out[name]
            assert len(probes) <= 1
            assert (self.breakers.state(name) == "probing") == bool(probes)


TestMachine = Machine.TestCase
