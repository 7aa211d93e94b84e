"""A prefill and a decode core in one process; like engine processes, they step only when woken."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING

from kv_transfer.layout import join_layouts
from kv_transfer.ticket import Ticket
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    KVLoaded,
    LoadKV,
    Refused,
    TokenOutput,
)
from replicas.simulation.faulty_process import fault_hooks
from tests.engines import take_events
from tests.replicas.engine.fakes import FOREVER_MS, KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.config import EngineConfig
    from replicas.engine.core import CoreMessage
    from replicas.sampling_params import SamplingParams

CLIENT = b"ingress"
DEADLINE_S = 20.0


def seal_ticket(core: EngineCore, request_id: str, num_tokens: int, epoch: int = 0) -> bytes:
    """Permit the core named `decode` to fetch so many tokens' KV from this one, `prefill`."""
    assert core.kv_endpoints is not None
    ticket = Ticket(
        transfer_id=hashlib.md5(f"{request_id} {epoch}".encode()).digest(),
        request_id=request_id,
        epoch=epoch,
        producer_endpoints=core.kv_endpoints,
        producer_incarnation="prefill",
        consumer="decode",
        num_tokens=num_tokens,
        layout_hash=join_layouts(core.kv_layouts).content_hash(),
        expires_ms=FOREVER_MS,
    )
    return KEYS.seal(ticket)


class Node:
    """One core and what wakes it.

    Attributes:
        is_slow: Whether it makes a single step each time that it is woken.
    """

    def __init__(self, config: EngineConfig, name: str, bell: threading.Event) -> None:
        self._bell = bell
        self._is_due = False
        self._runs = False
        self.name = name
        self.is_frozen = False
        self.is_slow = False
        self.is_gone = False
        executor = UniProcExecutor(config, name, self._notify, hooks=fault_hooks(config))
        self.core = EngineCore(config, executor, name)
        self.before = self.core.snapshot(0).groups

    def handle(self, message: CoreMessage) -> None:
        """Deliver a message; it wakes the core, as in a process."""
        self.core.handle(CLIENT, message, time.monotonic())
        self._is_due = True

    def step_if_due(self) -> bool:
        """One turn of the engine process's loop; False if it would sleep."""
        if self.is_gone or self.is_frozen:
            return False
        deadline_s = self.core.next_deadline_s()
        lapsed = deadline_s is not None and time.monotonic() >= deadline_s
        if not (self._is_due or self._runs or lapsed):
            return False
        self._is_due = False
        self._runs = self.core.step(time.monotonic()) and not self.is_slow
        self.core.check_invariants()
        return True

    def vanish(self) -> None:
        """End without any message."""
        self.is_gone = True
        self.core.shutdown()

    def is_idle(self) -> bool:
        """Return whether it holds no request, and every slot and block is free."""
        return self.core.num_live == 0 and self.core.snapshot(0).groups == self.before

    def _notify(self) -> None:
        self._is_due = True
        self._bell.set()


class Pair:
    """Both cores, and a client that takes requests from one to the other.

    Attributes:
        outputs: Tokens of each request at its client.
        finished: Requests that ended, with their reasons.
        failures: For each request the reason why its KV did not come.
        errors: For each failed request its error.
    """

    def __init__(self, prefill: EngineConfig, decode: EngineConfig) -> None:
        self._bell = threading.Event()
        self.prefill = Node(prefill, "prefill", self._bell)
        self.decode = Node(decode, "decode", self._bell)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._requests: dict[str, EngineRequest] = {}
        self._is_activated: set[str] = set()
        self.activate_on_first_token = True

    def close(self) -> None:
        """Shut both down."""
        for node in (self.prefill, self.decode):
            if not node.is_gone:
                node.vanish()

    # --- the client ----------------------------------------------------------------------------

    def ticket(self, request_id: str, epoch: int = 0) -> bytes:
        """Sealed permit for the decode core to fetch this request's prompt."""
        num_tokens = len(self._requests[request_id].prompt_token_ids)
        return seal_ticket(self.prefill.core, request_id, num_tokens, epoch)

    def reserve(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Take a slot and blocks on the decode core."""
        request = EngineRequest(request_id, list(prompt), sampling)
        self._requests[request_id] = request
        self.outputs[request_id] = []
        self.decode.handle(AddRequest(request, "decode"))
        self._take_events()
        assert self.decode.core._scheduler.table.get(request_id) is not None

    def start_prefill(self, request_id: str) -> None:
        """Queue the prompt on the prefill core."""
        message = AddRequest(self._requests[request_id], "prefill", ticket=self.ticket(request_id))
        self.prefill.handle(message)

    def start_load(self, request_id: str, epoch: int = 0) -> None:
        """Let the decode core fetch."""
        self.decode.handle(LoadKV(request_id, self.ticket(request_id, epoch), epoch))

    def start(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Make all calls of a router at once."""
        self.reserve(request_id, prompt, sampling)
        self.start_prefill(request_id)
        self.start_load(request_id)

    def activate(self, request_id: str, token_ids: list[int]) -> None:
        """Let the decode core continue after these tokens, or without any after the prompt."""
        if request_id not in self._is_activated:
            self._is_activated.add(request_id)
            self.decode.handle(Activate(request_id, [token_ids] if token_ids else []))

    def abort(self, request_id: str) -> None:
        """Drop a request on both cores."""
        for node in (self.prefill, self.decode):
            if not node.is_gone:
                node.handle(Abort([request_id]))

    def run_until(self, done: Callable[[], bool], what: str) -> None:
        """Step the woken cores; when both sleep, wait for a notification."""
        end_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < end_s, f"not in {DEADLINE_S} s: {what}"
            self._bell.clear()
            stepped = [node.step_if_due() for node in (self.prefill, self.decode)]
            self._take_events()
            if not any(stepped):
                self._bell.wait(0.5)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Output tokens of every prompt, all in flight together."""
        ids = [f"r{i}" for i in range(len(prompts))]
        for request_id, prompt, params in zip(ids, prompts, sampling, strict=True):
            self.start(request_id, prompt, params)
        self.run_until(lambda: self.finished.keys() >= set(ids), "all requests finished")
        self.run_until(self.is_idle, "everything given back")
        return [self.outputs[request_id] for request_id in ids]

    def is_idle(self) -> bool:
        """Return whether every core that is there holds nothing."""
        return all(node.is_gone or node.is_idle() for node in (self.prefill, self.decode))

    def _take_events(self) -> None:
        for node in (self.prefill, self.decode):
            if not node.is_gone:
                for event in take_events(node.core).get(CLIENT, []):
                    self._take(node, event)

    def _take(self, node: Node, event: object) -> None:
        assert not isinstance(event, Refused), event
        if isinstance(event, KVLoaded) and event.failure is not None:
            self.failures[event.request_id] = event.failure
            if node is self.decode and self.activate_on_first_token:
                # No effect if prefill's token came first: then the core starts by itself.
                self.activate(event.request_id, [])
        if isinstance(event, TokenOutput):
            self._take_tokens(node, event)
        assert isinstance(event, TokenOutput | KVLoaded | Accepted)

    def _take_tokens(self, node: Node, event: TokenOutput) -> None:
        known = self.outputs[event.request_id]
        if event.index < len(known):
            assert known[event.index : event.index + len(event.token_ids)] == event.token_ids
        else:
            assert event.index == len(known), f"{node.name}: {event} after {known}"
            known.extend(event.token_ids)
        if event.finish_reason is not None:
            self.finished[event.request_id] = event.finish_reason
            if event.error is not None:
                self.errors[event.request_id] = event.error
            if node is self.prefill:
                self.decode.handle(Abort([event.request_id]))
        elif node is self.prefill and self.activate_on_first_token:
            self.activate(event.request_id, event.token_ids)
