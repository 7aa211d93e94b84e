"""Real engine processes on a tiny model for the cluster's tests, without Ray; and scripted ones."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import torch
import transformers
import zmq
import zmq.asyncio
from tokenizers import decoders, models, pre_tokenizers

from cluster.config.schema import RouterConfig
from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.pools import Member
from cluster.routing.router import Router
from cluster.routing.tickets import TicketOffice
from cluster.scaling.flip import RoleStatus
from kv_transfer.curve import CurveAuthenticator, secure_server, server_public_key
from kv_transfer.keys import KeyRing
from replicas.async_client import AsyncMPClient
from replicas.codec import decode_client_message, encode
from replicas.config import EngineConfig
from replicas.launch import start_engine
from replicas.messages import (
    Accepted,
    AddRequest,
    EngineDescription,
    EngineFrame,
    EngineRequest,
    EngineSnapshot,
    GroupSnapshot,
    Hello,
    Refused,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.kv_groups import one_kv_group
from tests.streams import pulled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

    from replicas.config import Role
    from replicas.launch import EngineHandle
    from replicas.messages import ClientMessage, EngineEvent, EngineMetrics, RefusalReason
    from replicas.streams import OnKVEvents

KEYS = KeyRing((b"a secret of sixteen bytes or more",))
BLOCK_SIZE = 32
MAX_MODEL_LEN = 8192
DEADLINE_S = 20.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": 0,
}


# --- the model -----------------------------------------------------------------------------------


@cache
def model_folder() -> Path:
    """A random-weights Llama in float32 with a byte tokenizer and a chat template."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-model-")) / "tiny"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    config = transformers.LlamaConfig(**TINY, vocab_size=len(vocabulary), eos_token_id=1)
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def prompts(
    count: int, lengths: Sequence[int] = (3, 31, 32, 33, 64, 90, 130, 200)
) -> list[list[int]]:
    """Different prompts; no two share a block, so that none hits another's prefix."""
    return [
        [2 + (7 * i + 11 * j + j * j) % 250 for j in range(lengths[(i - 1) % len(lengths)])]
        for i in range(1, count + 1)
    ]


def sampling(max_tokens: int = 12, **changes: object) -> SamplingParams:
    """Greedy, and deaf to the end token."""
    fields = {"max_tokens": max_tokens, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    return SamplingParams(**{**fields, **changes})


# --- engines -------------------------------------------------------------------------------------


def engine_config(role: Role, **changes: object) -> EngineConfig:
    """A small engine: eight decode slots in two lanes, or prompts in steps of 128 tokens."""
    fields: dict[str, object] = {
        "model": str(model_folder()),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": 300,
        "num_threads": 1,
        "max_batch_size": 16 if role == "prefill" else 8,
        "max_num_batched_tokens": 128 if role == "prefill" else 256,
        "max_num_waiting": 64 if role == "prefill" else 0,
        "tt_data_parallel": 1 if role == "prefill" else 2,
        "kv_connector": None if role == "both" else "p2p",
        "keys": KEYS,
        "role": role,
    }
    return EngineConfig(**{**fields, **changes})


class Engine:
    """A started engine process as a member of a pool; signals go to its process id."""

    def __init__(self, role: Role, handle: EngineHandle) -> None:
        self.handle = handle
        self.description = handle.description
        self.incarnation = handle.description.incarnation
        self.member = Member(role, f"{role}-{self.incarnation}", handle.description)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        if self.handle.is_alive:
            os.kill(self.description.pid, number)

    def kill(self) -> None:
        """Kill -9 and wait for the end."""
        self.signal(signal.SIGKILL)
        self.handle.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process for the length of the block."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


@contextlib.contextmanager
def running(*configs: tuple[Role, EngineConfig]) -> Iterator[list[Engine]]:
    """Start engines side by side; end them all."""
    with ThreadPoolExecutor(len(configs)) as threads:
        started = [threads.submit(start_engine, config) for _, config in configs]
    engines = [
        Engine(role, future.result())
        for (role, _), future in zip(configs, started, strict=True)
        if future.exception() is None
    ]
    try:
        assert len(engines) == len(configs), [future.exception() for future in started]
        yield engines
    finally:
        for engine in engines:
            engine.signal(signal.SIGCONT)
        with ThreadPoolExecutor(len(engines) or 1) as threads:
            list(threads.map(lambda engine: engine.handle.stop(), engines))


class LocalReplicas:
    """Engines of a test as `ttserve flip` and the admin server find those of a cluster."""

    def __init__(self, *engines: Engine) -> None:
        self._engines = {engine.member.replica_id: engine.handle for engine in engines}

    def role_statuses(self) -> list[RoleStatus]:
        return [
            RoleStatus(
                replica=name,
                role=handle.role,
                next_role=handle.next_role,
                is_draining=handle.is_evacuating,
                is_drained=handle.is_evacuated,
            )
            for name, handle in self._engines.items()
            if handle.is_alive
        ]

    def change_role(self, replica: str, role: Role) -> None:
        self._engines[replica].change_role(role)

    def set_draining(self, replica: str, is_draining: bool) -> None:
        handle = self._engines[replica]
        handle.evacuate() if is_draining else handle.reopen()


# --- an ingress without HTTP ---------------------------------------------------------------------


class Rig:
    """A router over real connections, as `Ingress` has it, and what a test asks of it."""

    def __init__(self, **router: object) -> None:
        self.lost: list[str] = []
        self.fleet = Fleet(self._make_client, KEYS)
        self.pools = self.fleet.pools
        self.client = self.fleet.client
        self.metrics = RouterMetrics("tiny")
        # Whoever asks for nothing else sees every prompt go to a prefill engine.
        config = RouterConfig(**{"min_remote_prefill_tokens": 0, **router})
        self.router = Router(self.fleet, config, self.metrics, TicketOffice(KEYS))
        self._ids = iter(range(10**9))

    def _make_client(
        self,
        on_snapshot: Callable[[str, EngineSnapshot], None],
        on_dead: Callable[[str, str], None],
        on_moves: Callable[[str, bool], None],
        on_kv_events: OnKVEvents | None,
    ) -> AsyncMPClient:
        def on_lost(incarnation: str, reason: str) -> None:
            self.lost.append(incarnation)
            on_dead(incarnation, reason)

        return AsyncMPClient(KEYS, on_snapshot, on_lost, on_moves, on_kv_events)

    async def connect(self, *members: Member) -> None:
        """Take members in, one after the other."""
        for member in members:
            await self.fleet.connect(member)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a decode slot."""
        return len(self.router.queue)

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """A request's outputs; it does not go on before the next one is asked for."""
        return pulled(lambda emit: self.router.run(request, emit))

    def request(self, prompt: Sequence[int], params: SamplingParams | None = None) -> EngineRequest:
        """A request under a new id."""
        return EngineRequest(f"r{id(self)}-{next(self._ids)}", list(prompt), params or sampling())

    async def tokens(
        self, prompt: Sequence[int], params: SamplingParams | None = None
    ) -> list[int]:
        """Run one request to its end; every output must start where the last one ended."""
        token_ids: list[int] = []
        async for output in self.generate(self.request(prompt, params)):
            assert output.index == len(token_ids)
            token_ids.extend(output.token_ids)
        return token_ids

    async def engine_metrics(self, engine: Engine) -> EngineMetrics:
        """An engine's counters."""
        return await self.client.metrics(engine.incarnation)

    def count(self, name: str, **labels: str) -> float:
        """A counter of the router, 0 if nothing was counted."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def rig(*members: Member | Engine, **router: object) -> AsyncIterator[Rig]:
    """A connected rig; at its end no hold may be left on any member."""
    made = Rig(**router)
    try:
        await made.connect(*(m.member if isinstance(m, Engine) else m for m in members))
        yield made
        made.pools.check_invariants()
        assert not made.pools.holds(), made.pools
        made.router.queue.check_invariants()
        assert made.num_queued == 0
    finally:
        await made.client.close()


async def until(predicate: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until a predicate, plain or a coroutine function, is true."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if await value if asyncio.iscoroutine(value) else value:
            return
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.005)


def is_idle(metrics: EngineMetrics) -> bool:
    """Whether slots, blocks, leases and transfers are back where they were at the start."""
    return (
        metrics.num_waiting == 0
        and metrics.transfer.num_inflight_sends == metrics.transfer.num_inflight_loads == 0
        and metrics.transfer.num_leased_blocks == metrics.transfer.num_reserved_blocks == 0
        and metrics.transfer.num_quarantined_blocks == 0
        and all(
            group.num_empty_slots == group.num_slots
            and group.num_free_blocks == group.num_blocks
            and group.num_running == group.num_reserved == 0
            for group in metrics.groups
        )
    )


async def until_idle(made: Rig, *engines: Engine) -> None:
    """Wait until engines have everything back."""
    for engine in engines:
        await until(
            lambda engine=engine: _engine_is_idle(made, engine),
            f"{engine.member.replica_id} has its slots and blocks back",
        )


async def _engine_is_idle(made: Rig, engine: Engine) -> bool:
    return is_idle(await made.engine_metrics(engine))


# --- scripted engines ----------------------------------------------------------------------------


def make_member(role: Role, incarnation: str, **changes: object) -> Member:
    """A member whose engine exists on paper only."""
    fields: dict[str, object] = {
        "incarnation": incarnation,
        "public_key": server_public_key(KEYS, incarnation),
        "input_endpoint": "tcp://127.0.0.1:1",
        "output_endpoint": "tcp://127.0.0.1:1",
        "kv_endpoints": ("tcp://127.0.0.1:1",),
        "kv_layout_hash": "0" * 16,
        "kv_groups": one_kv_group(65, BLOCK_SIZE, 1024 // BLOCK_SIZE),
        "model": "/models/tiny",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 258,
        "eos_token_ids": [1],
        "dp_groups": 1,
        "slots_per_group": 4,
        "max_num_batched_tokens": 128,
        "pid": 0,
    }
    description = EngineDescription(**{**fields, **changes})
    return Member(role, f"{role}-{incarnation}", description)


def accepts(message: ClientMessage) -> list[EngineEvent]:
    """An engine that takes every request and says no more."""
    if isinstance(message, AddRequest):
        return [Accepted(message.request.request_id, 0, 0, 0, 1)]
    return []


def prefills(message: ClientMessage) -> list[EngineEvent]:
    """One that gives the first token at once."""
    if isinstance(message, AddRequest):
        return [
            Accepted(message.request.request_id, 0, -1, 0, 1),
            TokenOutput(message.request.request_id, 0, [5]),
        ]
    return []


def silent(_message: ClientMessage) -> list[EngineEvent]:
    """One that says nothing."""
    return []


def refusing(
    reason: RefusalReason,
    detail: str = "",
    *,
    first: float = math.inf,
    then: Callable[[ClientMessage], list[EngineEvent]] = silent,
) -> Callable[[ClientMessage], list[EngineEvent]]:
    """One that refuses the first requests, or all, and answers every other message as `then`."""
    asked = []

    def answer(message: ClientMessage) -> list[EngineEvent]:
        if isinstance(message, AddRequest):
            asked.append(message)
            if len(asked) <= first:
                return [Refused(message.request.request_id, reason, detail)]
        return then(message)

    return answer


class ScriptedEngine:
    """Speaks the engines' wire protocol and says exactly what a test tells it to.

    For what a real engine does only in a race: refusals, duplicates, silence between two messages.

    Attributes:
        stalled_s: What its frames say of its present step.
        is_silent: Whether it sends no heartbeats.
        answer: As given.

    Args:
        role: Its pool, and what its snapshots say.
        incarnation: Its name.
        answer: Called with each message but Hello; returns the events to send back.
    """

    def __init__(
        self, role: Role, incarnation: str, answer: Callable[[ClientMessage], list[EngineEvent]]
    ) -> None:
        self._context = zmq.asyncio.Context()
        CurveAuthenticator(zmq.Context.shadow(self._context), KEYS)
        self._input, self._output = (self._bind(incarnation) for _ in range(2))
        self._output.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.role: Role = role
        self.member = make_member(
            role,
            incarnation,
            input_endpoint=self._input.getsockopt_string(zmq.LAST_ENDPOINT),
            output_endpoint=self._output.getsockopt_string(zmq.LAST_ENDPOINT),
        )
        self.messages: list[ClientMessage] = []
        self.stalled_s = 0.0
        self.is_silent = False
        self.answer = answer
        self._clients: set[bytes] = set()
        self._reached: set[bytes] = set()
        self._seq = 0
        self._snapshot = self.snapshot(num_empty_slots=4)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._beat())]

    async def __aenter__(self) -> ScriptedEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Break every connection, as the end of the process does. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()

    def stop_reading(self) -> None:
        """Take no message any more, and go on sending heartbeats."""
        self._tasks[0].cancel()

    def received(self, kind: type[ClientMessage]) -> list[ClientMessage]:
        """Messages of one kind so far."""
        return [message for message in self.messages if isinstance(message, kind)]

    def snapshot(
        self,
        num_empty_slots: int,
        num_free_blocks: int = 64,
        *,
        draining: bool = False,
        hands_over: bool = False,
        paused: bool = False,
    ) -> EngineSnapshot:
        """The next snapshot of one group."""
        self._seq += 1
        group = GroupSnapshot(num_empty_slots, [num_free_blocks], 0, 0, 0)
        return EngineSnapshot(
            self._seq, draining or paused, 0, 0, 0, [group], self.role, hands_over=hands_over,
            paused=paused,
        )  # fmt: skip

    async def send(self, *events: EngineEvent, snapshot: EngineSnapshot | None = None) -> None:
        """Send a frame to every client that can be reached."""
        if snapshot is not None:
            self._snapshot = snapshot
        frame = EngineFrame(
            self.member.description.incarnation, list(events), snapshot, self.stalled_s
        )
        raw = encode(frame)
        for client in list(self._clients):
            await self._send_to(client, raw)

    async def _send_to(self, client: bytes, raw: bytes) -> None:
        try:
            await self._output.send_multipart((client, raw), zmq.NOBLOCK)
            self._reached.add(client)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            if client not in self._reached:
                # It is still connecting to this socket, says Hello again, and is to hear nothing
                # until then: a heartbeat that is its first frame would end its greeting.
                self._clients.discard(client)

    def _bind(self, incarnation: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        secure_server(socket, KEYS, incarnation)
        socket.bind("tcp://127.0.0.1:*")
        return socket

    async def _serve(self) -> None:
        while True:
            client, raw = await self._input.recv_multipart()
            message = decode_client_message(raw)
            if isinstance(message, Hello):
                self._clients.add(client)
                await self.send(snapshot=self._snapshot)
                continue
            self.messages.append(message)
            events = self.answer(message)
            if events:
                await self.send(*events)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            if not self.is_silent:
                await self.send()


@contextlib.asynccontextmanager
async def scripted(
    *engines: tuple[Role, str, Callable[[ClientMessage], list[EngineEvent]]],
    num_connected: int | None = None,
    **router: object,
) -> AsyncIterator[tuple[Rig | ScriptedEngine, ...]]:
    """A rig and scripted engines, of which all or the first few are connected in this order."""
    async with contextlib.AsyncExitStack() as stack:
        started = [await stack.enter_async_context(ScriptedEngine(*engine)) for engine in engines]
        members = [engine.member for engine in started[:num_connected]]
        yield await stack.enter_async_context(rig(*members, **router)), *started
