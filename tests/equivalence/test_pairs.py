"""Every pair of features leaves a request's tokens as they are.

A covering array of strength two: seven runs of the same requests, of which the first is the plain
engine. For any two switches each of the four combinations occurs in some run. Features that exclude
each other within a step take turns within a run: drafts and steps of several passes by the number
of rows.

Source of the array: Kleitman and Spencer, Families of k-independent sets (1973).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest

import configs
from kv_transfer.ticket import Ticket
from replicas.config import SpeculativeConfig
from replicas.engine.scheduler import Scheduler
from replicas.generators.torch.generator import TorchGenerator
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    KVLoaded,
    LendKV,
    LoadKV,
    Refused,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams, StructuredOutputs
from replicas.speculation.controller import DraftController
from tests.engines import (
    engine_core,
    generate,
    make_config,
    num_preemptions,
    num_prefix_hits,
    take_events,
)
from tests.replicas.engine.fakes import FOREVER_MS, KEYS
from tests.replicas.engine.pair import CLIENT, Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.config import EngineConfig
    from replicas.generators.protocol import ModelCapabilities
    from replicas.messages import EngineEvent

MODEL = Path(configs.__file__).parent / "demo-model"

SWITCHES = (
    "chunked",
    "preempted",
    "prefix hit",
    "drafts",
    "passes",
    "two in flight",
    "lanes",
    "choices",
    "handed over",
    "migrated",
    "resumed",
    "grammar",
    "processors",
)
# A switch is on in four of six runs, so that two of them share a run, and each has one of its own.
ON_IN = list(itertools.combinations(range(1, 7), 4))[: len(SWITCHES)]
RUNS = [
    frozenset(switch for switch, runs in zip(SWITCHES, ON_IN, strict=True) if run in runs)
    for run in range(7)
]


def test_each_pair_of_switches_has_every_combination():
    for one, other in itertools.combinations(SWITCHES, 2):
        assert len({(one in run, other in run) for run in RUNS}) == 4, (one, other)


# --- the requests ---------------------------------------------------------------------------------

_LONG = [300 + (7 * i * i + 3 * i) % 157 for i in range(60)]
PROMPTS = [
    _LONG[:50],
    [*_LONG[:36], 310, 311],
    [305, 309, 303],
    [320, 330, 340],
    _LONG[10:31],
    [400, 401, 402, 403] * 6,
]
NUM_TOKENS = 32
BLOCK_SIZE = 32
DEADLINE_S = 40.0
CHOICES, GRAMMAR, PROCESSED = 2, 3, 4
"""Indices of the requests that these switches change."""


def sampling_of(run: frozenset[str]) -> list[SamplingParams]:
    """Return the parameters of all requests: greedy and drawn ones."""

    def make(**fields: object) -> SamplingParams:
        settings = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, **fields}
        return SamplingParams(**settings)

    found = [
        make(temperature=0.0, seed=0),
        make(seed=11, top_p=0.95),
        make(seed=12),
        make(seed=13, temperature=0.8, top_k=40),
        make(seed=14, min_p=0.01),
        make(temperature=0.0, seed=0),
    ]
    if "choices" in run:
        found[CHOICES] = make(seed=12, n=2)
    if "grammar" in run:
        spec = StructuredOutputs(regex="(red|green|blue)( (red|green|blue)){20}")
        found[GRAMMAR] = make(seed=13, temperature=0.8, top_k=40, structured_outputs=spec)
    if "processors" in run:
        found[PROCESSED] = make(
            seed=14,
            min_p=0.01,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            presence_penalty=-0.3,
            logit_bias={305: 3.0, 306: -4.0},
            bad_words_token_ids=((301,), (305, 307)),
            min_tokens=9,
            stop_token_ids=frozenset(range(300, 340)),
            logprobs=2,
        )
    return found


def plain(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Return the tokens of a request of one choice on a plain engine."""
    return _plain_outputs()[tuple(prompt), msgspec.json.encode(sampling)]


@cache
def _plain_outputs() -> dict[tuple[tuple[int, ...], bytes], list[int]]:
    wanted = {
        (tuple(prompt), msgspec.json.encode(each)): each
        for run in RUNS
        for prompt, sampling in zip(PROMPTS, sampling_of(run), strict=True)
        for each in of_choices(sampling)
    }
    config = make_config(str(MODEL), enable_prefix_caching=False, max_batch_size=12)
    with engine_core(config) as core:
        outputs = generate(core, [list(prompt) for prompt, _ in wanted], list(wanted.values()))
    return dict(zip(wanted, outputs, strict=True))


def of_choices(sampling: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each choice as those of a request of its own."""
    return [
        msgspec.structs.replace(sampling, n=1, seed=sampling.seed + choice)
        for choice in range(sampling.n)
    ]


# --- the engines ----------------------------------------------------------------------------------


class AheadGenerator(TorchGenerator):
    """The torch generator, which lets the core submit a step before the last one is read."""

    model_capabilities: ClassVar[ModelCapabilities] = {
        **TorchGenerator.model_capabilities,
        "supports_async_decode": True,
    }


def config_of(run: frozenset[str], name: str) -> EngineConfig:
    """Return the configuration of one of a run's engines."""
    settings: dict[str, object] = {
        "block_size": BLOCK_SIZE,
        "max_model_len": 96,
        "max_num_batched_tokens": 24 if "chunked" in run else 256,
        "enable_prefix_caching": "prefix hit" in run,
        "kv_connector": "p2p",
        "keys": KEYS,
    }
    if "preempted" in run and name != "prompts":
        settings["num_blocks"] = 5
    if "drafts" in run:
        settings["speculative_config"] = SpeculativeConfig(
            method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3
        )
    if "passes" in run:
        settings["num_scheduler_steps"] = 4
    if "two in flight" in run:
        settings["generator"] = f"{__name__}:{AheadGenerator.__qualname__}"
    if "lanes" in run:
        settings["tt_data_parallel"] = 2
    return make_config(str(MODEL), **settings)


class Stream:
    """A request at its client, and where it is.

    Attributes:
        tokens: Of each choice.
        node: The engine that computes it; None while it is moved without one.
        heir: The engine that has reserved a place for it, or is asked to.
        move: The switch for which it has an heir.
        moves: The switches for which it moves later, each with its number of tokens.
    """

    def __init__(self, request: EngineRequest, moves: list[tuple[str, int]]) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.is_over = [False] * request.sampling.n
        self.node: Node | None = None
        self.heir: Node | None = None
        self.move = ""
        self.moves = moves

    def has(self, num_tokens: int) -> bool:
        """Return whether every choice has so many tokens, and none has ended."""
        return not any(self.is_over) and min(map(len, self.tokens)) >= num_tokens

    def known(self) -> list[list[int]]:
        """Return the tokens of each choice so far."""
        return [list(tokens) for tokens in self.tokens]


class Cluster:
    """Engines of one run, with a client that takes requests from one to another.

    Attributes:
        moves: By switch: requests that were moved.
    """

    def __init__(self, run: frozenset[str]) -> None:
        self.moves: Counter[str] = Counter()
        self._bell = threading.Event()
        self._run = run
        names = ["first", "second"] if {"migrated", "resumed"} & run else ["first"]
        names += ["prompts"] if "handed over" in run else []
        self.nodes = {name: Node(config_of(run, name), name, self._bell) for name in names}
        self._streams: dict[str, Stream] = {}

    def close(self) -> None:
        """Shut all engines down."""
        for node in self.nodes.values():
            node.vanish()

    def generate(self, requests: list[EngineRequest]) -> list[list[list[int]]]:
        """Return the tokens of each request and choice."""
        moves = [move for move in (("migrated", 6), ("resumed", 14)) if move[0] in self._run]
        self._streams = {r.request_id: Stream(r, [*moves]) for r in requests}
        for stream in self._streams.values():
            if "handed over" in self._run:
                self._reserve(stream, "handed over", self.nodes["first"])
            else:
                stream.node = self.nodes["first"]
                stream.node.handle(AddRequest(stream.request))
        self._run_until(lambda: all(all(s.is_over) for s in self._streams.values()))
        self._run_until(lambda: all(node.is_idle() for node in self.nodes.values()))
        return [stream.tokens for stream in self._streams.values()]

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < end_s, {i: s.tokens for i, s in self._streams.items()}
            self._bell.clear()
            stepped = [node.step_if_due() for node in self.nodes.values()]
            for node in self.nodes.values():
                for event in take_events(node.core).get(CLIENT, []):
                    self._take(node, self._streams[event.request_id], event)
            for stream in self._streams.values():
                self._move_on(stream)
            self._slow_down()
            if not any(stepped):
                self._bell.wait(0.05)

    def _slow_down(self) -> None:
        """Let engines decode slowly while others fetch from them, so that streams do not end."""
        lenders = {s.node for s in self._streams.values() if s.move == "migrated"}
        for node in self.nodes.values():
            if node.is_slow and node not in lenders:
                node.handle(Abort([]))  # It wakes the engine.
            node.is_slow = node in lenders

    # --- moves -----------------------------------------------------------------------------------

    def _move_on(self, stream: Stream) -> None:
        """Let a request move, if it is time, or ask again for a place."""
        if stream.node is self.nodes.get("prompts") is not None:
            if stream.has(1):
                self._activate(stream)
        elif stream.heir is None and stream.move:
            self._reserve(stream, stream.move, self._other(stream))
        elif stream.heir is None and stream.moves and stream.has(stream.moves[0][1]):
            move, _ = stream.moves.pop(0)
            if move == "resumed":
                stream.node.handle(Abort([stream.request.request_id]))
            self._reserve(stream, move, self._other(stream))
            if move == "resumed":
                stream.node = None

    def _other(self, stream: Stream) -> Node:
        """Return the engine that a request moves to."""
        if stream.move == "handed over" or stream.node is not self.nodes["first"]:
            return self.nodes["first"]
        return self.nodes["second"]

    def _reserve(self, stream: Stream, move: str, heir: Node) -> None:
        stream.move, stream.heir = move, heir
        known = [] if move == "handed over" else stream.known()
        heir.handle(AddRequest(stream.request, "decode", token_ids=known))

    def _reserved(self, stream: Stream) -> None:
        """Let the heir fetch the KV of a request, if an engine has it."""
        request_id, heir = stream.request.request_id, stream.heir
        if stream.move == "resumed":
            self._activate(stream)
        elif stream.move == "handed over":
            stream.node = self.nodes["prompts"]
            ticket = make_ticket(
                stream.node, heir, request_id, len(stream.request.prompt_token_ids)
            )
            stream.node.handle(AddRequest(stream.request, "prefill", ticket=ticket))
            heir.handle(LoadKV(request_id, ticket, 0))
        elif any(stream.is_over):
            self._stay(stream)
        else:
            num_known = heir.core._scheduler.table.get(request_id).num_tokens
            num_full = (num_known - 1) // BLOCK_SIZE * BLOCK_SIZE
            if not num_full:
                stream.node.handle(Abort([request_id]))
                self._activate(stream)
                return
            ticket = make_ticket(stream.node, heir, request_id, num_full)
            stream.node.handle(LendKV(request_id, ticket, 1))
            heir.handle(LoadKV(request_id, ticket, 1))

    def _loaded(self, stream: Stream, failure: str | None) -> None:
        if stream.move != "migrated":
            assert failure is None, failure
        elif any(stream.is_over):
            self._stay(stream)
        else:
            stream.node.handle(Abort([stream.request.request_id]))
            self.moves["with KV"] += failure is None
            self._activate(stream)

    def _activate(self, stream: Stream) -> None:
        self.moves[stream.move] += 1
        stream.heir.handle(Activate(stream.request.request_id, stream.known()))
        stream.node, stream.heir, stream.move = stream.heir, None, ""

    def _stay(self, stream: Stream) -> None:
        stream.heir.handle(Abort([stream.request.request_id]))
        stream.heir, stream.move = None, ""

    # --- events ----------------------------------------------------------------------------------

    def _take(self, node: Node, stream: Stream, event: EngineEvent) -> None:
        if isinstance(event, TokenOutput):
            assert node is stream.node, f"{node.name}: {event}"
            known = stream.tokens[event.choice]
            assert event.index == len(known), f"{node.name}: {event} after {known}"
            assert (event.logprobs is None) == (stream.request.sampling.logprobs is None)
            known += event.token_ids
            stream.is_over[event.choice] = event.finish_reason is not None
        elif isinstance(event, KVLoaded) and node is stream.heir:
            self._loaded(stream, event.failure)
        elif isinstance(event, Refused):
            assert (node, event.reason) in {(stream.heir, "no_slot"), (stream.heir, "no_blocks")}
            stream.heir = None
        elif isinstance(event, Accepted) and node is stream.heir:
            self._reserved(stream)


def make_ticket(producer: Node, consumer: Node, request_id: str, num_tokens: int) -> bytes:
    """Return a permit for one engine to fetch so many tokens' KV from another."""
    core = producer.core
    assert core.kv_endpoints is not None
    ticket = Ticket(
        transfer_id=hashlib.md5(f"{request_id} {producer.name}".encode()).digest(),
        request_id=request_id,
        epoch=int(producer.name != "prompts"),
        producer_endpoints=core.kv_endpoints,
        producer_incarnation=producer.name,
        consumer=consumer.name,
        num_tokens=num_tokens,
        layout_hash=core.kv_layouts[0].content_hash(),
        expires_ms=FOREVER_MS,
    )
    return KEYS.seal(ticket)


# --- the runs -------------------------------------------------------------------------------------


class Counters:
    """Steps of several passes, and steps begun ahead, of all engines; drafts for some rows only."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_long = self.num_ahead = 0
        add_passes, schedule_ahead = Scheduler._add_passes, Scheduler.schedule_ahead

        def counted_passes(scheduler, plan, num_more):
            self.num_long += 1
            return add_passes(scheduler, plan, num_more)

        def counted_ahead(scheduler):
            found = schedule_ahead(scheduler)
            self.num_ahead += found is not None
            return found

        patch.setattr(Scheduler, "_add_passes", counted_passes)
        patch.setattr(Scheduler, "schedule_ahead", counted_ahead)
        patch.setattr(DraftController, "limit", lambda _self, num_rows, **_: 4 * (num_rows % 2))


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_tokens_are_those_of_a_plain_engine(number, monkeypatch):
    run, counters = RUNS[number], Counters(monkeypatch)
    sampling = sampling_of(run)
    wanted = [
        [plain(prompt, choice) for choice in of_choices(params)]
        for prompt, params in zip(PROMPTS, sampling, strict=True)
    ]
    with contextlib.closing(Cluster(run)) as cluster:
        for again in range(2 if "prefix hit" in run else 1):
            requests = [
                EngineRequest(f"{again}-{index}", prompt, params)
                for index, (prompt, params) in enumerate(zip(PROMPTS, sampling, strict=True))
            ]
            assert cluster.generate(requests) == wanted
        cores = [node.core for node in cluster.nodes.values()]
        drafts = sum(core.metrics(0.0).drafts.num_draft_tokens for core in cores)
        done = {
            "preempted": sum(map(num_preemptions, cores)),
            "prefix hit": sum(map(num_prefix_hits, cores)),
            "drafts": drafts,
            "passes": counters.num_long,
            # Steps of several passes do not follow each other unread.
            "two in flight": counters.num_ahead or "passes" in run,
            "handed over": cluster.moves["handed over"],
            "migrated": cluster.moves["with KV"],
            "resumed": cluster.moves["resumed"],
        }
    assert {switch for switch, count in done.items() if count} >= run & done.keys()
