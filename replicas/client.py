"""Synchronous clients of an engine: in-process, and over ZMQ to an engine process.

`InprocClient` steps the engine core on the caller's thread (debugging, tests). `SyncMPClient`
starts and owns an engine process (offline `LLM`). `replicas.async_client` has the asynchronous
client.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from kv_transfer.io_threads import new_context
from replicas.codec import decode_engine_frame, encode
from replicas.columns import ColumnReader
from replicas.config import LogprobsMode, SchedulingPolicy
from replicas.dealer import (
    CONNECT_S,
    HELLO_S,
    NOT_GREETED,
    SILENCE_S,
    connect_dealers,
    too_large,
)
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.errors import ConfigError, EngineDeadError, EngineError, RequestRefusedError
from replicas.generators.targets import with_registered_generator
from replicas.launch import start_engine
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AddRequest,
    EngineMetrics,
    Hello,
    NotGreeted,
    Refused,
    TokenOutput,
    Utility,
    UtilityResult,
    WorkerDescription,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replicas.config import EngineConfig
    from replicas.messages import EngineEvent, EngineRequest, WireEvent


_MAX_IDS_PER_ABORT = 128
"""Keeps each abort message below the size limit of an engine's input socket."""
_LOOK_MS = 250
"""How often a blocked client checks whether the engine process is alive."""


def to_rpc_results(answer: object) -> list[WorkerDescription]:
    """Return the results of `collective_rpc` in the type that the workers gave."""
    return msgspec.convert(answer, list[WorkerDescription])


class SyncEngineClient(Protocol):
    """Interface between `LLMEngine` and a client: requests in, token outputs out."""

    @property
    def description(self) -> EngineFacts:
        """The engine's limits."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefusedError: The engine cannot ever run it.
        """

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests. They produce no further output."""

    def stop_choice(self, request_id: str, choice: int) -> None:
        """Drop one choice of a request, which a stop string has ended; the others continue."""

    def get_outputs(self) -> list[TokenOutput]:
        """Return the outputs of at least one step; block while requests run.

        Raises:
            EngineDeadError: The engine is gone.
        """

    def metrics(self) -> EngineMetrics:
        """Return every counter of the engine."""

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached blocks; see `Scheduler.reset_prefix_cache`."""

    def collective_rpc(self, method: str) -> list[WorkerDescription]:
        """Call a method of every worker; see `replicas.engine.core.WORKER_METHODS`.

        Raises:
            EngineError: It is not one of those that may be called.
        """

    def shutdown(self) -> None:
        """End the engine. Idempotent."""


class EngineFacts(Protocol):
    """The part of an engine's description that a front end needs."""

    @property
    def model(self) -> str:
        """Folder of the model."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_logprobs(self) -> int:
        """Most log probabilities for a token; -1 is no limit."""

    @property
    def scheduling_policy(self) -> SchedulingPolicy:
        """Whether requests run in order of arrival or of priority."""

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """Whether it reports log probabilities or logits."""


class _InprocFacts(msgspec.Struct, frozen=True):
    model: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    scheduling_policy: SchedulingPolicy
    logprobs_mode: LogprobsMode


class InprocClient:
    """Engine client that runs the core on the caller's thread: each `get_outputs` is one step.

    Args:
        config: The engine's configuration.
        progress: Called with (stage, fraction done) while the engine starts.

    Raises:
        ConfigError: The configuration needs an engine process: a third-party generator class on a
            mesh (own environment), or niceness.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
    ) -> None:
        config = with_registered_generator(config)
        # Third-party classes, and ttnn, read environment variables that only `start_engine` sets.
        if config.mesh is not None and not config.uses_native_generator:
            raise ConfigError(
                f"generator {config.generator!r} on a mesh needs an environment of its own, or it "
                "writes files beside the model; set multiprocess=True"
            )
        if config.niceness:
            raise ConfigError(
                f"niceness {config.niceness} applies to an engine process; set "
                "multiprocess=True, or remove niceness"
            )
        self.core = EngineCore(config, UniProcExecutor(config, progress=progress))
        self._columns = ColumnReader()
        # Outputs that were read but not yet returned by `get_outputs`.
        self._kept: list[TokenOutput] = []
        self.description: EngineFacts = _InprocFacts(
            config.model,
            self.core.max_model_len,
            self.core.facts.vocab_size,
            self.core.config.max_logprobs,
            self.core.config.scheduling_policy,
            self.core.config.logprobs_mode,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.core.handle(b"", AddRequest(request), time.monotonic())
        self._keep_outputs()

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests. They produce no further output."""
        self.core.handle(b"", Abort(request_ids), time.monotonic())
        for request_id in request_ids:
            self._columns.drop_request(request_id)

    def stop_choice(self, request_id: str, choice: int) -> None:
        """Drop one choice of a request, which a stop string has ended; the others continue."""
        self.core.handle(b"", Abort([request_id], "stop", [choice]), time.monotonic())
        self._columns.drop_choice(request_id, choice)

    def get_outputs(self) -> list[TokenOutput]:
        """Return the outputs of at least one step; block while requests run."""
        self.core.step(time.monotonic())
        self._keep_outputs()
        outputs, self._kept = self._kept, []
        return outputs

    def metrics(self) -> EngineMetrics:
        """Return every counter of the engine."""
        return self.core.metrics(time.monotonic())

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached blocks; see `Scheduler.reset_prefix_cache`."""
        return bool(self._call("reset_prefix_cache", reset_running_requests))

    def collective_rpc(self, method: str) -> list[WorkerDescription]:
        """Call a method of every worker; see `SyncEngineClient.collective_rpc`."""
        return to_rpc_results(self._call("collective_rpc", method))

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self.core.shutdown()

    def _call(self, method: str, *args: object) -> object:
        self.core.handle(b"", Utility(0, method, [*args]), time.monotonic())
        while (result := self._take_result()) is None:
            # The answer follows the step under way.
            self.core.step(time.monotonic())
        if result.error is not None:
            raise EngineError(result.error)
        return result.result

    def _take_result(self) -> UtilityResult | None:
        """Keep the core's outputs, and return the answer to a call if it is there."""
        result: UtilityResult | None = None
        for event in self._columns.read(self.core.take_events().get(b"", [])):
            if isinstance(event, UtilityResult):
                result = event
            elif isinstance(event, TokenOutput):
                self._kept.append(event)
        return result

    def _keep_outputs(self) -> None:
        """Collect the core's events; keep every token output even when a refusal is raised."""
        refused: Refused | None = None
        for event in self._columns.read(self.core.take_events().get(b"", [])):
            if isinstance(event, Refused):
                refused = event
            elif isinstance(event, TokenOutput):
                self._kept.append(event)
        if refused is not None:
            raise RequestRefusedError(refused.reason, refused.message, refused.request_id)


class SyncMPClient:
    """Engine client that owns an engine process; a reader thread queues the outputs.

    Args:
        config: The engine's configuration.
        env: The engine's environment; None inherits.
        progress: Called with (stage, fraction done) while the engine starts.
    """

    def __init__(
        self,
        config: EngineConfig,
        env: Mapping[str, str] | None = None,
        progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
    ) -> None:
        self._handle = start_engine(config, env=env, progress=progress)
        self.description: EngineFacts = self._handle.description
        self._context = new_context()
        self._frames: queue.SimpleQueue[list[WireEvent] | EngineDeadError] = queue.SimpleQueue()
        self._columns = ColumnReader()
        # Events of frames already taken from the queue but not yet returned.
        self._kept: deque[EngineEvent] = deque()
        # Requests that the engine has neither accepted nor refused, without aborted ones.
        self._unanswered: set[str] = set()
        self._call_ids = itertools.count(1)
        self._input, output = connect_dealers(
            self._context, secrets.token_bytes(8), self._handle.description, self._handle.keys
        )
        self._input.set(zmq.SNDTIMEO, _LOOK_MS)
        self._greeted = threading.Event()
        self._reader = threading.Thread(
            target=self._read, args=(output,), name="engine-outputs", daemon=True
        )
        self._reader.start()
        self._greet()

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; a refusal is raised by the next `get_outputs`."""
        self._unanswered.add(request.request_id)
        raw = encode(AddRequest(request))
        refusal = too_large(self._handle.description, request.request_id, len(raw))
        if refusal is None:
            self._send(raw)
        else:
            self._frames.put([refusal])

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests. They produce no further output."""
        self._unanswered.difference_update(request_ids)
        for request_id in request_ids:
            self._columns.drop_request(request_id)
        for start in range(0, len(request_ids), _MAX_IDS_PER_ABORT):
            some = request_ids[start : start + _MAX_IDS_PER_ABORT]
            self._send(encode(Abort(some)))

    def stop_choice(self, request_id: str, choice: int) -> None:
        """Drop one choice of a request, which a stop string has ended; the others continue."""
        self._columns.drop_choice(request_id, choice)
        self._send(encode(Abort([request_id], "stop", [choice])))

    def get_outputs(self) -> list[TokenOutput]:
        """Return the outputs of at least one step; block while requests run.

        Raises:
            EngineDeadError: The engine is gone.
            RequestRefusedError: The engine refused a request.
        """
        outputs: list[TokenOutput] = []
        while not outputs or not self._frames.empty():
            if not self._kept:
                self._kept.extend(self._next_events())
            while self._kept:
                event = self._kept.popleft()
                if isinstance(event, TokenOutput):
                    outputs.append(event)
                elif isinstance(event, Accepted):
                    if event.request_id not in self._unanswered:
                        self._columns.drop_request(event.request_id)
                    self._unanswered.discard(event.request_id)
                # Refusals of aborted requests are dropped.
                elif isinstance(event, Refused) and event.request_id in self._unanswered:
                    if outputs:
                        # Raising now would lose tokens of other requests: raise on the next call.
                        self._kept.appendleft(event)
                        return outputs
                    self._unanswered.discard(event.request_id)
                    raise RequestRefusedError(event.reason, event.message, event.request_id)
        return outputs

    def metrics(self) -> EngineMetrics:
        """Return every counter of the engine; keep outputs that arrive in the meantime."""
        return msgspec.convert(self._call("metrics"), EngineMetrics)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached blocks; see `Scheduler.reset_prefix_cache`."""
        return bool(self._call("reset_prefix_cache", reset_running_requests))

    def collective_rpc(self, method: str) -> list[WorkerDescription]:
        """Call a method of every worker; see `SyncEngineClient.collective_rpc`."""
        return to_rpc_results(self._call("collective_rpc", method))

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        if self._context.closed:
            return
        self._handle.stop()
        self._reader.join(timeout=2.0)
        self._input.close(linger=0)
        self._context.term()

    def _send(self, raw: bytes) -> None:
        """Queue a message; wait for room as long as the reader thread still hears the engine."""
        while self._reader.is_alive():
            with contextlib.suppress(zmq.Again):
                self._input.send(raw)
                return

    def _greet(self) -> None:
        deadline_s = time.monotonic() + CONNECT_S
        while not self._greeted.wait(HELLO_S):
            self._send(encode(Hello(PROTOCOL_VERSION)))
            if time.monotonic() > deadline_s or not self._handle.is_alive:
                raise EngineDeadError(
                    "the engine started, but then ended or did not answer within "
                    f"{CONNECT_S:g} s; see its log"
                )

    def _call(self, method: str, *args: object) -> object:
        call_id = next(self._call_ids)
        self._send(encode(Utility(call_id, method, [*args])))
        result: UtilityResult | None = None
        while result is None:
            for event in self._next_events():
                if isinstance(event, UtilityResult) and event.call_id == call_id:
                    result = event
                else:
                    self._kept.append(event)
        if result.error is not None:
            raise EngineError(result.error)
        return result.result

    def _next_events(self) -> list[EngineEvent]:
        """Wait for the next frame that has events and return them."""
        events = self._frames.get()
        if isinstance(events, EngineDeadError):
            self._frames.put(events)
            raise events
        return self._columns.read(events)

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        """Queue frames until the engine ends or falls silent. Runs on the reader thread."""
        heard_s = time.monotonic()
        try:
            while self._handle.is_alive and time.monotonic() - heard_s < SILENCE_S:
                if not socket.poll(_LOOK_MS):
                    continue
                heard_s = time.monotonic()
                frame = decode_engine_frame(socket.recv())
                if frame.events and isinstance(frame.events[0], NotGreeted):
                    self._frames.put(EngineDeadError(NOT_GREETED))
                    return
                self._greeted.set()
                if frame.events:
                    self._frames.put(frame.events)
        finally:
            socket.close(linger=0)
            # Also after an unreadable frame: otherwise `get_outputs` would block forever.
            silence = EngineDeadError("the engine has ended or is frozen; see its log")
            self._frames.put(self._handle.failure or silence)
