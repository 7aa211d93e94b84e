"""Budget of KV copies in one step of an engine, over all transfers in both directions."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.step_budget import StepBudget
from tests.kv_transfer.fakes import FakeIO, Network, make_loopback_engine, make_ticket
from tests.kv_transfer.pool_world import Job
from tests.kv_transfer.store_worlds import CONFIG, UNIT, tokens
from tests.kv_transfer.test_pooled import World
from tests.kv_transfer.worlds import TINY

NUM_ROWS = 40
NUM_EACH_WAY = 3
THEIRS = tuple(range(1, NUM_ROWS + 1))
"""Block table of every other engine's request."""
COPY_S = 4.0
BUDGET = TransferConfig(
    chunk_bytes=TINY.row_bytes,
    window_bytes=4 * TINY.row_bytes,
    copy_s=COPY_S,
    copy_share=0.5,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class CountingIO(FakeIO):
    """A device that takes a second for each row, and remembers which blocks it was for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, layout=TINY)
        self.clock = Clock()

    def read_rows(self, lane, block_ids, first_row, num_rows):
        self.clock.now_s += num_rows
        return super().read_rows(lane, block_ids, first_row, num_rows)

    def write_rows(self, lane, block_ids, first_row, data):
        self.clock.now_s += len(data)
        super().write_rows(lane, block_ids, first_row, data)


class Busy:
    """An engine with requests to send and requests to load, all of them ready; time is copying."""

    def __init__(self, config: TransferConfig = BUDGET) -> None:
        self.network = Network()
        self.io = CountingIO(2 * NUM_EACH_WAY * NUM_ROWS + 1)
        self.clock = self.io.clock
        self.engine = make_loopback_engine(
            "E", self.io, self.network, config, step_now_s=self.clock
        )
        tables = [
            tuple(range(1 + n * NUM_ROWS, 1 + (n + 1) * NUM_ROWS)) for n in range(2 * NUM_EACH_WAY)
        ]
        self.others = [
            make_loopback_engine(f"O{n}", FakeIO(NUM_ROWS + 1, layout=TINY, seed=n), self.network)
            for n in range(2 * NUM_EACH_WAY)
        ]
        self.owner = {block: n for n, table in enumerate(tables) for block in table}
        for n, (other, table) in enumerate(zip(self.others, tables, strict=True)):
            ends = (self.engine, other) if n % 2 else (other, self.engine)
            self._start(f"r{n}", *ends, *((table, THEIRS) if n % 2 else (THEIRS, table)))

    def _start(self, request_id, producer, consumer, source, target) -> None:
        ticket = make_ticket(
            request_id,
            producer.worker.endpoints[0],
            32 * NUM_ROWS,
            producer=producer.name,
            consumer=consumer.name,
            layout=TINY,
        )
        producer.add(ticket)
        consumer.load(ticket, target)
        producer.save(request_id, source, 32 * NUM_ROWS)

    def step(self) -> float:
        """Step every engine once; return the time that this engine spent on copying."""
        began_s = self.clock.now_s
        self.engine.step()
        spent_s = self.clock.now_s - began_s
        for other in self.others:
            other.step()
        self.network.advance(0.01)
        return spent_s

    def moved(self) -> Counter[int]:
        """Return the rows that were copied for each transfer."""
        return Counter(self.owner[block] for _, block in self.io.reads + self.io.writes)


def test_a_step_copies_for_its_budget_over_all_transfers_and_both_ways() -> None:
    busy = Busy()
    spent = [busy.step() for _ in range(200)]
    assert max(spent) == COPY_S
    assert busy.engine.sent == {"r1", "r3", "r5"}
    assert busy.engine.received == {"r0", "r2", "r4"}
    assert sum(spent) == 2 * NUM_EACH_WAY * NUM_ROWS


@pytest.mark.parametrize("copy_s", [1e-9, 1.0, COPY_S])
def test_transfers_of_both_directions_take_turns(copy_s: float) -> None:
    busy = Busy(msgspec.structs.replace(BUDGET, copy_s=copy_s))
    for _ in range(5):  # Until every consumer has shown a ticket and has credits.
        busy.step()
    before = busy.moved()
    least = []
    for _ in range(60):
        assert busy.step() <= max(1.0, copy_s)
        gained = busy.moved() - before
        if not busy.engine.ended:
            least.append(max(gained.values()) - min(gained[n] for n in range(2 * NUM_EACH_WAY)))
    assert max(least) <= BUDGET.window_bytes // TINY.row_bytes


def test_a_step_that_computes_for_long_copies_for_a_share_of_that() -> None:
    busy = Busy()
    for _ in range(5):
        busy.step()

    def compute() -> None:
        busy.clock.now_s += 20.0

    busy.engine.forward = [compute]
    assert COPY_S < busy.step() - 20.0 <= 0.5 * 20.0


def test_loads_and_saves_of_a_pool_share_one_budget() -> None:
    clock = Clock()
    world = World(32, config=msgspec.structs.replace(CONFIG, copy_share=1e-9), step_now_s=clock)
    io = world.engine.io
    world.serve(tokens(6 * UNIT + 1, 1))

    def timed(copy: Callable[..., object], kind: str) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            clock.now_s += 1.0
            copied.append(kind)
            return copy(*arguments)

        return run

    copied: list[str] = []
    io.read_rows, io.write_rows = timed(io.read_rows, "save"), timed(io.write_rows, "load")
    world.engine.chunk_tokens = 8 * UNIT
    world.engine.submit(Job("saves", tokens(7 * UNIT, 2), num_decodes=30, waits_for_pool=False))
    world.engine.submit(Job("loads", tokens(6 * UNIT + 1, 1), num_decodes=1))
    most, kinds = 0, []
    for _ in range(40):
        copied.clear()
        world.steps()
        most = max(most, len(copied))
        kinds.append(set(copied))
    assert most == CONFIG.copy_s
    assert {"save", "load"} in kinds, "neither waits for the other's end"
    world.finish()


# ---- the budget itself


def test_every_step_may_copy_one_chunk_whatever_it_takes() -> None:
    clock = Clock()
    budget = StepBudget(0.01, 0.5, clock)
    for _ in range(3):
        budget.start_step()
        budget.resume()
        assert budget.has_room
        clock.now_s += 5.0
        budget.charge()
        assert not budget.has_room


def test_time_between_two_rounds_of_copying_is_not_charged() -> None:
    clock = Clock()
    budget = StepBudget(1.0, 1e-9, clock)
    budget.resume()
    clock.now_s += 0.5
    budget.charge()
    clock.now_s += 100.0
    budget.resume()
    assert budget.has_room
    clock.now_s += 0.5
    budget.charge()
    assert not budget.has_room
