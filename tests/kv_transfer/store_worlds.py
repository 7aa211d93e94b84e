"""Engines that share one store in memory, without threads, and faults in any order."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.config import TransferConfig
from kv_transfer.connector import TransferRequest
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.pooled import unit_keys
from kv_transfer.store import StoreConfig
from kv_transfer.store_thread import CHECKSUM_BYTES, is_value
from tests.kv_transfer.memory_store import SHELVES, InlineExecutor, Shelf
from tests.kv_transfer.pool_world import LAYOUT, Job, PoolEngine, kv_rows

UNIT = 128
UNIT_BYTES = UNIT // ROW_TOKENS * LAYOUT.row_bytes
CONFIG = TransferConfig(
    chunk_bytes=LAYOUT.row_bytes * 2,
    copy_s=3.0,
    copy_share=1e-9,
    window_bytes=UNIT_BYTES,
    max_inflight_bytes=4 * UNIT_BYTES,
    no_progress_s=2.0,
)
"""A step copies three chunks of half a unit; four units may wait for the store."""

numbers = itertools.count()


def tokens(num_tokens: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1000, num_tokens)]


def new_shelf(**changes: Any) -> tuple[Shelf, StoreConfig]:
    """Make a shelf of its own, and the configuration that names it."""
    address = f"shelf-{next(numbers)}"
    SHELVES[address] = Shelf()
    store = StoreConfig(
        backend="tests.kv_transfer.memory_store:MemoryStore",
        capacity_bytes=1,
        address=address,
        unit_tokens=UNIT,
        **changes,
    )
    return SHELVES[address], store


class StoreWorld:
    """Engines whose store answers when the test lets it."""

    engines: list[PoolEngine]

    def __init__(self, name: str = "") -> None:
        self.shelf, self.store = new_shelf(name=name)
        self.executors: list[InlineExecutor] = []
        self.num_notified = 0

    def make_executor(self, store: StoreConfig, notify: Callable[[], None]) -> InlineExecutor:
        self.executors.append(InlineExecutor(store, notify))
        return self.executors[-1]

    def notify(self) -> None:
        self.num_notified += 1

    def let_store_work(self) -> None:
        for executor in self.executors:
            executor.run()

    def submit(self, engine: PoolEngine, token_ids: list[int], salt: str = "", **how: Any) -> Job:
        return engine.submit(Job(f"r{next(numbers)}", token_ids, **how), salt)

    def advance(self, seconds: float) -> None:
        raise NotImplementedError

    def steps(self, num_steps: int = 1, *, seconds: float = 0.0, is_frozen: bool = False) -> None:
        """Let every engine make steps; the store keeps up unless it is frozen."""
        for _ in range(num_steps):
            for engine in self.engines:
                engine.step()
            if not is_frozen:
                self.let_store_work()
            self.advance(seconds)

    def finish(self) -> None:
        """Run until everything has ended, and assert that nothing is left."""
        for number in range(1000):
            self.steps(seconds=0.0 if number < 60 else 1.0)
            if all(engine.is_idle for engine in self.engines):
                break
        self.steps(2)
        for engine in self.engines:
            engine.check_drained()
        assert self.shelf.open_leases == 0

    def keys(self, token_ids: list[int], salt: str = "") -> tuple[bytes, ...]:
        request = TransferRequest("r", token_ids, cache_salt=salt)
        return unit_keys(LAYOUT.content_hash(), request, UNIT)

    def check_values(self, prompts: list[list[int]]) -> None:
        """Compare every value of these prompts on the shelf with what a model would compute."""
        for token_ids in prompts:
            for number, key in enumerate(self.keys(token_ids)):
                if key in self.shelf.values:
                    value = self.shelf.values[key]
                    assert is_value(key, value, UNIT_BYTES)
                    rows = kv_rows(token_ids, number * UNIT // 32, UNIT // 32)
                    assert (value[CHECKSUM_BYTES:] == rows.reshape(-1)).all()


class StoreMachine(RuleBasedStateMachine):
    """Two engines with aborts, preemptions, failures and delays in any order."""

    world: StoreWorld
    prompts: list[list[int]]

    @rule(engine=st.integers(0, 1), num_steps=st.integers(1, 4))
    def step(self, engine: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.engines[engine].step()

    @rule(engine=st.integers(0, 1), num_jobs=st.integers(1, 4))
    def let_store_work(self, engine: int, num_jobs: int) -> None:
        self.world.executors[engine].run(num_jobs)

    @rule(seconds=st.sampled_from([0.0, 0.06, 0.3, 2.5]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(engine=st.integers(0, 1), which=st.integers(0, 5), is_held=st.booleans())
    def abort(self, engine: int, which: int, is_held: bool) -> None:
        there = self.world.engines[engine]
        names = list(there.held if is_held else there.jobs)
        if names:
            there.abort(names[which % len(names)])

    @rule(engine=st.integers(0, 1), which=st.integers(0, 5))
    def preempt(self, engine: int, which: int) -> None:
        there = self.world.engines[engine]
        running = [x for x in there.jobs.values() if x.state in {"running", "loading"}]
        if running:
            there.preempt(running[which % len(running)].request_id)

    @precondition(lambda self: self.world.shelf.values)
    @rule(which=st.integers(0, 20), is_poisoned=st.booleans())
    def spoil(self, which: int, is_poisoned: bool) -> None:
        values = self.world.shelf.values
        key = sorted(values)[which % len(values)]
        if is_poisoned:
            self.world.shelf.poison(key)
        else:
            del values[key]

    @rule(is_down=st.booleans(), loses_leases=st.booleans(), raises=st.booleans())
    def break_store(self, is_down: bool, loses_leases: bool, raises: bool) -> None:
        shelf = self.world.shelf
        shelf.is_down, shelf.loses_leases, shelf.raises = is_down, loses_leases, raises

    @invariant()
    def every_block_is_somewhere(self) -> None:
        for engine in self.world.engines:
            jobs = [*engine.jobs.values(), *engine.held.values()]
            taken = [x for job in jobs for x in job.block_ids]
            assert sorted(taken + engine.free) == list(range(engine.num_blocks))

    def teardown(self) -> None:
        self.break_store(is_down=False, loses_leases=False, raises=False)
        self.world.finish()
        # A value may have been poisoned on purpose; what a checksum covers must be right.
        values = self.world.shelf.values
        for token_ids in self.prompts:
            for key in self.world.keys(token_ids):
                if key in values and not is_value(key, values[key], UNIT_BYTES):
                    del values[key]
        self.world.check_values(self.prompts)


machine_settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
