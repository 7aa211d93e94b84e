"""Many decode steps taken over at once leave exactly the state of single steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kv_transfer.connector import TransferRequest
from replicas.engine.core import EngineCore
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import SequenceStatus
from replicas.engine.step import ModelFacts, StepResult
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
    EOS,
    KEYS,
    PREFIX_CACHE_KEY,
    FakeConnector,
    events_of,
    make_config,
    make_sequence,
    make_ticket,
)
from tests.replicas.engine.pictures import picture

if TYPE_CHECKING:
    from replicas.engine.step import ScheduledBatch

LENGTHS = st.integers(1, 14)
STEP_S = 0.25
"""Device time of a step: sums of it are exact."""


def token_after(num_tokens, salt):
    """Return a device's token after so many tokens of a sequence; some are end tokens."""
    mixed = (num_tokens * 2654435761 + salt * 40503) >> 7
    return EOS if mixed % 11 == 0 else 1 + mixed % 3


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
        "stop_token_ids": frozenset([2] if odd == 2 else []),
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


ADD = st.tuples(
    st.just("add"), prompts(), sampling_fields(), st.sampled_from(["local"] * 4 + ["prefill"])
)
ARRIVALS = st.one_of(
    ADD,
    ADD,
    st.tuples(st.just("reserve"), prompts(), sampling_fields(), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 5)),
)


class Engine:
    """A scheduler and a device that gives the same tokens to the same sequences."""

    def __init__(self, config, num_blocks, max_model_len):
        self.connector = FakeConnector(config.block_size)
        self.scheduler = Scheduler(
            config,
            kv_groups=one_kv_group(num_blocks, config.block_size),
            prefix_cache_key=PREFIX_CACHE_KEY,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            connector=self.connector,
        )
        self.max_model_len = max_model_len
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.num_requests = 0

    # --- what both sides do alike ----------------------------------------------------------------

    def add(self, prompt, fields, mode):
        self.num_requests += 1
        prompt = prompt[: self.max_model_len - 1]
        seq = make_sequence(f"r{self.num_requests}", prompt, mode=mode, **fields)
        assert self.scheduler.add(seq, 0.0) is None
        self.outputs[seq.request_id] = []

    def reserve(self, prompt, fields, is_activated):
        """A reservation stands while others run, or joins them without KV from elsewhere."""
        self.num_requests += 1
        prompt = prompt[: self.max_model_len - 1]
        seq = make_sequence(f"r{self.num_requests}", prompt, mode="decode", **fields)
        if self.scheduler.reserve(seq, 0.0) is None:
            self.outputs[seq.request_id] = []
            if is_activated:
                self.scheduler.activate(seq.request_id, [], 0.0)

    def abort(self, index):
        live = list(self.scheduler._sequences)
        if live:
            self.scheduler.abort(live[index % len(live)])

    def step(self):
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        tokens = self.device(batch)
        for seq, output in events_of(self.scheduler.update(batch, StepResult(tokens, 0.0))):
            self.outputs[seq.request_id].append(output)
        return True

    def device(self, batch: ScheduledBatch) -> list[int]:
        by_slot = {s.slot: s for s in self.scheduler._running}
        tokens = []
        for slot in batch.slots:
            seq = by_slot[slot]
            samples = seq.num_computed_tokens == seq.num_tokens
            tokens.append(token_after(seq.num_tokens, int(seq.request_id[1:])) if samples else -1)
        return tokens

    # --- where they differ -----------------------------------------------------------------------

    def run_at_once(self, wanted):
        """Returns how many steps that was; one in which nothing could run may have preempted."""
        batch = self.scheduler.schedule()
        if batch is None:
            return 1
        num_steps = min(self.scheduler.num_repeats(batch), wanted)
        if num_steps == 1:
            result = StepResult(self.device(batch), 0.0)
        else:
            tokens = self.device_run(batch, num_steps)
            self.scheduler.repeat(batch, num_steps - 1)
            last = [row.pop() for row in tokens]
            result = StepResult(last, 0.0, earlier=tokens)
        outputs = self.scheduler.update(batch, result)
        for seq, output in events_of(outputs):
            self.outputs[seq.request_id].append(output)
        return num_steps

    def device_run(self, batch, num_steps):
        by_slot = {s.slot: s for s in self.scheduler._running}
        return [
            [token_after(s.num_tokens + i, int(s.request_id[1:])) for i in range(num_steps)]
            for s in (by_slot[slot] for slot in batch.slots)
        ]


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


def assert_equal(one: Engine, other: Engine) -> None:
    assert picture(one.scheduler) == picture(other.scheduler)
    assert one.outputs.keys() == other.outputs.keys()
    for request_id, outputs in one.outputs.items():
        assert joined(outputs) == joined(other.outputs[request_id])
    one.scheduler.check_invariants()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(configs(), phases(ARRIVALS))
def test_a_run_leaves_what_its_steps_leave(world, actions):
    ahead, plain = Engine(*world), Engine(*world)
    longest = 0
    for action, *arguments in actions:
        if action == "steps":
            for _ in range(arguments[0]):
                assert ahead.step() == plain.step()
        elif action == "run":
            num_steps = ahead.run_at_once(arguments[0])
            longest = max(longest, num_steps)
            stepped = [plain.step() for _ in range(num_steps)]
            assert all(stepped) or num_steps == 1
        else:
            for engine in (ahead, plain):
                getattr(engine, action)(*arguments)
        assert_equal(ahead, plain)
    event(length_of(longest))


def running(*fields, config=None, num_blocks=64, max_model_len=100, num_outputs=1):
    """An engine whose requests have their first token, or so many."""
    engine = Engine(config or make_config(max_batch_size=4, block_size=16), num_blocks, 100)
    rules = engine.scheduler._end_rules
    engine.scheduler._end_rules = rules._replace(max_model_len=max_model_len)
    for sampling in fields:
        engine.add([1, 2, 3], {"ignore_eos": True, "max_tokens": 90, **sampling}, "local")
    for _ in range(num_outputs):
        assert engine.step()
    return engine


@pytest.mark.parametrize(
    ("fields", "more", "num_steps"),
    [
        # Prompt of 3, one token is there: the block of 16 is full when 16 are computed, 3 are.
        ([{}], {}, 13),
        ([{}, {}], {}, 13),
        ([{"max_tokens": 5}], {}, 4),
        ([{"max_tokens": 5}, {"max_tokens": 9}], {}, 4),
        ([{}], {"max_model_len": 10}, 6),
        ([{"ignore_eos": False}], {}, 1),
        ([{}, {"ignore_eos": False}], {}, 1),
        ([{"stop_token_ids": frozenset([7])}], {}, 1),
        ([{}], {"num_outputs": 14}, 16),
    ],
)
def test_how_long_a_run_may_be(fields, more, num_steps):
    engine = running(*fields, **more)
    batch = engine.scheduler.schedule()
    assert engine.scheduler.num_repeats(batch) == num_steps


def test_nobody_is_passed_over():
    """One that waits, one that prefills, or one that does not fit into the step: a step of one."""
    engine = running({}, {}, config=make_config(max_batch_size=2, block_size=16))
    engine.add([1, 2, 3], {"max_tokens": 5}, "local")
    assert engine.scheduler.num_repeats(engine.scheduler.schedule()) == 1

    engine = running({}, config=make_config(max_num_batched_tokens=4, block_size=16))
    engine.add([1] * 12, {"max_tokens": 5}, "local")
    engine.step()
    assert not engine.scheduler._waiting
    assert engine.scheduler.num_repeats(engine.scheduler.schedule()) == 1


# --- through the core -----------------------------------------------------------------------


class FakeExecutor:
    """A worker that gives the tokens of `token_after` and counts its steps."""

    def __init__(self, kv_groups):
        self._kv_groups = kv_groups
        self._rows: dict[int, tuple[int, int]] = {}
        self._results: deque[StepResult] = deque()
        self.num_steps = 0

    def collective_rpc(self, method, *args):
        return [getattr(self, f"_{method}")(*args)]

    def _load_model(self):
        return ModelFacts(
            max_position_embeddings=1000, vocab_size=8, eos_token_ids=[EOS],
            kv_groups=self._kv_groups, supports_mixed_batch=True,
            supports_chunked_prefill=True, supports_prefix_caching=True,
        )  # fmt: skip

    def _nothing(self, *_args):
        return None

    _init_device = _initialize_kv_cache = _warm_up = _transfer_stats = _nothing

    def _submit_step(self, batch, _meta, _now_s):
        self._apply(batch)
        self._results.append(StepResult(self._tokens(batch), STEP_S))

    def _collect_step(self):
        return self._results.popleft()

    def repeat(self, batch, num_more):
        """Repeat the submitted step so many times, and let one collect return them all."""
        steps = [self._results.popleft().token_ids]
        steps += [self._tokens(batch) for _ in range(num_more)]
        tokens = [list(t) for t in zip(*steps, strict=True)]
        last = [row.pop() for row in tokens]
        self._results.append(StepResult(last, STEP_S, 0.0, tokens, [STEP_S] * num_more))

    def _apply(self, batch):
        for seq in batch.new:
            self._rows[seq.slot] = (len(seq.token_ids), seq.num_computed_tokens, seq.seed)

    def _tokens(self, batch):
        tokens = []
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            num_tokens, num_computed, seed = self._rows[slot]
            num_computed += count
            samples = num_computed == num_tokens
            tokens.append(token_after(num_tokens, seed) if samples else -1)
            self._rows[slot] = (num_tokens + samples, num_computed, seed)
        return tokens


class Core:
    """An engine core that is driven step by step, or many steps at a time."""

    def __init__(self, config, num_blocks, max_model_len):
        # With keys: two engines without would name their blocks differently.
        config = msgspec.structs.replace(config, max_model_len=max_model_len, keys=KEYS)
        self.executor = FakeExecutor(one_kv_group(num_blocks, config.block_size))
        self.core = EngineCore(config, self.executor)
        self.max_model_len = max_model_len
        self.events: dict[bytes, list[object]] = {}
        self.num_requests = 0

    def add(self, prompt, fields, client):
        self.num_requests += 1
        params = SamplingParams(**{"temperature": 0.0, "seed": self.num_requests, **fields})
        request = EngineRequest(f"r{self.num_requests}", prompt[: self.max_model_len - 1], params)
        self.core.handle(client, AddRequest(request), 0.0)

    def abort(self, number):
        self.core.handle(b"a", Abort([f"r{number}"]), 0.0)

    def reset(self):
        self.core.handle(b"a", Utility(1, "reset_prefix_cache"), 0.0)

    def client_gone(self, client):
        self.core.client_gone(client)

    def step(self):
        did = self.core.step(0.0)
        self.take_events()
        return did

    def run(self, wanted):
        """Returns how many steps that was; none where nothing could run."""
        step = self.core.begin_step(0.0)
        num_steps = min(self.core.num_repeats(step), wanted)
        if num_steps > 1:
            self.executor.repeat(step.batch, num_steps - 1)
        self.core.collect_step(step, num_steps)
        did = self.core.end_step(step, 0.0)
        self.take_events()
        return num_steps if did else 0

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


CORE_ADD = st.tuples(
    st.just("add"), prompts(), sampling_fields(), st.sampled_from([b"a", b"a", b"b"])
)
CORE_ARRIVALS = st.one_of(
    CORE_ADD,
    CORE_ADD,
    st.tuples(st.just("abort"), st.integers(1, 5)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("client_gone"), st.just(b"b")),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(configs(), phases(CORE_ARRIVALS))
def test_a_core_that_runs_ahead_is_where_one_is_that_steps(world, actions):
    ahead, plain = Core(*world), Core(*world)
    longest = 0
    for action, *arguments in actions:
        if action == "run":
            num_steps = ahead.run(*arguments)
            longest = max(longest, num_steps)
            for _ in range(num_steps):
                assert plain.step()
        elif action == "steps":
            for _ in range(arguments[0]):
                assert ahead.step() == plain.step()
        else:
            for side in (ahead, plain):
                getattr(side, action)(*arguments)
                side.take_events()
        assert picture(ahead.core._scheduler) == picture(plain.core._scheduler)
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


def num_repeats(core, now_s=0.0):
    """Run the core's next step once; return how often it might have run."""
    step = core.core.begin_step(now_s)
    found = core.core.num_repeats(step)
    core.core.collect_step(step)
    return found


def test_a_core_runs_ahead_only_when_nothing_else_is_to_be_done():
    core = Core(make_config(block_size=16), 8, 100)
    assert num_repeats(core) == 1, "idle"
    core.add([1, 2, 3], {"max_tokens": 90, "ignore_eos": True}, b"a")
    assert num_repeats(core) == 1, "its prompt is computed"
    assert num_repeats(core) == 13


def test_a_core_does_not_run_past_what_its_step_would_notice():
    core = Core(make_config(block_size=64, reservation_timeout_s=10.0), 32, 100)
    scheduler = core.core._scheduler
    core.add([1, 2, 3], {"max_tokens": 90, "ignore_eos": True}, b"a")
    core.step()
    seq, late = (make_sequence(name, [1] * 5, mode="decode") for name in ("d", "late"))
    assert scheduler.reserve(seq, 1.0) is None
    assert scheduler.reserve(late, 0.5) is None
    assert seq.status is late.status is SequenceStatus.RESERVED
    assert core.core.next_deadline_s() == 10.5
    assert num_repeats(core, 10.4) > 1
    assert num_repeats(core, 10.5) == 1, "a reservation has lapsed, which is to be told"
    assert num_repeats(core, 10.5) > 1

    connector = core.core._transfers.connector = FakeConnector(16)
    connector.on_new_request(TransferRequest("d", [1] * 5, make_ticket("d", 5)), 0.0)
    assert num_repeats(core, 10.5) == 1, "a transfer is under way: news of it may come"
    connector.cancelled.add("d")
    assert num_repeats(core, 10.5) == 1, "the connector has something to do"
    core.core._transfers.connector = None
    core.core.handle(seq.client, Activate("d", []), 0.0)
    assert num_repeats(core, 10.5) == 1, "the activated one has its prompt to compute"


def test_a_sequence_whose_kv_is_fetched_is_not_passed_over():
    """Each of its steps makes blocks ready for the other engine."""
    engine = running({})
    engine.add([1] * 33, {"max_tokens": 5}, "prefill")
    assert engine.step()
    scheduler = engine.scheduler
    seq = next(s for s in scheduler._running if s.mode == "prefill")
    seq.num_computed_tokens = seq.num_tokens - 1
    assert [s.num_new_tokens for s in scheduler._running] == [1, 1]
    assert scheduler.num_repeats(scheduler.schedule()) == 1
