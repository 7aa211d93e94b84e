"""The pooled connector against an in-memory store, mostly without threads."""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kv_transfer.config import TransferConfig
from kv_transfer.connector import (
    KVConnectorScheduler,
    TransferRequest,
    load_connector,
)
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.pooled import PooledConnectorScheduler, unit_keys
from kv_transfer.pooled_worker import PooledConnectorWorker
from kv_transfer.store import StoreConfig
from kv_transfer.store_thread import CHECKSUM_BYTES, StoreThread, is_value, seal_value
from tests.kv_transfer.fakes import make_settings, ticks
from tests.kv_transfer.memory_store import MemoryStore
from tests.kv_transfer.pool_world import LAYOUT, Job, PoolEngine, layout_of
from tests.kv_transfer.store_worlds import (
    CONFIG,
    UNIT,
    UNIT_BYTES,
    StoreMachine,
    StoreWorld,
    machine_settings,
    new_shelf,
    numbers,
    tokens,
)

SLOW = msgspec.structs.replace(CONFIG, chunk_bytes=1, copy_s=1.0)
"""A step copies one block."""


class World(StoreWorld):
    """Engines of pools alone; time is set by hand."""

    def __init__(
        self,
        *block_sizes: int,
        config: TransferConfig = CONFIG,
        name: str = "",
        step_now_s: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(name)
        self.now_s = 100.0
        made = make_settings("E", config=config, store=self.store, step_now_s=step_now_s or ticks())
        self.engines = [
            PoolEngine(
                PooledConnectorScheduler(made, layout_of(size)),
                PooledConnectorWorker(made, self.notify, self.make_executor),
                layout_of(size),
                lambda: self.now_s,
                num_blocks=2048 // size,
                seed=seed,
            )
            for seed, size in enumerate(block_sizes)
        ]
        self.engine = self.engines[0]

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def finish(self) -> None:
        super().finish()
        assert [executor.alarm_s for executor in self.executors] == [None] * len(self.engines)

    def serve(
        self, token_ids: list[int], *, engine: int = 0, salt: str = "", local: int = 0
    ) -> Job:
        """Let one request run from its arrival to its end."""
        job = self.submit(self.engines[engine], token_ids, salt, num_local=local)
        self.finish()
        return job


def loading(world: World, prompt: list[int], request_id: str = "again") -> Job:
    """Start a request that loads from the pool; return when it does."""
    job = world.engine.submit(Job(request_id, prompt))
    while job.state != "loading":
        world.steps()
    return job


# ---- keys and values


def test_keys_differ_between_models_tenants_and_unit_sizes() -> None:
    prompt = tokens(2 * UNIT, 1)

    def keys(
        content_hash: str = "hash", unit_tokens: int = UNIT, **scope: Any
    ) -> tuple[bytes, ...]:
        return unit_keys(content_hash, TransferRequest("r", prompt, **scope), unit_tokens)

    image = ("image", 2, 3, b"one")
    variants = [
        keys(),
        keys("hash2"),
        keys(unit_tokens=UNIT // 2),
        keys(cache_salt="tenant"),
        keys(adapter="tenant"),
        keys(images=(image,)),
        keys(images=(image, image)),
        keys(images=(("image", 2, 3, b"two"),)),
    ]
    every = [key for found in variants for key in found]
    assert len(set(every)) == len(every)
    # No field can run into the next one.
    assert keys("ab", cache_salt="c") != keys("a", cache_salt="bc")


def test_keys_of_text_under_the_base_model_stay_the_same() -> None:
    """A pool outlives the engines that fill it."""
    request = TransferRequest("r", list(range(UNIT)), cache_salt="pepper")
    [key] = unit_keys("layout", request, UNIT)
    assert key.hex() == "7b221ce72f035e585c3ef6689cdb03c9a4f2f5f0c7e57928b57ff27014ba58fc"


def test_a_prompt_shorter_than_a_unit_has_no_keys() -> None:
    assert unit_keys("hash", TransferRequest("r", tokens(UNIT - 1, 1)), UNIT) == ()


@pytest.mark.parametrize("position", [0, CHECKSUM_BYTES - 1, CHECKSUM_BYTES, -1])
def test_every_flipped_byte_of_a_value_is_noticed(position: int) -> None:
    payload = np.arange(100, dtype=np.uint8)
    value = seal_value(b"key", [payload[:64].reshape(2, 32), payload[64:]])
    assert (value[CHECKSUM_BYTES:] == payload).all()
    assert is_value(b"key", value, 100)
    assert not is_value(b"other", value, 100)
    assert not is_value(b"key", value, 99)
    assert not is_value(b"key", value.view(np.int8), 100)
    value[position] ^= 0x80
    assert not is_value(b"key", value, 100)


# ---- what hits


def test_a_second_request_loads_what_the_first_one_saved() -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 40, 1)
    assert world.serve(prompt).num_loaded == []
    assert set(world.shelf.values) == set(world.keys(prompt))
    world.check_values([prompt])
    assert world.serve(prompt).num_loaded == [3 * UNIT]
    stats = world.engine.worker.stats(world.now_s)
    assert stats.paths["pool"].num_received == 1
    assert stats.paths["pool"].bytes_received == 3 * UNIT_BYTES
    assert (stats.store.hits, stats.store.puts, stats.store.errors) == (3, 3, 0)
    assert sum(stats.stages["total"].counts) == 1


@pytest.mark.parametrize("block_size", [64, 128])
def test_engines_of_other_block_sizes_hit_what_blocks_of_32_gave(block_size: int) -> None:
    world = World(32, block_size)
    prompt = tokens(3 * UNIT + 40, 1)
    world.serve(prompt, engine=0)
    assert world.serve(prompt, engine=1).num_loaded == [3 * UNIT]
    other = tokens(2 * UNIT + 1, 2)
    world.serve(other, engine=1)
    assert world.serve(other, engine=0).num_loaded == [2 * UNIT]
    world.check_values([prompt, other])


@pytest.mark.parametrize(("block_size", "num_loaded"), [(32, UNIT - 32), (64, UNIT - 64), (128, 0)])
def test_the_last_token_is_computed_and_blocks_are_loaded_whole(
    block_size: int, num_loaded: int
) -> None:
    world = World(block_size)
    prompt = tokens(UNIT, 1)
    world.serve(prompt)
    assert sum(world.serve(prompt).num_loaded) == num_loaded
    assert world.serve([*prompt, 7]).num_loaded == [UNIT]


@pytest.mark.parametrize("num_local", [32, UNIT - 32, UNIT, UNIT + 64, 2 * UNIT, 2 * UNIT + 32])
def test_only_what_the_local_prefix_lacks_is_loaded(num_local: int) -> None:
    world = World(32)
    prompt = tokens(2 * UNIT + 40, 1)
    world.serve(prompt)
    job = world.serve(prompt, local=num_local)
    assert job.num_loaded == ([2 * UNIT - num_local] if num_local < 2 * UNIT else [])


def test_a_prefix_in_common_hits_and_the_rest_is_saved() -> None:
    world = World(32)
    common = tokens(2 * UNIT, 1)
    first, second = common + tokens(UNIT, 2), common + tokens(2 * UNIT, 3)
    world.serve(first)
    assert world.serve(second).num_loaded == [2 * UNIT]
    world.check_values([first, second])
    assert len(world.shelf.values) == 5


def test_another_tenant_never_hits() -> None:
    world = World(32)
    prompt = tokens(2 * UNIT + 1, 1)
    world.serve(prompt, salt="a")
    assert world.serve(prompt, salt="b").num_loaded == []
    assert world.serve(prompt).num_loaded == []
    assert world.serve(prompt, salt="a").num_loaded == [2 * UNIT]


# ---- failures


def test_a_poisoned_value_is_a_miss_that_is_recomputed_and_replaced() -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 1, 1)
    world.serve(prompt)
    world.shelf.poison(world.keys(prompt)[1])
    job = world.serve(prompt)
    assert [(x.reason, x.num_tokens) for x in job.failures] == [(FailureReason.CHECKSUM, UNIT)]
    world.check_values([prompt])
    stats = world.engine.worker.stats(world.now_s)
    assert stats.num_checksum_failures == 1
    assert stats.receive_failures == {"checksum": 1}
    assert world.serve(prompt).num_loaded == [3 * UNIT]


def test_a_value_that_is_gone_when_it_is_wanted_fails_the_load() -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 1, 1)
    world.serve(prompt)
    world.shelf.lied_about.add(world.keys(prompt)[2])
    job = world.serve(prompt, local=32)
    assert [(x.reason, x.num_tokens) for x in job.failures] == [(FailureReason.STORE, 2 * UNIT)]
    world.shelf.lied_about.add(world.keys(prompt)[0])
    job = world.serve(prompt, local=32)
    assert [(x.reason, x.num_tokens) for x in job.failures] == [(FailureReason.STORE, 32)]


def test_a_lease_that_was_lost_during_the_copy_fails_the_load() -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 1, 1)
    world.serve(prompt)
    job = loading(world, prompt)
    world.shelf.loses_leases = True
    world.finish()
    assert job.num_loaded == []
    # The bytes written may not be those that were stored.
    assert [(x.reason, x.num_tokens) for x in job.failures] == [(FailureReason.STORE, 0)]


def test_a_store_that_is_down_costs_hits_only() -> None:
    world = World(32)
    prompt = tokens(2 * UNIT + 1, 1)
    world.serve(prompt)
    world.shelf.is_down = True
    job = world.serve(prompt)
    assert (job.num_loaded, job.failures) == ([], [])
    world.shelf.is_down, world.shelf.raises = False, True
    job = world.serve(prompt)
    assert (job.num_loaded, job.failures) == ([], [])
    assert world.engine.worker.stats(world.now_s).store.errors > 0


def test_a_frozen_store_is_waited_for_once() -> None:
    world = World(32)
    prompt = tokens(2 * UNIT + 1, 1)
    world.serve(prompt)
    job = world.engine.submit(Job("first", prompt))
    world.steps(5, is_frozen=True)
    assert job.state == "waiting"
    assert world.executors[0].alarm_s == world.store.timeout_s
    world.now_s += world.store.timeout_s
    world.steps(2, is_frozen=True)
    assert job.state == "running"
    # No request waits for it again before it has answered.
    second = world.engine.submit(Job("second", prompt))
    world.steps(2, is_frozen=True)
    assert second.state == "running"
    world.finish()
    assert world.serve(prompt).num_loaded == [2 * UNIT]


def test_a_load_from_a_store_that_freezes_ends_by_its_deadline() -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 1, 1)
    world.serve(prompt)
    job = loading(world, prompt)
    # One unit comes, and no more.
    world.steps(1, is_frozen=True)
    world.executors[0].run(1)
    world.steps(1, is_frozen=True)
    world.executors[0].run(1)
    world.steps(3, is_frozen=True)
    assert job.state == "loading"
    assert world.executors[0].alarm_s == CONFIG.no_progress_s
    world.now_s += CONFIG.no_progress_s
    world.steps(1, is_frozen=True)
    assert [x.reason for x in job.failures] == [FailureReason.STALLED]
    # Later answers of the store are ignored: the fake engine fails on a write.
    world.finish()


def test_slow_saves_are_dropped_and_counted() -> None:
    world = World(32)
    prompt = tokens(9 * UNIT + 1, 1)
    job = world.engine.submit(Job("long", prompt))
    world.steps()
    world.steps(60, is_frozen=True)
    assert job.state == "over"
    assert world.engine.is_idle
    assert world.executors[0].num_waiting == 4
    assert world.engine.worker.stats(world.now_s).store.drops == 5
    world.finish()
    world.check_values([prompt])
    assert len(world.shelf.values) == 4


def test_blocks_of_a_finished_request_stay_until_their_units_are_read() -> None:
    world = World(32, config=SLOW)
    prompt = tokens(4 * UNIT, 1)
    world.engine.chunk_tokens = len(prompt)
    job = world.engine.submit(Job("short", prompt, num_decodes=0))
    while job.state != "over":
        world.steps()
    assert world.engine.held
    # Only the worker side can wake the engine to read the rest.
    world.num_notified = 0
    world.steps(is_frozen=True)
    assert world.num_notified > 0
    assert len(world.shelf.values) < 4
    world.finish()
    assert len(world.shelf.values) == 4
    world.check_values([prompt])


def test_a_preempted_request_saves_from_the_start() -> None:
    world = World(32, config=SLOW)
    prompt = tokens(4 * UNIT, 1)
    job = world.engine.submit(Job("again", prompt, num_decodes=3))
    while job.num_computed < 2 * UNIT:
        world.steps()
    # The fake engine wipes the blocks; reading them from here on fails.
    world.engine.preempt("again")
    world.finish()
    assert len(world.shelf.values) == 4
    world.check_values([prompt])


def test_a_finished_request_that_is_aborted_before_the_pool_answers_gives_its_blocks_back() -> None:
    world = World(32, config=SLOW)
    prompt = tokens(4 * UNIT, 1)
    world.engine.chunk_tokens = len(prompt)
    world.engine.submit(Job("hasty", prompt, num_decodes=0, waits_for_pool=False))
    world.steps(2, is_frozen=True)
    assert "hasty" in world.engine.held
    world.engine.abort("hasty")
    world.steps(20, is_frozen=True)
    # Not even the pool's answer is needed for that.
    assert world.engine.is_idle
    world.finish()
    world.check_values([prompt])
    assert len(world.shelf.values) == 4


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_or_preemption_at_any_time_ends_once(how: str, num_steps: int) -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 1, 1)
    world.serve(prompt)
    job = world.engine.submit(Job("again", prompt))
    for _ in range(num_steps):
        world.engine.step()
        world.executors[0].run(1)
    if how == "abort":
        world.engine.abort("again")
    elif job.state in {"running", "loading"}:
        was_loading = job.state == "loading"
        world.engine.preempt("again")
        world.engine.step()
        reasons = [(x.reason, x.num_tokens) for x in job.failures]
        assert reasons == ([(FailureReason.CANCELLED, 0)] if was_loading else [])
    world.finish()
    world.check_values([prompt])


def test_an_id_is_free_again_once_its_load_was_reported() -> None:
    world = World(32)
    prompt = tokens(2 * UNIT + 1, 1)
    world.serve(prompt)
    job = loading(world, prompt, "id")
    world.engine.abort(job.request_id)
    with pytest.raises(TransferError, match="already has a transfer"):
        world.engine.submit(Job("id", prompt))
    world.steps()
    again = world.engine.submit(Job("id", prompt))
    world.finish()
    assert again.num_loaded == [2 * UNIT]


@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)])
def test_the_answer_to_an_aborted_lookup_is_not_taken_for_the_next_one(
    seeds: tuple[int, int],
) -> None:
    world = World(32)
    first, second = (tokens(2 * UNIT + 1, seed) for seed in seeds)
    world.serve(tokens(2 * UNIT + 1, 1))
    world.engine.submit(Job("id", first))
    world.engine.step()
    world.engine.abort("id")
    job = world.engine.submit(Job("id", second))
    world.engine.step()
    world.executors[0].run(1)
    world.finish()
    assert (job.num_loaded, job.failures) == ([2 * UNIT] if seeds[1] == 1 else [], [])


def test_closing_gives_every_lease_back() -> None:
    world = World(32)
    prompt = tokens(3 * UNIT + 1, 1)
    world.serve(prompt)
    loading(world, prompt)
    world.steps()
    assert world.shelf.open_leases > 0
    world.engine.worker.close(1.0)
    assert world.shelf.open_leases == 0


# ---- misuse


def test_units_must_be_whole_blocks() -> None:
    world = World(32)
    made = make_settings("E", store=world.store)
    with pytest.raises(TransferError, match="no multiple of block_size"):
        load_connector("pooled").create_scheduler(made, [layout_of(256)])


def test_a_pool_must_be_set() -> None:
    made = make_settings("E")
    with pytest.raises(TransferError, match="kv_store"):
        load_connector("pooled").create_scheduler(made, [LAYOUT])
    with pytest.raises(TransferError, match="kv_store"):
        load_connector("pooled").create_worker(made, lambda: None)


def test_a_ticket_needs_another_connector() -> None:
    world = World(32)
    request = TransferRequest("r", tokens(UNIT, 1), b"sealed")
    with pytest.raises(TransferError, match="multi"):
        world.engine.scheduler.on_new_request(request, 0.0)


def test_the_blocks_must_hold_the_load() -> None:
    world = World(32)
    prompt = tokens(2 * UNIT + 1, 1)
    world.serve(prompt)
    scheduler: KVConnectorScheduler = world.engine.scheduler
    scheduler.on_new_request(TransferRequest("r", prompt), 0.0)
    assert scheduler.get_num_new_matched_tokens("r", 0) == (None, True)
    world.steps(2)
    assert scheduler.get_num_new_matched_tokens("r", 0) == (2 * UNIT, True)
    with pytest.raises(TransferError, match="blocks allocated"):
        scheduler.update_state_after_alloc("r", 0, [[1, 2]], 2 * UNIT)
    with pytest.raises(TransferError, match="to load"):
        scheduler.update_state_after_alloc("r", 0, [list(range(9))], 3 * UNIT)
    scheduler.cancel("nobody")
    scheduler.request_preempted("nobody")
    assert scheduler.request_finished("nobody", []) is False
    assert scheduler.get_num_new_matched_tokens("nobody", 0) == (0, False)


# ---- anything at any time


class PoolMachine(StoreMachine):
    """Engines of different block sizes, where requests may end before they are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(32, 64, config=SLOW)
        for engine in self.world.engines:
            # A step computes more than it copies.
            engine.chunk_tokens = 320
        base = tokens(4 * UNIT, 0)
        self.prompts = [
            [*base[: (cut % 5) * UNIT], *tokens(size, 100 + cut)]
            for cut, size in enumerate([UNIT + 1, 70, 200, 1, 5, 2 * UNIT, UNIT])
        ]

    @rule(
        engine=st.integers(0, 1),
        prompt=st.integers(0, 6),
        num_local=st.integers(0, 4),
        num_decodes=st.sampled_from([0, 0, 1, 3]),
        waits=st.booleans(),
    )
    def submit(
        self, engine: int, prompt: int, num_local: int, num_decodes: int, waits: bool
    ) -> None:
        token_ids = self.prompts[prompt]
        local = min(64 * num_local, (len(token_ids) - 1) // 64 * 64)
        how = {"num_local": local, "num_decodes": num_decodes, "waits_for_pool": waits}
        self.world.submit(self.world.engines[engine], token_ids, **how)

    @rule(engine=st.integers(0, 1), prompt=st.integers(2, 6), num_steps=st.integers(2, 4))
    def finish_before_it_is_saved(self, engine: int, prompt: int, num_steps: int) -> None:
        self.submit(engine, prompt, num_local=0, num_decodes=0, waits=False)
        self.step(engine, num_steps)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings


# ---- with threads


class ThreadedWorld:
    """One engine whose store has its thread, stepped when it is woken."""

    def __init__(self) -> None:
        self.shelf, store = new_shelf(timeout_s=0.05)
        # Room for every unit of a test: none is dropped because the thread had no turn.
        config = msgspec.structs.replace(
            CONFIG, no_progress_s=0.05, max_inflight_bytes=16 * UNIT_BYTES
        )
        made = make_settings("E", config=config, store=store)
        connector = load_connector("pooled")
        self.notified = threading.Event()
        self.engine = PoolEngine(
            connector.create_scheduler(made, [LAYOUT]),
            connector.create_worker(made, self.notified.set),
            LAYOUT,
            time.monotonic,
        )

    def serve(self, *prompts: list[int]) -> list[Job]:
        jobs = [self.engine.submit(Job(f"r{next(numbers)}", token_ids)) for token_ids in prompts]
        self.run_until(lambda: self.engine.is_idle)
        return jobs

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        """Step as an engine does: as long as there is something to compute, to hand over or new.

        An engine that has nothing of that must be woken for every answer and every deadline.
        """
        has_news = False
        while not is_enough():
            has_work = self.engine.scheduler.has_pending_work() or any(
                job.state == "running" for job in self.engine.jobs.values()
            )
            assert has_news or has_work or self.notified.wait(20.0), "nobody woke the engine"
            self.notified.clear()
            has_news = self.engine.step()


def test_everything_works_with_a_thread_for_the_store() -> None:
    world = ThreadedWorld()
    num_threads = threading.active_count()
    prompts = [tokens(3 * UNIT + 1, seed) for seed in range(3)]
    try:
        assert [job.num_loaded for job in world.serve(*prompts)] == [[], [], []]
        while len(world.shelf.values) < 9:
            time.sleep(0.001)
        assert [job.num_loaded for job in world.serve(*prompts)] == [[3 * UNIT]] * 3

        # Frozen while it is asked, while a load is under way, and then alive again.
        world.shelf.thaw.clear()
        frozen = world.serve(prompts[0])[0]
        assert (frozen.num_loaded, frozen.failures) == ([], [])
        world.shelf.thaw.set()
        while world.serve(prompts[0])[0].num_loaded != [3 * UNIT]:
            pass
        job = world.engine.submit(Job("freezes", prompts[1]))
        world.run_until(lambda: job.state == "loading")
        world.shelf.thaw.clear()
        world.run_until(lambda: world.engine.is_idle)
        assert [x.reason for x in job.failures] == [FailureReason.STALLED]
        world.shelf.thaw.set()
    finally:
        world.shelf.thaw.set()
        world.engine.worker.close(10.0)
    assert world.shelf.open_leases == 0
    assert threading.active_count() == num_threads - 2


def test_a_store_that_never_answers_does_not_delay_close() -> None:
    world = ThreadedWorld()
    world.shelf.thaw.clear()
    world.serve(tokens(UNIT + 1, 1))
    world.engine.worker.close(0.01)
    world.engine.worker.close(0.01)
    world.shelf.thaw.set()


class CannotClose(MemoryStore):
    def close(self) -> None:
        raise RuntimeError("scripted")


@pytest.mark.filterwarnings("error")
def test_a_store_that_fails_to_close_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = StoreThread(
        StoreConfig(backend=f"{__name__}:CannotClose", capacity_bytes=1), lambda: None
    )
    thread.close(10.0)
    assert not thread._thread.is_alive()
    assert "the KV store raised when it was closed" in caplog.text


def test_a_store_without_a_name_gets_that_of_the_kv() -> None:
    one, other = World(32, 64), World(32)
    named = World(32, name="mine")
    names = [x.store.config.name for world in (one, other, named) for x in world.executors]
    assert names == [LAYOUT.content_hash()[:16]] * 3 + ["mine"]


def test_an_unknown_backend_fails_at_start() -> None:
    store = StoreConfig(backend="nowhere", capacity_bytes=1)
    with pytest.raises(TransferError, match="nowhere"):
        StoreThread(store, lambda: None)
