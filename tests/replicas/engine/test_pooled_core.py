"""Engines that share a store: the same tokens as without it, after any fault of the store."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field

import msgspec
import pytest

from kv_transfer.store import StoreConfig
from kv_transfer.store_thread import StoreJob
from replicas.messages import AddRequest, EngineRequest, Refused, TokenOutput
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config, take_events
from tests.kv_transfer.memory_store import SHELVES, Shelf
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import CLIENT, DEADLINE_S, Node, Pair

LONG = [(7 * i * i + 3 * i) % 151 for i in range(200)]
PROMPTS = [
    LONG[:70], [11], LONG[:64], LONG[:65], [5, *LONG[:90]], LONG[:128], [9, 9], LONG[:129],
    [*LONG[:64], 1, 2, 3], [*LONG[:96], 1, 2], [17 * i % 149 for i in range(80)], LONG[:110],
]  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
UNIT = 64


def config(address, connector="pooled", **changes):
    store = StoreConfig(
        backend="tests.kv_transfer.memory_store:MemoryStore",
        address=address,
        capacity_bytes=1 << 30,
        unit_tokens=UNIT,
        # Nothing waits that long unless a test wants it to.
        timeout_s=DEADLINE_S,
    )
    settings = {"max_model_len": 240, "kv_connector": connector, "kv_store": store}
    return make_config(model_folder("llama-gqa"), **{**settings, **changes})


@dataclass(slots=True, eq=False)
class Last(StoreJob):
    """Comes after every value that the store was given before."""

    is_urgent = False
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self, _store):
        self.is_done.set()


class Alone:
    """One engine and its client, stepped as a process steps: only when woken."""

    def __init__(self, settings):
        self._bell = threading.Event()
        self.node = Node(settings, "alone", self._bell)
        self._ids = itertools.count()
        self.num_cached = {}

    def start(self, prompt, salt="", sampling=GREEDY):
        request_id = f"r{next(self._ids)}"
        self.node.handle(AddRequest(EngineRequest(request_id, list(prompt), sampling, salt)))
        return request_id

    def run_until(self, done, what):
        end_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < end_s, f"not in {DEADLINE_S} s: {what}"
            self._bell.clear()
            if not self.node.step_if_due():
                self._bell.wait(0.5)

    def generate(self, prompts, salt="", sampling=GREEDY):
        """Output tokens of every prompt, all in flight together; afterwards all is given back."""
        outputs = {self.start(prompt, salt, sampling): [] for prompt in prompts}
        self.num_cached = dict.fromkeys(outputs, 0)
        num_open = len(outputs)

        def are_finished():
            nonlocal num_open
            for event in take_events(self.node.core).get(CLIENT, []):
                assert not isinstance(event, Refused), event
                if isinstance(event, TokenOutput):
                    assert event.error is None
                    assert event.index == len(outputs[event.request_id])
                    outputs[event.request_id].extend(event.token_ids)
                    self.num_cached[event.request_id] = event.num_cached_tokens
                    num_open -= event.finish_reason is not None
            return not num_open

        self.run_until(are_finished, "all requests finished")
        self.run_until(self.node.is_idle, "everything given back")
        self.node.core.check_invariants()
        # Saves in the background hold no blocks; wait for them all the same.
        core, last = self.node.core, Last()
        self.run_until(lambda: not core._transfers.connector.num_inflight, "everything read")
        core._executor._worker._connector._executor.submit(last)
        self.run_until(last.is_done.is_set, "everything saved")
        return list(outputs.values())

    @property
    def metrics(self):
        return self.node.core.metrics(time.monotonic())

    def close(self):
        self.node.vanish()


@pytest.fixture
def shelf(request):
    """A store of its own for every test."""
    address = request.node.name
    SHELVES[address] = Shelf()
    yield SHELVES[address], address
    assert SHELVES.pop(address).open_leases == 0


@pytest.fixture
def make_alone(shelf):
    engines = []

    def make(**changes):
        engines.append(Alone(config(shelf[1], **changes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def plain():
    """Tokens of an engine without a store."""
    with engine_core(make_config(model_folder("llama-gqa"), max_model_len=240)) as core:
        yield {tuple(p): t for p, t in zip(PROMPTS, generate(core, PROMPTS, GREEDY), strict=True)}


@pytest.mark.parametrize(
    "reader",
    [
        {},
        {"block_size": 64, "num_blocks": 32},
        {"tt_data_parallel": 2, "mixed_batches": False},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 48},
        {"num_blocks": 12},
    ],
    ids=["the same", "other blocks", "two lanes", "no prefix cache", "too few blocks"],
)
def test_what_one_engine_saved_another_one_loads_and_goes_on_as_if_computed(
    make_alone, plain, reader
):
    first, second = make_alone(), make_alone(**reader)
    wanted = [plain[tuple(p)] for p in PROMPTS]
    assert first.generate(PROMPTS) == wanted
    assert first.metrics.transfer.store.puts > 0
    assert first.node.core.kv_transfers(0.0).store == first.metrics.transfer.store
    assert second.generate(PROMPTS) == wanted
    assert second.metrics.transfer.store.hits > 0
    assert second.metrics.transfer.receive_failures == {}
    assert second.metrics.kv_recompute_tokens == 0
    # A prompt that ends with its unit has its last block computed, for its last token.
    found = dict(zip(map(tuple, PROMPTS), second.num_cached.values(), strict=True))
    assert found[tuple(LONG[:129])] == 128
    assert found[tuple(LONG[:128])] in {64, 96}
    assert found[(11,)] == 0


def test_of_a_prompt_that_is_here_in_part_only_the_rest_is_loaded(make_alone, plain):
    first, second = make_alone(), make_alone()
    first.generate([LONG[:129]])
    second.generate([LONG[:70]])
    hits = second.metrics.transfer.store.hits
    assert second.generate([LONG[:129]]) == [plain[tuple(LONG[:129])]]
    assert second.metrics.transfer.store.hits - hits == 1


def test_a_request_that_does_not_read_the_cache_loads_nothing_from_the_store(make_alone, plain):
    first, second = make_alone(), make_alone()
    wanted = [plain[tuple(LONG[:129])]]
    apart = msgspec.structs.replace(GREEDY, skip_reading_prefix_cache=True)
    assert first.generate([LONG[:129]], sampling=apart) == wanted
    assert first.metrics.transfer.store.puts > 0
    assert second.generate([LONG[:129]], sampling=apart) == wanted
    assert second.metrics.transfer.store.hits == 0
    assert list(second.num_cached.values()) == [0]


def test_tenants_do_not_find_each_others_kv(make_alone, plain):
    first, second = make_alone(), make_alone()
    prompt = LONG[:129]
    for engine, salt, num_cached in (
        (first, "one", 0), (second, "two", 0), (second, "one", 128), (first, "two", 128),
        (first, "", 0), (second, "", 128),
    ):  # fmt: skip
        assert engine.generate([prompt], salt) == [plain[tuple(prompt)]]
        assert list(engine.num_cached.values()) == [num_cached], salt


@pytest.mark.parametrize("how", ["lost", "poisoned", "leases end early"])
def test_a_load_that_fails_goes_on_from_what_was_verified(make_alone, plain, shelf, how):
    store, _ = shelf
    prompt = LONG[:129]
    make_alone().generate([prompt])
    _, second_key = store.values
    if how == "lost":
        store.lied_about.add(second_key)
    elif how == "poisoned":
        store.poison(second_key)
    else:
        store.loses_leases = True
    engine = make_alone()
    assert engine.generate([prompt]) == [plain[tuple(prompt)]]
    kept = 0 if how == "leases end early" else 64
    assert engine.metrics.kv_recompute_tokens == 128 - kept
    reason = {"poisoned": "checksum"}.get(how, "store")
    assert engine.metrics.transfer.receive_failures == {reason: 1}
    # Nothing that was not verified is found by the next one.
    store.values.clear()
    assert engine.generate([prompt]) == [plain[tuple(prompt)]]


def test_a_store_that_is_down_costs_no_request(make_alone, plain, shelf):
    shelf[0].is_down = True
    engine = make_alone()
    assert engine.generate(PROMPTS) == [plain[tuple(p)] for p in PROMPTS]
    assert engine.metrics.kv_recompute_tokens == 0


def test_a_store_that_hangs_holds_up_only_those_that_ask_it(make_alone, plain, shelf):
    store, _ = shelf
    engine = make_alone()
    store.thaw.clear()
    asking, short = engine.start(LONG[:70]), engine.start([11])
    seen = []

    def has_run():
        seen.extend(take_events(engine.node.core).get(CLIENT, []))
        outputs = [e for e in seen if isinstance(e, TokenOutput)]
        assert all(e.request_id == short for e in outputs)
        return any(e.finish_reason for e in outputs)

    engine.run_until(has_run, "the short prompt has run")
    stepped = [engine.node.step_if_due() for _ in range(3)]
    assert not stepped[-1], "an engine that waits for a store spins"
    assert engine.node.core.snapshot(0).num_waiting == 1
    store.thaw.set()

    def is_done():
        events = take_events(engine.node.core).get(CLIENT, [])
        return any(isinstance(e, TokenOutput) and e.finish_reason for e in events)

    engine.run_until(is_done, asking)
    engine.run_until(engine.node.is_idle, "everything given back")
    assert [t for e in seen if isinstance(e, TokenOutput) for t in e.token_ids] == plain[(11,)]


@pytest.mark.parametrize("reach", ["looked up", "loading"])
@pytest.mark.parametrize("how", ["abort", "client gone"])
def test_a_request_dropped_while_it_waits_for_a_store_leaves_nothing(
    make_alone, shelf, reach, how, plain
):
    store, _ = shelf
    prompt = LONG[:129]
    make_alone().generate([prompt])
    engine = make_alone()
    core = engine.node.core
    if reach == "looked up":
        store.thaw.clear()
    request_id = engine.start(prompt)
    if reach == "looked up":
        engine.node.step_if_due()
        assert core.snapshot(0).num_waiting == 1
    else:
        engine.run_until(lambda: core.snapshot(0).groups[0].num_reserved, "it loads")
        store.thaw.clear()
    if how == "abort":
        core._scheduler.abort(request_id)
    else:
        core.client_gone(CLIENT)
    engine.node._notify()
    store.thaw.set()
    engine.run_until(engine.node.is_idle, "everything given back")
    assert engine.generate([prompt]) == [plain[tuple(prompt)]]


# --- with another engine beside the store ------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["empty store", "store knows the prompts"])
def test_a_pair_with_a_store_gives_the_same_tokens(shelf, make_alone, plain, warm):
    if warm:
        make_alone().generate(PROMPTS)
    settings = config(shelf[1], "multi", keys=KEYS, num_blocks=100, max_batch_size=16)
    pair = Pair(settings, settings)
    try:
        found = pair.generate(PROMPTS, [GREEDY] * len(PROMPTS))
        assert found == [plain[tuple(p)] for p in PROMPTS]
        assert pair.failures == {}
        stores = [node.core.metrics(0.0).transfer.store for node in (pair.prefill, pair.decode)]
    finally:
        pair.close()
    assert (stores[0].hits > 0) == (stores[1].hits > 0) == warm
