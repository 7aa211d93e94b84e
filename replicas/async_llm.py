"""AsyncLLM: one engine process behind an asyncio interface; the single-engine online face."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING

import msgspec

from replicas.async_client import AsyncMPClient
from replicas.errors import (
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    RequestRefusedError,
)
from replicas.launch import start_engine
from replicas.llm_engine import RequestOutput, grammar_checker, to_engine_input
from replicas.messages import AddRequest, Refused, TokenOutput, check_priority, checked_request
from replicas.output_processor import OutputProcessor
from replicas.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from replicas.config import EngineConfig
    from replicas.launch import EngineHandle
    from replicas.llm_engine import Prompt
    from replicas.messages import EngineMetrics, EngineRequest, PauseMode, WorkerDescription
    from replicas.sampling_params import SamplingParams
    from replicas.streams import EngineStream


_ABORTED = TokenOutput("", 0, [], "abort")
"""Last event of a stream that `AsyncLLM.abort` has closed."""


class AsyncLLM:
    """Engine process with its client; create with `AsyncLLM.start`, end with `shutdown`."""

    def __init__(self, handle: EngineHandle, client: AsyncMPClient, tokenizer: Tokenizer) -> None:
        self._handle = handle
        self._client = client
        self._tokenizer = tokenizer
        self._counter = itertools.count()
        self._grammar_checker = grammar_checker(tokenizer)
        self._streams: dict[str, EngineStream] = {}

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncLLM:
        """Start the engine and wait until it is ready.

        Raises:
            EngineStartError: The engine could not start; says why.
        """
        tokenizer = Tokenizer.from_folder(config.model)
        handle = await asyncio.to_thread(start_engine, config)
        client = AsyncMPClient(handle.keys)
        try:
            await client.connect(handle.description)
        except BaseException:
            handle.stop()
            raise
        return cls(handle, client, tokenizer)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yield the same growing output after every step that extends it.

        Leaving the iteration early drops the request in the engine.

        Args:
            prompt: Text or token ids.
            sampling_params: Sampling parameters.
            request_id: Name for `abort`, unique among live requests; None makes one up.
            priority: Lower ones run first, with `scheduling_policy: priority`.

        Raises:
            InvalidRequestError: The prompt or a parameter can never work.
            RequestRefusedError: The engine refused the request.
            EngineDeadError: The engine died.
        """
        request = await self._checked_request(prompt, sampling_params, request_id, priority)
        description, request_id = self._handle.description, request.request_id
        eos_token_ids = frozenset(description.eos_token_ids)
        processor = OutputProcessor(self._tokenizer, request, eos_token_ids, is_streamed=False)
        output = RequestOutput.of(request, prompt, processor)
        stream = self._client.open_stream(
            description.incarnation, request.request_id, AddRequest(request)
        )
        self._streams[request_id] = stream
        try:
            while not output.finished:
                event = await stream.get()
                if event is _ABORTED:
                    output.abort()
                    yield output
                    return
                if isinstance(event, Refused):
                    raise RequestRefusedError(event.reason, event.message, event.request_id)
                if not isinstance(event, TokenOutput):
                    continue
                if event.finish_reason == "error":
                    raise RequestFailedError(event.error or "the engine gave no reason")
                delta = processor.take(event)
                if delta is not None:
                    output.apply(delta, processor)
                    if delta.finish_reason != event.finish_reason and not output.finished:
                        stream.stop_choice(event.choice)
                    yield output
        except EngineDeadError as error:
            # The connection error says only that it broke; the handle knows why the engine ended.
            raise self._handle.failure or error from None
        finally:
            del self._streams[request_id]
            stream.close(abort=True, reason="stop" if output.finished else "abort")

    async def _checked_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None,
        priority: int,
    ) -> EngineRequest:
        description = self._handle.description
        token_ids, sampling_params = to_engine_input(
            prompt, sampling_params, self._tokenizer, description
        )
        spec = sampling_params.structured_outputs
        if spec is not None and not self._grammar_checker.recall(spec):
            await asyncio.to_thread(self._grammar_checker.check, spec)
        if sampling_params.seed is None:
            sampling_params = msgspec.structs.replace(sampling_params, seed=secrets.randbits(63))
        request_id = f"request-{next(self._counter)}" if request_id is None else request_id
        if request_id in self._streams:
            raise InvalidRequestError("request_id", f"request {request_id!r} is running already")
        request = checked_request(request_id, token_ids, sampling_params, priority=priority)
        check_priority(priority, description.scheduling_policy)
        return request

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests: each ends with what it has, for the reason "abort".

        Unknown ids, as those of requests that have ended, are ignored.
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.close(abort=True)
                stream.put(_ABORTED)

    async def get_metrics(self) -> EngineMetrics:
        """Return every counter of the engine.

        Raises:
            EngineDeadError: The engine is gone.
        """
        return await self._client.metrics(self._handle.description.incarnation)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached blocks.

        Args:
            reset_running_requests: Whether running requests lose their blocks, too, and compute
                their tokens again.

        Returns:
            Whether no request keeps KV from before; always True without the option.

        Raises:
            EngineDeadError: The engine is gone.
        """
        return await self._client.reset_prefix_cache(
            self._handle.description.incarnation, reset_running_requests=reset_running_requests
        )

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Pause the engine; return once nothing runs. New requests are queued.

        Source: vLLM v1/engine/async_llm.py (names and defaults).

        Args:
            mode: "abort" ends all requests for the reason "abort", "wait" lets running ones finish,
                and "keep" freezes them until `resume_generation`.
            clear_cache: Whether to drop all cached blocks then; frozen requests keep theirs.

        Raises:
            EngineError: The engine drains, or the pause was ended meanwhile.
            EngineDeadError: The engine is gone.
        """
        incarnation = self._handle.description.incarnation
        await self._client.pause(incarnation, mode)
        if clear_cache:
            await self._client.reset_prefix_cache(incarnation)

    async def resume_generation(self) -> None:
        """End a pause; without one nothing changes.

        Raises:
            EngineDeadError: The engine is gone.
        """
        await self._client.resume(self._handle.description.incarnation)

    async def is_paused(self) -> bool:
        """Return whether the engine is paused.

        Raises:
            EngineDeadError: The engine is gone.
        """
        return await self._client.is_paused(self._handle.description.incarnation)

    async def collective_rpc(self, method: str) -> list[WorkerDescription]:
        """Call a method of every worker.

        Args:
            method: One of `replicas.engine.core.WORKER_METHODS`.

        Raises:
            EngineError: It is not one of these.
            EngineDeadError: The engine is gone.
        """
        incarnation = self._handle.description.incarnation
        return await self._client.collective_rpc(incarnation, method)

    async def shutdown(self) -> None:
        """Close the connection and end the engine."""
        self._grammar_checker.close()
        await self._client.close()
        await asyncio.to_thread(self._handle.stop)
