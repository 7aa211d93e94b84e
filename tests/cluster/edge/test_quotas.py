"""Limits of tenants: the pure counts, several ingresses that share them, and answers over HTTP."""

import asyncio
import contextlib
import dataclasses
import math
from collections import deque
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import AdmissionConfig, IngressConfig, TenantConfig, TenantLimits
from cluster.edge.quota_machine import Exchange, TenantReport
from cluster.edge.quota_service import QUESTION, TenantQuotas, lease_of
from cluster.edge.quotas import Allowance, Ask, QuotaBook, duration, rate_headers
from cluster.edge.routes import create_app
from cluster.edge.tenants import Tenant
from cluster.errors import BadRequestError, QuotaError, SaturatedError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import Client

MOMENTS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=40)


# --- allowances -----------------------------------------------------------------------------------


@given(st.integers(1, 6000), MOMENTS)
def test_what_is_taken_never_exceeds_the_limit_by_more_than_the_last_amount(limit, moments):
    allowance = Allowance(limit, 0.0)
    now_s, taken, largest = 0.0, 0.0, 0
    for pause_s, amount in moments:
        now_s += pause_s
        if allowance.level(now_s) >= 1.0:
            allowance.take(amount, now_s)
            taken, largest = taken + amount, max(largest, amount)
        assert taken <= limit * (1 + now_s / 60) + largest
        assert allowance.level(now_s) <= limit


@given(st.integers(1, 6000), MOMENTS)
def test_after_the_time_to_wait_the_level_is_there_and_before_it_is_not(limit, moments):
    allowance, now_s = Allowance(limit, 0.0), 0.0
    for pause_s, amount in moments:
        now_s += pause_s
        allowance.take(amount, now_s)
    wait_s = allowance.wait_s(1.0, now_s)
    assert allowance.level(now_s + wait_s * (1 + 1e-9) + 1e-6) >= 1.0 - 1e-6
    assert wait_s == 0.0 or allowance.level(now_s + 0.9 * wait_s) < 1.0


def test_a_changed_limit_keeps_what_was_taken():
    allowance = Allowance(100, 0.0)
    allowance.take(60, 0.0)
    allowance.change_limit(50, 0.0)
    assert allowance.level(0.0) == -10
    allowance.change_limit(200, 0.0)
    assert allowance.level(0.0) == 140
    allowance.change_limit(math.inf, 0.0)
    assert allowance.level(0.0) == math.inf


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert duration(seconds) == text


def test_headers_name_only_what_is_limited():
    account = QuotaBook().account("a", TenantLimits(tokens_per_minute=600), 0.0)
    account.tokens.take(100, 0.0)
    assert rate_headers(account, 0.0) == [
        (b"x-ratelimit-limit-tokens", b"600"),
        (b"x-ratelimit-remaining-tokens", b"500"),
        (b"x-ratelimit-reset-tokens", b"10s"),
    ]
    assert rate_headers(QuotaBook().account("a", TenantLimits(max_requests=1), 0.0), 0.0) == []


def test_an_account_is_dropped_when_a_new_one_would_be_the_same():
    book, limits = QuotaBook(), TenantLimits(requests_per_minute=60)
    assert book.admit("a", limits, "i", 0.0) is None
    book.set_open(book.account("a", limits, 0.0), "i", 0)
    book.drop_idle(0.5)
    assert len(book) == 1
    book.drop_idle(1.0)
    assert len(book) == 0


def test_work_behind_the_answer_counts_as_an_open_request():
    async def run():
        quotas, scope = TenantQuotas(clock=lambda: 0.0), {}
        tenant = Tenant.limited("a", TenantLimits(max_requests=1))
        async with quotas.hold(tenant, scope):
            extension = lease_of(scope).extend()
            extension.__enter__()
        with pytest.raises(QuotaError):
            await quotas.hold(tenant, {}).__aenter__()
        extension.__exit__(None, None, None)
        async with quotas.hold(tenant, {}):
            pass

    asyncio.run(run())


# --- ingresses that share limits ------------------------------------------------------------------


class Network:
    """Ingresses that reach each other unless one is cut off; time is the test's."""

    def __init__(self, count):
        self.now_s = 100.0
        self.cut = set()
        self.nodes = [TenantQuotas(Peer(self, i), lambda: self.now_s) for i in range(count)]

    def tenant_owned_by(self, number, limits):
        names = (f"tenant-{i}" for i in range(1000))
        node = self.nodes[number]
        name = next(name for name in names if node._machine.owner(name) == node._machine.ingress)
        return Tenant.limited(name, limits)

    async def meet(self):
        for node in self.nodes:
            await node.exchange()


class Peer:
    def __init__(self, network, number):
        self._network, self._number = network, number

    async def ask_all(self, question, payload, timeout_s):
        assert question == QUESTION
        network = self._network
        if self._number in network.cut:
            return []
        nodes = [n for i, n in enumerate(network.nodes) if i not in network.cut]
        return [node.answer(payload) for node in nodes]


async def opened(network, number, tenant, held):
    """Try to open a request at an ingress; returns whether it was admitted."""
    node, scope = network.nodes[number], {}
    holding = node.hold(tenant, scope)
    entering = asyncio.ensure_future(holding.__aenter__())
    while not entering.done():
        await asyncio.sleep(0)
        if node._machine.is_waiting:
            await node.exchange()
    try:
        await entering
    except QuotaError:
        return False
    held.append((holding, scope))
    return True


async def close(held):
    for holding, _ in held:
        await holding.__aexit__(None, None, None)
    held.clear()


@pytest.mark.parametrize("limits", [{"max_requests": 1}, {"requests_per_minute": 1}])
@pytest.mark.parametrize("owner", [0, 1, 2])
async def test_a_limit_of_one_admits_one_over_all_ingresses(limits, owner):
    network, held = Network(3), []
    await network.meet()
    tenant = network.tenant_owned_by(owner, TenantLimits(**limits))
    admitted = [await opened(network, i, tenant, held) for i in (0, 1, 2, 0, 1, 2)]
    assert admitted == [True, False, False, False, False, False]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30),
    st.integers(0, 2),
)
def test_open_requests_over_all_ingresses_never_exceed_the_limit(limit, steps, owner):
    async def run():
        network, held = Network(3), deque()
        await network.meet()
        tenant = network.tenant_owned_by(owner, TenantLimits(max_requests=limit))
        for number, ends in steps:
            if ends and held:
                holding, _ = held.popleft()
                await holding.__aexit__(None, None, None)
                await network.meet()
            else:
                is_free = len(held) < limit
                assert await opened(network, number, tenant, held) == is_free
            assert len(held) <= limit

    asyncio.run(run())


async def test_tokens_count_over_all_ingresses():
    network, held = Network(2), []
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(tokens_per_minute=100))
    assert await opened(network, 1, tenant, held)
    lease_of(held[0][1]).charge(150)
    await network.meet()
    assert not await opened(network, 0, tenant, held)
    network.now_s += 31
    assert await opened(network, 0, tenant, held)


async def test_an_ingress_without_its_owner_counts_alone_and_recovers():
    network, held = Network(2), []
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=1))
    assert await opened(network, 1, tenant, held)
    network.cut = {0}
    await network.nodes[1].exchange()
    assert not await opened(network, 1, tenant, held)  # its own count still holds
    assert not await opened(network, 0, tenant, held)  # so does what the owner heard last
    network.cut = set()
    await close(held)
    await network.meet()
    await network.meet()
    assert await opened(network, 0, tenant, held)
    assert not await opened(network, 1, tenant, held)


async def test_a_new_owner_takes_over_the_counts_of_the_others():
    network, held = Network(2), []
    await network.meet()
    limits = TenantLimits(max_requests=2, requests_per_minute=3)
    tenant = network.tenant_owned_by(0, limits)
    assert await opened(network, 1, tenant, held)
    assert await opened(network, 1, tenant, held)
    network.nodes.append(TenantQuotas(Peer(network, 2), lambda: network.now_s))
    network.cut = {0}
    await network.nodes[2].exchange()
    for _ in range(2):
        await network.nodes[1].exchange()
    admitted = [await opened(network, number, tenant, []) for number in (1, 2)]
    assert admitted == [False, False]
    await close(held)
    await network.nodes[1].exchange()
    network.now_s += 2.5  # after the pause in which nothing is asked
    admitted = [await opened(network, number, tenant, held) for number in (1, 2, 1, 2)]
    assert admitted == [True, False, False, False]  # the third request of this minute


async def test_open_requests_of_a_lost_ingress_are_forgotten():
    network, held = Network(2), []
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=1))
    assert await opened(network, 1, tenant, held)
    network.cut = {1}
    network.now_s += 6
    await network.nodes[0].exchange()
    assert await opened(network, 0, tenant, held)


async def test_idle_tenants_are_forgotten():
    network, held = Network(2), []
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=1))
    await opened(network, 1, tenant, held)
    await close(held)
    for _ in range(2):
        await network.meet()
    assert [len(node._machine.book) for node in network.nodes] == [0, 0]
    assert [node._machine.num_tenants for node in network.nodes] == [0, 0]


@pytest.mark.parametrize("is_owner_cut_off", [False, True])
async def test_a_request_cancelled_in_the_turn_of_its_admission_is_not_open(is_owner_cut_off):
    network = Network(2)
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=1))
    network.cut = {0} if is_owner_cut_off else set()
    entering = asyncio.ensure_future(network.nodes[1].hold(tenant, {}).__aenter__())
    await asyncio.sleep(0)
    await network.nodes[1].exchange()  # admits the request; its task has not run since
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    network.cut = set()
    for _ in range(2):
        await network.meet()
    assert await opened(network, 0, tenant, [])


@pytest.mark.parametrize("number", [0, 1])
async def test_further_prompts_count_as_open_requests_at_every_ingress(number):
    network, held = Network(2), []
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=4, requests_per_minute=3))
    assert await opened(network, number, tenant, held)
    lease = lease_of(held[0][1])

    async def hold_further(num):
        entering = asyncio.ensure_future((holding := lease.hold_further(num)).__aenter__())
        await asyncio.sleep(0)
        await network.meet()
        await entering
        held.append((holding, {}))

    await hold_further(2)
    with pytest.raises(QuotaError):
        await hold_further(2)
    with pytest.raises(BadRequestError):
        await hold_further(4)
    await hold_further(1)
    await close(held)
    await network.meet()
    assert not await opened(network, number, tenant, held)  # four of three requests a minute
    network.now_s += 40.1
    assert await opened(network, number, tenant, held)


class OddPeer(Peer):
    """Its network also has an ingress that is starting, and one of another version."""

    async def ask_all(self, question, payload, timeout_s):
        found = await super().ask_all(question, payload, timeout_s)
        return [b"", *found, msgspec.msgpack.encode(["x", 7])]


async def test_answers_that_cannot_be_read_are_skipped_with_one_warning(caplog):
    network, held = Network(2), []
    for number, node in enumerate(network.nodes):
        node._peers = OddPeer(network, number)
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=1))
    assert await opened(network, 1, tenant, held)
    assert not await opened(network, 0, tenant, held)
    assert len([r for r in caplog.records if "cannot read" in r.getMessage()]) == 2  # one a node


async def test_after_an_exchange_that_failed_no_request_waits_for_an_owner():
    network = Network(2)
    await network.meet()
    tenant = network.tenant_owned_by(0, TenantLimits(max_requests=1))
    failed = asyncio.Event()

    class BrokenPeer:
        async def ask_all(self, question, payload, timeout_s):
            failed.set()
            raise OSError("no network")

    node = network.nodes[1]
    node._peers = BrokenPeer()
    serving = asyncio.create_task(node.run())
    await failed.wait()
    await asyncio.sleep(0)
    entering = node.hold(tenant, {}).__aenter__()
    with pytest.raises(StopIteration):  # it does not wait
        entering.send(None)
    serving.cancel()


class SlowPeer(Peer):
    """A peer whose questions and answers take some turns of the event loop, or fail."""

    def __init__(self, network, number, random):
        super().__init__(network, number)
        self._random = random

    async def ask_all(self, question, payload, timeout_s):
        await turns(self._random)
        if self._random.random() < 0.1:
            raise OSError("no network")
        found = await super().ask_all(question, payload, timeout_s)
        await turns(self._random)
        return found


async def turns(random):
    for _ in range(random.randrange(6)):
        await asyncio.sleep(0)


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=50)
def test_without_holders_nothing_is_open_whenever_requests_are_cancelled(seed, limit):
    random = Random(seed)

    async def run():
        network, limits = Network(3), TenantLimits(max_requests=limit)
        await network.meet()
        tenants = [network.tenant_owned_by(number, limits) for number in range(3)]
        for number, node in enumerate(network.nodes):
            node._peers = SlowPeer(network, number, random)

        async def request(node, tenant):
            await turns(random)
            with contextlib.suppress(QuotaError):
                async with node.hold(tenant, {}):
                    await turns(random)

        serving = [asyncio.create_task(node.run()) for node in network.nodes]
        requests = [
            asyncio.create_task(request(random.choice(network.nodes), random.choice(tenants)))
            for _ in range(30)
        ]
        for task in requests:
            await turns(random)
            if random.random() < 0.5:
                task.cancel()
        await asyncio.wait(requests)
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
        for number, node in enumerate(network.nodes):
            node._peers = Peer(network, number)
        for _ in range(2):
            await network.meet()
        for node in network.nodes:
            assert [account.open_of for account in node._machine.book._accounts.values()] == []

    asyncio.run(run())


# --- over HTTP ------------------------------------------------------------------------------------

HEADER = "x-tenant"


def serve(limits, bodies, service=None):
    """Send bodies of one tenant one after the other; returns the clients."""
    tenants = {"t": TenantConfig(**limits)}
    admission = AdmissionConfig(tenant_header=HEADER, tenants=tenants)
    app = create_app(
        service or FakeBackend(),
        IngressConfig(),
        version="1",
        admission=admission,
        quotas=TenantQuotas(clock=lambda: 0.0),
    )

    async def run():
        return [
            await Client(app).request("POST", path, body, [(HEADER, "t")]) for path, body in bodies
        ]

    return asyncio.run(run())


COMPLETION = ("/v1/completions", {"prompt": "hello", "max_tokens": 5})


def test_requests_a_minute_are_limited_and_answers_say_how_many_are_left():
    clients = serve(
        {"requests_per_minute": 2}, [COMPLETION, ("/tokenize", {"prompt": "a"}), COMPLETION]
    )
    assert [client.status for client in clients] == [200, 200, 429]
    assert [client.headers["x-ratelimit-remaining-requests"] for client in clients] == [
        "1",
        "0",
        "0",
    ]
    refused = clients[-1]
    assert refused.body["error"]["code"] == "quota"
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompt_and_output_are_limited(stream):
    body = {**COMPLETION[1], "stream": stream}
    clients = serve({"tokens_per_minute": 20}, [(COMPLETION[0], body)] * 3)
    assert [client.status for client in clients] == [200, 200, 429]
    # A stream's headers are sent with its first token.
    left = int(clients[0].headers["x-ratelimit-remaining-tokens"])
    assert left == (14 if stream else 10)
    assert clients[2].headers["x-ratelimit-limit-tokens"] == "20"


def test_open_requests_are_limited_and_end_with_their_answer():
    clients = serve({"max_requests": 1}, [COMPLETION] * 3)
    assert [client.status for client in clients] == [200] * 3
    assert "x-ratelimit-limit-requests" not in clients[0].headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_refused_without_output_is_charged_no_tokens(stream):
    async def refuse(request, emit):
        raise SaturatedError("the queue is full")

    body = {**COMPLETION[1], "stream": stream}
    [client] = serve({"tokens_per_minute": 20}, [(COMPLETION[0], body)], FakeBackend(refuse))
    assert client.status == 429
    assert client.headers["x-ratelimit-remaining-tokens"] == "20"


async def test_tokens_are_charged_as_they_come_and_kept_by_a_later_failure():
    quotas = TenantQuotas(clock=lambda: 0.0)
    tenant, scope, left = Tenant.limited("t", TenantLimits(tokens_per_minute=100)), {}, []

    def remaining():
        return int(dict(lease_of(scope).headers())[b"x-ratelimit-remaining-tokens"])

    async def emit(delta):
        left.append(remaining())

    async def generate(emit):
        await emit(OutputDelta(0, "ab", [1, 2]))
        await emit(OutputDelta(0, "c", [3]))
        raise SaturatedError("moved, and found no place")

    async with quotas.hold(tenant, scope):
        with pytest.raises(SaturatedError):
            await lease_of(scope).count_tokens(generate, 10)(emit)
    assert [*left, remaining()] == [88, 87, 87]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/v1/rerank", "documents")],
)
def test_every_prompt_of_a_request_counts_against_the_limits(path, field):
    def body(num):
        more = {"query": "q"} if field == "documents" else {}
        return path, {field: ["a"] * num, **more}

    num_own = 1 if field == "documents" else 0  # the query
    clients = serve({"max_requests": 4}, [body(5 - num_own), body(4 - num_own)])
    assert [client.status for client in clients] == [400, 200]
    clients = serve({"requests_per_minute": 4}, [body(3 - num_own)])
    assert clients[0].headers["x-ratelimit-remaining-requests"] == "1"


def test_an_invalid_request_ends_its_lease():
    clients = serve({"max_requests": 1}, [("/v1/completions", {"prompt": 1.5}), COMPLETION])
    assert [client.status for client in clients] == [400, 200]


class Priorities(FakeBackend):
    def models(self):
        return [dataclasses.replace(super().models()[0], scheduling_policy="priority")]


@pytest.mark.parametrize(
    ("limits", "given", "used"),
    [({}, -5, 0), ({}, 7, 7), ({"min_priority": -2, "max_priority": 3}, -5, -2),
     ({"min_priority": -2, "max_priority": 3}, 9, 3), ({"min_priority": None}, -5, -5)],
)  # fmt: skip
def test_a_priority_is_clamped_to_what_the_tenant_may_have(limits, given, used):
    service = Priorities()
    [client] = serve(limits, [(COMPLETION[0], {**COMPLETION[1], "priority": given})], service)
    assert client.status == 200
    assert [request.priority for request in service.requests] == [used]


def test_a_report_of_a_newer_version_is_read():
    limits = {"max_requests": 3, "min_priority": 0, "new": 1}
    report = ["a", "owner", limits, 1, 2, [1.0, None], [[2, True, "new"]], "new"]
    found = msgspec.msgpack.decode(
        msgspec.msgpack.encode(["sender", [report], "new"]), type=Exchange
    )
    known = TenantReport(
        "a", "owner", TenantLimits(max_requests=3), 1, 2, (1.0, None), [Ask(2, is_further=True)]
    )
    assert found == Exchange("sender", [known])
