"""Two engines without models: numpy KV memory, a step loop, and a network inside one process."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.config import TransferConfig
from kv_transfer.connector import (
    ConnectorSettings,
    Failure,
    KVDeviceIO,
    SaveProgress,
    TransferRequest,
    TransferStats,
)
from kv_transfer.errors import FailureReason, WireError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.keys import KeyRing
from kv_transfer.layout import ROW_TOKENS, KVLayout
from kv_transfer.messages import (
    Agent,
    Staged,
    ToConsumer,
    ToProducer,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from kv_transfer.p2p import P2PConnector, P2PConnectorScheduler
from kv_transfer.p2p_worker import P2PConnectorWorker
from kv_transfer.sessions import TransferSessions
from kv_transfer.shared_region import RegionLayout, SharedRegion
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Command, Event, ProducerRoute, StartLoad, WireCounters

KEYS = KeyRing((b"a secret of this cluster's router",))
FOREVER_MS = 1 << 52
"""An expiry that no clock of a test reaches."""

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
    chunk_bytes=LAYOUT.row_bytes,
    window_bytes=4 * LAYOUT.row_bytes,
    mapped_chunk_bytes=2 * LAYOUT.row_bytes,
)
"""Chunks of one row, windows of four; two rows of shared memory are announced at once."""


class FakeIO:
    """KV memory of ``num_lanes`` lanes in numpy; remembers which blocks were touched.

    With ``shares`` it is memory of this process that others may map; otherwise a device's.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_lanes: int = 1,
        seed: int = 0,
        layout: KVLayout = LAYOUT,
        shares: bool = False,
    ) -> None:
        self.layout = layout
        shape = (num_lanes, layout.num_pieces, num_blocks, layout.piece_bytes)
        size = int(np.prod(shape))
        self.shared_region = SharedRegion.create(size) if shares else None
        memory = self.shared_region.memory[:size] if self.shared_region else np.empty(size, "u1")
        self.cache = memory.reshape(shape)
        self.cache[:] = np.random.default_rng(seed).integers(1, 256, shape, np.uint8)
        self.original = self.cache.copy()
        self.blocks = [HostBlocks(layout, list(lane)) for lane in self.cache]
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []

    @property
    def host_blocks(self) -> list[HostBlocks] | None:
        return self.blocks if self.shared_region is not None else None

    @property
    def region_layout(self) -> RegionLayout | None:
        if self.shared_region is None:
            return None
        num_lanes, num_pieces, num_blocks, piece_bytes = self.cache.shape
        size = num_blocks * piece_bytes
        offsets = tuple(
            tuple((lane * num_pieces + piece) * size for piece in range(num_pieces))
            for lane in range(num_lanes)
        )
        layout = self.layout
        return RegionLayout(layout.block_size, num_blocks, layout.content_hash(), offsets)

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        first, end = self.layout.covering(first_row, num_rows)
        self.reads.extend((lane, block_id) for block_id in block_ids[first:end])
        return self.blocks[lane].read_rows(block_ids, first_row, num_rows)

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        first, end = self.layout.covering(first_row, len(data))
        self.writes.extend((lane, block_id) for block_id in block_ids[first:end])
        self.blocks[lane].write_rows(block_ids, first_row, data)

    def changed(self, lane: int = 0) -> set[int]:
        """Return the blocks whose bytes differ from those at the start, by whatever path."""
        differs = (self.cache[lane] != self.original[lane]).any(axis=(0, 2))
        return set(np.flatnonzero(differs).tolist())

    def tokens(
        self, lane: int, block_ids: Sequence[int], start: int, stop: int
    ) -> NDArray[np.uint8]:
        """Bytes of tokens of a request: (tokens, pieces * heads * bytes of a token in a head)."""
        first_row, end_row = start // ROW_TOKENS, -(-stop // ROW_TOKENS)
        rows = self.blocks[lane].read_rows(block_ids, first_row, end_row - first_row)
        token_bytes = self.layout.unit_bytes // ROW_TOKENS
        num_units = self.layout.row_bytes // self.layout.unit_bytes
        units = rows.reshape(len(rows), num_units, ROW_TOKENS, token_bytes)
        tokens = units.transpose(0, 2, 1, 3).reshape(-1, num_units * token_bytes)
        return tokens[start - first_row * ROW_TOKENS : stop - first_row * ROW_TOKENS]

    def tail(
        self, block_ids: Sequence[int], num_tokens: int, *, lane: int = 0
    ) -> NDArray[np.uint8]:
        """Bytes of a request's last block behind its last token."""
        stop = self.layout.num_blocks(num_tokens) * self.layout.block_size
        return self.tokens(lane, block_ids, num_tokens, stop)


@dataclass(eq=False)
class FakeEngine:
    """Calls a connector as an engine's core does, one ``step`` at a time."""

    name: str
    io: FakeIO
    scheduler: P2PConnectorScheduler
    worker: P2PConnectorWorker
    notified: threading.Event
    clock: Callable[[], float]
    keys: KeyRing = KEYS
    """Keys of the router, whose tickets the engine gets."""
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, Failure] = field(default_factory=dict)
    progress: list[SaveProgress] = field(default_factory=list)
    forward: list[Callable[[], None]] = field(default_factory=list)
    """Change that the next step's forward makes to KV memory."""

    @property
    def ended(self) -> set[str]:
        return self.sent | self.received | self.failed.keys()

    @property
    def reasons(self) -> dict[str, FailureReason]:
        """Return the reasons of the transfers that failed."""
        return {request_id: failure.reason for request_id, failure in self.failed.items()}

    @property
    def stats(self) -> TransferStats:
        return self.worker.stats(self.clock())

    def step(self) -> None:
        meta = self.scheduler.build_connector_meta(self.progress)
        self.progress = []
        self.worker.start_load_kv(meta, self.clock())
        for write in self.forward:
            write()
        self.forward = []
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
        self.progress.append(SaveProgress(request_id, 0, (tuple(block_ids),), num_tokens))

    def add(self, ticket: Ticket) -> None:
        """Take a request that brings a ticket."""
        sealed = self.keys.seal(ticket)
        request = TransferRequest(ticket.request_id, (0,) * ticket.num_tokens, sealed)
        self.scheduler.on_new_request(request, self.clock())

    def load(self, ticket: Ticket, block_ids: Sequence[int], num_cached: int = 0) -> None:
        """Admit a request whose KV comes from elsewhere."""
        self.add(ticket)
        num_external, _ = self.scheduler.get_num_new_matched_tokens(ticket.request_id, num_cached)
        assert num_external is not None
        self.scheduler.update_state_after_alloc(ticket.request_id, 0, [block_ids], num_external)


def ticks() -> Callable[[], float]:
    """Return a clock that advances by a second with each reading, so that a chunk costs one."""
    count = itertools.count()
    return lambda: float(next(count))


def make_settings(incarnation: str, **changes: Any) -> ConnectorSettings:
    """Make settings whose clocks stand still, so that a step copies all that is due."""
    told = {"keys": KEYS, "unix_now_s": lambda: 0.0, "step_now_s": lambda: 0.0, **changes}
    return ConnectorSettings(incarnation=incarnation, **told)


def make_engine(
    name: str,
    io: FakeIO,
    *,
    bind: str = "tcp://127.0.0.1:*",
    config: TransferConfig = QUICK,
    accept_dtypes: tuple[str, ...] = (),
    **settings: Any,
) -> FakeEngine:
    """Make an engine on the real transport; the caller closes ``worker``."""
    told = make_settings(
        name,
        **{"unix_now_s": time.time, "step_now_s": time.monotonic, **settings},
        bind=bind,
        config=config,
        accept_dtypes=accept_dtypes,
    )
    notified = threading.Event()
    connector = P2PConnector()
    worker = connector.create_worker(told, notified.set)
    worker.register_kv_caches([io])
    scheduler = connector.create_scheduler(told, [io.layout])
    return FakeEngine(name, io, scheduler, worker, notified, time.monotonic)


def make_ticket(
    request_id: str,
    endpoints: str | tuple[str, ...],
    num_tokens: int,
    *,
    producer: str = "P",
    consumer: str = "D",
    layout: KVLayout = LAYOUT,
) -> Ticket:
    """Mint a ticket with an id made from the request's."""
    return Ticket(
        transfer_id=request_id.encode().ljust(16, b".")[:16],
        request_id=request_id,
        epoch=1,
        producer_endpoints=(endpoints,) if isinstance(endpoints, str) else endpoints,
        producer_incarnation=producer,
        consumer=consumer,
        num_tokens=num_tokens,
        layout_hash=layout.content_hash(),
        expires_ms=FOREVER_MS,
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

Message = ToProducer | ToConsumer
Fate = Callable[[Message], list[float]]
"""Delays in seconds of the copies of a message that arrive; none of them loses it."""


class Network:
    """Loopback wires between transports, with a virtual clock.

    Attributes:
        fate: Asked about every message.
        sent: Every message, in the order of sending.
    """

    def __init__(self, fate: Fate | None = None) -> None:
        self.now_s = 1000.0
        self.fate = fate or (lambda _message: [0.0])
        self.nodes: dict[str, LoopbackTransport] = {}
        self.sent: list[Message] = []
        self._wires: list[tuple[float, int, LoopbackTransport | None, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now_s

    def post(self, message: Message, to: str, deliver: Callable[[], None]) -> None:
        self.sent.append(message)
        for delay_s in self.fate(message):
            self._count += 1
            wire = (self.now_s + delay_s, self._count, self.nodes.get(to), deliver)
            self._wires.append(wire)

    def advance(self, seconds: float = 0.0) -> None:
        """Advance the time, then deliver due messages until the wires are quiet."""
        self.now_s += seconds
        for node in self.nodes.values():
            node.tick()
        while due := sorted((x for x in self._wires if self._is_due(x)), key=lambda x: x[:2]):
            self._wires = [wire for wire in self._wires if wire not in due]
            for _, _, _, deliver in due:
                deliver()

    def cut(self, endpoint: str) -> None:
        """Kill a node; all its peers notice at once."""
        del self.nodes[endpoint]
        for node in self.nodes.values():
            node.consumer.on_peer_lost(endpoint)
            node.producer.on_peer_lost(endpoint.encode())
            node.send()

    def _is_due(
        self, wire: "tuple[float, int, LoopbackTransport | None, Callable[[], None]]"
    ) -> bool:
        due_s, _, node, _ = wire
        return due_s <= self.now_s and (node is None or not node.is_frozen)


class LoopbackTransport:
    """Test double of a transport: the same sessions, no thread, no sockets.

    Memory that an engine shares is read where it is, as a mapping of it would be.

    Attributes:
        is_frozen: Nothing happens here; what arrives waits until it thaws.
        corrupt: How many more payloads leave with a flipped bit, behind their checksum.
        mangle: Applied to every frame and payload that leaves for a consumer.
    """

    def __init__(
        self,
        network: Network,
        settings: ConnectorSettings,
        io: KVDeviceIO,
        notify: Callable[[], None],
    ) -> None:
        self.network = network
        self.io = io
        self.endpoint = f"tcp://{settings.incarnation}:1"
        self.endpoints = (self.endpoint,)
        self.counters = WireCounters()
        paths = {"inline", "shared"} if io.shared_region is not None else {"inline"}
        self.sessions = TransferSessions(settings, io.layout, self.counters, frozenset(paths))
        self.producer, self.consumer = self.sessions.producer, self.sessions.consumer
        self.events: deque[Event] = deque()
        self.notify = notify
        self.is_frozen = False
        self.corrupt = 0
        self.mangle: Callable[[bytes, NDArray[np.uint8] | None], Mangled] = lambda *sent: sent
        network.nodes[self.endpoint] = self

    def submit(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StartLoad):
                self.sessions.load(command, self._route(command), self.network.now_s)
            else:
                self.sessions.apply(command, self.network.now_s)
        self.send()

    def _route(self, load: StartLoad) -> ProducerRoute:
        endpoint = load.ticket.producer_endpoints[0]
        node = self.network.nodes.get(endpoint)
        if node is None or node.io.shared_region is None or node.io.host_blocks is None:
            return ProducerRoute(endpoint)
        return ProducerRoute(endpoint, "shared", node.io.host_blocks)

    def lease_left_s(self, transfer_id: bytes, now_s: float) -> float:
        return self.producer.left_s(transfer_id, now_s)

    def poll(self) -> Sequence[Event]:
        events = list(self.events)
        self.events.clear()
        return events

    def close(self, deadline_s: float) -> None:
        self.network.nodes.pop(self.endpoint, None)

    def tick(self) -> None:
        if not self.is_frozen:
            self.sessions.tick(self.network.now_s)
            self.send()

    def send(self) -> None:
        self.sessions.check_invariants()
        for peer, message, payload in self.producer.take_sends():
            is_bad = payload is not None and self.corrupt > 0
            self.corrupt -= is_bad
            sent = payload ^ np.uint8(1) if payload is not None and is_bad else payload
            frame, sent = self.mangle(encode(message), sent)
            self._post_answer(peer.decode(), message, frame, sent)
        for endpoint, message in self.consumer.take_sends():
            self._post_request(endpoint, message)
        events = self.sessions.take_events()
        if events:
            self.events.extend(events)
            self.notify()

    def _post_request(self, to: str, message: ToProducer) -> None:
        frame, at = encode(message), self.endpoint.encode()

        def deliver() -> None:
            node = self.network.nodes.get(to)
            if node is not None:
                node.producer.on_message(at, decode_to_producer(frame), self.network.now_s)
                node.send()

        self.network.post(message, to, deliver)

    def _post_answer(
        self, to: str, message: ToConsumer, frame: bytes, payload: NDArray[np.uint8] | None
    ) -> None:
        data = payload if payload is None else payload.reshape(-1)

        def deliver() -> None:
            node = self.network.nodes.get(to)
            if node is None:
                return
            try:
                arrived = decode_to_consumer(frame)
            except WireError:
                node.counters.num_malformed += 1
                return
            if isinstance(arrived, Staged | Agent):
                node.counters.num_malformed += 1
                return
            node.consumer.on_message(self.endpoint, arrived, data, self.network.now_s)
            node.send()

        self.network.post(message, to, deliver)


Mangled = tuple[bytes, NDArray[np.uint8] | None]


def make_loopback_engine(
    name: str, io: FakeIO, network: Network, config: TransferConfig | None = None, **settings: Any
) -> FakeEngine:
    """Make an engine on the loopback network, with the constants of production by default."""
    chunks = TransferConfig(
        chunk_bytes=io.layout.row_bytes,
        window_bytes=4 * io.layout.row_bytes,
        mapped_chunk_bytes=2 * io.layout.row_bytes,
    )
    told = make_settings(name, config=config or chunks, **{"unix_now_s": network.clock, **settings})
    notified = threading.Event()
    worker = P2PConnectorWorker(
        told,
        notified.set,
        lambda made, _memory, notify: LoopbackTransport(network, made, io, notify),
    )
    worker.register_kv_caches([io])
    scheduler = P2PConnectorScheduler(told, io.layout)
    return FakeEngine(name, io, scheduler, worker, notified, network.clock)
