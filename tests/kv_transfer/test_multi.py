"""Pool and point-to-point together: two engines, a network and a store, all without threads."""

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kv_transfer.config import TransferConfig
from kv_transfer.connector import TransferRequest, load_connector
from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.multi import SPLIT_WAIT_S, MultiConnectorScheduler, MultiConnectorWorker
from kv_transfer.p2p import P2PConnectorScheduler
from kv_transfer.p2p_worker import P2PConnectorWorker, P2PMeta
from kv_transfer.pooled import PooledConnectorScheduler
from kv_transfer.pooled_worker import PooledConnectorWorker
from tests.kv_transfer.fakes import (
    KEYS,
    LoopbackTransport,
    Network,
    make_settings,
    make_ticket,
    ticks,
)
from tests.kv_transfer.pool_world import LAYOUT, Job, PoolEngine, layout_of
from tests.kv_transfer.store_worlds import (
    UNIT,
    UNIT_BYTES,
    StoreMachine,
    StoreWorld,
    machine_settings,
    numbers,
    tokens,
)
from tests.kv_transfer.test_pooled import SLOW

CONFIG = TransferConfig(
    copy_s=6.0,
    copy_share=1e-9,
    max_inflight_bytes=4 * UNIT_BYTES,
    chunk_bytes=LAYOUT.row_bytes,
    window_bytes=4 * LAYOUT.row_bytes,
    no_progress_s=2.0,
)


class World(StoreWorld):
    """A producer P and a consumer D with one pool and a network; time is set by hand."""

    def __init__(
        self,
        producer_block: int = 32,
        consumer_block: int = 32,
        *,
        config: TransferConfig = CONFIG,
        pool_config: TransferConfig = CONFIG,
    ) -> None:
        super().__init__()
        self._config, self._pool_config = config, pool_config
        self.network = Network()
        self.transports: list[LoopbackTransport] = []
        self.producer = self._engine("P", producer_block)
        self.consumer = self._engine("D", consumer_block)
        self.engines = [self.producer, self.consumer]

    def _engine(self, name: str, block_size: int) -> PoolEngine:
        made = make_settings(
            name,
            config=self._config,
            store=self.store,
            unix_now_s=self.network.clock,
            step_now_s=ticks(),
        )
        for_pool = msgspec.structs.replace(made, config=self._pool_config)
        layout = layout_of(block_size)

        def make_transport(*parts: Any) -> LoopbackTransport:
            self.transports.append(LoopbackTransport(self.network, *parts))
            return self.transports[-1]

        p2p = P2PConnectorWorker(made, self.notify, make_transport)
        pooled = PooledConnectorWorker(for_pool, self.notify, self.make_executor)
        engine = PoolEngine(
            MultiConnectorScheduler(
                P2PConnectorScheduler(made, layout), PooledConnectorScheduler(made, layout), layout
            ),
            MultiConnectorWorker(p2p, pooled),
            layout,
            self.network.clock,
            num_blocks=2048 // block_size,
        )
        engine.io.moves_whole_blocks = False
        self.transports[-1].io = engine.io
        return engine

    def advance(self, seconds: float) -> None:
        self.network.advance(seconds)

    def _ticket(self, name: str, num_tokens: int) -> bytes:
        (endpoint,) = self.producer.worker.endpoints
        return KEYS.seal(make_ticket(name, endpoint, num_tokens, layout=LAYOUT))

    def pair(
        self, token_ids: list[int], *, local: int = 0, num_decodes: int = 1
    ) -> tuple[Job, Job]:
        """Start a request on both engines, with a ticket."""
        name = f"r{next(numbers)}"
        sealed = self._ticket(name, len(token_ids))
        sends = Job(name, token_ids, num_decodes=0, mode="producer")
        fetches = Job(name, token_ids, local, num_decodes, mode="consumer")
        self.producer.submit(sends, ticket=sealed)
        self.consumer.submit(fetches, ticket=sealed)
        return sends, fetches

    def lend(self, job: Job, *, local: int = 0) -> Job:
        """Let the consumer take over what a request that runs on the producer has computed."""
        num_tokens = job.num_computed // ROW_TOKENS * ROW_TOKENS
        sealed = self._ticket(job.request_id, num_tokens)
        successor = Job(job.request_id, job.token_ids[:num_tokens], local, mode="consumer")
        self.producer.lend(job, num_tokens, sealed)
        return self.consumer.submit(successor, ticket=sealed)

    def serve(self, engine: PoolEngine, token_ids: list[int]) -> Job:
        job = self.submit(engine, token_ids)
        self.finish()
        return job

    @property
    def rows_sent(self) -> int:
        """Return the rows that went from engine to engine in delivered transfers."""
        paths = self.producer.worker.stats(self.network.now_s).paths
        return sum(paths[x].bytes_sent for x in paths if x != "pool") // LAYOUT.row_bytes


# ---- where KV comes from


def test_without_the_pool_everything_comes_from_the_peer() -> None:
    world = World()
    prompt = tokens(3 * UNIT + 40, 1)
    sends, fetches = world.pair(prompt)
    world.finish()
    assert fetches.num_loaded == [len(prompt)]
    assert sends.was_sent
    assert world.rows_sent == len(prompt) // ROW_TOKENS + 1
    # The producer saved it, the consumer did not.
    assert set(world.shelf.values) == set(world.keys(prompt))
    assert world.executors[1].store.totals.puts == 0


@pytest.mark.parametrize(("producer_block", "consumer_block"), [(32, 32), (64, 32), (32, 128)])
def test_the_pool_gives_the_first_units_and_the_peer_the_rest(
    producer_block: int, consumer_block: int
) -> None:
    world = World(producer_block, consumer_block)
    common = tokens(2 * UNIT, 1)
    world.serve(world.producer, common)
    prompt = common + tokens(UNIT + 40, 2)
    # The producer loads from the pool, too.
    sends, fetches = world.pair(prompt)
    world.finish()
    assert sends.num_loaded == [2 * UNIT]
    assert sends.was_sent
    assert fetches.num_loaded == [len(prompt)]
    assert world.rows_sent == (UNIT + 40) // ROW_TOKENS + 1
    stats = world.consumer.worker.stats(world.network.now_s)
    assert stats.paths["pool"].bytes_received == 2 * UNIT_BYTES
    assert stats.store.hits == 2
    assert sum(stats.stages["total"].counts) == 2


@pytest.mark.parametrize("num_local", [0, 64, UNIT, 2 * UNIT + 32, 3 * UNIT, 3 * UNIT + 64])
def test_the_local_prefix_comes_first(num_local: int) -> None:
    world = World()
    prompt = tokens(3 * UNIT + 64, 1)
    world.serve(world.producer, prompt[: 2 * UNIT])
    _, fetches = world.pair(prompt, local=num_local)
    world.finish()
    assert fetches.num_loaded == [len(prompt) - num_local]
    assert world.rows_sent == (len(prompt) - max(num_local, 2 * UNIT)) // ROW_TOKENS


def test_with_everything_in_the_pool_the_peer_still_gives_the_last_rows() -> None:
    world = World()
    prompt = tokens(2 * UNIT, 1)
    world.serve(world.consumer, prompt)
    sends, fetches = world.pair(prompt)
    world.finish()
    assert sends.was_sent
    assert fetches.num_loaded == [2 * UNIT]
    assert world.rows_sent == 1


def test_local_requests_use_the_pool_of_both_engines() -> None:
    world = World()
    prompt = tokens(2 * UNIT + 1, 1)
    assert world.serve(world.producer, prompt).num_loaded == []
    assert world.serve(world.consumer, prompt).num_loaded == [2 * UNIT]


def test_a_fetch_waits_for_the_pool_only_so_long() -> None:
    world = World()
    prompt = tokens(2 * UNIT + 1, 1)
    world.serve(world.producer, prompt)
    _, fetches = world.pair(prompt)
    world.steps(is_frozen=True)
    world.steps(is_frozen=True)
    assert world.executors[1].alarm_s == pytest.approx(SPLIT_WAIT_S)
    assert world.consumer.worker.transfers(0.0) == []
    world.steps(seconds=SPLIT_WAIT_S, is_frozen=True)
    world.steps(is_frozen=True)
    world.steps(is_frozen=True)
    (under_way,) = world.consumer.worker.transfers(0.0)
    assert under_way.path != "pool"
    world.finish()
    assert fetches.num_loaded == [len(prompt)]
    assert world.consumer.worker.stats(0.0).paths["pool"].num_received == 0


# ---- failures


def start_fetch(world: World, num_parts: int) -> tuple[Job, Job, list[int]]:
    """Bring a request to where the pool's part is under way on the consumer, or the peer's."""
    prompt = tokens(4 * UNIT + 40, 1)
    world.serve(world.producer, prompt[: 3 * UNIT])
    world.producer.io.moves_whole_blocks = False
    sends, fetches = world.pair(prompt)
    paths: list[bool] = []
    for _ in range(100):
        world.consumer.step()
        paths += [x.path == "pool" for x in world.consumer.worker.transfers(0.0)]
        if sorted(set(paths), reverse=True) == [True, False][:num_parts]:
            return sends, fetches, prompt
        world.let_store_work()
    raise AssertionError(paths)


def test_the_peer_gives_what_the_pool_fails_to_give() -> None:
    world = World()
    sends, fetches, prompt = start_fetch(world, 1)
    world.shelf.lied_about.add(world.keys(prompt)[1])
    world.finish()
    assert fetches.failures == []
    assert fetches.num_loaded == [len(prompt)]
    assert sends.was_sent
    assert world.rows_sent == (3 * UNIT + 40) // ROW_TOKENS + 1


def test_a_failure_of_the_peer_keeps_what_the_pool_gave() -> None:
    world = World()
    _, fetches, _ = start_fetch(world, 2)
    world.network.cut("tcp://P:1")
    while not fetches.failures:
        world.consumer.step()
        world.let_store_work()
    reasons = [(x.reason, x.num_tokens) for x in fetches.failures]
    assert reasons == [(FailureReason.PEER_DEAD, 3 * UNIT)]


def test_when_both_fail_what_the_pool_gave_before_is_kept() -> None:
    world = World()
    _, fetches, prompt = start_fetch(world, 1)
    world.shelf.lied_about.add(world.keys(prompt)[2])
    del world.network.nodes["tcp://P:1"]
    for _ in range(40):
        world.consumer.step()
        world.let_store_work()
        world.network.advance(0.1)
    (failure,) = fetches.failures
    assert failure.reason is FailureReason.STALLED
    assert failure.num_tokens == 2 * UNIT


def test_the_end_of_a_pool_load_is_reported_before_that_of_the_offer() -> None:
    world = World()
    prompt = tokens(4 * UNIT + 40, 1)
    world.serve(world.producer, prompt[: 3 * UNIT])
    # The consumer has what the pool has, and fetches from the peer at once.
    sends, fetches = world.pair(prompt, local=3 * UNIT)
    while sends.state != "loading":
        world.steps()
    world.consumer.abort(fetches.request_id)
    for _ in range(4):
        world.steps(is_frozen=True)
    # The fake engine would take it for the load's end and start to compute.
    assert sends.failures == []
    assert sends.state == "loading"
    world.num_notified = 0
    world.let_store_work()
    world.finish()
    assert world.num_notified > 0
    assert sends.num_loaded == [3 * UNIT]
    assert [x.reason for x in sends.failures] == [FailureReason.CANCELLED]


def test_an_aborted_producer_that_loads_ends_once() -> None:
    world = World()
    prompt = tokens(4 * UNIT + 40, 1)
    world.serve(world.producer, prompt[: 3 * UNIT])
    sends, fetches = world.pair(prompt)
    while sends.state != "loading":
        world.steps()
    world.steps(is_frozen=True)
    world.producer.abort(sends.request_id)
    assert sends.request_id in world.producer.held
    world.finish()
    assert [x.reason for x in fetches.failures] == [FailureReason.CANCELLED]


@pytest.mark.parametrize("num_decodes", [4, 30])
@pytest.mark.parametrize("is_pooled", [True, False])
def test_a_moved_stream_loads_from_the_pool_and_from_its_lender(
    is_pooled: bool, num_decodes: int
) -> None:
    world = World()
    job = lender(world, tokens(3 * UNIT + 40, 1), num_decodes)
    world.steps()  # It has saved all of its units.
    if not is_pooled:
        world.shelf.values.clear()
    heir = world.lend(job)
    world.finish()
    assert job.was_sent
    assert heir.num_loaded == [3 * UNIT + ROW_TOKENS]
    assert world.rows_sent == (0 if is_pooled else 3 * UNIT // ROW_TOKENS) + 1


@pytest.mark.parametrize("deed", [PoolEngine.preempt, PoolEngine.abort])
@pytest.mark.parametrize("who", ["producer", "consumer"])
@pytest.mark.parametrize("num_rounds", range(7))
def test_any_end_of_a_lender_or_its_successor_ends_the_transfer_once(
    who: str, deed: Callable[[PoolEngine, str], None], num_rounds: int
) -> None:
    world = World()
    prompt = tokens(4 * UNIT + 40, 1)
    world.serve(world.producer, prompt[: 2 * UNIT])
    job = lender(world, prompt, 30)
    world.lend(job)
    for _ in range(num_rounds):
        world.steps()
    engine = getattr(world, who)
    known = engine.jobs.get(job.request_id)
    if known is not None and (deed is PoolEngine.abort or known.state in {"running", "loading"}):
        deed(engine, job.request_id)
    world.finish()
    assert not (job.was_sent and job.failures)


def lender(world: World, prompt: list[int], num_decodes: int) -> Job:
    """Start a request that the producer has computed and keeps decoding."""
    job = world.submit(world.producer, prompt, num_decodes=num_decodes)
    while job.num_computed < len(prompt):
        world.steps()
    assert job.state == "running"
    return job


def test_blocks_that_the_peer_has_are_not_read_for_the_pool() -> None:
    # The pool's part reads less per step than the other one: it has units to read at the end.
    world = World(config=TransferConfig(copy_s=1000.0), pool_config=SLOW)
    prompt = tokens(8 * UNIT, 1)
    world.producer.chunk_tokens = len(prompt)
    sends, fetches = world.pair(prompt)
    # The fake engine frees the blocks; reading them from here on fails.
    world.finish()
    assert sends.was_sent
    assert fetches.num_loaded == [len(prompt)]
    assert 0 < len(world.shelf.values) < 8


def test_a_bad_ticket_changes_nothing() -> None:
    world = World()
    with pytest.raises(TransferError, match="sealed with none"):
        world.producer.submit(Job("r", tokens(UNIT, 1)), ticket=b"x" * 64)
    world.producer.jobs.clear()
    assert world.producer.scheduler.num_inflight == 0
    assert not world.producer.scheduler.has_pending_work()


def test_the_blocks_must_hold_the_whole_prompt() -> None:
    world = World()
    _, fetches = world.pair(tokens(2 * UNIT, 1))
    scheduler = world.consumer.scheduler
    with pytest.raises(TransferError, match="blocks allocated"):
        scheduler.update_state_after_alloc(fetches.request_id, 0, [[1]], 2 * UNIT)


def test_the_parts_of_another_connector_are_refused() -> None:
    world = World()
    with pytest.raises(TransferError, match="P2PMeta"):
        world.producer.worker.start_load_kv(P2PMeta(), 0.0)


def test_it_is_there_by_name() -> None:
    world = World()
    made = make_settings("E", store=world.store)
    connector = load_connector("multi")
    scheduler = connector.create_scheduler(made, [LAYOUT])
    scheduler.on_new_request(TransferRequest("r", tokens(UNIT + 1, 1)), 0.0)
    assert scheduler.get_num_new_matched_tokens("r", 0) == (None, True)
    worker = connector.create_worker(made, functools.partial(int))
    worker.close(1.0)


@pytest.mark.parametrize("name", ["pooled", "multi"])
def test_an_engine_with_several_kv_groups_is_refused(name: str) -> None:
    world = World()
    made = make_settings("E", store=world.store)
    connector = load_connector(name)
    with pytest.raises(TransferError, match=r"one KV group .* has 2: leave kv_connector out"):
        connector.create_scheduler(made, [LAYOUT, LAYOUT])
    worker = connector.create_worker(made, functools.partial(int))
    io = world.producer.io
    with pytest.raises(TransferError, match=r"one KV group .* has 2: leave kv_connector out"):
        worker.register_kv_caches([io, io])
    worker.close(1.0)


class Closes:
    """Stands for a worker side that ends."""

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []

    def close(self, deadline_s: float) -> None:
        self.deadlines_s.append(deadline_s)


class CannotClose:
    def close(self, deadline_s: float) -> None:
        raise OSError("scripted")


def test_the_pool_is_closed_however_closing_p2p_ends() -> None:
    pooled = Closes()
    worker = MultiConnectorWorker(CannotClose(), pooled)
    with pytest.raises(OSError, match="scripted"):
        worker.close(2.0)
    assert pooled.deadlines_s == [1.0]


def test_converted_kv_is_kept_out_of_the_pool() -> None:
    made = make_settings("E", store=World().store, accept_dtypes=("float16",))
    connector = load_connector("multi")
    with pytest.raises(TransferError, match="leave kv_accept_dtypes empty"):
        connector.create_scheduler(made, [LAYOUT])
    with pytest.raises(TransferError, match="leave kv_accept_dtypes empty"):
        connector.create_worker(made, functools.partial(int))


# ---- anything at any time


class MultiMachine(StoreMachine):
    """A producer and a consumer, with requests that move and requests that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(32, 64)
        base = tokens(3 * UNIT, 0)
        self.prompts = [
            [*base[: cut * UNIT], *tokens(size, 100 + cut)]
            for cut, size in enumerate([UNIT + 1, 70, 200, UNIT])
        ]

    @rule(prompt=st.integers(0, 3), num_local=st.integers(0, 3), num_decodes=st.integers(0, 2))
    def submit_pair(self, prompt: int, num_local: int, num_decodes: int) -> None:
        token_ids = self.prompts[prompt]
        whole = len(token_ids) // 64 * 64
        local = min(64 * num_local, whole)
        self.world.pair(token_ids, local=local, num_decodes=num_decodes)

    @rule(engine=st.integers(0, 1), prompt=st.integers(0, 3))
    def submit_local(self, engine: int, prompt: int) -> None:
        self.world.submit(self.world.engines[engine], self.prompts[prompt])

    @rule(which=st.integers(0, 5), num_local=st.integers(0, 2))
    def lend(self, which: int, num_local: int) -> None:
        consumer = self.world.consumer
        running = [
            x for x in self.world.producer.jobs.values()
            if x.state == "running" and x.mode == "local" and x.num_computed >= ROW_TOKENS
            and x.request_id not in {*consumer.jobs, *consumer.held}
        ]  # fmt: skip
        if running:
            job = running[which % len(running)]
            local = min(64 * num_local, job.num_computed // ROW_TOKENS * ROW_TOKENS // 64 * 64)
            self.world.lend(job, local=local)

    @rule(engine=st.integers(0, 1), num_chunks=st.integers(0, 3))
    def corrupt(self, engine: int, num_chunks: int) -> None:
        self.world.transports[engine].corrupt = num_chunks


TestMultiMachine = MultiMachine.TestCase
TestMultiMachine.settings = machine_settings
