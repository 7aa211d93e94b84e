"""An idle engine sleeps until it is woken: nothing of a transfer may wait for a step by chance."""

import msgspec
import pytest

from kv_transfer.errors import FailureReason
from kv_transfer.messages import Data
from tests.kv_transfer.fakes import FakeEngine, ticks
from tests.kv_transfer.pairs import NUM_TOKENS, Pair
from tests.kv_transfer.worlds import TINY

SECOND = 1.0


class Sleepers:
    """Pair whose engines step only when woken by their connector or by a prefill chunk."""

    def __init__(self, path: str, **changes) -> None:
        self.pair = Pair(path, layouts=(TINY, TINY), **changes)
        self.num_steps = {"P": 0, "D": 0}

    def is_awake(self, engine: FakeEngine) -> bool:
        return engine.notified.is_set() or engine.scheduler.has_pending_work()

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, and step woken engines until both sleep."""
        end_s = self.pair.network.now_s + seconds
        while True:
            for _ in range(200):
                awake = [engine for engine in self.pair.engines if self.is_awake(engine)]
                for engine in awake:
                    engine.notified.clear()
                    engine.step()
                    self.num_steps[engine.name] += 1
                self.pair.network.advance()
                if not any(map(self.is_awake, self.pair.engines)):
                    break
            else:
                raise AssertionError("they never sleep")
            if self.pair.network.now_s >= end_s:
                return
            self.pair.network.advance(0.25)

    def compute(self, num_tokens: int = NUM_TOKENS) -> None:
        self.pair.prefill(num_tokens)
        self.pair.producer.step()


def test_a_transfer_needs_no_step_but_those_it_asks_for(path: str) -> None:
    sleepers = Sleepers(path)
    sleepers.pair.start()
    sleepers.run()
    for num_tokens in (70, NUM_TOKENS):
        sleepers.compute(num_tokens)
        sleepers.run()
    sleepers.pair.assert_delivered()


def test_an_idle_engine_sleeps(path: str) -> None:
    """Renewals are the I/O thread's business; a core that waits costs nothing."""
    sleepers = Sleepers(path)
    sleepers.pair.start()
    sleepers.run()
    before = dict(sleepers.num_steps)
    sleepers.run(40 * SECOND)
    assert sleepers.num_steps == before
    assert not sleepers.pair.consumer.ended | sleepers.pair.producer.ended


def test_a_core_that_may_move_little_at_once_wakes_itself_for_the_rest(path: str) -> None:
    pair = Pair(path, layouts=(TINY, TINY))
    config = msgspec.structs.replace(
        pair.consumer.worker._settings.config, copy_s=1.0, copy_share=1e-9
    )
    sleepers = Sleepers(path, config=config, step_now_s=ticks())
    sleepers.pair.start()
    sleepers.run()
    sleepers.compute()
    sleepers.run()
    sleepers.pair.assert_delivered()
    assert sleepers.num_steps["D"] >= 4


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_cancel_reaches_both_ends_by_itself(path: str, who: str) -> None:
    sleepers = Sleepers(path)
    pair = sleepers.pair
    pair.start()
    sleepers.run()
    sleepers.compute(70)
    sleepers.run()
    scheduler = (pair.producer if who == "P" else pair.consumer).scheduler
    scheduler.cancel("r")
    assert scheduler.has_pending_work()
    sleepers.run()
    assert pair.consumer.reasons == pair.producer.reasons == {"r": FailureReason.CANCELLED}


def test_deadlines_wake_both_ends(path: str) -> None:
    sleepers = Sleepers(path)
    pair = sleepers.pair
    pair.start()
    sleepers.run()
    pair.network.fate = lambda _message: []
    sleepers.run(40 * SECOND)
    assert pair.consumer.reasons == {"r": FailureReason.STALLED}
    assert pair.producer.reasons == {"r": FailureReason.EXPIRED}


def test_an_unfetched_offer_wakes_its_engine(path: str) -> None:
    sleepers = Sleepers(path)
    sleepers.pair.producer.add(sleepers.pair.ticket)
    assert sleepers.pair.producer.scheduler.has_pending_work()
    sleepers.run(130 * SECOND)
    assert sleepers.pair.producer.reasons == {"r": FailureReason.EXPIRED}


@pytest.mark.parametrize("dead", ["P", "D"])
def test_a_death_wakes_the_other_end(path: str, dead: str) -> None:
    sleepers = Sleepers(path)
    pair = sleepers.pair
    pair.start()
    sleepers.run()
    gone, left = (pair.producer, pair.consumer) if dead == "P" else (pair.consumer, pair.producer)
    pair.network.cut(gone.worker.endpoints[0])
    assert left.notified.is_set()
    left.step()
    assert left.reasons == {"r": FailureReason.PEER_DEAD}


def test_a_lost_chunk_wakes_the_producer_again() -> None:
    lost = [1]

    def fate(message: object) -> list[float]:
        return [] if isinstance(message, Data) and lost and lost.pop() else [0.0]

    sleepers = Sleepers("inline", fate=fate)
    sleepers.pair.start()
    sleepers.run()
    sleepers.compute()
    sleepers.run(10 * SECOND)
    assert not lost
    sleepers.pair.assert_delivered()


def test_a_load_that_waits_for_admission_needs_no_step(path: str) -> None:
    pair = Pair(path)
    pair.consumer.add(pair.ticket)
    assert not pair.consumer.scheduler.has_pending_work()
    pair.consumer.scheduler.update_state_after_alloc("r", 0, [pair.target], NUM_TOKENS)
    assert pair.consumer.scheduler.has_pending_work()
    pair.consumer.step()
    assert not pair.consumer.scheduler.has_pending_work()


def test_a_preemption_is_handed_over_with_a_step() -> None:
    pair = Pair("inline")
    pair.producer.add(pair.ticket)
    pair.producer.step()
    assert not pair.producer.scheduler.has_pending_work()
    pair.producer.scheduler.request_preempted("r")
    assert pair.producer.scheduler.has_pending_work()
