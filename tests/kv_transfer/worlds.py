"""Two engines that reuse every block at once, so that a late read or write is caught.

As soon as an end of a transfer is reported, the blocks that it held get another pattern: the
producer's before the consumer may have read them, the consumer's before a late write may land.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from tests.kv_transfer.fakes import LAYOUT, FakeEngine
from tests.kv_transfer.pairs import Pair

TINY = msgspec.structs.replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=1)
"""Layout so small that a run takes a millisecond and many are possible."""

REUSED = {"P": 0xA5, "D": 0x5A}


class World(Pair):
    """A pair in which ends are checked when they are reported.

    Attributes:
        truth: The request's KV, (tokens, bytes).
        num_cached: Tokens that the consumer had before.
        ended_s: When each engine reported its end.
    """

    def __init__(self, *args, layouts=(TINY, TINY), **changes) -> None:
        super().__init__(*args, layouts=layouts, **changes)
        self.truth = self.producer.io.tokens(0, self.source, 0, self.num_tokens)
        self.num_cached = 0
        self.ended_s: dict[str, float] = {}
        self.began_s = self.network.now_s

    def start(self, *, num_cached: int = 0) -> None:
        self.num_cached = num_cached
        super().start(num_cached=num_cached)

    def step(self, engine: FakeEngine) -> None:
        """Step one engine, if it is not frozen, and reuse the blocks that it frees."""
        if not self.node(engine).is_frozen:
            engine.step()
        self.check()

    def steps(self, num: int = 1, seconds: float = 0.0) -> None:
        for _ in range(num):
            for engine in self.engines:
                self.step(engine)
            self.network.advance(seconds)
            self.check()

    def preempt(self) -> None:
        """Take the producer's blocks away, until ``prefill`` computes them again."""
        self.producer.progress.clear()
        self.producer.scheduler.request_preempted("r")
        self.producer.forward = [lambda: self.fill(self.producer, self.source)]

    def prefill(self, num_tokens: int | None = None) -> None:
        if "P" not in self.ended_s:
            io = self.producer.io
            self.producer.forward.append(lambda: np.copyto(io.cache, io.original))
            super().prefill(num_tokens)

    def fill(self, engine: FakeEngine, block_ids: tuple[int, ...]) -> None:
        engine.io.cache[0][:, list(block_ids)] = REUSED[engine.name]

    def check(self) -> None:
        """Check what must hold at any time."""
        for engine, blocks in ((self.producer, self.source), (self.consumer, self.target)):
            self.node(engine).sessions.check_invariants()
            if engine.name not in self.ended_s and engine.ended:
                engine.forward = []
                self.ended_s[engine.name] = self.network.now_s
                if engine is self.consumer:
                    self._check_load()
                self.fill(engine, blocks)
            elif engine.name in self.ended_s:
                reused = engine.io.cache[0][:, list(blocks)]
                assert (reused == REUSED[engine.name]).all(), "written after the end was reported"
        changed, first = self.consumer.io.changed(), self.num_cached // 32
        if not self.consumer.ended:
            assert changed <= set(self.target[first:]), "written where nothing belongs"
        # Each block of the producer is either held by the transfer or was given back.
        assert bool(self.producer.stats.num_inflight_sends) <= ("P" not in self.ended_s)

    def _check_load(self) -> None:
        """Assert that every row that the consumer counts as verified is the request's KV."""
        num_tokens = self.num_tokens
        if not self.consumer.received:
            num_tokens = self.consumer.failed["r"].num_tokens
            # Where it waits for a confirmation, it may give up before that arrives.
            is_unconfirmed = self.path != "inline" and num_tokens == self.num_tokens
            assert is_unconfirmed or not self.producer.sent
        got = self.tokens(self.num_cached, num_tokens)
        assert np.array_equal(got, self.truth[self.num_cached : num_tokens]), "wrong KV"
        if self.consumer.received:
            assert not self.consumer.io.tail(self.target, self.num_tokens).any()

    def tokens(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self.consumer.io.tokens(0, self.target, min(start, stop), stop)

    def run(self, step_s: float, limit_s: float) -> None:
        """Step until both ends are over; fail when that takes longer."""
        give_up_s = self.network.now_s + limit_s
        while self.producer.ended != {"r"} or self.consumer.ended != {"r"}:
            assert self.network.now_s <= give_up_s, [repr(x.scheduler) for x in self.engines]
            self.steps(1, step_s)

    def assert_over(self) -> None:
        """Both ends have ended once and hold nothing, last words apart."""
        assert self.producer.ended == self.consumer.ended == {"r"}
        self.assert_nothing_is_held()
