"""A step of many passes leaves exactly the state of as many steps."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kv_transfer.connector import TransferRequest
from replicas.engine import core as core_module
from replicas.engine.core import EngineCore
from replicas.engine.sequence import Phase
from replicas.messages import (
    Abort,
    Activate,
    AddRequest,
    EngineRequest,
    HostSeconds,
    TokenOutput,
    Utility,
)
from replicas.sampling_params import SamplingParams
from tests.engines import take_events
from tests.kv_groups import one_kv_group
from tests.replicas.engine.fakes import (
    KEYS,
    FakeConnector,
    make_config,
    make_sequence,
    make_ticket,
)
from tests.replicas.engine.pictures import picture
from tests.replicas.engine.virtual import CountingClock, OneWorker, virtual_worker
from tests.replicas.simulation.test_virtual_worker import FACTS, OddTiming

VOCAB_SIZE = 27
FIRST_TOKEN = 16
"""The least token of a virtual worker."""


@st.composite
def prompts(draw):
    """Most begin alike, so that prefixes are found."""
    start = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1][: draw(st.integers(0, 10))]
    return start + draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))


@st.composite
def sampling_fields(draw):
    """Most let a sequence run on whatever its tokens are; only such ones make long runs."""
    odd = draw(st.integers(0, 9))
    return {
        "max_tokens": draw(st.one_of(st.just(60), st.integers(1, 60))),
        "ignore_eos": odd != 1,
        "stop_token_ids": frozenset([FIRST_TOKEN + 1] if odd == 2 else []),
    }


@st.composite
def configs(draw):
    groups, slots = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([16, 8, 8, 3, 1]))
    num_blocks = draw(st.integers(6, 24))
    room = (num_blocks - 1) * block_size
    max_model_len = draw(st.integers(min(14, room), room))
    chunked = draw(st.booleans())
    least = max(groups * slots, 1 if chunked else max_model_len)
    config = make_config(
        max_batch_size=groups * slots,
        tt_data_parallel=groups,
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(least, least + 8)),
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.booleans()),
        mixed_batches=draw(st.booleans()),
        prefill_steps_per_decode_step=draw(st.integers(1, 3)),
    )
    return config, num_blocks, max_model_len


@st.composite
def phases(draw, arrivals):
    """Draw arrivals, the steps that start them, then runs; repeatedly."""
    actions = []
    for _ in range(draw(st.integers(1, 4))):
        actions += draw(st.lists(arrivals, min_size=1, max_size=3))
        actions.append(("steps", draw(st.integers(2, 10))))
        actions += [("run", n) for n in draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))]
    return actions


class Timing(OddTiming):
    """Whole seconds, sums of which are exact; decodes cost the same in a mixed step."""

    def mixed_s(self, chunks, rows):
        return self.prefill_s(chunks) + self.decode_s(rows)


class Core:
    """An engine core on a virtual device whose steps have one pass, or at most so many.

    Its scheduler has a connector whose transfers do not end.
    """

    def __init__(self, config, num_blocks, max_model_len, max_passes=1, *, runs_ahead=False):
        # With keys: two engines without would name their blocks differently.
        config = msgspec.structs.replace(config, max_model_len=max_model_len, keys=KEYS)
        facts = msgspec.structs.replace(
            FACTS, vocab_size=VOCAB_SIZE, eos_token_ids=[FIRST_TOKEN],
            supports_async_decode=runs_ahead,
            kv_groups=one_kv_group(num_blocks, config.block_size),
        )  # fmt: skip
        self.worker = virtual_worker(
            config, CountingClock(), timing=Timing(), facts=facts, models_kv=False
        )
        connector = FakeConnector(config.block_size)
        with mock.patch.object(core_module, "make_connector", return_value=connector):
            self.core = EngineCore(config, OneWorker(self.worker), max_passes=max_passes)
        self.core._transfers.connector = None
        self.scheduler = self.core._scheduler
        self.max_model_len = max_model_len
        self.events: dict[bytes, list[object]] = {}
        self.num_requests = 0

    def add(self, prompt, fields, mode="local", client=b"a"):
        self.num_requests += 1
        request_id, prompt = f"r{self.num_requests}", prompt[: self.max_model_len - 1]
        params = SamplingParams(**{"temperature": 0.0, "seed": self.num_requests, **fields})
        request = EngineRequest(request_id, prompt, params)
        is_lent = mode == "prefill"
        ticket = make_ticket(request_id, len(prompt), producer="here") if is_lent else None
        self.core.handle(client, AddRequest(request, mode, ticket=ticket), 0.0)

    def activate(self, number):
        self.core.handle(b"a", Activate(f"r{number}", []), 0.0)

    def abort(self, number):
        self.core.handle(b"a", Abort([f"r{number}"]), 0.0)

    def reset(self):
        self.core.handle(b"a", Utility(1, "reset_prefix_cache"), 0.0)

    def client_gone(self, client):
        self.core.client_gone(client)

    def step(self):
        return self.run(1) > 0

    def run(self, wanted):
        """Returns how many passes that was; none where nothing could run."""
        step = self.core.begin_step(0.0)
        num_passes = 1 if step.batch is None else min(step.batch.num_passes, wanted)
        if num_passes > 1:
            clock = self.worker._clock
            ends_s = self.worker.plan_turns(0.0, is_ahead=self.core.runs_ahead)
            clock.spend(ends_s[num_passes - 2] - clock.now_s())
        self.worker.stop_after(num_passes)
        self.core.collect_step(step, num_passes)
        did = self.core.end_step(step, 0.0)
        self.take_events()
        return num_passes if did else 0

    def take_events(self):
        for client, events in take_events(self.core).items():
            self.events.setdefault(client, []).extend(events)

    def history(self):
        """Return the events to clients in order, and the tokens of each request as one."""
        found = {}
        for client, events in self.events.items():
            tokens: dict[str, list[TokenOutput]] = {}
            for event_ in events:
                if isinstance(event_, TokenOutput):
                    tokens.setdefault(event_.request_id, []).append(event_)
            others = [e for e in events if not isinstance(e, TokenOutput)]
            found[client] = others, {r: joined(o) for r, o in tokens.items()}
        return found


def joined(outputs: list[TokenOutput]) -> list[TokenOutput]:
    """Outputs of one request as one: an end is always in the last of them."""
    if not outputs:
        return []
    first, last = outputs[0], outputs[-1]
    assert all(o.finish_reason is None for o in outputs[:-1])
    index = first.index
    for output in outputs:
        assert output.index == index
        index += len(output.token_ids)
    tokens = [t for output in outputs for t in output.token_ids]
    return [msgspec.structs.replace(last, index=first.index, token_ids=tokens)]


ADD = st.tuples(
    st.just("add"),
    prompts(),
    sampling_fields(),
    st.sampled_from(["local"] * 5 + ["prefill", "decode", "decode"]),
    st.sampled_from([b"a", b"a", b"b"]),
)
ARRIVALS = st.one_of(
    ADD,
    ADD,
    st.tuples(st.just("activate"), st.integers(1, 5)),
    st.tuples(st.just("abort"), st.integers(1, 5)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("client_gone"), st.just(b"b")),
)


@settings(max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), phases(ARRIVALS), st.sampled_from([2, 30, 1000]), st.booleans())
def test_many_passes_leave_a_core_where_as_many_steps_do(world, actions, max_passes, runs_ahead):
    """With a step ahead, of another number of passes, what clients see is compared alone."""
    ahead = Core(*world, max_passes=max_passes, runs_ahead=runs_ahead)
    plain = Core(*world, runs_ahead=runs_ahead)
    longest = 0
    for action, *arguments in actions:
        if action == "run":
            num_steps = ahead.run(*arguments)
            longest = max(longest, num_steps)
            # A step in which nothing can run may preempt a row.
            for _ in range(max(num_steps, 1)):
                assert plain.step() == (num_steps > 0)
        elif action == "steps":
            for _ in range(arguments[0]):
                assert ahead.step() == plain.step()
        else:
            for side in (ahead, plain):
                getattr(side, action)(*arguments)
                side.take_events()
        if not runs_ahead:
            assert picture(ahead.scheduler) == picture(plain.scheduler)
        assert ahead.history() == plain.history()
        assert ahead.core.snapshot(0) == plain.core.snapshot(0)
        assert counters(ahead) == counters(plain)
        ahead.core.check_invariants()
    event(length_of(longest))


def length_of(num_steps):
    return f"longest run: {'one' if num_steps < 2 else 'few' if num_steps < 6 else 'many'}"


def counters(side):
    """All of them but the seconds that this test took itself."""
    return msgspec.structs.replace(side.core.metrics(0.0), host_seconds=HostSeconds())


def num_passes(core, now_s=0.0):
    """Make one pass of the core's next step; return how many it might have made."""
    step = core.core.begin_step(now_s)
    core.core.collect_step(step, 1)
    return step.batch.num_passes


def running(*fields, config=None, max_model_len=100, num_outputs=1, max_passes=1000):
    """A core whose requests have their first token, or so many."""
    core = Core(config or make_config(block_size=16), 64, max_model_len, max_passes)
    for sampling in fields:
        core.add([1, 2, 3], {"ignore_eos": True, "max_tokens": 90, **sampling})
    for _ in range(num_outputs):
        assert core.step()
    return core


@pytest.mark.parametrize(
    ("fields", "more", "expected"),
    [
        # Prompt of 3, one token is there: the block of 16 is full when 16 are computed, 3 are.
        ([{}], {}, 13),
        ([{}, {}], {}, 13),
        ([{}], {"max_passes": 7}, 7),
        ([{}], {"max_passes": 1}, 1),
        ([{"max_tokens": 5}], {}, 4),
        ([{"max_tokens": 5}, {"max_tokens": 9}], {}, 4),
        ([{}], {"max_model_len": 10}, 6),
        ([{"ignore_eos": False}], {}, 1),
        ([{}, {"ignore_eos": False}], {}, 1),
        ([{"stop_token_ids": frozenset([7])}], {}, 1),
        # The step that fills the block of 16, the one that gets another, and the one after it.
        ([{}], {"num_outputs": 13}, 1),
        ([{}], {"num_outputs": 14}, 1),
        ([{}], {"num_outputs": 15}, 15),
        # The prompt is computed.
        ([{}], {"num_outputs": 0}, 1),
    ],
)
def test_how_many_passes_a_step_may_have(fields, more, expected):
    assert num_passes(running(*fields, **more)) == expected


def test_nobody_is_passed_over():
    """One that waits, one that prefills, or one that does not fit into the step: a step of one."""
    core = running({}, {}, config=make_config(max_batch_size=2, block_size=16))
    core.add([1, 2, 3], {"max_tokens": 5})
    assert num_passes(core) == 1

    core = running({}, config=make_config(max_num_batched_tokens=4, block_size=16))
    core.add([1] * 12, {"max_tokens": 5})
    core.step()
    assert not core.scheduler.table.queue
    assert num_passes(core) == 1


def test_a_core_does_not_run_past_what_its_step_would_notice():
    core = running({}, config=make_config(block_size=64, reservation_timeout_s=10.0))
    scheduler = core.scheduler
    seq, late = (make_sequence(name, [1] * 5, mode="decode") for name in ("d", "late"))
    assert scheduler.reserve(seq, 1.0) is None
    assert scheduler.reserve(late, 0.5) is None
    assert seq.phase is late.phase is Phase.RESERVED
    assert core.core.next_deadline_s() == 10.5
    assert num_passes(core, 10.4) > 1
    step = core.core.begin_step(10.5)
    assert not step.brings_tokens_alone, "a reservation has lapsed, of which clients must hear"
    core.core.collect_step(step, 1)
    assert num_passes(core, 10.5) > 1

    connector = core.core._transfers.connector = FakeConnector(16)
    connector.on_new_request(TransferRequest("d", [1] * 5, make_ticket("d", 5)), 0.0)
    assert num_passes(core, 10.5) == 1, "a transfer is under way: news of it may come"
    connector.cancelled.add("d")
    assert num_passes(core, 10.5) == 1, "the connector has something to do"
    core.core._transfers.connector = None
    core.core.handle(seq.client, Activate("d", []), 0.0)
    assert num_passes(core, 10.5) == 1, "the activated one has its prompt to compute"


def test_a_sequence_whose_kv_is_fetched_is_not_passed_over():
    """Each of its steps makes blocks ready for the other engine."""
    core = running({})
    core.add([1] * 33, {"max_tokens": 5}, "prefill")
    assert core.step()
    seq = next(s for s in core.scheduler.table.rows if s.mode == "prefill")
    seq.num_computed_tokens = seq.num_tokens - 1
    assert [s.num_new_tokens for s in core.scheduler.table.rows] == [1, 1]
    assert num_passes(core) == 1
