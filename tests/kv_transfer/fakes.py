"""Two engines without models: numpy KV memory, a step loop, and a network inside one process."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.connector import (
    ConnectorSettings,
    LinkFaults,
    NoLinkFaults,
    SaveProgress,
    TransferStats,
)
from kv_transfer.errors import FailureReason
from kv_transfer.layout import KVLayout
from kv_transfer.messages import decode_to_consumer, decode_to_producer, encode
from kv_transfer.p2p import P2PConnector, P2PConnectorScheduler
from kv_transfer.p2p_worker import P2PConnectorWorker
from kv_transfer.sessions import TransferSessions
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Command, Event, WireCounters

LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    block_size=32,
    dtype="float32",
    rope="hf",
    model_fingerprint="fake",
)
QUICK = TransferConfig(
    lease_s=3.0,
    renew_s=0.3,
    rendezvous_s=5.0,
    no_progress_s=1.5,
    closing_s=2.0,
    chunk_bytes=2 * LAYOUT.bytes_per_block,
    window_bytes=4 * LAYOUT.bytes_per_block,
)
"""Chunks of two blocks, windows of four."""


class FakeIO:
    """KV memory of ``num_lanes`` lanes in numpy; remembers which blocks were touched."""

    def __init__(self, num_blocks: int, *, num_lanes: int = 1, seed: int = 0) -> None:
        self.layout = LAYOUT
        shape = (num_lanes, num_blocks, LAYOUT.bytes_per_block)
        self.cache = np.random.default_rng(seed).integers(1, 256, shape, np.uint8)
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []

    def read_blocks(self, lane: int, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        self.reads.extend((lane, block_id) for block_id in block_ids)
        return self.cache[lane, list(block_ids)]

    def write_blocks(self, lane: int, block_ids: Sequence[int], data: NDArray[np.uint8]) -> None:
        assert data.shape == (len(block_ids), LAYOUT.bytes_per_block)
        self.cache[lane, list(block_ids)] = data
        self.writes.extend((lane, block_id) for block_id in block_ids)

    def rows(self, lane: int, block_ids: Sequence[int], num_tokens: int) -> NDArray[np.uint8]:
        """Bytes of a request's valid rows: (plane * head * layer, num_tokens, row_bytes)."""
        blocks = self.cache[lane, list(block_ids)].reshape(-1, *LAYOUT.rows_shape)
        return np.concatenate(list(blocks), axis=1)[:, :num_tokens]

    def tail(self, block_id: int, num_tokens: int, *, lane: int = 0) -> NDArray[np.uint8]:
        """Bytes of a request's last block behind its last token."""
        used = (num_tokens - 1) % LAYOUT.block_size + 1
        return self.cache[lane, block_id].reshape(LAYOUT.rows_shape)[:, used:]


@dataclass(eq=False)
class FakeEngine:
    """Calls a connector as an engine's core does, one ``step`` at a time."""

    name: str
    io: FakeIO
    scheduler: P2PConnectorScheduler
    worker: P2PConnectorWorker
    notified: threading.Event
    clock: Callable[[], float]
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    progress: list[SaveProgress] = field(default_factory=list)

    @property
    def ended(self) -> set[str]:
        return self.sent | self.received | self.failed.keys()

    @property
    def stats(self) -> TransferStats:
        return self.worker.stats(self.clock())

    def step(self) -> None:
        meta = self.scheduler.build_connector_meta(self.progress)
        self.progress = []
        self.worker.start_load_kv(meta, self.clock())
        self.worker.mark_ready(meta, self.clock())
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(self.clock())
        new = {*results.sent, *results.received, *results.failed}
        assert len(new) == len(results.sent) + len(results.received) + len(results.failed)
        assert not new & self.ended, "a transfer ended twice"
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed
        self.scheduler.update_connector_output(results)

    def save(self, request_id: str, block_ids: Iterable[int], num_tokens: int) -> None:
        """Announce what the next step computes."""
        self.progress.append(SaveProgress(request_id, 0, tuple(block_ids), num_tokens))

    def load(self, ticket: Ticket, block_ids: Sequence[int], num_cached: int = 0) -> None:
        """Admit a request whose KV comes from elsewhere."""
        self.scheduler.on_new_request(ticket.request_id, ticket)
        num_external, _ = self.scheduler.get_num_new_matched_tokens(ticket.request_id, num_cached)
        assert num_external is not None
        self.scheduler.update_state_after_alloc(ticket.request_id, 0, block_ids, num_external)


def make_engine(
    name: str,
    io: FakeIO,
    *,
    bind: str = "tcp://127.0.0.1:*",
    config: TransferConfig = QUICK,
    link_faults: LinkFaults | None = None,
) -> FakeEngine:
    """Make an engine on the real transport; the caller closes ``worker``."""
    settings = ConnectorSettings(
        incarnation=name, bind=bind, config=config, link_faults=link_faults or NoLinkFaults()
    )
    notified = threading.Event()
    connector = P2PConnector()
    worker = connector.create_worker(settings, notified.set)
    worker.register_kv_caches(io)
    scheduler = connector.create_scheduler(settings, LAYOUT)
    return FakeEngine(name, io, scheduler, worker, notified, time.monotonic)


def make_ticket(
    request_id: str, endpoint: str, num_tokens: int, *, producer: str = "P", consumer: str = "D"
) -> Ticket:
    """Mint a ticket with an id made from the request's."""
    return Ticket(
        transfer_id=request_id.encode().ljust(16, b".")[:16],
        request_id=request_id,
        epoch=1,
        producer_endpoint=endpoint,
        producer_incarnation=producer,
        consumer=consumer,
        num_tokens=num_tokens,
        layout_hash=LAYOUT.layout_hash(),
    )


def run_until(
    predicate: Callable[[], bool], engines: Sequence[FakeEngine], deadline_s: float = 20.0
) -> None:
    """Step engines when their connector wakes them, until the predicate holds."""
    give_up_s = time.monotonic() + deadline_s
    for engine in engines:
        engine.step()
    while not predicate():
        assert time.monotonic() < give_up_s, [repr(engine.scheduler) for engine in engines]
        for engine in engines:
            if engine.notified.wait(0.002) or engine.scheduler.has_pending_work():
                engine.notified.clear()
                engine.step()


# ---- a network without sockets


class Faults:
    """What happens to each message: nothing, or what a seeded dice says."""

    def __init__(
        self, seed: int = 0, drop: float = 0.0, repeat: float = 0.0, delay: float = 0.0
    ) -> None:
        self._dice = random.Random(seed)
        self._drop, self._repeat, self._delay = drop, repeat, delay

    def heal(self) -> None:
        self._drop = self._repeat = self._delay = 0.0

    def delays_s(self) -> list[float]:
        """One delivery time per copy of a message."""
        copies = 1 - (self._dice.random() < self._drop) + (self._dice.random() < self._repeat)
        return [
            self._dice.random() if self._dice.random() < self._delay else 0.0 for _ in range(copies)
        ]


class Network:
    """Loopback wires between transports, with a virtual clock."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.now_s = 1000.0
        self.faults = faults or Faults()
        self.nodes: dict[str, LoopbackTransport] = {}
        self._wires: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now_s

    def post(self, deliver: Callable[[], None]) -> None:
        for delay_s in self.faults.delays_s():
            self._count += 1
            self._wires.append((self.now_s + delay_s, self._count, deliver))

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass, then deliver what is due until the wires are quiet."""
        self.now_s += seconds
        for node in self.nodes.values():
            node.tick()
        while due := sorted(wire for wire in self._wires if wire[0] <= self.now_s):
            self._wires = [wire for wire in self._wires if wire[0] > self.now_s]
            for _, _, deliver in due:
                deliver()

    def cut(self, endpoint: str) -> None:
        """Kill a node: everybody who talks to it notices at once."""
        del self.nodes[endpoint]
        for node in self.nodes.values():
            node.consumer.on_peer_lost(endpoint)
            node.producer.on_peer_lost(endpoint.encode())
            node.send()


class LoopbackTransport:
    """Test double of a transport: the same sessions, no thread, no sockets."""

    def __init__(self, network: Network, settings: ConnectorSettings) -> None:
        self.network = network
        self.endpoint = f"tcp://{settings.incarnation}:1"
        self.counters = WireCounters()
        args = (settings.incarnation, LAYOUT, settings.config, self.counters)
        self.sessions = TransferSessions(*args)
        self.producer, self.consumer = self.sessions.producer, self.sessions.consumer
        self.events: deque[Event] = deque()
        self.corrupt = 0
        network.nodes[self.endpoint] = self

    def submit(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self.sessions.apply(command, self.network.now_s)
        self.send()

    def poll(self) -> Sequence[Event]:
        events = list(self.events)
        self.events.clear()
        return events

    def close(self, deadline_s: float) -> None:
        self.network.nodes.pop(self.endpoint, None)

    def tick(self) -> None:
        self.sessions.tick(self.network.now_s)
        self.send()

    def send(self) -> None:
        self.sessions.check_invariants()
        for peer, message, payload in self.producer.take_sends():
            is_bad = payload is not None and self.corrupt > 0
            self.corrupt -= is_bad
            sent = payload ^ np.uint8(1) if payload is not None and is_bad else payload
            self._post(peer.decode(), encode(message), sent)
        for endpoint, message in self.consumer.take_sends():
            self._post(endpoint, encode(message), None, is_request=True)
        self.events.extend(self.sessions.take_events())

    def _post(
        self,
        to: str,
        frame: bytes,
        payload: NDArray[np.uint8] | None,
        *,
        is_request: bool = False,
    ) -> None:
        def deliver() -> None:
            node = self.network.nodes.get(to)
            if node is None:
                return
            now_s = self.network.now_s
            if is_request:
                node.producer.on_message(self.endpoint.encode(), decode_to_producer(frame), now_s)
            else:
                data = payload if payload is None else payload.reshape(-1)
                node.consumer.on_message(self.endpoint, decode_to_consumer(frame), data, now_s)
            node.send()

        self.network.post(deliver)


def make_loopback_engine(
    name: str, io: FakeIO, network: Network, config: TransferConfig | None = None
) -> FakeEngine:
    """Make an engine on the loopback network, with the constants of production by default."""
    chunks = TransferConfig(chunk_bytes=QUICK.chunk_bytes, window_bytes=QUICK.window_bytes)
    settings = ConnectorSettings(incarnation=name, config=config or chunks)
    notified = threading.Event()
    worker = P2PConnectorWorker(
        settings,
        notified.set,
        lambda settings, _layout, _notify: LoopbackTransport(network, settings),
    )
    worker.register_kv_caches(io)
    scheduler = P2PConnectorScheduler(settings, LAYOUT)
    return FakeEngine(name, io, scheduler, worker, notified, network.clock)
