"""The HTTP application: OpenAI routes over a `Backend`, and the mapping from errors to HTTP.

Owner: the ingress's event loop owns every open response; this module keeps no state between
requests. It validates a request before it calls the backend, and cancels it there as soon as the
client disconnects.

An error before the first byte is a JSON body with its status. An error after it is one
`data: {"error": …}` event, then the stream ends without `data: [DONE]`: a client that sees
`[DONE]` may trust the answer to be whole.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import secrets
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.config.schema import LEAST_ONGOING_REQUESTS
from cluster.edge.answers import error_response, json_response
from cluster.edge.beam_search import run_beam_search
from cluster.edge.explain import ROUTE_HEADER, engine_request_id
from cluster.edge.fair_scheduler import SLICE_CHARS, Job, Priority
from cluster.edge.families.table import TOOL_FORMATS
from cluster.edge.gate import RequestGate
from cluster.edge.headers import (
    admission_fields,
    cache_salt,
    encoding_share,
    is_enabled,
    require_json,
)
from cluster.edge.heavy_work import HeavyWork
from cluster.edge.message_output import PROMPT_END_TOKENS, message_output
from cluster.edge.openai_fields import bad_field, shown
from cluster.edge.openai_limits import BodyLimits, prompt_too_long
from cluster.edge.openai_requests import (
    ChatPrompt,
    ParsedRequest,
    bad_words_cost,
    beam_search_params,
    build_request,
    check_grammar,
    check_vocabulary,
    echoed_text,
    encode_bad_words,
    encode_prompt,
    encode_steps,
    encoding_cost,
    parse_body,
    parse_chat_completion,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
    recall_grammar,
    resolve_model,
    response_spec,
    truncate_prompt,
)
from cluster.edge.openai_responses import (
    ChatShape,
    ChunkWriter,
    CompletionShape,
    model_body,
    whole_body,
)
from cluster.edge.resume import LAST_EVENT_ID, ResumableChunks, resume_request
from cluster.edge.route_table import ROUTES
from cluster.edge.sse import ClientGoneError, EventStream, run_until_disconnect
from cluster.errors import (
    BadRequestError,
    InternalError,
    NotFoundError,
    PayloadTooLargeError,
    ServingError,
)
from replicas.errors import InvalidRequestError
from replicas.grammar_checks import GrammarChecker, special_ids_for_checks
from replicas.messages import PAUSE_MODES
from replicas.text_pieces import NoCutError
from replicas.tokenizer import TooManyTokensError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cluster.config.schema import AdmissionConfig, IngressConfig
    from cluster.edge.families.parser import OutputParser
    from cluster.edge.message_output import MessageOutput
    from cluster.edge.openai import Emit, ModelCard, Usage
    from cluster.edge.openai_requests import Prompt
    from cluster.edge.openai_responses import Shape
    from cluster.edge.resume import StreamPosition
    from cluster.edge.route_table import RouteSpec
    from cluster.edge.slots import SlotsView
    from cluster.edge.structured_outputs import Grammar
    from cluster.edge.transfers import TransfersView
    from replicas.beam_search import BeamSearchParams
    from replicas.messages import EngineRequest, PauseMode
    from replicas.output_processor import OutputDelta
    from replicas.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_INLINE_COST = 4096
"""Largest text, in characters or tokens, that is encoded or decoded on the event loop: 3 ms."""
MAX_ANSWERED_TOKENS = 2**18
"""Most token ids in an answer of /tokenize."""
_NUM_THREADS = 2
_MAX_REQUEST_ID_CHARS = 128
_NOT_VISIBLE = re.compile(r"[^\x21-\x7e]")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_CLOSED_REQUEST = 499


class Backend(Protocol):
    """Interface of the cluster behind the edge."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""

    def models(self) -> Sequence[ModelCard]:
        """Return the models that requests may name, the default one first."""

    async def generate(
        self, request: EngineRequest, emit: Emit, known: StreamPosition | None = None
    ) -> Usage:
        """Run a request.

        It is cancelled when the client disconnects. It must then abort the request and free its
        slot and blocks.

        Args:
            request: A validated request.
            emit: Called with each delta; the last one of each choice has its finish reason.
            known: Position of a client that resumes a stream of one choice. The backend checks that
                the rerun gives the same tokens, and emits deltas of one token each, so that they
                are the same in every run. None: deltas of any size.

        Returns:
            The token counts of the whole request, once every choice has ended.

        Raises:
            ServingError: The request cannot run, or failed midway.
        """

    def is_ready(self) -> tuple[bool, str]:
        """Return whether new requests can be served, and the problem if there is any, else ""."""

    async def metrics_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""

    async def transfers(self) -> TransfersView:
        """Return the running KV transfers of all replicas."""

    async def probe(self) -> dict[str, bool]:
        """Return for each replica whether it ended a step within the timeout."""

    async def slots(self) -> SlotsView:
        """Return this ingress's view of all slots."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> dict[str, bool]:
        """Pause all engines; return for each replica whether nothing runs there.

        Args:
            mode: What becomes of running requests.
            clear_cache: Whether to forget cached blocks then.
        """

    async def resume(self) -> dict[str, bool]:
        """End the pause of all engines; return for each replica whether it has answered."""

    async def is_paused(self) -> dict[str, bool]:
        """Return for each replica whether it is known to be paused."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> dict[str, bool]:
        """Forget cached blocks; return for each replica whether no request keeps KV from before."""

    async def routes(self, request_id: str) -> bytes | None:
        """Return the routes of the requests with a client's id: a `RoutesView` as JSON.

        Returns:
            None if no such request is known.

        Raises:
            SaturatedError: Too many ids are being looked up.
        """

    def route_header(self, request: EngineRequest) -> str:
        """Return the short form of a request's route, for a header."""


def create_app(
    backend: Backend,
    ingress: IngressConfig,
    *,
    version: str,
    admission: AdmissionConfig | None = None,
) -> Starlette:
    """Build the ASGI app, to be wrapped in `cluster.edge.client_guard`.

    Args:
        backend: Backend that runs the requests.
        ingress: Limits, and optional details of answers.
        version: Answer of /version.
        admission: Headers of tenants and objectives; None: no header counts.
    """
    routes = _RouteHandlers(backend, ingress, version, admission)
    gate = RequestGate(
        ingress.max_ongoing_requests or LEAST_ONGOING_REQUESTS, ingress.allowed_hosts
    )
    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "completions": routes.completions,
        "chat_completions": routes.chat_completions,
        "models": routes.models,
        "model": routes.model,
        "tokenize": routes.tokenize,
        "detokenize": routes.detokenize,
        "health": routes.health,
        "health_generate": routes.health_generate,
        "live": routes.live,
        "metrics": routes.metrics,
        "kv": routes.kv,
        "slots": routes.slots,
        "pause": routes.pause,
        "resume": routes.resume,
        "is_paused": routes.is_paused,
        "reset_prefix_cache": routes.reset_prefix_cache,
        "route": routes.route,
        "version": routes.version,
    }
    return _EdgeApplication(
        routes=[
            Route(spec.path, _GatedHandler(handlers[spec.name], spec, gate), methods=[spec.method])
            for spec in ROUTES
        ]
    )


class _EdgeApplication(Starlette):
    """Starlette without its error middlewares, which would inspect each chunk of a stream."""

    def build_middleware_stack(self) -> ASGIApp:
        return _RequestBoundary(self.router)


class _GatedHandler:
    """A handler as an ASGI app that passes the request gate first.

    `Route` would catch the errors of a plain function; `_RequestBoundary` answers them instead.
    """

    def __init__(
        self, handle: Callable[[Request], Awaitable[Response]], spec: RouteSpec, gate: RequestGate
    ) -> None:
        self._handle = handle
        self._spec = spec
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        self._gate.check(self._spec, request.headers)
        with self._gate.count_open(self._spec):
            response = await self._handle(request)
            await response(scope, receive, send)


class _RouteHandlers:
    """Handlers of all routes; each validates its request, calls the backend, and answers."""

    def __init__(
        self,
        backend: Backend,
        ingress: IngressConfig,
        version: str,
        admission: AdmissionConfig | None,
    ) -> None:
        self._backend = backend
        self._version = version
        self._max_body_bytes = ingress.max_body_bytes
        self._request_timeout_s = ingress.request_timeout_s
        self._stream_keep_alive_s = ingress.stream_keep_alive_s
        self._admission = admission
        self._prompt_tokens_details = ingress.prompt_tokens_details
        self._has_route_header = ingress.route_header
        self._heavy_work = HeavyWork(_NUM_THREADS)
        # A thread of its own, because it waits for the checker's child.
        self._grammar_work = HeavyWork(1)
        special_tokens = backend.tokenizer.special_token_texts
        self._grammar_checker = GrammarChecker(special_tokens)
        self._special_ids_for_checks = special_ids_for_checks(special_tokens)
        self._completion_shape = CompletionShape(backend.tokenizer)
        self._chat_shape = ChatShape(backend.tokenizer)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._completion_shape, parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, self._chat_shape, parse_chat_completion)

    async def _generate(
        self,
        http_request: Request,
        shape: Shape,
        parse: Callable[[Mapping[str, Any]], ParsedRequest],
    ) -> Response:
        parsed = parse(await self._parse_body(http_request))
        card = resolve_model(parsed.values.get("model"), self._backend.models())
        request_id: str = http_request.scope["request_id"]
        output = self._message_output(parsed, card)
        await self._check_grammar(parsed.grammar, http_request)
        if output is not None:
            grammar = output.grammar(parsed.grammar, self._special_ids_for_checks)
            await self._check_grammar(grammar, http_request)
        parsed = await self._encode_bad_words(_with_history(parsed, card), http_request)
        prompt_ids = await self._encode_within(card, parsed, http_request)
        new_parser = None
        if output is not None:
            parsed, new_parser = self._prepare_output(output, parsed, prompt_ids)
        request = build_request(
            parsed,
            prompt_ids,
            card,
            vocab_size=self._backend.tokenizer.vocab_size,
            request_id=engine_request_id(request_id, uuid.uuid4().hex),
            seed=secrets.randbits(63),
        )
        beams = beam_search_params(
            parsed, request.sampling, card, self._backend.tokenizer.vocab_size
        )
        claimed = admission_fields(http_request.headers, self._admission)
        request = msgspec.structs.replace(request, timeout_s=self._request_timeout_s, **claimed)
        salt = cache_salt(request.tenant, request.cache_salt, self._admission)
        request = msgspec.structs.replace(request, cache_salt=salt)
        spec = response_spec(
            parsed,
            card.id,
            request_id=request_id,
            created=_unix_time_s(),
            prompt_tokens_details=self._prompt_tokens_details,
            echo=await self._echoed_text(parsed, prompt_ids, http_request),
        )
        spec = dataclasses.replace(spec, new_parser=new_parser)
        # Free the text, which may be as large as the body, while the request waits and runs.
        del parsed
        is_explained = self._has_route_header and is_enabled(http_request.headers, ROUTE_HEADER)

        def more_headers() -> list[tuple[bytes, bytes]]:
            if not is_explained:
                return []
            return [(ROUTE_HEADER.encode(), self._backend.route_header(request).encode())]

        if spec.stream:
            generate = functools.partial(self._backend.generate, request)
            chunks: ChunkWriter | ResumableChunks = ChunkWriter(shape, request, spec)
            last_event_id = http_request.headers.get(LAST_EVENT_ID)
            if last_event_id is not None:
                request, position = resume_request(request, last_event_id)
                chunks = ResumableChunks(ChunkWriter(shape, request, spec), request, position)
                generate = functools.partial(self._backend.generate, request, known=position)
            return EventStream(
                generate,
                chunks,
                _serving_error,
                timeout_s=request.timeout_s,
                keep_alive_s=self._stream_keep_alive_s,
                more_headers=more_headers,
            )
        deltas: list[OutputDelta] = []

        async def emit(delta: OutputDelta) -> None:
            deltas.append(delta)

        generating = (
            self._backend.generate(request, emit)
            if beams is None
            else self._search(request, beams, card, emit)
        )
        usage = await run_until_disconnect(http_request.receive, generating, request.timeout_s)
        response = json_response(whole_body(shape, request, spec, deltas, usage))
        response.raw_headers += more_headers()
        return response

    def _message_output(self, parsed: ParsedRequest, card: ModelCard) -> MessageOutput | None:
        """Return the formats of a chat's output; None if all of it is content."""
        if not isinstance(parsed.prompt, ChatPrompt):
            return None
        return message_output(parsed.tool_use, card, parsed.grammar)

    def _prepare_output(
        self, output: MessageOutput, parsed: ParsedRequest, prompt_ids: list[int]
    ) -> tuple[ParsedRequest, Callable[[], OutputParser]]:
        """Return a request with the grammar of its output, and what makes parsers of that."""
        tokenizer = self._backend.tokenizer
        special_ids = tokenizer.special_token_ids
        prompt_end = tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        grammar = output.grammar(parsed.grammar, special_ids, prompt_end)
        hidden = special_ids if parsed.values.get("skip_special_tokens", True) else {}
        parser = output.parser(hidden, prompt_end)
        return dataclasses.replace(parsed, grammar=grammar, is_parsed=True), parser

    async def _search(
        self, request: EngineRequest, params: BeamSearchParams, card: ModelCard, emit: Emit
    ) -> Usage:
        generate, tokenizer = self._backend.generate, self._backend.tokenizer
        return await run_beam_search(generate, request, params, tokenizer, card.max_model_len, emit)

    async def models(self, request: Request) -> Response:
        del request
        cards = [model_body(card) for card in self._backend.models()]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        card = resolve_model(request.path_params["model_id"], self._backend.models())
        return json_response(model_body(card))

    async def tokenize(self, request: Request) -> Response:
        parsed = parse_tokenize(await self._parse_body(request))
        card = resolve_model(parsed.model, self._backend.models())
        ids = await self._encode(parsed.prompt, MAX_ANSWERED_TOKENS, Priority.OTHER, request)
        strings = None
        if parsed.return_token_strs:
            spell = functools.partial(self._backend.tokenizer.token_strings, ids)
            strings = await self._run_text_job(spell, len(ids), request)
        body = {"count": len(ids), "max_model_len": card.max_model_len}
        return json_response({**body, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        model, ids = parse_detokenize(await self._parse_body(request))
        resolve_model(model, self._backend.models())
        tokenizer = self._backend.tokenizer
        check_vocabulary(ids, tokenizer.vocab_size, "tokens")
        decode = functools.partial(tokenizer.decode, ids, skip_special_tokens=False)
        return json_response({"prompt": await self._run_text_job(decode, len(ids), request)})

    async def health(self, request: Request) -> Response:
        del request
        is_ready, reason = self._backend.is_ready()
        if is_ready:
            return json_response({"status": "degraded", "reason": reason}) if reason else Response()
        return json_response({"status": "not ready", "reason": reason}, 503)

    async def health_generate(self, request: Request) -> Response:
        """Check every replica by waiting for a step of it; the name is SGLang's."""
        del request
        steps = await self._backend.probe()
        status = "degraded" if any(steps.values()) else "not ready"
        silent = [replica for replica, has_stepped in steps.items() if not has_stepped]
        if steps and not silent:
            return Response()
        return json_response(
            {"status": status, "silent": silent}, 200 if any(steps.values()) else 503
        )

    async def live(self, request: Request) -> Response:
        del request
        return Response()  # an answer proves that the event loop runs

    async def metrics(self, request: Request) -> Response:
        del request
        return Response(await self._backend.metrics_text(), media_type=_METRICS_TYPE)

    async def kv(self, request: Request) -> Response:
        del request
        return json_response(msgspec.to_builtins(await self._backend.transfers()))

    async def slots(self, request: Request) -> Response:
        del request
        return json_response(msgspec.to_builtins(await self._backend.slots()))

    async def pause(self, request: Request) -> Response:
        """Pause all engines. Source of these four: vLLM's routes of the same names."""
        require_json(request.headers)
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise bad_field("mode", f"must be one of {', '.join(PAUSE_MODES)}; got {shown(mode)}")
        clear_cache = _flag(request, "clear_cache", default=True)
        done = await self._backend.pause(cast("PauseMode", mode), clear_cache=clear_cache)
        return _all_done("paused", done)

    async def resume(self, request: Request) -> Response:
        require_json(request.headers)
        return _all_done("resumed", await self._backend.resume())

    async def is_paused(self, request: Request) -> Response:
        del request
        paused = await self._backend.is_paused()
        return json_response({"is_paused": bool(paused) and all(paused.values())})

    async def reset_prefix_cache(self, request: Request) -> Response:
        require_json(request.headers)
        running = _flag(request, "reset_running_requests", default=False)
        done = await self._backend.reset_prefix_cache(reset_running_requests=running)
        return _all_done("reset", done)

    async def route(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        found = await self._backend.routes(request_id)
        if found is None:
            raise NotFoundError(
                f"this ingress has no record of request {request_id!r}; with several ingresses, "
                "ask again"
            )
        return Response(found, media_type="application/json")

    async def version(self, request: Request) -> Response:
        del request
        return json_response({"version": self._version})

    async def _parse_body(self, request: Request) -> dict[str, Any]:
        require_json(request.headers)
        raw = await self._read_body(request)
        return parse_body(
            raw, BodyLimits.of_models(self._backend.models(), self._backend.tokenizer)
        )

    async def _encode_within(
        self, card: ModelCard, parsed: ParsedRequest, request: Request
    ) -> list[int]:
        most = None if parsed.is_truncated else card.max_model_len
        try:
            ids = await self._encode(parsed.prompt, most, Priority.PROMPT, request)
        except TooManyTokensError as error:
            raise prompt_too_long(
                error.num_tokens,
                card.max_model_len,
                parsed.prompt_param,
                is_whole=error.is_whole,
            ) from error
        except NoCutError as error:
            raise BadRequestError(str(error), param=parsed.prompt_param) from error
        return truncate_prompt(parsed, ids, card.max_model_len)

    async def _encode(
        self, prompt: Prompt, max_tokens: int | None, priority: Priority, request: Request
    ) -> list[int]:
        cost = encoding_cost(prompt)
        if cost <= MAX_INLINE_COST:
            return encode_prompt(prompt, self._backend.tokenizer, max_tokens)
        steps = encode_steps(prompt, self._backend.tokenizer, max_tokens)
        return await self._heavy_work.run(self._text_job(priority, cost, request), steps)

    async def _echoed_text(self, parsed: ParsedRequest, ids: list[int], request: Request) -> str:
        text = echoed_text(parsed)
        if text is not None:
            return text
        decode = functools.partial(self._backend.tokenizer.decode, ids, skip_special_tokens=False)
        return await self._run_text_job(decode, len(ids), request)

    async def _check_grammar(self, grammar: Grammar | None, request: Request) -> None:
        """Refuse a request whose grammar does not compile, before any work for it."""
        if grammar is None or recall_grammar(grammar, self._grammar_checker):
            return
        once = (check_grammar(grammar, self._grammar_checker) for _ in range(1))
        cost = grammar.num_chars
        job = self._text_job(Priority.OTHER, cost, request, slice_chars=max(cost, 1))
        await self._grammar_work.run(job, once)

    async def _encode_bad_words(self, parsed: ParsedRequest, request: Request) -> ParsedRequest:
        if "bad_words" not in parsed.values:
            return parsed
        encode = functools.partial(encode_bad_words, parsed, self._backend.tokenizer)
        return await self._run_text_job(encode, bad_words_cost(parsed), request)

    async def _run_text_job(self, work: Callable[[], T], cost: int, request: Request) -> T:
        """Run short work on the event loop, and long work, which would block it, in a thread."""
        if cost <= MAX_INLINE_COST:
            return work()
        once = (work() for _ in range(1))
        job = self._text_job(Priority.OTHER, cost, request, slice_chars=cost)
        return await self._heavy_work.run(job, once)

    def _text_job(
        self, priority: Priority, cost: int, request: Request, slice_chars: int = SLICE_CHARS
    ) -> Job:
        address = request.client.host if request.client else ""
        source, weight = encoding_share(request.headers, address, self._admission)
        return Job(priority, source, cost, weight, slice_chars)

    async def _read_body(self, request: Request) -> bytes:
        """Read the body, up to the limit.

        Raises:
            PayloadTooLargeError: The body's declared or actual size exceeds the limit.
        """
        limit = self._max_body_bytes
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise PayloadTooLargeError(limit)
        chunks = []
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise PayloadTooLargeError(limit)
            chunks.append(chunk)
        return b"".join(chunks)


class _RequestBoundary:
    """Outermost layer: gives each request an id, echoes it, and answers every error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = _request_id(scope)
        is_started = False

        def send_named(message: Message) -> Awaitable[None]:
            nonlocal is_started
            if not is_started:  # the first message has the headers
                is_started = True
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            return send(message)

        try:
            await self._app(scope, receive, send_named)
        except (ClientGoneError, ClientDisconnect):
            logger.info("request %s: the client disconnected; aborted", request_id)
            if not is_started:  # for proxies and access logs
                await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send_named)
        except Exception as error:
            if is_started:
                raise
            await _error_response_of(error, scope)(scope, receive, send_named)


def _request_id(scope: Scope) -> str:
    """Return the client's x-request-id, made safe for headers and logs, or a new id."""
    given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"").decode("latin-1")
    return _NOT_VISIBLE.sub("", given)[:_MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex


def _serving_error(error: Exception, request_id: str) -> ServingError:
    """Map an exception to the error that the client sees."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, InvalidRequestError):
        return BadRequestError(str(error), param=error.param)
    logger.error("request %s failed with an internal error", request_id, exc_info=error)
    return InternalError(f"internal error; see the server's log for request {request_id}")


def _error_response_of(error: Exception, scope: Scope) -> Response:
    """Return the response of an error; Starlette's own 404 and 405 get the same form as others."""
    if not isinstance(error, HTTPException):
        return error_response(_serving_error(error, scope["request_id"]))
    message = f"{scope['method']} {Request(scope).url.path}: {error.detail}"
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    response = json_response(body, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _flag(request: Request, name: str, *, default: bool) -> bool:
    """Return a boolean of the query.

    Raises:
        BadRequestError: It is neither true nor false.
    """
    value = request.query_params.get(name, str(default)).lower()
    if value not in {"true", "false", "1", "0"}:
        raise bad_field(name, f"must be true or false, got {shown(value)}")
    return value in {"true", "1"}


def _all_done(status: str, done: Mapping[str, bool]) -> Response:
    """Return the answer to an order to all replicas: 503 with the names of those that failed."""
    left = [replica for replica, is_done in done.items() if not is_done]
    if done and not left:
        return json_response({"status": status})
    return json_response({"status": f"not {status}", "replicas": left}, 503)


def _with_history(parsed: ParsedRequest, card: ModelCard) -> ParsedRequest:
    """Return a request whose messages are as the chat template of the model's family takes them."""
    prompt = parsed.prompt
    if not isinstance(prompt, ChatPrompt) or card.tool_call_parser is None:
        return parsed
    family = TOOL_FORMATS[card.tool_call_parser]
    messages = [family.rendered_message(message) for message in prompt.messages]
    return dataclasses.replace(parsed, prompt=dataclasses.replace(prompt, messages=messages))


def _unix_time_s() -> int:
    """Return the wall clock's time, for `created` in responses."""
    return time.time_ns() // 10**9
