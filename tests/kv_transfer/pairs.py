"""A producer and a consumer of one request on a network without sockets."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kv_transfer.config import TransferConfig
from kv_transfer.layout import ROW_TOKENS, KVLayout
from kv_transfer.messages import PROTOCOL_VERSION, Fetch
from tests.kv_transfer.fakes import (
    KEYS,
    LAYOUT,
    FakeEngine,
    FakeIO,
    Fate,
    LoopbackTransport,
    Network,
    make_loopback_engine,
    make_ticket,
)

SOURCE = tuple(range(9, 1, -1))
TARGET = tuple(range(1, 9))
NUM_TOKENS = 8 * 32 - 5


def fetch(pair: "Pair", sealed: bytes | None = None, **changes: Any) -> Fetch:
    """Ask for all rows of a pair's request, as its consumer would."""
    message = Fetch(
        version=PROTOCOL_VERSION,
        transfer_id=pair.ticket.transfer_id,
        epoch=pair.ticket.epoch,
        ticket=sealed or KEYS.seal(pair.ticket),
        consumer="D",
        start_row=0,
        end_row=pair.producer.io.layout.num_rows(pair.num_tokens),
        window=8,
    )
    return msgspec.structs.replace(message, **changes)


class Pair:
    """Two engines, of which ``P`` prefills request "r" for ``D``.

    No request owns block 0 or the last block of either engine.

    Attributes:
        source: The producer's block table.
        target: The consumer's.
    """

    def __init__(
        self,
        path: str = "inline",
        fate: Fate | None = None,
        *,
        num_tokens: int = NUM_TOKENS,
        layouts: Sequence[KVLayout] = (LAYOUT, LAYOUT),
        config: TransferConfig | None = None,
        **settings: Any,
    ) -> None:
        self.path = path
        self.num_tokens = num_tokens
        num_blocks = [layout.num_blocks(num_tokens) for layout in layouts]
        self.source = tuple(range(num_blocks[0] + 1, 1, -1))
        self.target = tuple(range(1, num_blocks[1] + 1))
        self.network = Network(fate)
        self.producer, self.consumer = (
            make_loopback_engine(
                name,
                FakeIO(num + 2, seed=seed, layout=layout, shares=shares),
                self.network,
                config,
                **settings,
            )
            for name, num, seed, layout, shares in zip(
                "PD", num_blocks, (1, 2), layouts, (path != "inline", path == "shared"), strict=True
            )
        )
        self.ticket = self.make_ticket("r")

    @property
    def engines(self) -> tuple[FakeEngine, FakeEngine]:
        return self.producer, self.consumer

    @property
    def wired_path(self) -> str:
        """The path as the connector calls it."""
        return "inline" if self.path == "inline" else "shared"

    def make_ticket(self, request_id: str, **names: str):
        endpoint = self.producer.worker.endpoints[0]
        layout = self.producer.io.layout
        return make_ticket(request_id, endpoint, self.num_tokens, layout=layout, **names)

    def node(self, engine: FakeEngine) -> LoopbackTransport:
        transport = engine.worker._transport
        assert isinstance(transport, LoopbackTransport)
        return transport

    def start(self, *, num_cached: int = 0) -> None:
        self.producer.add(self.ticket)
        self.consumer.load(self.ticket, self.target, num_cached)

    def prefill(self, num_tokens: int | None = None) -> None:
        """Announce that the producer has computed the request, or its beginning."""
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        num_blocks = self.producer.io.layout.num_blocks(num_tokens)
        self.producer.save("r", self.source[:num_blocks], num_tokens)

    def steps(self, num: int = 1, seconds: float = 0.0) -> None:
        for _ in range(num):
            for engine in self.engines:
                if not self.node(engine).is_frozen:
                    engine.step()
            self.network.advance(seconds)

    def finish(self, *engines: FakeEngine, seconds: float = 200.0, step_s: float = 1.0) -> None:
        """Step until these engines, or both, have no transfer left."""
        engines = engines or self.engines
        for _ in range(int(seconds / step_s)):
            self.steps(1, step_s)
            if not any(engine.scheduler.num_inflight for engine in engines):
                return
        raise AssertionError([repr(engine.scheduler) for engine in engines])

    def deliver(self, *, num_cached: int = 0) -> None:
        """Let the producer compute the rest; all of it must arrive."""
        self.prefill()
        self.steps(12)
        self.assert_delivered(num_cached)

    def load_and_deliver(self) -> None:
        """Let the consumer load what the producer has; all of it must arrive."""
        self.consumer.load(self.ticket, self.target)
        self.steps(12)
        self.assert_delivered()

    def has_rows(self, start: int, stop: int) -> bool:
        """Tell whether the consumer has these tokens as the producer has them."""
        want = self.producer.io.tokens(0, self.source, start, stop)
        return np.array_equal(self.consumer.io.tokens(0, self.target, start, stop), want)

    def assert_delivered(self, num_cached: int = 0) -> None:
        assert (self.producer.sent, self.consumer.received) == ({"r"}, {"r"})
        assert self.has_rows(num_cached, self.num_tokens)
        assert not self.consumer.io.tail(self.target, self.num_tokens).any()
        self.assert_untouched(num_cached)

    def assert_untouched(self, num_cached: int = 0) -> None:
        """Assert that only the blocks of the load were written, in either engine."""
        first = num_cached // self.consumer.io.layout.block_size
        assert self.consumer.io.changed() <= set(self.target[first:])
        if num_cached:
            io = self.consumer.io
            blocks, end_row = self.target, num_cached // ROW_TOKENS
            now = io.blocks[0].read_rows(blocks, 0, end_row)
            before = type(io)(io.cache.shape[2], layout=io.layout)
            before.cache[:] = io.original
            assert np.array_equal(before.blocks[0].read_rows(blocks, 0, end_row), now)
        assert not self.producer.io.changed()

    def assert_nothing_is_held(self) -> None:
        """Every lease, block and load has ended, and both ends agree that it is over."""
        for engine in self.engines:
            stats = engine.stats
            assert stats.num_inflight_loads == stats.num_inflight_sends == 0
            assert stats.num_leased_blocks == stats.num_reserved_blocks == 0
            assert engine.worker.transfers(self.network.now_s) == []
            assert not engine.scheduler.has_pending_work()
            assert self.node(engine).sessions.producer.num_open == 0
