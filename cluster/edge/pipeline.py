"""The way of a generating request from its body to its answer, the same for every API.

Cheap checks come first, so that a bad request costs little: the body's fields, the model, the
grammar, then the prompt's tokens. The request runs in the backend, and its answer is streamed or
sent whole. It is cancelled in the backend as soon as the client disconnects.

Owner: this module keeps no state between requests.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cluster.edge.answers import json_response, to_serving_error
from cluster.edge.beam_search import run_beam_search
from cluster.edge.explain import ROUTE_HEADER, engine_request_id
from cluster.edge.fair_scheduler import Priority
from cluster.edge.families.table import TOOL_FORMATS
from cluster.edge.field_names import naming_fields
from cluster.edge.headers import admission_fields, is_enabled
from cluster.edge.json_bodies import read_json_body
from cluster.edge.message_output import PROMPT_END_TOKENS, message_output
from cluster.edge.openai_limits import BodyLimits, prompt_too_long
from cluster.edge.openai_requests import (
    ChatPrompt,
    bad_words_cost,
    beam_search_params,
    build_request,
    echoed_text,
    encode_bad_words,
    resolve_model,
    response_spec,
    truncate_prompt,
)
from cluster.edge.resume import LAST_EVENT_ID, ResumableChunks, resume_request
from cluster.edge.sse import EventStream, run_until_disconnect
from cluster.edge.tenants import cache_salt, tenant_of
from cluster.errors import BadRequestError
from replicas.text_pieces import NoCutError
from replicas.tokenizer import TooManyTokensError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from cluster.config.schema import AdmissionConfig, IngressConfig
    from cluster.edge.api import Api
    from cluster.edge.backend import Backend
    from cluster.edge.families.parser import OutputParser
    from cluster.edge.message_output import MessageOutput
    from cluster.edge.openai import Emit, ModelCard, ResponseSpec, Usage
    from cluster.edge.openai_requests import ParsedRequest
    from cluster.edge.text_jobs import TextJobs
    from replicas.beam_search import BeamSearchParams
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta


@dataclass(frozen=True, slots=True)
class _ReadyRequest:
    """A request that can run; the body and its texts are gone.

    Attributes:
        request: The engines' request.
        spec: Options of its answer.
        card: The model that it names.
        beams: Parameters of the beam search that it asks for; None: tokens are drawn.
    """

    request: EngineRequest
    spec: ResponseSpec
    card: ModelCard
    beams: BeamSearchParams | None


class Pipeline:
    """Turns the HTTP requests of generating APIs into answers.

    Args:
        backend: Backend that runs the requests.
        ingress: Limits, and optional details of answers.
        admission: Headers of objectives; None: no header counts.
        jobs: Tokenizer and grammar work.
        has_tenants: Whether requests have tenants, whose caches are apart unless they share them.
    """

    def __init__(
        self,
        backend: Backend,
        ingress: IngressConfig,
        admission: AdmissionConfig | None,
        jobs: TextJobs,
        *,
        has_tenants: bool,
    ) -> None:
        self._backend = backend
        self._admission = admission
        self._jobs = jobs
        self._is_cache_shared = ingress.share_prefix_cache or not has_tenants
        self._ingress = ingress

    async def respond(self, http_request: Request, api: Api) -> Response:
        """Return the answer of a request; a streamed one runs when it is sent.

        Raises:
            ServingError: The request is wrong, cannot run, or failed.
            ClientGoneError: The client disconnected before the answer.
        """
        ready = await self._read_request(http_request, api)
        if ready.spec.stream:
            return self._stream(ready, http_request, api)
        return await self._whole(ready, http_request, api)

    async def _read_request(self, http_request: Request, api: Api) -> _ReadyRequest:
        limits = BodyLimits.of_models(self._backend.models(), self._backend.tokenizer)
        body = await read_json_body(http_request, api.fields, limits, self._ingress)
        parsed = api.parse(body, tenant_of(http_request.scope).name)
        with naming_fields(parsed.field_names):
            return await self._prepare(parsed, http_request)

    async def _prepare(self, parsed: ParsedRequest, http_request: Request) -> _ReadyRequest:
        """Encode a parsed request, and check what depends on its tokens.

        Raises:
            ServingError: It cannot run; `param` is a path in the parsed request.
        """
        tenant = tenant_of(http_request.scope)
        fields = admission_fields(http_request.headers, tenant, self._admission)
        card = resolve_model(parsed.values.get("model"), tenant.visible(self._backend.models()))
        request_id: str = http_request.scope["request_id"]
        output = _message_output(parsed, card)
        await self._jobs.check_grammar(parsed.grammar, http_request)
        if output is not None:
            grammar = await self._jobs.message_grammar(output, parsed.grammar, None, http_request)
            await self._jobs.check_grammar(grammar, http_request)
        parsed = await self._encode_bad_words(with_history(parsed, card), http_request)
        prompt_ids = await self._encode_within(card, parsed, http_request)
        new_parser = None
        if output is not None:
            parsed, new_parser = await self._prepare_output(
                output, parsed, prompt_ids, http_request
            )
        vocab_size = self._backend.tokenizer.vocab_size
        request = build_request(
            parsed,
            prompt_ids,
            card,
            vocab_size=vocab_size,
            request_id=engine_request_id(request_id, uuid.uuid4().hex),
            seed=secrets.randbits(63),
        )
        beams = beam_search_params(parsed, request.sampling, card, vocab_size)
        request = msgspec.structs.replace(
            request,
            timeout_s=self._ingress.request_timeout_s,
            cache_salt=cache_salt(tenant.name, request.cache_salt, is_shared=self._is_cache_shared),
            **fields,
        )
        spec = response_spec(
            parsed,
            card.id,
            request_id=request_id,
            created=_unix_time_s(),
            prompt_tokens_details=self._ingress.prompt_tokens_details,
            echo=await self._echoed_text(parsed, prompt_ids, http_request),
        )
        spec = dataclasses.replace(spec, new_parser=new_parser)
        return _ReadyRequest(request, spec, card, beams)

    def _stream(self, ready: _ReadyRequest, http_request: Request, api: Api) -> Response:
        request, spec = ready.request, ready.spec
        generate = functools.partial(self._backend.generate, request)
        last_event_id = http_request.headers.get(LAST_EVENT_ID)
        if last_event_id is None:
            writer = api.stream(request, spec)
        else:
            if not api.is_resumable:
                text = f"streams of {http_request.url.path} cannot be resumed; leave the header"
                raise BadRequestError(f"{text} {LAST_EVENT_ID} out", param=LAST_EVENT_ID)
            request, position = resume_request(request, last_event_id)
            writer = ResumableChunks(api.stream(request, spec), request, position)
            generate = functools.partial(self._backend.generate, request, known=position)
        return EventStream(
            generate,
            writer,
            to_serving_error,
            timeout_s=request.timeout_s,
            keep_alive_s=self._ingress.stream_keep_alive_s,
            more_headers=self._more_headers(request, http_request),
        )

    async def _whole(self, ready: _ReadyRequest, http_request: Request, api: Api) -> Response:
        request = ready.request
        deltas: list[OutputDelta] = []

        async def emit(delta: OutputDelta) -> None:
            deltas.append(delta)

        generating = (
            self._backend.generate(request, emit)
            if ready.beams is None
            else self._search(request, ready.beams, ready.card, emit)
        )
        usage = await run_until_disconnect(http_request.receive, generating, request.timeout_s)
        response = json_response(api.whole(request, ready.spec, deltas, usage))
        response.raw_headers += self._more_headers(request, http_request)()
        return response

    def _more_headers(
        self, request: EngineRequest, http_request: Request
    ) -> Callable[[], list[tuple[bytes, bytes]]]:
        """Return what makes the headers that show a request's route, once it has one."""
        if not (self._ingress.route_header and is_enabled(http_request.headers, ROUTE_HEADER)):
            return list

        def more_headers() -> list[tuple[bytes, bytes]]:
            return [(ROUTE_HEADER.encode(), self._backend.route_header(request).encode())]

        return more_headers

    async def _prepare_output(
        self,
        output: MessageOutput,
        parsed: ParsedRequest,
        prompt_ids: list[int],
        http_request: Request,
    ) -> tuple[ParsedRequest, Callable[[], OutputParser]]:
        """Return a request with the grammar of its output, and what makes parsers of that."""
        tokenizer = self._backend.tokenizer
        special_ids = tokenizer.special_token_ids
        prompt_end = tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        grammar = await self._jobs.message_grammar(output, parsed.grammar, prompt_end, http_request)
        hidden = special_ids if parsed.values.get("skip_special_tokens", True) else {}
        parser = output.parser(hidden, prompt_end)
        return dataclasses.replace(parsed, grammar=grammar, is_parsed=True), parser

    async def _search(
        self, request: EngineRequest, params: BeamSearchParams, card: ModelCard, emit: Emit
    ) -> Usage:
        generate, tokenizer = self._backend.generate, self._backend.tokenizer
        return await run_beam_search(generate, request, params, tokenizer, card.max_model_len, emit)

    async def _encode_within(
        self, card: ModelCard, parsed: ParsedRequest, request: Request
    ) -> list[int]:
        most = None if parsed.is_truncated else card.max_model_len
        try:
            ids = await self._jobs.encode(parsed.prompt, most, Priority.PROMPT, request)
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

    async def _echoed_text(self, parsed: ParsedRequest, ids: list[int], request: Request) -> str:
        text = echoed_text(parsed)
        if text is not None:
            return text
        decode = functools.partial(self._backend.tokenizer.decode, ids, skip_special_tokens=False)
        return await self._jobs.run(decode, len(ids), request)

    async def _encode_bad_words(self, parsed: ParsedRequest, request: Request) -> ParsedRequest:
        if "bad_words" not in parsed.values:
            return parsed
        encode = functools.partial(encode_bad_words, parsed, self._backend.tokenizer)
        return await self._jobs.run(encode, bad_words_cost(parsed), request)


def with_history(parsed: ParsedRequest, card: ModelCard) -> ParsedRequest:
    """Return a request whose messages are as the chat template of the model's family takes them."""
    prompt = parsed.prompt
    if not isinstance(prompt, ChatPrompt) or card.tool_call_parser is None:
        return parsed
    family = TOOL_FORMATS[card.tool_call_parser]
    messages = [family.rendered_message(message) for message in prompt.messages]
    return dataclasses.replace(parsed, prompt=dataclasses.replace(prompt, messages=messages))


def _message_output(parsed: ParsedRequest, card: ModelCard) -> MessageOutput | None:
    """Return the formats of a chat's output; None if all of it is content."""
    if not isinstance(parsed.prompt, ChatPrompt):
        return None
    return message_output(parsed.tool_use, card, parsed.grammar)


def _unix_time_s() -> int:
    """Return the wall clock's time, for `created` in responses."""
    return time.time_ns() // 10**9
