"""HTTP client of `ttserve bench serve`: sends requests at their moments and records their chunks.

One coroutine per request, one event loop. The run ends early when the server can no longer be
reached, or when the caller's `stop` is set; what came until then is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from cluster.bench.errors import BenchError
from cluster.bench.metrics import RequestResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cluster.bench.datasets import SampleRequest

_READY_PAUSE_S = 1.0
_MOST_ERROR_CHARS = 500
_KEEP_ALIVE_S = 4.0
"""Less than servers keep idle connections (uvicorn 5 s), which may close as a request is sent."""


class Target(msgspec.Struct, frozen=True):
    """A server, and what every request has in common.

    Attributes:
        base_url: Address without a path.
        endpoint: Path of the route.
        is_chat: Whether prompts are sent as a chat's message.
        model: Model name to send.
        headers: Further headers.
        body: Further fields of each body, which replace others.
        verify_tls: Whether certificates are checked.
        request_id_prefix: First part of the requests' ids, which are sent as `x-request-id`.
    """

    base_url: str
    endpoint: str
    is_chat: bool
    model: str
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    verify_tls: bool = True
    request_id_prefix: str = "bench-"


class Run(msgspec.Struct):
    """What came of a run.

    Attributes:
        results: One per request that was sent, in the order of sending.
        duration_s: From the start to the last answer.
        num_unsent: Requests that were not sent because the run ended early.
        is_lost: Whether it ended because the server could not be reached.
        is_stopped: Whether the caller ended it.
    """

    results: list[RequestResult]
    duration_s: float
    num_unsent: int = 0
    is_lost: bool = False
    is_stopped: bool = False


async def send_all(
    target: Target,
    requests: Sequence[SampleRequest],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None,
    stop: asyncio.Event,
    on_result: Callable[[RequestResult], None],
) -> Run:
    """Send requests at their moments and wait for all answers.

    Args:
        target: Where and how.
        requests: At least one.
        arrivals_s: For each the seconds after the start, sorted.
        max_concurrency: Most requests at a time; None sets no limit.
        stop: When it is set, nothing more is sent and running requests are dropped.
        on_result: Called with each result as it comes.
    """
    _allow_many_files()
    async with _session(target) as session:
        sender = _Sender(target, session, max_concurrency, on_result)
        begin_s = time.perf_counter()
        sending = asyncio.ensure_future(sender.send_in_turn(requests, arrivals_s, begin_s))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        duration_s = time.perf_counter() - begin_s
    num_unsent = len(requests) - len(sender.results)
    return Run(sender.results, duration_s, num_unsent, sender.lost.is_set(), stop.is_set())


class _Sender:
    """The requests of one run.

    Attributes:
        results: One per request that was sent.
        lost: Set when the server cannot be reached.
    """

    def __init__(
        self,
        target: Target,
        session: aiohttp.ClientSession,
        max_concurrency: int | None,
        on_result: Callable[[RequestResult], None],
    ) -> None:
        self.results: list[RequestResult] = []
        self.lost = asyncio.Event()
        self._target = target
        self._session = session
        self._turns = (
            contextlib.nullcontext()
            if max_concurrency is None
            else asyncio.Semaphore(max_concurrency)
        )
        self._on_result = on_result

    async def send_in_turn(
        self, requests: Sequence[SampleRequest], arrivals_s: Sequence[float], begin_s: float
    ) -> None:
        """Start a task per request at its moment, and wait for all of them."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for number, (request, arrival_s) in enumerate(zip(requests, arrivals_s, strict=True)):
                await _sleep_until(begin_s + arrival_s, self.lost)
                if self.lost.is_set():
                    break
                tasks.append(asyncio.create_task(self._send(request, number)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, request: SampleRequest, number: int) -> None:
        due_s = time.perf_counter()
        async with self._turns:
            if self.lost.is_set():
                return
            result = RequestResult(prompt_len=request.prompt_len)
            result.start_s = time.perf_counter()
            result.queue_s = result.start_s - due_s
            self.results.append(result)
            try:
                await _fill(result, self._target, request, self._session, number)
            except asyncio.CancelledError:
                result.error = "the run was stopped"
                raise
        if result.is_lost:
            self.lost.set()
        self._on_result(result)


async def send_one(target: Target, request: SampleRequest) -> RequestResult:
    """Send one request outside of the measurement."""
    result = RequestResult(prompt_len=request.prompt_len)
    async with _session(target) as session:
        await _fill(result, target, request, session, 0)
    return result


async def first_model(target: Target) -> tuple[str, str]:
    """Return the name and the `root` of the server's first model.

    Raises:
        BenchError: The server does not name one.
    """
    url = f"{target.base_url}/v1/models"
    hint = "check --base-url, or give --model"
    try:
        async with _session(target) as session, session.get(url, headers=target.headers) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise BenchError(f"{url}: {reply.status} {reply.reason}; {hint}")
            card = json.loads(text)["data"][0]
            return card["id"], card.get("root") or card["id"]
    except (aiohttp.ClientError, OSError) as error:
        raise BenchError(f"{url}: {error}; {hint}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenchError(f"{url}: the answer names no model; {hint}") from None


async def wait_ready(target: Target, request: SampleRequest, timeout_s: float) -> None:
    """Send a request until one succeeds.

    Raises:
        BenchError: None has within the time.
    """
    end_s = time.monotonic() + timeout_s
    while error := (await send_one(target, request)).error:
        if time.monotonic() >= end_s:
            raise BenchError(f"{target.base_url}: not ready after {timeout_s:g} s: {error}")
        await asyncio.sleep(_READY_PAUSE_S)


def _session(target: Target) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0, ssl=target.verify_tls, keepalive_timeout=_KEEP_ALIVE_S
    )
    # A benchmark waits for as long as its server takes.
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def _sleep_until(moment_s: float, lost: asyncio.Event) -> None:
    """Sleep until a moment of `perf_counter`, or until the server is lost."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lost.wait(), left_s)


def request_body(target: Target, request: SampleRequest) -> dict[str, Any]:
    """Return the JSON body of a request.

    Raises:
        BenchError: A chat has a prompt of token ids.
    """
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not target.is_chat:
        body |= {
            "prompt": request.prompt,
            "max_tokens": request.output_len,
            "repetition_penalty": 1.0,
        }
    elif isinstance(request.prompt, str):
        body |= {
            "messages": [{"role": "user", "content": request.prompt}],
            "max_completion_tokens": request.output_len,
        }
    else:
        raise BenchError("this data set has prompts of token ids; use --backend openai")
    return body | target.body


async def _fill(
    result: RequestResult,
    target: Target,
    request: SampleRequest,
    session: aiohttp.ClientSession,
    number: int,
) -> None:
    """Send one request and record its answer; failures become `error`."""
    headers = {**target.headers, "x-request-id": f"{target.request_id_prefix}{number}"}
    body = request_body(target, request)
    begin_s = last_s = result.start_s = time.perf_counter()
    try:
        url = f"{target.base_url}{target.endpoint}"
        async with session.post(url, json=body, headers=headers) as reply:
            if reply.status != 200:
                text = (await reply.text())[:_MOST_ERROR_CHARS]
                result.error = f"{reply.status} {reply.reason}: {text}"
                return
            async for event in _events(reply.content):
                _record_usage(result, event)
                if error := event.get("error"):
                    result.error = str(error)[:_MOST_ERROR_CHARS]
                if not (choices := event.get("choices")):
                    continue
                now_s = time.perf_counter()
                if not result.ttft_s:
                    result.ttft_s = now_s - begin_s
                else:
                    result.itls_s.append(now_s - last_s)
                last_s = now_s
                result.text += _text(choices[0])
    except (aiohttp.ClientError, OSError) as error:
        result.error = f"{type(error).__name__}: {error}"
        result.is_lost = await _is_gone(target, session)
    except ValueError as error:
        result.error = f"an event is no JSON: {error}"
    finally:
        result.latency_s = last_s - begin_s
    if not result.ttft_s and not result.error:
        result.error = "the answer has no chunk with a choice"


async def _is_gone(target: Target, session: aiohttp.ClientSession) -> bool:
    """Return whether the server takes no connection; it may have closed only one."""
    try:
        async with session.head(target.base_url):
            return False
    except aiohttp.ClientConnectorError:
        return True
    except (aiohttp.ClientError, OSError):
        return False


def _allow_many_files() -> None:
    """Raise the limit of open files, which bounds the connections, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events, up to `[DONE]`; comments are skipped."""
    pending = b""
    async for piece in stream.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def _record_usage(result: RequestResult, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        result.output_len = usage.get("completion_tokens") or 0
        result.prompt_len = usage.get("prompt_tokens") or result.prompt_len


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a choice of a completion or a chat."""
    delta = choice.get("delta") or {}
    return str(delta.get("reasoning_content") or delta.get("content") or choice.get("text") or "")
