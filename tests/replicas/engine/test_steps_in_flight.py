"""An engine that begins the next step before it has read the last gives the same tokens.

The device records every KV row, and a token depends on all rows of its context: a step that wrote
to reused blocks would change another request's tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.step import ModelFacts
from replicas.generators.simulated.profiles import engine_timing
from replicas.messages import Abort, AddRequest, EngineRequest, TokenOutput
from replicas.platforms import simulated
from replicas.sampling_params import SamplingParams
from tests.engines import take_events
from tests.kv_groups import one_kv_group
from tests.replicas.engine.fakes import KEYS, make_config
from tests.replicas.engine.virtual import CountingClock, OneWorker, virtual_worker
from tests.replicas.generators.simulated.clocks import FakeClock
from tests.replicas.generators.simulated.engines import FOUR_CHIPS, MODEL, simulated_config

CLIENT = b"client"
VOCAB_SIZE = 24
TIMING = engine_timing(simulated_config(), FOUR_CHIPS, 0.0)


class Device:
    """An executor that counts steps that were begun and not read."""

    def __init__(self, executor):
        self.executor = executor
        self.most = self.num_submitted = self.num_open = 0
        self.rows = Counter()

    def collective_rpc(self, method, *args):
        if method == "submit_step" and args[0] is not None:
            self.num_open += 1
            self.num_submitted += 1
            self.most = max(self.most, self.num_open)
            self.rows.update(args[0].slots)
        if method == "collect_step":
            self.num_open -= 1
        return self.executor.collective_rpc(method, *args)


def virtual_device(config, num_blocks):
    """The simulator's."""
    facts = ModelFacts(
        max_position_embeddings=64, vocab_size=VOCAB_SIZE, eos_token_ids=[0],
        kv_groups=one_kv_group(num_blocks, config.block_size), supports_mixed_batch=True,
        supports_chunked_prefill=True, supports_prefix_caching=True,
        supports_async_decode=True,
    )  # fmt: skip
    return OneWorker(virtual_worker(config, CountingClock(), timing=TIMING, facts=facts))


class Engine:
    """A core over a virtual device, or another, and its client's events."""

    def __init__(self, steps_in_flight, config, num_blocks, make_device=virtual_device):
        config = msgspec.structs.replace(config, steps_in_flight=steps_in_flight, keys=KEYS)
        self.device = Device(make_device(config, num_blocks))
        self.core = EngineCore(config, self.device)
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.num_requests = 0

    def add(self, prompt, sampling, client=CLIENT):
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        self.outputs[request_id] = []
        self.core.handle(client, AddRequest(EngineRequest(request_id, prompt, sampling)), 0.0)

    def abort(self, number):
        self.core.handle(CLIENT, Abort([f"r{number}"]), 0.0)

    def gone(self):
        self.core.client_gone(b"other")

    def step(self, num_steps):
        for _ in range(num_steps):
            self.core.step(0.0)
            self.core.check_invariants()
            for events in take_events(self.core).values():
                for output in events:
                    if isinstance(output, TokenOutput):
                        self.outputs[output.request_id].append(output)

    def finish(self):
        for _ in range(3000):
            self.step(1)
            if not self.core.num_live and not self.device.num_open:
                return
        raise AssertionError(f"not finished: {self.core!r}")

    def tokens(self, request_id):
        found = []
        for output in self.outputs[request_id]:
            assert output.index == len(found)
            found += output.token_ids
        return found

    def end(self, request_id):
        outputs = self.outputs[request_id]
        return (outputs[-1].finish_reason, outputs[-1].stop_reason) if outputs else None


def sampling(max_tokens, stop=(), **fields):
    settings = {"temperature": 0.0, "seed": 0, "ignore_eos": True, **fields}
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset(stop), **settings)


SAMPLINGS = st.builds(
    sampling, st.integers(1, 24), st.one_of(st.just(()), st.lists(st.integers(1, 23), max_size=2))
)
PROMPTS = st.builds(
    lambda shared, own: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10][:shared] + own,
    st.integers(0, 10),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, SAMPLINGS),
        st.tuples(st.just("add"), PROMPTS, SAMPLINGS, st.just(b"other")),
        st.tuples(st.just("abort"), st.integers(0, 6)),
        st.tuples(st.just("gone")),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    min_size=2,
    max_size=16,
)


@st.composite
def configs(draw):
    lanes, slots = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    config = make_config(
        max_batch_size=lanes * slots,
        tt_data_parallel=lanes,
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_batched_tokens=draw(st.integers(max(6, lanes * slots), 24)),
        max_model_len=40,
        enable_prefix_caching=draw(st.booleans()),
        mixed_batches=draw(st.booleans()),
    )
    return config, 1 + draw(st.integers(40, 90)) // config.block_size


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A model with a vocabulary so small that stop tokens are frequent."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((Path(MODEL) / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "eos_token_id": [0], "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def mesh(config, num_blocks):
    """The executor of a real replica (batch, reloads, device), on a clock without waits."""
    return UniProcExecutor(config)


@pytest.mark.parametrize("make_device", [virtual_device, mesh])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(configs(), ACTIONS)
def test_two_steps_in_flight_give_the_tokens_of_one(small_model, make_device, world, actions):
    config, num_blocks = world
    if make_device is mesh:
        config = msgspec.structs.replace(
            config, model=small_model, simulated_mesh=FOUR_CHIPS, mixed_batches=None,
            num_blocks=num_blocks,
        )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "WallClock", FakeClock)
        two, one = (Engine(n, config, num_blocks, make_device) for n in (2, 1))
        assert_same_tokens(two, one, actions)


def with_penalty(name, *arguments):
    """The action, with a parameter that makes the host draw a new request's tokens."""
    if name != "add":
        return name, *arguments
    prompt, params, *client = arguments
    return name, prompt, msgspec.structs.replace(params, presence_penalty=0.5), *client


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(configs(), ACTIONS, st.integers(2, 9), st.booleans(), st.sampled_from([1, 2]))
def test_several_passes_give_the_tokens_of_one(
    small_model, world, actions, num_passes, on_host, in_flight
):
    """Also where the host draws, and where passes of a device do not overlap."""
    config, num_blocks = world
    config = msgspec.structs.replace(
        config, model=small_model, simulated_mesh=FOUR_CHIPS, mixed_batches=None,
        num_blocks=num_blocks,
    )  # fmt: skip
    long = msgspec.structs.replace(config, num_scheduler_steps=num_passes)
    if on_host:
        actions = [with_penalty(*action) for action in actions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "WallClock", FakeClock)
        several = Engine(in_flight, long, num_blocks, mesh)
        assert_same_tokens(several, Engine(1, config, num_blocks, mesh), actions)


def assert_same_tokens(two, one, actions):
    """Check equal tokens; of an aborted request one engine may have sent more."""
    given_up = set()
    for action, *arguments in actions:
        for engine in (two, one):
            getattr(engine, action)(*arguments)
        if action == "abort":
            given_up.add(f"r{arguments[0]}")
        if action == "gone":
            given_up |= set(two.outputs)
    for engine in (two, one):
        engine.finish()
    for request_id in two.outputs:
        shorter, longer = sorted((two.tokens(request_id), one.tokens(request_id)), key=len)
        assert longer[: len(shorter)] == shorter
        if request_id not in given_up:
            assert longer == shorter
            assert two.end(request_id) == one.end(request_id)
    assert one.device.most <= 1
    assert two.device.most <= 2
    idle = [(g.num_empty_slots, g.num_free_blocks) for g in two.core.snapshot(0).groups]
    assert idle == [(g.num_empty_slots, g.num_free_blocks) for g in one.core.snapshot(0).groups]
    event(f"steps at once: {two.device.most}")


def engine(steps_in_flight=2, num_blocks=40, **changes):
    config = make_config(
        max_batch_size=2, block_size=4, max_model_len=40, mixed_batches=False, **changes
    )
    return Engine(steps_in_flight, config, num_blocks)


def test_no_step_follows_a_last_token_that_is_known_to_be_one():
    both = [engine(2), engine(1)]
    for side in both:
        side.add([1, 2, 3], sampling(9))
        side.add([3, 2], sampling(14))
        side.finish()
    assert both[0].device.num_submitted == both[1].device.num_submitted
    assert both[0].device.rows == both[1].device.rows
    assert (both[0].device.most, both[1].device.most) == (2, 1)


def test_a_turn_is_judged_by_the_step_that_it_waits_for():
    """That was begun in the turn before, and is the last."""
    side, sizes = engine(2), []
    side.add([1, 2, 3], sampling(9))
    while side.core.num_live:
        side.core.watchdog.work(0.0)
        side.step(1)
        sizes.append(side.core.watchdog.num_tokens)
    assert sizes == [3] + 8 * [1]


@pytest.mark.parametrize("make_device", [virtual_device, mesh])
def test_rows_that_end_do_not_stop_the_others(small_model, make_device, monkeypatch):
    """From the first decode on a step is under way whenever one is read, and slots are free."""
    monkeypatch.setattr(simulated, "WallClock", FakeClock)
    config = make_config(
        model=small_model, max_batch_size=4, block_size=4, max_model_len=40, mixed_batches=False,
        simulated_mesh=FOUR_CHIPS, num_blocks=41,
    )  # fmt: skip
    free, side = (Engine(n, config, 41, make_device) for n in (1, 2))
    for some in (free, side):
        for i, length in enumerate((24, 9, 16, 30)):
            some.add([i + 1, 2, 3], sampling(length))
    free.finish()
    side.step(2)
    open_steps, ends = [], {}
    while side.core.num_live:
        side.step(1)
        open_steps.append(side.device.num_open)
        groups = side.core.snapshot(0).groups
        ends.setdefault(groups[0].num_empty_slots, len(open_steps))
    assert open_steps == [1] * 27 + [0]
    # A slot is free as soon as its row has ended.
    assert ends == {0: 1, 1: 7, 2: 14, 3: 22, 4: 28}
    assert {r: side.tokens(r) for r in side.outputs} == {r: free.tokens(r) for r in free.outputs}
    assert side.device.num_submitted == free.device.num_submitted
    assert side.device.rows == free.device.rows


def test_a_row_that_ends_is_waited_for_where_somebody_waits_for_its_slot():
    side = engine(2)
    for i in range(3):
        side.add([i + 1, 2, 3], sampling(6 if i else 12))
    steps = []
    while not side.outputs["r2"]:
        side.step(1)
        steps.append(side.device.num_open)
    # One prompt step, five decodes of which the last is not followed, and the prompt that waited.
    assert steps == [0, 1, 1, 1, 1, 0, 0]
    side.finish()
    assert [len(side.tokens(r)) for r in side.outputs] == [12, 6, 6]


def test_a_row_that_ends_early_keeps_its_place_until_its_last_step_is_over():
    free, cut = engine(1), engine(2)
    free.add([1, 2, 3], sampling(20))
    free.finish()
    tokens = free.tokens("r0")
    stop = next(t for t in tokens[3:] if t not in tokens[:3])
    cut.add([1, 2, 3], sampling(20, [stop]))
    while cut.end("r0") is None or cut.end("r0")[0] is None:
        cut.step(1)
    assert cut.end("r0") == ("stop", stop)
    assert cut.device.num_open == 1
    assert cut.core.snapshot(0).groups[0].num_empty_slots == 1
    assert cut.core.num_live == 1
    cut.step(1)
    assert cut.core.snapshot(0).groups[0].num_empty_slots == 2
    assert (cut.core.num_live, cut.device.num_open) == (0, 0)
    assert cut.tokens("r0") == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_client_that_leaves_takes_nothing_from_a_step_under_way(steps_in_flight):
    side = engine(steps_in_flight)
    side.add([1, 2, 3], sampling(30), b"other")
    side.step(4)
    assert side.device.num_open == steps_in_flight - 1
    side.gone()
    side.add([5, 6, 7], sampling(5))
    side.finish()
    assert len(side.tokens("r1")) == 5
